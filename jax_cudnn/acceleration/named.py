"""Names for the dimensions of what follows from attention's scores: the axes of the scores, of the
features of keys and of values. The cotangent of the result gets them from what it meets."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp

from .known import is_known
from .program import Program
from .sampled import REDUCTIONS, Leaf
from .scores import LAYOUT, Dims, Unclear, moved, narrowed, number
from .softmax import OUT, Follower
from .values import CASTS, ELEMENTWISE, Equation, Value, free_dims

_NEW = "?"
ROLES = ("queries", "keys", "values")


class Walk:
    """Which axes the dimensions of the values have that follow from the scores."""

    def __init__(
        self, program: Program, follower: Follower, forward: set[Equation], of_query: int
    ) -> None:
        self.follower = follower
        self.dims: dict[Value, Dims] = {}
        self.same: dict[Any, Any] = {}  # a name -> the axis that it turned out to be
        self.leaves: dict[tuple[Equation, int], Leaf] = {}
        self.roots: dict[Hashable, Value] = {}
        self.dtypes: dict[Hashable, Any] = {}
        self.order: list[Equation] = []
        self.gradients: dict[Value, int] = {}
        self._keys: dict[Value, Hashable] = {}
        self.operands, self.names = self._operands(of_query)
        if len({rooted(v, ())[0] for v in self.operands}) != len(ROLES):
            raise Unclear("queries, keys or values are one array")
        self.dtypes |= {self.own(i).key: v.dtype for i, v in enumerate(self.operands)}
        for i in (0, 1):
            self.leaves[follower.product, i] = self.own(i ^ of_query)
        (scores,) = follower.product.outs
        self.dims[scores] = follower.states[scores].dims
        self.of_scores = {scores}  # what depends on them: others may share the values
        values, _ = rooted(self.operands[2], ())
        todo = {*scores.users}
        for e in program.equations:
            if e.name == "dot_general" and any(rooted(v, ())[0] is values for v in e.ins):
                todo.add(e)
        seen: set[Equation] = {follower.product}
        while todo:
            equation = min(todo, key=lambda e: e.at)
            todo.remove(equation)
            if equation in seen:
                continue
            seen.add(equation)
            if self._takes(equation):
                (out,) = equation.outs
                self.order.append(equation)
                if not self.of_scores.isdisjoint(equation.ins):
                    self.of_scores.add(out)
                after = out.users if not self._ends(out) else forward.intersection(out.users)
                todo |= {user for user in after if user not in seen}
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
        return Leaf((ROLES[i],), self.names[i])

    def _operands(self, of_query: int) -> tuple[list[Value], list[Dims]]:
        """Queries, keys and values as the products take them, and their axes."""
        product, second = self.follower.product, self.follower.second
        assert second is not None
        (contract, batch), free = product.params["dimension_numbers"], free_dims(product)
        found: list[Dims] = []
        scores = self.follower.states[product.outs[0]].dims
        start = len(batch[0])
        for side in (0, 1):
            dims: list[Any] = [None] * len(product.ins[side].shape)
            for i, axis in enumerate(batch[side]):
                dims[axis] = scores[i]
            for i, axis in enumerate(free[side]):
                dims[axis] = scores[start + i]
            for i, axis in enumerate(contract[side]):
                dims[axis] = ("H", i) if product.ins[side].shape[axis] != 1 else None
            start += len(free[side])
            found.append(tuple(dims))
        operands = [*product.ins]
        if of_query:
            found, operands = found[::-1], operands[::-1]
        side = next(i for i, v in enumerate(second.ins) if v in self.follower.states)
        state, other = self.follower.states[second.ins[side]], 1 - side
        dims = [None] * len(second.ins[other].shape)
        for pairs in second.params["dimension_numbers"]:
            for mine, theirs in zip(pairs[side], pairs[other], strict=True):
                dims[theirs] = state.dims[mine]
        for i, axis in enumerate(free_dims(second)[other]):
            dims[axis] = ("E", i) if second.ins[other].shape[axis] != 1 else None
        return [*operands, second.ins[other]], [*found, tuple(dims)]

    def _ends(self, out: Value) -> bool:
        """Whether a value is the result, or a gradient."""
        state = self.follower.states.get(out)
        if state is not None and state.kind == OUT:
            return True
        if out.made_by is None or out.made_by.name != "dot_general":
            return False
        names = frozenset(self.resolved(self.dims[out])) - {None}
        own = [frozenset(dims) - {None} for dims in self.names]
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
            dims = self.dims[ins[0]] if _is_float(out) else None
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
        ends = [name for name in self.names[2] if isinstance(name, tuple)]
        rows = (frozenset(self.names[2]) | frozenset(self.names[0])) - {None, *self.names[1]}
        rows |= frozenset(self.names[0]) & frozenset(self.names[2])
        for leaf in {*self.leaves.values()}:
            names = [name for name in self.resolved(leaf.dims) if name is not None]
            new = [name for name in names if _is_new(name)]
            if len(new) == len(ends) == 1 and {*names} - {*new} <= rows - {*ends}:
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
        shape = equation.outs[0].shape
        dims: list[Any] = [None] * len(shape)
        others = []
        for i, v in enumerate(equation.ins):
            if v in self.dims:
                for axis, d in enumerate(self.dims[v]):
                    if d is not None and dims[axis] is not None and not self._unite(dims[axis], d):
                        return None
                    dims[axis] = dims[axis] if d is None else d
            elif number(v) is None:
                others.append(i)
        for axis, size in enumerate(shape):
            if dims[axis] is None and size != 1 and others:
                dims[axis] = (_NEW, equation.at, axis)
        for i in others:
            self._enters(equation, i, tuple(dims) if equation.ins[i].shape else ())
        return tuple(dims)

    def _of_product(self, equation: Equation) -> Dims | None:
        contract, batch = equation.params["dimension_numbers"]
        pairs = [*zip(*contract, strict=True), *zip(*batch, strict=True)]
        named: list[Any] = [self.dims.get(v) for v in equation.ins]
        for i in (0, 1):
            if named[i] is None:
                named[i] = self._as_operand(equation, i, named[1 - i], pairs)
        if self.dims.keys().isdisjoint(equation.ins):  # cotangent and values; not a second product
            ends = {name for name in self.names[2] if isinstance(name, tuple)}
            sums = [{dims[axis] for axis in contract[i]} for i, dims in enumerate(named) if dims]
            if ends not in sums:
                return None
        for i in (0, 1):
            if named[i] is None:  # the cotangent, or an array that this knows nothing of
                if named[1 - i] is None:
                    return None
                shape = enumerate(equation.ins[i].shape)
                dims = [(_NEW, equation.at, axis) if n != 1 else None for axis, n in shape]
                for pair in pairs:
                    dims[pair[i]] = named[1 - i][pair[1 - i]]
                named[i] = tuple(dims)
                self._enters(equation, i, named[i])
        for pair in pairs:
            one, other = named[0][pair[0]], named[1][pair[1]]
            if one is None or other is None:
                if one is not other or equation.ins[0].shape[pair[0]] != 1:
                    return None
            elif not self._unite(one, other):
                return None
        free = free_dims(equation)
        ends = [named[i][axis] for i in (0, 1) for axis in free[i]]
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
            if made is None or not is_known(value):
                key: Hashable = id(value)
            else:
                ins = (v if (v := number(x)) is not None else self.key(x) for x in made.ins)
                key = made.name, str(made.params), tuple(ins)
            self._keys[value] = key
        return self._keys[value]


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _is_new(name: Any) -> bool:
    """Whether an axis has no name yet that others know."""
    return isinstance(name, tuple) and name[0] == _NEW


def rooted(value: Value, dims: Dims) -> tuple[Value, Dims]:
    """A value before it was moved, broadcast and cast, and its dims."""
    value, dims = narrowed(value, dims or (None,) * len(value.shape))
    while (made := value.made_by) is not None and made.casts:
        if value.dtype != made.ins[0].dtype and not (_is_float(value) and _is_float(made.ins[0])):
            break
        value, dims = narrowed(made.ins[0], dims)
    return value, dims
