"""Attention in jnp, some rows of queries at a time: memory is linear in the number of queries.

Arrays are (B, H, S, D) as in cuDNN; k and v may have fewer heads, each of which serves equally many
consecutive heads of q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import wide_dtype
from ..._core.graph.reference import may_part
from ..._core.primitive import align_varying
from . import extras as extras

if TYPE_CHECKING:
    from .score_mod.value import ScoreMod

_SCORES = 2**24  # scores in memory at a time, 64 MiB of float32

Arrays = Mapping[str, jax.Array]
_HIDING = "seq_len_q", "seq_len_kv", "block_mask"
_OF_QUERIES = "q", "q_T", "o", "o_f16", "dO", "dO_T", "dO_f16", "stats"
_OF_KEYS = "k", "k_T", "v", "dK", "dV"
OPERANDS = "score_mod_operands"
"""The prefix of the names of score_mod's operands."""


def bound(keys: Any) -> int | None:
    """A window's bound. From 2**30 on it is None: positions are 32-bit integers."""
    return int(keys) if keys < 2**30 else None


@dataclass(frozen=True)
class Band:
    """Which keys a query at position ``i`` sees: those at positions ``j`` with
    ``i - left < j <= i + right``; None means no bound. ``bottom_right``: positions are aligned at
    the last query and the last key instead of the first ones."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def at(self, i: Any, more_keys: Any) -> Any:
        """Positions of queries ``i`` among the keys; ``more_keys`` is keys minus queries."""
        return i + more_keys if self.bottom_right else i

    def sees(self, i: jax.Array, j: jax.Array, more_keys: Any) -> Any:
        """Whether queries at ``i`` see keys at ``j``; ``more_keys`` is keys minus queries."""
        at, seen = self.at(i, more_keys), True
        if self.left is not None:
            seen &= j > at - self.left
        return seen if self.right is None else seen & (j <= at + self.right)

    def flops(self, q: Shape, v: Shape, backward: bool) -> int:
        """Operations of attention with q (B, H, Sq, D) and v (B, N, Skv, E), without lengths: two
        products of the scores in the band, and in the backward pass five, of which three have D."""
        (b, h, s, d), (*_, t, e) = q, v
        sizes = 3 * d + 2 * e if backward else d + e
        return 2 * b * h * self._pairs(s, t) * sizes

    def _pairs(self, queries: int, keys: int) -> int:
        """How many pairs of a query and a key see each other."""
        at = self.at(np.arange(queries), keys - queries)
        first = 0 if self.left is None else np.clip(at - self.left + 1, 0, keys)
        last = keys if self.right is None else np.clip(at + self.right + 1, 0, keys)
        return int(np.maximum(np.broadcast_to(last - first, at.shape), 0).sum())


@dataclass(frozen=True)
class Attention:
    """One attention, without its arrays."""

    scale: float
    band: Band = Band()
    precision: Any = None
    dropout: float | None = None
    alibi: bool = False
    score_mod: ScoreMod | None = None
    guarded: bool = True
    """Whether a query may see no key, or keys with scores of -inf only."""

    def forward(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """O and the log-sum-exp of each row, from q, k, v and the optional operands (bias,
        seq_len_q, seq_len_kv, ...); ``first`` is the position of each batch element's first query,
        by default 0."""
        arrays = _alike(within_lengths(arrays, arrays))

        def block(rows: Arrays, first: jax.Array) -> tuple[jax.Array, ...]:
            return self._of_rows(rows, arrays, first)

        found = _over_rows(jax.checkpoint(block), _grouped(arrays), arrays["k"].shape[2])
        return tuple(map(_heads, found))

    def _of_rows(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> tuple[jax.Array, ...]:
        weights, total = self._softmax(rows, arrays, first)
        if self.dropout is not None:
            weights = weights * self._kept(rows, arrays, first)
        return self._product("bngst,bnte->bngse", weights, arrays["v"]), total

    def _weights_of(self, weights: jax.Array, arrays: Arrays) -> jax.Array:
        """The weights as they enter the product for dV."""
        return weights

    def _slope_of(
        self, slope: jax.Array, arrays: Arrays
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """The scores' gradient as it enters the products for dQ and dK, the factor of both, and
        further results for each query."""
        return slope, self.scale, {}

    def backward(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients of q, k, v and bias, by port, from the same operands, O, its gradient dO
        and the statistic. q, k and dO may be rounded differently for products over tokens (q_T, k_T
        and dO_T), and O and dO for their product (o_f16 and dO_f16)."""
        given, arrays = arrays, _alike(within_lengths(arrays, arrays))
        k, v, bias = arrays["k"], arrays["v"], arrays.get("bias")

        def block(rows: Arrays, first: jax.Array) -> tuple[dict[str, jax.Array], ...]:
            scores = self._scores(rows, arrays, first)
            weights = extras.weights(scores, rows["stats"])
            grad, o = (
                rows[wide if wide in rows else port].astype(scores.dtype)
                for port, wide in (("dO", "dO_f16"), ("o", "o_f16"))
            )
            mean = jnp.sum(grad * o, axis=-1, keepdims=True)
            along = self._product("bngse,bnte->bngst", rows["dO"], v)
            used = weights
            if self.dropout is not None:
                keep = self._kept(rows, arrays, first)
                along, used = along * keep, weights * keep
            slope = weights * (along - mean)
            each: dict[str, jax.Array] = {}
            used, across = self._weights_of(used, arrays), rows.get("dO_T", rows["dO"])
            summed = {"dV": self._product("bngst,bngse->bnte", used, across)}
            if bias is not None:
                (summed if bias.shape[2] == 1 else each)["dBias"] = _summed(slope, bias.shape)
            if self.score_mod is not None:
                raw = self._products(rows, arrays)
                _, pull = jax.vjp(lambda scores: self._modified(scores, rows, first), raw)
                (slope,) = pull(slope)
            slope, factor, further = self._slope_of(slope, arrays)
            across = arrays.get("k_T", k), rows.get("q_T", rows["q"])
            each["dQ"] = factor * self._product("bngst,bntd->bngsd", slope, across[0])
            summed["dK"] = factor * self._product("bngst,bngsd->bntd", slope, across[1])
            return each | further, summed

        each, summed = _over_rows(block, _grouped(arrays), k.shape[2], sums=True)
        found = within_lengths({**each, **summed}, arrays)
        found["dQ"] = _heads(found["dQ"])
        for name, port in (("dK", "k"), ("dV", "v")):
            (b, heads), more = given[port].shape[:2], k.shape[1] // given[port].shape[1]
            if more > 1:
                found[name] = found[name].reshape(b, heads, more, *k.shape[2:3], -1).sum(2)
        if bias is not None:
            found["dBias"] = found["dBias"].reshape(bias.shape)
        if "sink_token" in arrays:
            of = (arrays[name] for name in ("o", "dO", "stats", "sink_token"))
            found["dSink_token"] = extras.sink_gradient(*of)
        return found

    def mask(self, arrays: Arrays, scores: Shape) -> jax.Array:
        """1 where dropout keeps a weight, else 0: (B, H, S, T), the shape of the scores."""
        if "dropout_mask" in arrays:
            return arrays["dropout_mask"]
        assert self.dropout is not None
        return extras.kept(arrays, self.dropout, scores, 0)

    def _kept(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array:
        """The factors of the weights: 0, or one over the probability of keeping a weight."""
        assert self.dropout is not None
        b, n, g, s, _ = rows["q"].shape
        keep = rows.get("dropout_mask")
        if keep is None:
            keys, first = arrays["k"].shape[2], first + jnp.reshape(_first(arrays), ())
            keep = extras.kept(arrays, self.dropout, (b, n * g, s, keys), first)
            keep = keep.reshape(b, n, g, s, keys)
        return keep.astype(wide_dtype(rows["q"])) / (1 - self.dropout)

    def extremes(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """The largest score of each row, and the sum of ``exp(score - largest)``, a sink included;
        -inf and 0 for a query that sees no key."""
        arrays = within_lengths(arrays, arrays)

        def block(rows: Arrays, first: jax.Array) -> tuple[jax.Array, ...]:
            scores, largest, sink = self._largest(rows, arrays, first)
            least = jnp.where(jnp.isneginf(largest), 0, largest)
            total = jnp.sum(jnp.exp(scores - least), axis=-1, keepdims=True)
            return largest, total if sink is None else total + jnp.exp(sink - least)

        found = _over_rows(jax.checkpoint(block), _grouped(arrays), arrays["k"].shape[2])
        return tuple(map(_heads, found))

    def _largest(
        self, rows: Arrays, arrays: Arrays, first: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The scores, the largest of each row and its sink, and the sink."""
        scores = self._scores(rows, arrays, first)
        largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
        sink = self._sink(rows, arrays, first)
        return scores, largest if sink is None else jnp.maximum(largest, sink), sink

    def _softmax(
        self, rows: Arrays, arrays: Arrays, first: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Weights and the statistic; 0 and -inf for a query that sees no key."""
        scores, largest, sink = self._largest(rows, arrays, first)
        if self.guarded:  # XLA makes one kernel of a softmax only without this
            largest = jnp.where(jnp.isneginf(largest), 0, largest)
        largest = jax.lax.stop_gradient(largest)
        each = jnp.exp(scores - largest)
        total = jnp.sum(each, axis=-1, keepdims=True)
        if sink is not None:
            total = total + jnp.exp(sink - largest)
        none = self.guarded and total == 0  # false for NaN, as is total > 0
        total = jnp.where(none, 1, total)
        return each / total, jnp.where(none, -jnp.inf, largest + jnp.log(total))

    def _scores(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array:
        """Scaled scores in float32, -inf for hidden keys."""
        scores = self._modified(self._products(rows, arrays), rows, first)
        if "bias" in rows:
            scores = scores + rows["bias"].astype(scores.dtype)
        if self.alibi:
            n, g = scores.shape[1:3]
            of_heads = extras.slopes(n * g, scores.dtype).reshape(n, g)
            i, j, queries, keys = self._positions(arrays, first, scores.shape[3])
            further = j - self.band.at(i, keys - queries)
            scores = scores + of_heads[:, :, None, None] * further.astype(scores.dtype)
        if self.band == Band() and not {*_HIDING} & {*arrays}:
            return scores
        return jnp.where(self._seen(arrays, first, scores.shape[3]), scores, -jnp.inf)

    def sees_some(self, arrays: Arrays) -> bool:
        """Whether each query sees a key with a finite score, if scores are finite."""
        queries, keys = (arrays[port].shape[2] for port in ("q", "k"))
        hidden = {*_HIDING, "bias", "sink_token"} & {*arrays} or self.score_mod is not None
        if hidden or not isinstance(keys, int) or not isinstance(queries, int) or not keys:
            return False
        first = keys - queries if self.band.bottom_right else 0
        right = self.band.right
        return self.band.left is None and (right is None or first + right >= 0)

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
        """The positions of ``count`` queries from ``first`` on, (B or 1, 1, 1, S, 1), and of all
        keys, and the lengths of both."""
        queries, keys = (
            _length(arrays.get(name), arrays[of].shape[2])
            for name, of in (("seq_len_q", "q"), ("seq_len_kv", "k"))
        )
        i = (first + jnp.arange(count))[:, None] + _first(arrays)
        return i, jnp.arange(arrays["k"].shape[2])[None, :], queries, keys

    def _sink(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> jax.Array | None:
        """The sink logit of each query, -inf for queries after the length."""
        if "sink_token" not in arrays:
            return None
        q = rows["q"]
        sink = arrays["sink_token"].astype(wide_dtype(q)).reshape(1, *q.shape[1:3], 1, 1)
        i = (first + jnp.arange(q.shape[3]))[:, None] + _first(arrays)
        there = i < _length(arrays.get("seq_len_q"), arrays["q"].shape[2])
        return jnp.where(there, sink, -jnp.inf)

    def _product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """A product in the arrays' 16-bit dtype, as in cuDNN, with sums in float32."""
        a = a.astype(b.dtype) if b.dtype.itemsize == 2 else a
        return jnp.einsum(
            equation, a, b, precision=self.precision, preferred_element_type=wide_dtype(a, b)
        )


def within_lengths(arrays: Arrays, lengths: Arrays) -> dict[str, jax.Array]:
    """The arrays with zeros after each batch element's lengths, and statistics of -inf: weights are
    0 there, and 0 times NaN is NaN."""
    found = dict(arrays)
    of_queries = _OF_QUERIES, "seq_len_q", lengths.get("first", 0)
    for ports, port, first in (of_queries, (_OF_KEYS, "seq_len_kv", 0)):
        for name in ports if port in lengths else ():
            if name in arrays:
                x = arrays[name]
                there = jnp.arange(x.shape[2])[:, None] + first < lengths[port]
                found[name] = jnp.where(there, x, -jnp.inf if name == "stats" else 0)
    return found


def _alike(arrays: Arrays) -> Arrays:
    """The arrays with as many heads of v as of k, each repeated."""
    k, v = (arrays[port].shape[1] for port in ("k", "v"))
    if k == v:
        return arrays
    own = {port: arrays[port] for port in ("k", "k_T", "v") if port in arrays}
    count = math.lcm(k, v)
    return {**arrays, **{p: jnp.repeat(x, count // x.shape[1], 1) for p, x in own.items()}}


def _length(given: jax.Array | None, whole: int) -> Any:
    return whole if given is None else given.astype(jnp.int32).reshape(-1, 1, 1, 1, 1)


def _first(arrays: Arrays) -> Any:
    return _length(arrays.get("first"), 0)


def _grouped(arrays: Arrays) -> dict[str, jax.Array]:
    """Arrays with rows of queries, with heads grouped by the heads of k: (B, N, G, S, ...)."""
    heads = arrays["k"].shape[1]
    found = {}
    operands = (name for name in arrays if name.startswith(OPERANDS))
    for name in (*_OF_QUERIES, "bias", "dropout_mask", *operands):
        x = arrays.get(name)
        if x is not None:
            groups = (1, 1) if x.shape[1] == 1 else (heads, x.shape[1] // heads)
            found[name] = x.reshape(x.shape[0], *groups, *x.shape[2:])
    return found


def _heads(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The sum of (B, N, G, S, T) over the broadcast dimensions of a bias of this shape."""
    sizes = *shape[:2], *shape[1:]  # of a bias along each dimension of x
    return jnp.sum(x, axis=tuple(i for i, n in enumerate(sizes) if n == 1), keepdims=True)


def _over_rows(
    function: Callable[..., Any], rows: dict[str, jax.Array], keys: int, sums: bool = False
) -> Any:
    """The results of all rows of queries, some at a time; with ``sums`` the second of two results
    is summed."""
    *heads, queries, _ = rows["q"].shape
    sizes = *heads, queries, keys
    # Symbolic sizes have no best block.
    known = may_part() and all(isinstance(size, int) for size in sizes)
    count = max(1, _SCORES // max(math.prod(heads) * keys, 1)) if known else queries
    if count >= queries:
        return function(rows, jnp.zeros((), jnp.int32))
    blocks = -(-queries // count)
    shared = {name: x for name, x in rows.items() if x.shape[3] == 1}  # broadcast over queries

    def run(first: jax.Array, own: dict[str, jax.Array]) -> Any:
        return function({**shared, **own}, first)

    def cut(name: str, x: jax.Array) -> jax.Array:
        behind = [(0, blocks * count - queries if axis == 3 else 0) for axis in range(5)]
        how: Any = {"constant_values": -jnp.inf if name == "stats" else 0}
        of_score_mod = name.startswith(OPERANDS)  # which sees only existing values
        padded = jnp.pad(x, behind, **({"mode": "edge"} if of_score_mod else how))
        return jnp.moveaxis(padded.reshape(*x.shape[:3], blocks, count, *x.shape[4:]), 3, 0)

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 3)
        return x.reshape(*x.shape[:3], blocks * count, *x.shape[5:])[:, :, :, :queries]

    cuts = {name: cut(name, x) for name, x in rows.items() if name not in shared}
    given = jnp.arange(blocks, dtype=jnp.int32) * count, cuts
    if not sums:
        return jax.tree.map(joined, jax.lax.map(lambda x: run(*x), given))
    shapes = jax.eval_shape(lambda x: run(*x)[1], jax.tree.map(lambda x: x[0], given))

    def step(total: Any, x: Any) -> tuple[Any, Any]:
        each, part = run(*x)
        return jax.tree.map(jnp.add, total, part), each

    zero, _ = align_varying((jnp.float32(0), rows["q"]))
    zeros = jax.tree.map(lambda s: jnp.full(s.shape, zero, s.dtype), shapes)
    total, each = jax.lax.scan(step, zeros, given)
    return jax.tree.map(joined, each), total
