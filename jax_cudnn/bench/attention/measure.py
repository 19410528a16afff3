"""``python -m jax_cudnn bench --attention``: attention beside jax.nn, XLA's best and PyTorch.

PyTorch, where it is installed, runs in the same process, on the same arrays and in the same rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.implementation import CUDNN, XLA
from .. import agreement, sides, torch_graphs
from ..compiling import compiled, told
from ..halves import Halves, halves
from ..sides import BACKWARD, FAILED, OURS, REFERENCE, TIMED, TRAINING, WHOLE, WRONG, Call, Fillers
from . import torch_sides
from .case import AttentionCase, Named, Side
from .checks import difference, exact
from .figures import Effort, Running, figures, times, together
from .parts import JAX_NN

_TOO_LONG = 10.0  # seconds of a call; such a side is not timed
_AGAIN = 1.0  # seconds: of a call that takes less there is a second one, which may be quicker
_NO_BACKWARD = "it has no backward"


def measure_attention(
    cases: Iterable[AttentionCase],
    *,
    seconds: float = Effort.seconds,
    calls: int = Effort.calls,
    rounds: int = Effort.rounds,
    say: Callable[[str], None] = print,
    done: Callable[[dict[str, dict[str, Any]]], None] = lambda results: None,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: of each program the times in us and the TFLOP/s on all sides,
    the chip's limit, and how far its results are from float32.

    What fails is part of the result, with its reason; a side that is wrong is not timed, and if it
    is none of jax.nn's cuDNN or PyTorch the case is wrong. ``done`` gets all results so far after
    each case.
    """
    results: dict[str, dict[str, Any]] = {}
    fillers = Fillers.made()
    for case in cases:
        began = time.perf_counter()
        try:
            with torch_graphs.fresh():
                entry = _Bench(case, fillers, Effort(seconds, calls, rounds)).entry()
        except Exception as error:
            entry = {"status": FAILED, "reason": told(error), "programs": {}}
        took = round(time.perf_counter() - began, 1)
        results[case.name] = {
            "what": case.what,
            "operands": case.described(),
            "published": {**case.published, "side": case.published_side},
            "xla": [*case.xla],
            **entry,
            "seconds": took,
        }
        say(f"{case.name}: {entry['status']} ({took} s)")
        done(results)
    return results


# -- one case --------------------------------------------------------------------------------------


