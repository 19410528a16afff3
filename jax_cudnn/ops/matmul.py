"""Matrix multiplication."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.node import Example, Node


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

    def reference(self, A: jax.Array, B: jax.Array) -> tuple[jax.Array, ...]:
        dtype = jnp.result_type(A, B)
        return (jnp.matmul(A.astype(dtype), B.astype(dtype), preferred_element_type=jnp.float32),)
