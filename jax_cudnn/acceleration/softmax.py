"""What follows from a product of scores: a softmax, in any of its forms, and the product that sums
its probabilities with values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .scores import HIDING, LAYOUT, Dims, follow, moved, narrowed, number, unchanged
from .values import ELEMENTWISE, Equation, Value, free_dims

SCORES, ROW, SHIFTED, EXP, SUM = "scores", "row", "shifted", "exponentials", "sum"
INVERSE, LOGSUM, TOTAL, LOGPROB = "1 / sum", "log of sum", "log-sum-exp", "log-probabilities"
PROB, SUMS, OUT = "probabilities", "sums of exponentials", "result"


Mask = tuple[Value, Dims, bool]


@dataclass(frozen=True)
class State:
    """What a value is. ``dims``: the axis of the scores along which each of its dimensions varies,
    or None. ``of``: the scores whose softmax it belongs to. ``shift``: what was subtracted from
    them. ``axis``: the axis over which was reduced. ``hidden``: masks by which exponentials are 0,
    and ``zeroed``: by which probabilities are, as (mask, its dims, whether it is True where they
    are not)."""

    kind: str
    dims: Dims
    of: Value | None = None
    shift: Value | None = None
    axis: int | None = None
    hidden: frozenset[Mask] = frozenset()
    zeroed: frozenset[Mask] = frozenset()

    def at(self, dims: Dims) -> State:
        return replace(self, dims=dims)


class Follower:
    """The states of the values that follow from one product of scores."""

    def __init__(self, product: Equation) -> None:
        self.product = product
        (scores,) = product.outs
        dims = tuple(i if n != 1 else None for i, n in enumerate(scores.shape))
        self.states: dict[Value, State] = {scores: State(SCORES, dims)}
        self.second: Equation | None = None
        self.dropped: list[str] = []
        follow(scores, self._follow)

    def _follow(self, equation: Equation) -> State | None:
        state = self._state(equation)
        if state is not None:
            self.states[equation.outs[0]] = state
        return state

    def _state(self, equation: Equation) -> State | None:
        name = equation.name
        given = [self.states.get(v) for v in equation.ins]
        if name in LAYOUT:
            first = given[0]
            dims = None if first is None else moved(equation, first.dims)
            return None if first is None or dims is None else first.at(dims)
        if equation.casts:
            return given[0]
        if name == "stop_gradient":
            return given[0] if given[0] is not None and given[0].kind == ROW else None
        if name in ("reduce_max", "reduce_sum"):
            return self._reduced(equation, given[0])
        if name == "dot_general":
            return self._product(equation, given)
        if name not in ELEMENTWISE:
            return None
        same = unchanged(equation)
        if same is not None and equation.ins[same].shape == equation.outs[0].shape:
            return given[same]
        return self._elementwise(equation, given)

    def _reduced(self, equation: Equation, state: State | None) -> State | None:
        axes = equation.params["axes"]
        if state is None or any(axis >= len(state.dims) for axis in axes):
            return None
        over = {state.dims[axis] for axis in axes} - {None}
        flat = all(state.dims[a] is not None or equation.ins[0].shape[a] == 1 for a in axes)
        dims = tuple(d for i, d in enumerate(state.dims) if i not in axes)
        if len(over) != 1 or not flat:
            return None
        (axis,) = over
        if equation.name == "reduce_max":
            return State(ROW, dims, axis=axis) if state.kind == SCORES else None
        right = state.kind == EXP and state.axis in (None, axis)
        return State(SUM, dims, state.of, state.shift, axis, state.hidden) if right else None

    def _elementwise(self, equation: Equation, given: list[State | None]) -> State | None:
        dims = self._common(equation, given)
        if dims is None:
            return None
        states = [s for s in given if s is not None]
        return self._meaning(equation, given, states, dims)

    def _common(self, equation: Equation, given: list[State | None]) -> Dims | None:
        """The dims of an elementwise result; None if its operands do not fit together."""
        shape = equation.outs[0].shape
        dims: list[Any] = [None] * len(shape)
        aside = False
        for value, state in zip(equation.ins, given, strict=True):
            if state is None:
                aside |= value.shape != () and number(value) is None
                continue
            for i, d in enumerate(state.dims):
                if d is not None and dims[i] not in (None, d):
                    return None
                dims[i] = dims[i] if d is None else d
        free = [n for n, d in zip(shape, dims, strict=True) if d is None and n != 1]
        return None if aside and free else tuple(dims)

    def _meaning(
        self, equation: Equation, given: list[State | None], states: list[State], dims: Dims
    ) -> State | None:
        name, kinds = equation.name, [s.kind for s in states]
        pairs = zip(equation.ins, given, strict=True)
        alone = all(s is not None or not any(v.varies) for v, s in pairs)
        first = states[0]
        ordered = len(states) == 2 and given[0] is states[0]
        same = len(states) == 2 and states[0].of is states[1].of
        same = same and states[0].hidden == states[1].hidden
        match kinds:
            case ["scores"] if name == "exp":
                return State(EXP, dims, equation.ins[0])
            case [*all_] if {*all_} == {SCORES}:
                return State(SCORES, dims)
            case ["row"] if name == "max" and not alone and self._is_carried(equation, given):
                self.dropped.append(
                    "a softmax over blocks of keys, whose maximum is carried: write it over all "
                    "keys, as jax.nn.dot_product_attention, of which cuDNN keeps no scores either"
                )
            case [*all_] if {*all_} == {ROW} and alone:
                axes = {s.axis for s in states}
                return State(ROW, dims, axis=axes.pop()) if len(axes) == 1 else None
            case ["scores", "row"] if name == "sub" and ordered:
                root = self._root(equation.ins[1])
                return State(SHIFTED, dims, equation.ins[0], root, states[1].axis)
            case ["scores", "log-sum-exp"] if name == "sub" and states[1].of is equation.ins[0]:
                return State(LOGPROB, dims, states[1].of, None, states[1].axis)
            case ["shifted"] if name == "exp":
                return State(EXP, dims, first.of, first.shift, first.axis)
            case ["log-probabilities"] if name == "exp":
                return State(PROB, dims, first.of, None, first.axis)
            case ["sum"] if name == "abs":  # of exponentials
                return first.at(dims)
            case ["sum"] if name == "log" and not first.hidden:
                return State(LOGSUM, dims, first.of, first.shift, first.axis)
            case ["sum"] if name == "div" and given[1] is first and number(equation.ins[0]) == 1:
                return replace(first, kind=INVERSE, dims=dims)
            case ["sum"] if name == "integer_pow" and equation.params["y"] == -1:
                return replace(first, kind=INVERSE, dims=dims)
            case ["log of sum", "row"] | ["row", "log of sum"] if name in ("add", "add_any"):
                at = kinds.index(LOGSUM)
                row = [v for v, s in zip(equation.ins, given, strict=True) if s is states[1 - at]]
                if self._root(row[0]) is states[at].shift:
                    return State(TOTAL, dims, states[at].of, None, states[at].axis)
            case ["shifted", "log of sum"] if name == "sub" and ordered and same:
                if states[0].shift is states[1].shift:
                    return State(LOGPROB, dims, first.of, None, states[1].axis)
            case ["exponentials", "sum"] if name == "div" and ordered and same:
                if states[0].shift is states[1].shift:
                    return State(PROB, dims, first.of, None, states[1].axis, first.hidden)
            case ["exponentials", "1 / sum"] | ["1 / sum", "exponentials"] if same:
                if name == "mul" and states[0].shift is states[1].shift:
                    axis = next(s.axis for s in states if s.kind == INVERSE)
                    return State(PROB, dims, first.of, None, axis, first.hidden)
            case ["sums of exponentials", "sum"] if name == "div" and ordered and same:
                if states[0].shift is states[1].shift and states[0].axis == states[1].axis:
                    return State(OUT, dims, first.of, None, first.axis, first.hidden)
            case ["sums of exponentials", "1 / sum"] | ["1 / sum", "sums of exponentials"] if same:
                if name == "mul" and states[0].shift is states[1].shift:
                    return State(OUT, dims, first.of, None, states[0].axis, first.hidden)
            case ["exponentials"] if name == "select_n" and len(equation.ins) == 3 and not given[0]:
                mask = self._mask(equation, given, dims)
                if mask is not None:
                    hidden = first.hidden if self._masks(first, mask) else first.hidden | {mask}
                    return replace(first, dims=dims, hidden=hidden)
            case ["probabilities"] if name == "select_n" and (
                (mask := self._zeroing(equation, given, dims)) is not None
            ):
                return replace(first, dims=dims, zeroed=first.zeroed | {mask})
            case ["probabilities"] if len(equation.ins) > 1:
                self.dropped.append(
                    f"the probabilities meet another array ({name}), as in dropout, which stays "
                    "as it is; jax_cudnn.ops.dot_product_attention has a dropout_rate"
                )
        return None

    def _is_carried(self, equation: Equation, given: list[State | None]) -> bool:
        """Whether a maximum is met by an array that enters the program, as of a loop."""
        others = [v for v, s in zip(equation.ins, given, strict=True) if s is None]
        return all(self._root(v).made_by is None and v.known is None for v in others)

    def _mask(self, equation: Equation, given: list[State | None], dims: Dims) -> Mask | None:
        """The mask of a choice between a value and 0, its dims, and whether it is True where the
        value is kept."""
        at = 1 if given[1] is not None else 2
        if number(equation.ins[3 - at]) != 0:
            return None
        which = equation.ins[0]
        return (*narrowed(which, dims if which.shape else ()), at == 2)

    def _masks(self, state: State, mask: Any) -> bool:
        """Whether a mask hides scores, too."""
        value = state.of
        while value is not None and (made := value.made_by) is not None:
            known = [v for v in made.ins if v in self.states]
            inner = [v for v in known if self.states[v].kind == SCORES]
            if len(inner) != 1 or value not in self.states:
                return False
            if made.name == "select_n" and len(made.ins) == 3 and made.ins[0] is not inner[0]:
                which, kept = made.ins[0], made.ins[2] is inner[0]
                least = number(made.ins[1 if kept else 2])
                dims = self.states[value].dims if which.shape else ()
                if least is not None and least <= HIDING:
                    if (*narrowed(which, dims), kept) == mask:
                        return True
            (value,) = inner
        return False

    def _zeroing(self, equation: Equation, given: list[State | None], dims: Dims) -> Mask | None:
        """The mask of a choice that makes probabilities 0 where they are 0 already."""
        if len(equation.ins) != 3 or given[0] is not None:
            return None
        state = given[1] or given[2]
        mask = self._mask(equation, given, dims)
        if state is None or mask is None:
            return None
        return mask if mask in state.hidden or self._masks(state, mask) else None

    def _root(self, value: Value) -> Value:
        """A row before it was broadcast, cast or kept from the gradient."""
        while (made := value.made_by) is not None and (
            made.casts or made.name in (*LAYOUT, "stop_gradient")
        ):
            value = made.ins[0]
        return value

    def _product(self, equation: Equation, given: list[State | None]) -> State | None:
        """The product with the values: sums over the keys, batch axes stay."""
        states = [s for s in given if s is not None]
        if len(states) != 1 or states[0].kind not in (PROB, EXP):
            return None
        (state,) = states
        side = given.index(state)
        (contract, batch) = equation.params["dimension_numbers"]
        if not contract[side] and state.kind == PROB:
            if number(equation.ins[1 - side]) != 1:  # a mask of heads that hides none
                return None
            axes = [*batch[side], *(i for i in range(len(state.dims)) if i not in batch[side])]
            kept = [state.dims[i] for i in axes]
            new = [None] * (len(equation.outs[0].shape) - len(kept))
            at = len(kept) if side == 0 else len(batch[side])
            return state.at((*kept[:at], *new, *kept[at:]))
        if len(contract[side]) != 1:
            return None
        (axis,) = (state.dims[i] for i in contract[side])
        in_batch = {state.dims[i] for i in batch[side]} - {None}
        shared = {i for i, n in enumerate(self.product.outs[0].shape) if n != 1}
        shared &= {*range(len(self.product.params["dimension_numbers"][1][0]))}
        if axis is None or state.axis not in (None, axis) or in_batch != shared:
            return None
        if self.second not in (None, equation):
            return None
        self.second = equation
        free = free_dims(equation)
        ends = [
            [state.dims[i] if k == side else ("E", j) for j, i in enumerate(free[k])]
            for k in (0, 1)
        ]
        dims = (*(state.dims[i] for i in batch[side]), *ends[0], *ends[1])
        sized = zip(dims, equation.outs[0].shape, strict=True)
        dims = tuple(d if n != 1 else None for d, n in sized)
        kind = OUT if state.kind == PROB else SUMS
        return State(kind, dims, state.of, state.shift, axis, state.hidden, state.zeroed)
