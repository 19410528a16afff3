"""The measured choice: on the GPU of the process, the ways to run a graph that is new are run in
turns, and the fastest right one is taken.

The ways are the cuts that :mod:`.placement` finds, other engines of cuDNN, and XLA alone. The
outcome is kept in the plan cache, so a second process measures nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
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
from .errors import UnsupportedGraphError
from .graph.spec import GraphSpec
from .implementation import AUTO
from .planning import placement, planner, progress
from .planning.planned_graph import Measured, PlannedSegment, Segments
from .planning.single_flight import SingleFlight
from .planning.split import Refusal, part, search, whole
from .planning.stored import choice_of, key_text
from .settings import FAST, FULL, OFF, settings
from .store import cache
from .trials import Bench, Trial, idle

log = logging.getLogger("jax_cudnn")
V = TypeVar("V")

_GAIN = 0.98  # of the time of the way without a measurement: less is noise
_PATIENCE = 5.0  # seconds for the device to be idle
_BATCH, _BATCHES = 2, {FAST: 3, FULL: 6}  # of other engines, in "fast" while they gain
_AVERAGE = 1.0  # seconds that "fast" takes for a graph; what simple ones leave, others may take
_FOR_ENGINES = 0.4  # seconds that a batch of engines takes
_NEAR = 4.0  # times the fastest way: how slow cuDNN's first engine may be for others to be tried


@dataclass(frozen=True)
class Outcome:
    """How a canonical graph runs, and what was measured."""

    segments: Segments
    measured: tuple[Measured, ...]


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


_outcomes: SingleFlight[Outcome | None] = SingleFlight()
_spent = _Spent()
_measuring = threading.Lock()  # one graph at a time


def outcome(spec: GraphSpec, site: CudaDevice, name: str) -> Outcome | None:
    """The measured choice for a graph; None where the shipped measurements decide."""
    if not _may_measure(spec):
        return None
    canonical = spec.for_planning().canonical()
    key = canonical, planner.identity(site)
    found = _outcomes.get(key, lambda: _known_or_measured(canonical, site, name))
    if found is None:
        return None
    segments = (replace(s, spec=part(spec, s.calls)) for s in found.segments)
    return replace(found, segments=tuple(segments))


def _may_measure(spec: GraphSpec) -> bool:
    """Whether a measurement may decide: not where equal programs are wanted everywhere, where the
    options name the engine, and where other graphs must run as this one does."""
    options = spec.options
    free = options.implementation in (None, AUTO) and options.engine is None
    return free and not (options.deterministic or spec.is_paired) and settings().tuning != OFF


def _known_or_measured(spec: GraphSpec, site: CudaDevice, name: str) -> Outcome | None:
    """The outcome from the disk, or measured and left there; None where nothing is measured."""
    versions = {"jaxlib": compat.JAXLIB, "tuning": settings().tuning}
    key = key_text("choice", spec, planner.identity(site), json.dumps(versions))

    def read(stored: dict[str, Any]) -> dict[str, Any]:
        return choice_of(stored, spec)

    known = planner.decoded(key, cache.get(key), read)
    if known is not None and (outcome := _restored(known, spec, site, name)) is not None:
        return outcome
    with _measuring:
        limit = settings().tuning_seconds
        if _spent.seconds >= limit:
            _spent.once(
                "limit",
                "jax_cudnn has measured for %.0f s: the measurements that ship with it decide "
                "about further graphs of this process. jax_cudnn.configure(tuning_seconds=...) "
                "sets the limit; what was measured is in the plan cache",
                limit,
            )
            return None
        began = time.perf_counter()
        try:
            with progress.planning(f"{name}, measuring"):
                found = _measured(spec, site, name)
        finally:
            _spent.seconds += time.perf_counter() - began
            _spent.graphs += 1
    if found is None:
        return None
    if settings().plan_cache is None:
        _spent.once("cache", "without a plan cache, what jax_cudnn measures holds for this process")
    data, segments = found
    stored = cache.put(key, data, label=f"{spec.label}; measured")
    if stored is not data and (first := planner.decoded(key, stored, read)):
        return _restored(first, spec, site, name) or Outcome(segments, _ways(data))
    return Outcome(segments, _ways(data))


def _ways(data: dict[str, Any]) -> tuple[Measured, ...]:
    return tuple(Measured(**way) for way in data["measured"])


def _restored(data: dict[str, Any], spec: GraphSpec, site: CudaDevice, name: str) -> Outcome | None:
    """The outcome from its data; None if cuDNN has no such plan any more."""
    segments = []
    for row in data["segments"]:
        piece, plan = part(spec, row["calls"]), None
        if not row["in_xla"]:
            try:
                plan = planner.plan(_pinned(piece, row["pinned"]), site, name, advise=False)
            except UnsupportedGraphError:
                return None
        segments.append(PlannedSegment(piece, tuple(row["calls"]), plan, row["reason"]))
    return Outcome(tuple(segments), _ways(data))


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


def _measured(
    spec: GraphSpec, site: CudaDevice, name: str
) -> tuple[dict[str, Any], Segments] | None:
    """The outcome as data, and its segments; None where the graph cannot be measured."""
    device = _device(site)
    began, level = time.perf_counter(), settings().tuning
    first = _distinct([_Way(placement.decide(spec, site, name)), *_cuts(spec, site, name)])
    if len(first) == 1 and first[0].segments[0].plan is None:
        return None  # XLA alone can run it
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
        bench = _in_thread(lambda: Bench(spec, site, device)).result()
        ways, trials = (
            [*first],
            _in_thread(lambda: bench.trials([w.segments for w in first])).result(),
        )
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
        log.debug("%s: too large to be measured beside what is in memory", name)
        return None
    except Exception as error:  # the graph runs as without a measurement
        log.warning("%s: not measured: %s: %s", name, type(error).__name__, error)
        return None
    return _outcome(name, ways, trials)


def _outcome(
    name: str, ways: Sequence[_Way], trials: Sequence[Trial]
) -> tuple[dict[str, Any], Segments] | None:
    for way, trial in zip(ways, trials, strict=True):
        if trial.wrong:
            log.warning("%s: %s is not taken: %s", name, way.what, trial.note)
    taken = _fastest(trials)
    if taken is None:
        return None
    if trials[taken].seconds > _GAIN * trials[0].seconds:
        taken = 0
    timed = {w.what: t.seconds * 1e6 for w, t in zip(ways, trials, strict=True) if not t.note}
    log.debug("%s: takes %s of %s", name, ways[taken].what, timed)
    way, reason = ways[taken], ""
    if not _uses_cudnn(way):
        reason = "XLA measured faster: " + ", ".join(f"{w} {us:.1f} us" for w, us in timed.items())
    segments = tuple(replace(s, reason=reason or s.reason) for s in way.segments)
    rows = [
        {
            "calls": list(s.calls),
            "in_xla": s.plan is None,
            "pinned": way.pinned if i == way.at else None,
            "reason": s.reason,
        }
        for i, s in enumerate(segments)
    ]
    measured = [
        dataclasses.asdict(Measured(w.what, None if t.note else t.seconds, t.note, i == taken))
        for i, (w, t) in enumerate(zip(ways, trials, strict=True))
    ]
    return {"segments": rows, "measured": measured}, segments


def _uses_cudnn(way: _Way) -> bool:
    return any(segment.plan is not None for segment in way.segments)


def _fastest(trials: Sequence[Trial]) -> int | None:
    fastest = min(range(len(trials)), key=lambda i: trials[i].seconds)
    return fastest if trials[fastest].seconds < math.inf else None


def _cuts(spec: GraphSpec, site: CudaDevice, name: str) -> Iterator[_Way]:
    """XLA alone; cuDNN where it can; and the products alone in cuDNN."""
    yield _Way(whole(spec, None))
    yield _Way(placement.cut(spec, site, name, losing=True))
    if len(spec.calls) > 1 and any(call.node.anchor for call in spec.calls):

        def alone(piece: GraphSpec) -> Any:
            if len(piece.calls) > 1:
                return Refusal("measured alone")
            try:
                return planner.plan(piece, site, name, advise=False)
            except UnsupportedGraphError as error:
                return Refusal(error.summary)

        yield _Way(search(spec, alone))


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
            plan = planner.plan(_pinned(piece, pinned), site, name, advise=False)
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
    _outcomes.clear()
    _spent.seconds, _spent.graphs, _spent.told = 0.0, 0, frozenset()
