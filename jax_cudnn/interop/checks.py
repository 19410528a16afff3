"""Checks of a Graph's arguments."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dtypes import is_floating
from .._core.graph.source import user_line
from .templates import Template, is_array

if TYPE_CHECKING:
    from .tensors import NamedTensor


def names(tensors: Iterable[NamedTensor]) -> str:
    """Names of tensors for a message."""
    return ", ".join(tensor.get_name() for tensor in tensors)


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """A list as a tuple; raises GraphTypeError for anything else."""
    if isinstance(values, (list, tuple)):
        return tuple(values)
    raise GraphTypeError(
        f"{name} is not a list",
        expected="a list or tuple",
        got=f"{type(values).__name__}: {values!r}"[:200],
        where=user_line(),
    )


def whole(what: str, value: Any) -> int:
    """A Python or NumPy integer; raises GraphTypeError for anything else."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise GraphTypeError(
        what,
        expected="an integer",
        got=f"{type(value).__name__}: {value!r}"[:200],
        where=user_line(),
    )


def text(what: str, value: Any) -> str:
    """A string; raises GraphTypeError for anything else."""
    if isinstance(value, str):
        return value
    raise GraphTypeError(
        f"{what} is not a string",
        expected="a string",
        got=f"{type(value).__name__}: {value!r}"[:200],
        where=user_line(),
    )


def distinct(what: str, tensors: list[NamedTensor]) -> list[NamedTensor]:
    """The tensors; raises GraphError if one occurs twice."""
    all_names = [tensor.name for tensor in tensors]
    twice = [tensor for tensor in tensors if all_names.count(tensor.name) > 1]
    if twice:
        raise GraphError(
            f"{what} list a tensor twice",
            got=names(tensors),
            fix=f"list {twice[0].get_name()} once",
            where=user_line(),
        )
    return tensors


def like(wanted: Any, array: jax.Array, key: Any) -> jax.Array:
    """A result in the shape and dtype of the array that was passed for it.

    Dimensions may be merged, split, or added with size 1. Raises an error if the elements or their
    order would change, or if the dtype cannot hold them.
    """
    if not is_array(wanted):
        raise GraphTypeError(
            f"the value passed for output {key!r} is not an array",
            expected="an array or jax.ShapeDtypeStruct, for its shape and dtype",
            got=f"{type(wanted).__name__}: {wanted!r}"[:200],
            where=user_line(),
        )
    template = Template.of(wanted)
    had, has = _borders(array.shape), _borders(template.shape)
    if math.prod(template.shape) != array.size or not (had <= has or has <= had):
        raise GraphError(
            f"the array passed for output {key!r} has another shape",
            expected=f"{list(array.shape)}, or this with adjacent dimensions merged or split",
            got=str(list(template.shape)),
            why="a result can be reshaped, but not transposed",
            fix="leave out the output, and transpose the result with jnp.transpose",
            where=user_line(),
        )
    if not _holds(template.dtype, array.dtype.name):
        raise GraphTypeError(
            f"the array passed for output {key!r} cannot hold it",
            expected=array.dtype.name,
            got=template.dtype,
            why="values would be truncated",
            fix="leave out the output, and cast the result with astype",
            where=user_line(),
        )
    return array.reshape(template.shape).astype(template.dtype)


def _borders(shape: Sequence[int]) -> set[int]:
    """The strides at which dimensions begin; a shape with more of them splits dimensions."""
    return {*itertools.accumulate((size for size in shape if size != 1), operator.mul)}


def _holds(dtype: str, result: str) -> bool:
    """Whether a dtype can hold results of another one; floats of any width can, by rounding."""
    if is_floating(dtype):
        return True
    return not is_floating(result) and jnp.promote_types(dtype, result).name == dtype


def is_unset(data_type: Any) -> bool:
    """Whether a data type is unset: None, or cuDNN's NOT_SET."""
    return data_type is None or getattr(data_type, "name", None) == "NOT_SET"


def refuse_devices(**given: Any) -> None:
    """Raises GraphError for arguments that select a GPU."""
    for name, value in given.items():
        if value is not None:
            raise GraphError(
                f"jax_cudnn.Graph does not support {name}",
                got=f"{name}={value!r}"[:200],
                why="a graph is planned for the GPU for which JAX compiles the program",
                fix='leave it out; `with jax_cudnn.target("H200"):` plans for another GPU',
                where=user_line(),
            )


def refuse_virtual(is_virtual: bool) -> None:
    """Raises GraphError for a tensor that is declared as an intermediate."""
    if is_virtual:
        raise GraphError(
            "a virtual tensor cannot be declared",
            why="operations create the intermediates",
            fix="call the operation that computes it",
            where=user_line(),
        )


def refuse_reordered(reordering_type: Any) -> None:
    """Raises GraphError for a memory order that strides cannot express."""
    if getattr(reordering_type, "name", reordering_type) not in (None, "NONE"):
        raise GraphError(
            "tensors of a Graph do not support reordering_type",
            got=str(reordering_type),
            why="strides describe the memory order of XLA's arrays",
            fix="jax_cudnn.ops.quantize_mxfp8 reorders the scales of blocks",
            where=user_line(),
        )
