"""Attention with its products in float8, beside the same in bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import ops
from jax_cudnn._core.graph.trace import graph

from ..sides import BACKWARD, TRAINING
from .case import AttentionCase, Named, Side
from .dense import causal_case
from .published import published

WIDE = "jax_cudnn bfloat16"
DELAYED, NARROW = "jax_cudnn delayed scaling", "jax_cudnn float8 operands"
# Weights and results have 3 bits behind the first, gradients 2: each rounding is 0.03 and 0.05.
_FLOAT8 = {TRAINING: 0.1, BACKWARD: 0.3}


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
        y = ops.dot_product_attention_fp8(q, k, v, state, is_causal=True)
        return {"y": y}

    def learned(operands: Named) -> Named:
        """The state after a step."""
        state = ops.DelayedScaling.create(1)
        given = {n: operands[n] for n in ("q", "k", "v")}

        def step(given: Named, dy: Any, state: Any) -> Any:
            _, pull = jax.vjp(lambda state: with_state(**given, state=state)["y"], state)
            return pull(dy)[0]

        return {**operands, "state": jax.jit(step)(given, operands["dy"], state)}

    wide = causal_case(1, size, heads, served, width)
    marked = (heads, served, width) == (64, 8, 128)
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
        published=published(dtype, size) if marked else {},
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
