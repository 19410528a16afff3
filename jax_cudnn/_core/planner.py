"""Which plan a graph gets: planned once for equal graphs, GPUs and versions, kept in memory."""

from __future__ import annotations

import copy
import functools
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

from ..deviceless import client
from ..deviceless.profiles import Profile
from . import alternatives, build, frontend
from .cuda import CudaDevice
from .errors import JaxCudnnError, UnsupportedGraphError
from .limits import known_reasons
from .plan import Plan, canonical_properties
from .spec import GraphSpec
from .unsupported import unsupported
from .wire import wire

log = logging.getLogger("jax_cudnn")

_CAPACITY = 4096  # plans are 3 to 120 KB; the oldest go first
_plans: dict[Any, Future[Plan]] = {}
_lock = threading.Lock()


def plan(spec: GraphSpec, site: Profile | CudaDevice, name: str, advise: bool = True) -> Plan:
    """The plan of a graph for a GPU, built at most once however many threads ask.

    On a GPU of this process a real handle plans; for a profile the deviceless worker does, also
    where there is a GPU. Raises what planning raised, for each caller anew; with ``advise`` a
    refusal of element types says which are supported there.
    """
    try:
        return _plan(spec, site, name)
    except UnsupportedGraphError as error:
        if advise:
            build = functools.partial(_plan, site=site, name=name)
            error.expected = alternatives.dtypes_with_plan(spec, error, build)
        raise


def _plan(spec: GraphSpec, site: Profile | CudaDevice, name: str) -> Plan:
    planned = wire(spec)
    reasons = known_reasons(planned)
    if reasons:
        error = unsupported(planned, reasons)
        error.why = "; ".join(reasons.values())
        raise _told(error, spec, name, site)
    key = (planned.canonical(), *_identity(site))
    while True:
        with _lock:
            future = _plans.get(key)
            mine = future is None
            if future is None:
                future = _plans[key] = Future()
                while len(_plans) > _CAPACITY:
                    _plans.pop(next(iter(_plans)))
        if mine:
            _fulfil(future, key, site, name)
        try:
            return future.result()
        except JaxCudnnError as error:
            raise _told(error, spec, name, site) from error.__cause__  # told once, not twice
        except (KeyboardInterrupt, SystemExit):
            if mine:
                raise
            # The thread that planned was interrupted, not this one: plan here.


def _fulfil(future: Future[Plan], key: Any, site: Profile | CudaDevice, name: str) -> None:
    started = time.perf_counter()
    try:
        result = _build(key[0], site)
    except BaseException as error:
        # A failure is not remembered: the user may mend the installation and try again.
        with _lock:
            _plans.pop(key, None)
        future.set_exception(error)
        return
    log.debug("%s: planned in %.3f s: %s", name, time.perf_counter() - started, result)
    future.set_result(result)


def _told(
    error: JaxCudnnError, spec: GraphSpec, name: str, site: Profile | CudaDevice
) -> JaxCudnnError:
    """The error as the caller of function ``name`` shall read it, in the names of its graph."""
    told = copy.copy(error)
    told.summary = f"{name}: {error.summary}"
    if isinstance(told, UnsupportedGraphError):
        told.graph = str(spec)
        if isinstance(site, Profile):
            basis = "" if site.measured else " (a profile from public specifications)"
            told.summary = told.summary.replace("on this GPU", f"on {site.name}{basis}")
    return told


def _build(spec: GraphSpec, site: Profile | CudaDevice) -> Plan:
    if isinstance(site, CudaDevice):
        return build.build_for_device(spec, site)
    return client.call("jax_cudnn._core.build:build_for_profile", spec, site)


def _identity(site: Profile | CudaDevice) -> tuple[Any, ...]:
    """What a plan depends on besides its graph: equal for equal GPUs of one host."""
    if isinstance(site, CudaDevice):
        cudnn = frontend.load()
        properties = canonical_properties(site.properties(cudnn))
        return "device", properties, cudnn.backend_version(), cudnn.__version__
    return "profile", site


def clear() -> None:
    """Forget all plans (tests and benchmarks)."""
    with _lock:
        _plans.clear()


def _after_fork() -> None:
    """In a child no thread is left that could finish a plan or release a lock."""
    global _lock
    _lock = threading.Lock()
    for key in [key for key, future in _plans.items() if not future.done()]:
        del _plans[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
