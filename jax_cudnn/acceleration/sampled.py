"""Whether values of a program are the gradients of its result, by small random arrays: equations
whose dimensions have names compute them for any sizes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from .following import REDUCTIONS, Dims, Unclear, any_cast, rooted
from .softmax import HIDING
from .values import LAYOUT, Equation, Value, elementwise, laid_out, number, renamed

_SIZES = (3, 2, 5, 4)  # of small arrays, by axis in turn
_STEP = 1e-5  # of differences
_AGREES = 1e-5  # relative
_DIRECTIONS = 2  # for each gradient
_DRAWS, _ATTEMPTS = 2, 8  # that are finite, and all
_MOST = 1024  # forms that are remembered
_SCALES = (1e6, 1e-6)  # of the cotangent
_JUMPS = ("clamp", "max", "min", "is_finite", "sign", "round", "floor", "ceil", "abs", "rem")
_JUMPS += ("select_n", "eq", "ne", "lt", "le", "gt", "ge", "nextafter", "population_count")


@dataclass(frozen=True)
class Leaf:
    """An array that enters, before it was moved, cast and broadcast, with the axis of each of its
    dimensions."""

    key: Hashable
    dims: Dims
    root: Value = field(compare=False)

    @property
    def axes(self) -> set[Any]:
        return {*self.dims} - {None}


@dataclass(frozen=True)
class Part:
    """Equations in order, of which ``forward`` compute ``last``, and the others ``targets`` of its
    ``cotangent``: its gradients by these leaves. With the axes of what they compute, and the arrays
    that enter, by equation and operand. A softmax does not depend on its
    ``shifts``, and ``signs`` are those of sums of exponentials: they are known."""

    equations: list[Equation]
    forward: set[Equation]
    last: Value
    cotangent: Leaf
    targets: Mapping[Value, Leaf]
    dims: Mapping[Value, Dims]
    leaves: Mapping[tuple[Equation, int], Leaf]
    shifts: Collection[Value]
    signs: Collection[Value]


def check(part: Part) -> None:
    """Raises Unclear if its ``targets`` are not the gradients of its result: compares them with
    differences along random directions. Layers that are written alike are compared once."""
    key = _form(part)
    if key not in _refused:
        if len(_refused) >= _MOST:
            _refused.clear()
        try:
            _check(part)
            _refused[key] = ""
        except Unclear as why:
            _refused[key] = str(why)
    if _refused[key]:
        raise Unclear(_refused[key])


_refused: dict[Hashable, str] = {}


def _form(part: Part) -> Hashable:
    """What is equal for equations that are written alike."""
    names: dict[Any, int] = {}
    leaves: dict[Leaf, int] = {}
    made: dict[Value, int] = {}

    def of(dims: Dims) -> tuple[int, ...]:
        return tuple(names.setdefault(d, len(names)) for d in dims)

    def entering(leaf: Leaf) -> Hashable:
        return leaves.setdefault(leaf, len(leaves)), of(leaf.dims), str(leaf.root.dtype)

    found: list[Hashable] = []
    for equation in part.equations:
        (out,), ins = equation.outs, []
        for i, v in enumerate(equation.ins):
            leaf = part.leaves.get((equation, i))
            known = number(v) if v not in made and leaf is None else None
            ins.append(made.get(v, entering(leaf) if leaf else (known, str(v.dtype))))
        made[out] = len(made)
        marks = equation in part.forward, out in part.shifts, out in part.signs
        found.append((equation.name, str(equation.params), *ins, of(part.dims[out]), *marks))
    ends = [(made[value], entering(leaf)) for value, leaf in part.targets.items()]
    return (*found, made[part.last], entering(part.cotangent), *ends)


def _check(part: Part) -> None:
    sizes: dict[Any, int] = {}
    leaves = dict.fromkeys(part.leaves.values())
    for name in dict.fromkeys(d for leaf in leaves for d in leaf.dims):
        sizes[name] = 1 if name is None else _SIZES[len(sizes) % len(_SIZES)]
    for equation in part.equations:
        _refuse_jumps(part, equation)
    done = 0
    for draw in range(_ATTEMPTS):
        random = np.random.default_rng(draw)
        arrays = {
            leaf: _drawn(random, tuple(sizes[d] for d in leaf.dims), leaf.root.dtype)
            for leaf in leaves
        }
        env = _run(part, part.equations, arrays)
        if all(np.isfinite(env[v]).all() for v in (part.last, *part.targets)):
            _compare(part, arrays, env, random)
            done += 1
        if done == _DRAWS:
            return
    raise Unclear("its gradient is not finite")


def _refuse_jumps(part: Part, equation: Equation) -> None:
    """Raises Unclear for what may compute something else of values that no sample has: operations
    with jumps and kinks, of what follows from the arrays. A mask decides nothing about them, and
    the derivative of a maximum is where a value is equal to it."""
    walked = [v for v in equation.ins if v in part.dims]
    if equation.name not in _JUMPS or not walked or equation.outs[0] in part.shifts:
        return
    if equation.outs[0] in part.signs:
        return
    condition = equation.ins[0]
    if equation.name == "select_n" and (condition not in part.dims or condition in part.signs):
        return
    if equation.name == "eq" and len(walked) == len(equation.ins):
        made = [rooted(v, through=any_cast)[0].made_by for v in walked]
        if any(e is not None and e.name == "reduce_max" for e in made):
            return
    low = [number(v) for v in equation.ins if v not in part.dims]
    if equation.name == "max" and low and all(n is not None and n <= HIDING for n in low):
        return
    raise Unclear(f"{equation.name} of values that it computes")


def _compare(
    part: Part,
    arrays: dict[Leaf, np.ndarray],
    env: dict[Value, np.ndarray],
    random: np.random.Generator,
) -> None:
    """Raises Unclear if gradients are not the differences of the result, or not linear in its
    cotangent."""
    cotangent, last = part.cotangent, part.last
    first = [e for e in part.equations if e in part.forward]
    onto = renamed(arrays[cotangent], cotangent.dims, part.dims[last])
    least = _STEP * float(np.sum(np.abs(onto * env[last])))  # what rounding makes of a zero
    for scale in _SCALES:
        scaled = _run(part, part.equations, {**arrays, cotangent: scale * arrays[cotangent]})
        for value in part.targets:
            far = np.linalg.norm(scaled[value] / scale - env[value])
            if not far <= _AGREES * (np.linalg.norm(env[value]) + least):
                raise Unclear("a gradient is not linear in the cotangent")
    for value, leaf in part.targets.items():
        gradient = renamed(env[value], part.dims[value], leaf.dims)
        for _ in range(_DIRECTIONS):
            way = random.standard_normal(arrays[leaf].shape)
            ends = [
                _run(part, first, {**arrays, leaf: arrays[leaf] + sign * _STEP * way})[last]
                for sign in (1, -1)
            ]
            want = float(np.sum(onto * (ends[0] - ends[1])) / (2 * _STEP))
            size = float(np.linalg.norm(gradient) * np.linalg.norm(way)) + abs(want)
            if not abs(float(np.sum(gradient * way)) - want) <= _AGREES * (size + least):
                raise Unclear("a gradient has other values")


def _drawn(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    if jnp.issubdtype(dtype, jnp.floating):
        return random.standard_normal(shape)
    if dtype.kind != "b":
        return random.integers(-2, 3, shape).astype(float)
    places = sum(np.indices(shape)) + random.integers(3)  # no line of it is all True or all False
    return places % 3 != 0 if random.integers(2) else places % 3 == 0


def _run(
    part: Part, equations: list[Equation], arrays: Mapping[Leaf, np.ndarray]
) -> dict[Value, np.ndarray]:
    """What equations compute in float64."""
    env: dict[Value, np.ndarray] = {}
    for equation in equations:
        with np.errstate(all="ignore"):
            env[equation.outs[0]] = _computed(part, equation, env, arrays)
    return env


def _computed(part: Part, equation: Equation, env: Any, arrays: Any) -> np.ndarray:
    (out,), name, first = equation.outs, equation.name, equation.ins[0]
    dims = part.dims[out]
    if name in LAYOUT:
        return laid_out(equation, env[first])
    if name in REDUCTIONS:
        return REDUCTIONS[name](env[first], axis=equation.params["axes"])
    operands, names = [], []
    for i, v in enumerate(equation.ins):
        leaf = part.leaves.get((equation, i))
        if v in env:
            x, axes = env[v], part.dims[v]
        elif leaf is not None:
            x, axes = arrays[leaf], leaf.dims
        else:
            x, axes = np.asarray(number(v)).astype(bool if v.dtype == bool else float), ()
        if axes and name != "dot_general":  # its own dimensions, in the order of the result
            axes, old = tuple(d if d in axes else None for d in dims), axes
            x = renamed(x, old, axes)
        operands.append(x)
        names.append(axes)
    if name == "dot_general":
        return _product(operands, names, dims)
    dtype = np.float64 if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype
    found = elementwise(equation, operands, dtype)
    if found is None:
        raise Unclear(f"{name} in its gradient")
    return found


def _product(operands: list[np.ndarray], names: list[Dims], dims: Dims) -> np.ndarray:
    given: list[Any] = []
    numbers: dict[Any, int] = {}
    for x, axes in zip(operands, names, strict=True):
        kept = tuple(d for d in axes if d is not None)
        given += [renamed(x, axes, kept), [numbers.setdefault(d, len(numbers)) for d in kept]]
    out = tuple(d for d in dims if d is not None)
    return renamed(np.einsum(*given, [numbers[d] for d in out]), out, dims)
