"""What the values are that follow from one: the axes along which they and the arrays that meet them
vary, and what each equation makes of them (:class:`Follower`). From a product of scores follows a
softmax, in any of its forms, and the product that sums its probabilities (:class:`Softmax`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .values import ELEMENTWISE, LAYOUT, Equation, Value, free_dims, number, renamed

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


# -- softmax ---------------------------------------------------------------------------------------

SCORES, ROW, SHIFTED, EXP, SUM = "scores", "row", "shifted", "exponentials", "sum"
INVERSE, LOGSUM, TOTAL, LOGPROB = "1 / sum", "log of sum", "log-sum-exp", "log-probabilities"
PROB, SUMS, OUT = "probabilities", "sums of exponentials", "result"

_OF_ONE = {
    ("exp", SHIFTED): EXP,
    ("exp", LOGPROB): PROB,
    ("abs", SUM): SUM,  # of exponentials
    ("log", SUM): LOGSUM,
    ("reciprocal", SUM): INVERSE,
}
"""(operation, what its operand is) -> what its result is."""
_OF_TWO = {
    ("sub", SHIFTED, LOGSUM): LOGPROB,
    ("div", EXP, SUM): PROB,
    ("mul", EXP, INVERSE): PROB,
    ("div", SUMS, SUM): OUT,
    ("mul", SUMS, INVERSE): OUT,
}
"""The same for two operands of one softmax."""

HIDING = -1e4
"""A score of at most this is taken for that of a hidden key: ``exp`` of it is 0."""
Mask = tuple[Value, Dims, bool]


@dataclass(frozen=True)
class Meaning(State):
    """What a value is. ``of``: the scores whose softmax it belongs to. ``shift``: what was
    subtracted from them. ``axis``: the axis over which was reduced. ``hidden``: masks by which
    exponentials are 0, and ``zeroed``: by which probabilities are, as (mask, its dims, whether it
    is True where they are not)."""

    of: Value | None = None
    shift: Value | None = None
    axis: int | None = None
    hidden: frozenset[Mask] = frozenset()
    zeroed: frozenset[Mask] = frozenset()

    def same_softmax(self, other: Meaning) -> bool:
        """Whether both belong to one softmax; exponentials say their axis only if shifted."""
        one = self.of is other.of and self.shift is other.shift and self.hidden == other.hidden
        return one and (self.kind == EXP or self.axis == other.axis)


class Softmax(Follower):
    """The meanings of the values that follow from one product of scores."""

    states: dict[Value, Meaning]

    def __init__(self, product: Equation) -> None:
        self.product = product
        self.second: Equation | None = None
        self.dropped: list[str] = []
        (scores,) = product.outs
        dims = tuple(i if n != 1 else None for i, n in enumerate(scores.shape))
        super().__init__(scores, Meaning(SCORES, dims))

    def all_of(self, kind: str) -> list[Value]:
        return [value for value, state in self.states.items() if state.kind == kind]

    def reduced(self, name: str, state: Meaning, over: set[Any], dims: Dims) -> Meaning | None:
        if len(over) != 1:
            return None
        (axis,) = over
        if name == "reduce_max":
            return Meaning(ROW, dims, axis=axis) if state.kind == SCORES else None
        right = state.kind == EXP and state.axis in (None, axis)
        return replace(state, kind=SUM, dims=dims, axis=axis) if right else None

    def common(self, equation: Equation, given: list[Meaning | None]) -> Dims | None:
        dims = super().common(equation, given)
        pairs = zip(equation.ins, given, strict=True)
        aside = any(s is None and v.shape and number(v) is None for v, s in pairs)
        if dims is None or not aside:
            return dims
        sizes = zip(equation.outs[0].shape, dims, strict=True)
        return None if any(d is None and n != 1 for n, d in sizes) else dims

    def elementwise(
        self, equation: Equation, given: list[Meaning | None], dims: Dims
    ) -> Meaning | None:
        name, ins = equation.operation, equation.ins
        states = [s for s in given if s is not None]
        first, kinds = states[0], tuple(s.kind for s in states)
        if name == "stop_gradient":
            return first if first.kind == ROW else None
        if kinds == (SCORES,) and name == "exp":
            return Meaning(EXP, dims, ins[0])
        if {*kinds} == {SCORES}:
            return Meaning(SCORES, dims)
        if {*kinds} == {ROW}:
            pairs = zip(ins, given, strict=True)
            alone = all(s is not None or not any(v.varies) for v, s in pairs)
            if kinds == (ROW,) and name == "max" and not alone and self._is_carried(ins, given):
                self.dropped.append(
                    "a softmax over blocks of keys, whose maximum is carried: write it over all "
                    "keys, as jax.nn.dot_product_attention, of which cuDNN keeps no scores either"
                )
            axes = {s.axis for s in states}
            return Meaning(ROW, dims, axis=axes.pop()) if alone and len(axes) == 1 else None
        if len(states) == 1:
            return self._of_one(equation, given, first, dims)
        if len(states) != 2 or len(ins) != 2:
            return None
        second = states[1]
        if kinds == (SCORES, ROW) and name == "sub":
            return Meaning(SHIFTED, dims, ins[0], _root(ins[1]), second.axis)
        if kinds == (SCORES, TOTAL) and name == "sub" and second.of is ins[0]:
            return Meaning(LOGPROB, dims, second.of, axis=second.axis)
        if {*kinds} == {LOGSUM, ROW} and name == "add":
            at = kinds.index(LOGSUM)
            if _root(ins[1 - at]) is states[at].shift:
                return replace(states[at], kind=TOTAL, dims=dims)
        if name == "mul" and first.kind == INVERSE:
            first, second = second, first
        kind = _OF_TWO.get((name, first.kind, second.kind))
        if kind is None or not first.same_softmax(second):
            return None
        return replace(first, kind=kind, dims=dims, axis=second.axis)

    def _of_one(
        self, equation: Equation, given: list[Meaning | None], state: Meaning, dims: Dims
    ) -> Meaning | None:
        name, kind = equation.operation, state.kind
        found = _OF_ONE.get((name, kind))
        if found is not None and (found != LOGSUM or not state.hidden):
            return replace(state, kind=found, dims=dims)
        if kind not in (EXP, PROB) or len(equation.ins) == 1:
            return None
        mask = self._mask(equation, given, dims)
        if mask is not None:
            again = mask in state.hidden or self._masks(state, mask)
            if kind == EXP:
                hidden = state.hidden if again else state.hidden | {mask}
                return replace(state, dims=dims, hidden=hidden)
            if again:  # probabilities that are 0 already
                return replace(state, dims=dims, zeroed=state.zeroed | {mask})
        if kind == PROB:
            self.dropped.append(
                f"the probabilities meet another array ({equation.name}), as in dropout, which "
                "stays as it is; jax_cudnn.ops.dot_product_attention has a dropout_rate"
            )
        return None

    def _is_carried(self, ins: list[Value], given: list[Meaning | None]) -> bool:
        """Whether a maximum is met by an array that enters the program, as of a loop."""
        others = [v for v, s in zip(ins, given, strict=True) if s is None]
        return all(_root(v).made_by is None and v.known is None for v in others)

    def _mask(self, equation: Equation, given: list[Meaning | None], dims: Dims) -> Mask | None:
        """The mask of a choice between a value and 0, its dims, and whether it is True where the
        value is kept."""
        if equation.name != "select_n" or len(equation.ins) != 3 or given[0] is not None:
            return None
        at = 1 if given[1] is not None else 2
        if number(equation.ins[3 - at]) != 0:
            return None
        return (*narrowed(equation.ins[0], dims), at == 2)

    def _masks(self, state: Meaning, mask: Mask) -> bool:
        """Whether a mask hides scores, too."""
        value = state.of
        while value is not None and (made := value.made_by) is not None:
            inner = [v for v in made.ins if v in self.states and self.states[v].kind == SCORES]
            if len(inner) != 1 or value not in self.states:
                return False
            if made.name == "select_n" and len(made.ins) == 3 and made.ins[0] is not inner[0]:
                kept = made.ins[2] is inner[0]
                least = number(made.ins[1 if kept else 2])
                if least is not None and least <= HIDING:
                    if (*narrowed(made.ins[0], self.states[value].dims), kept) == mask:
                        return True
            (value,) = inner
        return False

    def contracted(self, equation: Equation, given: list[Meaning | None]) -> Meaning | None:
        """The product with the values: sums over the keys, batch axes stay."""
        states = [s for s in given if s is not None]
        if len(states) != 1 or states[0].kind not in (PROB, EXP):
            return None
        (state,) = states
        side = given.index(state)
        contract, batch = equation.params["dimension_numbers"]
        free, shape = free_dims(equation), equation.outs[0].shape
        summed = [state.dims[i] for i in contract[side]]
        if not summed and state.kind == PROB:
            if number(equation.ins[1 - side]) != 1:  # a mask of heads that hides none
                return None
            ends = [[state.dims[i] if k == side else None for i in free[k]] for k in (0, 1)]
            return replace(state, dims=(*(state.dims[i] for i in batch[side]), *ends[0], *ends[1]))
        in_batch = {state.dims[i] for i in batch[side]} - {None}
        count = len(self.product.params["dimension_numbers"][1][0])
        shared = {i for i, n in enumerate(self.product.outs[0].shape[:count]) if n != 1}
        fits = len(summed) == 1 and summed[0] is not None and in_batch == shared
        if not fits or state.axis not in (None, *summed) or self.second not in (None, equation):
            return None
        self.second = equation
        ends = [
            [state.dims[i] if k == side else ("E", j) for j, i in enumerate(free[k])]
            for k in (0, 1)
        ]
        dims = (*(state.dims[i] for i in batch[side]), *ends[0], *ends[1])
        dims = tuple(d if n != 1 else None for d, n in zip(dims, shape, strict=True))
        kind = OUT if state.kind == PROB else SUMS
        return replace(state, kind=kind, dims=dims, axis=summed[0])


def _root(value: Value) -> Value:
    """A row before it was broadcast, cast or kept from the gradient."""
    while (made := value.made_by) is not None and (
        made.casts or made.name in (*LAYOUT, "stop_gradient")
    ):
        value = made.ins[0]
    return value
