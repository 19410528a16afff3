"""The measured choice: on the GPU of the process, the ways to run a graph that is new are run in
turns, and the fastest right one is taken.

The ways are the cuts that :mod:`.placement` finds, other engines of cuDNN, and XLA alone. The
outcome is kept in the plan cache, so a second process measures nothing.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from . import compat
from .cuda import CudaDevice
from .errors import PlanningError, UnsupportedGraphError
from .graph.spec import GraphSpec
from .graph.wire import wire
from .implementation import AUTO
from .planning import losses, placement, planner, progress
from .planning.limits import known_reasons
from .planning.planned_graph import Measured, PlannedSegment, Segments
from .planning.single_flight import SingleFlight
from .planning.split import Refusal, part, search, whole
from .planning.stored import choice_of, key_text
from .settings import FAST, FULL, OFF, settings
from .store import cache
from .trials import Bench, Trial, idle
from .user_context import WAYS

log = logging.getLogger("jax_cudnn")
V = TypeVar("V")

_GAIN = 0.98  # of the time of the way without a measurement: less is noise
_PATIENCE = 5.0  # seconds for the device to be idle
_BATCH, _BATCHES = 2, {FAST: 3, FULL: 6}  # of other engines, in "fast" while they gain
_AVERAGE = 1.0  # seconds that "fast" takes for a graph; what simple ones leave, others may take
_FOR_ENGINES = 0.4  # seconds that a batch of engines takes
_FAR_SLOWER = 2.0  # XLA's time over cuDNN's in the nearest measured graphs
_NEAR = 4.0  # times the fastest way: how slow cuDNN's first engine may be for others to be tried


@dataclass
class _Spent:
    """The seconds that this process has measured for, and what was said about it."""

    seconds: float = 0.0
    graphs: int = 0
    told: frozenset[str] = frozenset()

    def left(self) -> float:
        """Seconds that "fast" may take for the next graph."""
        return min((self.graphs + 1) * _AVERAGE - self.seconds, 4 * _AVERAGE)

    def once(self, key: str, message: str, *args: Any) -> None:
        if key not in self.told:
            self.told |= {key}
            log.warning(message, *args)


Data = dict[str, Any]
"""What was measured of a graph, as it is stored: ``ways``, each with its segments, what they are,
their seconds and a note; which of them is ``taken``; the ``level`` of tuning; and whether a whole
``step`` was measured with it."""

_known: SingleFlight[Data | None] = SingleFlight()
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
    data = measurement(canonical, site, name)
    if data is None:
        return None
    taken = dict(WAYS.value).get(canonical, data["taken"])
    segments = _segments(data["ways"][taken], spec, site, name)
    if segments is None:
        return None
    ways = enumerate(data["ways"])
    return segments, tuple(
        Measured(w["what"], w["seconds"], w["note"], i == taken) for i, w in ways
    )


def measurement(spec: GraphSpec, site: CudaDevice, name: str) -> Data | None:
    """What is known of a canonical graph, measured if it is new; None if nothing can be."""
    key = spec, planner.identity(site), settings().tuning
    return _known.get(key, lambda: _stored_or_measured(spec, site, name))


def remember(spec: GraphSpec, site: CudaDevice, way: int) -> None:
    """Makes a way the one that a canonical graph takes, in later processes, too: a whole step was
    fastest with it."""
    key = spec, planner.identity(site), settings().tuning
    data = _known.get(key, lambda: None)
    assert data is not None
    data |= {"taken": way, "step": True}
    cache.replace(_key(spec, site), data, label=f"{spec.label}; measured in a step")


def may_measure(spec: GraphSpec) -> bool:
    """Whether a measurement may decide: not where equal programs are wanted everywhere, where the
    options name the engine, and where other graphs must run as this one does."""
    options = spec.options
    free = options.implementation in (None, AUTO) and options.engine is None
    return free and not (options.deterministic or spec.is_paired) and settings().tuning != OFF


def _key(spec: GraphSpec, site: CudaDevice) -> str:
    return key_text("choice", spec, planner.identity(site), compat.JAXLIB)


def _stored_or_measured(spec: GraphSpec, site: CudaDevice, name: str) -> Data | None:
    """From the disk, or measured and left there; None where nothing is measured."""
    key, now = _key(spec, site), settings()

    def read(stored: Data) -> Data:
        return choice_of(stored, spec)

    stored = planner.decoded(key, cache.get(key), read)
    if stored is not None:
        taken = stored["ways"][stored["taken"]]
        enough = now.tuning in (FAST, stored["level"])  # "full" measures more
        if enough and _segments(taken, spec, site, name) is not None:
            return stored
    with _measuring:
        if _spent.seconds >= now.tuning_seconds:
            _spent.once(
                "limit",
                "jax_cudnn has measured for %.0f s: the measurements that ship with it decide "
                "about further graphs of this process. jax_cudnn.configure(tuning_seconds=...) "
                "sets the limit; what was measured is in the plan cache",
                now.tuning_seconds,
            )
            return None
        began = time.perf_counter()
        try:
            with progress.planning(f"{name}, measuring"):
                data = _measured(spec, site, name)
        finally:
            _spent.seconds += time.perf_counter() - began
            _spent.graphs += 1
    if data is None:
        return None
    if now.plan_cache is None:
        _spent.once("cache", "without a plan cache, what jax_cudnn measures holds for this process")
    label = f"{spec.label}; measured"
    if stored is not None:
        cache.replace(key, data, label)
        return data
    first = cache.put(key, data, label)
    return data if first is data else planner.decoded(key, first, read) or data


def _segments(way: Data, spec: GraphSpec, site: CudaDevice, name: str) -> Segments | None:
    """The segments of a way from its data; None if cuDNN has no such plan any more."""
    segments = []
    for row in way["segments"]:
        piece, plan = part(spec, row["calls"]), None
        if not row["in_xla"]:
            try:
                plan = planner.plan(_pinned(piece, row["pinned"]), site, name)
            except UnsupportedGraphError:
                return None
        segments.append(PlannedSegment(piece, tuple(row["calls"]), plan, row["reason"]))
    return tuple(segments)


def _pinned(spec: GraphSpec, pinned: dict[str, Any] | None) -> GraphSpec:
    """The graph with an engine; None leaves that to cuDNN's heuristics."""
    if pinned is None:
        return spec
    knobs = tuple(sorted(pinned["knobs"].items()))
    return replace(spec, options=replace(spec.options, engine=pinned["engine"], knobs=knobs))


