"""The measured choice: on the GPU of the process, the ways to run a graph that is new are run in
turns, and the fastest right one is taken.

The ways are those of :mod:`.placement`. The outcome is kept in the plan cache, so a second process
measures nothing.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import jax

from . import compat
from .agreement import UninformativeError
from .cuda import CudaDevice, kernel_driver
from .errors import PlanningError, UnsupportedGraphError
from .graph.boundary import boundary
from .graph.spec import GraphSpec
from .planning import losses, placement, planner, progress
from .planning import unsupported as failure
from .planning.limits import known_reasons
from .planning.planned_graph import Measured, Outcome, Segments, Way
from .planning.single_flight import SingleFlight
from .planning.split import whole
from .planning.stored import choice_of, keep, kept, key_text
from .settings import FAST, FULL, OFF, settings
from .store.cache import configured
from .store.entry import STEPS, digest
from .trials import Bench, Trial, idle
from .user_context import AUTO, WAYS

log = logging.getLogger("jax_cudnn")
V = TypeVar("V")

_GAIN = 0.98  # of the time of the way without a measurement: less is noise
_PATIENCE, _ALL_PATIENCE = 5.0, 10.0  # seconds for the device to be idle; for all graphs
_LEAST_PATIENCE = 0.1  # for each that comes later
_BATCH, _BATCHES = 2, {FAST: 3, FULL: 6}  # of other engines, in "fast" while they gain
_AVERAGE = 1.0  # seconds that "fast" takes for a graph; what simple ones leave, others may take
_FOR_ENGINES = 0.4  # seconds that a batch of engines takes
_FAR_SLOWER = 2.0  # XLA's time over cuDNN's in the nearest measured graphs


@dataclass
class _Spent:
    """The seconds that this process has measured for, those that it has waited for an idle device,
    and what was said about it."""

    seconds: float = 0.0
    graphs: int = 0
    waited: float = 0.0
    warned: set[str] = field(default_factory=set)

    def left(self) -> float:
        """Seconds that "fast" may take for the next graph."""
        return min((self.graphs + 1) * _AVERAGE - self.seconds, 4 * _AVERAGE)

    def warn_once(self, message: str, *args: Any) -> None:
        if message not in self.warned:
            self.warned.add(message)
            log.warning(message, *args)


class _NotMeasured(Exception):
    """A graph is not measured. ``lasts``: nor will it be in this process; else the reason may pass,
    and nothing is kept of it."""

    def __init__(self, lasts: bool = False) -> None:
        self.lasts = lasts


_steps: dict[str, str] = {}
"""The digests of the ways that whole steps have chosen, by those of their graphs' keys."""
_known: SingleFlight[Outcome] = SingleFlight()
_spent = _Spent()
_measuring = threading.Lock()  # one graph at a time


def outcome(
    spec: GraphSpec, site: CudaDevice, name: str
) -> tuple[Segments, tuple[Measured, ...]] | None:
    """The segments of a graph by a measurement, and the ways that were measured; None where the
    shipped measurements decide."""
    if not may_measure(spec):
        return None
    canonical = spec.for_planning.canonical()
    found = measurement(canonical, site, name)
    if found is None or not found.ways:
        return None
    taken = dict(WAYS.value).get(canonical, found.taken)
    if taken is None:
        segments = placement.strict_reference(spec, found)
    elif (segments := placement.segments_of(found.ways[taken], spec, site, name)) is None:
        return None
    ways = enumerate(found.ways)
    return segments, tuple(Measured(w.what, w.seconds, w.note, i == taken) for i, w in ways)


def measurement(spec: GraphSpec, site: CudaDevice, name: str) -> Outcome | None:
    """What is known of a canonical graph, measured if it is new; None if nothing can be now."""
    key = _key(spec, site)
    try:
        memo = key, settings().tuning
        return _known.get(memo, lambda: _stored_or_measured(key, spec, site, name))
    except _NotMeasured:
        return None


def remember(spec: GraphSpec, site: CudaDevice, outcome: Outcome, way: int) -> None:
    """Makes a way of an outcome the one that a canonical graph takes, in later processes, too: a
    whole step was fastest with it."""
    found, key = replace(outcome, taken=way, step=True), _key(spec, site)
    for level in (FAST, FULL):
        _known.put((key, level), found)
    taken = found.ways[way]
    parts = [(calls, in_xla) for calls, in_xla, _ in taken.segments]
    _steps[digest(key)] = digest(repr((parts, taken.pinned)))
    configured().update(STEPS, {"taken": dict(_steps)}, label="what whole steps have chosen")
    configured().replace(key, asdict(found), label=f"{spec.label}; measured in a step")


