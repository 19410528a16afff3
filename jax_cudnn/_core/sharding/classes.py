"""Sets of axes that are sharded together."""

from __future__ import annotations

import math
from collections.abc import Iterable

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

    def apart(self, axes: Iterable[int | None]) -> None:
        """Keeps a set whole that has two axes of one array: shards would be diagonal blocks."""
        roots = self.roots(axes)
        if len({*roots}) < len(roots):
            self.keep_whole(*(root for root in roots if roots.count(root) > 1))

    def whole(self, root: int) -> bool:
        return self._whole[root]

    def size(self, root: int) -> int:
        return self._sizes[root]
