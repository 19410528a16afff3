"""What a Graph asks of its arguments, with errors in words."""

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
    """Tensors for a message."""
    return ", ".join(tensor.get_name() for tensor in tensors)


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """A list as a tuple; GraphTypeError for anything else."""
    if isinstance(values, (list, tuple)):
        return tuple(values)
    raise GraphTypeError(
        f"{name} is no list",
        expected="a list or tuple",
        got=f"{type(values).__name__}: {values!r}"[:200],
        where=user_line(),
    )


def whole(what: str, value: Any) -> int:
    """An integer of Python's or NumPy's; GraphTypeError for anything else."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise GraphTypeError(
        what,
        expected="an integer",
        got=f"{type(value).__name__}: {value!r}"[:200],
        where=user_line(),
    )


def text(what: str, value: Any) -> str:
    """A text; GraphTypeError for anything else."""
    if isinstance(value, str):
        return value
    raise GraphTypeError(
        f"{what} is no text",
        expected="a string",
        got=f"{type(value).__name__}: {value!r}"[:200],
        where=user_line(),
    )


def distinct(what: str, tensors: list[NamedTensor]) -> list[NamedTensor]:
    """The tensors; GraphError if one is there twice."""
    all_names = [tensor.name for tensor in tensors]
    twice = [tensor for tensor in tensors if all_names.count(tensor.name) > 1]
    if twice:
        raise GraphError(
            f"{what} name a tensor twice",
            got=names(tensors),
            fix=f"name {twice[0].get_name()} once",
            where=user_line(),
        )
    return tensors


def like(wanted: Any, array: jax.Array, key: Any) -> jax.Array:
    """A result in the shape and dtype of the array that was supplied for it.

    Dimensions may be merged, split, or be 1; what is not the same elements in the same order, or
    would lose whole parts of them, is an error.
    """
    if not is_array(wanted):
        raise GraphTypeError(
            f"the output {key!r} was given no array",
            expected="an array or jax.ShapeDtypeStruct, for its shape and dtype; or leave it out",
            got=f"{type(wanted).__name__}: {wanted!r}"[:200],
            where=user_line(),
        )
    template = Template.of(wanted)
    had, has = _borders(array.shape), _borders(template.shape)
    if math.prod(template.shape) != array.size or not (had <= has or has <= had):
        raise GraphError(
            f"the output {key!r} was given an array of another shape",
            expected=f"{list(array.shape)}, or this with neighbours merged or split",
            got=str(list(template.shape)),
            why="a result is reshaped, and not transposed",
            fix="leave the output out, and transpose the result with jnp.transpose",
            where=user_line(),
        )
    if not _holds(template.dtype, array.dtype.name):
        raise GraphTypeError(
            f"the output {key!r} was given an array that cannot hold it",
            expected=array.dtype.name,
            got=template.dtype,
            why="a number would be cut off",
            fix="leave the output out, and cast the result with astype",
            where=user_line(),
        )
    return array.reshape(template.shape).astype(template.dtype)


def _borders(shape: Sequence[int]) -> set[int]:
    """Where dimensions begin among the elements: a shape with more of them splits dimensions."""
    return {*itertools.accumulate((size for size in shape if size != 1), operator.mul)}


def _holds(dtype: str, result: str) -> bool:
    """Whether results of a dtype can be of another one: floats of every width, by rounding."""
    if is_floating(dtype):
        return True
    return not is_floating(result) and jnp.promote_types(dtype, result).name == dtype


def is_unset(data_type: Any) -> bool:
    """Whether a data type is left out, as Python or as cuDNN says it."""
    return data_type is None or getattr(data_type, "name", None) == "NOT_SET"


def refuse_devices(**given: Any) -> None:
    """GraphError for what would say on which GPU to plan."""
    for name, value in given.items():
        if value is not None:
            raise GraphError(
                f"{name} is not for jax_cudnn.Graph",
                got=f"{name}={value!r}"[:200],
                why="a graph is planned for the GPU that the program is compiled for",
                fix='leave it out; `with jax_cudnn.target("H200"):` plans for another GPU',
                where=user_line(),
            )


def refuse_virtual(is_virtual: bool) -> None:
    """GraphError for a tensor that is declared as an intermediate."""
    if is_virtual:
        raise GraphError(
            "a virtual tensor is declared",
            why="intermediates are results of operations",
            fix="call the operation that computes it",
            where=user_line(),
        )


def refuse_reordered(reordering_type: Any) -> None:
    """GraphError for elements that lie in another order than strides can say."""
    if getattr(reordering_type, "name", reordering_type) not in (None, "NONE"):
        raise GraphError(
            "reordering_type is not for tensors of a Graph",
            got=str(reordering_type),
            why="XLA's arrays are ordered by strides",
            fix="scales of blocks are ordered by jax_cudnn.ops.quantize_mxfp8",
            where=user_line(),
        )