def steps() -> str:
    """What whole steps have chosen so far, for the text of a program whose plans are made when it
    is partitioned, after it is lowered. Empty in a job, whose processes must lower equal texts."""
    if jax.process_count() > 1:
        return ""
    stored = (configured().get(STEPS) or {}).get("taken", {})
    return repr(sorted({**stored, **_steps}.items()))


def may_measure(spec: GraphSpec) -> bool:
    """Whether a measurement may decide: not where equal programs are wanted everywhere, where the
    options name the engine, and where other graphs must run as this one does."""
    options = spec.options
    free = options.implementation in (None, AUTO) and options.engine is None
    return free and not (options.deterministic or spec.is_paired) and settings().tuning != OFF


def _key(spec: GraphSpec, site: CudaDevice) -> str:
    versions = f"jaxlib {compat.JAXLIB}, driver {kernel_driver()}"
    return key_text("choice", spec, planner.identity(site), versions, *_flags())


def _flags() -> tuple[str, ...]:
    """XLA's flags for GPUs, on which outcomes depend."""
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = {flag for flag in given if flag.startswith("--xla_gpu_")}
    return tuple(sorted(flags | ({"unoptimized"} if compat.is_unoptimized() else set())))


def _stored_or_measured(key: str, spec: GraphSpec, site: CudaDevice, name: str) -> Outcome:
    """From the disk, or measured and left there."""
    now = settings()

    def read(stored: dict[str, Any]) -> Outcome:
        return choice_of(stored, spec)

    stored = kept(key, read)
    if stored is not None:
        enough = stored.step or now.tuning in (FAST, stored.level)  # "full" measures more
        taken = None if stored.taken is None else stored.ways[stored.taken]
        if taken is not None and placement.segments_of(taken, spec, site, name) is None:
            configured().discard(key, "cuDNN has no such plan any more")
            stored = None
        elif enough:
            return stored
    try:
        made = _measured_in_time(spec, site, name)
    except _NotMeasured as error:
        if stored is None and error.lasts:
            return Outcome(now.tuning)  # for this process alone
        if stored is None:
            raise
        return stored
    if now.plan_cache is None:
        _spent.warn_once("without a plan cache, what jax_cudnn measures holds for this process")
    label, data = f"{spec.label}; measured", asdict(made)
    if stored is not None:
        configured().replace(key, data, label)
        return made
    return keep(key, made, data, read, label)


def _measured_in_time(spec: GraphSpec, site: CudaDevice, name: str) -> Outcome:
    """As :func:`_measured`, one graph at a time, as long as the process may measure."""
    limit = settings().tuning_seconds
    with _measuring:
        if _spent.seconds >= limit:
            _spent.warn_once(
                "jax_cudnn has measured for %.0f s: the measurements that ship with it decide "
                "about further graphs of this process. jax_cudnn.configure(tuning_seconds=...) "
                "sets the limit; what was measured is in the plan cache",
                limit,
            )
            raise _NotMeasured
        began, waited = time.perf_counter(), _spent.waited
        try:
            with progress.planning(f"{name}, measuring"):
                return _measured(spec, site, name)
        finally:
            _spent.seconds += time.perf_counter() - began - (_spent.waited - waited)
            _spent.graphs += 1


def _wait(device: compat.Device) -> float:
    """Seconds until the device has nothing to do, which no limit of measuring counts; TimeoutError
    after too long."""
    began = time.perf_counter()
    patience = max(_LEAST_PATIENCE, min(_PATIENCE, _ALL_PATIENCE - _spent.waited))
    try:
        _in_thread(lambda: idle(device), patience)
    finally:
        waited = time.perf_counter() - began
        _spent.waited += waited
    return waited


