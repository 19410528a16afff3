"""Selects another of cuDNN's candidates for a plan."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from ..cuda import CudaDevice
from ..errors import GraphError, PlanningError, UnsupportedGraphError
from ..graph.options import HEURISTICS
from ..graph.spec import intern
from . import choice, planner
from .build import Candidate
from .deviceless.profiles import Profile
from .planned_graph import PlannedGraph, PlannedSegment

P = TypeVar("P", bound=PlannedGraph)
_SUPPORTED = {True: "yes", False: "no", None: "not tried"}


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

    def replaced(self, rows: Iterator[Candidate]) -> Candidates:
        """A copy with other rows."""
        return replace(self, rows=tuple(rows))

    def to_json(self) -> list[dict[str, Any]]:
        """Everything as data for ``json.dumps``."""
        return [row.to_json() for row in self.rows]

    def __str__(self) -> str:
        timed = any(row.seconds is not None for row in self.rows)
        header = ("", "engine", *HEURISTICS, "workspace", "supported", *["us"] * timed, "notes")
        lines = [header, *(self._cells(row, timed) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
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
    if (candidate.engine, candidate.knobs) == (own.engine_id, dict(own.knobs)):
        return plan
    _check_known(plan, candidate)
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


def parts(plan: P) -> tuple[P, ...]:
    """A plan for each cuDNN segment."""
    if len(plan.segments) == 1:
        return (plan,) if plan.execution_plans else ()
    return tuple(_part(plan, segment) for segment in plan.segments if segment.plan is not None)


def _part(plan: P, segment: PlannedSegment) -> P:
    alone = replace(segment, calls=tuple(range(len(segment.spec.calls))))
    names = ", ".join(call.name for call in segment.spec.calls)
    return replace(plan, name=f"{plan.name}: {names}", spec=segment.spec, segments=(alone,))


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


def _check_known(plan: PlannedGraph, candidate: Candidate) -> None:
    """GraphError for a candidate of another plan: cuDNN might still build it, or report that it is
    for another GPU."""
    rows = planner.candidates(plan.spec, _site(plan), plan.name)
    if (candidate.engine, candidate.knobs) not in [(row.engine, row.knobs) for row in rows]:
        raise GraphError(
            f"{plan.name}: no such candidate",
            expected="one of the candidates of this plan",
            got=f"{candidate.name}, which cuDNN does not propose for this graph and GPU",
        )


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


def _site(plan: PlannedGraph) -> Profile | CudaDevice:
    if plan.site is None:
        raise GraphError(
            f"{plan.name}: the candidates of this plan are not known",
            expected="a plan of jax_cudnn.plan, plan.select or plan.autotune",
            got="a plan of Plan.deserialize",
            why="it was read from bytes, which hold the plan without the other candidates",
            fix="plan the function again: jax_cudnn.plan(fn, *args)",
        )
    return plan.site
