"""What stands between scores and their softmax: scale, biases, masks, a function of the scores.

Masks are read by their values: one that is made of positions and constants is compared with a band,
one that compares positions with a number for each batch element becomes lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from .following import Dims, Side, Unclear, any_cast, computed, constant, narrowed, rooted, side
from .softmax import HIDING
from .values import ELEMENTWISE, LAYOUT, Value, array, between, number, renamed, rows


@dataclass
class Scores:
    """A function ``rest`` of the product, or the product itself, scaled, plus biases, where masks
    are True; else hidden. ``infinite``: hidden scores are -inf, so that a query that sees no key
    has no result."""

    scale: float = 1.0
    biases: list[Side] = field(default_factory=list)
    masks: list[Side] = field(default_factory=list)
    infinite: bool = False
    rest: Value | None = None


@dataclass(frozen=True)
class Roles:
    """The axes of the scores by role, and the sizes of these and of the features."""

    sizes: dict[Any, int]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    query: int
    key: int

    @property
    def queries(self) -> int:
        return self.sizes[self.query]

    @property
    def keys(self) -> int:
        return self.sizes[self.key]

    def size(self, *axes: Any) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def order(self, along: int, heads_first: bool) -> list[int]:
        """The axes of an operand of queries or keys, before its features."""
        heads = *self.heads, *self.groups
        return [*self.batch, *heads, along] if heads_first else [*self.batch, along, *heads]

    def met(self, x: Any, side: Side) -> Any:
        """An array that meets the scores, as (B, N, T, S) or 1 in each place."""
        shape, full, many = [], [], (*self.heads, *self.groups)
        for axes in (self.batch, many):
            varies = not side.axes.isdisjoint(axes)
            full += [self.sizes[a] if varies else 1 for a in axes]
            shape.append(self.size(*axes) if varies else 1)
        x = side.along(x, [*self.batch, *many, self.query, self.key])
        return jnp.broadcast_to(x, (*full, *x.shape[-2:])).reshape(*shape, *x.shape[-2:])


def read(z: Value, product: Value, dims_of: Mapping[Value, Dims]) -> Scores:
    """What ``z`` is as a function of ``product``. Raises Unclear."""
    found, value, factor = Scores(), z, 1.0
    while value is not product:
        made = value.made_by
        assert made is not None
        inner = [v for v in made.ins if v in dims_of]
        if made.casts or made.name in LAYOUT:
            value = made.ins[0]
            continue
        if len(inner) != 1:
            break
        (below,), dims = inner, dims_of[value]
        others = [v for v in made.ins if v is not below]
        known = number(others[0]) if len(others) == 1 else None
        if made.name == "neg":
            factor = -factor
        elif (scale := made.factor_of(below)) is not None:
            factor *= scale
        elif made.name == "sub" and made.ins[1] is below:
            found.biases.append(side(made.ins[0], dims, factor))
            factor = -factor
        elif made.name in ("add", "sub", "add_any"):
            (other,) = others
            sign = -1.0 if made.name == "sub" else 1.0
            for one in _terms(side(other, dims, factor * sign)) if known != 0 else ():
                mask = _hiding_bias(one)
                if mask is None:
                    found.biases.append(one)
                else:
                    found.masks.append(mask[0])
                    found.infinite |= mask[1]
        elif made.name == "select_n" and len(made.ins) == 3 and made.ins[0] is not below:
            kept = made.ins[2] is below
            least = number(made.ins[1 if kept else 2])
            if least is None or not least * factor <= HIDING:
                break
            found.infinite |= math.isinf(least)
            found.masks.append(side(made.ins[0], dims, negated=not kept))
        elif made.name != "max" or known is None or not known <= HIDING:
            break
        value = below
    found.scale, found.rest = factor, None if value is product else value
    return found


def _terms(one: Side) -> Iterator[Side]:
    """The arrays whose sum is added to the scores."""
    value, dims = rooted(one.value, one.dims, any_cast)
    made = None if value.is_known else value.made_by
    if made is not None and made.name == "add":
        for v in made.ins:
            yield from _terms(side(v, dims, one.factor))
    else:
        yield one


def _hiding_bias(one: Side) -> tuple[Side, bool] | None:
    """The mask that a bias of zeros and large negative numbers is, and whether these are -inf; None
    for other biases."""
    value, dims = rooted(one.value, one.dims, any_cast)
    made = value.made_by
    if made is not None and made.name == "select_n" and len(made.ins) == 3:
        numbers = [number(v) for v in made.ins[1:]]
        low = [n is not None and n * one.factor <= HIDING for n in numbers]
        if None not in numbers and sorted(low) == [False, True] and 0 in numbers:
            infinite = any(math.isinf(n) for n in numbers if n is not None)
            return side(made.ins[0], dims, negated=low[1]), infinite
    if not value.is_known or not any(value.varies):
        return None
    lowest = -math.inf
    for _, block in rows(value, value.varies.index(True)):
        seen = block.astype("float32") * one.factor
        if not np.all((seen == 0) | (seen <= HIDING)):
            return None
        if np.any(seen < 0):
            lowest = max(lowest, float(seen[seen < 0].max()))
    hides = value.dtype == bool  # where it is True; a number hides where it is not 0
    return Side(value, dims, one.factor, negated=hides), lowest == -math.inf


def all_of(arrays: list[Any], sides: list[Side]) -> Any:
    """The mask that is True where all are; None without one."""
    mask = None
    for x, one in zip(arrays, sides, strict=True):
        x = (x != 0) ^ one.negated if one.value.dtype == bool else x == 0
        mask = x if mask is None else mask & x
    return mask


def added(arrays: list[Any], sides: list[Side]) -> Any:
    """The sum of biases; None without one."""
    total = None
    for x, one in zip(arrays, sides, strict=True):
        x = x * jnp.asarray(one.factor, x.dtype) if one.factor != 1 else x
        total = x if total is None else total + x
    return total


def score_mod(
    rest: Value, factor: float, product: Value, dims_of: Mapping[Value, Dims]
) -> tuple[Callable[..., Any], list[Side]]:
    """``f(score, b, h, q, kv, *operands)`` that computes ``factor * rest``, and its operands."""
    chain = sorted(between(rest, lambda v: v in dims_of and v is not product), key=lambda e: e.at)
    operands: dict[Value, Side] = {}
    for equation in chain:
        if equation.name not in ELEMENTWISE and equation.name not in LAYOUT:
            raise Unclear(f"{equation.name} between the scores and their softmax")
        for v in equation.ins:
            if v not in dims_of and v not in operands and number(v) is None:
                operands[v] = side(v, dims_of[equation.outs[0]])

    def modified(score: Any, b: Any, h: Any, q: Any, kv: Any, *arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        other = lambda v: given[v] if v in given else constant(v)  # noqa: E731
        found = computed(chain, {product: score}, other)[rest]
        return found * factor if factor != 1 else found

    return modified, [*operands.values()]


# -- masks -----------------------------------------------------------------------------------------

_TURNED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
_NEGATED = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}
_ALL = 2**30  # keys


@dataclass(frozen=True)
class Seen:
    """A band of keys that a query sees: up to ``right`` after and fewer than ``left`` before its
    own position, which is counted from the end if ``bottom_right``; None for all."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def within(self, other: Seen) -> Seen | None:
        """Both bands at once."""
        if self.bottom_right != other.bottom_right:
            return None
        least = lambda *ends: min((n for n in ends if n is not None), default=None)  # noqa: E731
        both = least(self.left, other.left), least(self.right, other.right)
        return Seen(*both, self.bottom_right)

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``dot_product_attention``."""
        given: dict[str, Any] = {"bottom_right": self.bottom_right}
        if self.right == 0:
            given["is_causal"] = True
        if self.right != 0 or self.left is not None:
            left = _ALL if self.left is None else self.left - 1
            given["local_window_size"] = (left, _ALL if self.right is None else self.right)
        return given

    def __str__(self) -> str:
        if self.right != 0:
            return "a band"
        return "causal" if self.left is None else f"a causal window of {self.left}"


def sorted_out(masks: list[Side], roles: Roles) -> tuple[Seen | None, Side | None, list[Side]]:
    """The band of keys that masks leave, the lengths of the keys, and all other masks."""
    seen, count, left = None, None, []
    for one in (one for mask in masks for one in conjuncts(mask)):
        if not one.axes <= roles.sizes.keys():
            raise Unclear("a mask varies along an axis that the scores do not have")
        if one.value.is_known:
            fits = band(one, roles)
            if fits == Seen():
                continue
            both = fits if seen is None or fits is None else seen.within(fits)
            if both is not None:
                seen = both
                continue
        elif count is None and (count := lengths(one, roles)) is not None:
            continue
        left.append(one)
    return seen, count, left


def conjuncts(mask: Side) -> Iterator[Side]:
    """The conditions that must all hold where a mask is True."""
    value, dims = narrowed(mask.value, mask.dims)
    made, negated = value.made_by, mask.negated
    parts: list[tuple[Value, Dims, bool]] = []
    if made is not None and value.dtype == bool:  # a bias is compared as it is
        ins, name = made.ins, made.name
        if name == ("or" if negated else "and"):
            parts = [(v, dims, negated) for v in ins]
        elif name == "select_n" and len(ins) == 3 and not negated:
            for way in (1, 0):  # where(p, x, False) is p & x
                if number(ins[1 + way]) == 0:
                    parts = [(ins[0], dims, way == 1), (ins[2 - way], dims, False)]
        elif name == "not" or (name in ("convert_element_type", "copy") and ins[0].dtype == bool):
            parts = [(ins[0], dims, negated ^ (name == "not"))]
        elif name in ("gt", "ne") and number(ins[1]) == 0:
            was, at = rooted(ins[0], dims, any_cast)
            parts = [(was, at, negated)] if was.dtype == bool else []
    for v, at, turned in parts:
        yield from conjuncts(side(v, at, negated=turned))
    if not parts:
        yield Side(value, dims, mask.factor, negated)


def band(mask: Side, roles: Roles) -> Seen | None:
    """The band that a known mask of queries and keys is; None for other masks."""
    if mask.axes - {roles.query, roles.key}:
        return None
    compared = _compared(mask, roles)
    if compared is not None:
        return compared
    first, last = np.empty((2, roles.queries), np.int64)
    by_query = roles.query in mask.axes
    if by_query:
        blocks: Any = rows(mask.value, mask.dims.index(roles.query))
    else:
        blocks = [(0, array(mask.value))]
    for start, block in blocks:
        block = (block != 0) ^ mask.negated if mask.value.dtype == bool else block == 0  # a bias
        block = renamed(block, mask.dims, (roles.query, roles.key))
        block = np.broadcast_to(block, (len(block), roles.keys))
        count = block.sum(1)
        if not count.all():
            return None
        low, high = block.argmax(1), roles.keys - 1 - block[:, ::-1].argmax(1)
        if np.any(high - low + 1 != count):
            return None
        end = start + len(block) if by_query else roles.queries
        first[start:end], last[start:end] = low, high
    return _fitted(first, last, roles)


def _comparisons(mask: Side) -> Iterator[tuple[str, Side, Side]]:
    """The comparison that a mask is, from both sides."""
    made = mask.value.made_by
    if made is not None and made.name in _TURNED and mask.value.dtype == bool:
        name = _NEGATED[made.name] if mask.negated else made.name
        left, right = (side(v, mask.dims) for v in made.ins)
        yield name, left, right
        yield _TURNED[name], right, left


def _compared(mask: Side, roles: Roles) -> Seen | None:
    """The band of ``f(query) >= g(key)``, where ``g`` increases, or of ``>``, ``<``; or None."""
    compared = next(_comparisons(mask), None)
    if compared is None:
        return None
    name, *operands = compared
    less, terms = 0.0, list[Side]()
    difference, by = operands[0].value.made_by, number(operands[1].value)
    if by is not None and difference is not None and difference.name == "sub":
        operands = terms = [side(v, operands[0].dims) for v in difference.ins]
        less = by  # f - g >= c is f - c >= g
    along = [one.axes for one in operands]
    if along == [{roles.key}, {roles.query}]:
        operands, name, less = operands[::-1], _TURNED[name], -less
    elif along != [{roles.query}, {roles.key}]:
        return None
    if not all(np.issubdtype(one.value.dtype, np.integer) for one in operands):
        return None
    if terms:
        held = np.iinfo(terms[0].value.dtype)
        f, g = (array(one.value).astype(np.int64) for one in terms)
        if f.min() - g.max() < held.min or f.max() - g.min() > held.max:
            return None  # the difference wraps
    query, key = (array(one.value).reshape(-1).astype(np.int64) for one in operands)
    query = query - int(less)
    if np.any(np.diff(key) <= 0):
        return None
    first, last = np.zeros(len(query), np.int64), np.full(len(query), len(key) - 1)
    if name in ("ge", "gt"):
        last = np.searchsorted(key, query, "right" if name == "ge" else "left") - 1
    else:
        first = np.searchsorted(key, query, "left" if name == "le" else "right")
    return _fitted(first, last, roles) if np.all(first <= last) else None


def _fitted(first: np.ndarray, last: np.ndarray, roles: Roles) -> Seen | None:
    """The band of queries that see the keys from ``first`` to ``last``."""
    query, found, end = np.arange(roles.queries), None, roles.keys - 1
    for bottom_right in (False, True) if roles.queries != roles.keys else (False,):
        own = query + (roles.keys - roles.queries if bottom_right else 0)
        rights, lefts = (last - own)[last < end], (own - first)[first > 0] + 1
        right, left = (int(ends[0]) if ends.size else None for ends in (rights, lefts))
        if (right is not None and right < 0) or (left is not None and left < 1):
            continue
        high = np.minimum(own + right, end) if right is not None else np.full_like(own, end)
        low = np.maximum(own - left + 1, 0) if left is not None else np.zeros_like(own)
        if np.array_equal(high, last) and np.array_equal(low, first):
            seen = Seen(left, right, bottom_right and (left, right) != (None, None))
            found = seen if found is None or seen.right == 0 else found
    return found


def lengths(mask: Side, roles: Roles) -> Side | None:
    """The number of keys of each batch element, where a mask is ``position < length``; ``factor``
    is what to add to it."""
    for name, position, length in _comparisons(mask):
        fits = position.axes == {roles.key} and length.axes <= {*roles.batch}
        if not fits or not position.value.is_known or length.value.is_known:
            continue
        places = array(position.value).reshape(-1)  # it varies along the keys alone
        whole = np.issubdtype(length.value.dtype, np.integer)
        if whole and np.array_equal(places, np.arange(roles.keys)) and name in ("lt", "le"):
            return Side(length.value, length.dims, factor=0.0 if name == "lt" else 1.0)
    return None
