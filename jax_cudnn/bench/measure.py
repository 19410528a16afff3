"""Runs cases one after the other; what cannot run is part of the result, with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .._core import context, planner
from .._core.cost import Cost
from .._core.errors import JaxCudnnError, UnsupportedGraphError
from .._core.split import for_cudnn
from . import programs
from .comparison import Comparison, compare
from .models import ModelCase
from .timing import summary

TIMED, WRONG, UNSUPPORTED, FAILED = "timed", "WRONG", "unsupported", "failed"


def measure(
    cases: Iterable[ModelCase],
    *,
    tolerant: bool = True,
    say: Callable[[str], None] = print,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: status, cost, times in us, ratio, differences, engines.

    With ``tolerant`` an exception of a case is its result; else it is raised. ``options`` are
    those of :func:`compare`.
    """
    results = {}
    for case in cases:
        began = time.perf_counter()
        results[case.name] = entry = _entry(case, tolerant, options)
        told = f"ratio {entry['ratio']:.2f}" if "ratio" in entry else entry["status"]
        say(f"{case.name}: {told} ({time.perf_counter() - began:.1f} s)")
    return results


def _entry(case: ModelCase, tolerant: bool, options: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "model": case.model,
        "part": case.part,
        "operands": [str(operand) for operand in case.operands],
    }
    try:
        found = programs.graphs(case.ours, *case.avals)
        total = programs.graphs_cost(case.ours, *case.avals)
        entry |= {"flops": total.flops, "bytes": total.bytes}
        comparison = compare(case.functions, *case.arrays(jax.random.key(0)), **options)
        entry |= _compared(comparison, total)
        entry["engines"] = _engines(found)
    except UnsupportedGraphError as error:
        entry |= {"status": UNSUPPORTED, "reason": _reason(error)}
    except Exception as error:
        if not tolerant:
            raise
        entry |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"[:2000]}
    return entry


def _compared(found: Comparison, cost: Cost) -> dict[str, Any]:
    first, best = found.names[0], found.best_other
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
    if best is None:
        return entry | {
            "reason": "no formulation of XLA's ran: " + "; ".join(found.failed.values())
        }
    ratios = found.ratios(best)
    entry["best_xla"] = best
    entry["ratio"] = round(found.ratio(best), 4)
    entry["ratio_min"], entry["ratio_max"] = round(min(ratios), 4), round(max(ratios), 4)
    entry["tflops"] = {n: _rate(cost.flops, found.median(n), 1e12) for n in (first, best)}
    entry["gbytes_s"] = {n: _rate(cost.bytes, found.median(n), 1e9) for n in (first, best)}
    return entry


def _rate(amount: int, seconds: float, unit: float) -> float:
    return float(f"{amount / seconds / unit:.4g}")


def _engines(graphs: list[Any]) -> list[str]:
    """The engines of the graphs' plans, in the order of the graphs; empty without a GPU."""
    try:
        site = context.site(jax.local_devices(), "bench")
        return [
            planner.plan(part, site, name).engine
            for spec, name, _ in graphs
            for part in for_cudnn(spec)
        ]
    except JaxCudnnError:  # references ran, not plans
        return []


def _reason(error: UnsupportedGraphError) -> str:
    """The error in one line: its summary, why, and cuDNN's first reason."""
    parts = [error.summary, error.why, *list(error.reasons.values())[:1]]
    return "; ".join(" ".join(part.split()) for part in parts if part)[:1000]
