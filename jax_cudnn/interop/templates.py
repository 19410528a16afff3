"""What a graph uses of an array: shape, dtype and memory order, but not the values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import WORDS, canonical, canonical_compute, itemsize
from .._core.graph.layout import order_of_strides
from .._core.graph.node import float32_range
from .._core.graph.spec import Tensor
from .._core.graph.tensor import GraphTensor

SHAPE_OF_WORDS = (1, 1, 1, 2)
"""The shape of one cuDNN INT64 as two uint32: the seed and the offset of dropout."""


@dataclass(frozen=True)
class Template:
    """What a graph uses of an array.

    ``order`` lists the dimensions from the slowest to the fastest in memory; it is None for an
    array that is row-major or has no strides, and the graph then chooses the order. ``by_value``
    marks a scalar in host memory, as cuDNN's epsilons are.
    """

    shape: Shape
    dtype: str
    order: tuple[int, ...] | None = None
    by_value: bool = False

    @classmethod
    def of(cls, array: Any) -> Template:
        """The template of an array of any library; raises GraphTypeError for a dtype that cuDNN
        does not have."""
        shape = tuple(array.shape)
        if isinstance(array, (np.ndarray, np.generic)):
            dtype = dtype_name(_numpy_dtype(array))
        else:
            dtype = dtype_name(array.dtype)
        by_value = _in_host_memory(array) and math.prod(shape) == 1
        return cls(shape, dtype, _order(array, shape, dtype), by_value)


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library, a tracer, or a ShapeDtypeStruct."""
    has_type = hasattr(value, "shape") and hasattr(value, "dtype")
    return has_type and not isinstance(value, GraphTensor)


def dtype_name(dtype: Any) -> str:
    """JAX's name of a dtype of JAX, NumPy, torch or cuDNN; INT64 becomes uint32 pairs."""
    dtype = _without_torch(dtype)
    return WORDS if getattr(dtype, "name", dtype) == WORDS else canonical(dtype)


def compute_name(dtype: Any) -> str:
    """The same for a compute type."""
    return canonical_compute(_without_torch(dtype))


def operand(tensor: Tensor, value: Any, name: str) -> jax.Array:
    """The JAX array for an input of a graph; raises an error if it does not fit."""
    if (tensor.shape, tensor.dtype) == (SHAPE_OF_WORDS, WORDS):
        value = _words(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.astype(_numpy_dtype(value), copy=False)
    array = _as_jax(value, name)
    if math.prod(array.shape) == 1 == math.prod(tensor.shape):
        array = array.reshape(tensor.shape)  # scalars get the rank of the tensors
    if getattr(array, "weak_type", False) and _promotes(array, tensor.dtype):
        array = array.astype(tensor.dtype)
    if (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype):
        return array
    raise (GraphError if array.dtype.name == tensor.dtype else GraphTypeError)(
        f"{name} differs from the array that the graph was built for",
        expected=f"{tensor.dtype}{list(tensor.shape)}",
        got=f"{array.dtype.name}{list(array.shape)}",
        why="a cuDNN graph has fixed shapes and dtypes",
        fix="cast or reshape the array, or build one graph per kind of arrays with "
        "@jax_cudnn.graph_cache",
    )


def number(value: Any) -> float | None:
    """The value of a Python or NumPy scalar, which is known without reading a device; or None."""
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return float(value.reshape(()))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def constant(tensor: GraphTensor, value: Any, name: str) -> float | None:
    """A scalar as a constant of a plan, rounded to the tensor's dtype; None for an array. Raises an
    error if the dtype cannot hold it."""
    given = number(value)
    if given is None:
        return None
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return _integral(tensor, given, name)
    given = float32_range(name, given)
    if tensor.dtype == np.float32:  # operations round it themselves
        return given
    with np.errstate(over="ignore"):
        rounded = float(np.asarray(given).astype(tensor.dtype))
    if math.isfinite(given) and not math.isfinite(rounded):
        raise GraphError(
            f"{name} is too large",
            expected=f"a number in the range of {tensor.dtype.name}",
            got=repr(value),
            fix="declare it with data_type=float32",
        )
    return rounded


def _integral(tensor: GraphTensor, given: float, name: str) -> float:
    if not given.is_integer():
        raise GraphTypeError(
            f"{name} is not an integer",
            expected=f"a value of {tensor.dtype.name}",
            got=repr(given),
            fix="declare the input with a floating data_type, or round the number",
        )
    least, most = _int32_range(tensor.dtype)
    if not least <= given <= most:
        raise GraphError(
            f"{name} is out of range",
            expected=f"an integer from {least} to {most}",
            got=repr(given),
            why=f"it is a {tensor.dtype.name} constant, which a plan stores as int32",
        )
    return given


def _int32_range(dtype: np.dtype) -> tuple[int, int]:
    """The smallest and largest value that both the dtype and int32 can hold."""
    if dtype == np.bool_:
        return 0, 1
    own, int32 = jnp.iinfo(dtype), jnp.iinfo("int32")
    return max(own.min, int32.min), min(own.max, int32.max)


def _numpy_dtype(array: np.ndarray | np.generic) -> np.dtype:
    """JAX's dtype of a NumPy array. A float64 scalar, to which NumPy converts Python floats, is
    float32 even if x64 is enabled."""
    if array.size == 1 and array.dtype == np.float64:
        return np.dtype(np.float32)
    return jax.dtypes.canonicalize_dtype(array.dtype)


def _words(value: Any) -> Any:
    """One integer as its low and high word; anything else unchanged."""
    if isinstance(value, (int, np.ndarray, np.generic)) and np.size(value) == 1:
        number = np.asarray(value)
        if number.dtype.kind in "iu":
            return np.array([int(number.item()) % 2**64], "<u8").view("<u4").reshape(SHAPE_OF_WORDS)
    if not (isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer)):
        return value
    if value.size != 1:
        return value
    bits = jnp.iinfo(value.dtype).bits
    high = value >> (32 if bits > 32 else bits - 1)  # the sign of a narrower one
    return jnp.stack([value.astype(WORDS), high.astype(WORDS)]).reshape(SHAPE_OF_WORDS)


