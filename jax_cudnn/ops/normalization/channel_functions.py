"""Instance and group normalization with Flax's conventions."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError, GraphTypeError, shown
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from ..._core.primitive import broadcasting
from ..arguments import floating, transpose
from . import row_functions

INSTANCE_NORM = GraphFunction(row_functions.norm, name="instance_norm")
GROUP_NORM = GraphFunction(row_functions.norm, name="group_norm")
_ORDER = "the order of the arguments is group_norm(x, num_groups, scale, bias)"


def instance_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: int = -1,
    epsilon: row_functions.Scalar = 1e-5,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Instance normalization: normalizes each channel of each batch element independently.

    ``(x - mean) * inv_std * scale + bias`` with ``inv_std = (var + epsilon)**-0.5``; mean and
    (biased) variance over all axes except the first and ``axis``.

    Args:
        x: (batch, *spatial, channels), or with the channels at ``axis``; at least one spatial axis.
        scale: (channels,); 1 if omitted.
        bias: (channels,); 0 if omitted.
        axis: the channel axis.
        epsilon, return_statistics, implementation, options: as in :func:`layer_norm`.

    Returns, Raises: as :func:`layer_norm`. Source: Ulyanov et al. 2016, arXiv:1607.08022;
    ``flax.nnx.InstanceNorm``; cuDNN documentation, ``CUDNN_INSTANCE_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.instance_norm(jnp.ones((2, 8, 8, 16)), jnp.ones(16), jnp.zeros(16)).shape
        (2, 8, 8, 16)
    """
    x = floating("x", x)
    order = row_functions.channels_second(x, axis, 3, "(batch, *spatial, channels)")
    image = row_functions.Transposed(transpose(x, order), order)
    shape = image.x.shape
    scale, bias = row_functions.per_channel(shape, scale, bias, x.dtype)
    # cuDNN supports up to three spatial dimensions.
    spatial = shape[2:] if len(shape) < 6 else (math.prod(shape[2:]),)
    found = row_functions.NormCall(
        INSTANCE_NORM, "instancenorm", epsilon, options, implementation
    ).of(
        image.x.reshape(*shape[:2], *spatial),
        row_functions.of_rank(scale, 2 + len(spatial)),
        row_functions.of_rank(bias, 2 + len(spatial)),
    )
    rank = image.x.ndim
    y = image.back(found[0].reshape(shape))
    statistics = tuple(image.back(row_functions.of_rank(v, rank, lead=2)) for v in found[1:])
    return (y, statistics) if return_statistics else y


def group_norm(
    x: jax.Array,
    num_groups: int,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: int = -1,
    epsilon: row_functions.Scalar = 1e-5,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Group normalization: normalizes each group of channels of each batch element independently.

    ``(x - mean) * inv_std * scale + bias`` with ``inv_std = (var + epsilon)**-0.5``; mean and
    (biased) variance over the channels of a group and all axes except the first and ``axis``.

    Args:
        x: (batch, ..., channels), or with the channels at ``axis``.
        num_groups: a divisor of the number of channels.
        scale: (channels,); 1 if omitted.
        bias: (channels,); 0 if omitted.
        axis: the channel axis.
        epsilon, return_statistics, implementation, options: as in :func:`layer_norm`.

    Returns: y, with the shape and dtype of x; with ``return_statistics`` (y, (mean, inv_std)), the
    statistics in float32 (float64 for float64) with shape (batch, num_groups).

    cuDNN graphs have no group normalization. A single group runs as a layer normalization, one
    group per channel as an instance normalization. With several groups and a scale or bias, XLA
    normalizes from the statistics; the forward keeps only x and the statistics for the backward.

    Raises: as :func:`layer_norm`. Source: Wu and He 2018, arXiv:1803.08494;
    ``flax.nnx.GroupNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.group_norm(jnp.ones((2, 8, 8, 16)), 4, jnp.ones(16), jnp.zeros(16)).shape
        (2, 8, 8, 16)
    """
    x = floating("x", x)
    second = row_functions.channels_second(x, axis, 2, "(batch, ..., channels)")
    order = (second[0], *second[2:], second[1])  # channels last
    moved = row_functions.Transposed(transpose(x, order), order)
    batch, *spatial, channels = moved.x.shape
    try:
        groups = operator.index(num_groups)
    except TypeError:
        raise GraphTypeError(
            "num_groups is not an integer",
            expected="a Python integer",
            got=shown(num_groups),
            fix=_ORDER,
        ) from None
    if groups < 1 or channels % groups:
        raise GraphError(
            "num_groups does not divide the number of channels",
            expected=f"a divisor of {channels}, the size of axis {axis}",
            got=f"num_groups={groups}",
            fix=_ORDER,
        )
    scale, bias = (
        row_functions.parameter(n, p, (channels,)) for n, p in (("scale", scale), ("bias", bias))
    )
    if 1 < groups == channels and spatial:
        y, found = instance_norm(
            moved.x, scale, bias, epsilon=epsilon, return_statistics=True, options=options,
            implementation=implementation,
        )  # fmt: skip
        y, statistics = moved.back(y), tuple(v.reshape(batch, groups) for v in found)
        return (y, statistics) if return_statistics else y
    # Of (batch, ..., groups, channels per group) all but the batch and the groups are one row.
    parts = (channels,) if groups == 1 else (groups, channels // groups)
    wide = moved.x.reshape(batch, *spatial, *parts)
    row = (1, *spatial, *((1,) if groups > 1 else ()), parts[-1])
    affine_outside = groups > 1 and not (scale is None and bias is None)  # factors are per channel
    within = (
        jnp.full(row, neutral, x.dtype)
        if affine_outside or p is None
        else jnp.broadcast_to(p, moved.x.shape[1:]).reshape(row)
        for p, neutral in ((scale, 1), (bias, 0))
    )
    y, *found = row_functions.NormCall(
        GROUP_NORM, "layernorm", epsilon, options, implementation
    ).of(wide, *within)
    statistics = tuple(v.reshape(batch, groups) for v in found)
    if affine_outside:
        y = _scaled_groups(moved.x, *statistics, scale, bias)
    y = moved.back(y.reshape(moved.x.shape))
    return (y, statistics) if return_statistics else y


@functools.partial(jax.checkpoint, prevent_cse=False)
def _scaled_groups(
    x: jax.Array,
    mean: jax.Array,
    inv_std: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    """Normalizes groups of the last axis by their statistics, then applies scale and bias per
    channel. Nothing but x and the statistics is kept for the backward."""
    batch, groups = mean.shape
    each = (batch, *(1,) * (x.ndim - 2), groups, 1)
    wide = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    wide = wide.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = ((wide - mean.reshape(each)) * inv_std.reshape(each)).reshape(x.shape)
    scale, bias = (p if p is None else jnp.expand_dims(p, range(x.ndim - 1)) for p in (scale, bias))
    scale, bias = broadcasting(y, scale, bias)
    y = y if scale is None else y * scale.astype(y.dtype)
    y = y if bias is None else y + bias.astype(y.dtype)
    return y.astype(x.dtype)
