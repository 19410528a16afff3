"""The few operations that transformations of graphs need, made known by the room of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .dims import Shape
from .node import Node


class Vocabulary(NamedTuple):
    """Nodes, or what makes them."""

    add: Node
    """Sums two tensors."""
    cast: Node
    """Gives its operand in another dtype."""
    reshape: Callable[[Shape], Node]
    transpose: Callable[[tuple[int, ...]], Node]
    broadcast: Callable[[Shape], Node]
    """Repeats dimensions of size 1."""
    sum: Callable[[Shape], Node]
    """Adds up the dimensions that are 1 in a shape."""
    moves: tuple[type[Node], ...]
    """The classes of those that only move elements, and that XLA does as well outside a graph."""
    repeats: tuple[type[Node], ...]
    """The classes of those that repeat elements, whose transpose is a sum."""


_known: list[Vocabulary] = []


def register_vocabulary(vocabulary: Vocabulary) -> None:
    """Called once, by the room of operations."""
    _known[:] = [vocabulary]


def vocabulary() -> Vocabulary:
    """What was registered."""
    (known,) = _known
    return known
