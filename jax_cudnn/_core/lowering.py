"""From a lowering rule to a plan: for which GPU, for which processes, in which program."""

from __future__ import annotations

from typing import Any

from . import compat, context
from .errors import GraphError
from .graph.spec import GraphSpec
from .planning import progress
from .planning.placement import by_xla, left_to_xla, place
from .planning.plan import Plan


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
            fix="export one program for each shape, or export for platforms=('cpu',)",
        )
    devices = compat.lowering_devices(ctx)
    with progress.of_program(compat.program(ctx)):
        return place(spec, context.site(devices, name), name, devices)
