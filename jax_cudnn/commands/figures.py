"""A comparison as JSON: status, times in us, ratios, rates, differences, engines."""

from __future__ import annotations

from typing import Any

from .._core.errors import JaxCudnnError
from .._core.planning.cost import Cost
from . import programs
from .comparison import Comparison
from .timing import summary

TIMED, WRONG, FAILED, CHECKED = "timed", "WRONG", "failed", "checked"
OURS, REFERENCE = "jax_cudnn", "reference"
"""The names of a function of graphs, and of the same function with references in their place."""


def compared(found: Comparison, cost: Cost) -> dict[str, Any]:
    """The figures of a comparison; the first function is ours, and its graphs have this cost."""
    first = found.names[0]
    timed = [name for name in found.names[1:] if name in found.seconds]
    # The reference is what XLA would run instead, not a formulation that a user would write.
    best = min((name for name in timed if name != REFERENCE), key=found.median, default=None)
    entry: dict[str, Any] = {
        "status": WRONG if found.wrong else TIMED if best else FAILED,
        "tolerance": found.tolerance,
        "differences": {name: d.json() for name, d in found.differences.items()},
        "not_run": {name: reason[:500] for name, reason in found.failed.items()},
    }
    if found.wrong:
        entry["reason"] = "differs from jax_cudnn: " + "; ".join(
            f"{name} by {found.differences[name]}" for name in found.wrong
        )
        return entry
    if found.differences and not found.seconds:
        reason = "The results agree. Timing needs an NVIDIA GPU: nothing was timed."
        return entry | {"status": CHECKED, "reason": reason}
    if not found.seconds:
        return entry | {"reason": "no function ran: " + "; ".join(found.failed.values())}
    entry |= {"calls": found.calls, "rounds": len(found.seconds[first])}
    entry["us"] = {name: summary(values, 1e6) for name, values in found.seconds.items()}
    if REFERENCE in timed:
        entry |= _ratios(found, REFERENCE, "ratio_reference")
    if best is None:
        return entry | {"reason": "no XLA formulation ran: " + "; ".join(found.failed.values())}
    entry["best_xla"] = best
    entry |= _ratios(found, best, "ratio")
    entry["tflops"] = {n: _rate(cost.flops, found.median(n), 1e12) for n in (first, best)}
    entry["gbytes_s"] = {n: _rate(cost.bytes, found.median(n), 1e9) for n in (first, best)}
    return entry


def _ratios(found: Comparison, name: str, key: str) -> dict[str, float]:
    """A function's time divided by ours: of the medians, and the extremes over rounds."""
    rounds = found.ratios(name)
    figures = {key: found.ratio(name), f"{key}_min": min(rounds), f"{key}_max": max(rounds)}
    return {key: round(value, 4) for key, value in figures.items()}


def _rate(amount: int, seconds: float, unit: float) -> float:
    return float(f"{amount / seconds / unit:.4g}")


def engines(graphs: list[Any]) -> list[str]:
    """The engines of the graphs' plans, in graph order; empty without a GPU."""
    try:
        plans = programs.placed(graphs)
    except JaxCudnnError:  # references ran, not plans
        return []
    return [s.plan.engine for plan in plans for s in plan.segments if s.plan is not None]
