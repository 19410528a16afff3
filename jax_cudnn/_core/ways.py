"""The ways to run a graph: the cuts that :mod:`.placement` finds, other engines of cuDNN, and XLA
alone."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .cuda import CudaDevice
from .errors import PlanningError, UnsupportedGraphError
from .graph.spec import GraphSpec
from .planning import choice, placement, planner
from .planning.execution_plan import ExecutionPlan
from .planning.planned_graph import Outcome, Segments, Way
from .planning.split import Refusal, replanned, search, whole

log = logging.getLogger("jax_cudnn")
_NEAR = 4.0  # times the fastest way: how slow cuDNN's first engine may be for others to be tried


def segments_of(way: Way, spec: GraphSpec, site: CudaDevice, name: str) -> Segments | None:
    """The segments of a way; None if cuDNN has no such plan any more."""
    pinned = {at: (engine, dict(knobs)) for at, engine, knobs in way.pinned}
    found = replanned(way.segments, spec, functools.partial(_plan, site=site, name=name), pinned)
    return None if isinstance(found, Refusal) else found


def strict_reference(spec: GraphSpec, outcome: Outcome) -> Segments:
    """The reference in XLA, which is right where no measured way is."""
    wrong = "; ".join(f"{way.what}: {way.note}" for way in outcome.ways)
    (segment,) = whole(spec, None, f"no measured way is right: {wrong}")
    return (replace(segment, strict=True),)


def _plan(spec: GraphSpec, site: CudaDevice, name: str) -> ExecutionPlan | Refusal:
    try:
        return planner.plan(spec, site, name)
    except UnsupportedGraphError as error:
        return Refusal(error.reason)


def title_of(way: Segments) -> str:
    named = ["XLA" if s.plan is None else f"cuDNN {s.engine}" for s in way]
    if len(way) == 1:
        return named[0]
    calls = (", ".join(call.name for call in segment.spec.calls) for segment in way)
    return "; ".join(map(": ".join, zip(named, calls, strict=True)))


def uses_cudnn(way: Segments) -> bool:
    return any(segment.plan is not None for segment in way)


def first_ways(
    spec: GraphSpec, site: CudaDevice, name: str, xla: Segments | None
) -> list[Segments]:
    """What is taken without a measurement, XLA alone, cuDNN where it can, and the products alone in
    cuDNN; empty if XLA alone can run the graph."""

    def alone(piece: GraphSpec) -> ExecutionPlan | Refusal:
        several = len(piece.calls) > 1
        return Refusal("") if several else _plan(piece, site, name)

    ways: list[Segments] = [
        placement.decide(spec, site, name),
        placement.cut(spec, site, name, losing=True),
    ]
    ways[1:1] = [] if xla is None else [xla]
    if len(spec.calls) > 1 and spec.has_anchor:
        ways.append(tuple(replace(segment, reason="") for segment in search(spec, alone)))
    distinct: dict[Any, Segments] = {}
    for way in ways:
        distinct.setdefault(tuple((s.calls, s.plan and s.plan.text) for s in way), way)
    return [*distinct.values()] if any(map(uses_cudnn, ways)) else []


def other_engines(
    site: CudaDevice, name: str, ways: Sequence[Segments], seconds: Mapping[int, float]
) -> Iterator[Segments]:
    """The fastest way that uses cuDNN with other engines in its largest segment;
    ``seconds`` of those that were timed."""
    timed = [i for i in seconds if uses_cudnn(ways[i])]
    best = min(timed, key=seconds.__getitem__, default=None)
    if best is None or seconds[best] > _NEAR * min(seconds.values()):
        return
    segments = ways[best]
    at, own = max(enumerate(segments), key=lambda s: (s[1].plan is not None, len(s[1].calls)))
    assert own.plan is not None
    try:
        rows = planner.candidates(own.spec, site, name)
    except (PlanningError, UnsupportedGraphError):
        return  # what was measured so far stands
    for row in rows:
        engine = {"engine": row.engine, "knobs": row.knobs}
        if row.supported is False or engine == own.plan.pinned:
            continue
        piece = choice.pinned(own.spec, **engine)
        try:
            plan = _plan(piece, site, name)
        except PlanningError as error:  # of this engine alone
            log.debug("%s: %s is not measured: %s", name, engine, error)
            continue
        if isinstance(plan, ExecutionPlan):
            yield (*segments[:at], replace(own, spec=piece, plan=plan), *segments[at + 1 :])
