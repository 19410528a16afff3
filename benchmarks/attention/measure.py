"""``python -m benchmarks run attention``: attention beside jax.nn, XLA's best and PyTorch.

PyTorch, where it is installed, runs in the same process, on the same arrays and in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax_cudnn.commands import agreement

from .. import sides, torch_graphs
from ..compiling import told
from ..sides import BACKWARD, FAILED, OURS, TIMED, TRAINING, WHOLE, WRONG, Fillers
from .case import AttentionCase, Named
from .checks import difference, exact
from .figures import Effort, Running, figures, times, together
from .parts import JAX_NN
from .power import power
from .prepared import Prepared

_TOO_LONG = 10.0  # seconds of a call; such a side is not timed


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
                entry = _entry(Prepared(case, fillers), Effort(seconds, calls, rounds))
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


def _entry(prepared: Prepared, effort: Effort) -> dict[str, Any]:
    case = prepared.case
    want = exact(case, prepared.operands)
    prepared.prepare()
    entries = {}
    for program in case.programs:
        try:
            entries[program] = _program(prepared, effort, program, want[program])
        except Exception as error:
            entries[program] = {"status": FAILED, "reason": told(error)}
    states = [entry["status"] for entry in entries.values()]
    status = next((state for state in (FAILED, WRONG) if state in states), TIMED)
    found = {"status": status, "programs": entries}
    if case.learned:
        found["training_step"] = together(case, entries[TRAINING], entries[BACKWARD])
    return found


def _program(prepared: Prepared, effort: Effort, program: str, want: Named) -> dict[str, Any]:
    """One program on all sides: compiled, run once and compared, timed."""
    case, began = prepared.case, time.perf_counter()
    limit = case.limit_us(program)
    given, ready, not_run = prepared.ready(program, effort.repeats(limit))
    entry: dict[str, Any] = {
        "status": TIMED,
        "flops": case.flops(program),
        "bytes": case.bytes(program),
        "limit_us": round(limit, 3),
        "plans": {s: sides.plans(*given[s]) for s in (WHOLE, OURS) if s in given},
    }
    errors = _compared(prepared, program, ready, want, not_run)
    off = {
        side: f"{error.relative:.2g}, {error.worst:.2g}"
        for side, error in errors.items()
        if not error.within(case.allowed(program))
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
        "tolerance": case.allowed(program),
        "errors": {side: error.json() for side, error in errors.items()},
        "not_run": not_run,
    }
    ready_at = time.perf_counter()
    found = times(running, prepared.plain, effort)
    entry |= figures(found, running, case, program)
    name = "backward" if program == BACKWARD else "forward"
    if OURS in running and case.published_side == OURS and name in case.published:
        # The residuals of a backward are of its operands: on others it computes no numbers.
        entry["power"] = power(*given[OURS], case.flops(program), equal=program != BACKWARD)
    took = {"ready": ready_at - began, "timed": time.perf_counter() - ready_at}
    entry["seconds"] = {stage: round(seconds, 1) for stage, seconds in took.items()}
    if wrong:
        entry["status"] = WRONG
        entry["reason"] = "errors (norm, worst rows) of " + "; ".join(wrong)
    elif OURS not in running:
        entry["status"] = FAILED
        entry["reason"] = not_run.get(OURS, "it was not timed")
    return entry


def _compared(
    prepared: Prepared,
    program: str,
    ready: Mapping[str, Running],
    want: Named,
    not_run: dict[str, str],
) -> dict[str, agreement.Difference]:
    """How far each side is from float32; a side that does not run joins ``not_run``."""
    errors = {}
    for side, running in ready.items():
        try:
            results, running.seconds = prepared.results(program, side, running)
            common = prepared.ways[side].common(results)
            errors[side] = difference(prepared.case.shown(common), want)
        except Exception as error:
            not_run[side] = told(error)
    return errors