@dataclass(frozen=True)
class _Way:
    """Segments to measure; ``pinned`` is the engine of the ``at``-th, if it is not the planner's
    own choice."""

    segments: Segments
    at: int = 0
    pinned: dict[str, Any] | None = None

    @property
    def what(self) -> str:
        if len(self.segments) == 1:
            (segment,) = self.segments
            return "XLA" if segment.plan is None else f"cuDNN {segment.engine}"
        named = [
            f"{'XLA' if s.plan is None else f'cuDNN {s.engine}'}: "
            f"{', '.join(call.name for call in s.spec.calls)}"
            for s in self.segments
        ]
        return "; ".join(named)


def _measured(spec: GraphSpec, site: CudaDevice, name: str) -> Data | None:
    """None where the graph cannot be measured."""
    device = _device(site)
    began, level = time.perf_counter(), settings().tuning
    known = losses.nearest(spec, placement.model(site)[1])
    slow = level != FULL and known is not None and known.ratio >= _FAR_SLOWER
    xla = None if slow else whole(spec, None)
    # What cuDNN is known to refuse may be left to XLA alone: then nothing is compiled in vain.
    first = _first_ways(spec, site, name, xla) if known_reasons(wire(spec)) else None
    if first == []:
        return None
    try:
        _in_thread(lambda: idle(device)).result(_PATIENCE)
    except TimeoutError:
        _spent.once(
            "busy",
            "%s: the GPU was busy for %.0f s, so the measurements that ship with jax_cudnn decide",
            name,
            _PATIENCE,
        )
        return None
    try:
        bench = _in_thread(lambda: Bench(spec, site, device, xla)).result()
        ways = _first_ways(spec, site, name, xla) if first is None else first
        if not ways:
            return None
        trials = _in_thread(lambda: bench.trials([w.segments for w in ways])).result()
        more = _engines(spec, site, name, ways, trials)
        for _ in range(_BATCHES[level]):
            if level != FULL and _spent.left() < time.perf_counter() - began + _FOR_ENGINES:
                break
            batch = [*itertools.islice(more, _BATCH)]
            if not batch:
                break
            best = _fastest(trials)
            tried = _in_thread(lambda b=batch: bench.trials([w.segments for w in b])).result()
            ways, trials = [*ways, *batch], [*trials, *tried]
            if level != FULL and _fastest(trials) == best:
                break
    except MemoryError:
        log.debug("%s: too large to be measured with what is in memory", name)
        return None
    except (PlanningError, UnsupportedGraphError):
        raise
    except Exception as error:  # the graph runs as without a measurement
        log.warning("%s: not measured: %s: %s", name, type(error).__name__, error)
        return None
    return _chosen(name, ways, trials, level)


