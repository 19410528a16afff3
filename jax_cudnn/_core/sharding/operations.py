"""The axes of JAX's operations: which of an operand and a result are sharded together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ADD, MAX, MIN = "add", "max", "min"


class Classes:
    """Axes in disjoint sets. Shards of a set's axes are equal blocks, in the same order; ``size``
    is what the number of shards must divide, and a ``whole`` set cannot be sharded."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._sizes: list[int] = []
        self._whole: list[bool] = []

    def new(self, size: int) -> int | None:
        """An axis; None for one of size 1, which every shard has."""
        if size == 1:
            return None
        self._parents.append(len(self._parents))
        self._sizes.append(size)
        self._whole.append(size == 0)
        return len(self._parents) - 1

    def find(self, axis: int) -> int:
        """The number of the axis's set, which is final once all sets are joined."""
        parents = self._parents
        while parents[axis] != axis:
            parents[axis] = axis = parents[parents[axis]]
        return axis

    def roots(self, axes: Iterable[int | None]) -> list[int]:
        return [self.find(axis) for axis in axes if axis is not None]

    def join(self, *axes: int | None, size: int = 0) -> None:
        """Joins sets; the number of shards must divide ``size``, too."""
        if not (roots := self.roots(axes)):
            return
        first = roots[0]
        for other in roots[1:]:
            self._parents[other] = first
            self._whole[first] |= self._whole[other]
            self._sizes[first] = math.gcd(self._sizes[first], self._sizes[other])
        self._sizes[first] = math.gcd(self._sizes[first], size)

    def join_all(self, *arrays: Iterable[int | None]) -> None:
        """Joins the axes of arrays of one shape."""
        for axes in zip(*arrays, strict=True):
            self.join(*axes)

    def keep_whole(self, *axes: int | None) -> None:
        for root in self.roots(axes):
            self._whole[root] = True

    def keep_diagonals_whole(self, axes: Iterable[int | None]) -> None:
        """Keeps a set whole that has two axes of one array: shards would be diagonal blocks."""
        roots = self.roots(axes)
        if len({*roots}) < len(roots):
            self.keep_whole(*(root for root in roots if roots.count(root) > 1))

    def whole(self, root: int) -> bool:
        return self._whole[root]

    def size(self, root: int) -> int:
        return self._sizes[root]


Range = tuple[float, float]


class Value:
    """An array inside the function: its axes, the least and the largest element if known, the
    sets over whose shards it is a partial sum (or largest or smallest element), and whether it
    follows from offsets alone, which are others on a shard."""

    __slots__ = ("axes", "is_offset", "partial", "range", "shape")

    def __init__(self, shape: Sequence[int], axes: list[int | None], range: Range | None = None):
        self.shape, self.axes, self.range = tuple(shape), axes, range
        self.partial: dict[int, str] = {}
        self.is_offset = False

    @property
    def constant(self) -> float | None:
        """The value of all elements, if it is known."""
        return self.range[0] if self.range and self.range[0] == self.range[1] else None


_ELEMENTWISE = {
    *"abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt".split(),
    *"ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc".split(),
    *"exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max".split(),
    *"min mul ne neg nextafter not or population_count pow reduce_precision rem round".split(),
    *"bessel_i0e bessel_i1e clz eq_to igamma igamma_grad_a igammac le_to log2 lt_to mulhi".split(),
    *"one_minus_square polygamma zeta".split(),
    *"rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh".split(),
    *"sqrt square stop_gradient sub tan tanh xor".split(),
}

_Made = list[tuple[int | None, str]] | None
_Rule = Callable[[Classes, Mapping[str, Any], list[Value], list[Value]], _Made]


