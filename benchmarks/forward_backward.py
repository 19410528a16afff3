"""Forward and backward of a case apart, on all sides, in the same rounds: ours, XLA's, PyTorch's.

PyTorch, where it is installed, runs in the same process and on the same arrays. A side that is
wrong is not timed; if it is ours or XLA's, the case is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core import agreement
from jax_cudnn._core.user_context import CUDNN, XLA
from jax_cudnn.commands import timing

from . import power, queued, torch_graphs
from .case import BACKWARD, FORWARD, OURS, REFERENCE, TRAINING, WHOLE, Case, Named, Side
from .exact import exact
from .halves import Halves, halves
from .measure import (
    FAILED,
    TIMED,
    WRONG,
    Call,
    Effort,
    Entry,
    compiled,
    fastest,
    plans,
    short,
    told,
    tried,
    worst,
)

# Calls in a row are of a program that takes two milliseconds at the chip's limit, or does its work
# several times on copies of its operands; and fewer where they take longer than need be: the end
# of a batch is known to some 400 us.
_SHORT, _MOST, _COPIES = 2000.0, 32, 2**30  # us; times; bytes
_BATCH = 0.04  # seconds of calls in a row
# A side that takes longer has rounds of its own, and three of them. So what stands close together
# takes turns alone.
_SLOW, _LEAST, _FEW = 0.15, 7, 3
_FAR = 4.0  # times the fastest: a formulation of XLA's that takes longer is slow, too
_TOO_LONG = 10.0  # seconds of a call; such a side is not timed
_AGAIN = 1.0  # seconds: of a call that takes less there is a second one, which may be quicker
_NO_BACKWARD = "it has no backward"

Given = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""By side a function and its operands."""


def measure(case: Case, effort: Effort, fillers: queued.Fillers) -> Entry:
    """The entry of a case: of each program the times in us on all sides, the chip's limit, and how
    far the results are from float32."""
    bench = _Bench(case, effort, fillers)
    want = exact(case, bench.operands)
    bench.prepare()
    entries = {program: tried(bench.program, program, want[program]) for program in case.programs}
    found: Entry = {"status": worst(entries), "programs": entries}
    if BACKWARD in entries:
        forward, backward = (entries[program].get("us", {}) for program in (TRAINING, BACKWARD))
        us = {
            side: round(forward[side]["median"] + backward[side]["median"], 3)
            for side in forward
            if side in backward
        }
        found["training_step"] = {"us": us, **_rates(us, case, (TRAINING, BACKWARD))}
    return found


def base(case: Case) -> Entry:
    """What is always told of a case."""
    about = {"what": case.what, "operands": case.described(), **case.about()}
    return {**about, "programs": {}}


@dataclass
class _Running:
    """A side that is compiled: its program, which does its work ``repeats`` times, what takes the
    first results from all, what keeps the device busy before it, and seconds of a call."""

    call: Call
    first: Callable[[Any], Any]
    filler: Call | None
    repeats: int
    seconds: float = 0.0


