"""The arrays of a Graph: what it uses of them while it is built, and their values in calls."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._core.errors import GraphError, GraphTypeError, JaxCudnnError, shown
from .._core.graph import dtypes
from .._core.graph.dims import Shape
from .._core.graph.layout import packed_strides
from .._core.graph.source import user_line
from .._core.graph.spec import Tensor
from .._core.graph.tensor import GraphTensor

SHAPE_OF_WORDS = (1, 1, 1, 2)
"""The shape of one cuDNN INT64 as two uint32: the seed and the offset of dropout."""


def refusal(summary: str, kind: type[JaxCudnnError] = GraphError, **parts: str | None) -> Exception:
    """An error at the user's line; ``parts`` are ``expected``, ``got``, ``why`` and ``fix``."""
    return kind(summary, where=user_line(), **parts)


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """A list as a tuple; raises GraphTypeError for anything else."""
    if isinstance(values, (list, tuple)):
        return tuple(values)
    expected = "a list or tuple"
    raise refusal(f"{name} is not a list", GraphTypeError, expected=expected, got=shown(values))


@dataclass(frozen=True)
class Template:
    """What a graph uses of an array: not its values.

    ``order`` lists the dimensions from the slowest to the fastest in memory; it is None for an
    array that is row-major or has no strides, and the graph then chooses the order. ``by_value``
    marks a scalar in host memory, as cuDNN's epsilons are. ``window`` are strides with gaps.
    """

    shape: Shape
    dtype: str
    order: tuple[int, ...] | None = None
    by_value: bool = False
    window: tuple[int, ...] | None = None

    @classmethod
    def of(cls, array: Any) -> Template:
        """The template of an array of any library; raises GraphTypeError for a dtype that cuDNN
        does not have."""
        shape = tuple(array.shape)
        if isinstance(array, (np.ndarray, np.generic)):
            dtype, in_host_memory = dtype_name(_numpy_dtype(array)), True
        else:
            dtype = dtype_name(array.dtype)  # JAX arrays, and tracers, are not asked for a device
            device = None if isinstance(array, jax.Array) else getattr(array, "device", None)
            in_host_memory = getattr(device, "type", None) == "cpu"  # torch
        by_value = in_host_memory and math.prod(shape) == 1
        order, window = _memory(array, shape, dtype)
        return cls(shape, dtype, order, by_value, window)


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library, a tracer, or a ShapeDtypeStruct."""
    has_type = hasattr(value, "shape") and hasattr(value, "dtype")
    return has_type and not isinstance(value, GraphTensor)


def is_unset(data_type: Any) -> bool:
    """Whether a data type is unset: None, or cuDNN's NOT_SET."""
    return data_type is None or getattr(data_type, "name", None) == "NOT_SET"


def dtype_name(dtype: Any) -> str:
    """JAX's name of a dtype of JAX, NumPy, torch or cuDNN; INT64 becomes uint32 pairs."""
    dtype = _without_torch(dtype)
    return (
        dtypes.WORDS if getattr(dtype, "name", dtype) == dtypes.WORDS else dtypes.canonical(dtype)
    )


def compute_name(dtype: Any) -> str:
    """The same for a compute type."""
    return dtypes.canonical_compute(_without_torch(dtype))


