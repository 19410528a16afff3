"""Layer and RMS normalizations in a program, by their meaning: what follows from one array through
its mean, its squares and their means, in one pass or two, in any dtype."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..ops import layer_norm, rms_norm
from .program import Missed, Program
from .region import Region
from .scores import (
    LAYOUT,
    Dims,
    Side,
    Unclear,
    follow,
    moved,
    narrowed,
    number,
    unchanged,
    unwidened,
)
from .values import ELEMENTWISE, Equation, Value, between

X, SQUARE, SUM, MEAN, SUM2, MEAN2, MEAN_SQUARED = (
    "x",
    "x^2",
    "sum",
    "mean",
    "sum^2",
    "mean^2",
    "m^2",
)
CENTERED, DISTANCE, SUM_OF_DISTANCES, VARIANCE = "x - mean", "distance", "distances", "variance"
WITH_EPSILON, DEVIATION, INVERSE = "variance + epsilon", "deviation", "1 / deviation"
X_SCALED, MEAN_SCALED, NORM = "x / deviation", "mean / deviation", "normalized"
_SQUARED = {X: SQUARE, MEAN: MEAN_SQUARED, CENTERED: DISTANCE}
_SUMMED = {X: SUM, SQUARE: SUM2, DISTANCE: SUM_OF_DISTANCES}
_MEANS = {SUM: MEAN, SUM2: MEAN2, SUM_OF_DISTANCES: VARIANCE}
_USED = (
    "its {} is used elsewhere, too; if that is a backward pass, put accelerate around the function "
    "that is differentiated: jax.grad(jc.accelerate(loss))"
)


@dataclass(frozen=True)
class _State:
    """What a value is. ``affine``: what it was multiplied by (and, after the norm, had added), in
    order; ``centered``: whether the mean was subtracted."""

    kind: str
    dims: Dims
    epsilon: float = 0.0
    centered: bool = False
    affine: tuple[tuple[str, Side], ...] = ()


class _Follower:
    """The states of the values that follow from one array."""

    def __init__(self, root: Value) -> None:
        dims = tuple(i if n != 1 else None for i, n in enumerate(root.shape))
        self.root = root
        self.axes: frozenset[int] | None = None
        self.states: dict[Value, _State] = {root: _State(X, dims)}
        follow(root, self._follow)

    def _follow(self, equation: Equation) -> _State | None:
        state = self._state(equation)
        if state is not None:
            self.states[equation.outs[0]] = state
        return state

    def _state(self, equation: Equation) -> _State | None:
        name = equation.name
        given = [self.states.get(v) for v in equation.ins]
        first = given[0]
        if name in LAYOUT and first is not None:
            dims = moved(equation, first.dims)
            return None if dims is None else _with(first, dims=dims)
        if equation.casts:
            wide = jnp.issubdtype(equation.outs[0].dtype, jnp.floating)
            return first if wide else None
        if name == "reduce_sum" and first is not None and first.kind in _SUMMED:
            axes = equation.params["axes"]
            over = frozenset(d for a in axes if (d := first.dims[a]) is not None)
            whole = all(first.dims[a] is not None or equation.ins[0].shape[a] == 1 for a in axes)
            if not whole or not over or self.axes not in (None, over):
                return None
            self.axes = over
            dims = tuple(d for i, d in enumerate(first.dims) if i not in axes)
            return _State(_SUMMED[first.kind], dims)
        if name not in ELEMENTWISE:
            return None
        same = unchanged(equation)
        if same is not None and equation.ins[same].shape == equation.outs[0].shape:
            return given[same]
        dims = self._common(equation, given)
        return None if dims is None else self._meaning(equation, given, dims)

    def _common(self, equation: Equation, given: list[_State | None]) -> Dims | None:
        dims: list[Any] = [None] * len(equation.outs[0].shape)
        for state in given:
            for i, d in enumerate(state.dims if state is not None else ()):
                if d is not None and dims[i] not in (None, d):
                    return None
                dims[i] = dims[i] if d is None else d
        return tuple(dims)

    def _meaning(self, equation: Equation, given: list[_State | None], dims: Dims) -> _State | None:
        name = equation.name
        states = [s for s in given if s is not None]
        others = [v for v, s in zip(equation.ins, given, strict=True) if s is None]
        first, kinds = states[0], sorted(s.kind for s in states)
        on_left = given[0] is not None
        if len(states) == 1 and len(others) == 1:
            return self._with_another(name, first, others[0], on_left, dims)
        if len(states) == 1:
            kind = first.kind
            if name == "square" or (name == "integer_pow" and equation.params["y"] == 2):
                return _State(_SQUARED[kind], dims) if kind in _SQUARED else None
            if kind == WITH_EPSILON and name in ("rsqrt", "sqrt"):
                return _with(first, kind=INVERSE if name == "rsqrt" else DEVIATION, dims=dims)
            if kind == DEVIATION and name == "integer_pow" and equation.params["y"] == -1:
                return _with(first, kind=INVERSE, dims=dims)
            return None
        if len(states) != 2:
            return None
        second = states[1]
        if name == "mul" and equation.ins[0] is equation.ins[1]:
            return _State(_SQUARED[first.kind], dims) if first.kind in _SQUARED else None
        if name == "sub":
            pair = first.kind, second.kind
            if pair == (MEAN2, MEAN_SQUARED):
                return _State(VARIANCE, dims)
            if pair == (X, MEAN):
                return _State(CENTERED, dims)
            if pair == (X_SCALED, MEAN_SCALED) and first.affine == second.affine:
                return _with(first, kind=NORM, dims=dims, centered=True)
        if name == "mul" and INVERSE in kinds and kinds.count(INVERSE) == 1:
            inverse, other = (first, second) if first.kind == INVERSE else (second, first)
            return self._scaled(inverse, other, dims)
        if name == "div" and second.kind == DEVIATION:
            return self._scaled(second, first, dims)
        return None

    def _scaled(self, inverse: _State, other: _State, dims: Dims) -> _State | None:
        """``other / deviation``."""
        kind = {CENTERED: NORM, X: X_SCALED, MEAN: MEAN_SCALED}.get(other.kind)
        if kind == X_SCALED and not inverse.centered:
            kind = NORM  # by the root of the mean square
        elif kind == NORM and not inverse.centered:
            return None
        return None if kind is None else _with(inverse, kind=kind, dims=dims)

    def _with_another(
        self, name: str, state: _State, other: Value, on_left: bool, dims: Dims
    ) -> _State | None:
        kind, known = state.kind, number(other)
        if kind in _MEANS and known is not None and self.axes is not None:
            count = math.prod(self.root.shape[a] for a in self.axes)
            by = known if name == "div" and on_left else 1 / known if name == "mul" and known else 0
            return _State(_MEANS[kind], dims) if math.isclose(by, count, rel_tol=1e-5) else None
        if kind == VARIANCE and name == "max" and known == 0:
            return _with(state, dims=dims)
        if kind in (VARIANCE, MEAN2) and name == "add" and known is not None and known > 0:
            return _State(WITH_EPSILON, dims, known, kind == VARIANCE)
        if kind == WITH_EPSILON and name == "pow" and on_left and known in (0.5, -0.5):
            return _with(state, kind=DEVIATION if known > 0 else INVERSE, dims=dims)
        if kind == X and name == "pow" and on_left and known == 2:
            return _State(SQUARE, dims)
        if kind == DEVIATION and name == "div" and not on_left and known == 1:
            return _with(state, kind=INVERSE, dims=dims)
        if kind not in (INVERSE, NORM, X_SCALED, MEAN_SCALED):
            return None
        if name == "mul" or (kind == NORM and name in ("add", "add_any")):
            term = self._term(other, dims)
            how = "mul" if name == "mul" else "add"
            return (
                None
                if term is None
                else _with(state, dims=dims, affine=(*state.affine, (how, term)))
            )
        return None

    def _term(self, other: Value, dims: Dims) -> Side | None:
        """A factor or a bias with one value for each of the normalized elements."""
        places = (*range(len(dims)),) if other.shape else ()
        small, at = narrowed(other, places)
        while (made := small.made_by) is not None and made.casts:
            if made.ins[0].dtype.itemsize > small.dtype.itemsize:
                break  # else it is as its author holds it: cuDNN's engines take one dtype
            small, at = narrowed(made.ins[0], at)
        # Dimensions of the value along which the norm does not vary yet are those of the root.
        named = tuple(None if i is None else dims[i] if dims[i] is not None else i for i in at)
        if self.axes is None or not {d for d in named if d is not None} <= self.axes:
            return None
        return Side(small, named)


def _with(state: _State, **changes: Any) -> _State:
    return _State(**{**vars(state), **changes})


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> list[Region]:
    """The normalizations of a program; ``missed`` gets what is nearly one."""
    if "normalization" not in kinds:
        return []
    regions, nearly, roots = [], [], dict.fromkeys(_roots(program))
    for root in roots:
        follower = _Follower(root)
        if not any(state.kind == NORM for state in follower.states.values()):
            continue
        try:
            region = _region(program, follower, taken)
        except Unclear as why:
            made = [v.made_by for v, s in follower.states.items() if s.kind == NORM]
            nearly.append((made[0], f"a normalization: {why}"))
            continue
        taken |= region.equations
        regions.append(region)
    missed += [one for one in nearly if one[0] not in taken]
    return regions


def _roots(program: Program) -> Any:
    for equation in program.equations:
        if equation.name == "reduce_sum":
            value = _uncast(equation.ins[0])
            made = value.made_by
            if made is not None and made.name in ("mul", "square", "integer_pow", "pow"):
                value = _uncast(made.ins[0])
            if len(value.shape) and jnp.issubdtype(value.dtype, jnp.floating):
                yield value


def _uncast(value: Value) -> Value:
    while (made := value.made_by) is not None and made.name == "convert_element_type":
        if not jnp.issubdtype(made.ins[0].dtype, jnp.floating):
            break
        value = made.ins[0]
    return value


def _region(program: Program, follower: _Follower, taken: set[Equation]) -> Region:
    root, axes = follower.root, follower.axes
    norms = [v for v, s in follower.states.items() if s.kind == NORM]
    last = min(norms, key=lambda v: v.made_by.at if v.made_by else 0)
    while not program.is_read(last) and len({*last.users}) == 1:
        after = last.users[0].outs[0] if len(last.users[0].outs) == 1 else None
        if after not in norms or last.users[0].name in LAYOUT:
            break
        last = after
    last = unwidened(last, root.dtype, norms)
    state = follower.states[last]
    assert axes is not None
    rank = len(root.shape)
    if last.dtype != root.dtype:
        raise Unclear(
            f"its result is {last.dtype}, and its operand {root.dtype}: cast the result (and the "
            f"scale) to {root.dtype}, or the operand before"
        )
    if state.dims != tuple(i if n != 1 else None for i, n in enumerate(root.shape)):
        raise Unclear("its dimensions are in another order")
    order = sorted(axes)
    if [i for i in range(order[0], rank) if root.shape[i] != 1] != order:
        raise Unclear("it is not over the last dimensions")
    # Casts of its operand stay outside.
    known = {v for v, s in follower.states.items() if s.kind != X}
    equations = between(last, known.__contains__)
    if equations & taken:
        raise Unclear("a part of it belongs to another region")
    for value in {v for e in equations for v in e.outs} - {last}:
        if program.used_outside(equations, value):
            raise Unclear(_USED.format(follower.states[value].kind))
    axis = (*range(order[0], rank),)
    shape = root.shape[order[0] :]
    sides = [term for _, term in state.affine]

    def emit(x: Any, *terms: Any) -> Any:
        scale = bias = None
        for (how, side), term in zip(state.affine, terms, strict=True):
            y = _of_axes(term, side, order[0], shape)
            if how == "add":
                bias = y if bias is None else bias + y
            else:
                scale = y if scale is None else scale * y
                bias = None if bias is None else bias * y
        if state.centered:
            return layer_norm(x, scale, bias, axis=axis, epsilon=state.epsilon)
        y = rms_norm(x, scale, axis=axis, epsilon=state.epsilon)
        return y if bias is None else (y + bias).astype(x.dtype)

    if not state.centered and any(how == "add" for how, _ in state.affine):
        raise Unclear("an RMS normalization with a bias, which cuDNN does not run")
    kind = "layer norm" if state.centered else "RMS norm"
    what = f"{kind} of {root.dtype} {[*root.shape]} over {[*shape]}"
    inputs = [root, *(side.value for side in sides)]
    return Region("normalization", equations, inputs, last, emit, what)


def _of_axes(x: Any, side: Side, start: int, shape: tuple[int, ...]) -> Any:
    x = x[tuple(slice(None) if d is not None else 0 for d in side.dims)]
    axes = [d - start for d in side.dims if d is not None]
    x = jnp.transpose(x, [*np.argsort(axes)])
    return jnp.broadcast_to(x.reshape([n if i in axes else 1 for i, n in enumerate(shape)]), shape)
