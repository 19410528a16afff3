"""Time to trace and to plan the named fusions."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from .._core import placement
from .._core.support import plan
from .._core.trace import graph
from .cases import FUSIONS
from .timing import summary


def tracing() -> dict[str, Any]:
    """Milliseconds to trace a graph of ten nodes for the first time."""

    def ten_nodes(g, x):
        for _ in range(5):
            x = g.relu(g.add(x, x))
        return x

    aval = jax.ShapeDtypeStruct((8, 64, 28, 28), "bfloat16")
    milliseconds = []
    for _ in range(50):
        function = graph(ten_nodes)  # with an empty cache
        start = time.perf_counter()
        function.trace(aval)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {"first_trace_of_10_nodes_ms": summary(milliseconds[5:])}


def planning() -> dict[str, Any]:
    """Milliseconds to plan each fusion that is one plan: cold (with cuDNN loaded), from memory."""
    cold: dict[str, float] = {}
    warm = []
    whole = [case for case in FUSIONS if len(plan(case.function, *case.avals).segments) == 1]
    for case in (*whole[:1], *whole):  # the first one loads cuDNN's libraries
        placement.clear()
        start = time.perf_counter()
        plan(case.function, *case.avals)
        cold[case.name] = round((time.perf_counter() - start) * 1e3, 1)
        start = time.perf_counter()
        plan(case.function, *case.avals)
        warm.append((time.perf_counter() - start) * 1e3)
    return {
        "cold_plan_ms": cold,
        "cold_plan_ms_median": round(statistics.median(cold.values()), 1),
        "from_memory_ms": summary(warm),
    }
