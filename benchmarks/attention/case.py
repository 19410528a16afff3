"""One attention on all sides, and what it must compute and move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core import agreement
from jax_cudnn._core.errors import GraphError

from ..case import BACKWARD, LIMIT, OURS, Array, Case, Named, Operand, Side
from . import torch_sides
from .formulations import Attended, by_blocks, in_jax_nn, plain, recomputed

JAX_NN = "jax.nn cudnn"
PUBLISHED = {
    "source": "NVIDIA, figures for H200 of the attention benchmark in github.com/NVIDIA/"
    "cudnn-frontend: batch 1, 64 and 8 heads, 128, causal"
}
_BACKWARD = 2.5  # five products instead of two
_ROWS = 64  # of a head, that are compared together
_IN_MEMORY = 2**32  # bytes of all scores in float32; with more, going by blocks is faster


@dataclass(frozen=True)
class AttentionCase(Case):
    """One attention on all sides.

    Attributes:
        pairs: of queries and keys whose products are computed, over all examples, as the field
            counts: times 4 H of each head they are FLOPs of the forward.
        kept: rows behind this length of each example are not looked at.
        dtype: of the products.
        tolerance: by program; None for that of the operands' dtype.
        published: TFLOP/s of forward and backward, by "forward" and "backward".
        published_side: the side that these are of.
    """

    pairs: float = 0.0
    kept: np.ndarray | None = None
    dtype: str = "bfloat16"
    tolerance: Mapping[str, float] | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    published_side: str = OURS

    large: ClassVar[bool] = True
    reference_is_best: ClassVar[bool] = True
    worst: ClassVar[str] = "rows"

    def shown(self, results: Named) -> Named:
        """With zeros in rows that are not looked at."""
        if self.kept is None:
            return results
        return {name: _first_rows(x, jnp.asarray(self.kept)) for name, x in results.items()}

    def flops(self, program: str) -> float:
        heads, size = self._q.shape[2:]
        return 4 * self.pairs * heads * size * (_BACKWARD if program == BACKWARD else 1)

    def bytes(self, program: str) -> int:
        """Operands and y, and in the backward y, its gradient and the others; of pages and of
        examples only what is used."""
        pages, lengths, used = self.operands.get("key_pages"), self.operands.get("lengths"), 1.0
        if isinstance(pages, Operand) and isinstance(lengths, np.ndarray):
            used = float(lengths.sum()) / (pages.shape[0] * pages.shape[2])
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
        return max(products, super().limit_us(program))

    def allowed(self, program: str) -> float:
        return super().allowed(program) if self.tolerance is None else self.tolerance[program]

    def difference(self, got: Named, want: Named) -> agreement.Difference:
        """In the norm, and the worst of some rows of a head together, next to their own size and
        that of all: of causal attention the first rows are many times as large as the last ones,
        whose rounding says nothing of theirs."""
        figures = []
        for name, x in want.items():
            shape = got[name].shape
            if shape != x.shape:
                raise GraphError(f"{name} has another shape", expected=f"{x.shape}", got=f"{shape}")
            figures.append(tuple(map(float, _of_rows(got[name], x))))
        return agreement.Difference(*map(agreement.largest, zip(*figures, strict=True)))

    def wants_power(self, program: str) -> bool:
        name = "backward" if program == BACKWARD else "forward"
        return self.published_side == OURS and name in self.published

    def about(self) -> dict[str, Any]:
        return {"published": {**self.published, "side": self.published_side}, "xla": [*self.xla]}

    @property
    def _q(self) -> Operand:
        found = self.operands["q"]
        assert isinstance(found, Operand)
        return found


@jax.jit
def _first_rows(x: Array, lengths: Array) -> Array:
    seen = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(seen[..., None, None], x, 0)


@jax.jit
def _of_rows(got: Array, want: Array) -> tuple[Array, Array]:
    """Of (B, S, N, H): relative errors of all, and the worst of some rows."""
    error, size = (_means(x) for x in (got.astype(jnp.float32) - want, want))
    whole = jnp.sqrt(jnp.mean(size)) + jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(jnp.mean(error)) / whole, jnp.max(jnp.sqrt(error) / (jnp.sqrt(size) + whole))


def _means(x: Array) -> Array:
    """The mean square of some rows of each head."""
    rows = math.gcd(x.shape[1], _ROWS)
    return jnp.mean(jnp.square(x.reshape(x.shape[0], -1, rows, *x.shape[2:])), (2, 4))


def _bytes(x: Operand | np.ndarray, dtype: str) -> int:
    if isinstance(x, np.ndarray):
        return x.nbytes
    return math.prod(x.shape) * min(jnp.dtype(dtype).itemsize, x.aval.dtype.itemsize)


# -- what several cases have in common -------------------------------------------------------------


def qkv(batch: int, size: int, heads: int, served: int, width: int) -> dict[str, Operand]:
    k = Operand((batch, size, served, width))
    return {"q": Operand((batch, size, heads, width)), "k": k, "v": k}


def xla(of: Attended, q: Operand) -> dict[str, Side]:
    """Formulations: those that hold all scores where they might be faster."""
    batch, size, heads, _ = q.shape
    found = {"by blocks": Side(by_blocks(of))}
    if 4 * batch * heads * size**2 <= _IN_MEMORY:
        name = "in jnp" if of.softcap is not None else "jax.nn xla"
        whole = plain(of) if of.softcap is not None else in_jax_nn(of, "xla")
        found |= {name: Side(whole), f"{name}, checkpoint": Side(recomputed(whole))}
    return found


def exact(of: Attended) -> Side:
    return Side(by_blocks(of, precision="highest"))


def sdpa(backend: str, causal: bool, served: int, learned: bool = True) -> list[Side]:
    """With K heads of keys and values, or, where a backend takes no such, with all N. Of a bias
    that is not ``learned`` there is no gradient, and so no backward of all operands."""
    function = torch_sides.sdpa(backend, causal, learned)

    def repeated(operands: Named) -> Named:
        heads = operands["q"].shape[2]
        more = {n: jnp.repeat(operands[n], heads // served, 2) for n in ("k", "v")}
        return {**operands, **more}

    def summed(x: Array) -> Array:
        grouped = x.reshape(*x.shape[:2], served, -1, x.shape[3])
        return jnp.sum(grouped.astype(jnp.float32), 3)

    def finish(results: Named) -> Named:
        return {n: summed(x) if n in ("k", "v") else x for n, x in results.items()}

    return [Side(function, backward=learned), Side(function, repeated, finish, backward=learned)]
