"""Attention over paged keys and values, with a page table for each batch element."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dims import Shape
from ..._core.graph.node import Edge, Fold, Seen, View, frozen
from . import reference as attention_reference
from .bias import LENGTHS
from .operands import computed
from .tangent import Arranged

if TYPE_CHECKING:
    from ..._core.graph.node import Tensors, Values
    from ..._core.graph.spec import Tensor
    from ..._core.graph.tensor import GraphTensor
    from ..._core.transforms.derivation import Derivation

_TABLES = {"page_table_k": "paged_attention_k_table", "page_table_v": "paged_attention_v_table"}
_INTEGERS = (*_TABLES, *LENGTHS)
_PORTS = ", ".join(f"?{port}: *{port}" for port in _INTEGERS)


@frozen
class PagedSdpa(Arranged):
    """Attention of q (B, Sq, H, D) over k (pages, tokens, N, D) and v (pages, tokens, N, E), or
    with ``heads_first`` (pages, N, tokens, D) and (pages, N, tokens, E).

    page_table_k and page_table_v, (B, 1, n, 1), list the n pages of each batch element in order;
    seq_len_q and seq_len_kv, (B, 1, 1, 1), are its numbers of queries and keys. O is (B, Sq, H, E)
    and Stats (B, H, Sq, 1). With ``queries_heads_first`` q is (B, H, Sq, D) and O (B, H, Sq, E), in
    any order in memory. Source: cuDNN documentation, "Scaled Dot Product Attention Forward",
    paged attention.
    """

    method = "paged_sdpa"
    dims = f"q: b s h d, k: p *k d, v: w *k e, {_PORTS} -> O: b s h e, Stats: *l"
    integers = _INTEGERS
    requires = (
        "bfloat16 or float16, head sizes that are multiples of 8, SM 80; no derivative: cuDNN does "
        "not support it for paged keys"
    )

    heads_first: bool = False
    queries_heads_first: bool = False

    def _queries(self, q: Shape) -> Shape:
        """B, Sq, H and D from the shape of q."""
        b, s, h, d = q
        return (b, h, s, d) if self.queries_heads_first else q

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.sizes(inputs)
        q, k, v = (inputs[port].shape for port in ("q", "k", "v"))
        b, s, h, _ = self._queries(q)
        tables = dict.fromkeys(_TABLES, (b, 1, inputs["page_table_k"].shape[2], 1))
        self.checked_shapes(inputs, {**tables, **dict.fromkeys(LENGTHS, (b, 1, 1, 1))})
        heads = k[1 if self.heads_first else 2]
        if heads == 0 or h % heads:
            raise GraphError(
                "the numbers of heads do not fit",
                expected="a multiple of k's heads for q",
                got=f"q has {h} heads, k {heads}",
            )
        found = {"O": ((*q[:3], v[3]), inputs["q"].dtype), "Stats": ((b, h, s, 1), "float32")}
        return {port: found[port] for port in self.results}

    def layout(self, tensors: Mapping[str, Tensor], order: Sequence[int]) -> Seen:
        """The arrays with heads before tokens."""
        tokens_first = {
            "q": not self.queries_heads_first,
            "O": not self.queries_heads_first,
            "k": not self.heads_first,
            "v": not self.heads_first,
        }
        views = {}
        for port in tensors.keys() & (port for port, first in tokens_first.items() if first):
            b, s, h, d = tensors[port].shape
            views[port] = (View(port, (b, h, s, d), (s * h * d, d, h * d, 1)),)
        return Seen(views)

    def boundary(self, tensors: Tensors) -> Edge:
        return Edge(integers=_INTEGERS, clipped=functools.partial(self.clipped, tensors))

    def clipped(self, tensors: Tensors, given: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Page indices and lengths, clipped to the existing pages."""
        k, queries = tensors["k"].shape, self._queries(tensors["q"].shape)[1]
        tables = {port: jnp.clip(given[port], 0, k[0] - 1) for port in _TABLES}
        keys = given["page_table_k"].shape[2] * k[2 if self.heads_first else 1]
        both = zip(LENGTHS, (queries, keys), strict=True)
        lengths = computed(queries, *(jnp.clip(given[port], 0, most) for port, most in both))
        return {**tables, **dict(zip(LENGTHS, lengths, strict=True))}

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        named = {_TABLES.get(port, port): x for port, x in tensors.items()}
        most = tensors["page_table_k"].get_dim()[2] * tensors["k"].get_dim()[2]
        return self.base.emit(pygraph, named, {**common, "paged_attention_max_seq_len_kv": most})

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        return NotImplemented

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch, with shared pages."""
        if not batched & {"k", "v"}:
            yield Fold(dict.fromkeys({*tensors} - {"k", "v"}, 0))

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        """A few batch elements at a time: only their keys and values are gathered."""
        attention = self.base.attention(precision)

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
        return jax.lax.map(one, own, batch_size=count)[: len(self.results)]
