"""The program's operations for a planned graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .graph.reference import NARROW, evaluate
from .planning import split
from .planning.planned_graph import PlannedGraph, PlannedSegment

Call = Callable[..., Sequence[jax.Array]]


def run(plan: PlannedGraph, name: str, call: Call, *arrays: Any) -> list[jax.Array]:
    """The outputs of a graph according to its plan: cuDNN segments by ``call`` (:func:`ffi.call`),
    XLA segments by their reference."""
    read = {tensor for segment in plan.segments for tensor in segment.spec.inputs}

    def execute(segment: PlannedSegment, *inputs: Any) -> Sequence[jax.Array]:
        if segment.plan is None:
            return evaluate(segment.spec, *inputs, products=NARROW, read=read)
        return call(segment.plan, segment.spec, name, *inputs)

    return split.run(plan.segments, plan.spec, arrays, execute)
