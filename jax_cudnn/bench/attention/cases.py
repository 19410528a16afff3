"""Attention as users run it: with ``jc.ops``, by ``jax.nn``, in plain JAX, in PyTorch.

Operands have names: q, k and v are (B, S, N, H), with K heads of keys and values. A side may take
them in a form of its own, into which they are brought outside of the timing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import graph, ops
from ..agreement import tolerance
from ..models.cases import Operand
from ..sides import BACKWARD, FORWARD, OURS, TRAINING
from . import torch_sides
from .formulations import Attended, by_blocks, gathered, in_jax_nn, in_pages, plain, recomputed
from .torch_sides import CUDNN, EFFICIENT, FLASH, FLEX

Array = jax.Array
Named = dict[str, Any]

JAX_NN, PADDED, WIDE = "jax.nn cudnn", "jax_cudnn padded", "jax_cudnn bfloat16"
DELAYED, NARROW = "jax_cudnn delayed scaling", "jax_cudnn float8 operands"
LIMIT = {
    "tflops": {"bfloat16": 989.5, "float8_e4m3fn": 1979.0},
    "tbytes_s": 4.3,
    "of": "NVIDIA H200",
    "source": "dense peaks of its data sheet, measured copy bandwidth",
}
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
_FLOAT8 = {TRAINING: 0.1, BACKWARD: 0.2}
_BACKWARD = 2.5  # five products instead of two
_IN_MEMORY = 2**34  # bytes of scores in float32 that XLA is let have


@dataclass(frozen=True)
class Side:
    """One way to compute it.

    Attributes:
        function: of operands by name. In JAX the results by name, of which "y" is differentiated;
            in PyTorch y alone.
        prepare: operands of the case with "dy", where there is one, as this side takes them.
        finish: results or gradients by name, as all others give them.
        backward: whether there is one.
    """

    function: Callable[..., Any]
    prepare: Callable[[Named], Named] | None = None
    finish: Callable[[Named], Named] | None = None
    backward: bool = True

    def given(self, operands: Named) -> Named:
        return operands if self.prepare is None else self.prepare(operands)

    def common(self, results: Named) -> Named:
        return results if self.finish is None else self.finish(results)


Sides = Mapping[str, Side | str]


@dataclass(frozen=True)
class AttentionCase:
    """One attention on all sides.

    Attributes:
        name: kind and shape.
        what: one line for the reader.
        operands: what all sides get, by name: drawn, or as they are.
        learned: the operands that gradients are wanted of; none where there is no backward.
        pairs: of queries and keys whose products are computed, over all examples, as the field
            counts: times 4 H of each head they are FLOPs of the forward.
        ours: by ``jc.ops``, of the name of an implementation, or None for the default.
        others: further sides in JAX that are not XLA's; a text is why there is none.
        xla: formulations in plain JAX, by name.
        exact: the formulation that all sides are held against, in float32.
        torch: sides in PyTorch: the first of several ways that runs.
        kept: rows behind this length of each example are not looked at.
        dtype: of the products.
        tolerance: by program; None for that of the operands' dtype.
        published: TFLOP/s of forward and backward, by "forward" and "backward".
        published_side: the side that these are of.
    """

    name: str
    what: str
    operands: Mapping[str, Operand | np.ndarray]
    learned: tuple[str, ...]
    pairs: float
    ours: Callable[[str | None], Side]
    xla: Mapping[str, Side]
    exact: Side
    torch: Mapping[str, Sequence[Side] | str]
    others: Sides = field(default_factory=dict)
    kept: np.ndarray | None = None
    dtype: str = "bfloat16"
    tolerance: Mapping[str, float] | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    published_side: str = OURS

    @property
    def programs(self) -> tuple[str, ...]:
        return (TRAINING, BACKWARD) if self.learned else (FORWARD,)

    def arrays(self, key: Array) -> dict[str, Array]:
        """Random operands, and with "dy" the gradient of y, where there is a backward."""
        wanted = {n: x for n, x in self.operands.items() if isinstance(x, Operand)}
        if self.learned:
            wanted["dy"] = Operand(wanted["q"].shape, wanted["q"].dtype)
        keys = jax.random.split(key, len(wanted))
        drawn = {n: x.array(k) for (n, x), k in zip(wanted.items(), keys, strict=True)}
        fixed = {n: jnp.asarray(x) for n, x in self.operands.items() if isinstance(x, np.ndarray)}
        found = {**drawn, **fixed}
        return found | self.shown({"dy": found["dy"]}) if self.learned else found

    def shown(self, results: Named) -> Named:
        """Results with zeros in rows that are not looked at."""
        if self.kept is None:
            return results
        return {name: _first_rows(x, jnp.asarray(self.kept)) for name, x in results.items()}

    def flops(self, program: str) -> float:
        heads, size = self._q.shape[2:]
        return 4 * self.pairs * heads * size * (_BACKWARD if program == BACKWARD else 1)

    def bytes(self, program: str) -> int:
        """What must move, each array once: operands and y, and in the backward y, its gradient
        and the others; of pages and of examples only what is used."""
        used = self._used()
        size = {
            n: _bytes(x, self.dtype) * (used if n in ("key_pages", "value_pages") else 1)
            for n, x in self.operands.items()
        }
        if self.kept is not None:
            share = float(self.kept.sum()) / math.prod(self._q.shape[:2])
            size = {n: x * share for n, x in size.items()}
        read, y = sum(size.values()), size["q"]
        if program != BACKWARD:
            return int(read + y)
        return int(read + 2 * y + sum(size[n] for n in self.learned))

    def limit_us(self, program: str) -> float:
        """The time of the products at the peak of the chip, or of the bytes, if that is longer."""
        products = self.flops(program) / LIMIT["tflops"][self.dtype] / 1e6
        return max(products, self.bytes(program) / LIMIT["tbytes_s"] / 1e6)

    def allowed(self, program: str) -> float:
        if self.tolerance is not None:
            return self.tolerance[program]
        return tolerance((self._q.aval,), self._q.aval)

    def described(self) -> dict[str, str]:
        return {
            n: str(x) if isinstance(x, Operand) else f"{x.dtype}[{','.join(map(str, x.shape))}]"
            for n, x in self.operands.items()
        }

    @property
    def _q(self) -> Operand:
        found = self.operands["q"]
        assert isinstance(found, Operand)
        return found

    def _used(self) -> float:
        """The share of the pages' rows that is seen."""
        pages, lengths = self.operands.get("key_pages"), self.operands.get("lengths")
        if not isinstance(pages, Operand) or not isinstance(lengths, np.ndarray):
            return 1.0
        return float(lengths.sum()) / (pages.shape[0] * pages.shape[2])


