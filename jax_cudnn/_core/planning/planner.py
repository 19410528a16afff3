"""The plan of a graph: built once for equal graphs, GPUs and versions, kept in memory and on
disk."""

from __future__ import annotations

import copy
import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..cuda import CudaDevice
from ..errors import JaxCudnnError, UnsupportedGraphError
from ..graph.boundary import boundary
from ..graph.spec import GraphSpec
from ..package import fingerprint
from ..store import cache
from . import build, choice, frontend, listing, progress
from . import unsupported as failure
from .build import Candidate
from .deviceless import client
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan, canonical_properties
from .limits import known_reasons
from .single_flight import SingleFlight
from .stored import key_text, plan_of, said
from .unsupported import unsupported

log = logging.getLogger("jax_cudnn")

V = TypeVar("V")

_plans: SingleFlight[ExecutionPlan | UnsupportedGraphError] = SingleFlight(1 << 14)
_listed: SingleFlight[tuple[Candidate, ...]] = SingleFlight(256)


def plan(spec: GraphSpec, site: Profile | CudaDevice, name: str) -> ExecutionPlan:
    """The plan of a graph for a GPU, built at most once for all threads.

    For a GPU of this process a real handle plans; for a profile the deviceless worker does, even
    on a machine with a GPU. Raises a new copy of planning's error for each caller. PlanningError:
    planning failed twice for a reason that may pass.
    """
    planned = _planned(spec, site, name)
    key = planned.canonical().unvalued()
    try:
        made = _plans.get((key, identity(site)), lambda: _obtain(key, site, name))
        if isinstance(made, UnsupportedGraphError):
            raise made
        return made.with_constants(planned) if planned.constants else made
    except JaxCudnnError as error:
        raise _told(error, spec, name, site) from error.__cause__  # told once, not twice


def candidates(spec: GraphSpec, site: Profile | CudaDevice, name: str) -> tuple[Candidate, ...]:
    """The plans that cuDNN's heuristics propose for a graph, whatever engine its options fix.

    Raises the errors of planning that are known without building a plan.
    """
    free = replace(spec, options=replace(spec.options, engine=None, knobs=()))
    key = _planned(free, site, name).canonical().unvalued()
    try:
        return _listed.get((key, identity(site)), lambda: _list(key, site))
    except JaxCudnnError as error:
        raise _told(error, spec, name, site) from error.__cause__


def _planned(spec: GraphSpec, site: Profile | CudaDevice, name: str) -> GraphSpec:
    """The graph as it is planned; UnsupportedGraphError if a known rule excludes it."""
    planned = boundary(spec.for_planning).planned
    reasons = known_reasons(planned)
    if reasons:
        why = "; ".join(map(str, reasons.values()))
        raise _told(unsupported(planned, reasons, why), spec, name, site)
    return planned


def _obtain(
    spec: GraphSpec, site: Profile | CudaDevice, name: str
) -> ExecutionPlan | UnsupportedGraphError:
    """The plan from the disk, or built and stored there for other processes; why there is none.

    If another process stored one first, that plan is used: equal programs have equal bytes in all
    processes.
    """
    known_as = identity(site)
    key = key_text("plan", spec, known_as)

    def read(value: Any) -> ExecutionPlan:
        return plan_of(value, spec, known_as)

    known = decoded(key, cache.get(key), read)
    if known is not None:
        log.debug("%s: plan read from the cache: %s", name, known)
        return known
    limit = f", time limit {2 * _seconds(spec):.0f} s" if isinstance(site, Profile) else ""
    began = time.perf_counter()
    with progress.planning(name + limit):
        try:
            made = _build(spec, site)
        except UnsupportedGraphError as error:
            return error
    log.debug("%s: planned in %.3f s: %s", name, time.perf_counter() - began, made)
    label = f"{spec.label}; {made}, cuDNN {frontend.version_text(made.cudnn_version)}"
    data = made.to_json()
    stored = cache.put(key, data, label=label)
    return made if stored is data else decoded(key, stored, read) or made


def decoded(
    key: str, stored: dict[str, Any] | None, read: Callable[[dict[str, Any]], V]
) -> V | None:
    """The value of an entry of the plan cache; removes an entry that holds something else."""
    try:
        return None if stored is None else read(stored)
    except Exception as error:  # anything may stand there
        cache.discard(key, f"foreign: {said(error)}")
        return None


def _told(
    error: JaxCudnnError, spec: GraphSpec, name: str, site: Profile | CudaDevice
) -> JaxCudnnError:
    """The error for the caller of function ``name``, with the names of its graph."""
    told = copy.copy(error)
    told.summary = f"{name}: {error.summary}"
    if isinstance(told, UnsupportedGraphError):
        told.graph, gpu = str(spec), "this GPU"
        if isinstance(site, Profile):
            gpu = site.name + ("" if site.measured else " (a profile from public specifications)")
        told.summary += f" on {gpu}"
    return told


def _build(spec: GraphSpec, site: Profile | CudaDevice) -> ExecutionPlan:
    if isinstance(site, CudaDevice):
        return failure.twice(lambda fresh: build.build_for(spec, site))
    worker = "jax_cudnn._core.planning.build:build_for"
    limit = _seconds(spec)
    return failure.twice(functools.partial(client.call, worker, spec, site, timeout=limit))


def _seconds(spec: GraphSpec) -> float:
    """How long one attempt in the worker may take: 10 to 100 times what it took on two cores that
    had other work, too."""
    return min(300.0, 60.0 + sum(60.0 if call.node.anchor else 10.0 for call in spec.calls))


def _list(spec: GraphSpec, site: Profile | CudaDevice) -> tuple[Candidate, ...]:
    if isinstance(site, CudaDevice):
        return failure.twice(lambda fresh: listing.list_for(spec, site))
    worker = "jax_cudnn._core.planning.listing:list_for"
    return failure.twice(functools.partial(client.call, worker, spec, site))


@functools.cache
def identity(site: Profile | CudaDevice) -> str:
    """What a plan depends on apart from its graph: equal for equal GPUs and equal libraries,
    including the code of this package."""
    if isinstance(site, CudaDevice):
        properties = failure.twice(lambda fresh: site.properties(frontend.load()))
        return _text("by handle", properties, frontend.identity())
    # The profile's name and source make no difference to cuDNN.
    worker = "jax_cudnn._core.planning.frontend:identity"
    libraries = failure.twice(functools.partial(client.call, worker))
    return _text("without the GPU", site.properties_json, libraries, SM=site.sm_version)


def _text(planned: str, properties: str, libraries: dict[str, str], **more: int) -> str:
    given = {
        "planned": planned,
        "GPU": canonical_properties(properties),
        "workspace": choice.default_workspace(properties),
        **more,
    }
    return json.dumps({**given, **libraries, "jax_cudnn": fingerprint()}, sort_keys=True)


def clear() -> None:
    """Forget all plans that are in memory (tests and benchmarks)."""
    _plans.clear()
    _listed.clear()
    identity.cache_clear()
