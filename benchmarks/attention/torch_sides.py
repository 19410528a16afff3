"""The sides of the bench of attention that run in PyTorch.

Each is a function of tensors by name, (B, S, N, H) as JAX's arrays, that returns y. PyTorch is
imported when it is called.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

CUDNN, FLASH, EFFICIENT, FLEX = "torch cudnn", "torch flash", "torch efficient", "torch flex"
_BACKENDS = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION", EFFICIENT: "EFFICIENT_ATTENTION"}

Function = Callable[..., Any]


def sdpa(side: str, causal: bool, learned: bool = True) -> Function:
    """``scaled_dot_product_attention`` with one backend; with a bias, ``learned`` or constant, or
    with lengths as a mask of keys."""

    def function(q: Any, k: Any, v: Any, bias: Any = None, lengths: Any = None) -> Any:
        torch, attention = _imported()
        if bias is not None and not learned:
            bias = bias.detach()
        if lengths is not None:
            at = torch.arange(k.shape[1], device=k.device, dtype=lengths.dtype)
            bias = (at < lengths[:, None])[:, None, None, :]
        with attention.sdpa_kernel([getattr(attention.SDPBackend, _BACKENDS[side])]):
            y = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                attn_mask=bias,
                is_causal=causal,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        return y.transpose(1, 2)

    return function


def varlen(side: str, longest: int, window: int | None = None) -> Function:
    """Causal attention of packed examples, (T, N, H), with their offsets: the kernels under
    ``torch.nn.attention.varlen``."""

    def function(q: Any, k: Any, v: Any, offsets: Any) -> Any:
        return _varlen(side).apply(q, k, v, offsets, longest, window)

    return function


@functools.cache
def _varlen(side: str) -> Any:
    torch, _ = _imported()
    aten = torch.ops.aten

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, offsets: Any, longest: int, window: Any):
            fixed = (offsets, offsets, longest, longest, 0.0, window is None)
            bounds = {} if window is None else {"window_size_left": window - 1}
            bounds |= {} if window is None else {"window_size_right": 0}
            y, total, state, unused, _ = aten._flash_attention_forward(
                q, k, v, *fixed, False, **bounds
            )
            ctx.save_for_backward(q, k, v, y, total, state, unused)
            ctx.fixed, ctx.bounds = fixed, bounds
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Any):
            *kept, state, unused = ctx.saved_tensors
            found = aten._flash_attention_backward(
                grads[0], *kept, *ctx.fixed, state, unused, **ctx.bounds
            )
            return (*found, None, None, None)

    class Cudnn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, offsets: Any, longest: int, window: Any):
            assert window is None
            fixed = (offsets, offsets, longest, longest)
            y, total, _, _, _, _, seed, offset, _ = aten._cudnn_attention_forward(
                q, k, v, None, *fixed, True, 0.0, True, False
            )
            ctx.save_for_backward(q, k, v, y, total, seed, offset)
            ctx.fixed = fixed
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Any):
            found = aten._cudnn_attention_backward(
                grads[0], *ctx.saved_tensors, None, *ctx.fixed, 0.0, True
            )
            return (*found, None, None, None)

    return {FLASH: Flash, CUDNN: Cudnn}[side]


def flex(causal: bool, window: int | None = None, softcap: float | None = None) -> Function:
    """``flex_attention``, compiled, with a block mask that is made outside of the timing."""

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        found = i >= j
        return found if window is None else found & (i - j < window)

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return softcap * _imported()[0].tanh(score / softcap)

    @functools.cache
    def made() -> tuple[Any, Any]:
        module = importlib.import_module("torch.nn.attention.flex_attention")
        compiled = _imported()[0].compile(module.flex_attention, dynamic=False)
        return compiled, functools.cache(functools.partial(module.create_block_mask, seen))

    def function(q: Any, k: Any, v: Any) -> Any:
        compiled, mask = made()
        size = q.shape[1]
        y = compiled(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=None if softcap is None else capped,
            block_mask=mask(None, None, size, size, device=q.device) if causal else None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return y.transpose(1, 2)

    return function


def paged(side: str) -> Function:
    """Keys and values out of their pages, and :func:`sdpa`, or flash attention of the first so
    many keys."""
    attend = sdpa(side, causal=False)

    def function(q: Any, key_pages: Any, value_pages: Any, page_table: Any, lengths: Any) -> Any:
        torch, _ = _imported()
        k, v = (_from_pages(pages, page_table) for pages in (key_pages, value_pages))
        if side != FLASH:
            return attend(q, k, v, lengths=lengths)
        examples, size = k.shape[:2]
        first = torch.arange(examples + 1, device=q.device, dtype=torch.int32)
        y, *_ = torch.ops.aten._flash_attention_forward(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), first, first * size, 1, size,
            0.0, False, False, seqused_k=lengths,
        )  # fmt: skip
        return y.reshape(q.shape)

    return function


def _from_pages(pages: Any, table: Any) -> Any:
    found = pages[table.long()].transpose(2, 3)  # (B, pages, P, K, H)
    return found.reshape(table.shape[0], -1, *found.shape[3:])


def _imported() -> tuple[Any, Any]:
    return importlib.import_module("torch"), importlib.import_module("torch.nn.attention")
