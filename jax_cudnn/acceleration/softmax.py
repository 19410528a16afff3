"""What follows from a product of scores: a softmax, in any of its forms, and the product that sums
its probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .following import Dims, Follower, State, narrowed, wide
from .values import LAYOUT, Equation, Value, free_dims, number

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
        dims = wide(range(len(scores.shape)), scores.shape)
        super().__init__({scores: Meaning(SCORES, dims)}, {*scores.users})

    def all_of(self, kind: str) -> list[Value]:
        return [value for value, state in self.states.items() if state.kind == kind]

    def reduced(self, name: str, state: Meaning, over: set[Any], dims: Dims) -> Meaning | None:
        if len(over) != 1:
            return None
        (axis,) = over
        if name == "reduce_max" and state.kind == SCORES:
            return Meaning(ROW, dims, axis=axis)
        right = name == "reduce_sum" and state.kind == EXP and state.axis in (None, axis)
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
        dims = wide(dims, shape)
        kind = OUT if state.kind == PROB else SUMS
        return replace(state, kind=kind, dims=dims, axis=summed[0])


def _root(value: Value) -> Value:
    """A row before it was broadcast, cast or kept from the gradient."""
    while (made := value.made_by) is not None and (
        made.casts or made.name in (*LAYOUT, "stop_gradient")
    ):
        value = made.ins[0]
    return value
