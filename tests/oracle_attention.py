"""What attention means, in NumPy float64: all weights at once, and the gradients from these."""

import math

import numpy as np


def slopes(heads):
    """As in the code of ALiBi's authors."""
    if math.log2(heads).is_integer():
        first = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
        return [first ** (i + 1) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


class Attention:
    """Of q (B, N, T, H), k (B, K, S, H) and v (B, K, S, E). A query at the place ``at`` sees keys j
    with at - left < j <= at + right."""

    def __init__(
        self, q, k, v, *, scale=None, bias=0.0, sink=None, alibi=False, left=None, right=None,
        bottom_right=False, queries=None, keys=None,
    ):  # fmt: skip
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        (_, n, t, h), (_, heads, s, _) = self.q.shape, self.k.shape
        self.scale, self.group = h**-0.5 if scale is None else scale, n // heads
        queries, keys = (
            size if x is None else np.clip(np.asarray(x, int).reshape(-1, 1, 1, 1), 0, size)
            for x, size in ((queries, t), (keys, s))
        )
        i, j = np.arange(t).reshape(-1, 1), np.arange(s)
        at = i + (keys - queries if bottom_right else 0)
        there = i < queries
        seen = there & (j < keys)
        if left is not None:
            seen = seen & (j > at - left)
        if right is not None:
            seen = seen & (j <= at + right)
        scores = self.scale * self.q @ self._wide(self.k).swapaxes(2, 3)
        scores = scores + np.asarray(bias, np.float64)
        if alibi:
            scores = scores + np.array(slopes(n)).reshape(n, 1, 1) * (j - at)
        self.scores = np.where(seen, scores, -np.inf)
        own = -np.inf if sink is None else np.asarray(sink, np.float64).reshape(1, n, 1, 1)
        self.sink = np.where(there, own, -np.inf)
        largest = np.maximum(self.scores.max(-1, keepdims=True, initial=-np.inf), self.sink)
        largest = np.where(np.isneginf(largest), 0, largest)
        total = np.exp(self.scores - largest).sum(-1, keepdims=True) + np.exp(self.sink - largest)
        with np.errstate(divide="ignore"):
            self.stats = largest + np.log(total)
        self.weights = _exp(self.scores, self.stats)
        self.out = self.weights @ self._wide(self.v)

    def _wide(self, x):
        """k or v for each head of q."""
        return np.repeat(x, self.group, axis=1)

    def _summed(self, x):
        b, n, s, h = x.shape
        return x.reshape(b, n // self.group, self.group, s, h).sum(2)

    def gradients(self, dout, *, out=None, stats=None, bias=(1, 1, 1, 1)):
        """By each operand; ``out`` and ``stats`` in place of its own, a bias of this shape."""
        dout = np.asarray(dout, np.float64)
        out, stats = self.out if out is None else out, self.stats if stats is None else stats
        weights = _exp(self.scores, stats)
        mean = (dout * out).sum(-1, keepdims=True)
        slope = weights * (dout @ self._wide(self.v).swapaxes(2, 3) - mean)
        axes = tuple(axis for axis in range(4) if bias[axis] == 1)
        return {
            "q": self.scale * slope @ self._wide(self.k),
            "k": self.scale * self._summed(slope.swapaxes(2, 3) @ self.q),
            "v": self._summed(weights.swapaxes(2, 3) @ dout),
            "bias": slope.sum(axes, keepdims=True),
            "sink": -(_exp(self.sink, stats) * mean).sum((0, 2, 3)),
            "scores": slope,
        }


def _exp(scores, stats):
    """Weights; 0 where a query sees nothing."""
    return np.exp(scores - np.where(np.isneginf(stats), np.inf, stats))


def _of(node, q, k, v, bias=0.0, seq_len_q=None, seq_len_kv=None, sink_token=None, **_):
    usual = ("diagonal_band_left_bound", "diagonal_band_right_bound")
    left, right = (getattr(node, bound) for bound in getattr(node, "bounds", usual))
    return Attention(
        q, k, v, scale=node.attn_scale, bias=bias, sink=sink_token, left=left, right=right,
        alibi=getattr(node, "use_alibi_mask", False), queries=seq_len_q, keys=seq_len_kv,
        bottom_right=node.diagonal_alignment == "BOTTOM_RIGHT",
    )  # fmt: skip


def sdpa(node, **arrays):
    found = _of(node, **arrays)
    return (found.out, found.stats)[: len(node.results)]


def backward(node, *, o, dO, stats, **arrays):
    shape = np.shape(arrays.get("bias", np.ones((1, 1, 1, 1))))
    found = _of(node, **arrays).gradients(dO, out=o, stats=stats, bias=shape)
    named = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias"}
    found = {port: found[name] for port, name in named.items()} | {
        "dSink_token": found["sink"].reshape(1, -1, 1, 1)
    }
    return tuple(found[port] for port in node.results)


# fp8, without its roundings inside. What one number may lose as fp8, relative: half a unit of three
# digits after the point, or two.
HALF_UNIT = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}


def second_product(spec):
    """What weights and their gradients lose as fp8 there: half a unit, which a largest value may
    well have lost whole; in the backward twice that, as its differences cancel."""
    lost = [0.0]
    for c in spec.calls:
        if c.node.method in OPERATIONS and "fp8" in c.node.method:
            unit = HALF_UNIT[spec.tensor(dict(c.inputs)["q"]).dtype]
            lost.append(2 * unit if c.node.method == "sdpa_fp8_backward" else unit)
    return max(lost)


def _amax(x):
    return np.abs(x).max().reshape(1, 1, 1, 1)


def _descaled(arrays):
    """Without what only scales."""
    ports = [port for port in ("q", "k", "v", "o", "dO") if port in arrays]
    kept = {port: x for port, x in arrays.items() if "scale" not in port}
    return kept | {port: arrays[port] * arrays[f"descale_{port}"] for port in ports}


def sdpa_fp8(node, **arrays):
    found = _of(node, **_descaled(arrays))
    out = found.out * arrays["descale_s"] * arrays["scale_s"]
    results = {"O": out * arrays["scale_o"], "Stats": found.stats}
    results |= {"Amax_S": _amax(found.weights), "Amax_O": _amax(out)}
    return tuple(results[port] for port in node.results)


def sdpa_fp8_backward(node, **arrays):
    given = _descaled(arrays)
    o, dO, stats = (given.pop(port) for port in ("o", "dO", "stats"))
    exact = _of(node, **given).gradients(dO, out=o, stats=stats)
    along = arrays["scale_dP"] * arrays["descale_dP"]
    found = {"dQ": exact["q"] * along, "dK": exact["k"] * along}
    found["dV"] = exact["v"] * arrays["scale_s"] * arrays["descale_s"]
    largest = {f"amax_{name}": _amax(x) for name, x in found.items()}
    largest["amax_dP"] = _amax(node.attn_scale * exact["scores"])
    scaled = {name: x * arrays[f"scale_{name}"] for name, x in found.items()}
    return tuple({**scaled, **largest}[port] for port in node.results)


def scales_of_blocks(scales, shape, axis, block=32):
    """The factor of each element, found byte by byte in the order that cuDNN documents."""
    b, h, *sizes = scales.shape
    rows, blocks = sizes if axis == -1 else sizes[::-1]
    flat = scales.reshape(b, h, -1)
    i, j = np.indices((rows, blocks))
    tile = (i // 128) * (blocks // 4) + j // 4
    at = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    each = np.repeat(flat[:, :, at], block, axis=-1)
    each = each if axis == -1 else np.swapaxes(each, 2, 3)
    return each[:, :, : shape[2], : shape[3]]


def _of_blocks(arrays, **axes):
    return {
        port: arrays[port] * scales_of_blocks(arrays[f"descale_{port}"], arrays[port].shape, axis)
        for port, axis in axes.items()
    }


def _lengths(arrays):
    return {port: arrays[port] for port in arrays if port.startswith("seq_len")}


def sdpa_mxfp8(node, **arrays):
    found = _of(node, **_of_blocks(arrays, q=-1, k=-1, v=-2), **_lengths(arrays))
    results = {"O": found.out, "Stats": found.stats, "Amax_O": _amax(found.out)}
    return tuple(results[port] for port in node.results)


def sdpa_mxfp8_backward(node, **arrays):
    plain = _of_blocks(arrays, q=-1, k=-1, v=-1)
    turned = _of_blocks(arrays, q_T=-2, k_T=-2, dO_T=-2)
    dO = _of_blocks(arrays, dO=-1)["dO"]
    found = _of(node, **plain, **_lengths(arrays))
    weights = _exp(found.scores, arrays["stats"])
    mean = (arrays["dO_f16"] * arrays["o_f16"]).sum(-1, keepdims=True)
    slope = node.attn_scale * weights * (dO @ found._wide(found.v).swapaxes(2, 3) - mean)
    results = {
        "dQ": slope @ found._wide(turned["k_T"]),
        "dK": found._summed(slope.swapaxes(2, 3) @ turned["q_T"]),
        "dV": found._summed(weights.swapaxes(2, 3) @ turned["dO_T"]),
    }
    results |= {f"amax_{name}": _amax(x) for name, x in results.items()}
    return tuple(results[port] for port in node.results)


OPERATIONS = {
    "sdpa": sdpa,
    "sdpa_backward": backward,
    "sdpa_fp8": sdpa_fp8,
    "sdpa_fp8_backward": sdpa_fp8_backward,
    "sdpa_mxfp8": sdpa_mxfp8,
    "sdpa_mxfp8_backward": sdpa_mxfp8_backward,
}
