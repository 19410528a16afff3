"""Decides how a graph runs on a GPU: its implementation, the cuts, and a plan for each cuDNN
segment; once for equal graphs, and equally in all processes of a job."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ...deviceless.profiles import Profile
from ..compat import Device
from ..cuda import CudaDevice
from ..errors import PlanningWorkerError, UnsupportedGraphError
from ..graph.options import Surroundings
from ..graph.spec import GraphSpec
from ..implementation import CUDNN, SPLIT, XLA
from ..job import agreement
from ..settings import settings
from ..store import cache
from . import frontend, limits, losses, planner, variety
from .execution_plan import ExecutionPlan
from .plan import Plan, PlannedSegment
from .single_flight import SingleFlight
from .split import Refusal, Segment, part, search, whole
from .unsupported import most_telling

log = logging.getLogger("jax_cudnn")

# A segment as a row: its calls by position, whether XLA runs it, and why.
_Rows = tuple[tuple[tuple[int, ...], bool, str], ...]

_ELSE = "then cuDNN runs the supported parts, and XLA the rest"


class _Asked(NamedTuple):
    """Options of a split. ``losing``: keep patterns on cuDNN for which XLA measured faster.
    ``apart``: why the paired nodes must run in XLA, as in the other graphs of the family."""

    losing: bool = False
    apart: str = ""


_refusals: SingleFlight[Refusal | None] = SingleFlight(1 << 14)
_splits: SingleFlight[_Rows] = SingleFlight()


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
        JobError: another process decides, and its decision has not arrived.
    """
    if left_to_xla(spec):
        return by_xla(spec, name, site)
    variety.count(spec, name)
    together = agreement.leader(devices) is not None
    segments = (
        _decide_together(spec, site, name, devices) if together else _decide(spec, site, name)
    )
    implementation = spec.options.implementation or SPLIT
    plan = Plan(name, _model(site)[0], implementation, spec, segments, site)
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


def _rows_of(spec: GraphSpec, asked: _Asked, site: Profile | CudaDevice, name: str) -> _Rows:
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


def _split(spec: GraphSpec, asked: _Asked, site: Profile | CudaDevice, name: str) -> _Rows:
    """From the disk, or searched and left there for other processes."""
    lost = {} if asked.losing else losses.table().get(str(_model(site)[1]), {})
    known_losses = sorted(lost.get("patterns", ()))
    key = f"{planner.key_text('split', spec, site)}\n{known_losses}\n{asked}"

    def ask(piece: GraphSpec) -> Refusal | None:
        if asked.apart and piece.is_paired:
            return Refusal(asked.apart)
        return refusal(piece, site, name, asked.losing)

    def rows_of(stored: dict[str, Any]) -> _Rows:
        return _rows(stored, spec)

    known = planner.decoded(key, cache.get(key), rows_of)
    if known is not None:
        return known
    segments = search(spec, ask)
    rows = tuple((s.calls, s.leftover, s.reason) for s in segments)
    if len(rows) == 1 and not rows[0][1]:
        return rows  # one plan, which has a separate entry
    count = "1 segment" if len(rows) == 1 else f"{len(rows)} segments"
    stored = cache.put(key, {"segments": rows}, label=f"{spec.label}; {count}")
    return planner.decoded(key, stored, rows_of) or rows


def _rows(stored: dict[str, Any], spec: GraphSpec) -> _Rows:
    """KeyError, TypeError or ValueError for what is not a split of the graph."""
    rows = tuple((tuple(c), bool(x), str(r)) for c, x, r in stored["segments"])
    if sorted(call for calls, _, _ in rows for call in calls) != [*range(len(spec.calls))]:
        raise ValueError("the segments are not those of the graph")
    return rows


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
        except PlanningWorkerError as error:  # cuDNN crashed over this part
            log.warning("%s: %s; XLA runs this part instead: %r", name, error.summary, spec)
            return Refusal(error.summary)
        return None

    return _refusals.get((spec.canonical(), planner.identity(site), losing), ask)


def _model(site: Profile | CudaDevice) -> tuple[str, int]:
    """A GPU's name, and its compute capability times ten."""
    if isinstance(site, Profile):
        return site.name, site.sm_version
    return site.model(frontend.load())


# -- several processes -----------------------------------------------------------------------------


def _decide_together(
    spec: GraphSpec,
    site: Profile | CudaDevice,
    name: str,
    devices: Sequence[Device],
) -> tuple[PlannedSegment, ...]:
    canonical = spec.canonical()

    def make() -> dict[str, Any]:
        return {"segments": [_record(segment) for segment in _decide(canonical, site, name)]}

    # Nothing here may fail before the other processes learn of it: versions are read later.
    gpu = site.name if isinstance(site, Profile) else devices[0].device_kind
    record = agreement.agreed(
        repr((canonical._key(), gpu)),
        devices,
        make,
        name=name,
        identity=lambda: json.dumps({**json.loads(planner.identity(site)), "jax": jax.__version__}),
        timeout=settings().job_timeout,
    )
    return tuple(_received(spec, row) for row in record["segments"])


def _record(segment: PlannedSegment) -> dict[str, Any]:
    plan = None if segment.plan is None else segment.plan.to_json()
    return {"calls": segment.calls, "plan": plan, "reason": segment.reason}


def _received(spec: GraphSpec, row: dict[str, Any]) -> PlannedSegment:
    plan = None if row["plan"] is None else ExecutionPlan.from_json(row["plan"])
    calls = tuple(row["calls"])
    return PlannedSegment(part(spec, calls), calls, plan, row["reason"])


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
