"""What the values are that follow from one: the axes along which they and the arrays that meet them
vary, and what each equation makes of them (:class:`Follower`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from .values import ELEMENTWISE, LAYOUT, VARYING, Equation, Value, number, renamed

Dims = tuple[Any, ...]
"""For each dimension of an array the axis along which it varies, or None."""


class Unclear(Exception):
    """Why equations are not what can be replaced, and what to change."""


@dataclass(frozen=True)
class Side:
    """An array that meets others, and along which of their axes it varies."""

    value: Value
    dims: Dims
    factor: float = 1.0
    negated: bool = False

    @property
    def axes(self) -> set[Any]:
        return {*self.dims} - {None}

    def along(self, x: Any, axes: Sequence[Any]) -> Any:
        """The array with a dimension for each of these axes."""
        x = x[tuple(0 if d is None else slice(None) for d in self.dims)]
        return renamed(x, [d for d in self.dims if d is not None], axes)


@dataclass(frozen=True)
class Operand:
    """An operand of a product, as it is ``given`` to it, and the ``value`` that it was before it
    was widened, scaled and repeated. Each of their dimensions has the name of an axis of the
    scores, or of features: ("H", i) of queries and keys, ("E", i) of values. ``repeated``: how
    often, by axis."""

    given: Value
    given_dims: Dims
    value: Value
    dims: Dims
    factor: float
    repeated: dict[Any, int]


def folded(affine: Iterable[tuple[str, Any]]) -> tuple[Any, Any]:
    """The scale and the bias that factors ("mul") and terms ("add") are, in order; None without."""
    scale = bias = None
    for how, y in affine:
        if how == "add":
            bias = y if bias is None else bias + y
        else:
            scale = y if scale is None else scale * y
            bias = None if bias is None else bias * y
    return scale, bias


def transposed_dims(equation: Equation, dims: Dims) -> Dims | None:
    """The dims of the result of an operation that moves dimensions; None if it mixes them."""
    sources = equation.sources
    return None if sources is None else tuple(None if i is None else dims[i] for i in sources)


def wide(dims: Sequence[Any], shape: Sequence[int]) -> Dims:
    """The dims of a value along those of its dimensions that have several elements."""
    return tuple(d if n != 1 else None for d, n in zip(dims, shape, strict=True))


def narrowed(value: Value, dims: Dims) -> tuple[Value, Dims]:
    """The array before it was moved and broadcast, and its dims. ``dims``: the axis at each
    dimension, of a number none; where the array is as large as one element, it varies along none.
    """
    dims = wide(dims, value.shape) if value.shape else ()
    while (made := value.made_by) is not None and made.name in LAYOUT and made.sources is not None:
        (value, *_), old = made.ins, dims
        dims = tuple(
            old[made.sources.index(i)] if i in made.sources else None
            for i in range(len(value.shape))
        )
    return value, tuple(d if v else None for d, v in zip(dims, value.varies, strict=True))


def side(value: Value, dims: Dims, factor: float = 1.0, negated: bool = False) -> Side:
    """An array that meets a value with these dims, or a mask of them, as it was before it was moved
    and broadcast."""
    return Side(*narrowed(value, dims), factor, negated)


def keeps_numbers(cast: Equation) -> bool:
    """Whether a cast is none between numbers and truth values, or from floats to integers."""
    old, new = cast.ins[0], cast.outs[0]
    return old.dtype == new.dtype or (old.is_float and new.is_float)


def any_cast(_: Equation) -> bool:
    return True


def rooted(
    value: Value, dims: Dims = (), through: Callable[[Equation], bool] = keeps_numbers
) -> tuple[Value, Dims]:
    """A value before it was moved, broadcast and cast, ``through`` such casts, and its dims."""
    value, dims = narrowed(value, dims or (None,) * len(value.shape))
    while (made := value.made_by) is not None and made.casts and through(made):
        value, dims = narrowed(made.ins[0], dims)
    return value, dims


def computed(equations: Sequence[Equation], env: dict[Value, Any], other: Any) -> dict[Value, Any]:
    """Elementwise equations in float32, for values in ``env`` and those that ``other`` gives."""
    for equation in equations:
        name, out = equation.name, equation.outs[0]
        if name in (*LAYOUT, *VARYING) or (equation.casts and out.is_float):
            env[out] = env[equation.ins[0]]
            if equation.casts and env[out].dtype == bool:
                env[out] = env[out].astype("float32")
        else:
            given = jnp.broadcast_arrays(*(env[v] if v in env else other(v) for v in equation.ins))
            env[out] = equation.eqn.primitive.bind(*given, **equation.params)
    return env


def constant(value: Value) -> Any:
    """A known number as an array; floats are float32."""
    return jnp.asarray(number(value), "float32" if value.is_float else value.dtype)


def _unchanged(equation: Equation) -> int | None:
    """The operand that an elementwise result is equal to: of an addition of 0, a product with 1, a
    choice that is known; None for all others."""
    name, ins = equation.operation, equation.ins
    if name == "select_n" and len(ins) == 3:
        which = number(ins[0])
        return None if which is None else 1 + int(which)
    nothing = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}.get(name)
    if nothing is None or len(ins) != 2:
        return None
    if number(ins[1]) == nothing:
        return 0
    return 1 if name in ("add", "mul") and number(ins[0]) == nothing else None


@dataclass(frozen=True)
class State:
    """What a value is, and along which axes of the value that was followed it varies."""

    kind: str
    dims: Dims


REDUCTIONS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}


class Follower:
    """The states of the values that follow from ``states``, beginning at equations ``todo``. What
    moves, casts or keeps a value keeps its state; what other equations make of it, subclasses say.
    ``order``: the equations that were followed."""

    def __init__(self, states: dict[Value, Any], todo: set[Equation]) -> None:
        self.states = states
        self.order: list[Equation] = []
        seen = set[Equation]()
        while todo := todo - seen:
            equation = min(todo, key=lambda e: e.at)
            seen.add(equation)
            if equation.inner or len(equation.outs) != 1:
                continue
            state = self._state(equation, [self.states.get(v) for v in equation.ins])
            if state is not None:
                (out,) = equation.outs
                self.states[out] = state
                self.order.append(equation)
                todo |= self.onwards(out)

    def _state(self, equation: Equation, given: list[Any]) -> Any:
        (out,), name, first = equation.outs, equation.name, given[0]
        if name in LAYOUT:
            if first is None or (dims := transposed_dims(equation, first.dims)) is None:
                return None
            return replace(first, dims=dims)
        if equation.casts:
            return first if out.is_float else None
        if name in REDUCTIONS and first is not None:
            axes = equation.params["axes"]
            over = {first.dims[axis] for axis in axes} - {None}
            whole = all(first.dims[a] is not None or equation.ins[0].shape[a] == 1 for a in axes)
            dims = tuple(d for i, d in enumerate(first.dims) if i not in axes)
            return self.reduced(name, first, over, dims) if whole else None
        if name not in ELEMENTWISE:
            return self.contracted(equation, given) if name == "dot_general" else None
        same = _unchanged(equation)
        if same is not None and equation.ins[same].shape == out.shape:
            return given[same]
        dims = self.common(equation, given)
        return None if dims is None else self.elementwise(equation, given, dims)

    def common(self, equation: Equation, given: list[Any]) -> Dims | None:
        """The dims of an elementwise result; None if its operands do not fit together."""
        dims: list[Any] = [None] * len(equation.outs[0].shape)
        for state in given:
            for i, d in enumerate(state.dims if state is not None else ()):
                if d is not None and not self.fits(dims[i], d):
                    return None
                dims[i] = dims[i] if d is None else d
        return tuple(dims)

    def fits(self, one: Any, other: Any) -> bool:
        """Whether two axes that meet are one; the first may be None."""
        return one in (None, other)

    def onwards(self, out: Value) -> set[Equation]:
        """The equations to follow a value to."""
        return {*out.users}

    def reduced(self, name: str, state: Any, over: set[Any], dims: Dims) -> Any:
        raise NotImplementedError

    def elementwise(self, equation: Equation, given: list[Any], dims: Dims) -> Any:
        raise NotImplementedError

    def contracted(self, equation: Equation, given: list[Any]) -> Any:
        return None
