"""Times of all sides of a program in alternating rounds, and the figures that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jax_cudnn.commands import timing

from .. import queued, sides
from ..sides import REFERENCE, Call
from .case import AttentionCase

# As for normalizations 20 calls at most, here of a program that takes two milliseconds at the
# chip's limit, or does its work several times; and fewer where a batch of them takes longer than
# the end of one is known to.
_SHORT, _MOST = 2000.0, 16  # us of a program, and how often it does its work for that
_BATCH = 0.04  # seconds of calls in a row
# A side that takes longer has rounds of its own, and three of them. So what stands close together
# takes turns alone.
_SLOW, _LEAST, _FEW = 0.15, 7, 3
_FAR = 4.0  # times the fastest: a formulation of XLA's that takes longer is slow, too


@dataclass
class Running:
    """A side that is compiled.

    Attributes:
        call: its program.
        first: the results of the first set of operands, of what the program returns.
        filler: what keeps the device busy before it.
        repeats: how often the program does its work.
        calls: how many of them stand in a row.
        seconds: of one call, the host's with it.
    """

    call: Call
    first: Callable[[Any], Any]
    filler: Call | None
    repeats: int = 1
    calls: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: of one program's rounds.
        calls: in a row, at most.
        rounds: at most.
    """

    seconds: float = 2.0
    calls: int = 20
    rounds: int = 15

    def repeats(self, limit: float) -> int:
        """How often a program does its work that takes so many us at the chip's limit."""
        return min(max(math.ceil(_SHORT / max(limit, 1e-3)), 1), _MOST) if self.calls > 1 else 1


def times(
    running: Mapping[str, Running], plain: Collection[str], effort: Effort
) -> dict[str, queued.Queued]:
    """By side. ``plain`` are XLA's formulations, which may be far behind."""
    each = {side: run.seconds / run.repeats for side, run in running.items()}
    far = _FAR * min(each.values(), default=0.0)
    slow = {
        side
        for side, run in running.items()
        if run.seconds > _SLOW or (side in plain and each[side] > far)
    }
    for run in running.values():
        fits = int(_BATCH / run.seconds) if run.seconds > 0 else effort.calls
        run.calls = min(max(fits, 1), effort.calls)
    found: dict[str, queued.Queued] = {}
    for group, least, rounds, warm in (
        (running.keys() - slow, _LEAST, effort.rounds, 3),
        (slow, _FEW, _FEW, 1),
    ):
        chosen = {side: run for side, run in running.items() if side in group}
        found |= queued.times(
            {side: run.call for side, run in chosen.items()},
            {side: run.filler for side, run in chosen.items()},
            calls={side: run.calls for side, run in chosen.items()},
            rounds=rounds,
            seconds=effort.seconds,
            least=least,
            warm=warm,
        )
    return found


def figures(
    found: Mapping[str, queued.Queued],
    running: Mapping[str, Running],
    case: AttentionCase,
    program: str,
) -> dict[str, Any]:
    """What the times of one program say."""
    part = {side: 1e6 / running[side].repeats for side in found}
    us = {side: timing.summary(one.seconds, part[side]) for side, one in found.items()}
    medians = {side: summary["median"] for side, summary in us.items()}
    return {
        "calls": {side: running[side].calls for side in found},
        "repeats": {side: running[side].repeats for side in found},
        "rounds": {side: len(one.seconds) for side, one in found.items()},
        "us": us,
        "host_us": {side: round(one.issued * part[side], 2) for side, one in found.items()},
        "host_hidden": {side: one.hidden for side, one in found.items()},
        **_rates(medians, case, [program]),
    }


def together(case: AttentionCase, forward: Any, backward: Any) -> dict[str, Any]:
    """Medians of forward and backward added, of the same side or formulation."""
    a, b = forward.get("us", {}), backward.get("us", {})
    us = {s: round(a[s]["median"] + b[s]["median"], 3) for s in a if s in b}
    return {"us": us, **_rates(us, case, case.programs)}


def _rates(
    us: Mapping[str, float], case: AttentionCase, programs: Collection[str]
) -> dict[str, Any]:
    flops, limit = (sum(map(one, programs)) for one in (case.flops, case.limit_us))
    best = sides.fastest(us, [*case.xla, REFERENCE])
    return {
        "tflops": {side: _rate(flops, time) for side, time in us.items()},
        "of_limit": {side: _share(limit, time) for side, time in us.items()},
        **({"best_xla": best} if best else {}),
    }


def _rate(flops: float, us: float) -> float | None:
    """TFLOP/s; None where the time is below what can be told from nothing."""
    return float(f"{flops / us / 1e6:.4g}") if us > 0 else None


def _share(limit: float, us: float) -> float | None:
    return round(limit / us, 4) if us > 0 else None
