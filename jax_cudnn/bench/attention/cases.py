"""Attention as users run it: with ``jc.ops``, by ``jax.nn``, in plain JAX, in PyTorch.

Operands have names: q, k and v are (B, S, N, H), with K heads of keys and values. A side may take
them in a form of its own, into which they are brought outside of the timing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import ops
from ..._core.graph.trace import graph
from ..models.cases import Operand
from ..sides import BACKWARD, TRAINING
from . import torch_sides
from .case import Array, AttentionCase, Named, Side
from .formulations import Attended, by_blocks, gathered, in_jax_nn, in_pages, plain, recomputed
from .torch_sides import CUDNN, EFFICIENT, FLASH, FLEX

JAX_NN, PADDED, WIDE = "jax.nn cudnn", "jax_cudnn padded", "jax_cudnn bfloat16"
DELAYED, NARROW = "jax_cudnn delayed scaling", "jax_cudnn float8 operands"
PUBLISHED = {
    "source": "NVIDIA, figures for H200 of the attention benchmark in github.com/NVIDIA/"
    "cudnn-frontend: batch 1, 64 and 8 heads, 128, causal"
}
_PUBLISHED = {
    ("bfloat16", 4096): {"forward": 591, "backward": 474},
    ("bfloat16", 16384): {"forward": 673, "backward": 579},
    ("float8_e4m3fn", 4096): {"forward": 854},
    ("float8_e4m3fn", 16384): {"forward": 1010},
    ("float8_e4m3fn", 32768): {"forward": 1042},
}
# Weights and results have 3 bits behind the first, gradients 2: each rounding is 0.03 and 0.05.
_FLOAT8 = {TRAINING: 0.1, BACKWARD: 0.3}
_IN_MEMORY = 2**32  # bytes of all scores in float32; with more, going by blocks is faster


# -- sides -----------------------------------------------------------------------------------------


def _qkv(batch: int, size: int, heads: int, served: int, width: int) -> dict[str, Operand]:
    return {
        "q": Operand((batch, size, heads, width)),
        "k": Operand((batch, size, served, width)),
        "v": Operand((batch, size, served, width)),
    }


def _xla(of: Attended, q: Operand) -> dict[str, Side]:
    """Formulations: those that hold all scores where they might be faster."""
    batch, size, heads, _ = q.shape
    found = {"by blocks": Side(by_blocks(of))}
    if 4 * batch * heads * size**2 <= _IN_MEMORY:
        name = "in jnp" if of.softcap is not None else "jax.nn xla"
        whole = plain(of) if of.softcap is not None else in_jax_nn(of, "xla")
        found |= {name: Side(whole), f"{name}, checkpoint": Side(recomputed(whole))}
    return found


def _exact(of: Attended) -> Side:
    return Side(by_blocks(of, precision="highest"))


def _sdpa(backend: str, causal: bool, served: int, learned: bool = True) -> list[Side]:
    """With K heads of keys and values, or, where a backend takes no such, with all N. Of a bias
    that is not ``learned`` there is no gradient, and so no backward of all operands."""
    function = torch_sides.sdpa(backend, causal, learned)

    def repeated(operands: Named) -> Named:
        heads = operands["q"].shape[2]
        more = {n: jnp.repeat(operands[n], heads // served, 2) for n in ("k", "v")}
        return {**operands, **more}

    def summed(results: Named) -> Named:
        return {n: _summed(x, served) if n in ("k", "v") else x for n, x in results.items()}

    return [Side(function, backward=learned), Side(function, repeated, summed, backward=learned)]


def _summed(x: Array, served: int) -> Array:
    grouped = x.reshape(*x.shape[:2], served, -1, x.shape[3])
    return jnp.sum(grouped.astype(jnp.float32), 3)


# -- cases -----------------------------------------------------------------------------------------


def _causal(batch: int, size: int, heads: int, served: int, width: int) -> AttentionCase:
    of, operands = Attended(), _qkv(batch, size, heads, served, width)

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
        _xla(of, operands["q"]),
        _exact(of),
        {side: _sdpa(side, True, served) for side in (CUDNN, FLASH)},
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
        published=_PUBLISHED.get(("bfloat16", size), {}) if marked else {},
    )


def _window(size: int, heads: int, served: int, width: int, window: int) -> AttentionCase:
    of, operands = Attended(window=window), _qkv(1, size, heads, served, width)

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
        _xla(of, operands["q"]),
        _exact(of),
        {
            CUDNN: "scaled_dot_product_attention takes no window",
            FLASH: [Side(flash, packed, whole, captured=False)],
            FLEX: [Side(_flex(of))],
        },
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
    )


def _bias(size: int, heads: int, served: int, width: int) -> AttentionCase:
    of, operands = Attended(causal=False), _qkv(1, size, heads, served, width)
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
        _xla(of, operands["q"]),
        _exact(of),
        {
            CUDNN: [*_sdpa(CUDNN, False, served), *_sdpa(CUDNN, False, served, learned=False)],
            FLASH: "scaled_dot_product_attention by flash attention takes no bias",
            EFFICIENT: _sdpa(EFFICIENT, False, served),
        },
        {JAX_NN: Side(in_jax_nn(of, "cudnn"))},
    )


def _softcap(size: int, heads: int, served: int, width: int, cap: float) -> AttentionCase:
    of, operands = Attended(softcap=cap), _qkv(1, size, heads, served, width)

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            score_mod = ops.score_mods.softcap(cap)  # pyright: ignore[reportAttributeAccessIssue]
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
        _xla(of, operands["q"]),
        _exact(of),
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


def _packed(
    lengths: Sequence[int], size: int, heads: int, served: int, width: int
) -> AttentionCase:
    of, operands = Attended(), _qkv(len(lengths), size, heads, served, width)
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
            y = ops.packed_dot_product_attention(  # pyright: ignore[reportAttributeAccessIssue]
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
        whole, _ = _sdpa(backend, True, served)
        return [varied, Side(whole.function, alone, captured=False)]

    return AttentionCase(
        f"packed/{len(lengths)}x{size}x{heads}-{served}x{width}",
        f"causal; examples of {', '.join(map(str, lengths))} tokens, one behind the other, or "
        f"padded to {size}; bfloat16",
        {**operands, "lengths": counts},
        ("q", "k", "v"),
        sum(of.pairs(length) for length in lengths),
        ours,
        _xla(of, operands["q"]),
        _exact(of),
        {side: plain_sides(side) for side in (CUDNN, FLASH)},
        {PADDED: Side(with_lengths), JAX_NN: Side(in_jax_nn(of, "cudnn"))},
        kept=counts,
    )


def _float8(size: int, heads: int, served: int, width: int) -> AttentionCase:
    """Beside the same in bfloat16. Operands and results are bfloat16, as those of a model are, but
    for one side that gets them in float8 and has no backward."""
    dtype = "float8_e4m3fn"

    def ours(implementation: str | None) -> Side:
        def function(q, k, v):
            y = ops.dot_product_attention_fp8(  # pyright: ignore[reportAttributeAccessIssue]
                q, k, v, is_causal=True, implementation=implementation
            )
            return {"y": y}

        return Side(function)

    def with_state(q, k, v, state):
        y = ops.dot_product_attention_fp8(  # pyright: ignore[reportAttributeAccessIssue]
            q, k, v, state, is_causal=True
        )
        return {"y": y}

    def learned(operands: Named) -> Named:
        """The state after a step."""
        state = ops.DelayedScaling.create(1)  # pyright: ignore[reportAttributeAccessIssue]
        dy, given = operands["dy"], {n: operands[n] for n in ("q", "k", "v")}

        def step(state: Any) -> Any:
            _, pull = jax.vjp(lambda state: with_state(**given, state=state)["y"], state)
            return pull(dy)[0]

        return {**operands, "state": jax.jit(step)(state)}

    wide = _causal(1, size, heads, served, width)
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
        published=_PUBLISHED.get((dtype, size), {}) if marked else {},
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


def _paged(lengths: Sequence[int], pages: int, page: int, heads: int, served: int) -> AttentionCase:
    batch, width = len(lengths), 128
    table = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    cache = Operand((batch * pages, served, page, width))
    q = Operand((batch, 1, heads, width))

    def ours(implementation: str | None) -> Side:
        def function(q, key_pages, value_pages, page_table, lengths):
            y = ops.paged_dot_product_attention(  # pyright: ignore[reportAttributeAccessIssue]
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


# -- all of them -----------------------------------------------------------------------------------


def _drawn(count: int, least: int, most: int) -> list[int]:
    """Lengths, always the same."""
    return [int(n) for n in np.random.default_rng(0).integers(least, most + 1, count)]


def attention_cases() -> Iterator[AttentionCase]:
    """All cases, in the order of the table."""
    for size in (2048, 4096, 8192, 16384, 32768):
        yield _causal(1, size, 64, 8, 128)
    yield _causal(2, 8192, 32, 8, 128)
    yield _packed(_drawn(8, 1, 4096), 4096, 32, 8, 128)
    yield _window(16384, 64, 8, 128, 1024)
    yield _bias(4096, 32, 8, 128)
    yield _softcap(4096, 32, 8, 128, 50.0)
    for size in (4096, 8192, 16384):
        yield _float8(size, 64, 8, 128)
    yield _paged([8192] * 64, 128, 64, 64, 8)
    yield _paged(_drawn(64, 4096, 8192), 128, 64, 64, 8)


def tiny_cases() -> Iterator[AttentionCase]:
    """The same with small shapes, for a CPU."""
    yield _causal(2, 64, 4, 2, 16)
    yield _packed([40, 64, 9], 64, 4, 2, 16)
    yield _window(64, 4, 2, 16, 20)
    yield _bias(64, 4, 2, 16)
    yield _softcap(64, 4, 2, 16, 2.0)
    yield _float8(64, 4, 2, 128)  # the size that cuDNN has a backward for
    yield _paged([33, 64, 1], 4, 16, 4, 2)
