"""Products of any dimensions as the products of three dimensions that cuDNN takes.

A product may keep its dimensions apart, so that vmap and a mesh see each of them: the letters of
its ports are those of the batch (at all ports), the rows, the sum and the columns (each at two
ports), in this order. In memory each of these groups is one dimension, wherever no tensor of the
graph tells its parts apart; and if the second operand has no batch, slower rows may be the batch.
XLA repeats operands, and reorders operands and results, that do not merge in any way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .dims import Shape
from .node import Node
from .spec import Call, GraphSpec, Tensor


class _Side(NamedTuple):
    """A port of a product, for all tensors that operations connect with it."""

    port: str
    whole: Shape
    groups: tuple[tuple[int, ...], ...]
    """The dimensions that become each dimension of cuDNN's."""


_Sides = Mapping[str, _Side]


def is_split(node: Node) -> bool:
    """Whether a product keeps its dimensions apart."""
    return node.anchor.product and node.algebra.merged is not None


def merged(spec: GraphSpec) -> GraphSpec:
    """The graph with products of three dimensions; itself if it has no others, or where a tensor's
    dimensions do not merge."""
    spec, sides = _form(spec)
    if not sides:
        return spec
    tensors = {t.name: _merged(t, sides[t.name]) for t in spec.tensors}
    calls = tuple(_call(call, tensors) for call in spec.calls)
    return replace(spec, tensors=(*tensors.values(),), calls=calls)


def widened(spec: GraphSpec) -> GraphSpec:
    """The graph with operands repeated, and arrays ordered, as they must be to merge."""
    return _form(spec)[0]


def is_reread(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of different shapes have the same elements."""
    return one.shape != other.shape and math.prod(one.shape) == math.prod(other.shape)


def reread(x: jax.Array, tensor: Tensor, other: Tensor) -> jax.Array:
    """The array of a tensor as that of another one in the same memory."""
    own, order = (t.order or range(len(t.shape)) for t in (tensor, other))
    stored = jnp.transpose(x, own).reshape([other.shape[axis] for axis in order])
    return jnp.transpose(stored, [[*order].index(axis) for axis in range(len(order))])


def _form(spec: GraphSpec) -> tuple[GraphSpec, _Sides]:
    if "merging" not in spec._cache:
        spec._cache["merging"] = _found(spec)
    return spec._cache["merging"]


def _found(spec: GraphSpec) -> tuple[GraphSpec, _Sides]:
    split = [call for call in spec.calls if is_split(call.node)]
    for slower in range(max((len(c.node.ports.outputs[0].axes) for c in split), default=0)):
        sides = _sides(spec, slower)
        if sides and all(_fits(t, sides[t.name]) for t in spec.tensors):
            return spec, sides
    sides = _sides(spec, 0) if split else {}
    if sides:
        wide = replace(
            spec,
            tensors=tuple(_widened(t, sides[t.name], t.name in spec.outputs) for t in spec.tensors),
        )
        if all(_fits(t, sides[t.name]) for t in wide.tensors):
            return wide, sides
    return spec, {}


def _sides(spec: GraphSpec, slower: int) -> _Sides:
    """The side of each tensor, with so many ``slower`` rows in the batch; empty if some tensor has
    none, or several."""
    sides: dict[str, _Side] = {}
    known = -1
    while known != len(sides):
        known = len(sides)
        for call in spec.calls:
            names = [name for _, name in (*call.inputs, *call.outputs)]
            if is_split(call.node):
                found = dict(_ports(call, spec, slower))
            elif call.node.ports.is_elementwise:
                side = next((sides[name] for name in names if name in sides), None)
                found = {} if side is None else dict.fromkeys(names, side)
            else:
                return {}
            if any(sides.setdefault(name, side) != side for name, side in found.items()):
                return {}
    return sides if len(sides) == len(spec.tensors) else {}


def _ports(call: Call, spec: GraphSpec, slower: int) -> Iterator[tuple[str, _Side]]:
    (a, b), (c,) = call.node.ports.inputs, call.node.ports.outputs
    names = dict((*call.inputs, *call.outputs))
    sizes: dict[str, int] = {}
    for port in (a, b, c):
        for axis, size in zip(port.axes, spec.tensor(names[port.name]).shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    rows = [axis for axis in c.axes if axis in a.axes and axis not in b.axes]
    batch = [axis for axis in c.axes if axis in a.axes and axis in b.axes] or rows[:slower]
    for port, other in ((a, c), (b, a), (c, a)):
        groups: tuple[list[int], ...] = [], [], []
        for i, axis in enumerate(port.axes):
            groups[0 if axis in batch else 1 if axis in other.axes else 2].append(i)
        whole = tuple(sizes[axis] for axis in port.axes)
        yield names[port.name], _Side(f"{call.name}.{port.name}", whole, (*map(tuple, groups),))


def _fits(tensor: Tensor, side: _Side) -> bool:
    """Whether each group is of size 1 or whole, and in one piece in memory."""
    for group in side.groups:
        sizes = [tensor.shape[axis] for axis in group]
        if {*sizes} - {1} and sizes != [side.whole[axis] for axis in group]:
            return False
    axes = [axis for i in _order(tensor, side) for axis in side.groups[i]]
    return [axis for axis in axes if tensor.shape[axis] != 1] == _stored(tensor)


def _widened(tensor: Tensor, side: _Side, is_output: bool) -> Tensor:
    shape = [*tensor.shape]
    for group in () if is_output else side.groups:
        if any(shape[axis] != 1 for axis in group):
            for axis in group:
                shape[axis] = side.whole[axis]
    wide = replace(tensor, shape=tuple(shape))
    return wide if _fits(wide, side) else replace(wide, order=None)


def _merged(tensor: Tensor, side: _Side) -> Tensor:
    shape = tuple(math.prod(tensor.shape[axis] for axis in group) for group in side.groups)
    ranks = iter(i for i in _order(tensor, side) if shape[i] != 1)
    order = tuple(i if shape[i] == 1 else next(ranks) for i in range(3))
    return replace(tensor, shape=shape, order=None if order == (0, 1, 2) else order)


def _order(tensor: Tensor, side: _Side) -> list[int]:
    """The groups from the slowest in memory to the fastest."""
    stored = _stored(tensor)
    first = [[stored.index(axis) for axis in g if axis in stored][:1] for g in side.groups]
    return sorted(range(3), key=lambda i: first[i] or [-1])


def _stored(tensor: Tensor) -> list[int]:
    """The dimensions from the slowest in memory to the fastest, without those of size 1."""
    order = tensor.order or range(len(tensor.shape))
    return [axis for axis in order if tensor.shape[axis] != 1]


def _call(call: Call, tensors: Mapping[str, Tensor]) -> Call:
    merged = call.node.algebra.merged
    shape = tensors[call.outputs[0][1]].shape
    return call if merged is None else replace(call, node=merged(call.node, shape))
