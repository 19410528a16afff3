"""A derived graph with the source of each of its operands and results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..graph.node import Node
from ..graph.spec import Call, GraphSpec, intern
from .derivation import vocabulary

Key = Hashable
"""The key of an array in the code that derives and runs a graph."""


@dataclass(frozen=True)
class Source:
    """An array, and how its elements are moved."""

    of: Key
    moves: tuple[Node, ...] = ()

    def __call__(self, arrays: Mapping[Key, Any]) -> Any:
        array = arrays[self.of]
        for node in self.moves:
            (array,) = node.reference(input=array)
        return array


@dataclass(frozen=True)
class Derived:
    """``inputs`` are the sources of ``spec``'s operands, ``results`` those of what was requested:
    an operand, or a result of ``spec`` (by its name); None is zero."""

    spec: GraphSpec | None
    inputs: tuple[Source, ...]
    results: tuple[Source | None, ...]

    @classmethod
    def of(
        cls,
        spec: GraphSpec | None,
        operands: Mapping[str, Key],
        results: Sequence[str | None],
        also: tuple[type[Node], ...] = (),
    ) -> Derived:
        """From the keys of operands by their names in the graph, and the results' names.

        Nodes that only move operands before a graph, or results after it, run outside, in XLA; so
        do nodes of the classes ``also`` before it.
        """
        inputs = tuple(Source(operands[name]) for name in (spec.inputs if spec else ()))
        made = cls(
            spec,
            inputs,
            tuple(None if name is None else Source(operands.get(name, name)) for name in results),
        )
        return made if spec is None else _peeled(made, also)

    def run(
        self, arrays: Mapping[Key, Any], bind: Callable[..., Sequence[Any]]
    ) -> list[Any | None]:
        """The results: ``bind(spec, *operands)`` gives those of the graph."""
        arrays = dict(arrays)
        if self.spec is not None:
            outputs = bind(self.spec, *(source(arrays) for source in self.inputs))
            arrays.update(zip(self.spec.outputs, outputs, strict=True))
        return [None if source is None else source(arrays) for source in self.results]


def _peeled(derived: Derived, also: tuple[type[Node], ...]) -> Derived:
    """The graph without the first moves of operands and the last moves of results."""
    spec = derived.spec
    assert spec is not None
    kinds = vocabulary().moves

    def moves(call: Call, kinds: tuple[type[Node], ...] = kinds) -> bool:
        """Whether a call only moves elements; some also round their result."""
        (_, first), (_, out) = call.inputs[0], call.outputs[0]
        alike = spec.tensor(first).dtype == spec.tensor(out).dtype
        return isinstance(call.node, kinds) and alike

    sources: dict[Key, Source] = dict(zip(spec.inputs, derived.inputs, strict=True))
    calls = []
    for call in spec.calls:
        (_, first), (_, out) = call.inputs[0], call.outputs[0]
        if first in sources and moves(call, (*kinds, *also)):
            sources[out] = replace(sources[first], moves=(*sources[first].moves, call.node))
        else:
            calls.append(call)
    ends: dict[Key, Source] = {name: Source(name) for name in spec.outputs}
    for call in reversed(calls[:]):
        (_, first), (_, out) = call.inputs[0], call.outputs[0]
        used = {name for other in calls for _, name in other.inputs}
        wanted = any(end.of == out for end in ends.values())
        number = spec.tensor(first).value is not None
        if moves(call) and wanted and out not in used and not number:
            calls.remove(call)
            for name, end in ends.items():
                if end.of == out:
                    ends[name] = Source(first, (call.node, *end.moves))

    def outside(result: Source | None) -> Source | None:
        for table in (ends, sources):
            if result is not None and result.of in table:
                behind = table[result.of]
                result = Source(behind.of, (*behind.moves, *result.moves))
        return result

    results = tuple(map(outside, derived.results))
    wanted = {end.of for end in ends.values()} - {*sources}
    if not wanted:
        return Derived(None, (), results)
    used = {name for call in calls for _, name in (*call.inputs, *call.outputs)}
    tensors = tuple(t for t in spec.tensors if t.name in used)
    inputs = tuple(t.name for t in tensors if t.name in sources)
    outputs = tuple(t.name for t in tensors if t.name in wanted)
    peeled = GraphSpec(tensors, tuple(calls), inputs, outputs, spec.options, spec.origin)
    return Derived(intern(peeled), tuple(sources[name] for name in inputs), results)
