"""The candidates of a plan: what else cuDNN proposes for its graph, how fast each one is, and the
plan with another of them."""

from __future__ import annotations

import functools
import operator
import statistics
import time as clock
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import jax
import numpy as np

from . import execution, ffi
from .compat import Device
from .errors import GraphError, PlanningError, UnsupportedGraphError
from .graph.dtypes import is_floating
from .graph.options import HEURISTICS
from .graph.spec import intern
from .operands import operands
from .planning import choice, planner
from .planning.build import Candidate
from .planning.placement import Site
from .planning.planned_graph import PlannedGraph
from .text import aligned
from .trials import in_turns

P = TypeVar("P", bound=PlannedGraph)
_SUPPORTED = {True: "yes", False: "no", None: "not tried"}
_SHORT, _LONG = 8, 40  # executions in a row, in one program
_WARM, _LEAST, _MOST = 2, 5, 25  # rounds
_BUDGET = 0.5  # seconds of rounds


@dataclass(frozen=True)
class Candidates(Sequence[Candidate]):
    """The plans that cuDNN proposes for a graph on a GPU, starting with those of the plan's own
    heuristics in the order in which they are tried; prints as a table.

    Attributes:
        rows: the candidates.
        gpu: the GPU's name.
        chosen: the index of the plan's own candidate; None if it is not among them.
    """

    rows: tuple[Candidate, ...]
    gpu: str
    chosen: int | None = None
    _try: Callable[[Candidate], Candidate] = field(
        default=lambda row: row, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self.rows[index]

    def built(self) -> Candidates:
        """The same candidates with ``supported`` True or False: builds those not tried before.

        Building takes about a millisecond for kernels that ship with cuDNN, and 0.2 to 1 s for
        those that are compiled (behaviour note RUNTIME_COMPILATION). Built plans stay in memory
        and in the plan cache: ``select`` and ``time_candidates`` do not build them again.
        """
        return self.replaced(map(self._try, self.rows))

    def replaced(self, rows: Iterable[Candidate]) -> Candidates:
        """A copy with other rows."""
        return replace(self, rows=tuple(rows))

    def to_json(self) -> list[dict[str, Any]]:
        """Everything as data for ``json.dumps``."""
        return [row.to_json() for row in self.rows]

    def __str__(self) -> str:
        timed = any(row.seconds is not None for row in self.rows)
        header = ("", "engine", *HEURISTICS, "workspace", "supported", *["us"] * timed, "notes")
        table = aligned([header, *(self._cells(row, timed) for row in self.rows)])
        said = f"*: the plan's own; {', '.join(HEURISTICS)}: rank in each mode of the heuristics"
        return "\n".join([f"{len(self)} candidates on {self.gpu}", *table, said])

    def _cells(self, row: Candidate, timed: bool) -> tuple[str, ...]:
        notes = ", ".join((*row.numeric_notes, *row.behavior_notes))
        time = "" if row.seconds is None else f"{row.seconds * 1e6:.1f}"
        return (
            f"{row.index}{'*' if row.index == self.chosen else ''}",
            row.name,
            *(str(row.modes.get(mode, "")) for mode in HEURISTICS),
            "" if row.workspace_bytes is None else str(row.workspace_bytes),
            _SUPPORTED[row.supported],
            *[time] * timed,
            row.reason or notes,
        )


def candidates(plan: PlannedGraph) -> Candidates:
    """The plans that cuDNN proposes for a plan's graph on its GPU."""
    own = plan.only
    rows = planner.candidates(plan.spec, _site(plan), plan.name)
    mine = own.engine_id, dict(own.knobs)
    chosen = next((row.index for row in rows if (row.engine, row.knobs) == mine), None)
    if chosen is not None:
        built = replace(
            rows[chosen], supported=True, reason="", workspace_bytes=own.workspace_bytes
        )
        rows = (*rows[:chosen], built, *rows[chosen + 1 :])
    return Candidates(rows, plan.gpu, chosen, functools.partial(tried, plan))


def select(plan: P, which: int | Candidate) -> P:
    """The plan of a candidate."""
    own = plan.only
    candidate = which if isinstance(which, Candidate) else _at(plan, which)
    chosen = candidate.engine, candidate.knobs
    if chosen == (own.engine_id, dict(own.knobs)):
        return plan
    rows = planner.candidates(plan.spec, _site(plan), plan.name)
    if chosen not in [(row.engine, row.knobs) for row in rows]:
        # Of another plan: cuDNN might still build it, or report that it is for another GPU.
        raise GraphError(
            f"{plan.name}: no such candidate",
            expected="one of the candidates of this plan",
            got=f"{candidate.name}, which cuDNN does not propose for this graph and GPU",
        )
    if candidate.supported is False:
        raise UnsupportedGraphError(
            f"{plan.name}: candidate {candidate.index}, {candidate.name}, cannot be selected",
            why=candidate.reason,
            fix="select another of plan.candidates, or change the options of the graph",
            graph=str(plan.spec),
        )
    spec = intern(choice.pinned(plan.spec, candidate.engine, candidate.knobs))
    made = planner.plan(spec, _site(plan), plan.name)
    (segment,) = plan.segments
    return replace(plan, spec=spec, segments=(replace(segment, spec=spec, plan=made),))


def tried(plan: PlannedGraph, candidate: Candidate) -> Candidate:
    """A candidate with ``supported`` set, after trying to build it."""
    if candidate.supported is not None:
        return candidate
    try:
        made = select(plan, candidate)
    except UnsupportedGraphError as error:
        return replace(candidate, supported=False, reason=error.reason)
    except PlanningError as error:  # it may be supported
        return replace(candidate, reason=error.summary)
    return replace(candidate, supported=True, workspace_bytes=made.workspace_bytes)


def _at(plan: PlannedGraph, index: int) -> Candidate:
    rows = candidates(plan)
    try:
        return rows[operator.index(index)]
    except (IndexError, TypeError):
        raise GraphError(
            f"{plan.name}: no such candidate",
            expected=f"a jax_cudnn.Candidate, or its index, 0 to {len(rows) - 1}",
            got=repr(index),
        ) from None


def _site(plan: PlannedGraph) -> Site:
    if plan.site is None:
        raise GraphError(
            f"{plan.name}: the candidates of this plan are not known",
            expected="a plan of jax_cudnn.plan, plan.select or plan.autotune",
            got="a plan of Plan.deserialize",
            why="it was read from bytes, which hold the plan without the other candidates",
            fix="plan the function again: jax_cudnn.plan(fn, *args)",
        )
    return plan.site


# -- time on the device ----------------------------------------------------------------------------


def time(plan: PlannedGraph, arrays: Sequence[Any], device: Device | None) -> float:
    """See :meth:`jax_cudnn.Plan.time`.

    Two programs run the plan 8 and 40 times in sequence, each execution waiting for the previous
    one. The difference excludes the start of a program, and the device never waits for Python.
    """
    _ = plan.only
    placed = execution.on_device(plan, arrays or random_arrays(plan), device)
    programs = [functools.partial(_repeated(plan, count), *placed) for count in (_SHORT, _LONG)]
    for program in programs * _WARM:
        jax.block_until_ready(program())
    runs = [functools.partial(_seconds, program) for program in programs]
    more = [long - short for short, long in in_turns(runs, _LEAST, _MOST, _BUDGET)]
    return max(statistics.median(more) / (_LONG - _SHORT), 0.0)


def time_candidates(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
    limit: int | None,
) -> Candidates:
    """See :meth:`jax_cudnn.Plan.time_candidates`."""
    placed = execution.on_device(plan, arrays or random_arrays(plan), device)
    rows = candidates(plan)
    left = len(rows) if limit is None else limit
    found = []
    for row in rows:
        if left > 0 and (row := tried(plan, row)).supported:
            left -= 1
            try:
                row = replace(row, seconds=time(select(plan, row), placed, None))
            except (UnsupportedGraphError, jax.errors.JaxRuntimeError) as error:  # where it runs
                left += 1
                row = replace(row, supported=False, reason=str(error).partition("\n")[0])
        found.append(row)
    return rows.replaced(found)


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


def _seconds(program: Any) -> float:
    began = clock.perf_counter()
    jax.block_until_ready(program())
    return clock.perf_counter() - began


@functools.lru_cache(maxsize=8)
def _repeated(plan: PlannedGraph, count: int) -> Any:
    """The jitted function that executes a plan ``count`` times in sequence."""

    call = functools.partial(ffi.outputs_and_workspace, plan.only, plan.spec, plan.name)

    def run(*given: jax.Array) -> Sequence[jax.Array]:
        outputs, workspace = call(*given)
        for _ in range(count - 1):
            outputs, workspace = call(*given, after=workspace)
        return outputs

    return jax.jit(run)
