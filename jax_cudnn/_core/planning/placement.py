"""Decides how a graph runs on a GPU: its implementation, the cuts, and a plan for each cuDNN
segment; once for equal graphs, and equally in all processes of a job."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .deviceless.profiles import Profile
from ..compat import Device
from ..cuda import CudaDevice
from ..errors import JobError, PlanningError, UnsupportedGraphError
from ..graph.options import Surroundings
from ..graph.spec import GraphSpec
from ..implementation import CUDNN, SPLIT, XLA
from ..job import agreement
from ..settings import settings
from ..store import cache
from . import failure, frontend, limits, losses, planner, variety
from .plan import Plan, PlannedSegment
from .plan_record import row_of, segments_of
from .single_flight import SingleFlight
from .split import Refusal, Segment, part, search, whole
from .stored import Rows, key_text, rows_of, said
from .unsupported import most_telling

log = logging.getLogger("jax_cudnn")

_ELSE = "then cuDNN runs the supported parts, and XLA the rest"


class _Asked(NamedTuple):
    """Options of a split. ``losing``: keep patterns on cuDNN for which XLA measured faster.
    ``apart``: why the paired nodes must run in XLA, as in the other graphs of the family."""

    losing: bool = False
    apart: str = ""


_refusals: SingleFlight[Refusal | None] = SingleFlight(1 << 14)
_splits: SingleFlight[Rows] = SingleFlight()


def place(
    spec: GraphSpec,
    site: Profile | CudaDevice,
    name: str,
    devices: Sequence[Device] = (),
) -> Plan:
    """The plan of a graph for a GPU.

    ``devices`` are those of the compilation: if they belong to several processes, the lowest one
    decides for all.

    Raises:
        UnsupportedGraphError: the graph requires ``implementation="cudnn"``, and cuDNN has no
            engine for the whole graph.
        PlanningError: planning failed for a reason that may pass, and XLA may not run the graph.
        JobError: another process decides, and its decision has not arrived.
    """
    if left_to_xla(spec):
        return by_xla(spec, name, site)
    variety.count(spec, name)
    together = agreement.leader(devices) is not None
    try:
        segments = (
            _decide_together(spec, site, name, devices) if together else _decide(spec, site, name)
        )
        gpu = _model(site)[0]
    except PlanningError as error:
        segments, gpu = _this_time(spec, error, name), getattr(site, "name", "this GPU")
    plan = Plan(name, gpu, spec.options.implementation or SPLIT, spec, segments, site)
    _tell(plan)
    return plan


def left_to_xla(spec: GraphSpec) -> str:
    """Why XLA runs a graph on every GPU, so that there is nothing to plan; else empty."""
    if spec.is_empty:
        return "cuDNN takes no empty tensors"
    if spec.options.implementation == XLA:
        return "implementation='xla'"
    may_refuse = spec.options.implementation == CUDNN or spec.options.engine is not None
    return limits.FLOAT64 if spec.has_float64 and not may_refuse else ""


def by_xla(spec: GraphSpec, name: str, site: Profile | CudaDevice | None = None) -> Plan:
    """The plan of a graph that XLA runs on every GPU."""
    calls, reason = tuple(range(len(spec.calls))), left_to_xla(spec)
    if reason == limits.FLOAT64:
        _check_determinism(spec, [Segment(spec, calls, True, reason)], name)
    segment = PlannedSegment(spec, calls, None, reason)
    titled, implementation = spec.origin.titled(name), spec.options.implementation or SPLIT
    gpu = "any GPU" if site is None else _model(site)[0]
    plan = Plan(titled, gpu, implementation, spec, (segment,), site)
    _tell(plan)
    return plan


def _this_time(spec: GraphSpec, error: PlanningError, name: str) -> tuple[PlannedSegment]:
    """The graph as XLA runs it in the program that is being compiled: nothing is kept of this.

    Raises ``error`` where the options require cuDNN, and where the related graphs may be planned.
    """
    if spec.options.implementation == CUDNN or spec.options.engine is not None or spec.is_paired:
        if spec.is_paired:
            error.expected = "a plan: XLA's random numbers are not those of the related graphs"
        raise error
    failed = f"{error.summary.removeprefix(f'{name}: ')} ({error.got})"
    (segment,) = whole(spec, True, f"planning failed, for this program alone: {failed}")
    _check_determinism(spec, [segment], name)
    log.warning(
        "%s: %s, twice; XLA runs the graph in this program alone, and the next compilation plans "
        "it again (jax.clear_caches()). Free memory, or check the installation: python -m "
        "jax_cudnn doctor. implementation='cudnn' makes this an error. The graph: %s",
        name,
        failed,
        spec.label,
    )
    return (PlannedSegment(spec, segment.calls, None, segment.reason),)


def _decide(spec: GraphSpec, site: Profile | CudaDevice, name: str) -> tuple[PlannedSegment, ...]:
    strict = spec.options.implementation == CUDNN
    if spec.has_float64:
        asked = "implementation='cudnn'" if strict else "the engine"
        raise UnsupportedGraphError(
            f"{name}: cuDNN does not compute in float64",
            why=limits.FLOAT64,
            fix=f"leave out {asked}: then XLA runs the graph; or cast to float32",
            graph=str(spec),
        )
    # An engine is one of the whole graph: of a part it would be another.
    whole_graph = not spec.origin.role and not any(call.node.outside for call in spec.calls)
    if spec.options.engine is not None or (strict and whole_graph):
        try:
            return (*_planned(whole(spec, False), site, name),)
        except UnsupportedGraphError as error:
            what = "implementation='cudnn'" if spec.options.engine is None else "the engine"
            error.fix = "; ".join(filter(None, [error.fix, f"or remove {what}: {_ELSE}"]))
            raise
    asked = _Asked(losing=strict, apart=_apart(spec, strict, site, name))
    rows = _rows_of(spec, asked, site, name)
    segments = [_segment(spec, *row) for row in rows]
    if strict:
        _check_products(spec, segments, name)
    _check_determinism(spec, segments, name)
    return (*_planned(segments, site, name),)


def _rows_of(spec: GraphSpec, asked: _Asked, site: Profile | CudaDevice, name: str) -> Rows:
    canonical = spec.for_planning().canonical()
    key = canonical, asked, planner.identity(site)
    return _splits.get(key, lambda: _split(canonical, asked, site, name))


def _check_products(spec: GraphSpec, segments: Sequence[Segment], name: str) -> None:
    """UnsupportedGraphError if XLA would run a product of a derivative under "cudnn"."""
    for segment in segments:
        products = [call.name for call in segment.spec.calls if call.node.anchor]
        if segment.leftover and products:
            raise UnsupportedGraphError(
                f"{name}: cuDNN does not run {', '.join(products)}",
                why=segment.reason,
                fix=f"remove implementation='cudnn': {_ELSE}",
                graph=str(spec),
            )


def _apart(spec: GraphSpec, losing: bool, site: Profile | CudaDevice, name: str) -> str:
    """Why XLA runs the paired nodes in all graphs of a family; empty if cuDNN does."""
    if not spec.is_paired:
        return ""
    for member in spec.origin.family:
        for calls, leftover, reason in _rows_of(member, _Asked(losing), site, name):
            paired = [member.calls[i].name for i in calls if member.calls[i].node.paired]
            if leftover and paired:
                return f"XLA runs {', '.join(paired)} of a related graph: {reason}"
    return ""


def _check_determinism(spec: GraphSpec, segments: Sequence[Segment], name: str) -> None:
    """UnsupportedGraphError if XLA runs a nondeterministic node without its determinism flag."""
    if not spec.options.deterministic or Surroundings.now().deterministic:
        return
    for segment in segments:
        loose = [call.name for call in segment.spec.calls if not call.node.deterministic]
        if segment.leftover and loose:
            raise UnsupportedGraphError(
                f"{name}: deterministic=True cannot be guaranteed",
                got=f"{', '.join(loose)}, run in XLA",
                why=segment.reason,
                fix="set XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops, which applies to XLA "
                "and to jax_cudnn, or remove deterministic=True",
                graph=str(spec),
            )


def _planned(
    segments: Sequence[Segment], site: Profile | CudaDevice, name: str
) -> Iterator[PlannedSegment]:
    for s in segments:
        plan = None if s.leftover else planner.plan(s.spec, site, name)
        yield PlannedSegment(s.spec, s.calls, plan, s.reason)


def _segment(spec: GraphSpec, calls: Sequence[int], leftover: bool, reason: str) -> Segment:
    return Segment(part(spec, calls), tuple(calls), leftover, reason)


# -- the split -------------------------------------------------------------------------------------


def _split(spec: GraphSpec, asked: _Asked, site: Profile | CudaDevice, name: str) -> Rows:
    """From the disk, or searched and left there for other processes."""
    lost = {} if asked.losing else losses.table().get(str(_model(site)[1]), {})
    known_losses = sorted(lost.get("patterns", ()))
    key = key_text("split", spec, planner.identity(site), str(known_losses), str(asked))

    def ask(piece: GraphSpec) -> Refusal | None:
        if asked.apart and piece.is_paired:
            return Refusal(asked.apart)
        return refusal(piece, site, name, asked.losing)

    def read(stored: dict[str, Any]) -> Rows:
        return rows_of(stored, spec)

    known = planner.decoded(key, cache.get(key), read)
    if known is not None:
        pieces = [part(spec, calls) for calls, leftover, _ in known if not leftover]
        refused = next(filter(None, map(ask, pieces)), None)
        if refused is None:
            return known
        cache.discard(key, f"foreign: segments: {refused.reason}")
    segments = search(spec, ask)
    rows = tuple((s.calls, s.leftover, s.reason) for s in segments)
    if len(rows) == 1 and not rows[0][1]:
        return rows  # one plan, which has a separate entry
    count = "1 segment" if len(rows) == 1 else f"{len(rows)} segments"
    stored = cache.put(key, {"segments": rows}, label=f"{spec.label}; {count}")
    return planner.decoded(key, stored, read) or rows


def refusal(
    spec: GraphSpec, site: Profile | CudaDevice, name: str, losing: bool = False
) -> Refusal | None:
    """Why cuDNN does not run a graph: it has no engine, or XLA measured faster (unless ``losing``
    is allowed)."""

    def ask() -> Refusal | None:
        loss = None if losing else losses.loss(spec, _model(site)[1])
        if loss is not None:
            return Refusal(str(loss), final=True)
        try:
            plan = planner.plan(spec, site, name, advise=False)
            if not losing and (slow := losses.slow(spec, plan, _model(site)[1])):
                return Refusal(slow)
        except UnsupportedGraphError as error:
            return Refusal(most_telling(error.reasons) or error.why or error.summary)
        return None

    return _refusals.get((spec.canonical(), planner.identity(site), losing), ask)


def _model(site: Profile | CudaDevice) -> tuple[str, int]:
    """A GPU's name, and its compute capability times ten."""
    if isinstance(site, Profile):
        return site.name, site.sm_version
    return failure.twice(lambda again: site.model(frontend.load()))


