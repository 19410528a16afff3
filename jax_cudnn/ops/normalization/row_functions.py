"""Row normalizations with the conventions of jax.nn and Flax: any rank, any axis."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError, shown
from ..._core.graph.dtypes import wide_dtype
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from ..arguments import array, chosen, floating, transpose

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


def norm(g, x, scale, bias, epsilon, *, kind, zero_centered, out):
    """The graph of a normalization of this ``kind``."""
    scale = g.add(scale, 1.0) if zero_centered else scale
    bias = {} if bias is None else {"bias": bias}
    y, *statistics = getattr(g, kind)(x, scale, **bias, epsilon=epsilon)
    return (y.set_data_type(out), *statistics)


RMS_NORM = GraphFunction(norm, name="rms_norm")
LAYER_NORM = GraphFunction(norm, name="layer_norm")
ADA_LAYER_NORM = GraphFunction(norm, name="ada_layer_norm")


class NormCall(NamedTuple):
    """A graph function with the arguments of one call."""

    function: GraphFunction
    kind: str
    epsilon: Scalar
    options: Options | None
    implementation: str | None
    zero_centered: bool = False

    def of(
        self, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """The results; the first has the dtype of x."""
        return chosen(self.function, self.options, None, self.implementation)(
            x,
            scale,
            bias,
            scalar("epsilon", self.epsilon),
            kind=self.kind,
            zero_centered=self.zero_centered,
            out=str(x.dtype),
        )


class Transposed(NamedTuple):
    """An array with some of its axes moved to the end."""

    x: jax.Array
    order: tuple[int, ...]
    """The original position of each axis."""

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
        x: any shape; float32, bfloat16 or float16; float64 runs in XLA.
        scale: has the shape of the normalized axes, in the order of ``x``; 1 if omitted. cuDNN's
            fast kernels require the dtype of ``x``.
        axis: the normalized axes. Trailing axes need no copy; other axes are moved to the end,
            which is free if they are last in memory.
        epsilon: added to the mean square. cuDNN needs a Python scalar; with an array, XLA runs the
            normalization.
        zero_centered_scale: multiply by ``1 + scale``, for parameters that decay to 0.
        return_statistics: also return inv_rms.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Returns: y, with the shape and dtype of x; with ``return_statistics`` (y, inv_rms), where
    inv_rms is float32 (float64 for float64) with size 1 in the normalized axes. All results are
    differentiable; the forward keeps inv_rms for the backward.

    Raises:
        GraphError, GraphTypeError: the shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, if cuDNN cannot run it.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; ``flax.nnx.RMSNorm``; cuDNN documentation,
    ``CUDNN_RMS_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.rms_norm(jnp.ones((4, 128, 64)), jnp.ones(64)).shape
        (4, 128, 64)
    """
    call = NormCall(RMS_NORM, "rmsnorm", epsilon, options, implementation, zero_centered_scale)
    y, inv_rms = _of_rows(call, x, scale, None, axis)
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
    (biased) variance over ``axis``, in float32 (float64 for float64). The variance sums
    squared distances from the mean.

    Args:
        x, axis, epsilon, zero_centered_scale, implementation, options: as in :func:`rms_norm`.
        scale: has the shape of the normalized axes, in the order of ``x``; 1 if omitted.
        bias: like scale; 0 if omitted.
        return_statistics: also return (mean, inv_std).

    Returns: y, with the shape and dtype of x; with ``return_statistics`` (y, (mean, inv_std)),
    where the statistics have size 1 in the normalized axes. All results are differentiable; the
    forward keeps only mean and inv_std for the backward.

    Raises: as :func:`rms_norm`. Source: Ba et al. 2016, arXiv:1607.06450;
    ``flax.nnx.LayerNorm``; cuDNN documentation, ``CUDNN_LAYER_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> jc.ops.layer_norm(jnp.ones((4, 128, 64)), jnp.ones(64), jnp.zeros(64)).shape
        (4, 128, 64)
    """
    call = NormCall(LAYER_NORM, "layernorm", epsilon, options, implementation, zero_centered_scale)
    y, *statistics = _of_rows(call, x, scale, bias, axis)
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
    """Layer normalization of the last axis with a scale and bias per batch element.

    As :func:`layer_norm`, but ``scale`` and ``bias`` depend on the first axis. Diffusion
    transformers compute them from the conditioning.

    Args:
        x: (batch, ..., features).
        scale: (batch, features).
        bias: (batch, features); 0 if omitted.
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
    wide = x[:, None] if x.ndim == 2 else x  # with two axes each batch element is one row
    shape = (x.shape[0], *(1,) * (wide.ndim - 2), x.shape[-1])
    wanted = (x.shape[0], x.shape[-1])
    gamma, beta = (parameter(name, p, wanted) for name, p in (("scale", scale), ("bias", bias)))
    if gamma is None:
        raise GraphError("scale is missing", expected=f"shape {wanted}", got="None")
    beta = jnp.zeros(wanted, gamma.dtype) if beta is None else beta
    gamma, beta = gamma.reshape(shape), beta.reshape(shape)
    found = NormCall(
        ADA_LAYER_NORM, "adalayernorm", epsilon, options, implementation, zero_centered_scale
    ).of(wide, gamma, beta)
    y, *statistics = (v.reshape(*x.shape[:-1], v.shape[-1]) for v in found)
    return (y, tuple(statistics)) if return_statistics else y


def _of_rows(
    call: NormCall, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, axis: Axes
) -> list[jax.Array]:
    """Normalizes over some axes: moves them to the end, and back."""
    x = floating("x", x)
    axes = normalized_axes(x, axis)
    order = (*(a for a in range(x.ndim) if a not in axes), *axes)
    moved = Transposed(transpose(x, order), order)
    row = tuple(x.shape[a] for a in axes)
    scale, bias = (parameter(n, p, row) for n, p in (("scale", scale), ("bias", bias)))
    call = call._replace(zero_centered=call.zero_centered and scale is not None)
    dtype = next((p.dtype for p in (scale, bias) if p is not None), x.dtype)
    scale = jnp.ones(row, dtype) if scale is None else scale
    if call.kind == "layernorm":  # the graph always has a bias
        bias = jnp.zeros(row, dtype) if bias is None else bias
    wide = moved.x if len(axes) < x.ndim else moved.x[None]  # one row
    shape = (*(1,) * (wide.ndim - len(row)), *row)
    scale, bias = (None if p is None else p.reshape(shape) for p in (scale, bias))
    found = call.of(wide, scale, bias)
    return [moved.back(v if wide is moved.x else v[0]) for v in found]
