"""Measures the device time of plans, and finds the fastest candidate."""

from __future__ import annotations

import functools
import statistics
import time as clock
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import execution, ffi
from .compat import Device
from .errors import GraphError, UnsupportedGraphError
from .graph.dtypes import is_floating
from .operands import operands
from .planning import selection

if TYPE_CHECKING:
    from .planning.build import Candidate
    from .planning.planned_graph import PlannedGraph
    from .planning.selection import Candidates

_SHORT, _LONG = 8, 40  # executions in a row, in one program
_WARM, _LEAST, _MOST = 2, 5, 25  # rounds
_BUDGET = 0.5  # seconds of rounds


def time(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
) -> float:
    """See :meth:`jax_cudnn.Plan.time`.

    Two programs run the plan 8 and 40 times in sequence, each execution waiting for the previous
    one. The difference excludes the start of a program, and the device never waits for Python.
    """
    _ = plan.only
    placed = execution.on_device(plan, arrays or random_arrays(plan), device)
    programs = [functools.partial(_repeated(plan, count), *placed) for count in (_SHORT, _LONG)]
    for program in programs * _WARM:
        jax.block_until_ready(program())
    rounds: list[float] = []
    began = clock.perf_counter()
    while len(rounds) < _LEAST or (len(rounds) < _MOST and clock.perf_counter() - began < _BUDGET):
        short, long = map(_seconds, programs)
        rounds.append((long - short) / (_LONG - _SHORT))
    return max(statistics.median(rounds), 0.0)


def time_candidates(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
    limit: int | None,
) -> Candidates:
    """See :meth:`jax_cudnn.Plan.time_candidates`."""
    placed = execution.on_device(plan, arrays or random_arrays(plan), device)
    left = limit if limit is None or limit > 0 else 0

    def timed(row: Candidate) -> Candidate:
        nonlocal left
        if row.supported is False or left == 0:
            return row
        row, seconds = _timed(plan, row, placed)
        if left is not None and row.supported:
            left -= 1
        return replace(row, seconds=seconds)

    candidates = selection.candidates(plan)
    return candidates.replaced(map(timed, candidates))


def autotune(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
    limit: int | None,
) -> PlannedGraph:
    """See :meth:`jax_cudnn.Plan.autotune`."""
    rows = [row for row in time_candidates(plan, arrays, device, limit) if row.seconds is not None]
    return selection.select(plan, min(rows, key=lambda row: row.seconds or 0.0)) if rows else plan


def random_arrays(plan: PlannedGraph) -> list[np.ndarray]:
    """Realistic operands: kernels can be faster with zeros."""
    for tensor in plan.spec.input_tensors:
        if tensor.dtype != "bool" and not is_floating(tensor.dtype):
            raise GraphError(
                f"{plan.name}: operand {tensor.name!r} cannot be random",
                got=str(tensor),
                why="integers can be lengths or positions, for which random values may be invalid",
                fix="pass the arrays: plan.time(x, ...)",
            )
    return operands(plan.spec)


def _timed(
    plan: PlannedGraph, row: Candidate, placed: Sequence[jax.Array]
) -> tuple[Candidate, float | None]:
    """A candidate with its time, and with ``supported`` set."""
    row = selection.tried(plan, row)
    if not row.supported:
        return row, None
    try:
        return row, time(selection.select(plan, row), placed, None)
    except (UnsupportedGraphError, jax.errors.JaxRuntimeError) as error:  # it fails where it runs
        return replace(row, supported=False, reason=str(error).partition("\n")[0]), None


def _seconds(program: Any) -> float:
    began = clock.perf_counter()
    jax.block_until_ready(program())
    return clock.perf_counter() - began


@functools.lru_cache(maxsize=8)
def _repeated(plan: PlannedGraph, count: int) -> Any:
    """The jitted function that executes a plan ``count`` times in sequence."""

    def run(*given: jax.Array) -> Sequence[jax.Array]:
        outputs, workspace = _call(plan, given, None)
        for _ in range(count - 1):
            outputs, workspace = _call(plan, given, workspace)
        return outputs

    return jax.jit(run)


def _call(
    plan: PlannedGraph, arrays: Sequence[Any], after: Any
) -> tuple[Sequence[jax.Array], jax.Array]:
    return ffi.outputs_and_workspace(plan.only, plan.spec, plan.name, *arrays, after=after)
