"""Runs cases one after the other; what cannot run is part of the result, with its reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jax_cudnn._core.errors import UnsupportedGraphError
from jax_cudnn._core.graph.dtypes import FP8
from jax_cudnn._core.implementation import CUDNN, implementation
from jax_cudnn._core.planning import losses
from jax_cudnn.commands import figures, programs
from jax_cudnn.commands.comparison import Formulation, compare
from jax_cudnn.commands.figures import FAILED, REFERENCE

from .models.cases import ModelCase

UNSUPPORTED = "unsupported"


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
        entry |= figures.compared(comparison, total)
        entry["engines"] = figures.engines(found)
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


def _reason(error: UnsupportedGraphError) -> str:
    """The error in one line: its summary, why, and cuDNN's first reason."""
    parts = [error.summary, error.why, *list(error.reasons.values())[:1]]
    return "; ".join(" ".join(part.split()) for part in parts if part)[:1000]