def _without_torch(dtype: Any) -> Any:
    """A torch dtype without ``torch.``: the rest is JAX's name."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else dtype


def _numpy_dtype(array: np.ndarray | np.generic) -> np.dtype:
    """JAX's dtype of a NumPy array. A float64 scalar, to which NumPy converts Python floats, is
    float32 even if x64 is enabled."""
    if array.size == 1 and array.dtype == np.float64:
        return np.dtype(np.float32)
    return jax.dtypes.canonicalize_dtype(array.dtype)


def _memory(array: Any, shape: Shape, dtype: str) -> tuple[Any, Any]:
    """The order of dimensions in memory unless it is row-major, and strides that have gaps."""
    order, strides = None, None
    if isinstance(array, Tracer):
        return None, None
    if isinstance(array, jax.Array):
        layout: Any = getattr(array, "format").layout  # noqa: B009
        order = getattr(layout, "major_to_minor", None)
    elif callable(getattr(array, "stride", None)):  # torch counts elements
        strides = [int(step) for step in array.stride()]
    elif getattr(array, "strides", None) is not None:  # NumPy and CuPy count bytes
        size = getattr(array, "itemsize", dtypes.itemsize(dtype))
        strides = [int(step) // size for step in array.strides]
    if strides is not None and len(strides) == len(shape):
        order = order_with_gaps(shape, strides)
    if order is None:
        return None, None
    window = None if strides is None else _window(shape, strides, tuple(order))
    return None if order == tuple(range(len(shape))) else tuple(order), window


def order_with_gaps(shape: Shape, strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions in memory, without the gaps of a window into a larger buffer; None
    if strides overlap, as those of a broadcast dimension do."""
    if len(strides) != len(shape):
        return None
    if 0 in shape:
        return tuple(range(len(shape)))
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axes.sort(key=lambda axis: -strides[axis])
    end = 1
    for axis in reversed(axes):
        if strides[axis] < end:
            return None
        end = (shape[axis] - 1) * strides[axis] + end
    ranks = iter(axes)
    return tuple(axis if shape[axis] == 1 else next(ranks) for axis in range(len(shape)))


