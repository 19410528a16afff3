"""Matrix multiplication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.dims import Shape
from .._core.node import Example, Node, product_compute, product_dtype, product_operands

if TYPE_CHECKING:
    from .._core.spec import Tensor


@register
@dataclass(frozen=True)
class Matmul(Node):
    """Batched matrix product ``C[b,m,n] = sum over k of A[b,m,k] * B[b,k,n]``.

    Args:
        A: (B, M, K).
        B: (B, K, N); a batch of size 1 in one operand broadcasts.
        padding: pygraph's value for elements beyond ragged sizes; without effect on whole
            matrices.

    Element types: float32, bfloat16, float16, accumulated in float32 (float32 inputs may be
    rounded to TF32, as in lax at default precision). Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_MATMUL``.
    """

    method = "matmul"
    dims = "A: b m k, B: b k n -> C: b m n"
    batch = "b"
    broadcast = "b"
    jax_names = ("matmul", "dot", "dot_general", "einsum", "tensordot")
    anchor = True
    broadcasts_any = True
    examples = (
        Example({"A": (1, 128, 256), "B": (1, 256, 512)}, "bfloat16"),
        Example({"A": (4, 64, 96), "B": (4, 96, 40)}, "float16"),
        Example({"A": (3, 63, 65), "B": (1, 65, 33)}, "float32"),
    )

    padding: float = 0.0

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"C": (super().infer(inputs)["C"][0], product_dtype(inputs))}

    def default_compute(self, inputs: Mapping[str, Tensor]) -> str:
        return product_compute(inputs)

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        return 2 * math.prod(shapes["C"]) * shapes["A"][2]

    def reference(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, A: jax.Array, B: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        A, B = product_operands(A, B)
        kind = self.accumulator
        return (jnp.matmul(A, B, precision=precision, preferred_element_type=kind),)
