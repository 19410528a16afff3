"""Attention over paged keys and values, with a page table for each batch element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._core.graph.dims import Shape
from ..._core.graph.node import Fold, Node, View
from . import reference as attention_reference
from .base import check_heads, check_shapes
from .bias import LENGTHS, HasBias
from .reference import Arrays, Attention
from .storage import Storage, tokens_first

if TYPE_CHECKING:
    from ..._core.graph.node import Tensors
    from ..._core.graph.spec import Tensor

_TABLES = {"page_table_k": "paged_attention_k_table", "page_table_v": "paged_attention_v_table"}
_INTEGERS = (*_TABLES, *LENGTHS)
_PORTS = ", ".join(f"?{port}: *{port}" for port in _INTEGERS)


@dataclass(frozen=True)
class Paged(Storage):
    """k (pages, tokens, N, D) and v (pages, tokens, N, E), or with ``heads_first`` (pages, N,
    tokens, D) and (pages, N, tokens, E), for q (B, Sq, H, D).

    page_table_k and page_table_v, (B, 1, n, 1), list the n pages of each batch element in order;
    seq_len_q and seq_len_kv, (B, 1, 1, 1), are its numbers of queries and keys. O is (B, Sq, H, E)
    and Stats (B, H, Sq, 1). With ``queries_heads_first`` q is (B, H, Sq, D) and O (B, H, Sq, E), in
    any order in memory.
    """

    heads_first: bool = False
    queries_heads_first: bool = False

    name = "paged"
    indices = HasBias.indices._replace(positions=_INTEGERS)
    forward = f"q: b s h d, k: p *k d, v: w *k e, {_PORTS} -> O: b s h e, Stats: *l"
    about = Storage.about._replace(
        requires="bfloat16 or float16, head sizes that are multiples of 8, SM 80; no derivative: "
        "cuDNN does not support it for paged keys",
    )
    has_bias = False

    def _queries(self, tensors: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """B, H and Sq."""
        b, s, h, _ = tensors["q"].shape
        return (b, s, h) if self.queries_heads_first else (b, h, s)

    def check(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        b, h, _ = self._queries(inputs)
        tables = dict.fromkeys(_TABLES, (b, 1, inputs["page_table_k"].shape[2], 1))
        check_shapes(inputs, {**tables, **dict.fromkeys(LENGTHS, (b, 1, 1, 1))})
        check_heads(h, *(inputs[port].shape[1 if self.heads_first else 2] for port in ("k", "v")))

    def made(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        return (*inputs["q"].shape[:3], inputs["v"].shape[3]), (*self._queries(inputs), 1)

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        keys = tensors["page_table_k"].shape[2] * tensors["k"].shape[2 if self.heads_first else 1]
        return (*self._queries(tensors), keys)

    def views(self, port: str, tensors: Tensors) -> Sequence[View] | None:
        by_heads = self.queries_heads_first if port in ("q", "O") else self.heads_first
        if by_heads or port not in ("q", "O", "k", "v"):
            return ()
        return (tokens_first(port, tensors[port].shape),)

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        """Page indices and lengths, clipped to the existing pages."""
        k = tensors["k"].shape
        tables = {port: jnp.clip(given[port], 0, k[0] - 1) for port in _TABLES}
        return {**tables, **super().clipped(tensors, given)}

    def emit(
        self, base: Node, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        named = {_TABLES.get(port, port): x for port, x in tensors.items()}
        most = tensors["page_table_k"].get_dim()[2] * tensors["k"].get_dim()[2]
        return base.emit(pygraph, named, {**common, "paged_attention_max_seq_len_kv": most})

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch, with shared pages."""
        if not batched & {"k", "v"}:
            yield Fold(dict.fromkeys({*tensors} - {"k", "v"}, 0))

    def run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """A few batch elements at a time: only their keys and values are gathered."""

        @jax.checkpoint
        def one(each: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q = each["q"]
            of = {"q": (q if self.queries_heads_first else jnp.swapaxes(q, 0, 1))[None]}
            for port in ("k", "v"):
                pages = arrays[port][each[f"page_table_{port}"].reshape(-1)]
                heads = jnp.moveaxis(pages, 1 if self.heads_first else 2, 0)
                of[port] = heads.reshape(1, len(heads), math.prod(heads.shape[1:3]), heads.shape[3])
            lengths = {port: each[port].reshape(1, 1, 1, 1) for port in LENGTHS}
            o, total = attention.forward({**of, **lengths})
            return o[0] if self.queries_heads_first else jnp.swapaxes(o[0], 0, 1), total[0]

        own = {port: x for port, x in arrays.items() if port not in ("k", "v")}
        sizes = own["q"].shape[0], arrays["page_table_k"].shape[2], *arrays["k"].shape[1:]
        count = None  # of symbolic sizes
        if all(isinstance(size, int) for size in sizes):
            most = attention_reference._SCORES // max(math.prod(sizes[1:]), 1)
            count = max(1, min(most, sizes[0]))
        return jax.lax.map(one, own, batch_size=count)
