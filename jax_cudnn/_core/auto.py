"""Where a graph runs: by its options, by a measurement (:mod:`.tuning`), or by the shipped ones
(:mod:`.placement`); once for equal graphs, and equally in all processes of a job."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax

from . import compat, context, job, tuning
from .compat import Device
from .cuda import CudaDevice
from .errors import GraphError, JobError, PlanningError
from .graph.spec import GraphSpec
from .planning import placement, planner, progress
from .planning.deviceless.profiles import Profile
from .planning.placement import Site
from .planning.planned_graph import Measured, PlannedGraph, Segments
from .planning.split import whole
from .planning.stored import row_of, said, segments_of
from .primitive import in_jaxpr
from .settings import settings
from .user_context import AUTO, CUDNN, XLA

log = logging.getLogger("jax_cudnn")


def of_lowering(ctx: Any, spec: GraphSpec, name: str) -> PlannedGraph:
    """The plan of a graph in a lowering rule's context.

    Raises what :func:`plan_graph` raises; GraphError for symbolic dimensions, TargetError without a
    GPU.
    """
    name += spec.origin.suffix
    if spec.xla_only:
        return plan_graph(spec, None, name)
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
    with progress.of_program(compat.program(ctx)) as first:
        site = context.site(devices, name)
        if first and isinstance(site, Profile) and len(devices) <= 1:
            jaxpr = compat.program_jaxpr()
            graphs = [] if jaxpr is None else [graph for _, graph in in_jaxpr(jaxpr)]
            if len(graphs) > 1:
                placement.ahead(graphs, site)
        return plan_graph(spec, site, name, devices)


def plan_graph(
    spec: GraphSpec, site: Site | None, name: str, devices: Sequence[Device] = ()
) -> PlannedGraph:
    """The plan of a graph for a GPU; None for any, if XLA runs the graph on all of them.

    ``devices`` are those of the compilation: if they belong to several processes, the lowest one
    decides for all.

    Raises:
        UnsupportedGraphError: the graph requires ``implementation="cudnn"``, and cuDNN has no
            engine for the whole graph.
        PlanningError: planning failed for a reason that may pass, and XLA may not run the graph.
        JobError: another process decides, and its decision has not arrived.
    """
    measured: tuple[Measured, ...] = ()
    gpu = "any GPU" if site is None else getattr(site, "name", "this GPU")
    if site is None or spec.xla_only:
        segments = whole(spec, None, spec.xla_only)
        if not spec.is_empty and spec.options.implementation != XLA:  # for its float64
            placement.check_determinism(spec, segments, name)
        if site is not None:
            gpu = placement.model(site)[0]
    else:
        progress.count_shapes(spec, name)
        try:
            segments, measured = _decided(spec, site, name, devices)
            gpu = placement.model(site)[0]
        except PlanningError as error:
            segments = _this_time(spec, error, name)
    if several := len(segments) > 1:
        why = next((s.reason for s in segments if s.plan is not None), "")
        log.debug("%s: cut in %d segments: %s", name, len(segments), why)
    for s in segments:
        if several or s.plan is None:
            calls = ", ".join(call.name for call in s.spec.calls)
            who, why = ("XLA", s.reason) if s.plan is None else ("cuDNN", s.engine)
            log.debug("%s: %s runs %s: %s", name, who, calls, why)
    implementation = spec.options.implementation or AUTO
    return PlannedGraph(name, gpu, implementation, spec, segments, site, measured)


def _this_time(spec: GraphSpec, error: PlanningError, name: str) -> Segments:
    """The graph as XLA runs it in the program that is being compiled: nothing is kept of this.

    Raises ``error`` where the options require cuDNN, and where the related graphs may be planned.
    """
    if spec.is_paired:
        error.expected = "a plan: XLA's random numbers are not those of the related graphs"
    if spec.is_paired or spec.options.implementation == CUDNN or spec.options.engine is not None:
        raise error
    failed = f"{error.summary.removeprefix(f'{name}: ')} ({error.got})"
    segments = whole(spec, None, f"planning failed, for this program alone: {failed}")
    placement.check_determinism(spec, segments, name)
    log.warning(
        "%s: %s, twice; XLA runs the graph in this program alone, and the next compilation plans "
        "it again (jax.clear_caches()). Free memory, or check the installation: python -m "
        "jax_cudnn doctor. implementation='cudnn' makes this an error. The graph: %s",
        name,
        failed,
        spec.label,
    )
    return segments


def _decided(
    spec: GraphSpec, site: Site, name: str, devices: Sequence[Device]
) -> tuple[Segments, tuple[Measured, ...]]:
    """Where several processes compile, one of them decides, and all take what it decided."""

    def decide(spec: GraphSpec) -> tuple[Segments, tuple[Measured, ...]]:
        found = tuning.outcome(spec, site, name) if isinstance(site, CudaDevice) else None
        return found or (placement.decide(spec, site, name), ())

    def make() -> dict[str, Any]:
        segments, measured = decide(canonical)
        rows = [row_of(segment) for segment in segments]
        return {"segments": rows, "measured": [dataclasses.asdict(way) for way in measured]}

    def identity() -> str:
        try:
            return json.dumps({**json.loads(planner.identity(site)), "jax": jax.__version__})
        except PlanningError as error:  # not that of the job, of which all processes hear
            what = f"{name}: process {jax.process_index()} cannot compare its libraries with those "
            raise JobError(f"{what}of the job", why=str(error), fix=error.fix) from error

    if not (processes := job.participants(devices)):
        return decide(spec)
    # Nothing here may fail before the other processes learn of it: versions are read later.
    canonical = spec.canonical()
    gpu = site.name if isinstance(site, Profile) else devices[0].device_kind
    key, timeout = repr((canonical._key, gpu)), settings().job_timeout
    question = job.Question(key, processes, name, identity, timeout)
    record = job.agreed(question, make)
    try:
        measured = tuple(Measured(**way) for way in record["measured"])
        return segments_of(record["segments"], spec, planner.identity(site)), measured
    except Exception as error:  # anything may stand there
        raise JobError(
            f"{name}: the plan of another process of this job is not one for this graph",
            got=said(error),
            why="the store of the job holds something else",
            fix="run the same version of jax_cudnn in all processes",
        ) from error


def clear() -> None:
    """Forget all decisions and plans that are in memory (tests and benchmarks)."""
    tuning.clear()
    placement.clear()
