"""The dtypes of results, from those of operands, and of the values inside a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from ..errors import GraphTypeError
from .dtypes import FP8, INTEGERS, canonical_compute, is_floating, itemsize
from .spec import Call

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
    if usual == "float32" and node.anchor.product:
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
    if all(tensor.dtype in INTEGERS for tensor in inputs.values()) and node.anchor.product:
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


_TINY = 2**16  # many times XLA's limit: on a mesh a device may have a small part of the operands


def is_tiny(*sizes: int) -> bool:
    """Whether a product of float8, of matrices with so many elements, may be tiny on a device.

    Below 100 (``xla_gpu_gemm_rewrite_size_threshold``) XLA makes float16, in which products
    overflow. A symbolic size may be small."""
    return sum(size for size in sizes if isinstance(size, int)) <= _TINY


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


def intermediate_dtypes(
    calls: Sequence[Call], said: Mapping[str, str], fixed: Collection[str], wide: str
) -> dict[str, str]:
    """The dtypes of a graph's tensors.

    A floating value inside of it is ``wide`` (float64 stays), and one that is only moved has its
    source's dtype. One that a product multiplies with a 16-bit operand has that operand's, if it
    would have that as a result, too: cuDNN multiplies operands of one dtype.

    Args:
        calls: the graph's operations in order.
        said: the dtypes that tensors have as results, or were given.
        fixed: tensors that keep these.
        wide: what other floats have.
    """
    dtypes = dict(said)
    sources: dict[str, tuple[str, ...]] = {}  # of values that may have another dtype than `wide`
    for call in calls:
        node = call.node
        for _, name in call.outputs:
            if name in fixed:
                continue
            kept = node.anchor.keeps_dtypes
            if node.algebra.moves:
                sources[name] = tuple(source for _, source in call.inputs)
                dtypes[name] = dtypes[sources[name][0]]
            elif is_floating(said[name]) and not (node.xla_only or kept):
                sources[name] = ()
                dtypes[name] = "float64" if said[name] == "float64" else wide
    narrow = {
        name
        for call in calls
        for factor in _to_narrow(call, dtypes, said)
        for name in _with_sources(factor, said, sources)
    }
    return intermediate_dtypes(calls, said, {*fixed, *narrow}, wide) if narrow else dtypes


def _to_narrow(call: Call, dtypes: Mapping[str, str], said: Mapping[str, str]) -> Iterator[str]:
    """Factors of a product that have another dtype than the other one, and would have it."""
    factors = [name for _, name in call.inputs]
    if len(factors) == 2 and call.node.anchor.product:
        for name, other in (factors, factors[::-1]):
            if itemsize(dtypes[other]) == 2 and dtypes[name] != dtypes[other] == said[name]:
                yield name


def _with_sources(
    name: str, said: Mapping[str, str], sources: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """A value and all that it is moved from; nothing where an array is among it, or another dtype:
    what moves elements leaves them as they are."""
    found = [name]
    for moved in found:  # it grows
        found += sources.get(moved, ())
    return found if all(x in sources and said[x] == said[name] for x in found) else []
