"""Attention's derivative in a program that differentiates itself: what follows from the scores and
the cotangent of the result, up to the gradients of queries, keys and values.

However it is written, it is taken for the derivative if it computes the derivative's values
(:mod:`.sampled`). For that, the dimensions of all values in it get names: the axes of the scores,
of the features of keys and of values. The cotangent of the result gets them from what it meets.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from .following import Dims, Follower, Operand, Side, State, Unclear, rooted, transposed_dims, wide
from .program import Program
from .region import Backward
from .sampled import Leaf, Part, check
from .softmax import OUT, ROW, SUM, Softmax
from .values import CASTS, LAYOUT, Equation, Value, between, free_dims, number, renamed

_NEW = "?"
_OF_SCORES, _BESIDE = "of the scores", "beside them"
_ROLES = ("queries", "keys", "values")
_READ = "a value inside is used elsewhere"
_SAME = 1e-6  # of the factors of queries and of their gradient


class _Gradient(NamedTuple):
    """A gradient of the program, of which input of the region, and what brings that to the value's
    dimensions; ``more``: equations that follow those of the derivative."""

    value: Value
    index: int
    brought: Any
    more: set[Equation]


def backward(
    program: Program,
    softmax: Softmax,
    forward: set[Equation],
    last: Value,
    operands: Sequence[Operand],
    biases: Sequence[Side],
) -> Backward:
    """The derivative of the attention that ``forward`` computes. The first inputs of its region are
    ``operands``, queries, keys and values, and ``biases``. Raises Unclear."""
    walk = _Walk(program, softmax, forward, operands)
    made = {e.outs[0] for e in walk.order}
    equations = {e for value in walk.gradients for e in between(value, made.__contains__)}
    if not walk.gradients or len({*walk.gradients.values()}) != len(walk.gradients):
        raise Unclear("no gradients")
    everything = forward | equations
    targets = {value: walk.own[i] for value, i in walk.gradients.items()}
    found: list[_Gradient] = []
    inside = {v for e in everything for v in e.outs} - {last, *targets}
    for value in sorted(inside, key=lambda v: v.made_by.at if v.made_by else -1):
        if program.used_outside(everything, value):
            if value not in walk.dims:
                raise Unclear(_READ)
            leaf, gradient = _of_bias(program, walk, value, everything, biases)
            targets[gradient.value] = leaf
            found.append(gradient)
            everything |= gradient.more
    leaves = {place: leaf for place, leaf in walk.leaves.items() if place[0] in everything}
    result = softmax.states[last]
    ends = {*result.dims} - {None}
    entering = dict.fromkeys(leaf for leaf in leaves.values() if leaf not in walk.own)
    cotangents = [leaf for leaf in entering if leaf.axes == ends]
    if len({leaf.key for leaf in cotangents}) != 1:
        raise Unclear("no cotangent")
    cotangent = cotangents[0]
    order = sorted((e for e in walk.order if e in everything), key=lambda e: e.at)
    if forward - {*order, softmax.product}:
        raise Unclear("a part of it is not followed")
    known = [softmax.states[v] for v in made if v in softmax.states]
    if {mask for state in known for mask in state.zeroed} - result.zeroed:
        raise Unclear("probabilities that are 0 in its gradient alone")
    sums, compared = softmax.all_of(SUM), [e for e in order if e.outs[0].dtype == bool]
    part = Part(
        equations=[softmax.product, *order],
        forward=forward,
        last=last,
        cotangent=cotangent,
        targets=targets,
        dims=walk.dims,
        leaves=leaves,
        shifts={v for v in (*sums, *softmax.all_of(ROW)) if v.made_by in forward},
        signs={e.outs[0] for e in compared if all(v in sums or number(v) == 0 for v in e.ins)},
    )
    check(part)
    for value, i in walk.gradients.items():
        found.append(_of_operand(program, walk, value, i, operands[i], everything))
        everything |= found[-1].more
    root = cotangent.root
    if root.made_by in everything:
        raise Unclear("its cotangent is computed inside of it")
    to_last = _brought(cotangent.dims, result.dims, last.shape)
    region = Backward(everything - forward, root, to_last, [gradient[:3] for gradient in found])
    if last.made_by is None or region.first.at < last.made_by.at:
        raise Unclear("its gradients are computed before its result")
    return region


def _brought(old: Dims, new: Dims, shape: tuple[int, ...], factor: float = 1.0) -> Any:
    """What brings an array to other dimensions, by the axes that they have, and scales it."""

    def of(x: Any) -> Any:
        x = renamed(x, old, new)
        x = x if factor == 1 else x * jnp.asarray(factor, x.dtype)
        return x.reshape(shape)

    return of


def _of_bias(
    program: Program, walk: _Walk, value: Value, inside: set[Equation], biases: Sequence[Side]
) -> tuple[Leaf, _Gradient]:
    """The gradient of a bias: sums of that of the scores."""
    more: set[Equation] = set()
    leaves = dict.fromkeys(leaf for leaf in walk.leaves.values() if leaf not in walk.own)
    while True:
        dims = walk.dims[value]
        for i, side in enumerate(biases, len(_ROLES)):
            for leaf in leaves:
                alike = {*dims} - {None} == side.axes == leaf.axes
                if alike and _holds(leaf.root, side):
                    return leaf, _Gradient(value, i, _brought(side.dims, dims, value.shape), more)
        users = {user for user in value.users if user not in inside}
        if program.is_read(value) or len(users) != 1:
            raise Unclear(_READ)
        (user,) = users
        if user not in walk.order or not (user.casts or user.name in (*LAYOUT, "reduce_sum")):
            raise Unclear(_READ)
        more |= {user}
        (value,) = user.outs


def _holds(total: Value, side: Side) -> bool:
    """Whether a value is a sum of which a bias is a term."""
    root, _ = rooted(total)
    made = root.made_by
    terms = made.ins if made is not None and made.name == "add" else ()
    return root is rooted(side.value)[0] or any(_holds(v, side) for v in terms)


def _of_operand(
    program: Program, walk: _Walk, value: Value, i: int, operand: Operand, inside: set[Equation]
) -> _Gradient:
    """The gradient of queries, keys or values as cuDNN takes them: after the scale that precedes
    the product, where the program has it."""
    at, now, names, more = value, 1.0, walk.dims[value], set[Equation]()
    unscaled = _brought(operand.dims, names, at.shape, 1 / operand.factor)
    while not math.isclose(now, operand.factor, rel_tol=_SAME):
        user = at.users[0] if len(at.users) == 1 and not program.is_read(at) else None
        if user is None or user in inside or user.inner or len(user.outs) != 1:
            return _Gradient(value, i, unscaled, set())
        if user.name in LAYOUT and (found := transposed_dims(user, names)) is not None:
            names = found
        elif factor := user.factor_of(at):
            now *= factor
        elif not user.casts:
            return _Gradient(value, i, unscaled, set())
        more = more | {user}
        (at,) = user.outs
    return _Gradient(at, i, _brought(operand.dims, names, at.shape), more)


# -- names of dimensions ---------------------------------------------------------------------------


class _Walk(Follower):
    """Which axes the dimensions of the values have that follow from the scores, or from the values
    of the attention alone. ``leaves``: the arrays that enter, by equation and operand; ``own``:
    those of them that are queries, keys and values; ``gradients``: of which of these values are."""

    def __init__(
        self,
        program: Program,
        softmax: Softmax,
        forward: set[Equation],
        operands: Sequence[Operand],
    ) -> None:
        self.forward, self.softmax = forward, softmax
        self.same: dict[Any, Any] = {}  # the axis that a name turned out to be
        self._keys: dict[Value, Hashable] = {}
        self.own = [
            Leaf((role,), wide(x.given_dims, x.given.shape), x.given)
            for role, x in zip(_ROLES, operands, strict=True)
        ]
        if len({rooted(leaf.root)[0] for leaf in self.own}) != len(_ROLES):
            raise Unclear("queries, keys or values are one array")
        product, (scores,) = softmax.product, softmax.product.outs
        by_value = {leaf.root: leaf for leaf in self.own}
        self.leaves = {(product, i): by_value[v] for i, v in enumerate(product.ins)}
        values, _ = rooted(self.own[2].root)
        products = (e for e in program.equations if e.name == "dot_general")
        reading = {e for e in products if any(rooted(v)[0] is values for v in e.ins)} - {product}
        start = State(_OF_SCORES, softmax.states[scores].dims)
        super().__init__({scores: start}, {*scores.users, *reading})
        self._name_ends()
        self.dims = {value: self._resolved(state.dims) for value, state in self.states.items()}
        for place, leaf in self.leaves.items():
            self.leaves[place] = replace(leaf, dims=self._resolved(leaf.dims))
        made = (e.outs[0] for e in self.order)
        roles = {v: self._role(v) for v in made if self.states[v].kind == _OF_SCORES}
        self.gradients = {
            v: i for v, i in roles.items() if i is not None and not self._is_result(v)
        }

    def _resolved(self, dims: Dims) -> Dims:
        def of(name: Any) -> Any:
            while name in self.same:
                name = self.same[name]
            return name

        return tuple(map(of, dims))

    def _role(self, out: Value) -> int | None:
        """Of which operand a product has the axes."""
        names = {*self._resolved(self.states[out].dims)} - {None}
        own = [leaf.axes for leaf in self.own]
        is_product = out.made_by is not None and out.made_by.name == "dot_general"
        return own.index(names) if is_product and names in own else None

    def _is_result(self, out: Value) -> bool:
        state = self.softmax.states.get(out)
        return state is not None and state.kind == OUT

    def onwards(self, out: Value) -> set[Equation]:
        ends = self._is_result(out) or self._role(out) is not None
        return self.forward.intersection(out.users) if ends else {*out.users}

    def reduced(self, name: str, state: State, over: set[Any], dims: Dims) -> State:
        return replace(state, dims=dims)

    def fits(self, one: Any, other: Any) -> bool:
        return one is None or self._unite(one, other)

    def common(self, equation: Equation, given: list[State | None]) -> Dims | None:
        found = None if equation.name in CASTS else super().common(equation, given)
        if found is None:
            return None
        pairs, dims = zip(equation.ins, given, strict=True), [*found]
        others = [i for i, (v, s) in enumerate(pairs) if s is None and number(v) is None]
        for axis, size in enumerate(equation.outs[0].shape):
            if dims[axis] is None and size != 1 and others:
                dims[axis] = (_NEW, equation.at, axis)
        for i in others:
            self._enters(equation, i, tuple(dims) if equation.ins[i].shape else ())
        return tuple(dims)

    def elementwise(self, equation: Equation, given: list[State | None], dims: Dims) -> State:
        return State(_kind(given), dims)

    def contracted(self, equation: Equation, given: list[State | None]) -> State | None:
        (contract, batch), ins = equation.params["dimension_numbers"], equation.ins
        pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
        named: list[Any] = [None if state is None else state.dims for state in given]
        for i in (0, 1):
            if named[i] is None:
                named[i] = self._as_operand(equation, i, named[1 - i], pairs)
        if given == [None, None]:  # cotangent and values; not a second product
            ends = {name for name in self.own[2].dims if isinstance(name, tuple)}
            if ends not in [
                {d[a] for a in axes} for axes, d in zip(contract, named, strict=True) if d
            ]:
                return None
        if named == [None, None]:
            return None
        for i in (0, 1):
            if named[i] is None:  # the cotangent, or an array that this knows nothing of
                shape = enumerate(ins[i].shape)
                dims = [(_NEW, equation.at, axis) if n != 1 else None for axis, n in shape]
                for pair in pairs:
                    dims[pair[i]] = named[1 - i][pair[1 - i]]
                named[i] = tuple(dims)
                self._enters(equation, i, named[i])
        for pair in pairs:
            one, other = named[0][pair[0]], named[1][pair[1]]
            if one is None or other is None:
                if one is not other or ins[0].shape[pair[0]] != 1:
                    return None
            elif not self._unite(one, other):
                return None
        ends = [named[i][axis] for i in (0, 1) for axis in free_dims(equation)[i]]
        return State(_kind(given), tuple([named[0][axis] for axis in batch[0]] + ends))

    def _name_ends(self) -> None:
        """Names the dimension along which the cotangent meets no other array, where queries and
        keys have no gradient."""
        queries, keys, values = (leaf.dims for leaf in self.own)
        ends = {name for name in values if isinstance(name, tuple)}
        rows = ({*values, *queries} - {None, *keys}) | ({*queries} & {*values})
        for leaf in {*self.leaves.values()}:
            names = {*self._resolved(leaf.dims)} - {None}
            new = {name for name in names if _is_new(name)}
            if len(new) == len(ends) == 1 and names - new <= rows - ends:
                self._unite(*new, *ends)

    def _enters(self, equation: Equation, i: int, dims: Dims) -> None:
        root, at = rooted(equation.ins[i], dims)
        if equation.name == "dot_general" and {*at} - {None} != {*dims} - {None}:
            root, at = equation.ins[i], dims  # the cotangent of a sum is one number, repeated
        key = self._key(root)
        for leaf in [leaf for leaf in self.leaves.values() if leaf.key == key]:
            old, new = self._resolved(leaf.dims), self._resolved(at)
            pairs = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
            if all(None not in pair and any(map(_is_new, pair)) for pair in pairs):
                for pair in pairs:
                    self._unite(*pair)
        self.leaves[equation, i] = Leaf(key, at, root)

    def _as_operand(self, equation: Equation, i: int, other: Any, pairs: Any) -> Dims | None:
        """The axes of queries, keys or values as an operand, such that they fit the other."""
        value = equation.ins[i]
        root, at = rooted(value, (*range(len(value.shape)),))
        for own in self.own:
            dims: list[Any] = [None] * len(value.shape)
            if value is own.root:
                dims = [*own.dims]
            else:
                its, names = rooted(own.root, own.dims)
                if its is not root or {*names} - {None} != own.axes:
                    continue
                for axis, name in zip(at, names, strict=True):
                    if axis is not None:
                        dims[axis] = name
            met = [] if other is None else [(dims[p[i]], other[p[1 - i]]) for p in pairs]
            if all(a == b or _is_new(b) for a, b in ((a, self._resolved((b,))[0]) for a, b in met)):
                self.leaves[equation, i] = own
                return tuple(dims)
        return None

    def _unite(self, a: Any, b: Any) -> bool:
        a, b = self._resolved((a, b))
        if a != b:
            a, b = (b, a) if _is_new(b) else (a, b)
            if not _is_new(a):
                return False
            self.same[a] = b
        return True

    def _key(self, value: Value) -> Hashable:
        """Equal for values that are computed alike from positions and constants."""
        if value not in self._keys:
            made = value.made_by
            if made is None or not value.is_known:
                key: Hashable = id(value)
            else:
                ins = (v if (v := number(x)) is not None else self._key(x) for x in made.ins)
                key = made.name, str(made.params), tuple(ins)
            self._keys[value] = key
        return self._keys[value]


def _kind(given: Sequence[State | None]) -> str:
    """Whether a result depends on the scores: other attention may share the values."""
    kinds = [state.kind for state in given if state is not None]
    return _OF_SCORES if _OF_SCORES in kinds else _BESIDE


def _is_new(name: Any) -> bool:
    """Whether an axis has no name yet that others know."""
    return isinstance(name, tuple) and name[0] == _NEW
