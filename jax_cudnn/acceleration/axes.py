"""Along which axes of a value, as of attention's scores, the arrays vary that follow from it or
meet it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .values import ELEMENTWISE, LAYOUT, Equation, Value, number, renamed

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


def moved(equation: Equation, dims: Dims) -> Dims | None:
    """The dims of the result of an operation that moves dimensions; None if it mixes them."""
    sources = equation.sources
    return None if sources is None else tuple(None if i is None else dims[i] for i in sources)


def narrowed(value: Value, dims: Dims) -> tuple[Value, Dims]:
    """The array before it was moved and broadcast, and its dims. ``dims``: the axis at each
    dimension, of a number none; where the array is as large as one element, it varies along none.
    """
    pairs = zip(dims, value.shape, strict=True) if value.shape else ()
    dims = tuple(d if n != 1 else None for d, n in pairs)
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


def rooted(value: Value, dims: Dims = (), exact: bool = True) -> tuple[Value, Dims]:
    """A value before it was moved, broadcast and cast, and its dims; unless ``exact``, also before
    casts between numbers and truth values."""
    value, dims = narrowed(value, dims or (None,) * len(value.shape))
    while (made := value.made_by) is not None and made.casts:
        before = made.ins[0]
        if exact and value.dtype != before.dtype and not (value.is_float and before.is_float):
            break
        value, dims = narrowed(before, dims)
    return value, dims


def _unchanged(equation: Equation) -> int | None:
    """The operand that an elementwise result is equal to: of an addition of 0, a product with 1, a
    choice that is known; None for all others."""
    name, ins = equation.name, equation.ins
    if name == "select_n" and len(ins) == 3:
        which = number(ins[0])
        return None if which is None else 1 + int(which)
    nothing = {"add": 0.0, "add_any": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}.get(name)
    if nothing is None or len(ins) != 2:
        return None
    if number(ins[1]) == nothing:
        return 0
    return 1 if name in ("add", "add_any", "mul") and number(ins[0]) == nothing else None


@dataclass(frozen=True)
class State:
    """What a value is, and along which axes of the value that was followed it varies."""

    kind: str
    dims: Dims


class Follower:
    """The states of the values that follow from one. What moves, casts or keeps a value keeps its
    state; what other equations make of it, subclasses say."""

    def __init__(self, start: Value, state: Any) -> None:
        self.states: dict[Value, Any] = {start: state}
        todo, seen = {*start.users}, set()
        while todo:
            equation = min(todo, key=lambda e: e.at)
            todo.remove(equation)
            seen.add(equation)
            if equation.inner or len(equation.outs) != 1:
                continue
            state = self._state(equation, [self.states.get(v) for v in equation.ins])
            if state is not None:
                (out,) = equation.outs
                self.states[out] = state
                todo |= {user for user in out.users if user not in seen}

    def _state(self, equation: Equation, given: list[Any]) -> Any:
        (out,), name, first = equation.outs, equation.name, given[0]
        if name in LAYOUT:
            if first is None or (dims := moved(equation, first.dims)) is None:
                return None
            return replace(first, dims=dims)
        if equation.casts:
            return first if out.is_float else None
        if name in ("reduce_sum", "reduce_max") and first is not None:
            axes = equation.params["axes"]
            over = {first.dims[axis] for axis in axes} - {None}
            whole = all(first.dims[a] is not None or equation.ins[0].shape[a] == 1 for a in axes)
            dims = tuple(d for i, d in enumerate(first.dims) if i not in axes)
            return self.reduced(name, first, over, dims) if over and whole else None
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
                if d is not None and dims[i] not in (None, d):
                    return None
                dims[i] = dims[i] if d is None else d
        return tuple(dims)

    def reduced(self, name: str, state: Any, over: set[Any], dims: Dims) -> Any:
        raise NotImplementedError

    def elementwise(self, equation: Equation, given: list[Any], dims: Dims) -> Any:
        raise NotImplementedError

    def contracted(self, equation: Equation, given: list[Any]) -> Any:
        return None
