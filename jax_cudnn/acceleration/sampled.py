"""Whether values of a program are the gradients of its result, by small random arrays: equations
whose dimensions have names compute them for any sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .known import elementwise
from .scores import LAYOUT, Dims, Unclear, number
from .values import Equation, Value

REDUCTIONS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}
_SIZES = (3, 2, 5, 4)  # of small arrays, by axis in turn
_STEP, _DIRECTIONS, _DRAWS, _AGREES = 1e-5, 2, 6, 1e-5


@dataclass(frozen=True)
class Leaf:
    """An array that enters, before it was moved, cast and broadcast, with the axis of each of its
    dimensions."""

    key: Hashable
    dims: Dims


@dataclass(frozen=True)
class Part:
    """Equations in order, with the axes of what they compute, the arrays that enter, by equation
    and operand, and the dtypes of those."""

    equations: list[Equation]
    dims: Mapping[Value, Dims]
    leaves: Mapping[tuple[Equation, int], Leaf]
    dtypes: Mapping[Leaf, Any]


def check(
    part: Part,
    forward: set[Equation],
    cotangent: Leaf,
    last: Value,
    targets: Mapping[Value, Leaf],
) -> None:
    """Raises Unclear if ``targets`` are not the gradients of ``last``, which ``forward`` computes,
    by these leaves: compares them with differences along random directions."""
    sizes: dict[Any, int] = {}
    for name in dict.fromkeys(d for leaf in part.dtypes for d in leaf.dims):
        sizes[name] = 1 if name is None else _SIZES[len(sizes) % len(_SIZES)]
    for draw in range(_DRAWS):
        random = np.random.default_rng(draw)
        arrays = {
            leaf: _drawn(random, tuple(sizes[d] for d in leaf.dims), dtype)
            for leaf, dtype in part.dtypes.items()
        }
        env = _run(part, part.equations, arrays)
        if all(np.isfinite(env[v]).all() for v in (last, *targets)):
            break
    else:
        raise Unclear("its gradient is not finite")
    first = [e for e in part.equations if e in forward]
    onto = renamed(arrays[cotangent], cotangent.dims, part.dims[last])
    least = _STEP * float(np.sum(np.abs(onto * env[last])))  # what rounding makes of a zero
    for value, leaf in targets.items():
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


def renamed(x: Any, old: Dims, new: Dims) -> Any:
    """An array with its axes in another order, and one element where a dimension has none."""
    left = [d for d in old if d is not None]
    x = x.reshape([n for n, d in zip(x.shape, old, strict=True) if d is not None])
    x = x.transpose([left.index(d) for d in new if d is not None])
    sizes = iter(x.shape)
    return x.reshape([1 if d is None else next(sizes) for d in new])


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
    if name == "broadcast_in_dim":
        x, at = env[first], equation.params["broadcast_dimensions"]
        return x.reshape([x.shape[at.index(i)] if i in at else 1 for i in range(len(dims))])
    if name == "transpose":
        return env[first].transpose(equation.params["permutation"])
    if name in LAYOUT:
        return renamed(env[first], part.dims[first], dims)
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
    if name == "reduce_precision":
        return operands[0]
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
