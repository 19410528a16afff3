"""The lowering rule: the plan of a graph for a GPU, processes and a program, and the program's
operations for a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import compat, context
from .errors import GraphError
from .graph.reference import NARROW, evaluate
from .graph.spec import GraphSpec
from .planning import progress, split
from .planning.placement import by_xla, left_to_xla, place
from .planning.plan import Plan, PlannedSegment

Call = Callable[..., Sequence[jax.Array]]


def plan(ctx: Any, spec: GraphSpec, name: str) -> Plan:
    """The plan of a graph in a lowering rule's context.

    Raises what planning raises; GraphError for symbolic dimensions, TargetError without a GPU.
    """
    name = spec.origin.titled(name)
    if left_to_xla(spec):
        return by_xla(spec, name)
    if not spec.is_static:
        raise GraphError(
            f"{name}: symbolic dimensions cannot be planned for CUDA",
            expected="static shapes",
            got=str(spec).splitlines()[0],
            why="a cuDNN plan is built for fixed shapes while lowering",
            fix="export one program for each shape, or export for platforms=('cpu',); "
            "implementation='xla' takes symbolic dimensions, too",
        )
    devices = compat.lowering_devices(ctx)
    with progress.of_program(compat.program(ctx)):
        return place(spec, context.site(devices, name), name, devices)


def run(plan: Plan, name: str, call: Call, *arrays: Any) -> list[jax.Array]:
    """The outputs of a graph according to its plan: cuDNN segments by ``call`` (:func:`ffi.call`),
    XLA segments by their reference."""
    read = {tensor for segment in plan.segments for tensor in segment.spec.inputs}

    def execute(segment: PlannedSegment, *inputs: Any) -> Sequence[jax.Array]:
        if segment.plan is None:
            return evaluate(segment.spec, *inputs, products=NARROW, read=read)
        return call(segment.plan, segment.spec, name, *inputs)

    return split.run(plan.segments, plan.spec, arrays, execute)