def unknown(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    for x in (*ins, *outs):
        classes.keep_whole(*x.axes)


def _elementwise(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    """Operands may be scalars, or have dimensions of size 1."""
    for x in ins:
        if x.shape and len(x.shape) != len(outs[0].shape):
            return unknown(classes, params, ins, outs)
        if x.shape and x.constant is None:
            classes.join_all(x.axes, outs[0].axes)


def _iota(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    classes.keep_whole(outs[0].axes[params["dimension"]])


def _reshape(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    """Of dimensions that are merged or split, the slowest in memory passes."""
    (x, *_), (out,) = ins, outs
    sides = [[(s, a) for s, a in zip(v.shape, v.axes, strict=True) if s != 1] for v in (x, out)]
    if 0 in x.shape:
        return unknown(classes, params, ins, outs)
    left, right = sides
    while left and right:
        groups = [left.pop(0)], [right.pop(0)]
        while (sizes := [math.prod(size for size, _ in group) for group in groups]) and (
            sizes[0] != sizes[1]
        ):
            less = sizes[0] > sizes[1]
            groups[less].append(sides[less].pop(0))
        classes.join(groups[0][0][1], groups[1][0][1])
        for _, axis in (*groups[0][1:], *groups[1][1:]):
            classes.keep_whole(axis)


def _moved(to: Callable[[Mapping[str, Any], int], Sequence[int]]) -> _Rule:
    """For an operation whose result has axis ``to(params, rank)[i]`` of its operand as axis i."""

    def rule(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
        axes = to(params, len(ins[0].shape))
        classes.join_all([ins[0].axes[axis] for axis in axes], outs[0].axes)

    return rule


def _broadcast(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    for axis, at in zip(ins[0].axes, params["broadcast_dimensions"], strict=True):
        classes.join(axis, outs[0].axes[at] if axis is not None else None)


def _except(changed: Callable[[Mapping[str, Any], tuple[int, ...]], Sequence[int]]) -> _Rule:
    """For an operation whose operands and results have the same axes, and that is elementwise but
    for the axes ``changed``. Operands of another rank are scalars."""

    def rule(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
        rank, whole = len(outs[0].shape), {*changed(params, ins[0].shape)}
        arrays = [x for x in (*ins, *outs) if len(x.shape) == rank]
        for axis in range(rank):
            axes = [x.axes[axis] for x in arrays]
            classes.keep_whole(*axes) if axis in whole else classes.join(*axes)

    return rule


def _windows(params: Mapping[str, Any], shape: tuple[int, ...]) -> list[int]:
    each = [params[f"window_{name}"] for name in ("dimensions", "strides")]
    return [
        i for i, x in enumerate(zip(*each, params["padding"], strict=True)) if x != (1, 1, (0, 0))
    ]


def _sliced(params: Mapping[str, Any], shape: tuple[int, ...]) -> list[int]:
    steps = params["strides"] or (1,) * len(shape)
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [i for i, each in enumerate(bounds) if each != (0, shape[i], 1)]


def _reduced(how: str | None) -> _Rule:
    def rule(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
        gone = params["axes"]
        for out in outs:
            kept = [axis for i, axis in enumerate(ins[0].axes) if i not in gone]
            classes.join_all(kept, out.axes)
        axes = [x.axes[i] for x in ins if x.shape for i in gone]
        if how is not None:
            return [(axis, how) for axis in axes]
        classes.keep_whole(*axes)

    return rule


def _dot(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    (left, right), (gone, batch) = ins, params["dimension_numbers"]
    made = iter(outs[0].axes)
    for i, j in zip(*batch, strict=True):
        classes.join(left.axes[i], right.axes[j], next(made))
    for x, known in ((left, (*gone[0], *batch[0])), (right, (*gone[1], *batch[1]))):
        for i, axis in enumerate(x.axes):
            if i not in known:
                classes.join(axis, next(made))
    for i, j in zip(*gone, strict=True):
        classes.join(left.axes[i], right.axes[j])
    return [(left.axes[i], ADD) for i in gone[0]]


def _convolution(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    (x, w), (y,) = ins, outs
    of_x, of_w, of_y = params["dimension_numbers"]
    (n, c, *space), (k, i, *window), (m, o, *out) = (
        [v.axes[axis] for axis in spec] for v, spec in ((x, of_x), (w, of_w), (y, of_y))
    )
    features, examples = params["feature_group_count"], params["batch_group_count"]
    classes.join(k, o)
    summed: list[int | None] = []
    if features > 1:
        classes.join(c, k, size=features)
        classes.keep_whole(i)
    else:
        classes.join(c, i)
        summed.append(c)
    if examples > 1:
        classes.join(n, k, size=examples)
        classes.keep_whole(m)
    else:
        classes.join(n, m)
    spreads = zip(
        params["window_strides"], params["lhs_dilation"], params["rhs_dilation"], strict=True
    )
    for at, (spread, padding) in enumerate(zip(spreads, params["padding"], strict=True)):
        plain = spread == (1, 1, 1) and tuple(padding) == (0, 0)
        if plain and window[at] is None:
            classes.join(space[at], out[at])
        elif plain and out[at] is None:
            classes.join(space[at], window[at])
            summed.append(space[at])
        else:
            classes.keep_whole(space[at], window[at], out[at])
    return [(axis, ADD) for axis in summed]


def _gather(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    numbers, (x, indices), (out,) = params["dimension_numbers"], ins, outs
    batched = tuple(getattr(numbers, "operand_batching_dims", ()))
    gone = {*numbers.collapsed_slice_dims, *batched}
    window = [i for i in range(len(x.shape)) if i not in gone]
    for i, at in zip(window, numbers.offset_dims, strict=True):
        if params["slice_sizes"][i] == x.shape[i]:
            classes.join(x.axes[i], out.axes[at])
        else:
            classes.keep_whole(x.axes[i], out.axes[at])
    classes.keep_whole(*(x.axes[i] for i in numbers.collapsed_slice_dims), indices.axes[-1])
    rows = [axis for at, axis in enumerate(out.axes) if at not in numbers.offset_dims]
    classes.join_all(indices.axes[:-1], rows)
    for i, j in zip(batched, getattr(numbers, "start_indices_batching_dims", ()), strict=True):
        classes.join(x.axes[i], indices.axes[j])


def _dynamic(params: Mapping[str, Any], shape: tuple[int, ...]) -> list[int]:
    return [i for i, size in enumerate(params["slice_sizes"]) if size != shape[i]]


def _updated(classes: Classes, params: Any, ins: list[Value], outs: list[Value]) -> _Made:
    x, part, *_ = ins
    sides = x.axes, part.axes, outs[0].axes, x.shape, part.shape
    for *axes, size, other in zip(*sides, strict=True):
        classes.join(*axes)
        classes.keep_whole(*axes if size != other else ())


RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "iota": _iota,
    "reshape": _reshape,
    "transpose": _moved(lambda params, rank: params["permutation"]),
    "squeeze": _moved(lambda p, rank: [i for i in range(rank) if i not in p["dimensions"]]),
    "broadcast_in_dim": _broadcast,
    "slice": _except(_sliced),
    "dynamic_slice": _except(_dynamic),
    "dynamic_update_slice": _updated,
    "pad": _except(
        lambda p, shape: [i for i, each in enumerate(p["padding_config"]) if each != (0, 0, 0)]
    ),
    "rev": _except(lambda params, shape: params["dimensions"]),
    "concatenate": _except(lambda params, shape: [params["dimension"]]),
    "sort": _except(lambda params, shape: [params["dimension"]]),
    "split": _except(lambda params, shape: [params["axis"]]),
    **{
        f"cum{name}": _except(lambda p, shape: [p["axis"]])
        for name in ("sum", "max", "min", "prod")
    },
    **{f"reduce_window_{name}": _except(_windows) for name in ("sum", "max", "min")},
    "select_and_scatter_add": _except(_windows),
    "reduce_sum": _reduced(ADD),
    "reduce_max": _reduced(MAX),
    "reduce_min": _reduced(MIN),
    **dict.fromkeys(
        [*"reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()], _reduced(None)
    ),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "gather": _gather,
}

_SAME = {*"broadcast_in_dim reshape squeeze transpose slice copy stop_gradient".split()}
_SAME |= {"reduce_max", "reduce_min", "reduce_and", "reduce_or"}


def known_range(name: str, params: Mapping[str, Any], ranges: list[Any], aval: Any) -> Range | None:
    """The least and largest element of a result, which tells that a mask hides nothing."""
    if name == "iota":
        return 0, max(aval.shape[params["dimension"]] - 1, 0)
    if not ranges or None in ranges:
        return None
    (a, b), (c, d) = ranges[0], ranges[-1]
    if name in _SAME:
        return a, b
    kind = aval.dtype.kind
    if name == "convert_element_type":
        if kind == "b":
            return (float(a != 0), float(b != 0)) if a == b else None
        if kind == "f":
            return a, b
        fits = kind == "i" and max(abs(a), abs(b)) < 2 ** (8 * aval.dtype.itemsize - 1)
        return (float(int(a)), float(int(b))) if fits else None
    if kind == "u" or (name in ("and", "or", "not") and kind != "b"):
        return None
    made: dict[str, Callable[[], Range]] = {
        "add": lambda: (a + c, b + d),
        "sub": lambda: (a - d, b - c),
        "neg": lambda: (-b, -a),
        "sign": lambda: (float((a > 0) - (a < 0)), float((b > 0) - (b < 0))),
        "max": lambda: (max(a, c), max(b, d)),
        "min": lambda: (min(a, c), min(b, d)),
        "lt": lambda: (float(b < c), float(a < d)),
        "le": lambda: (float(b <= c), float(a <= d)),
        "gt": lambda: (float(a > d), float(b > c)),
        "ge": lambda: (float(a >= d), float(b >= c)),
        "and": lambda: (min(a, c), min(b, d)),
        "or": lambda: (max(a, c), max(b, d)),
        "not": lambda: (1 - b, 1 - a),
    }
    return made[name]() if name in made else None
