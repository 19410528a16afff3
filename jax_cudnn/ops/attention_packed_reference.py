"""Packed attention in jnp, one block of a sequence's queries at a time.

Memory is linear in the number of tokens: a block reads a window of keys from its sequence's first
one on, of the maximum length, and no array is padded to that length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import max_dim

from .._core.graph.dtypes import wide_dtype
from . import attention_reference
from .attention_reference import Attention

Arrays = Mapping[str, jax.Array]
_ROWS = {"q": 0.0, "o": 0.0, "dO": 0.0, "stats": -jnp.inf}  # with the padding after the last row


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
class Packing:
    """One packed attention, without its arrays (tokens, heads, size) and the sequences' lengths and
    offsets."""

    attention: Attention
    max_queries: int
    max_keys: int

    def forward(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """O, and the statistic (tokens, heads, 1); 0 and -inf for tokens of no sequence."""

        @jax.checkpoint
        def block(*which: jax.Array) -> tuple[jax.Array, jax.Array]:
            o, total = self.attention.forward(self._block(given, blocks.rows, *which))
            return _tokens(o), _tokens(total)

        blocks = self._blocks(arrays)
        given = self._padded(arrays, blocks.rows)
        o, total = jax.lax.map(lambda x: block(*x), (blocks.example, blocks.first, blocks.queries))
        restored = functools.partial(_restored, blocks=blocks, arrays=arrays)
        return restored(o), restored(total, fill=-jnp.inf)

    def backward(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients of q, k, v and bias, by port."""
        blocks = self._blocks(arrays)
        given = self._padded(arrays, blocks.rows)
        sums = {"dK": "k", "dV": "v"} | ({"dBias": "bias"} if "bias" in arrays else {})

        def step(totals: Any, which: Any) -> tuple[Any, jax.Array]:
            found = self.attention.backward(self._block(given, blocks.rows, *which))
            totals = dict(totals)
            for name, port in sums.items():
                part = found[name] if port == "bias" else _tokens(found[name])
                totals[name] = _added(totals[name], part, self._start(given, port, *which))
            return totals, _tokens(found["dQ"])

        zeros = {
            name: (given[port] * 0).astype(wide_dtype(given[port])) for name, port in sums.items()
        }
        which = blocks.example, blocks.first, blocks.queries
        totals, each = jax.lax.scan(step, zeros, which)
        found = {"dQ": _restored(each, blocks=blocks, arrays=arrays)}
        for name, port in sums.items():
            found[name] = totals[name][tuple(map(slice, arrays[port].shape))]
        return found

    def _blocks(self, arrays: Arrays) -> _Blocks:
        (tokens, heads, _), lengths = arrays["q"].shape, arrays["seq_len_q"].reshape(-1)
        fit = attention_reference._SCORES // max(heads * self.max_keys, 1)
        mean = -(-tokens // max_dim(lengths.shape[0], 1))
        known = (size for size in (fit, mean, self.max_queries) if isinstance(size, int))
        rows = max(1, min(known))
        return _Blocks.of(lengths.astype(jnp.int32), tokens, rows)

    def _padded(self, arrays: Arrays, rows: int) -> dict[str, jax.Array]:
        """The arrays, padded so that a block never extends past their end, and the start of each
        sequence in tokens."""
        found = {}
        for port, x in arrays.items():
            if port in _ROWS:
                found[port] = _behind(x, 0, rows, _ROWS[port])
            elif port in ("k", "v"):
                found[port] = _behind(x, 0, self.max_keys)
            elif port == "bias":
                found[port] = _behind(x, 2, rows) if x.shape[2] > 1 else x
        starts = {port: _starts(arrays, port) for port in ("q", "k")}
        lengths = arrays["seq_len_kv"].reshape(-1).astype(jnp.int32)
        return found | {"starts_q": starts["q"], "starts_kv": starts["k"], "lengths_kv": lengths}

    def _start(
        self, given: Arrays, port: str, example: jax.Array, first: jax.Array, queries: jax.Array
    ) -> tuple[Any, ...]:
        """The start of a block's part of an array."""
        if port in _ROWS:
            return given["starts_q"][example] + first, 0, 0
        if port != "bias":
            return given["starts_kv"][example], 0, 0
        batch, _, rows, _ = given["bias"].shape
        return example if batch > 1 else 0, 0, first if rows > 1 else 0, 0

    def _block(
        self, given: Arrays, rows: int, example: jax.Array, first: jax.Array, queries: jax.Array
    ) -> dict[str, jax.Array]:
        """A block as one batch element of attention with padding."""
        found = {}
        for port in (*_ROWS, "k", "v", "bias"):
            if port not in given:
                continue
            x = given[port]
            count = rows if port in _ROWS else self.max_keys
            shape = (count, *x.shape[1:])
            if port == "bias":
                shape = (1, x.shape[1], rows if x.shape[2] > 1 else 1, x.shape[3])
            part = _part(x, self._start(given, port, example, first, queries), shape)
            found[port] = part if port == "bias" else jnp.swapaxes(part, 0, 1)[None]
        keys = jnp.where(queries > 0, given["lengths_kv"][example], 0)
        lengths = {"seq_len_q": queries, "seq_len_kv": keys, "first": first}
        return found | {name: x.reshape(1, 1, 1, 1) for name, x in lengths.items()}


def _starts(arrays: Arrays, port: str) -> jax.Array:
    """The first token of each sequence in the array at a port."""
    _, heads, size = arrays[port].shape
    return arrays[f"ragged_offset_{port}"].reshape(-1)[:-1] // (heads * size)


def _restored(each: jax.Array, *, blocks: _Blocks, arrays: Arrays, fill: float = 0.0) -> jax.Array:
    """The rows of (blocks, rows, heads, size) at the positions of their tokens."""
    starts, lengths = _starts(arrays, "q"), arrays["seq_len_q"].reshape(-1)
    token = jnp.arange(arrays["q"].shape[0], dtype=jnp.int32)
    example = jnp.maximum(_up_to(starts, token) - 1, 0)
    at = token - starts[example]
    there = (at >= 0) & (at < lengths[example])
    row = (blocks.begins[example] * blocks.rows + at) * there
    found = each.reshape(-1, *each.shape[2:])[row]
    return jnp.where(there[:, None, None], found, fill)


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


def _part(x: jax.Array, start: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(x, [jnp.asarray(i, jnp.int32) for i in start], shape)


def _added(total: jax.Array, part: jax.Array, start: tuple[Any, ...]) -> jax.Array:
    start = tuple(jnp.asarray(i, jnp.int32) for i in start)
    there = jax.lax.dynamic_slice(total, start, part.shape)
    return jax.lax.dynamic_update_slice(total, there + part, start)
