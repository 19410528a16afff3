"""Which parts of a graph run where, and why: as text and as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import TargetError
from ..graph.boundary import edges
from ..planning.cost import cost, roofline
from ..planning.deviceless import profiles
from ..text import size, wrapped

if TYPE_CHECKING:
    from ..cuda import CudaDevice
    from ..planning.deviceless.profiles import Profile
    from ..planning.planned_graph import PlannedGraph, PlannedSegment


@dataclass(frozen=True)
class Explanation:
    """The explanation of a :class:`Plan`: prints as text; ``to_json`` gives data."""

    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """``{"name", "role", "residuals", "gpu", "implementation", "graph", "cut_bytes",
        "segments": [{"runs_on", "operations", "engine", "workspace_bytes", "candidates",
        "reads_bytes", "writes_bytes", "flops", "roofline_seconds", "reason", "advice"}]}``;
        a new dictionary each time."""
        return json.loads(json.dumps(self.data))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        data = self.data
        segments = data["segments"]
        count = "one segment" if len(segments) == 1 else f"{len(segments)} segments"
        yield (
            f"{data['name']} on {data['gpu']}, implementation {data['implementation']!r}: {count}"
        )
        if engine := data["engine_of_another_graph"]:
            whose = "belongs to the graph from which vmap or autodiff derived this one"
            yield wrapped(f"note: {engine} {whose}", "  ")
        for number, segment in enumerate(segments, 1):
            yield f"  {number}. {segment['runs_on']}: {', '.join(segment['operations'])}"
            if segment["runs_on"] == "cuDNN":
                yield (
                    f"     engine {segment['engine']} of {segment['candidates']} candidates, "
                    f"{size(segment['workspace_bytes'])} of workspace"
                )
            reads, writes = size(segment["reads_bytes"]), size(segment["writes_bytes"])
            seconds = segment["roofline_seconds"]
            least = "" if seconds is None else f"; at least {seconds * 1e6:,.1f} us"
            yield f"     reads {reads}, writes {writes}, {segment['flops']:,} operations{least}"
            for advice in segment["advice"]:
                yield wrapped(f"note: {advice}", "     ")
            if segment["reason"] and segment["runs_on"] == "XLA":
                yield wrapped(f"because {segment['reason']}", "     ")
        for kept in data["residuals"]:
            yield f"  keeps {kept['tensor']} for the derivative, {size(kept['bytes'])}"
        if len(segments) > 1:
            yield f"  {size(data['cut_bytes'])} cross the cuts"
            reasons = dict.fromkeys(s["reason"] for s in segments if s["runs_on"] == "cuDNN")
            for reason in filter(None, reasons):
                yield wrapped(f"not one plan because {reason}", "  ")


def explain(plan: PlannedGraph) -> Explanation:
    """The explanation of a plan."""
    site = plan.site
    with contextlib.suppress(TargetError):  # a plan that was read from bytes knows the name alone
        site = site or profiles.get(plan.gpu)
    made = {name: s for s in plan.segments for name in s.spec.outputs}
    crossing = sum(
        plan.spec.tensor(name).nbytes
        for segment in plan.segments
        for name in segment.spec.inputs
        if name in made
    )
    return Explanation(
        {
            "name": plan.name,
            "role": plan.spec.origin.role,
            "engine_of_another_graph": plan.spec.origin.engine,
            "residuals": [
                {"tensor": str(tensor), "bytes": tensor.nbytes}
                for tensor in map(plan.spec.tensor, plan.spec.origin.residuals)
            ],
            "gpu": plan.gpu,
            "implementation": plan.implementation,
            "graph": str(plan.spec),
            "cut_bytes": crossing,
            "segments": [_segment(segment, site) for segment in plan.segments],
        }
    )


def _segment(segment: PlannedSegment, site: Profile | CudaDevice | None) -> dict[str, Any]:
    spec, plan = segment.spec, segment.plan
    return {
        "runs_on": "XLA" if plan is None else "cuDNN",
        "operations": [call.name for call in spec.calls],
        "engine": None if plan is None else plan.engine,
        "workspace_bytes": 0 if plan is None else plan.workspace_bytes,
        "candidates": 0 if plan is None else plan.candidates,
        "reads_bytes": sum(tensor.nbytes for tensor in spec.input_tensors),
        "writes_bytes": sum(tensor.nbytes for tensor in spec.output_tensors),
        "flops": cost(spec).flops,
        "roofline_seconds": roofline(spec, site),
        "reason": segment.reason,
        "advice": [
            f"{call.name}: {found}"
            for call, edge in zip(spec.calls, edges(spec), strict=True)
            if (found := edge.advice())
        ],
    }
