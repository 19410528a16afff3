"""Attention of whole arrays: causal, of a window, with a bias, with capped scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import ops
from ..models.cases import Operand
from . import torch_sides
from .case import AttentionCase, Named, Side
from .formulations import Attended, in_jax_nn
from .parts import JAX_NN, exact, qkv, sdpa, xla
from .published import published
from .torch_sides import CUDNN, EFFICIENT, FLASH, FLEX


def causal_case(batch: int, size: int, heads: int, served: int, width: int) -> AttentionCase:
    of, operands = Attended(), qkv(batch, size, heads, served, width)

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            y = ops.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            return {"y": y}

        return Side(function)

    marked = (batch, heads, served, width) == (1, 64, 8, 128)
    return AttentionCase(
        f"causal/{batch}x{size}x{heads}-{served}x{width}",
        "causal; bfloat16",
        operands,
        ("q", "k", "v"),
        batch * of.pairs(size),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {side: sdpa(side, True, served) for side in (CUDNN, FLASH)},
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
        published=published("bfloat16", size) if marked else {},
    )


def window_case(size: int, heads: int, served: int, width: int, window: int) -> AttentionCase:
    of, operands = Attended(window=window), qkv(1, size, heads, served, width)

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            y = ops.dot_product_attention(
                q, k, v, is_causal=True, local_window_size=(window - 1, 0),
                implementation=implementation,
            )  # fmt: skip
            return {"y": y}

        return Side(function)

    flash, one = torch_sides.varlen(FLASH, size, window), np.array([0, size], np.int32)

    def packed(operands: Named) -> Named:
        return {**{n: x[0] for n, x in operands.items()}, "offsets": jnp.asarray(one)}

    def whole(results: Named) -> Named:
        return {n: x[None] for n, x in results.items()}

    return AttentionCase(
        f"window/1x{size}x{heads}-{served}x{width}-{window}",
        f"causal, of the last {window} keys; bfloat16",
        operands,
        ("q", "k", "v"),
        of.pairs(size),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {
            CUDNN: "scaled_dot_product_attention takes no window",
            FLASH: [Side(flash, packed, whole, captured=False)],
            FLEX: [Side(_flex(of))],
        },
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
    )


def bias_case(size: int, heads: int, served: int, width: int) -> AttentionCase:
    of, operands = Attended(causal=False), qkv(1, size, heads, served, width)
    operands["bias"] = Operand((1, heads, size, size))

    def ours(implementation: str | None) -> Side:
        def function(q, k, v, bias):
            return {"y": ops.dot_product_attention(q, k, v, bias, implementation=implementation)}

        return Side(function)

    return AttentionCase(
        f"bias/1x{size}x{heads}-{served}x{width}",
        "a bias of all scores, with its gradient; bfloat16",
        operands,
        ("q", "k", "v", "bias"),
        of.pairs(size),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {
            CUDNN: [*sdpa(CUDNN, False, served), *sdpa(CUDNN, False, served, learned=False)],
            FLASH: "scaled_dot_product_attention by flash attention takes no bias",
            EFFICIENT: sdpa(EFFICIENT, False, served),
        },
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
    )


def softcap_case(size: int, heads: int, served: int, width: int, cap: float) -> AttentionCase:
    of, operands = Attended(softcap=cap), qkv(1, size, heads, served, width)

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            score_mod = ops.score_mods.softcap(cap)
            attend: Any = ops.dot_product_attention
            y = attend(q, k, v, is_causal=True, score_mod=score_mod, implementation=implementation)
            return {"y": y}

        return Side(function)

    return AttentionCase(
        f"softcap/1x{size}x{heads}-{served}x{width}",
        f"causal, scores s as {cap:g} tanh(s / {cap:g}), by score_mod; bfloat16",
        operands,
        ("q", "k", "v"),
        of.pairs(size),
        ours,
        xla(of, operands["q"]),
        exact(of),
        {
            **dict.fromkeys((CUDNN, FLASH), "scaled_dot_product_attention takes no softcap"),
            FLEX: [Side(_flex(of))],
        },
        {JAX_NN: "jax.nn.dot_product_attention takes no softcap"},
    )


def _flex(of: Attended) -> Callable[..., Any]:
    """Made when it is called: without PyTorch it is not measured."""
    made: list[Callable[..., Any]] = []

    def function(**tensors: Any) -> Any:
        if not made:
            made.append(torch_sides.flex(of.causal, of.window, of.softcap))
        return made[0](**tensors)

    return function
