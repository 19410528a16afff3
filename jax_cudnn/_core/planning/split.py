"""Cuts a GraphSpec into segments that run sequentially, on cuDNN or in XLA.

A segment has the tensor names, dtypes and options of the whole graph, so what crosses a cut is
rounded where the whole graph rounds it.

``search`` tries the whole graph, and then, around each anchor (convolution, matmul), the connected
parts that can run independently, from the cheapest cut upwards. A cut costs the bytes written on
one side and read on the other; each segment also costs a kernel launch. XLA runs the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..graph.spec import GraphSpec
from . import choice
from .call_sets import CallSets, members
from .execution_plan import ExecutionPlan
from .planned_graph import PlannedSegment, Rows, Segments

# Bounds of the search around one anchor: parts tried, calls considered, parts kept of each size.
_QUESTIONS, _REACH, _WIDTH = 64, 14, 24
_TOTAL = 1024  # parts tried; beyond this, anchors are tried alone
# The cost of starting a segment in bytes: an H200 moves as many in about two microseconds.
_START = 8 << 20
_FUSED = "XLA fuses it with its neighbours, with no more memory traffic than on cuDNN"


@dataclass(frozen=True)
class Refusal:
    """Why cuDNN does not run a graph; with ``final``, no part of it is tried either."""

    reason: str
    final: bool = False


Planner = Callable[[GraphSpec], ExecutionPlan | Refusal]


def search(spec: GraphSpec, plan_of: Planner) -> Segments:
    """The segments of a graph in an order of execution. ``plan_of``, called once per part, returns
    its plan, or why cuDNN does not run it. Equal graphs and answers give equal segments: parts are
    tried by cost, then larger ones first, then by position."""
    return _Search(spec, plan_of).segments()


def whole(spec: GraphSpec, plan: ExecutionPlan | None, reason: str = "") -> Segments:
    """A graph as its only segment."""
    return (PlannedSegment(spec, tuple(range(len(spec.calls))), plan, reason),)


def replanned(
    rows: Rows, spec: GraphSpec, plan_of: Planner, pinned: Mapping[int, Any] = MappingProxyType({})
) -> Segments | Refusal:
    """Stored segments with their plans; the first refusal if cuDNN has one of them no more.
    ``pinned``: engines with knobs by the position of segments."""
    found = []
    for at, (calls, in_xla, reason) in enumerate(rows):
        piece = part(spec, calls)
        requested = choice.pinned(piece, *pinned[at]) if at in pinned else piece
        plan = None if in_xla else plan_of(requested)
        if isinstance(plan, Refusal):
            return plan
        found.append(PlannedSegment(piece, calls, plan, reason))
    return tuple(found)


def part(spec: GraphSpec, calls: Iterable[int]) -> GraphSpec:
    """The graph of some of the calls: values from other calls are inputs; values that other calls
    or the whole graph's results need are outputs."""
    chosen = {*calls}
    if len(chosen) == len(spec.calls):
        return spec
    inside = tuple(call for i, call in enumerate(spec.calls) if i in chosen)
    outside = (call for i, call in enumerate(spec.calls) if i not in chosen)
    made = {name for call in inside for _, name in call.outputs}
    used = {name for call in inside for _, name in call.inputs}
    wanted = {*spec.outputs, *(name for call in outside for _, name in call.inputs)}
    tensors = tuple(t for t in spec.tensors if t.name in made | used)
    return GraphSpec(
        tensors,
        inside,
        tuple(t.name for t in tensors if t.name not in made and t.literal is None),
        tuple(t.name for t in tensors if t.name in made & wanted),
        spec.options,
    )


class _Search:
    def __init__(self, spec: GraphSpec, plan_of: Planner) -> None:
        self._spec, self._plan_of = spec, plan_of

    def segments(self) -> Segments:
        answer = self._plan_of(self._spec)
        if not isinstance(answer, Refusal):
            return whole(self._spec, answer)
        if answer.final:
            return whole(self._spec, None, answer.reason)
        sets = self._sets = CallSets(self._spec)
        self._answers: dict[int, ExecutionPlan | Refusal] = {sets.all: answer}
        taken: dict[int, ExecutionPlan] = {}
        free = sets.all & ~sets.xla_only
        for position in members(sets.anchors):
            anchor = 1 << position
            if anchor & free:
                found, plan = self._around(anchor, free & ~sets.anchors, [*taken])
                if plan is not None:
                    taken[found] = plan
                    free &= ~found
        segments = []
        for group in sets.in_order([*taken], sets.all & ~sum(taken)):
            piece, calls = part(self._spec, members(group)), tuple(members(group))
            reason = answer.reason if group in taken else self._reason(group)
            segments.append(PlannedSegment(piece, calls, taken.get(group), reason))
        return tuple(segments)

    def _around(
        self, anchor: int, free: int, taken: Sequence[int]
    ) -> tuple[int, ExecutionPlan | None]:
        """The cheapest part around an anchor that cuDNN runs, with its plan, if there is one."""
        region = anchor
        while (near := self._sets.beside(region) & free) and region.bit_count() < _REACH:
            for position in members(near):
                if region.bit_count() < _REACH:
                    region |= 1 << position
        cost = functools.cache(functools.partial(self._cost, region))

        def rank(calls: int) -> tuple[int, int, int]:
            return cost(calls), -calls.bit_count(), calls

        level, parts = [anchor], [anchor]
        while level:
            grown = {c | 1 << i for c in level for i in members(self._sets.beside(c) & region)}
            level = sorted(grown, key=rank)[:_WIDTH]
            parts += level
        closed = [calls for calls in parts if self._sets.is_closed(calls, taken)]
        requested = sorted(closed, key=rank)[: _QUESTIONS if len(self._answers) < _TOTAL else 0]
        for calls in (*requested, anchor):
            answer = self._answer(calls)
            if not isinstance(answer, Refusal):
                return calls, answer
            if answer.final:
                break
        return 0, None

    def _cost(self, region: int, calls: int) -> int:
        """Bytes moved in a region if cuDNN runs these calls and XLA fuses the rest."""
        rest = region & ~calls
        first = rest & self._sets.before(calls)
        groups = [*self._sets.connected(first), *self._sets.connected(rest & ~first)]
        return sum(self._sets.traffic(group) + _START for group in (calls, *groups))

    def _answer(self, calls: int) -> ExecutionPlan | Refusal:
        if calls not in self._answers:
            self._answers[calls] = self._plan_of(part(self._spec, members(calls)))
        return self._answers[calls]

    def _reason(self, group: int) -> str:
        """Why XLA runs these calls: a final answer, or that for the smallest part that was tried
        with some of them."""
        own = [self._spec.calls[i] for i in members(group & self._sets.xla_only)]
        said = [*dict.fromkeys(f"{call.name}: {call.node.about.requires}" for call in own)]
        near = [
            (not answer.final, calls.bit_count(), calls, answer.reason)
            for calls, answer in self._answers.items()
            if isinstance(answer, Refusal) and calls & group & ~self._sets.xla_only
        ]
        if own and not (near and group & self._sets.anchors):
            return "; ".join(said)
        if not near:
            return _FUSED
        *_, calls, reason = min(near)
        names = ", ".join(self._spec.calls[i].name for i in members(calls))
        return "; ".join([f"{names}: {reason}", *said])
