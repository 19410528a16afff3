"""Runs cases one after the other; what cannot run is part of the result, with its reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from .._core.errors import JaxCudnnError, UnsupportedGraphError
from .._core.graph.dtypes import FP8
from .._core.implementation import CUDNN, implementation
from .._core.planning import losses
from .._core.planning.cost import Cost
from . import programs
from .comparison import Comparison, Formulation, compare
from .models.cases import ModelCase
from .timing import summary

TIMED, WRONG, UNSUPPORTED, FAILED = "timed", "WRONG", "unsupported", "failed"
REFERENCE = "reference"
"""The name under which a graph's own reference, compiled by XLA, is timed."""


def measure(
    cases: Iterable[ModelCase],
    *,
    tolerant: bool = True,
    cudnn: bool = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: status, cost, times in us, ratio, differences, engines.

    With ``tolerant`` an exception of a case is its result; else it is raised. With ``cudnn`` each
    graph of ours is one cuDNN plan (where "split" might leave it to XLA, which says nothing about
    cuDNN), and is timed against its own reference, too; not so in float8, where XLA tuned the
    reference, a product of converted operands, for minutes. ``options`` are those of
    :func:`compare`.
    """
    results = {}
    for case in cases:
        began = time.perf_counter()
        with implementation(CUDNN) if cudnn else contextlib.nullcontext():
            results[case.name] = entry = _entry(case, tolerant, cudnn, options)
        told = f"ratio {entry['ratio']:.2f}" if "ratio" in entry else entry["status"]
        say(f"{case.name}: {told} ({time.perf_counter() - began:.1f} s)")
    return results


def _entry(
    case: ModelCase, tolerant: bool, reference: bool, options: dict[str, Any]
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "model": case.model,
        "part": case.part,
        "operands": [str(operand) for operand in case.operands],
    }
    try:
        found = programs.graphs(case.ours, *case.avals)
        total = programs.graphs_cost(case.ours, *case.avals)
        entry |= {"flops": total.flops, "bytes": total.bytes}
        if len(found) == 1:
            entry["pattern"] = losses.pattern(found[0][0])
        functions = case.functions
        if reference and not any(operand.dtype in FP8 for operand in case.operands):
            functions[REFERENCE] = _reference(next(iter(functions.values())))
        comparison = compare(functions, *case.arrays(jax.random.key(0)), **options)
        entry |= _compared(comparison, total)
        entry["engines"] = _engines(found)
    except UnsupportedGraphError as error:
        entry |= {"status": UNSUPPORTED, "reason": _reason(error)}
    except Exception as error:
        if not tolerant:
            raise
        entry |= {"status": FAILED, "reason": f"{type(error).__name__}: {error}"[:2000]}
    return entry


def _reference(ours: Formulation) -> Formulation:
    """Our side as XLA would run it: its graphs computed by their references."""
    return Formulation(programs.with_references(ours.function), ours.prepare, ours.finish)


def _compared(found: Comparison, cost: Cost) -> dict[str, Any]:
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


def _engines(graphs: list[Any]) -> list[str]:
    """The engines of the graphs' plans, in the order of the graphs; empty without a GPU."""
    try:
        plans = programs.placed(graphs)
    except JaxCudnnError:  # references ran, not plans
        return []
    return [s.plan.engine for plan in plans for s in plan.segments if s.plan is not None]


def _reason(error: UnsupportedGraphError) -> str:
    """The error in one line: its summary, why, and cuDNN's first reason."""
    parts = [error.summary, error.why, *list(error.reasons.values())[:1]]
    return "; ".join(" ".join(part.split()) for part in parts if part)[:1000]
