"""The few operations that transformations of graphs need, registered by ``jax_cudnn.ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .dims import Shape
from .node import Node


class Vocabulary(NamedTuple):
    """Nodes, or functions that make them."""

    add: Node
    """Sums two tensors."""
    cast: Node
    """Converts its operand to another dtype."""
    reshape: Callable[[Shape], Node]
    transpose: Callable[[tuple[int, ...]], Node]
    broadcast: Callable[[Shape], Node]
    """Repeats dimensions of size 1."""
    sum: Callable[[Shape], Node]
    """Sums over the dimensions that are 1 in a shape."""
    moves: tuple[type[Node], ...]
    """Classes of nodes that only move elements, which XLA does equally well outside a graph."""
    repeats: tuple[type[Node], ...]
    """Classes of nodes that repeat elements, whose transpose is a sum."""


_known: list[Vocabulary] = []


def register_vocabulary(vocabulary: Vocabulary) -> None:
    """Called once, by ``jax_cudnn.ops``."""
    _known[:] = [vocabulary]


def vocabulary() -> Vocabulary:
    """The registered operations."""
    (known,) = _known
    return known
