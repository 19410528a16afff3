"""fp8 attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.dims import Dims, Shape
from ..._core.graph.node import Fold, Indices, frozen
from ..._core.graph.planned import About
from ..._core.graph.spec import GraphSpec
from ..._core.reasons import Reason
from ..._core.rules import Handles, Tensor, Tensors
from .bias import LENGTHS
from .fp8 import Fp8Forward, SdpaFp8
from .fp8_reference import Fp8Attention
from .paged import TABLES, Paged
from .reference import Arrays

_PAGES = Paged(heads_first=True, queries_heads_first=True)


@dataclass(frozen=True)
class _OfPages(Fp8Attention):
    """Of arrays that are gathered in fp8, before they are multiplied by their descales."""

    def forward(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        wide = {p: arrays[p].astype(jnp.float32) * arrays[f"descale_{p}"] for p in "qkv"}
        return super().forward({**arrays, **wide})


@frozen
class PagedSdpaFp8(Fp8Forward):
    """``sdpa_fp8`` over pages of keys and values: k (pages, N, tokens, D) and v (pages, N, tokens,
    E), with the page tables and lengths of :class:`.Paged`; one of them may have no pages. The
    operands that it shares with ``sdpa_fp8`` and the results are as there. Source: cuDNN
    documentation, "Scaled Dot Product Attention FP8 Forward", paged attention."""

    method = "paged_sdpa_fp8"
    ports = Dims.parse(
        "q: b h s d, k: p n u d, v: w n t e, descale_q: *q, descale_k: *k, descale_v: *v, "
        "descale_s: *s, scale_s: *f, scale_o: *o, ?page_table_k: *a, ?page_table_v: *c, "
        "seq_len_q: *i, seq_len_kv: *j -> O: b h s e, Stats: *l, Amax_S: *x, Amax_O: *y"
    )
    indices = Indices((*TABLES, *LENGTHS), selecting=LENGTHS[:1])
    about = About(
        requires=f"{SdpaFp8.about.requires}; pages of a power of two of tokens; no derivative: "
        "cuDNN does not support it for paged keys",
        rounding=SdpaFp8.about.rounding,
    )

    left_bound: int | None = None
    right_bound: int | None = None
    generate_stats: bool = True

    def checked(self, inputs: Mapping[str, Tensor], further: Mapping[str, Shape]) -> None:
        super().checked(inputs, further)
        _PAGES.check(inputs, {})

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        sizes = {tensors[port].shape[2] for port in "kv" if f"page_table_{port}" in tensors}
        if len(sizes) > 1:
            return Reason("cuDNN 9.19 computed fp8 attention over pages of two sizes wrongly")
        return super().support(tensors, graph)

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        return _PAGES.scores(tensors)

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        return _PAGES.clipped(tensors, given)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch, with shared pages and scales."""
        return super().folds(batched, size, tensors) if {*TABLES} <= {*tensors} else ()

    def is_common(self, port: str) -> bool:
        return port in ("k", "v") or super().is_common(port)

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return _PAGES.emit(SdpaFp8(**own), pygraph, tensors, common)

    def reference(self, *, precision: object = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        attention = _OfPages(self.attn_scale, self.band, weights=str(arrays["q"].dtype))
        found = attention.named(arrays, *_PAGES.run(attention, arrays))
        return tuple(found[port] for port in self.results)
