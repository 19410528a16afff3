"""Cuts a GraphSpec into segments that run one after the other: cuDNN's, and what XLA runs.

The cuts lie around leftover nodes, which cuDNN's graphs have none of. A segment is a GraphSpec
with the tensor names, dtypes and options of the whole, so a tensor that crosses a cut is rounded
exactly where the whole graph rounds it: running the segments in order computes what the whole
graph computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .spec import Call, GraphSpec


@dataclass(frozen=True)
class Segment:
    """A part of a graph: its inputs and outputs are tensors of the whole, by name."""

    spec: GraphSpec
    leftover: bool
    """Whether XLA runs it through its reference, not cuDNN."""


@functools.lru_cache(maxsize=1024)
def split(spec: GraphSpec) -> tuple[Segment, ...]:
    """The segments of a graph, in an order in which each finds its inputs computed.

    A graph without leftover nodes is one segment, itself. Otherwise a segment is a connected
    group of calls of one kind between which no call of the other kind lies.
    """
    kinds = {call.node.leftover for call in spec.calls}
    if len(kinds) == 1:
        return (Segment(spec, kinds.pop()),)
    stages = _stages(spec)
    return tuple(
        Segment(_part(spec, group), stage % 2 == 1)
        for stage in sorted(set(stages))
        for group in _connected([c for c, s in zip(spec.calls, stages, strict=True) if s == stage])
    )


def for_cudnn(spec: GraphSpec) -> tuple[GraphSpec, ...]:
    """The graphs that cuDNN is asked to plan for a graph.

    Where XLA runs all of it, the graph itself, whose planning says so in words.
    """
    return tuple(s.spec for s in split(spec) if not s.leftover) or (spec,)


def run(
    spec: GraphSpec, operands: Sequence[Any], execute: Callable[..., Sequence[Any]]
) -> list[Any]:
    """The outputs of a graph, segment by segment: ``execute(segment, *inputs)`` gives outputs."""
    values = dict(zip(spec.inputs, operands, strict=True))
    for segment in split(spec):
        results = execute(segment, *(values[name] for name in segment.spec.inputs))
        values.update(zip(segment.spec.outputs, results, strict=True))
    return [values[name] for name in spec.outputs]


def _stages(spec: GraphSpec) -> list[int]:
    """For each call the least stage after its producers': cuDNN's are even, XLA's are odd."""
    made: dict[str, int] = {}
    stages = []
    for call in spec.calls:
        stage = max((made.get(name, 0) for _, name in call.inputs), default=0)
        stage += stage % 2 != call.node.leftover
        stages.append(stage)
        made.update((name, stage) for _, name in call.outputs)
    return stages


def _connected(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Groups of calls of which one's outputs are another's inputs, in the order of the calls."""
    group = {id(call): [call] for call in calls}
    maker = {name: call for call in calls for _, name in call.outputs}
    for call in calls:
        for _, name in call.inputs:
            mine, theirs = group[id(call)], group[id(maker.get(name, call))]
            if mine is not theirs:
                theirs.extend(mine)
                group.update((id(member), theirs) for member in mine)
    seen = []
    for members in group.values():
        if not any(members is other for other in seen):
            seen.append(members)
            chosen = {id(member) for member in members}
            yield [call for call in calls if id(call) in chosen]


def _part(spec: GraphSpec, calls: Sequence[Call]) -> GraphSpec:
    """The graph of some of the calls: what they need of others is input, what others need of
    them or the whole returns is output."""
    inside = {id(call) for call in calls}
    made = {name for call in calls for _, name in call.outputs}
    used = {name for call in calls for _, name in call.inputs}
    wanted = {*spec.outputs}
    wanted |= {name for call in spec.calls if id(call) not in inside for _, name in call.inputs}
    tensors = tuple(t for t in spec.tensors if t.name in made | used)
    return GraphSpec(
        tensors,
        tuple(calls),
        tuple(t.name for t in tensors if t.name not in made and t.value is None),
        tuple(t.name for t in tensors if t.name in made & wanted),
        spec.options,
    )
