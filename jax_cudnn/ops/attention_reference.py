"""Attention in jnp, some rows of queries at a time: memory is linear in their number.

Arrays are (B, H, S, D) as cuDNN's; k and v may have fewer heads, each of which serves as many
neighbouring heads of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.graph.dtypes import wide
from . import attention_extras as extras

if TYPE_CHECKING:
    from .score_mod import ScoreMod

_SCORES = 2**24  # scores that are in memory at a time, 64 MiB of float32

Arrays = Mapping[str, jax.Array]
_OF_QUERIES = "q", "q_T", "o", "o_f16", "dO", "dO_T", "dO_f16", "stats"
_OF_KEYS = "k", "k_T", "v", "dK", "dV"
OPERANDS = "score_mod_operands"
"""How the names of those arrays begin that a function of the scores reads."""


@dataclass(frozen=True)
class Band:
    """Which keys a query sees: those at positions ``j`` with ``i - left < j <= i + right``, where
    ``i`` is its own; without a bound, all on that side. ``bottom_right``: positions are counted
    from the last query and the last key, which see each other."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def at(self, i: jax.Array, more_keys: Any) -> jax.Array:
        """Positions of queries ``i`` among the keys, of which there are so many more."""
        return i + more_keys if self.bottom_right else i

    def sees(self, i: jax.Array, j: jax.Array, more_keys: Any) -> Any:
        """Whether queries at ``i`` see keys at ``j``, where so many more keys than queries are."""
        at, seen = self.at(i, more_keys), True
        if self.left is not None:
            seen &= j > at - self.left
        return seen if self.right is None else seen & (j <= at + self.right)