def _chosen(name: str, ways: Sequence[_Way], trials: Sequence[Trial], level: str) -> Data | None:
    """The data of ways, of which the fastest is taken; None if none ran."""
    for way, trial in zip(ways, trials, strict=True):
        if trial.wrong:
            log.warning("%s: %s is not taken: %s", name, way.what, trial.note)
    taken = _fastest(trials)
    if taken is None:
        return None
    if trials[taken].seconds > _GAIN * trials[0].seconds:
        taken = 0
    pairs = [*zip(ways, trials, strict=True)]
    timed = ", ".join(f"{w.what} {t.seconds * 1e6:.1f} us" for w, t in pairs if not t.note)
    log.debug("%s: takes %s; measured: %s", name, ways[taken].what, timed)

    def reason(way: _Way, segment: PlannedSegment) -> str:
        return f"measured: {timed}" if not _uses_cudnn(way) else segment.reason

    found = [
        {
            "what": way.what,
            "seconds": None if trial.note else trial.seconds,
            "note": trial.note,
            "segments": [
                {
                    "calls": [*s.calls],
                    "in_xla": s.plan is None,
                    "pinned": way.pinned if i == way.at else None,
                    "reason": reason(way, s),
                }
                for i, s in enumerate(way.segments)
            ],
        }
        for way, trial in pairs
    ]
    return {"level": level, "step": False, "taken": taken, "ways": found}


def _uses_cudnn(way: _Way) -> bool:
    return any(segment.plan is not None for segment in way.segments)


def _fastest(trials: Sequence[Trial]) -> int | None:
    fastest = min(range(len(trials)), key=lambda i: trials[i].seconds)
    return fastest if trials[fastest].seconds < math.inf else None


def _first_ways(spec: GraphSpec, site: CudaDevice, name: str, xla: Segments | None) -> list[_Way]:
    """What is taken without a measurement, XLA alone, cuDNN where it can, and the products alone in
    cuDNN; empty if XLA alone can run the graph."""
    cuts = [placement.decide(spec, site, name), placement.cut(spec, site, name, losing=True)]
    if xla is not None:
        cuts.insert(1, xla)
    if len(spec.calls) > 1 and any(call.node.anchor for call in spec.calls):

        def alone(piece: GraphSpec) -> Any:
            if len(piece.calls) > 1:
                return Refusal("measured alone")
            try:
                return planner.plan(piece, site, name)
            except UnsupportedGraphError as error:
                return Refusal(error.reason)

        cuts.append(search(spec, alone))
    ways = _distinct(list(map(_Way, cuts)))
    return ways if any(map(_uses_cudnn, ways)) else []


def _engines(
    spec: GraphSpec, site: CudaDevice, name: str, ways: Sequence[_Way], trials: Sequence[Trial]
) -> Iterator[_Way]:
    """The fastest way that uses cuDNN with other engines in its largest segment."""
    timed = [i for i, t in enumerate(trials) if not t.note and _uses_cudnn(ways[i])]
    if not timed:
        return
    best = min(timed, key=lambda i: trials[i].seconds)
    fastest = _fastest(trials)
    assert fastest is not None
    if trials[best].seconds > _NEAR * trials[fastest].seconds:
        return
    segments = ways[best].segments
    at = max(
        range(len(segments)), key=lambda i: (segments[i].plan is not None, len(segments[i].calls))
    )
    own, piece = segments[at].plan, segments[at].spec
    assert own is not None
    for row in planner.candidates(piece, site, name):
        pinned = {"engine": row.engine, "knobs": dict(row.knobs)}
        if row.supported is False or pinned == own.pinned:
            continue
        try:
            plan = planner.plan(_pinned(piece, pinned), site, name)
        except UnsupportedGraphError:
            continue
        changed = replace(segments[at], plan=plan)
        yield _Way((*segments[:at], changed, *segments[at + 1 :]), at, pinned)


def _device(site: CudaDevice) -> compat.Device:
    local = filter(compat.is_cuda, jax.local_devices())
    return next(device for device in local if device.local_hardware_id == site.ordinal)


def _distinct(ways: Sequence[_Way]) -> list[_Way]:
    found: dict[Any, _Way] = {}
    for way in ways:
        key = tuple((s.calls, s.plan and s.plan.text) for s in way.segments)
        found.setdefault(key, way)
    return [*found.values()]


def _in_thread(work: Callable[[], V]) -> Future[V]:
    """Work in a thread of its own, which no context of JAX reaches, such as that of a trace."""
    future: Future[V] = Future()

    def run() -> None:
        try:
            with jax.debug_nans(False), jax.debug_infs(False):
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="jax_cudnn measuring").start()
    return future


def clear() -> None:
    """Forget all measurements that are in memory."""
    _known.clear()
    _spent.seconds, _spent.graphs, _spent.told = 0.0, 0, frozenset()
