"""Time to trace and to plan the named fusions."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from cases import FUSIONS, Case  # tests/cases.py

from jax_cudnn._core import auto
from jax_cudnn._core.context import target
from jax_cudnn._core.graph.trace import graph
from jax_cudnn._core.plans.plans import plan
from jax_cudnn._core.settings import configure, settings
from jax_cudnn._core.store import cache
from jax_cudnn.commands.timing import summary


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


@contextlib.contextmanager
def nothing_planned() -> Iterator[str]:
    """Inside, no plan is known, and the plan cache is an empty folder, whose path it gives."""
    kept = settings().plan_cache
    with tempfile.TemporaryDirectory() as folder:
        configure(plan_cache=folder)
        auto.clear()
        try:
            yield folder
        finally:
            configure(plan_cache=kept)


def planning() -> dict[str, Any]:
    """Milliseconds to plan each fusion that is one plan: cold (with cuDNN loaded, and the plan
    written to disk), from the disk as in another process, and from memory."""
    cold: dict[str, float] = {}
    disk, memory = [], []
    with nothing_planned() as folder:
        whole = [c for c in FUSIONS if len(plan(c.function, *c.avals).segments) == 1]
        cache.PlanCache(folder).clear()
        for case in whole:
            auto.clear()
            cold[case.name] = round(_milliseconds(case), 1)
            auto.clear()
            _milliseconds(whole[0])  # the GPU's properties and the versions are read once
            disk.append(_milliseconds(case))
            memory.append(_milliseconds(case))
    return {
        "cold_plan_ms": cold,
        "cold_plan_ms_median": round(statistics.median(cold.values()), 1),
        "from_disk_ms": summary(disk[1:]),  # the first is in memory by then
        "from_memory_ms": summary(memory),
    }


def lowering(gpu: str = "H200") -> dict[str, Any]:
    """Seconds to lower a training step of a transformer of two layers for a GPU that is not here,
    with an empty plan cache, and again when only that is known. In a process that has planned
    nothing."""
    from .sharded import OURS, transformer

    model = transformer()
    step = jax.value_and_grad(lambda p, tokens: model.losses[OURS](p, (), tokens, None)[0])
    seconds = []
    with nothing_planned(), target(gpu):
        for _ in range(2):
            auto.clear()
            began = time.perf_counter()
            function = jax.jit(lambda p, tokens: step(p, tokens))
            function.trace(model.params, *model.data).lower(lowering_platforms=("cuda",))
            seconds.append(round(time.perf_counter() - began, 2))
    return {"seconds": seconds[0], "again": seconds[1], "gpu": gpu, "cpus": os.cpu_count()}


def _milliseconds(case: Case) -> float:
    start = time.perf_counter()
    plan(case.function, *case.avals)
    return (time.perf_counter() - start) * 1e3
