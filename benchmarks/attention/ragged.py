"""Attention of examples of several lengths: one behind the other, and in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import ops

from ..models.cases import Operand
from . import torch_sides
from .case import Array, AttentionCase, Named, Side
from .formulations import Attended, gathered, in_jax_nn, in_pages
from .parts import JAX_NN, exact, qkv, sdpa, xla
from .torch_sides import CUDNN, FLASH

PADDED = "jax_cudnn padded"


def packed_case(
    lengths: Sequence[int], size: int, heads: int, served: int, width: int
) -> AttentionCase:
    of, operands = Attended(), qkv(len(lengths), size, heads, served, width)
    counts = np.array(lengths, np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = np.flatnonzero(np.arange(size) < counts[:, None])

    def alone(operands: Named) -> Named:
        # Causal queries see no padding, and where dy is 0 nothing comes of it.
        return {n: x for n, x in operands.items() if n != "lengths"}

    def packed(operands: Named) -> Named:
        given = {
            n: x.reshape(-1, *x.shape[2:])[rows] for n, x in operands.items() if n != "lengths"
        }
        return {**given, "offsets": jnp.asarray(offsets)}

    def padded(results: Named) -> Named:
        def one(x: Array) -> Array:
            whole = jnp.zeros((counts.size * size, *x.shape[1:]), x.dtype).at[rows].set(x)
            return whole.reshape(counts.size, size, *x.shape[1:])

        return {n: one(x) for n, x in results.items()}

    def ours(implementation: str | None) -> Side:
        def function(q, k, v, offsets):
            y = ops.packed_dot_product_attention(
                q, k, v, query_offsets=offsets, max_query_length=size, is_causal=True,
                implementation=implementation,
            )  # fmt: skip
            return {"y": y}

        return Side(function, packed, padded)

    def with_lengths(q, k, v, lengths):
        y = ops.dot_product_attention(
            q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )
        return {"y": y}

    def plain_sides(backend: str) -> list[Side]:
        varied = Side(torch_sides.varlen(backend, size), packed, padded, captured=False)
        whole, _ = sdpa(backend, True, served)
        return [varied, Side(whole.function, alone, captured=False)]

    return AttentionCase(
        f"packed/{len(lengths)}x{size}x{heads}-{served}x{width}",
        f"causal; examples of {', '.join(map(str, lengths))} tokens, one behind the other, or "
        f"padded to {size}; bfloat16",
        {**operands, "lengths": counts},
        ("q", "k", "v"),
        sum(of.pairs(length) for length in lengths),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {side: plain_sides(side) for side in (CUDNN, FLASH)},
        {PADDED: Side(with_lengths), JAX_NN: Side(in_jax_nn(of, "cudnn"))},
        kept=counts,
    )


def paged_case(
    lengths: Sequence[int], pages: int, page: int, heads: int, served: int
) -> AttentionCase:
    batch, width = len(lengths), 128
    table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    cache = Operand((batch * pages, served, page, width))
    q = Operand((batch, 1, heads, width))

    def ours(implementation: str | None) -> Side:
        def function(q, key_pages, value_pages, page_table, lengths):
            y = ops.paged_dot_product_attention(
                q, key_pages, value_pages, page_table, key_value_seq_lengths=lengths,
                heads_first=True, implementation=implementation,
            )  # fmt: skip
            return {"y": y}

        return Side(function)

    def from_pages(implementation: Any) -> Side:
        def function(**operands):
            found = gathered(**operands)
            lengths = found.pop("lengths")
            y = jax.nn.dot_product_attention(
                *found.values(),
                key_value_seq_lengths=lengths,
                implementation=implementation,
            )
            return {"y": y}

        return Side(function)

    same = min(lengths) == max(lengths)
    return AttentionCase(
        f"paged/{batch}x{pages * page}x{heads}-{served}x{width}" + "-lengths" * (not same),
        f"one query an example, {_counts(lengths)} keys in pages of {page}; bfloat16",
        {
            "q": q,
            "key_pages": cache,
            "value_pages": cache,
            "page_table": table.reshape(batch, pages),
            "lengths": np.array(lengths, np.int32),
        },
        (),
        float(sum(lengths)),
        ours,
        {"gathered, jax.nn xla": from_pages("xla"), "in pages": Side(in_pages)},
        Side(in_pages),
        {
            CUDNN: [Side(torch_sides.paged(CUDNN))],
            FLASH: [Side(torch_sides.paged(FLASH), captured=False)],
        },
        {JAX_NN: from_pages("cudnn")},
    )


def _counts(lengths: Sequence[int]) -> str:
    few, most = min(lengths), max(lengths)
    return str(most) if few == most else f"{few} to {most}"
