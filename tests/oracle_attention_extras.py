"""Attention with dropout, sinks, ALiBi and masks of tiles in NumPy float64, in JAX's layout: all
weights at once, and the gradients from these."""

import math

import numpy as np

TILE = 128


def slopes(heads):
    """As in the code of ALiBi's authors."""
    if math.log2(heads).is_integer():
        first = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
        return [first ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


class Attention:
    """Of q (B, T, N, H), k (B, S, K, H) and v (B, S, K, E); ``keep`` is (B, N, T, S), 0 or 1."""

    def __init__(
        self, q, k, v, *, bias=None, sink=None, alibi=False, tiles=None, keep=None, rate=0.0,
        causal=False, window=None, queries=None, keys=None,
    ):  # fmt: skip
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        (b, t, n, h), (_, s, heads, _) = self.q.shape, self.k.shape
        self.scale, self.group = h**-0.5, n // heads
        self.wide = [np.repeat(x, self.group, axis=2) for x in (self.k, self.v)]
        scores = self.scale * np.einsum("btnh,bsnh->bnts", self.q, self.wide[0])
        if bias is not None:
            scores = scores + np.asarray(bias, np.float64)
        distance = np.arange(s)[None, :] - np.arange(t)[:, None]
        if alibi:
            scores = scores + np.array(slopes(n)).reshape(n, 1, 1) * distance
        seen = np.ones((b, n, t, s), bool)
        if causal:
            seen &= distance <= 0
        if window is not None:
            seen &= (distance >= -window[0]) & (distance <= window[1])
        if tiles is not None:
            whole = np.repeat(np.repeat(np.asarray(tiles), TILE, axis=2), TILE, axis=3)
            seen &= whole[:, :, :t, :s]
        there = np.ones((b, 1, t, 1), bool)
        if queries is not None:
            there = (np.arange(t) < np.asarray(queries)[:, None]).reshape(b, 1, t, 1)
            seen &= there
        if keys is not None:
            seen &= (np.arange(s) < np.asarray(keys)[:, None]).reshape(b, 1, 1, s)
        terms = np.where(seen, np.exp(scores), 0)
        self.of_sink = np.zeros((b, n, t, 1))
        if sink is not None:
            self.of_sink = there * np.exp(np.asarray(sink, np.float64)).reshape(1, n, 1, 1)
        total = terms.sum(-1, keepdims=True) + self.of_sink
        self.total = np.where(total > 0, total, 1)
        self.weights = terms / self.total
        with np.errstate(divide="ignore"):
            self.residual = np.moveaxis(np.log(total)[..., 0], 1, 2)
        self.factor = np.ones(scores.shape) if keep is None else np.asarray(keep) / (1 - rate)
        self.out = np.einsum("bnts,bsne->btne", self.weights * self.factor, self.wide[1])

    def gradients(self, along, bias_shape=None):
        """Of ``sum(out * along)`` by q, k, v, sink and bias."""
        along = np.asarray(along, np.float64)
        per_weight = np.einsum("btne,bsne->bnts", along, self.wide[1]) * self.factor
        mean = (self.weights * per_weight).sum(-1, keepdims=True)
        slope = self.weights * (per_weight - mean)

        def grouped(x):
            b, s, n, e = x.shape
            return x.reshape(b, s, n // self.group, self.group, e).sum(3)

        found = {
            "q": self.scale * np.einsum("bnts,bsnh->btnh", slope, self.wide[0]),
            "k": self.scale * grouped(np.einsum("bnts,btnh->bsnh", slope, self.q)),
            "v": grouped(np.einsum("bnts,btne->bsne", self.weights * self.factor, along)),
            "sink": -(self.of_sink / self.total * mean).sum((0, 2, 3)),
        }
        if bias_shape is not None:
            axes = tuple(i for i, size in enumerate(bias_shape) if size == 1)
            found["bias"] = slope.sum(axes, keepdims=True)
        return found
