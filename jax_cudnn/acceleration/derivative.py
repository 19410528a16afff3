"""Attention's derivative in a program that differentiates itself: what follows from the scores and
the cotangent of the result, up to the gradients of queries, keys and values.

However it is written, it is taken for the derivative if it computes the derivative's values
(:mod:`.sampled`). For that, the dimensions of all values in it get names: the axes of the scores,
of the features of keys and of values. The cotangent of the result gets them from what it meets.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .following import OUT, ROW, SUM, Dims, Operand, Side, Softmax, Unclear, moved, rooted
from .program import Program
from .region import Backward
from .sampled import REDUCTIONS, Leaf, Part, check
from .values import CASTS, ELEMENTWISE, LAYOUT, Equation, Value, between, free_dims, number, renamed

_NEW = "?"
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
    targets = {value: walk.own(i) for value, i in walk.gradients.items()}
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
    leaves = {(e, i): walk.leaf(e, i) for e, i in walk.leaves if e in everything}
    result = softmax.states[last]
    ends = {*result.dims} - {None}
    own = [walk.own(i) for i in range(len(_ROLES))]
    cotangents = [x for x in leaves.values() if {*x.dims} - {None} == ends and x not in own]
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
        dims={value: walk.resolved(dims) for value, dims in walk.dims.items()},
        leaves=leaves,
        dtypes={leaf: walk.dtypes[leaf.key] for leaf in leaves.values()},
        shifts={v for v in (*sums, *softmax.all_of(ROW)) if v.made_by in forward},
        signs={e.outs[0] for e in compared if all(v in sums or number(v) == 0 for v in e.ins)},
    )
    check(part)
    for value, i in walk.gradients.items():
        found.append(_of_operand(program, walk, value, i, operands[i], everything))
        everything |= found[-1].more
    root = walk.roots[cotangent.key]
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
    leaves = dict.fromkeys(walk.leaf(*place) for place in walk.leaves)
    while True:
        dims = walk.resolved(walk.dims[value])
        for i, side in enumerate(biases, len(_ROLES)):
            for leaf in leaves:
                alike = {*dims} - {None} == side.axes == {*leaf.dims} - {None}
                if alike and _holds(walk.roots.get(leaf.key), side):
                    return leaf, _Gradient(value, i, _brought(side.dims, dims, value.shape), more)
        users = {user for user in value.users if user not in inside}
        if program.is_read(value) or len(users) != 1:
            raise Unclear(_READ)
        (user,) = users
        if user not in walk.order or not (user.casts or user.name in (*LAYOUT, "reduce_sum")):
            raise Unclear(_READ)
        more |= {user}
        (value,) = user.outs


def _holds(total: Value | None, side: Side) -> bool:
    """Whether a value is a sum of which a bias is a term."""
    if total is None:
        return False
    root, _ = rooted(total)
    made = root.made_by
    terms = made.ins if made is not None and made.name == "add" else ()
    return root is rooted(side.value)[0] or any(_holds(v, side) for v in terms)


def _of_operand(
    program: Program, walk: _Walk, value: Value, i: int, operand: Operand, inside: set[Equation]
) -> _Gradient:
    """The gradient of queries, keys or values as cuDNN takes them: after the scale that precedes
    the product, where the program has it."""
    at, now, names, more = value, 1.0, walk.resolved(walk.dims[value]), set[Equation]()
    unscaled = _brought(operand.dims, names, at.shape, 1 / operand.factor)
    while not math.isclose(now, operand.factor, rel_tol=_SAME):
        user = at.users[0] if len(at.users) == 1 and not program.is_read(at) else None
        if user is None or user in inside or user.inner or len(user.outs) != 1:
            return _Gradient(value, i, unscaled, set())
        others = [number(v) for v in user.ins if v is not at]
        scales = user.name == "mul" or (user.name == "div" and user.ins[0] is at)
        if user.name in LAYOUT and (found := moved(user, names)) is not None:
            names = found
        elif scales and len(others) == 1 and others[0]:
            now = now * others[0] if user.name == "mul" else now / others[0]
        elif not user.casts:
            return _Gradient(value, i, unscaled, set())
        more = more | {user}
        (at,) = user.outs
    return _Gradient(at, i, _brought(operand.dims, names, at.shape), more)


# -- names of dimensions ---------------------------------------------------------------------------


class _Walk:
    """Which axes the dimensions of the values have that follow from the scores. ``same``: the axis
    that a name turned out to be; ``leaves``: the arrays that enter, by equation and operand;
    ``roots`` and ``dtypes``: what they are, by key; ``gradients``: of which operand values are."""

    def __init__(
        self,
        program: Program,
        softmax: Softmax,
        forward: set[Equation],
        operands: Sequence[Operand],
    ) -> None:
        self.softmax = softmax
        self.dims: dict[Value, Dims] = {}
        self.same: dict[Any, Any] = {}
        self.leaves: dict[tuple[Equation, int], Leaf] = {}
        self.roots: dict[Hashable, Value] = {}
        self.order: list[Equation] = []
        self.gradients: dict[Value, int] = {}
        self._keys: dict[Value, Hashable] = {}
        self.operands = [x.given for x in operands]
        sized = [zip(x.given_dims, x.given.shape, strict=True) for x in operands]
        self.names = [tuple(d if n != 1 else None for d, n in pairs) for pairs in sized]
        if len({rooted(v)[0] for v in self.operands}) != len(_ROLES):
            raise Unclear("queries, keys or values are one array")
        own = [self.own(i).key for i in range(len(_ROLES))]
        self.dtypes = dict(zip(own, (v.dtype for v in self.operands), strict=True))
        product = softmax.product
        for i, v in enumerate(product.ins):
            self.leaves[product, i] = self.own(self.operands.index(v))
        (scores,) = product.outs
        self.dims[scores] = softmax.states[scores].dims
        self.of_scores = {scores}  # what depends on them: others may share the values
        values, _ = rooted(self.operands[2])
        products = (e for e in program.equations if e.name == "dot_general")
        todo = {*scores.users, *(e for e in products if any(rooted(v)[0] is values for v in e.ins))}
        seen: set[Equation] = {product}
        while todo := todo - seen:
            equation = min(todo, key=lambda e: e.at)
            seen.add(equation)
            if self._takes(equation):
                (out,) = equation.outs
                self.order.append(equation)
                if not self.of_scores.isdisjoint(equation.ins):
                    self.of_scores.add(out)
                todo |= forward.intersection(out.users) if self._ends(out) else {*out.users}
        self._name_ends()
        for equation in self.order:
            self._ends(equation.outs[0])  # some names are known by now

    def resolved(self, dims: Dims) -> Dims:
        def of(name: Any) -> Any:
            while name in self.same:
                name = self.same[name]
            return name

        return tuple(map(of, dims))

    def leaf(self, equation: Equation, i: int) -> Leaf:
        found = self.leaves[equation, i]
        return Leaf(found.key, self.resolved(found.dims))

    def own(self, i: int) -> Leaf:
        """Queries, keys or values."""
        return Leaf((_ROLES[i],), self.names[i])

    def _ends(self, out: Value) -> bool:
        """Whether a value is the result, or a gradient."""
        state = self.softmax.states.get(out)
        if state is not None and state.kind == OUT:
            return True
        if out.made_by is None or out.made_by.name != "dot_general":
            return False
        names = {*self.resolved(self.dims[out])} - {None}
        own = [{*dims} - {None} for dims in self.names]
        if names in own and out in self.of_scores:
            self.gradients[out] = own.index(names)
        return names in own

    def _takes(self, equation: Equation) -> bool:
        """Names the dimensions of an equation's result; False where it is no part of this."""
        if equation.inner or len(equation.outs) != 1 or equation.eqn.effects:
            return False
        name, (out,), ins = equation.name, equation.outs, equation.ins
        dims: Dims | None = None
        if name in LAYOUT:
            dims = moved(equation, self.dims[ins[0]])
        elif equation.casts or name == "stop_gradient":
            dims = self.dims[ins[0]] if out.is_float else None
        elif name in REDUCTIONS:
            axes, (x,) = equation.params["axes"], ins
            if all(self.dims[x][i] is not None or x.shape[i] == 1 for i in axes):
                dims = tuple(d for i, d in enumerate(self.dims[x]) if i not in axes)
        elif name == "dot_general":
            dims = self._of_product(equation)
        elif name in ELEMENTWISE and name not in CASTS:
            dims = self._of_elements(equation)
        if dims is not None:
            self.dims[out] = dims
        return dims is not None

    def _name_ends(self) -> None:
        """Names the dimension along which the cotangent meets no other array, where queries and
        keys have no gradient."""
        queries, keys, values = self.names
        ends = {name for name in values if isinstance(name, tuple)}
        rows = ({*values, *queries} - {None, *keys}) | ({*queries} & {*values})
        for leaf in {*self.leaves.values()}:
            names = {*self.resolved(leaf.dims)} - {None}
            new = {name for name in names if _is_new(name)}
            if len(new) == len(ends) == 1 and names - new <= rows - ends:
                self._unite(*new, *ends)

    def _enters(self, equation: Equation, i: int, dims: Dims) -> None:
        root, at = rooted(equation.ins[i], dims)
        if equation.name == "dot_general" and {*at} - {None} != {*dims} - {None}:
            root, at = equation.ins[i], dims  # the cotangent of a sum is one number, repeated
        key = self.key(root)
        self.roots[key], self.dtypes[key] = root, root.dtype
        for leaf in [leaf for leaf in self.leaves.values() if leaf.key == key]:
            old, new = self.resolved(leaf.dims), self.resolved(at)
            pairs = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
            if all(None not in pair and any(map(_is_new, pair)) for pair in pairs):
                for pair in pairs:
                    self._unite(*pair)
        self.leaves[equation, i] = Leaf(key, at)

    def _of_elements(self, equation: Equation) -> Dims | None:
        dims: list[Any] = [None] * len(equation.outs[0].shape)
        others = [v not in self.dims and number(v) is None for v in equation.ins]
        for v in equation.ins:
            for axis, d in enumerate(self.dims.get(v, ())):
                if d is not None and dims[axis] is not None and not self._unite(dims[axis], d):
                    return None
                dims[axis] = dims[axis] if d is None else d
        for axis, size in enumerate(equation.outs[0].shape):
            if dims[axis] is None and size != 1 and any(others):
                dims[axis] = (_NEW, equation.at, axis)
        for i, v in enumerate(equation.ins):
            if others[i]:
                self._enters(equation, i, tuple(dims) if v.shape else ())
        return tuple(dims)

    def _of_product(self, equation: Equation) -> Dims | None:
        (contract, batch), ins = equation.params["dimension_numbers"], equation.ins
        pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
        named: list[Any] = [self.dims.get(v) for v in ins]
        for i in (0, 1):
            if named[i] is None:
                named[i] = self._as_operand(equation, i, named[1 - i], pairs)
        if self.dims.keys().isdisjoint(ins):  # cotangent and values; not a second product
            ends = {name for name in self.names[2] if isinstance(name, tuple)}
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
        return tuple([named[0][axis] for axis in batch[0]] + ends)

    def _as_operand(self, equation: Equation, i: int, other: Any, pairs: Any) -> Dims | None:
        """The axes of queries, keys or values as an operand, such that they fit the other."""
        value = equation.ins[i]
        root, at = rooted(value, (*range(len(value.shape)),))
        for which, operand in enumerate(self.operands):
            dims: list[Any] = [None] * len(value.shape)
            if value is operand:
                dims = [*self.names[which]]
            else:
                its, names = rooted(operand, self.names[which])
                if its is not root or {*names} - {None} != {*self.names[which]} - {None}:
                    continue
                for axis, name in zip(at, names, strict=True):
                    if axis is not None:
                        dims[axis] = name
            met = [] if other is None else [(dims[p[i]], other[p[1 - i]]) for p in pairs]
            if all(a == b or _is_new(b) for a, b in ((a, self.resolved((b,))[0]) for a, b in met)):
                self.leaves[equation, i] = self.own(which)
                return tuple(dims)
        return None

    def _unite(self, a: Any, b: Any) -> bool:
        a, b = self.resolved((a, b))
        if a != b:
            a, b = (b, a) if _is_new(b) else (a, b)
            if not _is_new(a):
                return False
            self.same[a] = b
        return True

    def key(self, value: Value) -> Hashable:
        """Equal for values that are computed alike from positions and constants."""
        if value not in self._keys:
            made = value.made_by
            if made is None or not value.is_known:
                key: Hashable = id(value)
            else:
                ins = (v if (v := number(x)) is not None else self.key(x) for x in made.ins)
                key = made.name, str(made.params), tuple(ins)
            self._keys[value] = key
        return self._keys[value]


def _is_new(name: Any) -> bool:
    """Whether an axis has no name yet that others know."""
    return isinstance(name, tuple) and name[0] == _NEW
