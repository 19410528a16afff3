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
from .._core.dtypes import PRODUCTS, itemsize
from .._core.node import ANY, Example, Node, product_compute, product_dtype, product_operands

if TYPE_CHECKING:
    from .._core.spec import GraphSpec, Tensor


_ALIGNED = 16  # bytes


@register
@dataclass(frozen=True)
class Matmul(Node):
    """Batched matrix product ``C[b,m,n] = sum over k of A[b,m,k] * B[b,k,n]``.

    Args:
        A: (B, M, K).
        B: (B, K, N); a batch of size 1 in one operand broadcasts. ``.set_stride`` on an operand
            states that it lies transposed in memory, and then no copy is made.
        padding: pygraph's value for elements beyond ragged sizes; without effect on whole
            matrices.

    Element types: floats, accumulated in float32 (float32 inputs may be rounded to TF32, as in
    lax at default precision); int8, accumulated in int32. Raises GraphError for shapes that do
    not fit. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_MATMUL``.
    """

    method = "matmul"
    dims = "A: b m k, B: b k n -> C: b m n"
    batch = "b"
    broadcast = "b"
    jax_names = ("matmul", "dot", "dot_general", "einsum", "tensordot")
    requires = (
        "operands of one dtype, or of two float8 formats; cast an operand of another dtype in the "
        "graph, g.identity(x).set_data_type(...), which costs no pass over memory"
    )
    anchor = True
    prologue = ANY
    broadcasts_around = ANY
    dtypes = PRODUCTS
    examples = (
        Example({"A": (1, 128, 256), "B": (1, 256, 512)}, "bfloat16"),
        Example({"A": (4, 64, 96), "B": (4, 96, 40)}, "float16"),
        Example({"A": (3, 63, 65), "B": (1, 65, 33)}, "float32"),
        Example({"A": (1, 64, 32), "B": (4, 32, 48)}, "bfloat16", {"padding": 1.0}),
        Example({"A": (2, 64, 128), "B": (2, 128, 32)}, "int8"),
        Example(
            {"A": (1, 64, 128), "B": (1, 128, 64)},
            "float8_e4m3fn",
            dtypes={"B": "float8_e5m2"},
            out="bfloat16",
        ),
        Example(
            {"A": (1, 64, 128), "B": (1, 128, 64)},
            "bfloat16",
            dtypes={"B": "float32"},
            alone=False,
        ),
    )

    padding: float = 0.0

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"C": (super().infer(inputs)["C"][0], product_dtype(inputs))}

    def default_compute(self, inputs: Mapping[str, Tensor]) -> str:
        return product_compute(inputs)

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        floats = {tensors["A"].dtype, tensors["B"].dtype} & {"float32"}
        if floats and graph.options.precision in ("high", "highest"):
            return (
                "cuDNN multiplies float32 matrices in TF32 only, and precision "
                f"{graph.options.precision!r} forbids that (at precision 'default' it is "
                "supported; so are bfloat16, float16, float8 and int8 at any, and float32 "
                "convolutions)"
            )
        if tensors["A"].name == tensors["B"].name:
            # Measured on an H200 with cuDNN 9.19: relative errors of 0.4 to 1.7.
            return "both operands are the same tensor"
        computed = {tensors["A"].name, tensors["B"].name} - {*graph.inputs}
        rows = [t.shape[-1] * itemsize(t.dtype) for t in graph.input_tensors if t.shape[-1] > 1]
        if computed and any(size % _ALIGNED for size in rows):
            # Measured on an H200 with cuDNN 9.19: of rows of 12 bytes it computed another matrix.
            return (
                f"an operand is computed in the graph, of arrays whose rows are no multiple of "
                f"{_ALIGNED} bytes"
            )
        return None

    def distrusted(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> tuple[int, ...]:
        # Measured on an H200 with cuDNN 9.19: of float32 operands, the cuBLASLt engine writes
        # garbage into results of 16 and 8 bits.
        narrow = {tensor.dtype for tensor in graph.output_tensors} - {"float32"}
        return (0,) if graph.has_float32_product and narrow else ()

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        return 2 * math.prod(shapes["C"]) * shapes["A"][2]

    def reference(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, A: jax.Array, B: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        A, B = product_operands(A, B)
        kind = self.accumulator
        return (jnp.matmul(A, B, precision=precision, preferred_element_type=kind),)
