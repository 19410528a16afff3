"""One case in one run: its sides lowered for shapes alone, compiled with those of others, timed."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax

from jax_cudnn._core.ffi import TARGET
from jax_cudnn._core.user_context import CUDNN, SPLIT, XLA
from jax_cudnn.commands import timing

from .. import exact, queued
from ..case import BACKWARD, FORWARD, OURS, STEP, TRAINING, Case, Named, Side
from ..halves import Halves, halves
from ..measure import FAILED, TIMED, WRONG, Effort, Entry, fastest, plans, short, told, worst

DEFAULT = "default"
WAYS = {DEFAULT: None, SPLIT: SPLIT, XLA: XLA, CUDNN: CUDNN}
"""Ours, by the name of an implementation."""
EFFORT = Effort(0.4, 20, 7)
# A program does its work often enough to take so many us at the chip's limit, on operands of their
# own; and calls in a row take so many seconds.
_SHORT, _MOST, _BYTES = 200.0, 16, 2**30
_BATCH, _LEAST, _WARM = 4e-3, 5, 2
_FAR = 2.5  # times the fastest: such a side is called some times alone, and takes no turns
_TOO_LONG = 10.0  # seconds of a call
_CALL = f'custom_call_target="{TARGET}"'

Key = tuple[str, ...]
"""("arrays",), ("exact",), ("given", side) or (program, side)."""


def plain_sides(case: Case) -> dict[str, Side]:
    """What a user of JAX writes without us, ``jax.nn``'s cuDNN attention with it."""
    others = {name: side for name, side in case.others.items() if OURS not in name}
    return {n: side for n, side in {**case.xla, **others}.items() if isinstance(side, Side)}


