"""Normalizations in the conventions of jax.nn and Flax: any rank, any axis."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError
from .._core.graph.options import Options
from .._core.graph.trace import GraphFunction
from .arguments import chosen, floating, transpose
from .norm_arguments import (
    Axes,
    Scalar,
    channels_second,
    normalized_axes,
    of_rank,
    parameter,
    per_channel,
    scalar,
)


def _norm(g, x, scale, bias, epsilon, *, kind, zero_centered, out):
    scale = g.add(scale, 1.0) if zero_centered else scale
    bias = {} if bias is None else {"bias": bias}
    y, *statistics = getattr(g, kind)(x, scale, **bias, epsilon=epsilon)
    return (y.set_data_type(out), *statistics)


RMS_NORM = GraphFunction(_norm, name="rms_norm")
LAYER_NORM = GraphFunction(_norm, name="layer_norm")
ADA_LAYER_NORM = GraphFunction(_norm, name="ada_layer_norm")
INSTANCE_NORM = GraphFunction(_norm, name="instance_norm")
GROUP_NORM = GraphFunction(_norm, name="group_norm")


class Asked(NamedTuple):
    """A node of a graph function, and how it is asked for."""

    function: GraphFunction
    kind: str
    epsilon: Scalar
    options: Options | None
    implementation: str | None
    zero_centered: bool = False

    def of(
        self, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Its results, the first in the dtype of x."""
        return chosen(self.function, self.options, None, self.implementation)(
            x,
            scale,
            bias,
            scalar("epsilon", self.epsilon),
            kind=self.kind,
            zero_centered=self.zero_centered,
            out=str(x.dtype),
        )


class Moved(NamedTuple):
    """An array with some of its axes moved to the end."""

    x: jax.Array
    order: tuple[int, ...]
    """Where each axis stood before."""

    def back(self, y: jax.Array) -> jax.Array:
        return transpose(y, np.argsort(self.order))


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axes = -1,
    epsilon: Scalar = 1e-6,
    zero_centered_scale: bool = False,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Root mean square normalization.

    ``x * inv_rms * scale`` with ``inv_rms = (mean(x**2, axis) + epsilon)**-0.5``.

    Args:
        x: any shape; float32, bfloat16 or float16.
        scale: of the shape of the normalized axes, in the array's order; none is 1. cuDNN's fast
            kernels take one of ``x``'s dtype.
        axis: the normalized axes. The last ones are read where they lie; others are moved there,
            which costs nothing where they lie last in memory.
        epsilon: added to the mean square. A Python number is part of the plan's call; an array may
            be computed in the program, and then XLA runs the normalization, because cuDNN reads
            it before it starts.
        zero_centered_scale: multiply by ``1 + scale``, as for parameters that decay to 0.
        return_statistics: also return inv_rms.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Returns: y, of the shape and dtype of x; with ``return_statistics`` (y, inv_rms), inv_rms in
    float32 with 1 in the normalized axes. All may be differentiated; the forward keeps inv_rms.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, where cuDNN does not run it.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; ``flax.nnx.RMSNorm``; cuDNN documentation,
    ``CUDNN_RMS_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.rms_norm(jnp.ones((4, 128, 64)), jnp.ones(64)).shape
        (4, 128, 64)
    """
    asked = Asked(RMS_NORM, "rmsnorm", epsilon, options, implementation, zero_centered_scale)
    y, inv_rms = _of_rows(asked, x, scale, None, axis)
    return (y, inv_rms) if return_statistics else y


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: Axes = -1,
    epsilon: Scalar = 1e-5,
    zero_centered_scale: bool = False,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Layer normalization.

    ``(x - mean) * inv_std * scale + bias`` with ``inv_std = (var + epsilon)**-0.5``; mean and
    (biased) variance over ``axis``, in float32, of distances from the mean.

    Args:
        x, axis, epsilon, zero_centered_scale, implementation, options: as in :func:`rms_norm`.
        scale: of the shape of the normalized axes, in their order; none is 1.
        bias: like scale; none is 0.
        return_statistics: also return (mean, inv_std).

    Returns: y, of the shape and dtype of x; with ``return_statistics`` (y, (mean, inv_std)), these
    in float32 with 1 in the normalized axes. All may be differentiated; the forward keeps
    mean and inv_std alone.

    Raises: as :func:`rms_norm`. Source: Ba et al. 2016, arXiv:1607.06450;
    ``flax.nnx.LayerNorm``; cuDNN documentation, ``CUDNN_LAYER_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.layer_norm(jnp.ones((4, 128, 64)), jnp.ones(64), jnp.zeros(64)).shape
        (4, 128, 64)
    """
    asked = Asked(LAYER_NORM, "layernorm", epsilon, options, implementation, zero_centered_scale)
    y, *statistics = _of_rows(asked, x, scale, bias, axis)
    return (y, tuple(statistics)) if return_statistics else y