def without_gaps(shape: Shape, strides: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Packed strides in the same order as ``strides``, and those if they have gaps; raises
    GraphError if they overlap."""
    known = isinstance(strides, (list, tuple)) and len(strides) == len(shape)
    if not known or not all(isinstance(step, (int, np.integer)) for step in strides):
        return strides, None
    order = order_with_gaps(shape, strides)
    if order is None:
        raise refusal(
            "set_stride: elements overlap in memory",
            expected=f"strides that visit each element of {list(shape)} once",
            got=str(list(strides)),
            why="XLA arrays have no overlaps",
            fix="declare a broadcast dimension with size 1: operations broadcast it",
        )
    return packed_strides(shape, order), _window(shape, strides, order)


def _window(shape: Shape, strides: Any, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides, or None if they have no gaps."""
    differs = zip(shape, strides, packed_strides(shape, order), strict=True)
    has_gaps = 0 not in shape and any(n != 1 and step != own for n, step, own in differs)
    return tuple(map(int, strides)) if has_gaps else None


class Ragged(NamedTuple):
    """The ragged offset of a tensor: the input ``of``. If the tensor's strides have gaps, a token
    takes ``step`` elements there, and ``size`` in the array that is passed, which has none."""

    of: str
    step: int = 1
    size: int = 1

    @property
    def name(self) -> str:
        """That of the offset into the array, which is an input of the spec."""
        return self.of if self.step == self.size else f"{self.of} // {self.step} * {self.size}"

    def into_array(self, value: Any, name: str) -> Any:
        """The offset into the array, of one into the larger buffer."""
        if self.step == self.size:
            return value
        return (value if is_array(value) else _as_jax(value, name)) // self.step * self.size


def offsets_of(tensors: Mapping[str, Any]) -> dict[str, Ragged]:
    """The ragged offsets of a graph's tensors, by name. Raises GraphError for tensors that their
    offsets, which are int32, cannot index, or with gaps between the sequences."""
    found: dict[str, Ragged] = {}
    steps: dict[str, set[tuple[bool, int]]] = {}  # of tokens, and whether they have gaps
    for name, tensor in ((n, t) for n, t in tensors.items() if t.offset is not None):
        step = size = 1
        if tensor.window and tensor.ndim == 4 and tensor.shape[0] * tensor.shape[2] > 1:
            (batch, heads, tokens, size), window = tensor.shape, tensor.window
            step, size = window[2], heads * size
            if batch > 1 and window[0] != tokens * step:
                raise refusal(
                    f"{tensor.get_name()} has a ragged offset, and gaps between its sequences",
                    expected=f"a batch stride of {tokens} token strides, {tokens * step}",
                    got=f"strides {list(window)} of {list(tensor.shape)}",
                    why="offsets into an array without gaps are computed from a token's stride",
                    fix="declare strides [S*T, ..., T, ...], and dense (B, H, S, D) arrays",
                )
        found[name] = Ragged(tensor.offset, step, size)
        own = step if step > 1 else math.prod(tensor.shape[1::2])
        steps.setdefault(tensor.offset, set()).add((tensor.window is not None, own))
        if tensors[tensor.offset].is_long and math.prod(tensor.shape) > np.iinfo(np.int32).max:
            raise refusal(
                f"{tensor.get_name()} is too large for ragged offsets",
                expected=f"at most {np.iinfo(np.int32).max} elements",
                got=str(math.prod(tensor.shape)),
                why="offsets of INT64 are converted to int32",
                fix="jax_cudnn.ops.packed_dot_product_attention takes offsets in tokens",
            )
    for offset, used in steps.items():
        if max(used)[0] and len({own for _, own in used}) > 1:
            summary = f"tensors with the ragged offset {offset} have tokens of different strides"
            raise refusal(summary, got=str(sorted(used)), fix="give each its own offset")
    return found


def number(value: Any) -> float | None:
    """The value of a Python or NumPy scalar, which is known without reading a device; or None."""
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        return float(value.reshape(()))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def operand(tensor: Tensor, value: Any, name: str) -> jax.Array:
    """The JAX array for an input of a graph; raises an error if it does not fit."""
    if (tensor.shape, tensor.dtype) == (SHAPE_OF_WORDS, dtypes.WORDS):
        value = _words(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        value = value.astype(_numpy_dtype(value), copy=False)
    array = _as_jax(value, name)
    if math.prod(array.shape) == 1 == math.prod(tensor.shape):
        array = array.reshape(tensor.shape)  # scalars get the rank of the tensors
    if getattr(array, "weak_type", False):  # a Python number, which promotion may convert
        if jnp.result_type(array, jnp.dtype(tensor.dtype)).name == tensor.dtype:
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


def _words(value: Any) -> Any:
    """One integer as its low and high word; anything else unchanged."""
    if isinstance(value, (int, np.ndarray, np.generic)) and np.size(value) == 1:
        number = np.asarray(value)
        if number.dtype.kind in "iu":
            return np.array([int(number.item()) % 2**64], "<u8").view("<u4").reshape(SHAPE_OF_WORDS)
    if not isinstance(value, jax.Array) or value.size != 1:
        return value
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return value
    bits = jnp.iinfo(value.dtype).bits
    high = value >> (32 if bits > 32 else bits - 1)  # the sign of a narrower one
    return jnp.stack([value.astype(dtypes.WORDS), high.astype(dtypes.WORDS)]).reshape(
        SHAPE_OF_WORDS
    )


def as_int32(value: Any, name: str) -> Any:
    """64-bit lengths, offsets or pages as int32. Raises GraphError for NumPy's beyond its range;
    JAX's are clipped to it, as they are to the arrays before each run."""
    bounds = np.iinfo(np.int32)
    if isinstance(value, jax.Array) and value.dtype == np.int64:
        return jnp.clip(value, bounds.min, bounds.max).astype(np.int32)
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype != np.int64:
        return value
    if value.size and not bounds.min <= value.min() <= value.max() <= bounds.max:
        raise GraphError(
            f"{name} is out of range",
            expected=f"integers from {bounds.min} to {bounds.max}",
            got=f"{value.min()} to {value.max()}",
            why="INT64 lengths, offsets and pages are converted to int32",
        )
    return value.astype(np.int32)


def _as_jax(value: Any, name: str) -> jax.Array:
    known = isinstance(value, (jax.Array, np.ndarray)) or hasattr(value, "__jax_array__")
    try:
        if known or not hasattr(value, "__dlpack__"):
            return jnp.asarray(value)
        # torch does not export tensors that record gradients.
        return jax.dlpack.from_dlpack(getattr(value, "detach", lambda: value)())
    except (TypeError, ValueError, OverflowError, RuntimeError, BufferError) as error:
        raise GraphTypeError(
            f"{name} is not an array",
            expected="an array of JAX, NumPy or a library with DLPack",
            got=shown(value),
            why=f"{type(error).__name__}: {error}"[:200],
        ) from error


def constant(tensor: GraphTensor, value: Any, name: str) -> float | None:
    """A scalar as a constant of a plan, rounded to the tensor's dtype; None for an array. Raises an
    error if the dtype cannot hold it."""
    given, dtype = number(value), tensor.dtype
    if given is None:
        return None
    if jnp.issubdtype(dtype, jnp.floating):
        given = dtypes.float32_range(name, given)
        if dtype == np.float32:  # operations round it themselves
            return given
        with np.errstate(over="ignore"):
            rounded = float(np.asarray(given).astype(dtype))
        if math.isfinite(given) and not math.isfinite(rounded):
            raise GraphError(
                f"{name} is too large",
                expected=f"a number in the range of {dtype.name}",
                got=repr(value),
                fix="declare it with data_type=float32",
            )
        return rounded
    if not given.is_integer():
        raise GraphTypeError(
            f"{name} is not an integer",
            expected=f"a value of {dtype.name}",
            got=repr(given),
            fix="declare the input with a floating data_type, or round the number",
        )
    least, most = 0, 1
    if dtype != np.bool_:
        own, int32 = jnp.iinfo(dtype), jnp.iinfo("int32")
        least, most = max(own.min, int32.min), min(own.max, int32.max)
    if not least <= given <= most:
        raise GraphError(
            f"{name} is out of range",
            expected=f"an integer from {least} to {most}",
            got=repr(given),
            why=f"it is a {dtype.name} constant, which a plan stores as int32",
        )
    return given


def like(wanted: Any, array: jax.Array, key: Any) -> jax.Array:
    """A result in the shape and dtype of the array that was passed for it.

    Dimensions may be merged, split, or added with size 1. Raises an error if the elements or their
    order would change, or if the dtype cannot hold them.
    """
    if not is_array(wanted):
        raise refusal(
            f"the value passed for output {key!r} is not an array",
            GraphTypeError,
            expected="an array or jax.ShapeDtypeStruct, for its shape and dtype",
            got=shown(wanted),
        )
    template = Template.of(wanted)
    had, has = _borders(array.shape), _borders(template.shape)
    if math.prod(template.shape) != array.size or not (had <= has or has <= had):
        raise refusal(
            f"the array passed for output {key!r} has another shape",
            expected=f"{list(array.shape)}, or this with adjacent dimensions merged or split",
            got=str(list(template.shape)),
            why="a result can be reshaped, but not transposed",
            fix="leave out the output, and transpose the result with jnp.transpose",
        )
    if not _holds(template.dtype, array.dtype.name):
        raise refusal(
            f"the array passed for output {key!r} cannot hold it",
            GraphTypeError,
            expected=array.dtype.name,
            got=template.dtype,
            why="values would be truncated",
            fix="leave out the output, and cast the result with astype",
        )
    return array.reshape(template.shape).astype(template.dtype)


def _borders(shape: Sequence[int]) -> set[int]:
    """The strides at which dimensions begin; a shape with more of them splits dimensions."""
    return {*itertools.accumulate((size for size in shape if size != 1), operator.mul)}


def _holds(dtype: str, result: str) -> bool:
    """Whether a dtype can hold results of another one; floats of any width can, by rounding."""
    if dtypes.is_floating(dtype):
        return True
    return not dtypes.is_floating(result) and jnp.promote_types(dtype, result).name == dtype
