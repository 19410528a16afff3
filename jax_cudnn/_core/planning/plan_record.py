"""A Plan as data and as bytes, without the other candidates."""

from __future__ import annotations

import json
from typing import Any

from ..errors import GraphError
from ..graph import record
from ..graph.dtypes import TO_CUDNN, WORDS
from ..graph.field_types import checked
from ..graph.spec import GraphSpec, intern
from ..package import version
from .execution_plan import ExecutionPlan
from .plan import Plan, PlannedSegment

_KIND = "jax_cudnn plan"
_FORMAT = 1
_AGAIN = "plan the function again with jax_cudnn.plan(fn, *args) and serialize that plan"


def data(plan: Plan) -> dict[str, Any]:
    """A plan as data for ``json.dumps``."""
    return {
        "kind": _KIND,
        "format": _FORMAT,
        "jax_cudnn": version(),
        "name": plan.name,
        "gpu": plan.gpu,
        "implementation": plan.implementation,
        "engine": plan.engine,
        "workspace_bytes": plan.workspace_bytes,
        "graph": record.encoded(plan.spec),
        "segments": [_segment(segment) for segment in plan.segments],
    }


def dumped(plan: Plan) -> bytes:
    """The data as UTF-8 text."""
    return json.dumps(data(plan), separators=(",", ":"), allow_nan=False).encode()


def loaded(content: bytes) -> Plan:
    """The plan that :func:`dumped` wrote; GraphError for anything else."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError, RecursionError) as error:
        raise _no_plan(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise _no_plan(repr(content[:60]))
    if found.get("format") != _FORMAT:
        raise GraphError(
            "this plan has another format",
            expected=f"format {_FORMAT}, written by jax_cudnn {version()}",
            got=f"format {found.get('format')}, written by jax_cudnn {found.get('jax_cudnn')}",
            fix=_AGAIN,
        )
    try:
        spec = _graph(found["graph"])
        name, gpu, implementation = (found[key] for key in ("name", "gpu", "implementation"))
        segments = tuple(map(_read_segment, found["segments"]))
        return checked(Plan(name, gpu, implementation, spec, segments))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise GraphError(
            "this plan cannot be read",
            expected=f"a plan written by jax_cudnn {version()}",
            got=f"written by jax_cudnn {found.get('jax_cudnn')}: {type(error).__name__}: {error}",
            why="a plan holds its graph, and operations differ between versions",
            fix=_AGAIN,
        ) from error


def _segment(segment: PlannedSegment) -> dict[str, Any]:
    return {
        "graph": record.encoded(segment.spec),
        "calls": list(segment.calls),
        "plan": None if segment.plan is None else segment.plan.to_json(),
        "reason": segment.reason,
    }


def _read_segment(row: dict[str, Any]) -> PlannedSegment:
    plan = None if row["plan"] is None else ExecutionPlan.from_json(row["plan"])
    calls, reason = tuple(row["calls"]), row["reason"]
    return checked(PlannedSegment(_graph(row["graph"]), calls, plan and checked(plan), reason))


def _graph(content: Any) -> GraphSpec:
    spec = record.decoded(content)
    if not isinstance(spec, GraphSpec):
        raise ValueError(f"expected a graph, got {spec!r}"[:200])
    names = {tensor.name for tensor in spec.tensors}
    ports = [name for call in spec.calls for _, name in (*call.inputs, *call.outputs)]
    if unknown := sorted({*spec.inputs, *spec.outputs, *ports} - names):
        raise ValueError(f"the graph has no tensor {', '.join(unknown)}"[:200])
    if unknown := sorted({tensor.dtype for tensor in spec.tensors} - {*TO_CUDNN, WORDS}):
        raise ValueError(f"no tensor has the dtype {', '.join(unknown)}"[:200])
    return intern(spec)


def _no_plan(got: str) -> GraphError:
    return GraphError(
        "not a serialized plan",
        expected="the bytes of Plan.serialize()",
        got=got,
        fix=_AGAIN,
    )