@dataclass(frozen=True)
class Attention:
    """One attention, without its arrays."""

    scale: float
    band: Band = Band()
    precision: Any = None
    dropout: float | None = None
    alibi: bool = False
    score_mod: ScoreMod | None = None

    def forward(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """O, and the logarithm of each row's sum of exponentials, of q, k and v, and of bias,
        seq_len_q, seq_len_kv and what else there may be, where they are given; and of first, the
        position that the first query of each example has, where that is not 0."""

        arrays = within_lengths(arrays, arrays)
        k = arrays["k"]

        def block(rows: Arrays, first: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights, total = self._softmax(rows, arrays, first)
            if self.dropout is not None:
                weights = weights * self._kept(rows, arrays, first)
            return self._product("bngst,bnte->bngse", weights, arrays["v"]), total

        o, total = _over_rows(jax.checkpoint(block), _grouped(arrays), k.shape[2])
        return _heads(o), _heads(total)

    def backward(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients by q, k, v and bias, by port, of the same operands with O, its gradient dO
        and the statistic."""
        arrays = within_lengths(arrays, arrays)
        k, v, bias = arrays["k"], arrays["v"], arrays.get("bias")

        def block(rows: Arrays, first: jax.Array) -> tuple[dict[str, jax.Array], ...]:
            scores = self._scores(rows, arrays, first)
            weights = extras.weights(scores, rows["stats"])
            grad = rows["dO"].astype(scores.dtype)
            mean = jnp.sum(grad * rows["o"].astype(scores.dtype), axis=-1, keepdims=True)
            along = self._product("bngse,bnte->bngst", rows["dO"], v)
            used = weights
            if self.dropout is not None:
                keep = self._kept(rows, arrays, first)
                along, used = along * keep, weights * keep
            slope = weights * (along - mean)
            each: dict[str, jax.Array] = {}
            summed = {"dV": self._product("bngst,bngse->bnte", used, rows["dO"])}
            if bias is not None:
                (each if bias.shape[2] > 1 else summed)["dBias"] = _summed(slope, bias.shape)
            if self.score_mod is not None:
                raw = self._products(rows, arrays)
                _, pull = jax.vjp(lambda scores: self._modified(scores, rows, first), raw)
                (slope,) = pull(slope)
            each["dQ"] = self.scale * self._product("bngst,bntd->bngsd", slope, k)
            summed["dK"] = self.scale * self._product("bngst,bngsd->bntd", slope, rows["q"])
            return each, summed

        each, summed = _over_rows(block, _grouped(arrays), k.shape[2], sums=True)
        found = within_lengths({**each, **summed}, arrays)
        found["dQ"] = _heads(found["dQ"])
        if bias is not None:
            found["dBias"] = found["dBias"].reshape(bias.shape)
        if "sink_token" in arrays:
            of = (arrays[name] for name in ("o", "dO", "stats", "sink_token"))
            found["dSink_token"] = extras.sink_gradient(*of)
        return found

    def mask(self, arrays: Arrays) -> jax.Array:
        """1 where dropout keeps a weight, else 0: (B, H, S, T)."""
        assert self.dropout is not None
        (b, h, s, _), t = arrays["q"].shape, arrays["k"].shape[2]
        return extras.kept(arrays, self.dropout, (b, h, s, t), 0)

    def _kept(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array:
        """What weights are multiplied by: 0, or one over the probability that they are kept."""
        assert self.dropout is not None
        b, n, g, s, _ = rows["q"].shape
        keep = rows.get("dropout_mask")
        if keep is None:
            keys = arrays["k"].shape[2]
            keep = extras.kept(arrays, self.dropout, (b, n * g, s, keys), first)
            keep = keep.reshape(b, n, g, s, keys)
        return keep.astype(wide(rows["q"])) / (1 - self.dropout)

    def _softmax(
        self, rows: Arrays, arrays: Arrays, first: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Weights, and the statistic; of a query that sees no key 0, and -inf."""
        scores = self._scores(rows, arrays, first)
        largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
        sink = self._sink(rows, arrays, first)
        if sink is not None:
            largest = jnp.maximum(largest, sink)
        largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
        each = jnp.exp(scores - largest)
        total = jnp.sum(each, axis=-1, keepdims=True)
        if sink is not None:
            total = total + jnp.exp(sink - largest)
        none = total == 0  # of no number neither this nor total > 0 is true
        total = jnp.where(none, 1, total)
        return each / total, jnp.where(none, -jnp.inf, largest + jnp.log(total))

    def _scores(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array:
        """Scaled scores in float32, -inf where a key is not seen."""
        scores = self._modified(self._products(rows, arrays), rows, first)
        if "bias" in rows:
            scores = scores + rows["bias"].astype(scores.dtype)
        if self.alibi:
            n, g = scores.shape[1:3]
            of_heads = extras.slopes(n * g, scores.dtype).reshape(n, g)
            i, j, queries, keys = self._positions(arrays, first, scores.shape[3])
            further = j - self.band.at(i, keys - queries)
            scores = scores + of_heads[:, :, None, None] * further.astype(scores.dtype)
        return jnp.where(self._seen(arrays, first, scores.shape[3]), scores, -jnp.inf)

    def _products(self, rows: Arrays, arrays: Arrays) -> jax.Array:
        return self.scale * self._product("bngsd,bntd->bngst", rows["q"], arrays["k"])

    def _modified(self, scores: jax.Array, rows: Arrays, first: jax.Array) -> jax.Array:
        if self.score_mod is None:
            return scores
        operands = {port: _heads(rows[port]) for port in self.score_mod.ports}
        return self.score_mod(_heads(scores), first, operands).reshape(scores.shape)

    def _seen(self, arrays: Arrays, first: jax.Array, count: int) -> jax.Array:
        """Whether a query sees a key, for ``count`` queries from ``first`` on: (B, 1, 1, S, T)."""
        i, j, queries, keys = self._positions(arrays, first, count)
        seen = (i < queries) & (j < keys) & self.band.sees(i, j, keys - queries)
        if "block_mask" in arrays:
            tiles = extras.seen_tiles(arrays["block_mask"], i[:, 0], j.size)
            of_keys = arrays["k"].shape[1]
            groups = of_keys, arrays["q"].shape[1] // of_keys
            seen &= tiles.reshape(tiles.shape[0], *groups, *tiles.shape[2:])
        return seen

    def _positions(
        self, arrays: Arrays, first: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array, Any, Any]:
        """Those of ``count`` queries from ``first`` on, (B or 1, 1, 1, S, 1), and of all keys; the
        lengths of both."""
        queries, keys = (
            _length(arrays.get(name), arrays[of].shape[2])
            for name, of in (("seq_len_q", "q"), ("seq_len_kv", "k"))
        )
        i = (first + jnp.arange(count))[:, None] + _length(arrays.get("first"), 0)
        return i, jnp.arange(arrays["k"].shape[2])[None, :], queries, keys

    def _sink(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array | None:
        """The logit that each query has beside its keys, -inf for those that are none."""
        if "sink_token" not in arrays:
            return None
        q = rows["q"]
        sink = arrays["sink_token"].astype(wide(q)).reshape(1, *q.shape[1:3], 1, 1)
        i = (first + jnp.arange(q.shape[3]))[:, None]
        there = i < _length(arrays.get("seq_len_q"), arrays["q"].shape[2])
        return jnp.where(there, sink, -jnp.inf)

    def _product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """In the arrays' own 16-bit dtype, as cuDNN does, with sums in float32."""
        a = a.astype(b.dtype) if b.dtype.itemsize == 2 else a
        return jnp.einsum(
            equation, a, b, precision=self.precision, preferred_element_type=wide(a, b)
        )


def within_lengths(arrays: Arrays, lengths: Arrays) -> dict[str, jax.Array]:
    """The arrays with zeros behind each example's lengths, and statistics of -inf: what stands
    there has weights of 0, and 0 times NaN is NaN."""
    found = dict(arrays)
    for ports, port, first in (
        (_OF_QUERIES, "seq_len_q", lengths.get("first", 0)),
        (_OF_KEYS, "seq_len_kv", 0),
    ):
        for name in ports if port in lengths else ():
            if name in arrays:
                x = arrays[name]
                there = jnp.arange(x.shape[2])[:, None] + first < lengths[port]
                found[name] = jnp.where(there, x, -jnp.inf if name == "stats" else 0)
    return found


def _length(given: jax.Array | None, whole: int) -> Any:
    return whole if given is None else given.astype(jnp.int32).reshape(-1, 1, 1, 1, 1)


def _grouped(arrays: Arrays) -> dict[str, jax.Array]:
    """Arrays with rows of queries, with the heads in groups by that of k: (B, N, G, S, ...)."""
    heads = arrays["k"].shape[1]
    found = {}
    operands = (name for name in arrays if name.startswith(OPERANDS))
    for name in ("q", "bias", "o", "dO", "stats", "dropout_mask", *operands):
        x = arrays.get(name)
        if x is not None:
            groups = (1, 1) if x.shape[1] == 1 else (heads, x.shape[1] // heads)
            found[name] = x.reshape(x.shape[0], *groups, *x.shape[2:])
    return found


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum over what was broadcast, of (B, N, G, S, T) for a bias of this shape."""
    axes = [axis for axis, size in ((0, shape[0]), (4, shape[3])) if size == 1]
    axes += [1, 2] * (shape[1] == 1) + [3] * (shape[2] == 1)
    return jnp.sum(x, axis=tuple(axes), keepdims=True)


def _over_rows(
    function: Callable[..., Any], rows: dict[str, jax.Array], keys: int, sums: bool = False
) -> Any:
    """The results of all rows of queries, some at a time; with ``sums`` the second of two is added
    up."""
    *heads, queries, _ = rows["q"].shape
    count = max(1, _SCORES // max(math.prod(heads) * keys, 1))
    if count >= queries:
        return function(rows, jnp.zeros((), jnp.int32))
    blocks = -(-queries // count)
    shared = {name: x for name, x in rows.items() if x.shape[3] == 1}  # by all queries

    def run(first: jax.Array, own: dict[str, jax.Array]) -> Any:
        return function({**shared, **own}, first)

    def cut(name: str, x: jax.Array) -> jax.Array:
        behind = [(0, blocks * count - queries if axis == 3 else 0) for axis in range(5)]
        if name.startswith(OPERANDS):  # no function meets a value that it does not know
            padded = jnp.pad(x, behind, mode="edge")
        else:
            padded = jnp.pad(x, behind, constant_values=-jnp.inf if name == "stats" else 0)
        return jnp.moveaxis(padded.reshape(*x.shape[:3], blocks, count, *x.shape[4:]), 3, 0)

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], blocks * count, *x.shape[5:])[:, :, :, :queries]

    given = (
        jnp.arange(blocks, dtype=jnp.int32) * count,
        {name: cut(name, x) for name, x in rows.items() if name not in shared},
    )
    if not sums:
        return jax.tree.map(joined, jax.lax.map(lambda x: run(*x), given))
    shapes = jax.eval_shape(lambda x: run(*x)[1], jax.tree.map(lambda x: x[0], given))

    def step(total: Any, x: Any) -> tuple[Any, Any]:
        each, part = run(*x)
        return jax.tree.map(jnp.add, total, part), each

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, each = jax.lax.scan(step, zeros, given)
    return jax.tree.map(joined, each), total
