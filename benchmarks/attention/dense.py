"""Attention of whole arrays: causal, of a window, with a bias, with capped scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cudnn import ops

from ..models.cases import Operand
from . import torch_sides
from .case import AttentionCase, Named, Side
from .formulations import Attended, in_jax_nn
from .parts import JAX_NN, exact, qkv, sdpa, xla
from .published import published
from .torch_sides import CUDNN, EFFICIENT, FLASH, FLEX


def causal_case(batch: int, size: int, heads: int, served: int, width: int) -> AttentionCase:
    marked = (batch, heads, served, width) == (1, 64, 8, 128)
    return _case(
        "causal",
        "causal",
        Attended(),
        qkv(batch, size, heads, served, width),
        {side: sdpa(side, True, served) for side in (CUDNN, FLASH)},
        published("bfloat16", size) if marked else {},
    )


def window_case(size: int, heads: int, served: int, width: int, window: int) -> AttentionCase:
    of = Attended(window=window)
    flash, one = torch_sides.varlen(FLASH, size, window), np.array([0, size], np.int32)

    def packed(operands: Named) -> Named:
        return {**{n: x[0] for n, x in operands.items()}, "offsets": jnp.asarray(one)}

    def whole(results: Named) -> Named:
        return {n: x[None] for n, x in results.items()}

    return _case(
        "window",
        f"causal, of the last {window} keys",
        of,
        qkv(1, size, heads, served, width),
        {
            CUDNN: "scaled_dot_product_attention takes no window",
            FLASH: [Side(flash, packed, whole, captured=False)],
            FLEX: [Side(_flex(of))],
        },
    )


def bias_case(size: int, heads: int, served: int, width: int) -> AttentionCase:
    bias = Operand((1, heads, size, size))
    return _case(
        "bias",
        "a bias of all scores, with its gradient",
        Attended(causal=False),
        {**qkv(1, size, heads, served, width), "bias": bias},
        {
            CUDNN: [*sdpa(CUDNN, False, served), *sdpa(CUDNN, False, served, learned=False)],
            FLASH: "scaled_dot_product_attention by flash attention takes no bias",
            EFFICIENT: sdpa(EFFICIENT, False, served),
        },
    )


def softcap_case(size: int, heads: int, served: int, width: int, cap: float) -> AttentionCase:
    of = Attended(softcap=cap)
    return _case(
        "softcap",
        f"causal, scores s as {cap:g} tanh(s / {cap:g}), by score_mod",
        of,
        qkv(1, size, heads, served, width),
        {
            **dict.fromkeys((CUDNN, FLASH), "scaled_dot_product_attention takes no softcap"),
            FLEX: [Side(_flex(of))],
        },
    )


def _case(
    kind: str,
    what: str,
    of: Attended,
    operands: Mapping[str, Operand],
    torch: Mapping[str, Sequence[Side] | str],
    known: Mapping[str, float] | None = None,
) -> AttentionCase:
    """In bfloat16, with gradients of all operands; ``known`` are figures that are published."""
    (batch, size, heads, width), served = operands["q"].shape, operands["k"].shape[2]
    no_softcap = "jax.nn.dot_product_attention takes no softcap"
    return AttentionCase(
        f"{kind}/{batch}x{size}x{heads}-{served}x{width}" + (f"-{of.window}" if of.window else ""),
        f"{what}; bfloat16",
        operands,
        (*operands,),
        batch * of.pairs(size),
        _ours(of),
        xla(of, operands["q"]),
        exact(of),
        torch,
        {JAX_NN: Side(in_jax_nn(of, "cudnn")) if of.softcap is None else no_softcap},
        published=known or {},
    )


def _ours(of: Attended) -> Callable[[str | None], Side]:
    window = None if of.window is None else (of.window - 1, 0)
    score_mod = None if of.softcap is None else ops.score_mods.softcap(of.softcap)

    def side(implementation: str | None) -> Side:
        def function(q, k, v, bias=None):
            y = ops.dot_product_attention(
                q, k, v, bias, is_causal=of.causal, local_window_size=window, score_mod=score_mod,
                implementation=implementation,
            )  # fmt: skip
            return {"y": y}

        return Side(function)

    return side


def _flex(of: Attended) -> Callable[..., Any]:
    """Made when it is called: without PyTorch it is not measured."""
    made: list[Callable[..., Any]] = []

    def function(**tensors: Any) -> Any:
        if not made:
            made.append(torch_sides.flex(of.causal, of.window, of.softcap))
        return made[0](**tensors)

    return function
