"""The arguments of g's methods: ports and attributes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import jax

from ..errors import GraphTypeError, shown
from .node import Node
from .tensor import GraphTensor


def unwrapped(value: Any) -> Any:
    """The graph tensor in a pytree node with one array (such as Flax's Param), else the value."""
    if isinstance(value, (GraphTensor, list, tuple, dict)):
        return value
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1 and isinstance(leaves[0], GraphTensor):
        return leaves[0]
    if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):
        return jax.numpy.asarray(value)
    return value


def ports_of(cls: type[Node], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values for the input ports, removed from ``given``; a list gets numbered ports."""
    for port in cls.ports.inputs:
        value = given.pop(port.name, None)
        if port.optional and value is None:
            continue
        if not port.variadic:
            yield port.name, unwrapped(value)
        elif isinstance(value, (list, tuple)) and value:
            yield from ((f"{port.name}_{i}", unwrapped(item)) for i, item in enumerate(value))
        else:
            raise GraphTypeError(
                f"{port.name!r} is not a list of tensors",
                expected="a list or tuple of at least one tensor",
                got=shown(value),
            )


@functools.cache
def signature(cls: type[Node]) -> inspect.Signature:
    """The parameters of g's method: the ports, the node's attributes, and the common ones."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    operands = []
    for port in cls.ports.inputs:
        default = None if port.optional else inspect.Parameter.empty
        operands.append(inspect.Parameter(port.name, kind, default=default))
        if port.optional:  # what follows is named: it may have no default
            kind = inspect.Parameter.KEYWORD_ONLY
    taken = inspect.signature(cls.create).parameters.values()
    generic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken)  # then the fields say it
    create = cls if generic else cls.create
    attributes = [
        p.replace(kind=max(p.kind, kind))
        for p in inspect.signature(create).parameters.values()
        if p.name not in ("self", "cls", "compute_data_type")
    ]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("name", ""), ("compute_data_type", None))
    ]
    return inspect.Signature([*operands, *attributes, *extra])