class _Bench:
    """The measurement of one case."""

    def __init__(self, case: AttentionCase, fillers: Fillers, effort: Effort) -> None:
        self.case, self.fillers, self.effort = case, fillers, effort
        self.operands = jax.block_until_ready(case.arrays(jax.random.key(0)))
        ways = {WHOLE: CUDNN, OURS: None, REFERENCE: XLA}
        every = {side: case.ours(way) for side, way in ways.items()} | {**case.others, **case.xla}
        self.sides = {side: way for side, way in every.items() if isinstance(way, Side)}
        self.without = {side: way for side, way in every.items() if isinstance(way, str)}
        self.given: dict[str, Named] = {}
        self.dy: dict[str, Any] = {}
        self.halves: dict[str, Halves] = {}
        self.saved: dict[str, list[Any]] = {}
        self.copied: dict[int, list[jax.Array]] = {}  # of an array by its id, itself the first
        self.ways: dict[str, Side] = dict(self.sides)  # and of PyTorch those that run
        self.never = {side: way for side, way in case.torch.items() if isinstance(way, str)}
        self.plain = {REFERENCE, *case.xla}  # which may need much memory, and are not short

    def entry(self) -> dict[str, Any]:
        want = exact(self.case, self.operands)
        for side, way in self.sides.items():
            try:
                self._prepare(side, way)
            except Exception as error:
                self.without[side] = told(error)
        entries = {}
        for program in self.case.programs:
            try:
                entries[program] = self.program(program, want[program])
            except Exception as error:
                entries[program] = {"status": FAILED, "reason": told(error)}
        states = [entry["status"] for entry in entries.values()]
        status = next((state for state in (FAILED, WRONG) if state in states), TIMED)
        found = {"status": status, "programs": entries}
        if self.case.learned:
            found["training_step"] = together(self.case, entries[TRAINING], entries[BACKWARD])
        return found

    def _prepare(self, side: str, way: Side) -> None:
        given = jax.block_until_ready(way.given(self.operands))
        self.dy[side] = given.get("dy")
        self.given[side] = {name: x for name, x in given.items() if name != "dy"}
        if self.case.learned and way.backward:
            self.halves[side] = halves(way.function, self.given[side], self.case.learned)

    def program(self, program: str, want: Named) -> dict[str, Any]:
        """One program on all sides: compiled, run once and compared, timed."""
        case, began = self.case, time.perf_counter()
        limit = case.limit_us(program)
        repeats = self.effort.repeats(limit)
        given, not_run = self._given(program)
        ready, failed = self._compiled(given, repeats)
        theirs, reasons = self._torch(program, repeats)
        not_run |= failed | reasons
        ready |= theirs
        entry: dict[str, Any] = {
            "status": TIMED,
            "flops": case.flops(program),
            "bytes": case.bytes(program),
            "limit_us": round(limit, 3),
            "plans": {s: sides.plans(*given[s]) for s in (WHOLE, OURS) if s in given},
        }
        allowed = case.allowed(program)
        errors: dict[str, agreement.Difference] = {}
        for side, running in list(ready.items()):
            try:
                results, running.seconds = self._results(program, side, running)
                errors[side] = difference(case.shown(self.ways[side].common(results)), want)
            except Exception as error:
                not_run[side] = told(error)
        off = {
            side: f"{error.relative:.2g}, {error.worst:.2g}"
            for side, error in errors.items()
            if not error.within(allowed)
        }
        foreign = {JAX_NN, *case.torch}
        wrong = [f"{side}: {error}" for side, error in off.items() if side not in foreign]
        not_run |= {
            side: f"not timed: errors (norm, worst rows) are {error}"
            for side, error in off.items()
            if side in foreign
        }
        running = {s: run for s, run in ready.items() if s in errors and s not in off}
        for side in [s for s, run in running.items() if run.seconds > _TOO_LONG]:
            not_run[side] = f"not timed: a call takes {running.pop(side).seconds:.0f} s"
        entry |= {
            "tolerance": allowed,
            "errors": {side: error.json() for side, error in errors.items()},
            "not_run": not_run,
        }
        ready_at = time.perf_counter()
        found = times(running, self.plain, self.effort)
        entry |= figures(found, running, case, program)
        took = {"ready": ready_at - began, "timed": time.perf_counter() - ready_at}
        entry["seconds"] = {stage: round(seconds, 1) for stage, seconds in took.items()}
        if wrong:
            entry["status"] = WRONG
            entry["reason"] = "errors (norm, worst rows) of " + "; ".join(wrong)
        elif OURS not in running:
            entry["status"] = FAILED
            entry["reason"] = not_run.get(OURS, "it was not timed")
        return entry

    # -- what runs ---------------------------------------------------------------------------------

    def _given(self, program: str) -> tuple[dict[str, tuple[Any, tuple[Any, ...]]], dict[str, str]]:
        """The functions of a program in JAX, by side, with their operands; and why some are not."""
        if program != BACKWARD:
            found = {
                side: (
                    self.halves[side].training
                    if side in self.halves
                    else sides.by_name(self.sides[side].function),
                    (operands,),
                )
                for side, operands in self.given.items()
                if side not in self.without
            }
            return found, dict(self.without)
        found = {}
        for side, half in self.halves.items():
            if side in self.saved:
                found[side] = (half.backward, (self.saved[side], self.dy[side]))
        missing = {
            side: "its forward did not run" if way.backward else _NO_BACKWARD
            for side, way in self.sides.items()
            if side not in found
        }
        return found, missing | self.without

    def _compiled(
        self, given: Mapping[str, tuple[Any, tuple[Any, ...]]], repeats: int
    ) -> tuple[dict[str, Running], dict[str, str]]:
        """JAX's sides; those that are not plain XLA do their work ``repeats`` times."""
        often = {side: 1 if side in self.plain else repeats for side in given}
        several = {
            side: (sides.each(function), self._copies(operands, often[side]))
            for side, (function, operands) in given.items()
        }
        ready, failed = compiled(several)
        running = {
            side: Running(call, lambda found: found[0], self.fillers.jax, often[side])
            for side, call in ready.items()
        }
        return running, failed

    def _copies(self, operands: tuple[Any, ...], often: int) -> tuple[Any, ...]:
        """The operands as often as a program does its work, in arrays of their own: of the same
        ones XLA would compute the same once. All sides share them."""

        def one(x: jax.Array, position: int) -> jax.Array:
            known = self.copied.setdefault(id(x), [x])
            while len(known) <= position:
                known.append(jax.block_until_ready(_copy(x)))
            return known[position]

        return tuple(
            jax.tree.map(partial(one, position=position), operands) for position in range(often)
        )

    def _torch(self, program: str, repeats: int) -> tuple[dict[str, Running], dict[str, str]]:
        """PyTorch's sides, each in the way that was chosen for all programs."""
        if not torch_graphs.installed():
            return {}, dict.fromkeys(self.case.torch, torch_graphs.MISSING)
        running, failed = {}, {}
        for side, ways in self.case.torch.items():
            if isinstance(ways, str):
                continue
            try:
                way = self._way(side, ways)
                if program == BACKWARD and not way.backward:
                    failed[side] = _NO_BACKWARD
                    continue
                call = self._torch_call(program, way, repeats)
            except Exception as error:
                failed[side] = told(error)
                continue
            take = torch_graphs.Pending.arrays
            running[side] = Running(call, take, self.fillers.torch, repeats)
        return running, failed | self.never

    def _way(self, side: str, ways: Sequence[Side]) -> Side:
        """The first that runs a backward, or else a forward; what the first of all raises, where
        none does."""
        if side in self.ways:
            return self.ways[side]
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
        return torch_sides.program(way.function, program, learned, sets, way.captured)

    def _results(self, program: str, side: str, running: Running) -> tuple[Named, float]:
        """The results by name, and the seconds of a call; what the backward needs is put aside."""
        found, took = None, math.inf
        for _ in range(2):
            found = None  # so that the next one has its memory
            began = time.perf_counter()
            found = jax.block_until_ready(running.call())
            took = min(took, time.perf_counter() - began)
            if took > _AGAIN:
                break
        found = running.first(found)
        if side in self.halves and program == TRAINING:
            self.saved[side] = self.halves[side].saved(self.given[side], found)
            found = found[0]
        if program != BACKWARD:
            found = {"y": found["y"]}
        return found, took


_copy = jax.jit(jnp.copy)