def _measured(spec: GraphSpec, site: CudaDevice, name: str) -> Outcome:
    began, level = time.perf_counter(), settings().tuning
    known = losses.nearest(spec, placement.model(site)[1])
    slow = level != FULL and known is not None and known.near and known.ratio >= _FAR_SLOWER
    xla = None if slow else whole(spec, None)
    # What cuDNN is known to refuse may be left to XLA alone: then nothing is compiled in vain.
    refused = bool(known_reasons(boundary(spec).planned))
    ways = placement.first_ways(spec, site, name, xla) if refused else []
    if refused and not ways:
        return Outcome(level)
    bench = None
    try:
        device = _device(site)
        began += _wait(device)
        bench = made = _in_thread(lambda: Bench(spec, site, device, xla))
        ways = ways or placement.first_ways(spec, site, name, xla)
        if not ways:
            return Outcome(level)
        trials = _in_thread(lambda: made.trials(ways))
        timed = {i: trial.seconds for i, trial in enumerate(trials) if not trial.note}
        more = placement.other_engines(site, name, ways, timed)
        for _ in range(_BATCHES[level]):
            needed = time.perf_counter() - began + _FOR_ENGINES
            if level != FULL and _spent.left() < needed:
                break
            best = _fastest(trials)
            try:
                batch = [*itertools.islice(more, _BATCH)]
                found = _in_thread(lambda b=batch: made.trials(b)) if batch else []
            except Exception as error:  # what was measured so far stands
                log.debug("%s: other engines are not measured: %s", name, error)
                break
            ways, trials = ways + batch, trials + found
            if not batch or (level != FULL and _fastest(trials) == best):
                break
    except TimeoutError as error:
        _spent.warn_once(
            "%s: not measured, because the GPU was busy; the measurements that ship with jax_cudnn "
            "decide",
            name,
        )
        raise _NotMeasured from error
    except MemoryError as error:
        log.info("%s: not measured: too large for what is free of the memory", name)
        raise _NotMeasured(lasts=True) from error
    except UninformativeError as error:
        log.info("%s: not measured: random operands do not tell right results from wrong", name)
        raise _NotMeasured(lasts=True) from error
    except (PlanningError, UnsupportedGraphError):
        raise
    except Exception as error:  # the graph runs as without a measurement
        log.warning("%s: not measured: %s: %s", name, type(error).__name__, error)
        raise _NotMeasured(lasts=not failure.may_pass(str(error))) from error
    finally:
        if bench is not None:
            bench.close()
    return _chosen(spec, name, ways, trials, level)


def _chosen(
    spec: GraphSpec, name: str, ways: list[Segments], trials: list[Trial], level: str
) -> Outcome:
    """The outcome of trials: the fastest right way is taken."""
    pairs = [*zip(map(placement.title_of, ways), trials, strict=True)]
    for what, trial in pairs:
        if trial.wrong:
            log.warning("%s: %s is not taken: %s", name, what, trial.note)
    taken = _fastest(trials)
    if taken is None and not trials[0].wrong:
        raise _NotMeasured  # what is taken without a measurement was not measured, and is not wrong
    if taken is not None and trials[taken].seconds > _GAIN * trials[0].seconds:
        taken = 0
    timed = ", ".join(f"{what} {t.seconds * 1e6:.1f} us" for what, t in pairs if not t.note)
    if taken is not None:
        before, after = trials[0].seconds, trials[taken].seconds
        gain = "" if before == math.inf else f", {after / before:.2f} of the time without measuring"
        log.info("%s: %s%s; measured: %s", name, pairs[taken][0], gain, timed)
        progress.measured(before if before < math.inf else after, after)

    found = []
    for way, (what, trial) in zip(ways, pairs, strict=True):
        measured = f"measured: {timed}" if timed else ""
        why = "" if placement.uses_cudnn(way) else measured
        cut = measured if len(way) > 1 else ""
        options = ((at, segment.spec.options) for at, segment in enumerate(way))
        made = Way(
            what=what,
            seconds=None if trial.note else trial.seconds,
            note=trial.note,
            segments=tuple((s.calls, s.plan is None, why or s.reason or cut) for s in way),
            pinned=tuple((at, o.engine, o.knobs) for at, o in options if o.engine is not None),
        )
        found.append(made)
    return Outcome(level, tuple(found), taken)


def _fastest(trials: list[Trial]) -> int | None:
    fastest = min(range(len(trials)), key=lambda i: trials[i].seconds)
    return fastest if trials[fastest].seconds < math.inf else None


def _device(site: CudaDevice) -> compat.Device:
    local = jax.local_devices(backend="cuda")  # which need not be JAX's default
    return next(device for device in local if device.local_hardware_id == site.ordinal)


def _in_thread(work: Callable[[], V], seconds: float | None = None) -> V:
    """The result of work in a separate thread, which no trace of the caller reaches, under JAX's
    usual settings; TimeoutError after so many seconds."""
    future: Future[V] = Future()
    _, as_in_caller = compat.settings_of_thread()

    def run() -> None:
        try:
            with (
                as_in_caller(),
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.disable_jit(False),
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
                jax.transfer_guard("allow"),
            ):
                future.set_result(work())
        except BaseException as error:
            # Without its frames, which hold arrays until the garbage collector comes.
            future.set_exception(error.with_traceback(None))

    threading.Thread(target=run, daemon=True, name="jax_cudnn measuring").start()
    return future.result(seconds)


def clear() -> None:
    """Forget all measurements that are in memory."""
    global _spent
    _known.clear()
    _steps.clear()
    _spent = _Spent()