def ada_layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: Scalar = 1e-5,
    zero_centered_scale: bool = False,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Layer normalization of the last axis with a scale and bias for each example.

    As :func:`layer_norm`, where ``scale`` and ``bias`` depend on the first axis, as diffusion
    transformers compute them from what they are conditioned on.

    Args:
        x: (batch, ..., features).
        scale: (batch, features).
        bias: (batch, features); none is 0.
        epsilon, zero_centered_scale, return_statistics, implementation, options: as in
            :func:`layer_norm`.

    Returns, Raises: as :func:`layer_norm`. Source: Peebles and Xie 2023, arXiv:2212.09748 (with
    ``zero_centered_scale``); cuDNN documentation, ``CUDNN_ADA_LAYER_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.ada_layer_norm(jnp.ones((4, 128, 64)), jnp.ones((4, 64))).shape
        (4, 128, 64)
    """
    x = floating("x", x)
    if x.ndim < 2:
        raise GraphError(
            "x has no batch axis", expected="(batch, ..., features)", got=f"shape {x.shape}"
        )
    wide = x[:, None] if x.ndim == 2 else x  # with two axes each example is one row
    shape = (x.shape[0], *(1,) * (wide.ndim - 2), x.shape[-1])
    wanted = (x.shape[0], x.shape[-1])
    gamma, beta = (parameter(name, p, wanted) for name, p in (("scale", scale), ("bias", bias)))
    if gamma is None:
        raise GraphError("scale is missing", expected=f"shape {wanted}", got="None")
    beta = jnp.zeros(wanted, gamma.dtype) if beta is None else beta
    gamma, beta = gamma.reshape(shape), beta.reshape(shape)
    found = Asked(
        ADA_LAYER_NORM, "adalayernorm", epsilon, options, implementation, zero_centered_scale
    ).of(wide, gamma, beta)
    y, *statistics = (v.reshape(*x.shape[:-1], v.shape[-1]) for v in found)
    return (y, tuple(statistics)) if return_statistics else y


def instance_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    axis: int = -1,
    epsilon: Scalar = 1e-5,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Instance normalization: each channel of each image by itself.

    ``(x - mean) * inv_std * scale + bias`` with ``inv_std = (var + epsilon)**-0.5``; mean and
    (biased) variance over all axes but the first and ``axis``.

    Args:
        x: (batch, *spatial, channels), or with its channels at ``axis``; at least one spatial axis.
        scale: (channels,); none is 1.
        bias: (channels,); none is 0.
        axis: where the channels are.
        epsilon, return_statistics, implementation, options: as in :func:`layer_norm`.

    Returns, Raises: as :func:`layer_norm`. Source: Ulyanov et al. 2016, arXiv:1607.08022;
    ``flax.nnx.InstanceNorm``; cuDNN documentation, ``CUDNN_INSTANCE_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.instance_norm(jnp.ones((2, 8, 8, 16)), jnp.ones(16), jnp.zeros(16)).shape
        (2, 8, 8, 16)
    """
    x = floating("x", x)
    order = channels_second(x, axis, 3, "(batch, *spatial, channels)")
    image = Moved(transpose(x, order), order)
    shape = image.x.shape
    scale, bias = per_channel(shape, scale, bias, x.dtype)
    # cuDNN has up to three spatial dimensions.
    spatial = shape[2:] if len(shape) < 6 else (math.prod(shape[2:]),)
    found = Asked(INSTANCE_NORM, "instancenorm", epsilon, options, implementation).of(
        image.x.reshape(*shape[:2], *spatial),
        of_rank(scale, 2 + len(spatial)),
        of_rank(bias, 2 + len(spatial)),
    )
    rank = image.x.ndim
    y = image.back(found[0].reshape(shape))
    statistics = tuple(image.back(of_rank(v, rank, lead=2)) for v in found[1:])
    return (y, statistics) if return_statistics else y


