"""``python -m benchmarks run norms``: normalizations beside XLA's best and PyTorch.

PyTorch, where it is installed, runs in the same process, on the same arrays and in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.implementation import CUDNN, XLA
from jax_cudnn.commands import agreement, timing

from .. import queued, torch_graphs
from ..compiling import compiled, told
from ..halves import Halves, halves
from ..sides import (
    FAILED,
    OURS,
    REFERENCE,
    TIMED,
    WHOLE,
    WRONG,
    Call,
    Fillers,
    by_name,
    each,
    fastest,
    plans,
)
from . import torch_sides
from .cases import BACKWARD, FORWARD, PROGRAMS, TRAINING, Function, NormCase

COPY = "copy"
"""x + 1, of the bytes of x twice."""
LIMIT = {"tbytes_s": 4.3, "of": "NVIDIA H200", "source": "measured copy bandwidth"}

# 20 calls and what hides them are fewer than the 32 executions that JAX lets be under way. The end
# of a batch is known to some 400 us: of what is short, a program does more than one, one after the
# other.
_ROUNDS, _LEAST, _CALLS, _SECONDS = 21, 7, 20, 1.5
_BYTES, _MOST = 2**29, 32  # that a program of JAX's reads of x, at most so often


def measure_norms(
    cases: Iterable[NormCase],
    *,
    seconds: float = _SECONDS,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    say: Callable[[str], None] = print,
    done: Callable[[dict[str, dict[str, Any]]], None] = lambda results: None,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: of each program the times in us on all sides, the bytes that it
    must move and how fast each side moves them, and how far its results are from float32.

    What fails is part of the result, with its reason; a side that is wrong is not timed. ``done``
    gets all results so far after each case.
    """
    results: dict[str, dict[str, Any]] = {}
    fillers = Fillers.made()
    for case in cases:
        began = time.perf_counter()
        try:
            with torch_graphs.fresh():
                entry = _Bench(case, fillers, seconds, calls, rounds).entry()
        except Exception as error:
            entry = {"status": FAILED, "reason": told(error), "programs": {}}
        operands = {name: str(operand) for name, operand in case.operands.items()}
        results[case.name] = {"what": case.what, "operands": operands, **entry}
        say(f"{case.name}: {entry['status']} ({time.perf_counter() - began:.1f} s)")
        done(results)
    return results


# -- one case --------------------------------------------------------------------------------------


