"""Derivatives of products: of what is linear in each of its two operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .._core.graph.dtypes import FP8

if TYPE_CHECKING:
    from .._core.graph.node import Node, Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation


def product_jvp(
    node: Node, g: Derivation, tangents: Values, inputs: Values, outputs: Values
) -> dict[str, GraphTensor]:
    """A product for each operand that moves, and their sum.

    No plan holds two products. The first takes what comes after it into its own; the others are
    written, rounded as arrays are.
    """
    terms, dtype = [], widest(x._state for x in inputs.values())
    for port, tangent in tangents.items():
        operands = {**inputs, port: tangent}
        if len({x._state.dtype for x in operands.values()}) > 1:
            operands = alike(g, operands, {p: x._state for p, x in inputs.items()})
        terms += g.apply(node, **operands)
    terms[1:] = [g.rounded(term, dtype) for term in terms[1:]]
    return {next(iter(outputs)): g.sum(terms)}


def alike(g: Derivation, operands: Values, tensors: Tensors) -> dict[str, GraphTensor]:
    """The operands of a derivative's product in one dtype: that of the product's own operands
    (``tensors``), the wider of two, and bfloat16 for float8, which it holds exactly."""
    dtype = widest(tensors.values())
    return {port: g.rounded(x, dtype) for port, x in operands.items()}


def widest(tensors: Iterable[Tensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= {*FP8}:
        return "bfloat16"
    (dtype, *others) = dtypes - {*FP8}
    return "float32" if others else dtype
