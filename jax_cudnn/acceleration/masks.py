"""Masks by their values: one that is made of positions and constants is compared with a band, one
that compares positions with a number for each batch element becomes lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .known import array, is_known, rows
from .scores import Dims, Side, narrowed, number
from .values import Value


def conjuncts(mask: Side) -> Iterator[Side]:
    """The conditions that must all hold where a mask is True."""
    value, dims = narrowed(mask.value, mask.dims)
    made = value.made_by
    if made is not None and value.dtype == bool:  # a bias is compared as it is
        if made.name == "and" and not mask.negated:
            for v in made.ins:
                yield from conjuncts(Side(*_narrowed(v, dims)))
            return
        if made.name == "or" and mask.negated:
            for v in made.ins:
                yield from conjuncts(Side(*_narrowed(v, dims), negated=True))
            return
        if made.name == "select_n" and len(made.ins) == 3 and not mask.negated:
            for way in (0, 1):  # where(p, x, False) is p & x
                if number(made.ins[1 + way]) == 0:
                    other = made.ins[2 - way]
                    yield from conjuncts(Side(*narrowed(made.ins[0], dims), negated=way == 1))
                    yield from conjuncts(Side(*narrowed(other, dims)))
                    return
        if made.name == "not":
            yield from conjuncts(Side(made.ins[0], dims, negated=not mask.negated))
            return
        if made.name in ("gt", "ne") and number(made.ins[1]) == 0:
            was, at = narrowed(made.ins[0], dims)
            while (cast := was.made_by) is not None and cast.casts:
                was, at = narrowed(cast.ins[0], at)
            if was.dtype == bool:
                yield from conjuncts(Side(was, at, negated=mask.negated))
                return
        if made.name in ("convert_element_type", "copy") and made.ins[0].dtype == bool:
            yield from conjuncts(Side(made.ins[0], dims, negated=mask.negated))
            return
    yield Side(value, dims, mask.factor, mask.negated)


@dataclass(frozen=True)
class Positions:
    """The axes of queries and keys among those of the scores, and their sizes."""

    query: int
    key: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Seen:
    """A band of keys that a query sees: up to ``right`` after and fewer than ``left`` before its
    own position, which is counted from the end if ``bottom_right``; None for all."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False


def _truth(side: Side) -> Callable[[np.ndarray], np.ndarray]:
    if side.value.dtype == bool:
        return np.logical_not if side.negated else (lambda x: x)
    return lambda x: x == 0  # of a bias


def band(side: Side, at: Positions) -> Seen | None:
    """The band that a known mask of queries and keys is; None for other masks."""
    if {d for d in side.dims if d is not None} - {at.query, at.key}:
        return None
    compared = _compared(side, at)
    if compared is not None:
        return compared
    truth, axes = _truth(side), [d for d in side.dims if d is not None]
    first = np.empty(at.queries, np.int64)
    last = np.empty(at.queries, np.int64)
    if at.query in axes:
        blocks: Any = rows(side.value, side.dims.index(at.query))
    else:
        blocks = [(0, array(side.value))]
    for start, block in blocks:
        block = truth(block)
        if at.query in axes and at.key in axes:
            if axes == [at.key, at.query]:
                block = block.reshape(at.keys, -1).T
            block = block.reshape(-1, at.keys)
        else:
            block = block.reshape((-1, 1) if at.query in axes else (1, -1))
        block = np.broadcast_to(block, (block.shape[0], at.keys))
        count = block.sum(1)
        if not count.all():
            return None
        low, high = block.argmax(1), at.keys - 1 - block[:, ::-1].argmax(1)
        if np.any(high - low + 1 != count):
            return None
        end = start + len(block) if at.query in axes else at.queries
        first[start:end], last[start:end] = low, high
    return _fitted(first, last, at)


def _compared(side: Side, at: Positions) -> Seen | None:
    """The band of ``f(query) >= g(key)``, where ``g`` increases, and the like; None for others."""
    made = side.value.made_by
    turned = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}
    if made is None or made.name not in turned or side.value.dtype != bool:
        return None
    name, operands, less = made.name, [_narrowed(v, side.dims) for v in made.ins], 0.0
    difference, by = operands[0][0].made_by, number(made.ins[1])
    if by is not None and difference is not None and difference.name == "sub":
        operands = [_narrowed(v, operands[0][1]) for v in difference.ins]
        less = by  # f - g >= c is f - c >= g
    along = [{d for d in dims if d is not None} for _, dims in operands]
    if along == [{at.key}, {at.query}]:
        operands, name = operands[::-1], turned[name]
        less = -less
    elif along != [{at.query}, {at.key}]:
        return None
    if not all(np.issubdtype(v.dtype, np.integer) for v, _ in operands):
        return None
    query, key = (array(v).reshape(-1).astype(np.int64) for v, _ in operands)
    query = query - int(less)
    if np.any(np.diff(key) <= 0):
        return None
    if side.negated:
        name = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}[name]
    first, last = np.zeros(len(query), np.int64), np.full(len(query), len(key) - 1)
    if name in ("ge", "gt"):
        last = np.searchsorted(key, query, "right" if name == "ge" else "left") - 1
    else:
        first = np.searchsorted(key, query, "left" if name == "le" else "right")
    return _fitted(first, last, at) if np.all(first <= last) else None


def _narrowed(value: Value, dims: Dims) -> tuple[Value, Dims]:
    return narrowed(value, dims if value.shape else ())


def _fitted(first: np.ndarray, last: np.ndarray, at: Positions) -> Seen | None:
    query = np.arange(at.queries)
    found = None
    for bottom_right in (False, True) if at.queries != at.keys else (False,):
        own = query + (at.keys - at.queries if bottom_right else 0)
        right = left = None
        inside = last < at.keys - 1
        if inside.any():
            right = int((last - own)[inside][0])
        inside = first > 0
        if inside.any():
            left = int((own - first)[inside][0]) + 1
        if (right is not None and right < 0) or (left is not None and left < 1):
            continue
        high = at.keys - 1 if right is None else np.minimum(own + right, at.keys - 1)
        low = 0 if left is None else np.maximum(own - left + 1, 0)
        if np.array_equal(np.broadcast_to(high, last.shape), last) and np.array_equal(
            np.broadcast_to(low, first.shape), first
        ):
            seen = Seen(left, right, bottom_right and (left, right) != (None, None))
            found = seen if found is None or seen.right == 0 else found
    return found


def lengths(side: Side, at: Positions, batch: frozenset[int]) -> Side | None:
    """The number of keys of each batch element, where a mask is ``position < length``."""
    made = side.value.made_by
    if made is None or made.name not in ("lt", "gt", "le", "ge") or side.value.dtype != bool:
        return None
    operands = [_narrowed(v, side.dims) for v in made.ins]
    kinds = [{d for d in dims if d is not None} for _, dims in operands]
    for i, (position, length) in enumerate((operands, operands[::-1])):
        along, of = kinds[i], kinds[1 - i]
        if along != {at.key} or not of <= batch or not is_known(position[0]):
            continue
        if is_known(length[0]) or not np.issubdtype(length[0].dtype, np.integer):
            continue
        places = array(position[0]).reshape(-1)  # it varies along the keys alone
        if not np.array_equal(places, np.arange(at.keys)):
            continue
        name = made.name if i == 0 else {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}[made.name]
        if side.negated:
            name = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}[name]
        if name in ("lt", "le"):  # position < length, position <= last
            return Side(*length, factor=0.0 if name == "lt" else 1.0)  # what to add
    return None