class _Bench:
    """The measurement of one case."""

    def __init__(
        self, case: NormCase, fillers: Fillers, seconds: float, calls: int, rounds: int
    ) -> None:
        self.case, self.fillers = case, fillers
        self.timing = {"seconds": seconds, "calls": calls, "rounds": rounds}
        self.operands, self.dy = jax.block_until_ready(case.arrays(jax.random.key(0)))
        ways = {WHOLE: CUDNN, OURS: None, REFERENCE: XLA}
        self.sides: dict[str, Function] = {side: case.ours(way) for side, way in ways.items()}
        self.sides |= case.xla
        size = self.operands["x"].nbytes
        self.repeats = min(max(_BYTES // max(size, 1), 1), _MOST) if calls > 1 else 1
        self.halves: dict[str, Halves] = {}
        self.saved: dict[str, list[Any]] = {}
        self.sets: dict[Any, tuple[Any, ...]] = {}  # of the operands, by how they are given
        self.without: dict[str, str] = {}  # sides that have no backward, and why

    def entry(self) -> dict[str, Any]:
        want = _exact(self.case, self.operands, self.dy)
        for side, function in self.sides.items():
            try:
                self.halves[side] = halves(function, self.operands, self.case.learned)
            except Exception as error:
                self.without[side] = told(error)
        entries = {}
        for program in PROGRAMS:
            try:
                entries[program] = self.program(program, want[program == BACKWARD])
            except Exception as error:
                entries[program] = {"status": FAILED, "reason": told(error)}
        states = [entry["status"] for entry in entries.values()]
        status = next((state for state in (FAILED, WRONG) if state in states), TIMED)
        both = _together(entries[TRAINING], entries[BACKWARD], self.case)
        return {"status": status, "programs": entries, "training_step": both}

    def program(self, program: str, want: dict[str, jax.Array]) -> dict[str, Any]:
        """One program on all sides: compiled, run once and compared, timed."""
        given, not_run = self._given(program)
        copy = (lambda x: x + 1, (self.operands["x"],))
        several = {
            side: (each(function), self._sets(operands))
            for side, (function, operands) in {**given, COPY: copy}.items()
        }
        ready, failed = compiled(several)
        not_run |= failed
        theirs, failed = self._torch(program)
        not_run |= failed
        entry: dict[str, Any] = {"status": TIMED, "bytes": self.case.bytes(program)}
        if self.case.rereads:
            entry["bytes_read_twice"] = self.case.bytes(program, twice=True)
        entry["plans"] = {s: plans(*given[s]) for s in (WHOLE, OURS) if s in given}
        errors: dict[str, agreement.Difference] = {}
        for side, call in [*ready.items(), *theirs.items()]:
            if side != COPY:
                try:
                    found = call() if side in theirs else call()[0]
                    errors[side] = agreement.difference(self._results(program, side, found), want)
                except Exception as error:
                    not_run[side] = told(error)
        allowed = agreement.tolerance((self.operands["x"],), self.operands["x"])
        wrong = [side for side, error in errors.items() if not error.within(allowed)]
        entry |= {
            "tolerance": allowed,
            "errors": {side: error.json() for side, error in errors.items()},
            "not_run": not_run,
        }
        calls = {
            side: call
            for side, call in {**ready, **theirs}.items()
            if side == COPY or (side in errors and side not in wrong)
        }
        fillers = {s: self.fillers.torch if s in theirs else self.fillers.jax for s in calls}
        entry |= self._figures(queued.times(calls, fillers, least=_LEAST, **self.timing), entry)
        if wrong:
            told_of = (f"{s}: {errors[s].relative:.2g}, {errors[s].worst:.2g}" for s in wrong)
            entry["status"] = WRONG
            entry["reason"] = "errors (norm, worst element) of " + "; ".join(told_of)
        elif OURS not in calls or "best_xla" not in entry:
            entry["status"] = FAILED
            entry["reason"] = not_run.get(OURS, "no formulation of XLA's ran")
        return entry

    def _given(self, program: str) -> tuple[dict[str, tuple[Any, tuple[Any, ...]]], dict[str, str]]:
        """The functions of a program in JAX, by side, with their operands; and why some are not."""
        if program == FORWARD:
            chosen = {
                side: function
                for side, function in self.sides.items()
                if side in (WHOLE, OURS, REFERENCE, *self.case.forwards)
            }
            return {s: (by_name(f), (self.operands,)) for s, f in chosen.items()}, {}
        if program == TRAINING:
            found = {s: (half.training, (self.operands,)) for s, half in self.halves.items()}
            return found, dict(self.without)
        found = {}
        for side, half in self.halves.items():
            if side in self.saved:
                found[side] = (half.backward, (self.saved[side], self.dy))
        missing = {s: "its forward did not run" for s in self.halves if s not in found}
        return found, self.without | missing

    def _sets(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operands as often as a program does its work, in arrays of their own: of the same
        ones XLA would compute the same once."""
        shared = all(any(x is y for y in self.operands.values()) for x in jax.tree.leaves(operands))
        known = self.sets if shared else {}
        key = jax.tree.structure(operands)
        if key not in known:
            copied = jax.jit(lambda given: jax.tree.map(jnp.copy, given))
            known[key] = (operands, *(copied(operands) for _ in range(self.repeats - 1)))
        return known[key]

    def _results(self, program: str, side: str, found: Any) -> dict[str, jax.Array]:
        """The results by name; what the backward needs is put aside."""
        if side in torch_sides.SIDES:
            return found.arrays()
        if program == TRAINING:
            self.saved[side] = self.halves[side].saved(self.operands, found)
            return found[0]
        return found

    def _torch(self, program: str) -> tuple[dict[str, Call], dict[str, str]]:
        if not torch_graphs.installed():
            return {}, dict.fromkeys(torch_sides.SIDES, torch_graphs.MISSING)
        ready, failed = {}, {}
        operands = (given for (given,) in self._sets((self.operands,)))
        along = (dy for (dy,) in self._sets((self.dy,)))
        sets = [*zip(operands, along, strict=True)]
        for side in torch_sides.SIDES:
            try:
                ready[side] = torch_sides.program(side, program, self.case, sets)
            except Exception as error:
                failed[side] = told(error)
        return ready, failed

    def _figures(
        self, found: Mapping[str, queued.Queued], entry: Mapping[str, Any]
    ) -> dict[str, Any]:
        part = 1e6 / self.repeats
        us = {side: timing.summary(one.seconds, part) for side, one in found.items()}
        copied = 2 * self.operands["x"].nbytes
        rates = {
            side: _rate(copied if side == COPY else entry["bytes"], figures["median"])
            for side, figures in us.items()
        }
        best = fastest({s: figures["median"] for s, figures in us.items()}, self.case.xla)
        return {
            "calls": self.timing["calls"],
            "repeats": self.repeats,
            "rounds": len(next(iter(found.values())).seconds),
            "us": us,
            "host_us": {side: round(one.issued * part, 2) for side, one in found.items()},
            "host_hidden": {side: one.hidden for side, one in found.items()},
            "tbytes_s": rates,
            "of_limit": {s: _share(rate) for s, rate in rates.items()},
            "copy_bytes": copied,
            **({"best_xla": best} if best else {}),
        }


def _exact(
    case: NormCase, operands: dict[str, jax.Array], dy: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Results and gradients in float32."""
    wide, along = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, dy))

    @jax.jit
    def both(operands: dict[str, Any], dy: Any) -> Any:
        half = halves(case.exact, operands, case.learned)
        trained = half.training(operands)
        return trained[0], half.backward(half.saved(operands, trained), dy)

    return jax.block_until_ready(both(wide, along))


def _together(forward: Any, backward: Any, case: NormCase) -> dict[str, Any]:
    """Medians of forward and backward added, of the same side or formulation."""
    a, b = forward.get("us", {}), backward.get("us", {})
    us = {s: round(a[s]["median"] + b[s]["median"], 3) for s in a if s in b and s != COPY}
    best = fastest(us, case.xla)
    return {"us": us, **({"best_xla": best} if best else {})}


def _rate(size: int, us: float) -> float | None:
    """TB/s; None where the time is below what can be told from nothing."""
    return float(f"{size / us / 1e6:.4g}") if us > 0 else None


def _share(rate: float | None) -> float | None:
    return None if rate is None else round(rate / LIMIT["tbytes_s"], 4)