class _Bench:
    """The sides of one case on the same arrays: in their forms, compiled, run, timed."""

    def __init__(self, case: Case, effort: Effort, fillers: queued.Fillers) -> None:
        self.case, self.effort, self.fillers = case, effort, fillers
        self.operands = jax.block_until_ready(case.arrays(jax.random.key(0)))
        ways = {WHOLE: CUDNN, OURS: None, REFERENCE: XLA}
        every = {side: case.ours(ways[side]) for side in case.ways} | {**case.others, **case.xla}
        self.sides = {side: way for side, way in every.items() if isinstance(way, Side)}
        self.without = {side: way for side, way in every.items() if isinstance(way, str)}
        self.given: dict[str, Named] = {}
        self.dy: dict[str, Any] = {}
        self.halves: dict[str, Halves] = {}
        self.saved: dict[str, list[Any]] = {}
        self.copied: dict[int, list[jax.Array]] = {}  # of an array by its id, itself the first
        self.ways: dict[str, Side] = dict(self.sides)  # and of PyTorch those that run
        self.foreign = {*case.torch, *case.others} - {s for s in case.others if OURS in s}
        self.plain = {REFERENCE, *case.xla}

    def prepare(self) -> None:
        """Brings the operands into the form of each side in JAX."""
        for side, way in self.sides.items():
            try:
                given = jax.block_until_ready(way.given(self.operands))
                self.dy[side] = given.get("dy")
                self.given[side] = {name: x for name, x in given.items() if name != "dy"}
                if self.case.learned and way.backward and not self.case.whole:
                    learned = self.case.learned
                    self.halves[side] = halves(way.function, self.given[side], learned)
            except Exception as error:
                self.without[side] = told(error)

    def program(self, program: str, want: Named) -> Entry:
        """One program on all sides: compiled, run once and compared, timed."""
        case, limit = self.case, self.case.limit_us(program)
        given, not_run = self._given(program)
        running = self._compiled(given, self._repeats(limit), not_run)
        running |= self._torch(program, self._repeats(limit), not_run)
        entry: Entry = {
            "status": TIMED,
            **({"flops": case.flops(program)} if case.flops(program) else {}),
            **({"bytes": case.bytes(program), "limit_us": round(limit, 3)} if limit else {}),
            "plans": {s: plans(*given[s]) for s in (WHOLE, OURS) if s in given},
            **(case.told(program, *given[OURS]) if OURS in given else {}),
        }
        errors = self._compared(program, running, want, not_run)
        allowed = case.allowed(program)
        off = {
            side: f"{error.relative:.2g}, {error.worst:.2g}"
            for side, error in errors.items()
            if not error.within(allowed)
        }
        what = f"errors (norm, worst {case.worst})"
        wrong = [f"{side}: {error}" for side, error in off.items() if side not in self.foreign]
        for side in self.foreign & off.keys():
            not_run[side] = f"not timed: {what} are {off[side]}"
        running = {s: run for s, run in running.items() if s in errors and s not in off}
        for side in [s for s, run in running.items() if run.seconds > _TOO_LONG]:
            not_run[side] = f"not timed: a call takes {running.pop(side).seconds:.0f} s"
        entry |= {
            "tolerance": allowed,
            "errors": {side: error.json() for side, error in errors.items()},
            "not_run": not_run,
        }
        entry |= self._timed(program, running)
        if OURS in running and case.wants_power(program):
            # The residuals of a backward are of its operands: on others it computes no numbers.
            equal = program != BACKWARD
            entry["power"] = power.power(*given[OURS], case.flops(program), equal=equal)
        if wrong:
            entry |= {"status": WRONG, "reason": f"{what} of {'; '.join(wrong)}"}
        elif OURS not in running:
            entry |= {"status": FAILED, "reason": not_run.get(OURS, "it was not timed")}
        return entry

    # -- compiled ----------------------------------------------------------------------------------

    def _repeats(self, limit: float) -> int:
        """How often a program does its work that takes so many us at the chip's limit."""
        if self.effort.tiny or not limit:
            return 1
        size = sum(x.nbytes for x in jax.tree.leaves(self.operands))
        return max(1, min(math.ceil(_SHORT / max(limit, 1e-3)), _MOST, _COPIES // size))

    def _given(self, program: str) -> tuple[Given, dict[str, str]]:
        """The functions of a program in JAX, by side, with their operands; and why some are not."""
        case, not_run = self.case, dict(self.without)
        others = {*case.xla} - {*case.sides(program)}
        found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        for side in self.given.keys() - self.without.keys() - others:
            half, operands = self.halves.get(side), self.given[side]
            if program in case.whole:
                made = case.whole[program](self.sides[side].function)
                found[side] = partial(_by_name, made), (operands,)
            elif program == FORWARD or (half is None and program == TRAINING):
                found[side] = partial(_by_name, self.sides[side].function), (operands,)
            elif half is None:
                not_run[side] = _NO_BACKWARD
            elif program == TRAINING:
                found[side] = half.training, (operands,)
            elif side in self.saved:
                found[side] = half.backward, (self.saved[side], self.dy[side])
            else:
                not_run[side] = "its forward did not run"
        return {side: found[side] for side in self.sides if side in found}, not_run

    def _compiled(self, given: Given, repeats: int, not_run: dict[str, str]) -> dict[str, _Running]:
        """JAX's sides; those that may need much memory do their work once."""
        once = self.plain if self.case.large else set()
        often = {side: 1 if side in once else repeats for side in given}
        ready, failed = compiled(
            {
                side: (partial(_each, function), self._copies(operands, often[side]))
                for side, (function, operands) in given.items()
            }
        )
        not_run |= failed
        return {
            side: _Running(call, lambda found: found[0], self.fillers.jax, often[side])
            for side, call in ready.items()
        }

    def _copies(self, operands: tuple[Any, ...], often: int) -> tuple[Any, ...]:
        """The operands as often as a program does its work, in arrays of their own: of the same
        ones XLA would compute the same once. All sides share them."""

        def one(x: jax.Array, position: int) -> jax.Array:
            known = self.copied.setdefault(id(x), [x])
            while len(known) <= position:
                known.append(jax.block_until_ready(_copy(x)))
            return known[position]

        return tuple(jax.tree.map(partial(one, position=at), operands) for at in range(often))

    def _torch(self, program: str, repeats: int, not_run: dict[str, str]) -> dict[str, _Running]:
        """PyTorch's sides, each in the way that was chosen for all programs."""
        if not torch_graphs.installed():
            not_run |= dict.fromkeys(self.case.torch, torch_graphs.MISSING)
            return {}
        running = {}
        for side, ways in self.case.torch.items():
            if isinstance(ways, str):
                not_run[side] = ways
                continue
            try:
                way = self._way(side, ways)
                if program == BACKWARD and not way.backward:
                    not_run[side] = _NO_BACKWARD
                    continue
                call = self._torch_call(program, way, repeats)
            except Exception as error:
                not_run[side] = told(error)
                continue
            take = torch_graphs.Pending.arrays
            running[side] = _Running(call, take, self.fillers.torch, repeats)
        return running

    def _way(self, side: str, ways: Sequence[Side]) -> Side:
        """The first that runs a backward, or else a forward; what the first of all raises, where
        none does."""
        if side in self.ways or len(ways) == 1:
            return self.ways.setdefault(side, ways[0])
        errors: list[Exception] = []
        for program in reversed(self.case.programs):
            for way in ways:
                if program == BACKWARD and not way.backward:
                    continue
                try:
                    jax.block_until_ready(self._torch_call(program, way, 1)())
                except Exception as error:
                    errors.append(error)
                    continue
                self.ways[side] = way
                return way
        raise errors[0]

    def _torch_call(self, program: str, way: Side, repeats: int) -> Call:
        given = dict(jax.block_until_ready(way.given(self.operands)))
        dy = given.pop("dy", None)
        sets = self._copies((given, dy), repeats)
        learned = self.case.learned
        return torch_graphs.program(way.function, program, learned, sets, way.captured)

    # -- run and compared --------------------------------------------------------------------------

    def _compared(
        self, program: str, running: Mapping[str, _Running], want: Named, not_run: dict[str, str]
    ) -> dict[str, agreement.Difference]:
        """How far each side is from float32; a side that does not run joins ``not_run``."""
        errors = {}
        for side, run in running.items():
            try:
                common = self.ways[side].common(self._results(program, side, run))
                errors[side] = self.case.difference(self.case.shown(common), want)
            except Exception as error:
                not_run[side] = told(error)
        return errors

    def _results(self, program: str, side: str, running: _Running) -> Named:
        """The results by name; what the backward needs is put aside, and a call is timed."""
        found, running.seconds = None, math.inf
        # PyTorch writes running statistics in place: a second call would move them again.
        moved = any(name.startswith(torch_graphs.RUNNING) for name in self.operands)
        for _ in range(1 if moved and side in self.case.torch else 2):
            found = None  # so that the next one has its memory
            began = time.perf_counter()
            found = jax.block_until_ready(running.call())
            running.seconds = min(running.seconds, time.perf_counter() - began)
            if running.seconds > _AGAIN:
                break
        found = running.first(found)
        if side in self.halves and program == TRAINING:
            self.saved[side] = self.halves[side].saved(self.given[side], found)
            return found[0]
        return found

    # -- timed -------------------------------------------------------------------------------------

    def _timed(self, program: str, running: Mapping[str, _Running]) -> Entry:
        """What the times of one program say."""
        each = {side: run.seconds / run.repeats for side, run in running.items()}
        far = _FAR * min(each.values(), default=0.0)
        slow = {
            side
            for side, run in running.items()
            if run.seconds > _SLOW or (self.case.large and side in self.plain and each[side] > far)
        }
        calls, found = {}, {}
        for side, run in running.items():
            fits = int(_BATCH / run.seconds) if run.seconds > 0 else self.effort.calls
            calls[side] = min(max(fits, 1), self.effort.calls)
        rounds = self.effort.rounds
        for chosen, least, most, warm in (
            (running.keys() - slow, _LEAST, rounds, 3),
            (slow, _FEW, _FEW, 1),
        ):
            group = [side for side in running if side in chosen]
            found |= queued.times(
                {side: running[side].call for side in group},
                {side: running[side].filler for side in group},
                calls=calls,
                rounds=most,
                seconds=self.effort.seconds,
                least=least,
                warm=warm,
            )
        part = {side: 1e6 / running[side].repeats for side in found}
        us = {side: timing.summary(one.seconds, part[side]) for side, one in found.items()}
        ours = [part[OURS] * s for s in found[OURS].seconds] if OURS in found else []
        return {
            "calls": calls,
            "repeats": {side: run.repeats for side, run in running.items()},
            "rounds": {side: len(one.seconds) for side, one in found.items()},
            "us": us,
            "over_ours": {
                side: timing.summary(
                    [part[side] * b / a for a, b in zip(ours, one.seconds, strict=True)]
                )
                for side, one in found.items()
                if side != OURS and len(one.seconds) == len(ours) and min(ours) > 0
            },
            "host_us": {side: round(one.issued * part[side], 2) for side, one in found.items()},
            "host_hidden": {side: one.hidden for side, one in found.items()},
            **_rates({s: figures["median"] for s, figures in us.items()}, self.case, (program,)),
        }


def _rates(us: Mapping[str, float], case: Case, programs: Sequence[str]) -> Entry:
    """TFLOP/s and shares of the limit; None where a time is below what can be told from nothing."""
    flops, limit = (sum(map(one, programs)) for one in (case.flops, case.limit_us))
    best = fastest(us, [*case.xla, *[REFERENCE] * case.reference_is_best])
    shares = {s: round(limit / time, 4) if time > 0 else None for s, time in us.items()}
    rates = {s: short(flops / time / 1e6) if time > 0 else None for s, time in us.items()}
    return {
        **({"tflops": rates} if flops else {}),
        **({"of_limit": shares} if limit else {}),
        **({"best_xla": best} if best else {}),
    }


def _each(function: Callable[..., Any], *sets: Any) -> list[Any]:
    """The results of several sets of operands, one after the other."""
    return [function(*given) for given in sets]


def _by_name(function: Callable[..., Any], operands: Named) -> Any:
    return function(**operands)


_copy = jax.jit(jnp.copy)
