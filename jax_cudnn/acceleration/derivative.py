"""Attention's derivative in a program that differentiates itself: what follows from the scores and
the cotangent of the result, up to the gradients of queries, keys and values.

However it is written, it is taken for the derivative if it computes the derivative's values: it is
run with small random arrays, in float64, and compared with differences of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from .named import ROLES, Walk, rooted
from .operands import Operand
from .program import Program
from .region import Backward
from .sampled import Leaf, Part, check, renamed
from .scores import LAYOUT, Dims, Side, Unclear, moved, number
from .softmax import ROW, SUM, Follower
from .values import Equation, Value


def backward(
    program: Program,
    follower: Follower,
    forward: set[Equation],
    last: Value,
    of_query: int,
    operands: Sequence[Operand],
    biases: Sequence[tuple[int, Side]],
) -> Backward:
    """The derivative of the attention that ``forward`` computes. ``of_query``: the side of its
    first product that has the queries; ``operands``: queries, keys and values; ``biases``: what
    else has a gradient, and which input of the region it is. Raises Unclear."""
    walk = Walk(program, follower, forward, of_query)
    made = {e.outs[0]: e for e in walk.order}
    equations: set[Equation] = set()
    todo = [made[g] for g in walk.gradients]
    while todo:
        equation = todo.pop()
        if equation not in equations:
            equations.add(equation)
            todo += [made[v] for v in equation.ins if v in made]
    if not walk.gradients or len({*walk.gradients.values()}) != len(walk.gradients):
        raise Unclear("no gradients")
    everything = forward | equations
    targets = {value: walk.own(i) for value, i in walk.gradients.items()}
    results: list[_Result] = []
    for value in sorted({v for e in everything for v in e.outs} - {last, *targets}, key=_place):
        if program.used_outside(everything, value):
            if value not in walk.dims:
                raise Unclear(_READ)
            leaf, found = _of_bias(program, walk, value, everything, biases)
            targets[found.value] = leaf
            results.append(found)
            everything |= found.more
    leaves = {(e, i): walk.leaf(e, i) for e, i in walk.leaves if e in everything}
    result = follower.states[last]
    ends = frozenset(result.dims) - {None}
    cotangents = {leaf for leaf in leaves.values() if frozenset(leaf.dims) - {None} == ends}
    cotangents -= {walk.own(i) for i in range(len(ROLES))}
    if len({leaf.key for leaf in cotangents}) != 1:
        raise Unclear("no cotangent")
    cotangent = next(leaf for leaf in leaves.values() if leaf in cotangents)
    order = sorted((e for e in walk.order if e in everything), key=lambda e: e.at)
    if {*forward} - {*order, follower.product}:
        raise Unclear("a part of it is not followed")
    dtypes = {leaf: walk.dtypes[leaf.key] for leaf in leaves.values()}
    dims = {value: walk.resolved(dims) for value, dims in walk.dims.items()}
    zeroed = {mask for v in made for mask in follower.states.get(v, result).zeroed}
    if zeroed - result.zeroed:
        raise Unclear("probabilities that are 0 in its gradient alone")
    meanings = {e.outs[0]: follower.states.get(e.outs[0]) for e in forward}
    shifts = {v for v, state in meanings.items() if state and state.kind in (ROW, SUM)}
    sums = {v for v, state in follower.states.items() if state.kind == SUM}
    signs = {e.outs[0] for e in order if e.outs[0].dtype == bool and _compares_with_0(e, sums)}
    order = [follower.product, *order]
    check(Part(order, forward, last, cotangent, targets, dims, leaves, dtypes, shifts, signs))
    for value, i in walk.gradients.items():
        results.append(_of_operand(program, walk, value, i, operands[i], everything))
        everything |= results[-1].more
    root = walk.roots[cotangent.key]
    if root.made_by in everything:
        raise Unclear("its cotangent is computed inside of it")
    to_last = _Renamed(cotangent.dims, follower.states[last].dims, last.shape)
    found = Backward(everything - forward, root, to_last, [result[:-1] for result in results])
    if last.made_by is None or found.first.at < last.made_by.at:
        raise Unclear("its gradients are computed before its result")
    return found


_READ = "a value inside is used elsewhere"
_SAME = 1e-6  # of the factors of queries and of their gradient


def _compares_with_0(equation: Equation, sums: set[Value]) -> bool:
    return all(v in sums or number(v) == 0 for v in equation.ins)


class _Result(NamedTuple):
    """A gradient of the program, of which input, what brings that to the value's dimensions, and
    the equations that follow those of the derivative."""

    value: Value
    index: int
    renamed: _Renamed
    more: set[Equation]


def _place(value: Value) -> int:
    return -1 if value.made_by is None else value.made_by.at


def _of_bias(
    program: Program,
    walk: Walk,
    value: Value,
    inside: set[Equation],
    biases: Sequence[tuple[int, Side]],
) -> tuple[Leaf, _Result]:
    """The gradient of a bias: sums of that of the scores."""
    more: set[Equation] = set()
    leaves = dict.fromkeys(walk.leaf(*place) for place in walk.leaves)
    while True:
        dims = walk.resolved(walk.dims[value])
        for i, side in biases:
            for leaf in leaves:
                alike = [{*d} - {None} for d in (dims, side.dims, leaf.dims)]
                if alike[0] == alike[1] == alike[2] and _holds(walk.roots.get(leaf.key), side):
                    return leaf, _Result(value, i, _Renamed(side.dims, dims, value.shape), more)
        users = {user for user in value.users if user not in inside}
        if program.is_read(value) or len(users) != 1:
            raise Unclear(_READ)
        (user,) = users
        if user not in walk.order or not (user.casts or user.name in (*LAYOUT, "reduce_sum")):
            raise Unclear(_READ)
        more |= {user}
        (value,) = user.outs


def _holds(sum_: Value | None, side: Side) -> bool:
    """Whether a value is a sum of which a bias is a term."""
    if sum_ is None:
        return False
    root, _ = rooted(sum_, ())
    made = root.made_by
    return root is rooted(side.value, ())[0] or (
        made is not None and made.name == "add" and any(_holds(v, side) for v in made.ins)
    )


@dataclass(frozen=True)
class _Renamed:
    """Brings an array to other dimensions, by the axes that they have, and scales it."""

    old: Dims
    new: Dims
    shape: tuple[int, ...]
    factor: float = 1.0

    def __call__(self, x: Any) -> Any:
        x = renamed(x, self.old, self.new)
        x = x if self.factor == 1 else x * jnp.asarray(self.factor, x.dtype)
        return x.reshape(self.shape)


def _of_operand(
    program: Program, walk: Walk, value: Value, i: int, operand: Operand, inside: set[Equation]
) -> _Result:
    """The gradient of queries, keys or values as cuDNN takes them: after the scale that precedes
    the product, where the program has it."""
    dims, factor, more = walk.resolved(walk.dims[value]), 1.0, set()
    best = value, dims, factor, set()
    at, now, names = value, 1.0, dims
    while operand.factor != 1 and not program.is_read(at) and len(at.users) == 1:
        (user,) = at.users
        others = [number(v) for v in user.ins if v is not at]
        if user in inside or user.inner or len(user.outs) != 1:
            break
        if user.name in LAYOUT and (found := moved(user, names)) is not None:
            names = found
        elif user.name in ("mul", "div") and len(others) == 1 and others[0]:
            if user.name == "div" and user.ins[0] is not at:
                break
            now = now * others[0] if user.name == "mul" else now / others[0]
        elif not user.casts:
            break
        more = more | {user}
        (at,) = user.outs
        if math.isclose(now, operand.factor, rel_tol=_SAME):
            best = at, names, now, more
            break
    at, names, now, more = best
    by = 1.0 if math.isclose(now, operand.factor, rel_tol=_SAME) else now / operand.factor
    axes: list[Any] = [None] * len(operand.value.shape)
    for axis, name in zip(operand.at, walk.names[i], strict=True):
        axes[axis] = name
    return _Result(at, i, _Renamed(tuple(axes), names, at.shape, by), more)