def group_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    num_groups: int,
    axis: int = -1,
    epsilon: Scalar = 1e-5,
    return_statistics: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Group normalization: each group of channels of each image by itself.

    ``(x - mean) * inv_std * scale + bias`` with ``inv_std = (var + epsilon)**-0.5``; mean and
    (biased) variance over the channels of a group and all axes but the first.

    Args:
        x: (batch, ..., channels), or with its channels at ``axis``.
        scale: (channels,); none is 1.
        bias: (channels,); none is 0.
        num_groups: a divisor of the number of channels.
        axis: where the channels are.
        epsilon, return_statistics, implementation, options: as in :func:`layer_norm`.

    Returns: y, of the shape and dtype of x; with ``return_statistics`` (y, (mean, inv_std)), these
    in float32 and of shape (batch, num_groups).

    cuDNN's graphs have no such operation. One group, and a group for each channel, are rows and
    instances to it; XLA runs the rest, in the same program. Of several groups with a scale or bias
    XLA normalizes, by the statistics; these and x are kept for the backward.

    Raises: as :func:`layer_norm`. Source: Wu and He 2018, arXiv:1803.08494;
    ``flax.nnx.GroupNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.group_norm(jnp.ones((2, 8, 8, 16)), num_groups=4).shape
        (2, 8, 8, 16)
    """
    x = floating("x", x)
    second = channels_second(x, axis, 2, "(batch, ..., channels)")
    order = (second[0], *second[2:], second[1])  # channels last
    moved = Moved(transpose(x, order), order)
    batch, *spatial, channels = moved.x.shape
    try:
        groups = operator.index(num_groups)
    except TypeError:
        groups = 0
    if groups < 1 or channels % groups:
        raise GraphError(
            "num_groups does not divide the channels",
            expected=f"a divisor of {channels}, the size of axis {axis}",
            got=f"num_groups={num_groups!r}",
        )
    scale, bias = (parameter(n, p, (channels,)) for n, p in (("scale", scale), ("bias", bias)))
    if 1 < groups == channels and spatial:
        y, found = instance_norm(
            moved.x, scale, bias, epsilon=epsilon, return_statistics=True, options=options,
            implementation=implementation,
        )  # fmt: skip
        y, statistics = moved.back(y), tuple(v.reshape(batch, groups) for v in found)
        return (y, statistics) if return_statistics else y
    # Of (batch, pixels, groups, channels of each) the second and last are a group's.
    inner = channels // groups
    wide = moved.x.reshape(batch, math.prod(spatial), channels)  # a mesh takes one step at a time
    wide = wide.reshape(batch, math.prod(spatial), groups, inner)
    if groups == 1:
        wide = wide.reshape(batch, math.prod(spatial) * channels)
    row = (1, *(1 if axis == 2 else size for axis, size in enumerate(wide.shape) if axis))
    apart = groups > 1 and not (scale is None and bias is None)  # no factor is of a group alone
    within = (
        jnp.full(row, neutral, x.dtype)
        if apart or p is None
        else jnp.broadcast_to(p, moved.x.shape[1:]).reshape(row)
        for p, neutral in ((scale, 1), (bias, 0))
    )
    y, *found = Asked(GROUP_NORM, "layernorm", epsilon, options, implementation).of(wide, *within)
    statistics = tuple(v.reshape(batch, groups) for v in found)
    if apart:
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
    """Groups of the last axis by their statistics, then scale and bias by channel; of x and the
    statistics nothing more is kept for the backward."""
    batch, groups = mean.shape
    each = (batch, *(1,) * (x.ndim - 2), groups, 1)
    wide = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups).astype(jnp.float32)
    y = ((wide - mean.reshape(each)) * inv_std.reshape(each)).reshape(x.shape)
    y = y if scale is None else y * scale.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _of_rows(
    asked: Asked, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, axis: Axes
) -> list[jax.Array]:
    """A normalization over some axes: they are moved to the end, and back."""
    x = floating("x", x)
    axes = normalized_axes(x, axis)
    order = (*(a for a in range(x.ndim) if a not in axes), *axes)
    moved = Moved(transpose(x, order), order)
    row = tuple(x.shape[a] for a in axes)
    scale, bias = (parameter(n, p, row) for n, p in (("scale", scale), ("bias", bias)))
    asked = asked._replace(zero_centered=asked.zero_centered and scale is not None)
    dtype = next((p.dtype for p in (scale, bias) if p is not None), x.dtype)
    scale = jnp.ones(row, dtype) if scale is None else scale
    if asked.kind == "layernorm":  # it has always one
        bias = jnp.zeros(row, dtype) if bias is None else bias
    wide = moved.x if len(axes) < x.ndim else moved.x[None]  # one row
    shape = (*(1,) * (wide.ndim - len(row)), *row)
    scale, bias = (None if p is None else p.reshape(shape) for p in (scale, bias))
    found = asked.of(wide, scale, bias)
    return [moved.back(v if wide is moved.x else v[0]) for v in found]
