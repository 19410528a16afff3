"""Layer and RMS normalizations in a program, by their meaning: what follows from one array through
its mean, its squares and their means, in one pass or two, in any dtype."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ..ops import layer_norm, rms_norm
from .following import Dims, Follower, Side, State, Unclear, folded, rooted, wide
from .program import Missed, Program
from .region import USED, Region
from .values import LAYOUT, Equation, Value, between, number

X, SQUARE, SUM, MEAN, SUM2, MEAN2 = "x", "x^2", "sum", "mean", "sum^2", "mean^2"
MEAN_SQUARED, CENTERED, DISTANCE, DISTANCES = "m^2", "x - mean", "distance", "distances"
VARIANCE, EPSILON = "variance", "variance + epsilon"
DEVIATION, INVERSE = "deviation", "1 / deviation"
X_SCALED, MEAN_SCALED, NORM = "x / deviation", "mean / deviation", "normalized"

_SUMMED = {X: SUM, SQUARE: SUM2, DISTANCE: DISTANCES}
_MEANS = {SUM: MEAN, SUM2: MEAN2, DISTANCES: VARIANCE}
_OF_ONE = {
    ("square", X): SQUARE,
    ("square", MEAN): MEAN_SQUARED,
    ("square", CENTERED): DISTANCE,
    ("sqrt", EPSILON): DEVIATION,
    ("rsqrt", EPSILON): INVERSE,
    ("reciprocal", DEVIATION): INVERSE,
}
"""(operation, what its operand is) -> what its result is."""
_SCALED = {CENTERED: NORM, X: X_SCALED, MEAN: MEAN_SCALED}
"""What a value is, divided by the deviation."""


@dataclass(frozen=True)
class _Meaning(State):
    """What a value is. ``affine``: what it was multiplied by (and, after the norm, had added), in
    order; ``centered``: whether the mean was subtracted."""

    epsilon: float = 0.0
    centered: bool = False
    affine: tuple[tuple[str, Side], ...] = ()


class _Norm(Follower):
    """The meanings of the values that follow from one array."""

    states: dict[Value, _Meaning]

    def __init__(self, root: Value) -> None:
        self.root = root
        self.axes: set[int] | None = None
        dims = wide(range(len(root.shape)), root.shape)
        super().__init__({root: _Meaning(X, dims)}, {*root.users})
        self.norms = [v for v, state in self.states.items() if state.kind == NORM]

    def reduced(self, name: str, state: _Meaning, over: set[Any], dims: Dims) -> _Meaning | None:
        summed = name == "reduce_sum" and state.kind in _SUMMED and over
        if not summed or self.axes not in (None, over):
            return None
        self.axes = over
        return _Meaning(_SUMMED[state.kind], dims)

    def elementwise(
        self, equation: Equation, given: list[_Meaning | None], dims: Dims
    ) -> _Meaning | None:
        name = equation.operation
        states = [s for s in given if s is not None]
        others = [v for v, s in zip(equation.ins, given, strict=True) if s is None]
        first, kinds = states[0], tuple(s.kind for s in states)
        kind = _OF_ONE.get((name, first.kind))
        if kind is not None:
            return replace(first, kind=kind, dims=dims)
        if len(states) == len(others) == 1:
            factor = equation.factor_of(next(v for v in equation.ins if v is not others[0]))
            return self._with_another(name, first, others[0], factor, dims)
        if len(states) != 2:
            return None
        second = states[1]
        if name == "sub" and kinds == (MEAN2, MEAN_SQUARED):
            return _Meaning(VARIANCE, dims)
        if name == "sub" and kinds == (X, MEAN):
            return _Meaning(CENTERED, dims)
        if name == "sub" and kinds == (X_SCALED, MEAN_SCALED) and first.affine == second.affine:
            return replace(first, kind=NORM, dims=dims, centered=True)
        if name == "mul" and first.kind == INVERSE:
            first, second = second, first
        by = {"mul": INVERSE, "div": DEVIATION}.get(name)
        kind = _SCALED.get(first.kind)
        if second.kind != by or kind is None:
            return None
        if kind == X_SCALED and not second.centered:
            kind = NORM  # by the root of the mean square
        elif kind == NORM and not second.centered:
            return None
        return replace(second, kind=kind, dims=dims)

    def _with_another(
        self, name: str, state: _Meaning, other: Value, factor: float | None, dims: Dims
    ) -> _Meaning | None:
        kind, known = state.kind, number(other)
        if kind in _MEANS and known is not None and self.axes is not None:
            count = math.prod(self.root.shape[a] for a in self.axes)
            same = factor is not None and math.isclose(factor * count, 1, rel_tol=1e-5)
            return _Meaning(_MEANS[kind], dims) if same else None
        if kind == VARIANCE and name == "max" and known == 0:
            return replace(state, dims=dims)
        if kind in (VARIANCE, MEAN2) and name == "add" and known is not None and known > 0:
            return _Meaning(EPSILON, dims, known, kind == VARIANCE)
        scales = name == "mul" and kind in (INVERSE, NORM, X_SCALED, MEAN_SCALED)
        if not scales and (name, kind) != ("add", NORM):
            return None
        term = self._term(other, dims)
        return (
            None
            if term is None
            else replace(state, dims=dims, affine=(*state.affine, (name, term)))
        )

    def _term(self, other: Value, dims: Dims) -> Side | None:
        """A factor or a bias with one value for each of the normalized elements."""
        # As its author holds it: cuDNN's engines take one dtype.
        small, at = rooted(other, (*range(len(dims)),), lambda cast: cast.growth >= 0)
        # Dimensions of the value along which the norm does not vary yet are those of the root.
        named = tuple(None if i is None else dims[i] if dims[i] is not None else i for i in at)
        if self.axes is None or not {*named} - {None} <= self.axes:
            return None
        return Side(small, named)


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> Iterator[Region]:
    """The normalizations of a program; ``missed`` gets what is nearly one."""
    nearly = []
    roots = dict.fromkeys(_roots(program)) if "normalization" in kinds else ()
    for norm in map(_Norm, roots):
        if not norm.norms:
            continue
        try:
            yield _region(program, norm, taken)
        except Unclear as why:
            nearly.append((norm.norms[0].made_by, f"a normalization: {why}"))
    missed += [one for one in nearly if one[0] not in taken]


def _roots(program: Program) -> Iterator[Value]:
    for equation in program.equations:
        if equation.name == "reduce_sum":
            value = _uncast(equation.ins[0])
            made = value.made_by
            if made is not None and made.name in ("mul", "square", "integer_pow", "pow"):
                value = _uncast(made.ins[0])
            if value.shape and value.is_float:
                yield value


def _uncast(value: Value) -> Value:
    while (made := value.made_by) is not None and made.name == "convert_element_type":
        if not made.ins[0].is_float:
            break
        value = made.ins[0]
    return value


def _region(program: Program, norm: _Norm, taken: set[Equation]) -> Region:
    root, axes = norm.root, norm.axes
    last = program.last_of(norm.norms, root.dtype, but=LAYOUT)
    state, rank = norm.states[last], len(root.shape)
    assert axes is not None
    if last.dtype != root.dtype:
        raise Unclear(
            f"its result is {last.dtype}, and its operand {root.dtype}: cast the result (and the "
            f"scale) to {root.dtype}, or the operand before"
        )
    if state.dims != wide(range(rank), root.shape):
        raise Unclear("its dimensions are in another order")
    start = min(axes)
    if [i for i in range(start, rank) if root.shape[i] != 1] != sorted(axes):
        raise Unclear("it is not over the last dimensions")
    # Casts of its operand stay outside.
    known = {v for v, s in norm.states.items() if s.kind != X}
    equations = between(last, known.__contains__)
    if equations & taken:
        raise Unclear("a part of it belongs to another region")
    for value in (v for e in sorted(equations, key=lambda e: e.at) for v in e.outs):
        if value is not last and program.used_outside(equations, value):
            raise Unclear(USED.format(f"{norm.states[value].kind} is"))
    if not state.centered and any(how == "add" for how, _ in state.affine):
        raise Unclear("an RMS normalization with a bias, which cuDNN does not run")
    axis, shape = (*range(start, rank),), root.shape[start:]

    def emit(x: Any, *terms: Any) -> Any:
        pairs = zip(state.affine, terms, strict=True)
        scale, bias = folded(
            (how, jnp.broadcast_to(side.along(y, axis), shape)) for (how, side), y in pairs
        )
        if state.centered:
            return layer_norm(x, scale, bias, axis=axis, epsilon=state.epsilon)
        return rms_norm(x, scale, axis=axis, epsilon=state.epsilon)

    kind = "layer norm" if state.centered else "RMS norm"
    what = f"{kind} of {root.dtype} {[*root.shape]} over {[*shape]}"
    inputs = [root, *(side.value for _, side in state.affine)]
    return Region("normalization", equations, inputs, last, emit, what)