class Bench:
    """The programs of one case: lowered when it is made, and measured when they are compiled.

    Args:
        case: what is computed.
        effort: how long to measure.
        skip: sides that are left out.

    Attributes:
        lowered: what is to be compiled, with options of the compiler.
        seconds: of lowering the default, in which it is measured what it takes.
    """

    def __init__(self, case: Case, effort: Effort, skip: Collection[str] = ()) -> None:
        self.case, self.effort = case, effort
        self.plain = plain_sides(case)
        self.sides = {side: case.ours(way) for side, way in WAYS.items()} | self.plain
        self.sides = {side: way for side, way in self.sides.items() if side not in skip}
        self.lowered: dict[Key, tuple[Any, dict[str, Any]]] = {}
        self.ready: dict[Key, Any] = {}
        self.not_run: dict[str, dict[str, str]] = {program: {} for program in case.programs}
        self.same: dict[str, dict[str, str]] = {program: {} for program in case.programs}
        self.texts: dict[tuple[str, bytes], str] = {}
        self.halves: dict[str, Halves] = {}
        self.plans: dict[str, Entry] = {program: {} for program in case.programs}
        self.seconds: dict[str, float] = {}
        key = jax.random.key(0)
        self.operands = jax.eval_shape(case.arrays, key)
        self.repeats = self._repeats()
        self.lowered["arrays",] = jax.jit(case.arrays).lower(key), {}
        self.lowered["exact",] = exact.lowered(case, self.operands), exact.UNTUNED
        for side, way in self.sides.items():
            try:
                self._lower(side, way)
            except Exception as error:
                for missing in self.not_run.values():
                    missing.setdefault(side, told(error))

    def _repeats(self) -> int:
        limit = min(map(self.case.limit_us, self.case.programs))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.operands))
        if self.effort.tiny or not limit:
            return 1
        return max(1, min(math.ceil(_SHORT / limit), _MOST, _BYTES // size))

    # -- lowered -----------------------------------------------------------------------------------

    def _lower(self, side: str, way: Side) -> None:
        given = dict(jax.eval_shape(way.given, self.operands))
        if way.prepare is not None:
            self.lowered["given", side] = jax.jit(way.given).lower(self.operands), {}
        dy = given.pop("dy", None)
        for program in self.case.programs:
            xla = side in self.case.xla and side not in self.case.sides(program)
            if xla or side in self.not_run[program]:
                continue
            try:
                function, operands = self._program(program, side, way, given, dy)
                repeated = partial(_each, function)
                began = time.perf_counter()
                lowered = jax.jit(repeated).lower(*[operands] * self.repeats)
                took = time.perf_counter() - began
            except Exception as error:
                self.not_run[program][side] = told(error)
                continue
            if side == DEFAULT:
                self.seconds[program] = round(took, 3)
            if side in (DEFAULT, CUDNN):
                self.plans[program][side] = plans(function, operands)
            if (twin := self._twin(program, side, lowered)) is None:
                self.lowered[program, side] = lowered, {}
            else:
                self.same[program][side] = twin

    def _program(
        self, program: str, side: str, way: Side, given: Named, dy: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A program's function, which is traced once however often it is called, and the shapes of
        its operands."""
        if program == FORWARD:
            return jax.jit(partial(_by_name, way.function)), (given,)
        if side not in self.halves:
            half = halves(way.function, given, self.case.learned)
            self.halves[side] = dataclasses.replace(half, training=jax.jit(half.training))
        half = self.halves[side]
        if program != BACKWARD:
            return half.training, (given,)
        saved = jax.eval_shape(lambda given: half.saved(given, half.training(given)), given)
        return jax.jit(half.backward), (saved, dy)

    def _twin(self, program: str, side: str, lowered: Any) -> str | None:
        """Another of our sides that is the same program: it is compiled and timed once."""
        if side not in WAYS:
            return None
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        twin = self.texts.setdefault((program, text), side)
        return None if twin == side else twin

    # -- measured ----------------------------------------------------------------------------------

    def compiled(self, key: Key, program: Callable[[], Any]) -> None:
        """Takes a compiled program, or the reason why there is none."""
        try:
            self.ready[key] = program()
        except Exception as error:
            if key[0] in ("arrays", "exact"):
                raise
            for program_name in self.case.programs if key[0] == "given" else key[:1]:
                self.not_run[program_name][key[1]] = told(error)

    def measured(self, fillers: queued.Fillers) -> Iterator[tuple[str, Entry]]:
        """What each program gave."""
        sets = [self.ready["arrays",](jax.random.key(at)) for at in range(self.repeats)]
        want = jax.block_until_ready(self.ready["exact",](sets[0]))
        saved: dict[str, list[Any]] = {}
        entries: dict[str, Entry] = {}
        for program in self.case.programs:
            calls, not_run = {}, self.not_run[program]
            errors: dict[str, Any] = {}
            seconds: dict[str, float] = {}
            for side in self.sides:
                if (program, side) not in self.ready:
                    continue
                if program == BACKWARD and side not in saved:
                    not_run[side] = "its forward did not run"
                    continue
                try:
                    operands = self._operands(program, side, sets, saved)
                    call = partial(self.ready[program, side], *operands)
                    seconds[side], found = _once(call)
                    if program not in (FORWARD, BACKWARD):
                        twins = [s for s, twin in self.same[program].items() if twin == side]
                        for each in (side, *twins):
                            pairs, half = zip(operands, found, strict=True), self.halves[each]
                            saved[each] = [half.saved(given, one) for (given,), one in pairs]
                        found = [found[0][0]]
                    common = self.sides[side].common(found[0])
                    wanted = self.case.shown(want[program])
                    errors[side] = self.case.difference(self.case.shown(common), wanted)
                    calls[side] = call
                except Exception as error:
                    not_run[side] = told(error)
                found = None
            entries[program] = self._entry(program, calls, seconds, errors, fillers.jax)
            yield program, entries[program]
        if BACKWARD in entries:
            yield STEP, self._step(entries[TRAINING], entries[BACKWARD])

    def _step(self, forward: Entry, backward: Entry) -> Entry:
        """Times in us of the sides that ran in both halves."""
        halves = forward.get("us", {}), backward.get("us", {})
        us = {
            side: short(time + halves[1][side])
            for side, time in halves[0].items()
            if side in halves[1]
        }
        status = worst({TRAINING: forward, BACKWARD: backward})
        both: Entry = {"us": us, "host": [], "not_run": {}, "status": status}
        plans = [half["plans"].get(DEFAULT, {}) for half in (forward, backward)]
        both["plans"] = {
            DEFAULT: {by: sum(plan.get(by, 0) for plan in plans) for by in ("cuDNN", "XLA")}
        }
        both["cudnn_calls"] = sum(half.get("cudnn_calls", 0) for half in (forward, backward))
        return both | (ratios(us, self.plain) if DEFAULT in us else {})

    def _operands(
        self, program: str, side: str, sets: list[Named], saved: dict[str, list[Any]]
    ) -> list[tuple[Any, ...]]:
        prepared = self.ready.get(("given", side), lambda operands: operands)
        given = [dict(prepared(operands)) for operands in sets]
        dy = [each.pop("dy", None) for each in given]
        if program == BACKWARD:
            return [*zip(saved.pop(side), dy, strict=True)]
        return [(each,) for each in given]

    def _entry(
        self,
        program: str,
        calls: dict[str, Callable[[], Any]],
        seconds: dict[str, float],
        errors: Mapping[str, Any],
        filler: Callable[[], Any] | None,
    ) -> Entry:
        """Times in us of the sides that are right, and what they say."""
        not_run, allowed = self.not_run[program], self.case.allowed(program)
        wrong = {side: e for side, e in errors.items() if not e.within(allowed)}
        not_run |= {side: f"{WRONG}: {error}" for side, error in wrong.items()}
        not_run |= {s: f"a call takes {t:.0f} s" for s, t in seconds.items() if t > _TOO_LONG}
        calls = {side: call for side, call in calls.items() if side not in not_run}
        once = {side: seconds[side] for side in calls}

        def near() -> list[str]:
            limit = _FAR * min(once.values(), default=0.0) + 5e-5
            return [side for side, t in once.items() if t <= limit]

        for side in once.keys() - near():  # the first calls of all may have met a slow device
            once[side] = min(once[side], _once(calls[side])[0])
        turns = near()
        found = queued.times(
            {side: calls[side] for side in turns},
            dict.fromkeys(turns, filler),
            calls={s: max(1, min(int(_BATCH / once[s]), self.effort.calls)) for s in turns},
            rounds=self.effort.rounds,
            seconds=self.effort.seconds,
            least=1 if self.effort.tiny else _LEAST,
            warm=_WARM,
        )
        part = 1e6 / self.repeats
        us = {side: short(time * part) for side, time in once.items()}
        spread = {}
        for side, each in found.items():
            of_rounds = timing.summary(each.seconds, part)
            us[side] = short(max(of_rounds["median"], 1e-3))
            spread[side] = round((of_rounds["q3"] - of_rounds["q1"]) / us[side], 4)
        for side, twin in self.same[program].items():
            for figures in (us, spread, not_run):
                if twin in figures:
                    figures[side] = figures[twin]  # type: ignore[index]
        entry: Entry = {
            "us": {side: us[side] for side in self.sides if side in us},
            "spread": spread,
            "same": self.same[program],
            "host": [side for side, each in found.items() if not each.hidden],
            "repeats": self.repeats,
            "errors": {side: error.json()["relative"] for side, error in errors.items()},
            "tolerance": allowed,
            "not_run": dict(not_run),
            "plans": self.plans[program],
            "lowering_s": self.seconds.get(program),
        }
        if (compiled := self.ready.get((program, DEFAULT))) is not None:
            entry["cudnn_calls"] = (compiled.as_text() or "").count(_CALL) / self.repeats
        if DEFAULT not in us:
            state = WRONG if DEFAULT in wrong else FAILED
            return entry | {"status": state, "reason": not_run.get(DEFAULT, "it did not run")}
        return entry | {"status": TIMED, **ratios(us, self.plain)}


def ratios(us: Mapping[str, float], plain: Collection[str]) -> Entry:
    """The time of the best plain formulation over that of the default; that of "xla" over that of
    the best plain one; and what the fastest of all sides would have."""
    best, oracle = fastest(us, plain), fastest(us, us)
    if best is None or oracle is None:
        return {}
    found: Entry = {"best_plain": best, "ratio": round(us[best] / us[DEFAULT], 4)}
    found |= {"best": oracle, "oracle": round(us[best] / us[oracle], 4)}
    return found | ({"xla_ratio": round(us[XLA] / us[best], 4)} if XLA in us else {})


def _once(call: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of a call, the least of some, and its results."""
    least, found = math.inf, jax.block_until_ready(call())
    for _ in range(3):
        found = None  # so that the next one has its memory
        began = time.perf_counter()
        found = jax.block_until_ready(call())
        least = min(least, time.perf_counter() - began)
        if least > 0.05:
            break
    return least, found


def _each(function: Callable[..., Any], *sets: Any) -> list[Any]:
    """The results of several sets of operands, one after the other."""
    return [function(*given) for given in sets]


def _by_name(function: Callable[..., Any], operands: Named) -> Any:
    return function(**operands)