@jax.jit
def _first_rows(x: Array, lengths: Array) -> Array:
    seen = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(seen[..., None, None], x, 0)


def _bytes(x: Operand | np.ndarray, dtype: str) -> int:
    if isinstance(x, np.ndarray):
        return x.nbytes
    return math.prod(x.shape) * min(jnp.dtype(dtype).itemsize, x.aval.dtype.itemsize)


# -- sides -----------------------------------------------------------------------------------------


def _qkv(batch: int, size: int, heads: int, served: int, width: int) -> dict[str, Operand]:
    return {
        "q": Operand((batch, size, heads, width)),
        "k": Operand((batch, size, served, width)),
        "v": Operand((batch, size, served, width)),
    }


def _xla(of: Attended, q: Operand) -> dict[str, Side]:
    """Formulations: those that hold all scores where there is memory for them."""
    batch, size, heads, _ = q.shape
    found = {"by blocks": Side(by_blocks(of))}
    if 4 * batch * heads * size**2 <= _IN_MEMORY:
        name = "in jnp" if of.softcap is not None else "jax.nn xla"
        whole = plain(of) if of.softcap is not None else in_jax_nn(of, "xla")
        found |= {name: Side(whole), f"{name}, checkpoint": Side(recomputed(whole))}
    return found


def _exact(of: Attended) -> Side:
    return Side(by_blocks(of, precision="highest"))


def _sdpa(backend: str, causal: bool, served: int) -> list[Side]:
    """With K heads of keys and values, or, where a backend takes no such, with all N."""
    function = torch_sides.sdpa(backend, causal)

    def repeated(operands: Named) -> Named:
        heads = operands["q"].shape[2]
        more = {n: jnp.repeat(operands[n], heads // served, 2) for n in ("k", "v")}
        return {**operands, **more}

    def summed(results: Named) -> Named:
        return {n: _summed(x, served) if n in ("k", "v") else x for n, x in results.items()}

    return [Side(function), Side(function, repeated, summed)]


def _summed(x: Array, served: int) -> Array:
    grouped = x.reshape(*x.shape[:2], served, -1, x.shape[3])
    return jnp.sum(grouped.astype(jnp.float32), 3)


def _torch(causal: bool, served: int, *sides: str) -> dict[str, Sequence[Side] | str]:
    return {side: _sdpa(side, causal, served) for side in (*sides, CUDNN, FLASH)}


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
        _torch(True, served),
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
            FLASH: [Side(flash, packed, lambda found: {n: x[None] for n, x in found.items()})],
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
        _torch(False, served, EFFICIENT),
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
        varied = Side(torch_sides.varlen(backend, size), packed, padded)
        whole = _sdpa(backend, True, served)
        return [varied, Side(whole[0].function, alone)]

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
        {side: [Side(torch_sides.paged(side))] for side in (CUDNN, FLASH)},
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
