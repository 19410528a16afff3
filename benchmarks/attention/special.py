"""Attention of examples of several lengths, packed and in pages, and with products in float8."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import ops
from jax_cudnn._core.graph.trace import graph

from ..case import BACKWARD, TRAINING, Array, Named, Operand, Side
from . import torch_sides
from .case import JAX_NN, AttentionCase, exact, qkv, sdpa, xla
from .cases import causal_case, published
from .formulations import Attended, gathered, in_jax_nn, in_pages
from .torch_sides import CUDNN, FLASH

PADDED, WIDE = "jax_cudnn padded", "jax_cudnn bfloat16"
DELAYED, NARROW = "jax_cudnn delayed scaling", "jax_cudnn float8 operands"
# Weights and results have 3 bits behind the first, gradients 2: each rounding is 0.03 and 0.05.
_FLOAT8 = {TRAINING: 0.1, BACKWARD: 0.3}


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
        given = {n: x.reshape(-1, *x.shape[2:])[rows] for n, x in alone(operands).items()}
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
        f"causal; sequences of {', '.join(map(str, lengths))} tokens, packed, or "
        f"padded to {size}; bfloat16",
        {**operands, "lengths": counts},
        ("q", "k", "v"),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {side: plain_sides(side) for side in (CUDNN, FLASH)},
        {PADDED: Side(with_lengths), JAX_NN: Side(in_jax_nn(of, "cudnn"))},
        pairs=sum(of.pairs(length) for length in lengths),
        kept=counts,
    )


def paged_case(
    lengths: Sequence[int], pages: int, page: int, heads: int, served: int
) -> AttentionCase:
    batch, width, few, most = len(lengths), 128, min(lengths), max(lengths)
    table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    cache = Operand((batch * pages, served, page, width))

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
                *found.values(), key_value_seq_lengths=lengths, implementation=implementation
            )
            return {"y": y}

        return Side(function)

    return AttentionCase(
        f"paged/{batch}x{pages * page}x{heads}-{served}x{width}" + "-lengths" * (few != most),
        f"one query an example, {most if few == most else f'{few} to {most}'} keys in pages of "
        f"{page}; bfloat16",
        {
            "q": Operand((batch, 1, heads, width)),
            "key_pages": cache,
            "value_pages": cache,
            "page_table": table.reshape(batch, pages),
            "lengths": np.array(lengths, np.int32),
        },
        (),
        ours,
        {"gathered, jax.nn xla": from_pages("xla"), "in pages": Side(in_pages)},
        Side(in_pages),
        {
            CUDNN: [Side(torch_sides.paged(CUDNN))],
            FLASH: [Side(torch_sides.paged(FLASH), captured=False)],
        },
        {JAX_NN: from_pages("cudnn")},
        pairs=float(sum(lengths)),
    )


def float8_case(size: int, heads: int, served: int, width: int) -> AttentionCase:
    """Beside the same in bfloat16. Operands and results are bfloat16, as those of a model are, but
    for one side that gets them in float8 and has no backward."""
    dtype = "float8_e4m3fn"

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            y = ops.dot_product_attention_fp8(
                q, k, v, is_causal=True, implementation=implementation
            )
            return {"y": y}

        return Side(function)

    def with_state(q, k, v, state):
        return {"y": ops.dot_product_attention_fp8(q, k, v, state, is_causal=True)}

    def learned(operands: Named) -> Named:
        """The state after a step."""
        state = ops.DelayedScaling.create(1)
        given = {n: operands[n] for n in ("q", "k", "v")}

        def step(given: Named, dy: Any, state: Any) -> Any:
            _, pull = jax.vjp(lambda state: with_state(**given, state=state)["y"], state)
            return pull(dy)[0]

        return {**operands, "state": jax.jit(step)(given, operands["dy"], state)}

    wide = causal_case(1, size, heads, served, width)
    return dataclasses.replace(
        wide,
        name=f"float8/1x{size}x{heads}-{served}x{width}",
        what="causal; products in float8_e4m3fn of bfloat16 arrays, current scaling; jax.nn, XLA "
        "and torch in bfloat16",
        ours=ours,
        others={
            DELAYED: Side(with_state, learned),
            NARROW: _narrow(width),
            WIDE: wide.ours(None),
            **wide.others,
        },
        xla={"by blocks": wide.xla["by blocks"]},  # the others are with the same in bfloat16
        dtype=dtype,
        tolerance=_FLOAT8,
        published=published(dtype, 1, size, heads, served, width),
        published_side=NARROW,
    )


def _narrow(width: int) -> Side:
    """cuDNN's kernel alone, which is what is published: of float8 arrays, heads before tokens."""
    largest, scale = 448.0, 64.0  # normal numbers are below 7
    factors = {f"descale_{name}": 1 / scale for name in "qkv"} | {"scale_o": scale}
    factors |= {"descale_s": 1 / largest, "scale_s": largest}

    @graph
    def attend(g, q, k, v, factors):
        out, *_ = g.sdpa_fp8(q, k, v, **factors, attn_scale=width**-0.5, right_bound=0)
        return out

    def narrow(operands: Named) -> Named:
        given = {n: jnp.swapaxes(operands[n], 1, 2) * scale for n in "qkv"}
        return {
            **{n: x.astype(jnp.float8_e4m3fn) for n, x in given.items()},
            "factors": {n: jnp.full((1, 1, 1, 1), x, jnp.float32) for n, x in factors.items()},
        }

    def wide(results: Named) -> Named:
        return {n: jnp.swapaxes(x, 1, 2).astype(jnp.float32) / scale for n, x in results.items()}

    def function(q, k, v, factors):
        return {"y": attend(q, k, v, factors)}

    return Side(function, narrow, wide, backward=False)
