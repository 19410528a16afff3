"""Attention over paged keys and values, with a page table for each batch element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dims import Shape
from ..._core.graph.node import Draws, Fold, Node, advanced
from ..._core.graph.planned import View
from ..._core.reasons import Reason
from ..._core.rules import Handles, Tensor, Tensors
from . import extras, packed
from . import reference as attention_reference
from .base import check_heads, check_shapes
from .bias import LENGTHS, HasBias, clipped_lengths
from .reference import Arrays, Attention
from .storage import Storage, tokens_first

TABLES = {"page_table_k": "paged_attention_k_table", "page_table_v": "paged_attention_v_table"}
_OFFSETS = tuple(f"ragged_offset_{kind}" for kind in ("q", "o", "stats"))
_INTEGERS = (*TABLES, *LENGTHS, *_OFFSETS)
_PORTS = ", ".join(f"?{port}: *{port}" for port in (*_INTEGERS, "bias"))


@dataclass(frozen=True)
class Paged(Storage):
    """k (pages, tokens, N, D) and v (pages, tokens, N, E), or with ``heads_first`` (pages, N,
    tokens, D) and (pages, N, tokens, E), for q (B, Sq, H, D). Their pages may differ in size, and
    one of them may have no pages, but a batch element each.

    page_table_k and page_table_v, (B, 1, n, 1), list the n pages of each batch element in order;
    seq_len_q and seq_len_kv, (B, 1, 1, 1), are its numbers of queries and keys. O is (B, Sq, H, E)
    and Stats (B, H, Sq, 1). With ``queries_heads_first`` q is (B, H, Sq, D) and O (B, H, Sq, E), in
    any order in memory. With ``max_seq_len_q`` queries are packed as in :class:`.Packed`.
    ``max_seq_len_kv`` is the number of keys of a bias and of dropout, by default that of the pages.
    """

    heads_first: bool = False
    queries_heads_first: bool = False
    max_seq_len_q: int | None = None
    max_seq_len_kv: int | None = None

    name = "paged"
    indices = HasBias.indices._replace(
        positions=_INTEGERS,
        offsets={port: f"ragged_offset_{kind}" for port, kind in packed.QUERIES.items()},
    )
    about = Storage.about._replace(
        requires="bfloat16 or float16, head sizes that are multiples of 8, SM 80; no derivative: "
        "cuDNN does not support it for paged keys",
    )

    @property
    def forward(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        q, o = ("t h d", "t h e") if self.max_seq_len_q else ("b s h d", "b s h e")
        return (
            f"q: {q}, k: p *k d, v: w *m e, {_PORTS}, {extras.PORTS} "
            f"-> O: {o}, Stats: *l, RNG_DUMP: *r"
        )

    @property
    def initial(self) -> Mapping[str, float]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {"O": 0.0, "Stats": -math.inf} if self.max_seq_len_q else {}

    @property
    def draws(self) -> Draws:  # pyright: ignore[reportIncompatibleVariableOverride]
        batch, heads, queries = ("q", 0), ("q", 2), ("q", 1)
        if self.queries_heads_first:
            heads, queries = queries, heads
        if self.max_seq_len_q:
            batch, heads, queries = ("seq_len_q", 0), ("q", 1), ("", self.max_seq_len_q)
        assert self.max_seq_len_kv is not None
        return extras.DRAWS._replace(axes=(batch, heads, queries, ("", self.max_seq_len_kv)))

    def _queries(self, tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """B, H and Sq."""
        if self.max_seq_len_q:
            return tensors["seq_len_q"].shape[0], tensors["q"].shape[1], self.max_seq_len_q
        b, s, h, _ = tensors["q"].shape
        return (b, s, h) if self.queries_heads_first else (b, h, s)

    def _of(self, port: str, tensors: Mapping[str, Any]) -> tuple[int, int]:
        """The numbers of heads and of keys of a batch element, of k or v."""
        _, *sizes, _ = tensors[port].shape
        heads, tokens = sizes if self.heads_first else reversed(sizes)
        table = tensors.get(f"page_table_{port}")
        return heads, tokens if table is None else table.shape[2] * tokens

    def check(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        b, h, _ = self._queries(inputs)
        tables = {port: (b, 1, inputs[port].shape[2], 1) for port in TABLES if port in inputs}
        offsets = dict.fromkeys(_OFFSETS, (b + 1, 1, 1, 1))
        check_shapes(inputs, {**tables, **offsets, **dict.fromkeys(LENGTHS, (b, 1, 1, 1))})
        check_heads(h, *(self._of(port, inputs)[0] for port in ("k", "v")))
        if self.max_seq_len_q:
            packed.check_offsets({"q": inputs["q"].shape, "O": self.made(inputs)[0]})
        for port in ("k", "v"):
            if f"page_table_{port}" not in inputs and inputs[port].shape[0] != b:
                raise GraphError(
                    f"{port!r} without a page table has another batch than the queries",
                    expected=f"{b} batch elements",
                    got=f"{list(inputs[port].shape)}",
                )

    def made(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        o = (*inputs["q"].shape[:-1], inputs["v"].shape[3])
        return o, packed.of_statistic(inputs, *self._queries(inputs))

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        keys = [self._of(port, tensors)[1] for port in ("k", "v")]
        most = keys[0] if keys[0] == keys[1] else min(keys)  # symbolic ones have no order
        if self.max_seq_len_kv is not None:
            most = min(most, self.max_seq_len_kv)
        return (*self._queries(tensors), most)

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        return min(self._of(port, tensors)[0] for port in ("k", "v"))

    def refused(self, tensors: Tensors) -> Reason | None:
        if self.max_seq_len_q == 1:
            return Reason(packed.ONE_QUERY)
        return Reason(packed.UNCOMPARED) if "seed" in tensors else None

    def views(self, port: str, tensors: Tensors) -> Sequence[View] | None:
        if self.max_seq_len_q and self.indices.offsets.get(port) in tensors:
            batch = tensors["seq_len_q"].shape[0]
            return (packed.ragged_view(port, tensors[port].shape, batch, self.max_seq_len_q),)
        if port not in ("q", "O", "k", "v"):
            return None
        by_heads = self.queries_heads_first if port in ("q", "O") else self.heads_first
        return () if by_heads else (tokens_first(port, tensors[port].shape),)

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        """Page indices, offsets and lengths, clipped to the existing pages and queries."""
        found, (room, _) = packed.clipped_offsets(self.indices.offsets, tensors, given)
        for table in TABLES:
            if table in given:
                pages = tensors[table.removeprefix("page_table_")].shape[0]
                found[table] = jnp.clip(given[table], 0, pages - 1)
        if room is not None:
            found["seq_len_q"] = jnp.minimum(found["seq_len_q"], room)
        return {**found, **clipped_lengths(self.scores(tensors), found)}

    def emit(self, base: Node, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        named = {TABLES.get(port, port): x for port, x in tensors.items() if port not in _OFFSETS}
        counts = []
        for port in ("k", "v"):
            table = tensors.get(f"page_table_{port}")
            counts.append(tensors[port].get_dim()[2] * (1 if table is None else table.get_dim()[2]))
        if self.max_seq_len_kv is not None:
            counts.append(self.max_seq_len_kv)
        packed.place_offsets(self.indices.offsets, tensors, tensors)
        made = base.emit(pygraph, named, {**common, "paged_attention_max_seq_len_kv": min(counts)})
        results = dict(zip(base.results, made, strict=True))
        packed.place_offsets(self.indices.offsets, tensors, results)
        return made

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch, with shared pages and sinks."""
        if self.max_seq_len_q or "seed" in tensors or not {*TABLES} <= {*tensors}:
            return
        shared = {"k", "v", "sink_token"}
        if "bias" in tensors and tensors["bias"].shape[0] == 1:
            if "bias" not in batched:
                shared |= {"bias"}
            elif self._queries(tensors)[0] != 1:
                return
        if not batched & shared:
            yield Fold(dict.fromkeys({*tensors} - shared, 0))

    def run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, ...]:
        if not self.max_seq_len_q:
            return self._run(attention, arrays)
        at = packed.begins(arrays, "q")[:, None] + jnp.arange(self.max_seq_len_q)
        q = jnp.take(arrays["q"], at, axis=0, mode="clip")
        o, total = self._run(attention, {**arrays, "q": q})
        example, at = packed.token_places(arrays)
        there = ((at >= 0) & (at < arrays["seq_len_q"].reshape(-1)[example]))[:, None, None]
        at = at * there[:, 0, 0]
        o = jnp.where(there, o[example, at], 0)
        if "ragged_offset_stats" in arrays:
            total = jnp.where(there, total[example, :, at], -jnp.inf)
        return o, total

    def _run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, ...]:
        """A few batch elements at a time: only their keys and values are gathered."""
        by_heads = self.queries_heads_first and not self.max_seq_len_q
        keys = self.scores(cast(Any, arrays))[3]

        @jax.checkpoint
        def one(each: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
            q = each["q"]
            of = {"q": (q if by_heads else jnp.swapaxes(q, 0, 1))[None]}
            for port in ("k", "v"):
                table = each.get(f"page_table_{port}")
                if table is None:
                    pages = each[port][None]
                else:
                    pages = arrays[port][jnp.clip(table.reshape(-1), 0, arrays[port].shape[0] - 1)]
                heads = jnp.moveaxis(pages, 1 if self.heads_first else 2, 0)
                whole = heads.reshape(len(heads), math.prod(heads.shape[1:3]), heads.shape[3])
                of[port] = (whole if whole.shape[1] == keys else whole[:, :keys])[None]
            for port in (*LENGTHS, "bias", "dropout_mask", "offset"):
                if port in each:
                    of[port] = each[port][None]
            o, *more = (x[0] for x in attention.forward({**shared, **of}))
            return o if by_heads else jnp.swapaxes(o, 0, 1), *more

        batch, heads = arrays["seq_len_q"].shape[0], arrays["q"].shape[1 if by_heads else 2]
        own = {port: x for port, x in arrays.items() if port not in _OFFSETS}
        common = [p for p in own if p in ("seed", "sink_token") or "scale_" in p]
        shared = {port: own.pop(port) for port in common}
        if "bias" in own and own["bias"].shape[0] == 1:
            shared["bias"] = own.pop("bias")
        for port in ("k", "v"):
            if f"page_table_{port}" in own:
                del own[port]
        if "offset" in own:
            by = jnp.arange(batch, dtype=jnp.uint32) * (extras.STEP * heads)
            own["offset"] = advanced(own["offset"].reshape(2), by).reshape(batch, 1, 1, 2)
        sizes = batch, keys, self._of("k", arrays)[0], arrays["k"].shape[3]
        count = None  # of symbolic sizes
        if all(isinstance(size, int) for size in sizes):
            most = attention_reference._SCORES // max(math.prod(sizes[1:]), 1)
            count = max(1, min(most, sizes[0]))
        return jax.lax.map(one, own, batch_size=count)
