"""Checks lax's arguments and converts them to the form that graphs take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.errors import GraphError, GraphTypeError, nearest, shown
from .._core.graph.dims import integers
from .._core.graph.dtypes import FLOATS, FP8, PRODUCTS, TO_CUDNN, canonical
from .._core.graph.options import Options, normal_precision
from .._core.graph.trace import GraphFunction

Padding = str | int | Sequence[int | tuple[int, int]]
_LARGEST: Any = sys.float_info.max


def array(name: str, x: Any, expected: str = "an array") -> jax.Array:
    """An argument as an array; GraphTypeError if it is not an array."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise GraphTypeError(f"{name} is not an array", expected=expected, got=shown(x)) from error


def floating(name: str, x: Any, dtypes: Sequence[str] = FLOATS) -> jax.Array:
    """An argument as an array of floats; GraphTypeError for other dtypes."""
    x = array(name, x, "an array of floats")
    if str(x.dtype) not in dtypes:
        raise GraphTypeError(
            f"{name} has a dtype that this operation does not support",
            expected=", ".join(dtypes),
            got=f"{x.dtype}{list(x.shape)}",
            fix=f"cast it before the call: {name}.astype(jnp.float32)",
        )
    return x


def integral(name: str, x: Any, expected: str, fix: str | None = None) -> jax.Array:
    """An argument as an array of integers; GraphTypeError for other dtypes."""
    x = array(name, x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    got = f"{x.dtype}{list(x.shape)}"
    fix = fix or f"cast them: {name}.astype(jnp.int32)"
    raise GraphTypeError(f"{name} are not integers", expected=expected, got=got, fix=fix)


def int32(name: str, x: Any) -> jax.Array:
    """An argument as an array; integers of all dtypes become int32, and saturate there."""
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    own, most = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    if own.bits > 16 and x.dtype != jnp.int32:
        x = jnp.clip(x, max(own.min, most.min), min(own.max, most.max))
    return x.astype(jnp.int32)


def integer(name: str, x: Any, least: int, why: str | None = None) -> int:
    """An argument as a Python integer; GraphError for other values, and those below ``least``."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or x < least:
        raise GraphError(
            f"{name} is not valid",
            expected=f"a Python integer of at least {least}",
            got=shown(x),
            why=why,
        )
    return int(x)


def flags(**given: Any) -> list[bool]:
    """Arguments as Python bools; GraphTypeError for other values, and those unknown at tracing."""
    for name, value in given.items():
        if not isinstance(value, (int, np.bool_, np.integer)) or value not in (0, 1):
            raise GraphTypeError(
                f"{name} is not a Python bool",
                expected="True or False",
                got=shown(value),
                why="it is static: it selects the program to compile",
                fix=f"pass a Python bool; under jax.jit use static_argnames={name!r}",
            )
        given[name] = bool(value)
    return [*given.values()]


def number(name: str, value: Any, instead: str = "") -> float:
    """An argument as a Python scalar; GraphTypeError for arrays, which are known too late.
    ``instead`` says what to do with an array."""
    plain = value.item() if isinstance(value, np.generic) else value  # the bound overflows NumPy's
    if isinstance(plain, Real) and not isinstance(plain, bool) and abs(plain) <= _LARGEST:
        return float(plain)
    is_array = isinstance(value, (jax.Array, np.ndarray))
    raise GraphTypeError(
        f"{name} is not a finite Python scalar",
        expected="a Python or NumPy scalar: it is static, a part of the plan",
        got=shown(value),
        fix=f"{instead}under jax.jit list {name} in static_argnames" if is_array else None,
    )


def promoted(x: Any, w: Any, names: tuple[str, str] = ("x", "w")) -> tuple[jax.Array, jax.Array]:
    """Two arguments as arrays; floats of different dtypes are promoted."""
    x, w = array(names[0], x), array(names[1], w)
    if x.dtype != w.dtype and {str(x.dtype), str(w.dtype)} <= {*FLOATS}:
        dtype = jnp.result_type(x, w)
        return x.astype(dtype), w.astype(dtype)
    return x, w


def numbers(x: jax.Array, w: jax.Array, dimension_numbers: Any) -> lax.ConvDimensionNumbers:
    """lax's dimension numbers for 1, 2 or 3 spatial dimensions; GraphError for other ranks."""
    if x.ndim != w.ndim or x.ndim not in (3, 4, 5):
        raise GraphError(
            "a convolution has 1, 2 or 3 spatial dimensions",
            expected="an image and weights of equal rank 3, 4 or 5",
            got=f"image {x.shape}, weights {w.shape}",
            fix="add a batch dimension with x[None], or merge several into one",
        )
    try:
        return lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    except (TypeError, ValueError) as error:
        raise GraphError(
            "dimension_numbers is not valid",
            expected='for example ("NHWC", "HWIO", "NHWC"), with the rank of the arrays',
            got=shown(dimension_numbers),
            why=str(error),
        ) from None


def transpose(x: jax.Array, axes: Any) -> jax.Array:
    """``jnp.transpose``; returns the array itself if nothing moves."""
    axes = tuple(int(axis) for axis in axes)
    if len(axes) != x.ndim:
        raise GraphError(
            "the residual has the wrong rank", expected=f"{len(axes)} dimensions", got=f"{x.shape}"
        )
    return x if axes == tuple(range(x.ndim)) else jnp.transpose(x, axes)


def laid_out(shape: Sequence[int], spec: Sequence[int]) -> tuple[int, ...]:
    """The shape of a result (N, C, *spatial) in the user's order of dimensions."""
    return tuple(shape[axis] for axis in np.argsort(spec))


def check_channels(
    channels: int, of_weights: int, where: tuple[int, int], groups: int | None = None
) -> None:
    """GraphError if the weights are for a different number of channels. ``where`` has the channel
    dimension of image and weights; ``groups`` is None for an operation without groups."""
    if of_weights * (groups or 1) != channels:
        given, divided, other = (
            ("", "", "") if groups is None else (f", groups={groups}", " / groups", ", or groups")
        )
        raise GraphError(
            "the weights do not fit the image's channels",
            expected=f"weights for C{divided} channels, with C = {channels} from dimension "
            f"{where[0]} of the image",
            got=f"weights for {of_weights} (their dimension {where[1]}){given}",
            fix='check the shapes and their layout, for example dimension_numbers=("NHWC", "HWIO", '
            f'"NHWC"){other}',
        )


def each(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One integer per spatial dimension."""
    try:
        values = tuple(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        values = (value,) * rank
    values = integers(name, values, 1, value)
    if len(values) != rank:
        raise GraphError(
            f"{name} has the wrong length",
            expected=f"one integer, or {rank} of them",
            got=f"{name}={shown(value)}",
        )
    return values


def pads(
    padding: Padding, sizes: Sequence[int], window: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(low, high) for each spatial dimension."""
    if isinstance(padding, str):
        if padding.upper() not in _PADDINGS:
            raise _unknown_padding(padding)
        padding = lax.padtype_to_pads(sizes, window, strides, padding.upper())
    return pairs(padding, len(sizes))


def pairs(padding: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """(low, high) for each spatial dimension, from integers and pairs."""
    try:
        given = [padding] * rank if isinstance(padding, (int, np.integer)) else list(padding)
        found = [(p, p) if isinstance(p, (int, np.integer)) else tuple(p) for p in given]
        if len(found) != rank or any(len(pair) != 2 for pair in found):
            raise TypeError
    except TypeError:
        raise _unknown_padding(padding, rank) from None
    return tuple(
        (low, high) for low, high in (integers("padding", pair, 0, padding) for pair in found)
    )


def transposed_pads(
    window: int, stride: int, dilation: int, padding: str | tuple[int, int]
) -> tuple[int, int]:
    """The padding of one dimension of ``lax.conv_transpose``."""
    if not isinstance(padding, str):
        return padding
    reach = dilation * (window - 1)
    if padding.upper() == "VALID":
        total = reach + stride - 1 + max(reach + 1 - stride, 0)
        return reach, total - reach
    if padding.upper() == "SAME":
        total = reach + stride - 1
        low = reach if stride > reach else (total + 1) // 2
        return low, total - low
    raise _unknown_padding(padding, names=("SAME", "VALID"))


def out_dtype(x: jax.Array, w: jax.Array, preferred: Any, epilogue: bool = False) -> str:
    """The dtype of a product; GraphTypeError for dtypes that cuDNN does not multiply.

    With an epilogue, which computes in float32, int8 gives float32.
    """
    names = {str(x.dtype), str(w.dtype)}
    integers_only = names == {"int8"}
    if not names <= {*PRODUCTS} or (len(names) > 1 and not names <= {*FP8}):
        raise GraphTypeError(
            "cuDNN has no product of these dtypes",
            expected=f"one of {', '.join(PRODUCTS)} for both (the two float8 formats may be mixed)",
            got=f"{x.dtype} and {w.dtype}",
            fix="cast them with .astype",
        )
    if preferred is not None:
        return preferred_dtype(preferred)
    if names <= {*FP8}:
        return "float32"
    if integers_only:
        return "float32" if epilogue else "int32"
    return jnp.result_type(x, w).name


def preferred_dtype(preferred: Any) -> str:
    """The name of ``preferred_element_type``; GraphTypeError for dtypes that cuDNN lacks."""
    try:
        return canonical(preferred)
    except GraphTypeError as error:
        error.summary = f"preferred_element_type: {error.summary}"
        if error.got != "float64":
            error.fix = nearest(preferred, TO_CUDNN)
        raise


def chosen(
    function: GraphFunction,
    options: Options | None = None,
    precision: Any = None,
    implementation: str | None = None,
) -> GraphFunction:
    """The function with options; ``precision`` (any spelling of lax) and ``implementation`` take
    precedence over ``options``."""
    changes: dict[str, Any] = {} if options is None else {"options": options}
    if precision is not None:
        changes["precision"] = normal_precision(precision)
    if implementation is not None:
        changes["implementation"] = implementation
    return function.with_options(**changes) if changes else function


_PADDINGS = ("SAME", "SAME_LOWER", "VALID")


def _unknown_padding(
    padding: Any, rank: int | None = None, names: Sequence[str] = _PADDINGS
) -> GraphError:
    spatial = "each spatial dimension" if rank is None else f"each of {rank} spatial dimensions"
    return GraphError(
        "padding is not valid",
        expected=f"{', '.join(map(repr, names))}, an integer, or (low, high) for {spatial}",
        got=f"padding={shown(padding)}",
        fix=nearest(padding, names),
    )
