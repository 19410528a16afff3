"""Checks the arguments of normalizations and converts them to the form that graphs take."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, shown
from .._core.graph.dtypes import wide_dtype
from .arguments import array, floating

Axes = int | Sequence[int]
Scalar = float | jax.Array


def scalar(name: str, value: Any) -> Scalar:
    """A Python scalar of at least 0, or a scalar array in float32 or float64; GraphError for
    anything else."""
    if isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0):
        if not (number := float(value)) >= 0:
            expected = "a number of at least 0"
            raise GraphError(f"{name} is not {expected}", expected=expected, got=shown(value))
        return number
    value = array(name, value, "a scalar, or a scalar array")
    if value.ndim or jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise GraphError(
            f"{name} is not a scalar",
            expected="a real scalar",
            got=f"{value.dtype}{list(value.shape)}",
        )
    return value.astype(wide_dtype(value))


def normalized_axes(x: jax.Array, axis: Axes) -> tuple[int, ...]:
    """The axes as ascending positions; GraphError if they are not valid."""
    try:
        several = isinstance(axis, Sequence) or (isinstance(axis, np.ndarray) and axis.ndim > 0)
        axes: Any = axis if several else (axis,)
        given = tuple(map(operator.index, axes))
    except TypeError:
        given = ()
    found = sorted({a + x.ndim if a < 0 else a for a in given})
    if not found or len(found) != len(given) or found[0] < 0 or found[-1] >= x.ndim:
        raise GraphError(
            "axis is not valid",
            expected=f"one or more different axes of an array of rank {x.ndim}",
            got=f"axis={shown(axis)}",
            fix="axis=-1 is the last axis; at least one axis is required",
        )
    return tuple(found)


def channels_second(x: jax.Array, axis: int, least: int, expected: str) -> tuple[int, ...]:
    """The order of axes in which the channels follow the first axis."""
    one = isinstance(axis, (int, np.integer))
    (channel,) = normalized_axes(x, axis if one else -1)
    if x.ndim < least or channel == 0 or not one:
        raise GraphError(
            "x does not have these axes",
            expected=f"{expected}, with the channels at axis {axis}, which is not the first",
            got=f"shape {x.shape}, axis={shown(axis)}",
        )
    return (0, channel, *(a for a in range(1, x.ndim) if a != channel))


def per_channel(
    image: tuple[int, ...], scale: Any, bias: Any, default: Any
) -> tuple[jax.Array, jax.Array]:
    """Scale and bias as (1, C, 1, ...) for an image (N, C, ...); ones and zeros if omitted."""
    channels, rank = image[1], len(image)
    scale, bias = (parameter(n, p, (channels,)) for n, p in (("scale", scale), ("bias", bias)))
    dtype = next((p.dtype for p in (scale, bias) if p is not None), default)
    scale = jnp.ones(channels, dtype) if scale is None else scale
    bias = jnp.zeros(channels, dtype) if bias is None else bias
    shape = (1, channels, *(1,) * (rank - 2))
    return scale.reshape(shape), bias.reshape(shape)


def parameter(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if value is None:
        return None
    value = floating(name, value)
    if value.shape != shape:
        raise GraphError(
            f"{name} does not fit",
            expected=f"shape {shape}",
            got=f"shape {value.shape}",
            why="it has the shape of the normalized axes, or one element per channel",
        )
    return value


def of_rank(x: jax.Array, rank: int, lead: int = 2) -> jax.Array:
    """Keeps the first ``lead`` dimensions and appends dimensions of size 1 up to ``rank``."""
    return x.reshape(*x.shape[:lead], *(1,) * (rank - lead))
