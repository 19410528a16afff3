"""A Graph's spec in the form of a graph function's, so that equal graphs compare equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .._core.graph.dtypes import is_floating
from .._core.graph.layout import layout, lies_so
from .._core.graph.spec import GraphSpec, Tensor, intern


def with_constants(spec: GraphSpec, literals: dict[str, str]) -> GraphSpec:
    """The same graph with these inputs as constants, in float32 or int32."""
    if not literals:
        return spec

    def known(tensor: Tensor) -> Tensor:
        dtype = "float32" if is_floating(tensor.dtype) else "int32"
        return replace(tensor, literal=literals[tensor.name], dtype=dtype)

    tensors = tuple(known(t) if t.name in literals else t for t in spec.tensors)
    inputs = tuple(name for name in spec.inputs if name not in literals)
    return intern(replace(spec, tensors=tensors, inputs=inputs))


def inputs_first(spec: GraphSpec, order: Sequence[str]) -> GraphSpec:
    """The same graph with its inputs in this order, and its tensors in the order of a graph
    function, so that equal graphs share plans."""
    inputs = sorted(spec.inputs, key=order.index)
    places = {name: place for place, name in enumerate(inputs)}
    ordered = sorted(spec.tensors, key=lambda tensor: places.get(tensor.name, len(places)))
    return intern(replace(spec, tensors=tuple(ordered), inputs=tuple(inputs)))


def with_usual_orders(spec: GraphSpec) -> GraphSpec:
    """The same graph without memory orders that tensors have by default: it then equals a graph
    that states none, and may be passed to cuDNN with other dims."""
    if all(tensor.order is None for tensor in spec.tensors):
        return spec
    silent = tuple(replace(tensor, order=None) for tensor in spec.tensors)
    usual = layout(replace(spec, tensors=silent)).orders
    tensors = (
        replace(tensor, order=None) if lies_so(tensor, order, order) else tensor
        for tensor, order in zip(spec.tensors, usual.values(), strict=True)
    )
    return intern(replace(spec, tensors=tuple(tensors)))
