"""Graphs of one shard, and graphs in parts between which devices sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..graph.spec import GraphSpec, Tensor, intern
from .axes import WHOLE, Factor, factors, resized


def localized(spec: GraphSpec, shards: Mapping[Factor, int]) -> GraphSpec:
    """The graph on the shapes of one shard, for the number of shards of each factor."""
    number = {axis: count for factor, count in shards.items() for axis in factor.axes}

    def local(tensor: Tensor) -> Tensor:
        sizes = enumerate(tensor.shape)
        shape = tuple(size // number.get((tensor.name, axis), 1) for axis, size in sizes)
        return replace(tensor, shape=shape)

    tensors = {tensor.name: local(tensor) for tensor in spec.tensors}
    calls = []
    for call in spec.calls:
        shapes = {port: tensors[name].shape for port, name in (*call.inputs, *call.outputs)}
        calls.append(replace(call, node=resized(call.node, shapes)))

    def alike(member: GraphSpec) -> GraphSpec:
        """A graph of the family, whose operands have the same names, as sharded as this one."""
        counts = {f: max(number.get(axis, 1) for axis in f.axes) for f in factors(member)}
        fit = {f: n for f, n in counts.items() if f.role != WHOLE and f.size % n == 0}
        return localized(member, fit)

    origin = replace(spec.origin, family=(*map(alike, spec.origin.family),))
    changes: dict[str, Any] = {"tensors": (*tensors.values(),), "calls": (*calls,)}
    return intern(replace(spec, **changes, origin=origin))


def parts(spec: GraphSpec, sharded: Iterable[Factor]) -> tuple[GraphSpec, GraphSpec | None]:
    """The graph up to the sums over these factors that later calls read, and the rest; None if
    nothing is left. Call :func:`factors` again for the rest. In bfloat16 the parts of a sum are
    rounded, as jnp's are: devices exchange half as much."""
    from ..planning.split import part

    sums = frozenset(name for factor in sharded for name in factor.ahead)
    needs, dependent, narrow = {*sums}, set(), _narrow(spec)
    for i, call in enumerate(spec.calls):
        if needs & {name for _, name in call.inputs}:
            needs |= {name for _, name in call.outputs}
            dependent.add(i)
    if not dependent:
        return spec, None
    if narrow:
        tensors = (replace(t, dtype=narrow) if t.name in sums else t for t in spec.tensors)
        spec = replace(spec, tensors=(*tensors,))
    return part(spec, {*range(len(spec.calls))} - dependent), part(spec, dependent)


def _narrow(spec: GraphSpec) -> str:
    """bfloat16 if all operands of products and all results are, else "": a part of a sum may be
    out of the range of float16."""
    read = {name for call in spec.calls if call.node.anchor.product for _, name in call.inputs}
    kinds = {spec.tensor(name).dtype for name in (*read, *spec.outputs)}
    return "bfloat16" if kinds == {"bfloat16"} else ""