def _promotes(array: jax.Array, dtype: str) -> bool:
    """Whether a weakly typed array (a Python number) takes on this dtype by promotion."""
    return jnp.result_type(array, jnp.dtype(dtype)).name == dtype


def _as_jax(value: Any, name: str) -> jax.Array:
    try:
        if isinstance(value, (jax.Array, np.ndarray)) or hasattr(value, "__jax_array__"):
            return jnp.asarray(value)
        if hasattr(value, "__dlpack__"):
            # torch does not export tensors that record gradients.
            return jax.dlpack.from_dlpack(value.detach() if hasattr(value, "detach") else value)
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError, BufferError) as error:
        raise GraphTypeError(
            f"{name} is not an array",
            expected="an array of JAX, NumPy or a library with DLPack",
            got=f"{type(value).__name__}: {value!r}"[:200],
            why=f"{type(error).__name__}: {error}"[:200],
        ) from error


def _without_torch(dtype: Any) -> Any:
    """Removes ``torch.`` from the name of a torch dtype; the rest is JAX's name."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else dtype


def _in_host_memory(array: Any) -> bool:
    if isinstance(array, jax.Array):  # tracers have no device to query
        return False
    on = getattr(getattr(array, "device", None), "type", None)  # torch
    return isinstance(array, (np.ndarray, np.generic)) or on == "cpu"


def _order(array: Any, shape: Shape, dtype: str) -> tuple[int, ...] | None:
    if isinstance(array, jax.Array):
        order = _jax_order(array)
    else:
        strides = _element_strides(array, dtype)
        if strides is None or len(strides) != len(shape):
            return None
        order = order_of_strides(shape, strides)
    return None if order == tuple(range(len(shape))) else order


def _jax_order(array: Any) -> tuple[int, ...]:
    """The dimensions of a JAX array from the slowest to the fastest in memory; a tracer has no
    layout, and counts as row-major."""
    layout = None if isinstance(array, Tracer) else array.format.layout
    return tuple(getattr(layout, "major_to_minor", None) or range(array.ndim))


def _element_strides(array: Any, dtype: str) -> list[int] | None:
    """Strides in elements: torch's ``stride()`` counts elements, NumPy and CuPy count bytes."""
    if callable(getattr(array, "stride", None)):
        return [int(step) for step in array.stride()]
    strides = getattr(array, "strides", None)
    if strides is None:
        return None
    size = getattr(array, "itemsize", itemsize(dtype))
    return [int(step) // size for step in strides]
