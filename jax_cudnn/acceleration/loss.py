"""The cross-entropy of a linear layer in a program, by its meaning: a product, the log-sum-exp of
its logits, and the logit of each token's label. It is replaced by one in blocks of tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.text import size
from ..ops import cross_entropy, linear_cross_entropy
from ..ops.arguments import int32
from .following import Dims, Side, State, Unclear, any_cast, narrowed, rooted, side
from .program import Missed, Program
from .region import USED, Region
from .softmax import LOGPROB, LOGSUM, ROW, SCORES, SHIFTED, TOTAL, Meaning, Softmax
from .values import LAYOUT, Equation, Value, array, between, free_dims, number, renamed

PICKED, MARKED, LOSS, SUMMED = "picked logits", "log-probabilities", "losses", "sum of losses"
NAN, CLIPPED, ZERO = "nan", "clipped", "zero"  # what a label outside of the vocabulary gives
_IGNORED = -(2**31)
_OURS = "jax_cudnn.ops.linear_cross_entropy"
_CHANGED = "its logits are changed by {} before the softmax: " + _OURS + " has bias= and softcap="
_NO_LABELS = (
    "its log-probabilities are used otherwise than one for each token, or its softmax is not over "
    f"all classes: {_OURS} has label_smoothing= and z_loss="
)


@dataclass(frozen=True)
class _Picked(State):
    """What follows from the logits of labels. ``of``, ``shift``, ``axis``: as of a softmax.
    ``outside``: what labels outside of the vocabulary give. ``sign``: -1 where it is negated.
    ``kept``: masks of tokens whose loss is not set to 0."""

    of: Value
    shift: Value | None
    axis: Any
    labels: Side
    outside: str
    sign: int = 1
    kept: tuple[Side, ...] = ()


class _Loss(Softmax):
    """The meanings of the values that follow from a product of logits. Its axes are numbers; a
    dimension that a reshape made of several has a tuple of them. ``cuts``: of each axis, which one
    of the product it is a slice of."""

    states: dict[Value, Any]

    def __init__(self, product: Equation) -> None:
        self.sizes: dict[Any, int] = dict(enumerate(product.outs[0].shape))
        self.cuts: dict[Any, tuple[int, slice]] = {axis: (axis, slice(None)) for axis in self.sizes}
        super().__init__(product)

    def _state(self, equation: Equation, given: list[Any]) -> Any:
        first, name = given[0], equation.name
        if first is not None and name == "gather":
            return self._gathered(equation, first)
        if first is not None and name == "reshape" and equation.sources is None:
            dims = self._regrouped(equation, first.dims)
        elif first is not None and name == "slice" and first.kind == SCORES:
            dims = self._cut(equation, first.dims)
        else:
            return super()._state(equation, given)
        return None if dims is None else replace(first, dims=dims)

    def contracted(self, equation: Equation, given: list[Any]) -> None:
        return None

    def reduced(self, name: str, state: Any, over: set[Any], dims: Dims) -> Any:
        if not isinstance(state, _Picked):
            return super().reduced(name, state, over, dims)
        if name == "reduce_sum" and state.kind == MARKED and over == {state.axis}:
            return replace(state, kind=LOSS, dims=dims)
        summed = name == "reduce_sum" and state.kind == LOSS and not {*dims} - {None}
        return replace(state, kind=SUMMED, dims=dims) if summed else None

    def elementwise(self, equation: Equation, given: list[Any], dims: Dims) -> Any:
        picked = [i for i, state in enumerate(given) if isinstance(state, _Picked)]
        if not picked:
            marked = self._marked(equation, given, dims)
            return super().elementwise(equation, given, dims) if marked is None else marked
        if len(picked) > 1:
            return None
        (at,), name, ins = picked, equation.operation, equation.ins
        state = given[at]
        if name == "neg" or equation.factor_of(ins[at]) == -1:
            return replace(state, dims=dims, sign=-state.sign)
        if name in ("add", "sub") and isinstance(total := given[1 - at], Meaning):
            signs = 1, -1 if name == "sub" else 1
            fits = state.sign * signs[at] == -signs[1 - at] and _is_total(total, state)
            loss = replace(state, kind=LOSS, dims=dims, sign=signs[1 - at])
            return loss if fits and state.kind == PICKED else None
        if state.kind != LOSS or name != "select_n" or len(ins) != 3 or number(ins[3 - at]) != 0:
            return None  # a product with a mask keeps NaN, and stays
        mask = side(ins[0], dims, negated=at == 1)
        return replace(state, dims=dims, kept=(*state.kept, mask))

    def _marked(self, equation: Equation, given: list[Any], dims: Dims) -> _Picked | None:
        """Log-probabilities that are 0 but where the class is the label."""
        name, ins = equation.name, equation.ins
        at = next((i for i, s in enumerate(given) if s is not None and s.kind == LOGPROB), None)
        chosen = name == "select_n" and at == 2 and number(ins[1]) == 0
        if at is None or not (chosen or name == "mul"):
            return None
        state, other = given[at], ins[0] if chosen else ins[1 - at]
        root, names = rooted(other, dims, any_cast)
        compared = root.made_by.ins if root.made_by and root.made_by.name == "eq" else []
        for one, another in (compared, compared[::-1]) if compared else ():
            (classes, over), (labels, along) = narrowed(one, names), narrowed(another, names)
            fits = {*over} - {None} == {state.axis} and state.axis not in along
            if fits and _counts(classes, self.sizes[state.axis]) and labels.dtype.kind in "iu":
                label = Side(labels, along)
                return _Picked(MARKED, dims, state.of, None, state.axis, label, ZERO, -1)
        return None

    def _gathered(self, equation: Equation, state: Any) -> Any:
        """One class of each token; or a dimension of one element, dropped."""
        numbers, (operand, index) = equation.params["dimension_numbers"], equation.ins
        sizes, dims, shape = equation.params["slice_sizes"], state.dims, equation.outs[0].shape
        names: list[Any] = [None] * len(index.shape[:-1])  # of the index's dimensions
        batch = numbers.operand_batching_dims
        for i, at in zip(batch, numbers.start_indices_batching_dims, strict=True):
            names[at] = dims[i]
        axis = picks = None
        for j, i in enumerate(numbers.start_index_map):
            piece = _component(index, j)
            if piece is None or sizes[i] != 1:
                return None
            along = [q for q, varies in enumerate(piece.varies) if varies]
            if len(along) == 1 and names[along[0]] is None and _counts(piece, operand.shape[i]):
                names[along[0]] = dims[i]
            elif number(piece) != 0 or operand.shape[i] != 1:
                if axis is not None or dims[i] is None:
                    return None
                axis, picks = dims[i], piece
        kept = [i for i in range(len(dims)) if i not in (*numbers.collapsed_slice_dims, *batch)]
        ends = iter(names), iter([None if sizes[i] == 1 else dims[i] for i in kept])
        out = tuple(next(ends[i in numbers.offset_dims]) for i in range(len(shape)))
        if any(d is None and n != 1 for d, n in zip(out, shape, strict=True)):
            return None
        if {*out} - {None} != {*dims} - {None, axis}:
            return None
        if picks is None:
            return replace(state, dims=out)
        labels = Side(*narrowed(picks, (*names, None)))
        outside, kind = _outside(equation), state.kind
        if outside is not None and kind == LOGPROB and axis == state.axis:
            return _Picked(LOSS, out, state.of, None, axis, labels, outside, -1)
        if outside is None or kind not in (SCORES, SHIFTED):
            return None
        of, shift = (operand, None) if kind == SCORES else (state.of, state.shift)
        return _Picked(PICKED, out, of, shift, axis, labels, outside)

    def _regrouped(self, equation: Equation, dims: Dims) -> Dims | None:
        """The dims after dimensions were merged, or merged ones split."""
        shape = equation.ins[0].shape
        if equation.params["dimensions"] is not None:
            return None
        if any(d is None and n != 1 for d, n in zip(dims, shape, strict=True)):
            return None
        left = [d for d in self.flat(dims) if d is not None]
        out: list[Any] = []
        for n in equation.outs[0].shape:
            group: list[Any] = []
            while left and math.prod(self.sizes[d] for d in group) < n:
                group.append(left.pop(0))
            if math.prod(self.sizes[d] for d in group) != n:
                return None
            out.append(None if n == 1 else group[0] if len(group) == 1 else tuple(group))
        return None if left else tuple(out)

    def _cut(self, equation: Equation, dims: Dims) -> Dims | None:
        """The dims of a slice, with new names of those that are shorter."""
        params, out, found = equation.params, equation.outs[0].shape, [*dims]
        steps = params["strides"] or (1,) * len(out)
        for i, n in enumerate(equation.ins[0].shape):
            if out[i] != n:
                if out[i] == 1 or self.cuts.get(dims[i]) != (dims[i], slice(None)):
                    return None
                found[i] = len(self.sizes)
                self.sizes[found[i]] = out[i]
                bounds = params["start_indices"][i], params["limit_indices"][i], steps[i]
                self.cuts[found[i]] = dims[i], slice(*bounds)
        return tuple(found)

    def is_row(self, value: Value) -> bool:
        return value in self.states and self.states[value].kind == ROW

    def is_stopped(self, row: Value) -> bool:
        """Whether a maximum has no gradient."""
        made = row.made_by
        assert made is not None
        return made.name == "stop_gradient" or any(
            map(self.is_stopped, filter(self.is_row, made.ins))
        )

    def flat(self, dims: Sequence[Any]) -> list[Any]:
        """Dims with those of merged dimensions one by one."""
        return [name for d in dims for name in (d if isinstance(d, tuple) else (d,))]

    def arranged(self, x: Any, side: Side, names: Sequence[Any]) -> Any:
        """An array with a dimension for each of these axes, negated if it is."""
        x = x[tuple(0 if d is None else slice(None) for d in side.dims)]
        old = self.flat([d for d in side.dims if d is not None])
        x = renamed(x.reshape([self.sizes[d] for d in old]), old, names)
        x = jnp.broadcast_to(x, [self.sizes[d] for d in names])
        return x if not side.negated else ~x if x.dtype == bool else -x


def _is_total(total: Meaning, picked: _Picked) -> bool:
    """Whether a value is the log-sum-exp of the logits that were picked, by one shift."""
    if total.kind not in (LOGSUM, TOTAL) or total.axis != picked.axis or total.hidden:
        return False
    if picked.shift is not None:
        one = total.of is picked.of and total.shift is picked.shift
        return one and total.kind == LOGSUM
    if total.of is None or (total.kind == LOGSUM and total.shift is not None):
        return False
    return rooted(total.of)[0] is rooted(picked.of)[0]


def _counts(value: Value, count: int) -> bool:
    """Whether the elements of a value are 0, 1, ... along the one dimension in which they vary."""
    return value.is_known and np.array_equal(array(value).reshape(-1), np.arange(count))


def _component(index: Value, j: int) -> Value | None:
    """One of the numbers of an index, which are its last dimension."""
    if index.shape[-1] == 1:
        return index
    made = index.made_by
    if made is None or made.name != "concatenate" or any(v.shape[-1] != 1 for v in made.ins):
        return None
    return made.ins[j] if made.params["dimension"] == len(index.shape) - 1 else None


def _outside(equation: Equation) -> str | None:
    """What a gather gives for an index that is out of range."""
    mode, fill = equation.params["mode"], equation.params["fill_value"]
    if mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
        return CLIPPED
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP and (fill is None or np.isnan(fill))
    return NAN if fills else None


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> Iterator[Region]:
    """The losses of a program; ``missed`` gets what is nearly one. Logits that are one block stay:
    the operation would hold all of them, too."""
    for product in program.equations if "loss" in kinds else ():
        if product.name != "dot_general" or product in taken:
            continue
        if math.prod(product.outs[0].shape) <= cross_entropy.BLOCK:
            continue
        loss = _Loss(product)
        if not any(map(loss.all_of, (LOGPROB, LOGSUM, TOTAL))):
            continue
        # Gradients of the sum of all losses cost a product less than those of the losses.
        why = Unclear(_NO_LABELS)
        for last in (*loss.all_of(SUMMED), *loss.all_of(LOSS)[:1]):
            try:
                region = _region(program, loss, last)
            except Unclear as error:
                why = error
                continue
            if not region.replaced & taken:
                yield region
            break
        else:
            missed.append((product, f"a cross-entropy: {why}"))


def _region(program: Program, loss: _Loss, last: Value) -> Region:
    state, product = loss.states[last], loss.product
    assert isinstance(state, _Picked)
    equations = between(last, loss.states.__contains__)
    for value in (v for e in sorted(equations, key=lambda e: e.at) for v in e.outs):
        if value is not last and program.used_outside(equations, value):
            kind = loss.states[value].kind
            raise Unclear(USED.format(f"{'logits' if kind == SCORES else kind} are"))
    rows = [v for e in equations for v in e.ins if loss.is_row(v) and not loss.is_row(e.outs[0])]
    if len({*map(loss.is_stopped, rows)}) > 1:
        raise Unclear("its maximum is kept from the gradient in one place, and not in another")
    contract, batch = product.params["dimension_numbers"]
    free, axis = free_dims(product), state.axis
    places = [k for k in (0, 1) for _ in free[k]]  # of the product's axes, whose they are
    if batch[0] or axis not in range(len(places)) or product.ins[0].dtype != product.ins[1].dtype:
        raise Unclear("its product is not one of hidden states and a weight, over all classes")
    of_weight, count = places[axis], loss.sizes[axis]
    hidden, weight = product.ins[1 - of_weight], product.ins[of_weight]
    depth = math.prod(weight.shape) // count
    if math.prod(weight.shape[i] for i in contract[of_weight]) != depth or not weight.is_float:
        raise Unclear("its weight has other dimensions than features and classes")
    bias, softcap = _before_softmax(loss, state.of, axis)
    of_tokens = {*loss.flat(loss.states[state.of].dims)} - {None, axis}
    names = sorted(of_tokens, key=lambda d: loss.cuts[d][0])
    sizes, wholes = ([loss.sizes[d] for d in x] for x in (names, [loss.cuts[d][0] for d in names]))
    cut = tuple(loss.cuts[d][1] for d in names)
    order = *free[1 - of_weight], *contract[1 - of_weight]
    columns = *contract[of_weight], *free[of_weight]
    by_token = [state.labels, *state.kept]

    def emit(x: Any, w: Any, *rest: Any) -> Any:
        labels, *masks = (
            loss.arranged(y, side, names) for y, side in zip(rest, by_token, strict=False)
        )
        labels = int32("labels", labels)
        if state.outside == CLIPPED:
            labels = jnp.clip(labels, 0, count - 1)
        if state.outside == ZERO:
            masks.append((labels >= 0) & (labels < count))
        for mask in masks:
            labels = jnp.where(mask, labels, _IGNORED)
        term = None if bias is None else loss.arranged(rest[-1], bias, [axis])
        found = linear_cross_entropy(
            x.transpose(order).reshape([*wholes, depth])[cut],
            w.transpose(columns).reshape([depth, count]),
            labels,
            bias=term,
            softcap=softcap,
            ignore_index=_IGNORED if masks else None,
            reduction="sum" if state.kind == SUMMED else "none",
            preferred_element_type=str(product.outs[0].dtype),
            precision=product.params["precision"],
        )
        if state.kind == LOSS:
            found = renamed(found, names, loss.flat(state.dims))
        return (state.sign * found).reshape(last.shape)

    what = f"{hidden.dtype} [{math.prod(sizes)}, {depth}] x [{depth}, {count}]"
    what += " + bias" * (bias is not None) + (f", softcap {softcap:g}" if softcap else "")
    logits = size(math.prod(sizes) * count * product.outs[0].dtype.itemsize)
    sides = [*by_token, *([bias] if bias is not None else ())]
    inputs = [hidden, weight, *(side.value for side in sides)]
    region = Region("loss", equations, inputs, last, emit, f"{what}, {logits} of logits")
    region.on = "XLA in blocks"
    return region


def _before_softmax(loss: _Loss, value: Value, axis: int) -> tuple[Side | None, float | None]:
    """The bias and the softcap between the product and the logits."""
    steps: list[tuple[Equation, Value]] = []
    while (made := value.made_by) is not None and made is not loss.product:
        inner = [v for v in made.ins if v in loss.states]
        if len(inner) != 1:
            raise Unclear(_CHANGED.format(made.name))
        steps.append((made, inner[0]))
        (value,) = inner
    scale, bias, softcap = 1.0, None, None
    for equation, given in reversed(steps):
        name, factor = equation.name, equation.factor_of(given)
        if equation.casts or name in (*LAYOUT, "slice"):
            continue
        if factor is not None:
            scale *= factor
        elif name == "tanh" and softcap is None and scale > 0:
            scale, softcap = 1.0, 1 / scale
        elif name in ("add", "sub") and bias is softcap is None and scale == 1:
            (other,) = (v for v in equation.ins if v is not given)
            bias = side(other, loss.states[equation.outs[0]].dims, negated=name == "sub")
            turned = name == "sub" and equation.ins[0] is other
            if turned or not bias.axes <= {axis} or not other.is_float:
                raise Unclear(_CHANGED.format(name))
        else:
            raise Unclear(_CHANGED.format(name))
    if softcap is None and scale != 1:
        raise Unclear("its logits are scaled: scale the hidden states instead")
    if softcap is not None and not math.isclose(scale, softcap, rel_tol=1e-5):
        raise Unclear(_CHANGED.format("tanh"))
    return bias, None if softcap is None else scale
