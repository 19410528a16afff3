"""The einsum-like strings with the shapes of a node's ports.

``"image: n c *x, weight: k i *r -> Y: n k *y"`` names two input ports and one output port.
A letter is one dimension and has one size everywhere; ``*x`` is any number of dimensions;
``...`` is a shape that broadcasts with every other ``...`` (NumPy's rule at equal rank). A port
``?name`` is optional, ``*name`` takes a list of tensors, ``?*name`` is both.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from jax.core import Tracer

from ..errors import GraphError, shown

Shape = tuple[int, ...]


class Port(NamedTuple):
    """A port; a variadic one (``*name``) takes a list of tensors of one rank, and an optional one
    (``?name``) may be omitted."""

    name: str
    axes: tuple[str, ...]
    variadic: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(self.axes)}"


@dataclass(frozen=True)
class Dims:
    """A parsed string: input ports, output ports, and letters whose size 1 broadcasts."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    broadcast: frozenset[str] = frozenset()

    @classmethod
    @functools.cache
    def parse(cls, text: str, broadcast: str = "") -> Dims:
        def ports(side: str) -> tuple[Port, ...]:
            named = (part.split(":") for part in side.split(",") if part.strip())
            pairs = ((name.strip(), tuple(axes.split())) for name, axes in named)
            return tuple(Port(n.lstrip("*?"), axes, "*" in n, "?" in n) for n, axes in pairs)

        left, arrow, right = text.partition("->")
        parsed = cls(ports(left), ports(right), frozenset(broadcast.split()))
        if not arrow or not parsed.inputs or not parsed.outputs:
            raise ValueError(f"dims must read 'in: a b, ... -> out: a b', got {text!r}")
        for port in (*parsed.inputs, *parsed.outputs):
            if sum(axis.startswith(("*", "...")) for axis in port.axes) > 1:
                raise ValueError(f"port {port} has more than one group of unknown rank")
        return parsed

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether each element depends only on elements at the same position, at any rank."""
        return all(port.axes == ("...",) for port in (*self.inputs, *self.outputs))

    @functools.cached_property
    def input_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.inputs)

    @functools.cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.outputs)

    def match(self, shapes: Mapping[str, Shape]) -> dict[str, int | Shape]:
        """The size of every letter (and the shape of every group), or an error naming ports."""
        sizes: dict[str, int | Shape] = {}
        owner: dict[str, str] = {}
        for port in self.inputs:
            if port.optional and port.name not in shapes:
                continue
            for axis, size in assigned(port, shapes[port.name]):
                if axis == "...":
                    known, size = cast(Shape, sizes.get(axis, size)), cast(Shape, size)
                    sizes[axis] = _broadcast(known, size, port, owner)
                elif axis not in sizes or (axis in self.broadcast and sizes[axis] == 1):
                    sizes[axis] = size
                elif sizes[axis] != size and not (axis in self.broadcast and size == 1):
                    raise GraphError(
                        f"{owner[axis]!r} and {port.name!r} disagree on dimension {axis!r}",
                        expected=f"{port}, with {axis} = {sizes[axis]} as in {owner[axis]!r}",
                        got=f"{port.name} of shape {list(shapes[port.name])}, so {axis} = {size}",
                        why="the ports' dimensions are " + ", ".join(str(p) for p in self.inputs),
                    )
                owner.setdefault(axis, port.name)
        return sizes

    def shape(self, output: str, sizes: Mapping[str, int | Shape]) -> Shape:
        """The shape of an output port once every letter has a size."""
        (port,) = (p for p in self.outputs if p.name == output)
        shape: list[int] = []
        for axis in port.axes:
            size = sizes[axis]
            shape.extend(size if isinstance(size, tuple) else (size,))
        return tuple(shape)


def integers(
    name: str, values: Iterable[Any], least: int = 0, given: Any = None
) -> tuple[int, ...]:
    """A tuple of ints from a user's list; GraphError for anything else, which states what was
    ``given`` if that is not ``values``.

    Dimension expressions of symbolic export stay unchanged.
    """

    def integer(value: Any) -> Any:
        if hasattr(value, "dimension_as_value") and not isinstance(value, Tracer):
            return value  # as JAX recognizes dimension expressions
        return operator.index(cast(Any, value))

    try:
        result = tuple(integer(value) for value in values)
    except TypeError:
        result = None
    if result is None or any(isinstance(v, int) and v < least for v in result):
        raise GraphError(
            f"{name} is not valid",
            expected=f"integers of at least {least}",
            got=f"{name}={shown(values if given is None else given)}",
            why="they select the program to compile: under jax.jit they are static_argnames",
        )
    return result


def assigned(port: Port, shape: Shape) -> list[tuple[str, int | Shape]]:
    """Pairs of axis and size (or shape, for a group) of one port."""
    group = next((a for a in port.axes if a.startswith(("*", "..."))), None)
    fixed = len(port.axes) - (group is not None)
    if len(shape) < fixed or (group is None and len(shape) != fixed):
        raise GraphError(
            f"{port.name!r} has the wrong rank",
            expected=f"{port} ({'at least ' if group else ''}{fixed} dimensions)",
            got=f"shape {list(shape)}",
            fix="graph-level arrays follow cuDNN's dims: reshape before the call "
            "(a bias is (1, C, 1, 1) for NCHW, a matrix is (B, M, K))",
        )
    if group is None:
        return list(zip(port.axes, shape, strict=True))
    at = port.axes.index(group)
    after = len(port.axes) - at - 1
    end = len(shape) - after
    pairs: list[tuple[str, int | Shape]] = list(zip(port.axes[:at], shape[:at], strict=True))
    pairs.append((group, tuple(shape[at:end])))
    pairs.extend(zip(port.axes[at + 1 :], shape[end:], strict=True))
    return pairs


def _broadcast(known: Shape, size: Shape, port: Port, owner: Mapping[str, str]) -> Shape:
    others = len(port.axes) - 1
    what = f"dimensions before {' '.join(port.axes[1:])}" if others else "dimensions"
    if len(known) != len(size):
        raise GraphError(
            f"{owner['...']!r} and {port.name!r} have different ranks",
            expected=f"{len(known)} {what}, as in shape {list(known)}",
            got=f"shape {list(size)}",
            why="cuDNN broadcasts dimensions of size 1, but never adds dimensions",
            fix=f"reshape {port.name!r} to rank {len(known) + others}",
        )
    shape = []
    for left, right in zip(known, size, strict=True):
        if left != right and left != 1 and right != 1:
            raise GraphError(
                f"{owner['...']!r} and {port.name!r} do not broadcast",
                expected=f"each dimension of {port.name!r} to be 1 or that of {list(known)}",
                got=f"shape {list(size)}",
            )
        shape.append(right if left == 1 else left)
    return tuple(shape)
