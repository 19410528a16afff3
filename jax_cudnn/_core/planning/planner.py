"""The plan of a graph: built once for equal graphs, GPUs and versions, kept in memory and on
disk."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ..cuda import CudaDevice
from ..errors import JaxCudnnError, UnsupportedGraphError
from ..graph.boundary import boundary
from ..graph.spec import GraphSpec
from ..package import fingerprint
from . import build, choice, frontend, progress
from . import unsupported as failure
from .build import Candidate
from .deviceless import client
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan, canonical_properties
from .limits import known_reasons
from .single_flight import SingleFlight
from .stored import keep, kept, key_text, plan_of
from .unsupported import unsupported

log = logging.getLogger("jax_cudnn")

Site = Profile | CudaDevice
V = TypeVar("V")
_plans: SingleFlight[ExecutionPlan | UnsupportedGraphError] = SingleFlight(1 << 14)
_listed: SingleFlight[tuple[Candidate, ...]] = SingleFlight(256)


def plan(spec: GraphSpec, site: Site, name: str) -> ExecutionPlan:
    """The plan of a graph for a GPU, built at most once for all threads.

    For a GPU of this process a real handle plans; for a profile the deviceless worker does, even
    on a machine with a GPU. Raises a new copy of planning's error for each caller. PlanningError:
    planning failed twice for a reason that may pass.
    """
    with _named(spec, site, name):
        planned = _planned(spec)
        key = planned.canonical().unvalued()
        made = _plans.get((key, identity(site)), lambda: _obtain(key, site, name))
        if isinstance(made, UnsupportedGraphError):
            raise made
    return made.with_constants(planned) if planned.constants else made


def candidates(spec: GraphSpec, site: Site, name: str) -> tuple[Candidate, ...]:
    """The plans that cuDNN's heuristics propose for a graph, whatever engine its options fix.

    Raises the errors of planning that are known without building a plan.
    """
    free = replace(spec, options=replace(spec.options, engine=None, knobs=()))
    with _named(spec, site, name):
        key = _planned(free).canonical().unvalued()
        return _listed.get((key, identity(site)), lambda: at(site, build.list_for, key, site))


@contextlib.contextmanager
def _named(spec: GraphSpec, site: Site, name: str) -> Iterator[None]:
    """Errors are those of function ``name``, with the names of its graph: a copy for each caller,
    as the graph of an equal function has other names."""
    try:
        yield
    except JaxCudnnError as error:
        named = copy.copy(error)
        named.summary = f"{name}: {error.summary}"
        if isinstance(named, UnsupportedGraphError):
            named.graph, gpu = str(spec), "this GPU"
            if isinstance(site, Profile):
                public = "" if site.measured else " (a profile from public specifications)"
                gpu = f"{site.name}{public}"
            named.summary += f" on {gpu}"
        raise named from error.__cause__  # named once, not twice


def _planned(spec: GraphSpec) -> GraphSpec:
    """The graph as it is planned; UnsupportedGraphError if a known rule excludes it."""
    planned = boundary(spec.for_planning).planned
    if reasons := known_reasons(planned):
        raise unsupported(planned, reasons, "; ".join(map(str, reasons.values())))
    return planned


def _obtain(spec: GraphSpec, site: Site, name: str) -> ExecutionPlan | UnsupportedGraphError:
    """The plan from the disk, or built and stored there for other processes; why there is none.

    If another process stored one first, that plan is used: equal programs have equal bytes in all
    processes.
    """
    known_as = identity(site)
    key = key_text("plan", spec, known_as)

    def read(value: Any) -> ExecutionPlan:
        return plan_of(value, spec, known_as)

    known = kept(key, read)
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
    return keep(key, made, made.to_json(), read, label)


def at(site: Site, function: Callable[..., V], *args: Any, timeout: float = 600.0) -> V:
    """The result of a function that drives cuDNN's frontend for a GPU: here if the GPU is of this
    process, else in the deviceless worker; twice where it fails in a way that may pass."""
    if isinstance(site, CudaDevice):
        return failure.twice(lambda fresh: function(*args))
    name = f"{function.__module__}:{function.__name__}"
    return failure.twice(functools.partial(client.call, name, *args, timeout=timeout))


def _build(spec: GraphSpec, site: Site) -> ExecutionPlan:
    return at(site, build.build_for, spec, site, timeout=_seconds(spec))


def _seconds(spec: GraphSpec) -> float:
    """How long one attempt in the worker may take: 10 to 100 times what it took on two cores that
    had other work, too."""
    return min(300.0, 60.0 + 10.0 * len(spec.calls) + 50.0 * len(spec.anchors))


@functools.cache
def identity(site: Site) -> str:
    """What a plan depends on apart from its graph: equal for equal GPUs and equal libraries,
    including the code of this package."""
    if isinstance(site, CudaDevice):
        properties = failure.twice(lambda fresh: site.properties(frontend.load()))
        return _text("by handle", properties, frontend.identity())
    # The profile's name and source make no difference to cuDNN.
    libraries = at(site, frontend.identity)
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
