"""The dtypes of results, from those of operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from ..errors import GraphTypeError
from .dtypes import FP8, INTEGERS, canonical_compute

if TYPE_CHECKING:
    from .dims import Shape
    from .node import Node
    from .spec import Tensor


def computed(node: Node, compute: str | None, inputs: Mapping[str, Tensor]) -> Node:
    """The node with its compute type. A product of floats accumulates in one of several types;
    every other node has one type."""
    usual = compute_type(default_compute(node, inputs), inputs)
    compute = compute_type(canonical_compute(compute), inputs) if compute else usual
    allowed = [usual]
    if node.product and usual == "float32":
        allowed.append("float16")
        if all(tensor.dtype in FP8 for tensor in inputs.values()):
            allowed.append("fast_float_for_fp8")
    if compute not in allowed:
        operands = ", ".join(dict.fromkeys(tensor.dtype for tensor in inputs.values()))
        raise GraphTypeError(
            f"this operation does not support compute_data_type {compute}",
            expected=f"{' or '.join(allowed)} for operands of {operands}",
            got=compute,
        )
    return replace(node, compute_data_type=compute)


def default_compute(node: Node, inputs: Mapping[str, Tensor]) -> str:
    """The compute type if the user sets none; a product of integers has their accumulator."""
    if node.product and all(tensor.dtype in INTEGERS for tensor in inputs.values()):
        return "int32"
    return "bool" if node.dtypes == ("bool",) else "float32"


def inferred(node: Node, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
    """The node's :meth:`~.node.Node.infer`; with a float64 operand, float32 results are float64."""
    return {
        port: (shape, compute_type(dtype, inputs))
        for port, (shape, dtype) in node.infer(inputs).items()
    }


def compute_type(compute: str, inputs: Mapping[str, Tensor]) -> str:
    """The compute type; with a float64 operand, float64 instead of float32."""
    wide = compute == "float32" and any(t.dtype == "float64" for t in inputs.values())
    return "float64" if wide else compute


def result_dtype(inputs: Mapping[str, Tensor]) -> str:
    """JAX's promotion of the inputs; by-value constants are its weakly typed Python numbers."""
    arrays = [jax.numpy.dtype(t.dtype) for t in inputs.values() if t.literal is None]
    if not arrays:
        return "float32"
    try:
        dtype = jax.numpy.result_type(*arrays)
    except ValueError:  # JAX promotes no float8 with another
        return "float32"
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        if any(t.literal is not None and t.dtype == "float32" for t in inputs.values()):
            return "float32"
    return dtype.name


def product_dtype(inputs: Mapping[str, Tensor]) -> str:
    """The dtype of a product: promoted as JAX does, the accumulator's for 8-bit operands."""
    dtypes = {t.dtype for t in inputs.values()}
    if all(dtype in INTEGERS for dtype in dtypes):
        return "int32"
    return "float32" if dtypes <= {*FP8} else result_dtype(inputs)


def product_operands(*arrays: jax.Array, accumulator: Any) -> list[jax.Array]:
    """The operands of a product in one dtype that lax multiplies: 8-bit numbers made wider, float8
    as wide as the sums."""
    names = {str(array.dtype) for array in arrays}
    if names <= {*INTEGERS}:
        dtype = jax.numpy.dtype("int32")
    elif names & {*FP8}:
        dtype = jax.numpy.dtype(accumulator)
    else:
        dtype = jax.numpy.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]
