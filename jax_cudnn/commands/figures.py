"""What a comparison says, as JSON: status, times in us, ratios, rates, differences, engines."""

from __future__ import annotations

from typing import Any

from .._core.errors import JaxCudnnError
from .._core.planning.cost import Cost
from . import programs
from .comparison import Comparison
from .timing import summary

TIMED, WRONG, FAILED = "timed", "WRONG", "failed"
OURS, REFERENCE = "jax_cudnn", "reference"
"""The names under which a function of graphs, and the same with their references, are timed."""


def compared(found: Comparison, cost: Cost) -> dict[str, Any]:
    """The figures of a comparison of graphs that cost so much; the first function is ours."""
    first = found.names[0]
    timed = [name for name in found.names[1:] if name in found.seconds]
    # The reference is what XLA would run in our place, and no formulation that a user would write.
    best = min((name for name in timed if name != REFERENCE), key=found.median, default=None)
    entry: dict[str, Any] = {
        "status": WRONG if found.wrong else TIMED if best else FAILED,
        "tolerance": found.tolerance,
        "differences": {name: d.json() for name, d in found.differences.items()},
        "not_run": {name: reason[:500] for name, reason in found.failed.items()},
    }
    if found.wrong:
        entry["reason"] = "differs from jax_cudnn: " + "; ".join(
            f"{name} by {found.differences[name].relative:.2g} (norm), "
            f"{found.differences[name].worst:.2g} (worst element)"
            for name in found.wrong
        )
        return entry
    entry |= {"calls": found.calls, "rounds": len(found.seconds[first])}
    entry["us"] = {name: summary(values, 1e6) for name, values in found.seconds.items()}
    if REFERENCE in timed:
        entry |= _ratios(found, REFERENCE, "ratio_reference")
    if best is None:
        return entry | {
            "reason": "no formulation of XLA's ran: " + "; ".join(found.failed.values())
        }
    entry["best_xla"] = best
    entry |= _ratios(found, best, "ratio")
    entry["tflops"] = {n: _rate(cost.flops, found.median(n), 1e12) for n in (first, best)}
    entry["gbytes_s"] = {n: _rate(cost.bytes, found.median(n), 1e9) for n in (first, best)}
    return entry


def _ratios(found: Comparison, name: str, key: str) -> dict[str, float]:
    """A function's time over ours: of the medians, and the least and largest of a round."""
    rounds = found.ratios(name)
    figures = {key: found.ratio(name), f"{key}_min": min(rounds), f"{key}_max": max(rounds)}
    return {key: round(value, 4) for key, value in figures.items()}


def _rate(amount: int, seconds: float, unit: float) -> float:
    return float(f"{amount / seconds / unit:.4g}")


def engines(graphs: list[Any]) -> list[str]:
    """The engines of the graphs' plans, in the order of the graphs; empty without a GPU."""
    try:
        plans = programs.placed(graphs)
    except JaxCudnnError:  # references ran, not plans
        return []
    return [s.plan.engine for plan in plans for s in plan.segments if s.plan is not None]
