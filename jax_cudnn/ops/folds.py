"""How a vmap dimension enters shapes and attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .._core.graph.dims import Shape
from .._core.graph.node import LEAD


def grown(shape: Shape, axis: int, size: int) -> Shape:
    """A shape with a dimension of ``size`` folded into one of its axes, or leading."""
    if axis == LEAD:
        return (size, *shape)
    return (*shape[:axis], size * shape[axis], *shape[axis + 1 :])


def anywhere(ports: Iterable[str], axes: Iterable[int]) -> Iterator[dict[str, int]]:
    """For nodes that take tensors of any rank: into one of ``axes``, or leading."""
    names = tuple(ports)
    for axis in (*axes, LEAD):
        yield dict.fromkeys(names, axis)
