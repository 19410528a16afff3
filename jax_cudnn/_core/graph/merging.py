"""Products of any dimensions as the products of three dimensions that cuDNN takes.

A product may keep its dimensions apart, so that vmap and a mesh see each of them: the letters of
its ``dims`` are those of the batch (at all ports), the rows, the sum and the columns (each at two
ports), in this order. In memory each of these groups is one dimension, wherever no tensor of the
graph tells its parts apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .node import REGISTRY, Node
from .spec import Call, GraphSpec, Tensor

Groups = tuple[tuple[int, ...], ...]
"""The dimensions that become each dimension of a tensor."""


def is_split(node: Node) -> bool:
    """Whether a product keeps its dimensions apart."""
    return node.matrices and "..." not in node.ports.outputs[0].axes


def merged(spec: GraphSpec) -> GraphSpec:
    """The graph with products of three dimensions; itself if it has no others, or where a tensor's
    dimensions do not merge."""
    if not any(is_split(call.node) for call in spec.calls):
        return spec
    sides = _sides(spec)
    if sides is None:
        return spec
    tensors = {t.name: _merged(t, groups) for t in spec.tensors for _, groups in [sides[t.name]]}
    for side in {side for side, _ in sides.values()}:
        beside = [spec.tensor(name) for name, (own, _) in sides.items() if own == side]
        whole = [*map(max, zip(*(t.shape for t in beside), strict=True))]
        for t in beside:
            for group in sides[t.name][1]:
                sizes = [t.shape[axis] for axis in group]
                if {*sizes} - {1} and sizes != [whole[axis] for axis in group]:
                    return spec
    if None in tensors.values():
        return spec
    calls = tuple(_call(call, tensors) for call in spec.calls)
    made = tuple(t for t in tensors.values() if t is not None)
    return replace(spec, tensors=made, calls=calls, _cache={})


def is_reread(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of different shapes have the same elements."""
    return one.shape != other.shape and math.prod(one.shape) == math.prod(other.shape)


def reread(x: jax.Array, tensor: Tensor, other: Tensor) -> jax.Array:
    """The array of a tensor as that of another one in the same memory."""
    own, order = (t.order or range(len(t.shape)) for t in (tensor, other))
    stored = jnp.transpose(x, own).reshape([other.shape[axis] for axis in order])
    return jnp.transpose(stored, [[*order].index(axis) for axis in range(len(order))])


def _call(call: Call, tensors: dict[str, Tensor | None]) -> Call:
    node = call.node
    if is_split(node):
        node = REGISTRY[node.method](compute_data_type=node.compute_data_type)
    elif hasattr(node, "out_dims"):
        out: Any = tensors[call.outputs[0][1]]
        node = replace(node, out_dims=out.shape)  # pyright: ignore[reportCallIssue]
    return replace(call, node=node)


def _sides(spec: GraphSpec) -> dict[str, tuple[Any, Groups]] | None:
    """For each tensor, the port of a product with which operations connect it, and its groups; None
    if there are none, or several."""
    sides: dict[str, tuple[Any, Groups]] = {}
    known = -1
    while known != len(sides):
        known = len(sides)
        for call in spec.calls:
            names = [name for _, name in (*call.inputs, *call.outputs)]
            if is_split(call.node):
                found = {name: ((call.name, port), g) for name, port, g in _ports(call)}
            elif call.node.ports.is_elementwise:
                side = next((sides[name] for name in names if name in sides), None)
                found = {} if side is None else dict.fromkeys(names, side)
            else:
                return None
            if any(sides.setdefault(name, side) != side for name, side in found.items()):
                return None
    return sides if len(sides) == len(spec.tensors) else None


def _ports(call: Call) -> Iterator[tuple[str, str, Groups]]:
    """The tensors of a product: name, port and groups."""
    (a, b), (c,) = call.node.ports.inputs, call.node.ports.outputs
    names = dict((*call.inputs, *call.outputs))
    for port, first, second in ((a, c, b), (b, a, c), (c, a, b)):
        at = [(axis in first.axes, axis in second.axes) for axis in port.axes]
        kinds = (True, True), (True, False), (False, True)
        groups = tuple(tuple(i for i, kind in enumerate(at) if kind == k) for k in kinds)
        yield names[port.name], port.name, groups


def _merged(tensor: Tensor, groups: Groups) -> Tensor | None:
    """None if a group is not in one piece in memory."""
    shape = tuple(math.prod(tensor.shape[axis] for axis in group) for group in groups)
    stored: Sequence[int] = tensor.order or range(len(tensor.shape))
    stored = [axis for axis in stored if tensor.shape[axis] != 1]
    full = [[axis for axis in group if tensor.shape[axis] != 1] for group in groups]
    order = sorted(range(3), key=lambda i: stored.index(full[i][0]) if full[i] else -1)
    if [axis for i in order for axis in full[i]] != stored:
        return None
    ranks = iter(i for i in order if shape[i] != 1)
    order = tuple(i if shape[i] == 1 else next(ranks) for i in range(3))
    return replace(tensor, shape=shape, order=None if order == (0, 1, 2) else order)
