"""The arguments of a graph function, and of g's methods."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import GraphTypeError, shown
from .node import Node
from .source import user_line
from .tensor import GraphTensor


@dataclass(frozen=True)
class Aval:
    """The properties of an array that a trace uses."""

    shape: tuple[int, ...]
    dtype: str


def is_static(leaf: Any) -> bool:
    """Whether an argument is a Python value, not an array."""
    scalar = isinstance(leaf, (numbers.Number, str, bytes, type(None)))
    return scalar and not isinstance(leaf, np.generic)


def typed(value: Any) -> tuple[Any, Any]:
    """A value with a tag that separates equal ones: 1, 1.0 and True, 0.0 and -0.0. A NaN, which
    does not equal itself, becomes one object, which does inside a tuple."""
    value = _with_one_nan(value)
    if isinstance(value, tuple):
        return (type(value), *(typed(v)[0] for v in value)), value
    return (type(value), repr(value) if isinstance(value, (float, frozenset)) else ""), value


def _with_one_nan(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_with_one_nan, value))
    return math.nan if type(value) is float and math.isnan(value) else value


def array(name: str, leaf: Any) -> Any:
    """An array argument of the function ``name``; GraphTypeError for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, GraphTensor):
        raise GraphTypeError(
            f"{name} was called with a graph tensor",
            why="graph functions take arrays and cannot be nested",
            fix=f"call {name}.fn(g, ...) to add its operations to the current graph",
            where=user_line(),
        )
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise GraphTypeError(
            f"{name} got an argument that is not an array",
            expected="JAX or NumPy arrays, or Python scalars and strings (static)",
            got=shown(leaf),
        ) from error


def strongly_typed(arrays: list[Any]) -> list[Any]:
    """Weakly typed arrays (Python scalars that JAX traced) take the dtype of the other arrays,
    except integers with dimensions, such as ``jnp.full(2, 4)``, which may be lengths."""
    strong = [array for array in arrays if not _is_weak(array)]
    if not strong or len(strong) == len(arrays):
        return arrays
    dtypes = {array.dtype for array in strong if jnp.issubdtype(array.dtype, jnp.floating)}
    return [
        array.astype(jnp.result_type(*dtypes, array)) if _is_weak(array) else array
        for array in arrays
    ]


def _is_weak(array: Any) -> bool:
    count = array.ndim > 0 and jnp.issubdtype(array.dtype, jnp.integer)
    return getattr(array, "weak_type", False) and not count


def parameters(signature: inspect.Signature) -> list[str]:
    """Names of the positional parameters, including ``g``."""
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in signature.parameters.values() if p.kind in positional]


def input_names(positional: list[str], structure: Any) -> list[str]:
    """Names for the leaves of the arguments: ``x``, or ``params.w`` inside a pytree."""
    dummy = jax.tree.unflatten(structure, list(range(structure.num_leaves)))
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(dummy):
        index = path[0].idx
        head = positional[index] if index < len(positional) else f"x{index}"
        tail = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path[1:]]
        names.append(".".join([head, *tail]))
    return names


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
    taken = dict(inspect.signature(cls.create).parameters)
    last = next(reversed(taken.values()), None)
    if last is not None and last.kind is inspect.Parameter.VAR_KEYWORD:
        del taken[last.name]  # the other fields
        taken |= {n: p for n, p in inspect.signature(cls).parameters.items() if n not in taken}
    attributes = []
    for parameter in taken.values():
        kind = max(parameter.kind, kind)
        if parameter.name != "compute_data_type":
            attributes.append(parameter.replace(kind=kind))
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("name", ""), ("compute_data_type", None))
    ]
    return inspect.Signature([*operands, *attributes, *extra])
