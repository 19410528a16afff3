"""The program's operations for a planned graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .graph.boundary import boundary
from .graph.spec import GraphSpec
from .graph.xla_form import NARROW, evaluate
from .planning.planned_graph import PlannedGraph, PlannedSegment, Segments

Call = Callable[..., Sequence[jax.Array]]


def run(plan: PlannedGraph, name: str, call: Call, *arrays: Any) -> list[jax.Array]:
    """The outputs of a graph according to its plan: cuDNN segments by ``call`` (:func:`ffi.call`),
    XLA segments by their reference."""
    read = {tensor for segment in plan.segments for tensor in segment.spec.inputs}

    def execute(segment: PlannedSegment, *inputs: Any) -> Sequence[jax.Array]:
        if segment.plan is None:
            form = "" if segment.strict else NARROW
            given = boundary(segment.spec).clipped(inputs)
            return evaluate(segment.spec, *given, products=form, read=read)
        return call(segment.plan, segment.spec, name, *inputs)

    return in_order(plan.segments, plan.spec, arrays, execute)


def in_order(
    segments: Segments,
    spec: GraphSpec,
    operands: Sequence[Any],
    execute: Callable[..., Sequence[Any]],
) -> list[Any]:
    """The outputs of a graph, segment by segment: ``execute(segment, *inputs)`` gives outputs."""
    values = dict(zip(spec.inputs, operands, strict=True))
    for segment in segments:
        results = execute(segment, *(values[name] for name in segment.spec.inputs))
        values.update(zip(segment.spec.outputs, results, strict=True))
    return [values[name] for name in spec.outputs]