# -- several processes -----------------------------------------------------------------------------


def _decide_together(
    spec: GraphSpec,
    site: Profile | CudaDevice,
    name: str,
    devices: Sequence[Device],
) -> tuple[PlannedSegment, ...]:
    canonical = spec.canonical()

    def make() -> dict[str, Any]:
        return {"segments": [row_of(segment) for segment in _decide(canonical, site, name)]}

    def identity() -> str:
        try:
            return json.dumps({**json.loads(planner.identity(site)), "jax": jax.__version__})
        except PlanningError as error:  # not that of the job, of which all processes hear
            raise JobError(
                f"{name}: process {jax.process_index()} cannot compare its libraries with those "
                "of the job",
                why=str(error),
                fix=error.fix,
            ) from error

    # Nothing here may fail before the other processes learn of it: versions are read later.
    gpu = site.name if isinstance(site, Profile) else devices[0].device_kind
    record = agreement.agreed(
        repr((canonical._key(), gpu)),
        devices,
        make,
        name=name,
        identity=identity,
        timeout=settings().job_timeout,
    )
    try:
        return segments_of(record["segments"], spec, planner.identity(site))
    except Exception as error:  # anything may stand there
        raise JobError(
            f"{name}: the plan of another process of this job is not one for this graph",
            got=said(error),
            why="the store of the job holds something else",
            fix="run the same version of jax_cudnn in all processes",
        ) from error


# -- what is said about it -------------------------------------------------------------------------


def _tell(plan: Plan) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    if len(plan.segments) > 1:
        why = next((s.reason for s in plan.segments if s.plan is not None), "")
        log.debug("%s: cut in %d segments: %s", plan.name, len(plan.segments), why)
    for segment in plan.segments:
        calls = ", ".join(call.name for call in segment.spec.calls)
        if segment.plan is None:
            log.debug("%s: XLA runs %s: %s", plan.name, calls, segment.reason)
        elif len(plan.segments) > 1:
            log.debug("%s: cuDNN runs %s: %s", plan.name, calls, segment.plan.engine)


def clear() -> None:
    """Forget all decisions and plans that are in memory (tests and benchmarks)."""
    _refusals.clear()
    _splits.clear()
    planner.clear()
