"""Decides how a graph runs on a GPU by its options and the shipped measurements: the cuts, and a
plan for each cuDNN segment; and the ways to run it that a measurement compares: cuts, other engines
of cuDNN, and XLA alone."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from ..errors import PlanningError, UnsupportedGraphError
from ..graph.options import TraceContext
from ..graph.planned import EVEN_IF_STRICT
from ..graph.spec import FLOAT64, GraphSpec
from ..store.cache import configured
from ..user_context import CUDNN
from . import choice, frontend, losses, planner, progress
from . import unsupported as failure
from .deviceless import client
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan
from .planned_graph import Outcome, PlannedSegment, Rows, Segments, Way
from .planner import Site
from .single_flight import SingleFlight
from .split import Refusal, part, replanned, search, whole
from .stored import keep, kept, key_text, rows_of

log = logging.getLogger("jax_cudnn")
_WORKERS = 8  # at once, of about 400 MB of memory each
_NEAR = 4.0  # times the fastest way: how slow cuDNN's first engine may be for others to be tried
_ELSE = "then cuDNN runs the supported parts, and XLA the rest"
_cuts: SingleFlight[Segments] = SingleFlight()


def ahead(specs: Iterable[GraphSpec], site: Profile) -> None:
    """Decides all graphs of a program at once, in several workers. Whoever then asks for one finds
    it, or meets its error."""
    todo = {
        (spec.for_planning.canonical(), spec.options.implementation): spec
        for spec in specs
        if spec.is_static and not spec.xla_only
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1  # else no Linux
    count = min(len(todo), cores, _WORKERS)
    if count < 2:
        return
    pool = ThreadPoolExecutor(count)
    with (
        client.workers(count),
        progress.at_once(len(todo), count) as done,
        contextlib.suppress(PlanningError),
    ):
        try:
            planner.identity(site)  # one worker says it: where all plans are known, no more start
            begun = [pool.submit(decide, spec, site, "") for spec in todo.values()]
            for future in begun:
                future.add_done_callback(done)
            wait(begun)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, those that wait


def decide(spec: GraphSpec, site: Site, name: str) -> Segments:
    """The segments of a graph, without a measurement.

    Raises UnsupportedGraphError for what the options forbid, and what :func:`.planner.plan` raises.
    """
    strict = spec.options.implementation == CUDNN
    if spec.has_float64:
        option = "implementation='cudnn'" if strict else "the engine"
        raise UnsupportedGraphError(
            f"{name}: cuDNN does not compute in float64",
            why=FLOAT64,
            fix=f"leave out {option}: then XLA runs the graph; or cast to float32",
            graph=str(spec),
        )
    # An engine is one of the whole graph: of a part it would be another.
    kinds = {call.node.xla_only for call in spec.calls}
    whole_graph = not spec.origin.role and EVEN_IF_STRICT not in kinds
    if spec.options.engine is not None or (strict and whole_graph):
        try:
            return whole(spec, planner.plan(spec, site, name))
        except UnsupportedGraphError as error:
            what = "implementation='cudnn'" if spec.options.engine is None else "the engine"
            error.fix = "; ".join(filter(None, [error.fix, f"or remove {what}: {_ELSE}"]))
            raise
    segments = cut(spec, site, name, losing=strict)
    if strict:
        _check_products(spec, segments, name)
    check_determinism(spec, segments, name)
    return segments


def cut(spec: GraphSpec, site: Site, name: str, losing: bool = False) -> Segments:
    """The segments of a graph in which cuDNN runs what it supports; with ``losing``, also patterns
    for which XLA measured faster."""
    return _cut(spec, losing, _why_pairs_run_in_xla(spec, losing, site, name), site, name)


def _cut(spec: GraphSpec, losing: bool, paired_reason: str, site: Site, name: str) -> Segments:
    canonical = spec.for_planning.canonical()
    key = canonical, losing, paired_reason, planner.identity(site)
    found = _cuts.get(key, lambda: _split(canonical, losing, paired_reason, site, name))
    return tuple(PlannedSegment(part(spec, s.calls), s.calls, s.plan, s.reason) for s in found)


def _check_products(spec: GraphSpec, segments: Segments, name: str) -> None:
    """UnsupportedGraphError if XLA would run a product of a derivative under "cudnn"."""
    for segment in segments:
        products = [call.name for call in segment.spec.anchors]
        if segment.plan is None and products:
            raise UnsupportedGraphError(
                f"{name}: cuDNN does not run {', '.join(products)}",
                why=segment.reason,
                fix=f"remove implementation='cudnn': {_ELSE}",
                graph=str(spec),
            )


def _why_pairs_run_in_xla(spec: GraphSpec, losing: bool, site: Site, name: str) -> str:
    """Why XLA runs the paired nodes in all graphs of a family; empty if cuDNN does."""
    for member in spec.origin.family:
        for segment in _cut(member, losing, "", site, name) if spec.is_paired else ():
            paired = [call.name for call in segment.spec.calls if call.is_paired]
            if segment.plan is None and paired:
                return f"XLA runs {', '.join(paired)} of a related graph: {segment.reason}"
    return ""


def check_determinism(spec: GraphSpec, segments: Segments, name: str) -> None:
    """UnsupportedGraphError if XLA runs a nondeterministic node without its determinism flag."""
    if not spec.options.deterministic or TraceContext.now().deterministic:
        return
    for segment in segments:
        nodes = {call.name: call.node for call in segment.spec.calls}
        loose = [name for name, node in nodes.items() if node.deterministic() != node]
        if segment.plan is None and loose:
            raise UnsupportedGraphError(
                f"{name}: deterministic=True cannot be guaranteed",
                got=f"{', '.join(loose)}, run in XLA",
                why=segment.reason,
                fix="set XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops, which applies to XLA "
                "and to jax_cudnn, or remove deterministic=True",
                graph=str(spec),
            )


def _split(spec: GraphSpec, losing: bool, paired_reason: str, site: Site, name: str) -> Segments:
    """From the disk, or searched and left there for other processes."""
    sm_version = model(site)[1]
    known_losses = "" if losing else f"{zlib.crc32(losses.key(sm_version).encode())}"
    options = f"losing={losing!r}, apart={paired_reason!r}"
    key = key_text("split", spec, planner.identity(site), known_losses, options)

    def plan_of(piece: GraphSpec) -> ExecutionPlan | Refusal:
        if paired_reason and piece.is_paired:
            return Refusal(paired_reason)
        loss = None if losing else losses.loss(piece, sm_version)
        if loss is not None:
            return Refusal(str(loss), final=True)
        try:
            plan = planner.plan(piece, site, name)
        except UnsupportedGraphError as error:
            return Refusal(error.reason)
        slow = "" if losing else losses.slow(piece, plan, sm_version)
        return Refusal(slow) if slow else plan

    def read(stored: dict[str, Any]) -> Rows:
        return rows_of(stored, spec)

    known = kept(key, read)
    if known is not None:
        segments = replanned(known, spec, plan_of)
        if not isinstance(segments, Refusal):
            return segments
        configured().discard(key, f"foreign: segments: {segments.reason}")
    segments = search(spec, plan_of)
    if len(segments) == 1 and segments[0].plan is not None:
        return segments  # one plan, which has a separate entry
    rows = tuple((s.calls, s.plan is None, s.reason) for s in segments)
    count = "1 segment" if len(rows) == 1 else f"{len(rows)} segments"
    first = keep(key, rows, {"segments": rows}, read, f"{spec.label}; {count}")
    if first == rows:
        return segments
    theirs = replanned(first, spec, plan_of)
    return segments if isinstance(theirs, Refusal) else theirs


# -- the ways to run a graph, for a measurement ----------------------------------------------------


def segments_of(way: Way, spec: GraphSpec, site: Site, name: str) -> Segments | None:
    """The segments of a way; None if cuDNN has no such plan any more."""
    pinned = {at: (engine, dict(knobs)) for at, engine, knobs in way.pinned}
    found = replanned(way.segments, spec, functools.partial(_plan, site=site, name=name), pinned)
    return None if isinstance(found, Refusal) else found


def strict_reference(spec: GraphSpec, outcome: Outcome) -> Segments:
    """The reference in XLA, which is right where no measured way is."""
    wrong = "; ".join(f"{way.what}: {way.note}" for way in outcome.ways)
    (segment,) = whole(spec, None, f"no measured way is right: {wrong}")
    return (replace(segment, strict=True),)


def _plan(spec: GraphSpec, site: Site, name: str) -> ExecutionPlan | Refusal:
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


def first_ways(spec: GraphSpec, site: Site, name: str, xla: Segments | None) -> list[Segments]:
    """What is taken without a measurement, XLA alone, cuDNN where it can, and the products alone in
    cuDNN; empty if XLA alone can run the graph."""

    def alone(piece: GraphSpec) -> ExecutionPlan | Refusal:
        several = len(piece.calls) > 1
        return Refusal("") if several else _plan(piece, site, name)

    ways: list[Segments] = [
        decide(spec, site, name),
        cut(spec, site, name, losing=True),
    ]
    ways[1:1] = [] if xla is None else [xla]
    if len(spec.calls) > 1 and spec.anchors:
        ways.append(tuple(replace(segment, reason="") for segment in search(spec, alone)))
    distinct: dict[Any, Segments] = {}
    for way in ways:
        distinct.setdefault(tuple((s.calls, s.plan and s.plan.text) for s in way), way)
    return [*distinct.values()] if any(map(uses_cudnn, ways)) else []


def other_engines(
    site: Site, name: str, ways: Sequence[Segments], seconds: Mapping[int, float]
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


def model(site: Site) -> tuple[str, int]:
    """A GPU's name, and its compute capability times ten."""
    if isinstance(site, Profile):
        return site.name, site.sm_version
    return failure.twice(lambda fresh: site.model(frontend.load()))


def clear() -> None:
    """Forget all decisions and plans that are in memory (tests and benchmarks)."""
    _cuts.clear()
    planner.clear()
