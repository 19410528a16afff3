"""Attention as users run it: with ``jc.ops``, by ``jax.nn``, in plain JAX, in PyTorch.

Operands have names: q, k and v are (B, S, N, H), with K heads of keys and values. A side may take
them in a form of its own, into which they are brought outside of the timing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cudnn import ops

from ..case import Named, Operand, Side
from . import torch_sides
from .case import JAX_NN, AttentionCase, exact, qkv, sdpa, xla
from .formulations import Attended, in_jax_nn
from .torch_sides import CUDNN, EFFICIENT, FLASH, FLEX

_PUBLISHED = {
    ("bfloat16", 4096): {"forward": 591, "backward": 474},
    ("bfloat16", 16384): {"forward": 673, "backward": 579},
    ("float8_e4m3fn", 4096): {"forward": 854},
    ("float8_e4m3fn", 16384): {"forward": 1010},
    ("float8_e4m3fn", 32768): {"forward": 1042},
}


def published(dtype: str, batch: int, size: int, *heads: int) -> Mapping[str, float]:
    """What NVIDIA says of these products, in TFLOP/s by "forward" and "backward"."""
    return _PUBLISHED.get((dtype, size), {}) if (batch, *heads) == (1, 64, 8, 128) else {}


def causal_case(batch: int, size: int, heads: int, served: int, width: int) -> AttentionCase:
    return _case(
        "causal",
        "causal",
        Attended(),
        qkv(batch, size, heads, served, width),
        {side: sdpa(side, True, served) for side in (CUDNN, FLASH)},
        published("bfloat16", batch, size, heads, served, width),
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
            FLEX: [Side(torch_sides.flex(of.causal, of.window))],
        },
    )


def bias_case(size: int, heads: int, served: int, width: int) -> AttentionCase:
    return _case(
        "bias",
        "a bias of all scores, with its gradient",
        Attended(causal=False),
        {**qkv(1, size, heads, served, width), "bias": Operand((1, heads, size, size))},
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
            FLEX: [Side(torch_sides.flex(of.causal, softcap=of.softcap))],
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
        partial(_ours, of),
        xla(of, operands["q"]),
        exact(of),
        torch,
        {JAX_NN: Side(in_jax_nn(of, "cudnn")) if of.softcap is None else no_softcap},
        pairs=batch * of.pairs(size),
        published=known or {},
    )


def _ours(of: Attended, implementation: str | None) -> Side:
    window = None if of.window is None else (of.window - 1, 0)
    score_mod = None if of.softcap is None else ops.score_mods.softcap(of.softcap)

    def function(q, k, v, bias=None):
        y = ops.dot_product_attention(
            q, k, v, bias, is_causal=of.causal, local_window_size=window, score_mod=score_mod,
            implementation=implementation,
        )  # fmt: skip
        return {"y": y}

    return Side(function)


def _drawn(count: int, least: int, most: int) -> list[int]:
    """Lengths, always the same."""
    return [int(n) for n in np.random.default_rng(0).integers(least, most + 1, count)]


def cases(tiny: bool = False) -> Iterator[Any]:
    """All cases, in the order of the table; or each kind with a small shape, for a CPU."""
    from .special import float8_case, packed_case, paged_case

    if tiny:
        yield causal_case(2, 64, 4, 2, 16)
        yield packed_case([40, 64, 9], 64, 4, 2, 16)
        yield window_case(64, 4, 2, 16, 20)
        yield bias_case(64, 4, 2, 16)
        yield softcap_case(64, 4, 2, 16, 2.0)
        yield float8_case(64, 4, 2, 128)  # the size that cuDNN has a backward for
        yield paged_case([33, 64, 1], 4, 16, 4, 2)
        return
    for size in (2048, 4096, 8192, 16384, 32768):
        yield causal_case(1, size, 64, 8, 128)
    yield causal_case(2, 8192, 32, 8, 128)
    yield packed_case(_drawn(8, 1, 4096), 4096, 32, 8, 128)
    yield window_case(16384, 64, 8, 128, 1024)
    yield bias_case(4096, 32, 8, 128)
    yield softcap_case(4096, 32, 8, 128, 50.0)
    for size in (4096, 8192, 16384):
        yield float8_case(size, 64, 8, 128)
    yield paged_case([8192] * 64, 128, 64, 64, 8)
    yield paged_case(_drawn(64, 4096, 8192), 128, 64, 64, 8)
