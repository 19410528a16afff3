"""Attention over variable-length sequences packed along the token axis, without padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import max_dim

from ..._core.errors import GraphError
from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import wide_dtype
from ..._core.graph.node import Draws, Node, advanced
from ..._core.graph.planned import View
from ..._core.reasons import Reason
from ..._core.rules import Handles, Tensor, Tensors
from . import extras
from . import reference as attention_reference
from .base import check_heads, check_shapes
from .bias import LENGTHS, HasBias
from .reference import Arrays, Attention
from .storage import Storage

# Port -> the offsets of its array; ports of queries and ports of keys.
QUERIES = {"q": "q", "dQ": "q", "o": "o", "O": "o", "dO": "o", "stats": "stats", "Stats": "stats"}
KEYS = {"k": "k", "dK": "k", "v": "v", "dV": "v"}
_OFFSETS = tuple(f"ragged_offset_{kind}" for kind in ("q", "k", "v", "o", "stats"))
_PORTS = ", ".join(f"?{port}: *{port}" for port in (*LENGTHS, *_OFFSETS))
_MOST = 2**31  # elements that 32-bit offsets can address


_ROWS = {"q": 0.0, "o": 0.0, "dO": 0.0, "stats": -jnp.inf}  # with the padding after the last row
_EXAMPLES = ("bias", "dropout_mask", "sink_token", "stats")
"""Ports of arrays of rank 4 with a dimension of sequences, or 1."""
ONE_QUERY = "cuDNN computes a single query of a sequence whatever its length"
UNCOMPARED = "its engines' dropout masks have not been compared on a GPU"
_BY_TOKEN = "ragged_offset_stats"


@dataclass(frozen=True)
class _Blocks:
    """Which queries each block holds. Arrays are (blocks,), except ``begins``."""

    rows: int
    """Rows per block."""
    example: jax.Array
    first: jax.Array
    """Position of its first query in its sequence."""
    queries: jax.Array
    """Number of queries of its sequence; 0 in unused blocks."""
    begins: jax.Array
    """First block of each sequence."""

    @classmethod
    def of(cls, lengths: jax.Array, tokens: int, rows: int) -> _Blocks:
        """As many blocks as the sequences need: full ones, and at most one partial one each."""
        count = -(-lengths // rows)
        ends = jnp.cumsum(count)
        batch = lengths.shape[0]
        block = jnp.arange(tokens // rows + batch, dtype=jnp.int32)
        example = jnp.minimum(_up_to(ends, block), batch - 1)
        begins = ends - count
        first = (block - begins[example]) * rows
        return cls(rows, example, first, jnp.where(block < ends[-1], lengths[example], 0), begins)


@dataclass(frozen=True)
class Packed(Storage):
    """Queries (T, H, D), and keys and values (S, N, D) and (S, N, E), of all sequences. O is
    (T, H, E) and Stats (T, H, 1), or without ragged_offset_stats (B, H, max_seq_len_q, 1); 0 and
    -inf for tokens of no sequence, of which gradients are 0.

    ``max_seq_len_q`` and ``max_seq_len_kv`` bound the lengths; ``max_total_seq_len_q`` and
    ``max_total_seq_len_kv`` are T and S, from which cuDNN computes its workspace size. seq_len_q
    and seq_len_kv are (B, 1, 1, 1), and each ragged_offset is (B + 1, 1, 1, 1): the offset in
    elements at which each sequence begins, and the end of the last one.
    """

    max_seq_len_q: int
    max_seq_len_kv: int
    max_total_seq_len_q: int
    max_total_seq_len_kv: int

    name = "packed"
    forward = (
        f"q: t h d, k: s n d, v: s c e, ?bias: *m, {_PORTS}, {extras.PORTS} "
        "-> O: t h e, Stats: *l, RNG_DUMP: *r"
    )
    backward = (
        "q: t h d, k: s n d, v: s c e, o: t h e, dO: t h e, stats: *l, ?bias: *m, "
        f"{_PORTS}, {extras.PORTS} "
        "-> dQ: t h d, dK: s n d, dV: s c e, dBias: *m, dSink_token: *sink_token"
    )
    about = Storage.about._replace(
        requires="bfloat16 or float16, head sizes that are multiples of 8, SM 80, and SM 90 for "
        "gradients; arrays of fewer than 2**31 elements",
    )
    indices = HasBias.indices._replace(
        positions=(*LENGTHS, *_OFFSETS),
        offsets={port: f"ragged_offset_{kind}" for port, kind in (QUERIES | KEYS).items()},
    )
    initial: ClassVar = {"O": 0.0, "Stats": -math.inf, "dQ": 0.0, "dK": 0.0, "dV": 0.0}

    @property
    def limits(self) -> tuple[int, int]:
        return self.max_seq_len_q, self.max_seq_len_kv

    @property
    def draws(self) -> Draws:  # pyright: ignore[reportIncompatibleVariableOverride]
        sizes = (("", size) for size in self.limits)
        return extras.DRAWS._replace(axes=(("seq_len_q", 0), ("q", 1), *sizes))

    def check(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        batch, (_, heads, _) = inputs["seq_len_q"].shape[0], inputs["q"].shape
        if (self.max_total_seq_len_q, self.max_total_seq_len_kv) != (sizes["t"], sizes["s"]):
            raise GraphError(
                "max_total_seq_len_q or _kv is not the number of tokens", got=f"{self}"
            )
        lengths = dict.fromkeys(LENGTHS, (batch, 1, 1, 1))
        offsets = dict.fromkeys(_OFFSETS, (batch + 1, 1, 1, 1))
        stats = of_statistic(inputs, *self.scores(inputs)[:3])
        check_shapes(inputs, {**lengths, **offsets, "stats": stats})
        check_heads(heads, inputs["k"].shape[1], inputs["v"].shape[1])
        o, _ = self.made(inputs)
        check_offsets({port: inputs[port].shape for port in ("q", "k", "v")} | {"O": o})

    def made(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        (t, h, _), (*_, e) = inputs["q"].shape, inputs["v"].shape
        return (t, h, e), of_statistic(inputs, *self.scores(inputs)[:3])

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        return (tensors["seq_len_q"].shape[0], tensors["q"].shape[1], *self.limits)

    def refused(self, tensors: Tensors) -> Reason | None:
        if self.max_seq_len_q == 1:
            return Reason(ONE_QUERY)
        return Reason(UNCOMPARED) if {"seed", "sink_token"} <= {*tensors} else None

    def views(self, port: str, tensors: Tensors) -> Sequence[View] | None:
        """(tokens, heads, size) as sequences of the maximum length, each from its offset on."""
        if self.indices.offsets.get(port) not in tensors:
            return None
        batch, limit = tensors["seq_len_q"].shape[0], self.limits[port in KEYS]
        return (ragged_view(port, tensors[port].shape, batch, limit),)

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        """Offsets clipped to their arrays, and lengths clipped to the distance between offsets."""
        found, rooms = clipped_offsets(self.indices.offsets, tensors, given)
        for port, room, limit in zip(LENGTHS, rooms, self.limits, strict=True):
            found[port] = jnp.clip(given[port], 0, jnp.minimum(room, limit))
        return found

    def emit(self, base: Node, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        arrays = {port: x for port, x in tensors.items() if port not in _OFFSETS}
        if "dO" in tensors:
            totals = "max_total_seq_len_q", "max_total_seq_len_kv"
            common = {**common, **{name: getattr(self, name) for name in totals}}

        place_offsets(self.indices.offsets, tensors, arrays)
        made = base.emit(pygraph, arrays, common)
        place_offsets(self.indices.offsets, tensors, dict(zip(base.results, made, strict=True)))
        return made

    def run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """O and the statistic; 0 and -inf for tokens of no sequence."""

        @jax.checkpoint
        def block(*which: jax.Array) -> tuple[jax.Array, jax.Array]:
            o, total = attention.forward(self._block(given, blocks.rows, *which))
            return _tokens(o), _tokens(total)

        blocks = self._blocks(arrays)
        given = self._padded(arrays, blocks.rows)
        o, total = jax.lax.map(lambda x: block(*x), (blocks.example, blocks.first, blocks.queries))
        places = token_places(arrays)
        o = _restored(o, *places, blocks, arrays)
        if _BY_TOKEN in arrays:
            return o, _restored(total, *places, blocks, arrays, -jnp.inf)
        count = arrays["seq_len_q"].shape[0]
        places = jnp.arange(count)[:, None], jnp.arange(self.max_seq_len_q)[None, :]
        return o, jnp.swapaxes(_restored(total, *places, blocks, arrays, -jnp.inf), 1, 2)

    def run_backward(self, attention: Attention, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients by port."""
        blocks = self._blocks(arrays)
        given = self._padded(arrays, blocks.rows)
        sums = {"dK": "k", "dV": "v", "dBias": "bias", "dSink_token": "sink_token"}
        sums = {name: port for name, port in sums.items() if port in arrays}

        def step(totals: Any, which: Any) -> tuple[Any, jax.Array]:
            found = attention.backward(self._block(given, blocks.rows, *which))
            totals = dict(totals)
            for name, port in sums.items():
                part = found[name] if given[port].ndim == 4 else _tokens(found[name])
                totals[name] = _added(totals[name], part, self._start(given, port, *which))
            return totals, _tokens(found["dQ"])

        zeros = {
            name: jnp.where(True, 0, given[port]).astype(wide_dtype(given[port]))
            for name, port in sums.items()
        }
        which = blocks.example, blocks.first, blocks.queries
        totals, each = jax.lax.scan(step, zeros, which)
        found = {"dQ": _restored(each, *token_places(arrays), blocks, arrays)}
        for name, port in sums.items():
            found[name] = totals[name][tuple(map(slice, arrays[port].shape))]
        return found

    def _blocks(self, arrays: Arrays) -> _Blocks:
        (tokens, heads, _), lengths = arrays["q"].shape, arrays["seq_len_q"].reshape(-1)
        fit = attention_reference._SCORES // max(heads * self.max_seq_len_kv, 1)
        mean = -(-tokens // max_dim(lengths.shape[0], 1))
        known = (size for size in (fit, mean, self.max_seq_len_q) if isinstance(size, int))
        rows = max(1, min(known))
        return _Blocks.of(lengths.astype(jnp.int32), tokens, rows)

    def _padded(self, arrays: Arrays, rows: int) -> dict[str, jax.Array]:
        """The arrays, padded so that a block never extends past their end, and the start of each
        sequence in tokens."""
        found = {}
        for port, x in arrays.items():
            fill = _ROWS.get(port, 0.0)
            if port in ("k", "v"):
                found[port] = _behind(x, 0, self.max_seq_len_kv)
            elif port in _EXAMPLES and x.ndim == 4:
                found[port] = _behind(x, 2, rows, fill) if x.shape[2] > 1 else x
            elif port in _ROWS:
                found[port] = _behind(x, 0, rows, fill)
            elif port in extras.WORDS:
                found[port] = x
        starts = {port: begins(arrays, port) for port in ("q", "k")}
        lengths = arrays["seq_len_kv"].reshape(-1).astype(jnp.int32)
        return found | {"starts_q": starts["q"], "starts_kv": starts["k"], "lengths_kv": lengths}

    def _start(
        self, given: Arrays, port: str, example: jax.Array, first: jax.Array, queries: jax.Array
    ) -> tuple[Any, ...]:
        """The start of a block's part of an array."""
        if given[port].ndim == 3:
            at = (
                given["starts_q"][example] + first if port in _ROWS else given["starts_kv"][example]
            )
            return at, 0, 0
        batch, _, rows, _ = given[port].shape
        return example if batch > 1 else 0, 0, first if rows > 1 else 0, 0

    def _block(
        self, given: Arrays, rows: int, example: jax.Array, first: jax.Array, queries: jax.Array
    ) -> dict[str, jax.Array]:
        """A block as one batch element of attention with padding."""
        found = {}
        if "seed" in given:  # as the example draws in a call of all
            by = example.astype(jnp.uint32) * (extras.STEP * given["q"].shape[1])
            found = {"seed": given["seed"], "offset": advanced(given["offset"], by)}
        for port in dict.fromkeys((*_ROWS, "k", "v", *_EXAMPLES)):
            if port not in given:
                continue
            x = given[port]
            count = rows if port in _ROWS else self.max_seq_len_kv
            shape = (count, *x.shape[1:])
            if x.ndim == 4:
                shape = (1, x.shape[1], rows if x.shape[2] > 1 else 1, x.shape[3])
            start = self._start(given, port, example, first, queries)
            part = jax.lax.dynamic_slice(x, [jnp.asarray(i, jnp.int32) for i in start], shape)
            found[port] = part if x.ndim == 4 else jnp.swapaxes(part, 0, 1)[None]
        keys = jnp.where(queries > 0, given["lengths_kv"][example], 0)
        lengths = {"seq_len_q": queries, "seq_len_kv": keys, "first": first}
        return found | {name: x.reshape(1, 1, 1, 1) for name, x in lengths.items()}


def of_statistic(inputs: Mapping[str, Tensor], batch: int, heads: int, queries: int) -> Shape:
    """The shape of the statistic."""
    if _BY_TOKEN in inputs:
        return inputs["q"].shape[0], heads, 1
    return batch, heads, queries, 1


def ragged_view(port: str, shape: Shape, batch: int, limit: int) -> View:
    """(tokens, heads, size) as sequences of this length, each from its offset on."""
    _, heads, size = shape
    return View(port, (batch, heads, limit, size), (limit * heads * size, size, heads * size, 1))


def place_offsets(
    offsets: Mapping[str, str], tensors: Mapping[str, Any], named: Mapping[str, Any]
) -> None:
    """Sets the ragged offsets of pygraph's tensors."""
    for port, x in named.items():
        if (offset := tensors.get(offsets.get(port, ""))) is not None:
            x.set_ragged_offset(offset)


def check_offsets(shapes: Mapping[str, Shape]) -> None:
    """GraphError if offsets into arrays of these shapes do not fit 32 bits."""
    for port, shape in shapes.items():
        size = math.prod(shape)
        if isinstance(size, int) and size >= _MOST:
            raise GraphError(
                f"{port!r} has too many elements",
                expected="fewer than 2**31",
                got=f"{list(shape)}",
                why="offsets count elements in 32 bits",
                fix="split the sequences between several calls",
            )


def clipped_offsets(
    offsets: Mapping[str, str], tensors: Tensors, given: Arrays
) -> tuple[dict[str, jax.Array], list[Any]]:
    """The operands with offsets clipped to their arrays, and how many queries and how many keys
    of each sequence have room between them; None without offsets."""
    found = dict(given)
    rooms: tuple[list[jax.Array], list[jax.Array]] = ([], [])
    for port, offset in offsets.items():
        if offset in given and port in tensors:
            tokens, *token = tensors[port].shape
            size = math.prod(token)
            found[offset] = jnp.clip(found[offset] // size, 0, tokens) * size
            rooms[port in KEYS].append(jnp.diff(found[offset], axis=0) // size)
    least = (jnp.min(jnp.stack(room), axis=0) if room else None for room in rooms)
    return found, [room if room is None else jnp.maximum(room, 0) for room in least]


def begins(arrays: Arrays, port: str) -> jax.Array:
    """The first token of each sequence in the array at a port."""
    _, heads, size = arrays[port].shape
    return arrays[f"ragged_offset_{port}"].reshape(-1)[:-1] // (heads * size)


def token_places(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The sequence of each token, and its position in it."""
    starts = begins(arrays, "q")
    token = jnp.arange(arrays["q"].shape[0], dtype=jnp.int32)
    example = jnp.maximum(_up_to(starts, token) - 1, 0)
    return example, token - starts[example]


def _restored(
    each: jax.Array,
    example: jax.Array,
    at: jax.Array,
    blocks: _Blocks,
    arrays: Arrays,
    fill: float = 0.0,
) -> jax.Array:
    """The rows of (blocks, rows, heads, size) at these positions of sequences."""
    lengths = arrays["seq_len_q"].reshape(-1)
    there = (at >= 0) & (at < lengths[example])
    row = (blocks.begins[example] * blocks.rows + at) * there
    found = each.reshape(-1, *each.shape[2:])[row]
    return jnp.where(there[..., None, None], found, fill)


def _up_to(bounds: jax.Array, x: jax.Array) -> jax.Array:
    """How many of the ascending bounds are at most x."""
    if isinstance(bounds.shape[0], int):
        return jnp.searchsorted(bounds, x, side="right")
    return jnp.sum(bounds <= x[:, None], axis=-1, dtype=jnp.int32)  # of a symbolic number


def _tokens(x: jax.Array) -> jax.Array:
    """(1, heads, rows, size) as (rows, heads, size)."""
    return jnp.swapaxes(x[0], 0, 1)


def _behind(x: jax.Array, axis: int, count: int, value: float = 0.0) -> jax.Array:
    widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _added(total: jax.Array, part: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    start = tuple(jnp.asarray(i, jnp.int32) for i in start)
    there = jax.lax.dynamic_slice(total, start, part.shape)
    return jax.lax.dynamic_update_slice(total, there + part, start)
