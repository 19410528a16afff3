"""Batch normalization, alone and after a convolution, with Flax's conventions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphTypeError, shown
from ..._core.graph.boundary import BITS
from ..._core.graph.dtypes import wide_dtype
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from .. import epilogue
from ..arguments import Padding, chosen, floating, promoted, transpose
from ..convolution.functions import conv, groups_of_shapes, prepared
from ..epilogue import Activation
from .extents import is_sharded
from .row_functions import Scalar, channels_second, parameter, per_channel, scalar

Running = tuple[jax.Array, jax.Array]


def _training(g, x, scale, bias, no_mean, no_var, residual, epsilon, *, activation, masked, out):
    # Running statistics are updated outside the graph, where momentum may be an array: momentum 1
    # and running statistics of zero return exactly the statistics of the batch.
    y, mean, _, _, variance = g.batchnorm(x, scale, bias, no_mean, no_var, epsilon, 1.0)
    if activation != "relu":  # cuDNN fuses nothing else, and Y has the dtype of x
        y = y.set_data_type(out)
    y = epilogue.apply(g, y, None, None, residual, None if masked else activation)
    if masked:
        y, _ = g.relu_mask(y)
    return y.set_data_type(out), mean, variance


def _inference(g, x, scale, bias, mean, inv_std, residual, *, activation, out):
    y = g.batchnorm_inference(x, mean, inv_std, scale, bias).set_data_type("float32")
    return epilogue.apply(g, y, None, None, residual, activation).set_data_type(out)


TRAINING = GraphFunction(_training, name="batch_norm")
INFERENCE = GraphFunction(_inference, name="batch_norm")


def batch_norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    *,
    training: bool,
    momentum: Scalar = 0.9,
    epsilon: Scalar = 1e-5,
    axis: int = -1,
    residual: jax.Array | None = None,
    activation: Activation = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> tuple[jax.Array, Running]:
    """Batch normalization.

    ``activation((x - mean) * (var + epsilon)**-0.5 * scale + bias + residual)``. In training, mean
    and (biased) variance are those of the batch, over all axes except ``axis``, in float32 (float64
    for float64), and update the running statistics: ``running = momentum * running +
    (1 - momentum) * batch``. In inference, mean and variance are the running statistics, which do
    not change.

    Args:
        x: (batch, ..., channels), or with the channels at ``axis``; float32, bfloat16 or float16;
            float64 runs in XLA.
        scale: (channels,); None means 1. Use float32 for parameters and statistics: it is free.
        bias: (channels,); None means 0.
        running_mean: (channels,).
        running_var: (channels,).
        training: whether to use the statistics of the batch; a Python bool.
        momentum: the weight of the old running statistics; a scalar or an array.
        epsilon: added to the variance. cuDNN needs a Python scalar; with an array, XLA runs the
            normalization.
        axis: the channel axis.
        residual: has the shape of x.
        activation: as in :func:`conv`.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Under ``jax.jit`` the statistics are those of the global batch, inside ``jax.shard_map`` those
    of each device's shard. The statistics of an empty batch are NaN.

    Returns: (y, (mean, var)): y with the shape and dtype of x, and the new running statistics with
    the shapes and dtypes of the old ones. All results are differentiable. For the backward, the
    forward keeps the mean and inverse standard deviation of the batch, and what the derivative of
    the activation needs: one bit per element for relu without a residual, otherwise the result or
    operand of the activation.

    Raises:
        GraphError, GraphTypeError: the shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, if cuDNN cannot run it: training
            requires a multiple of 8 channels, and cuDNN has no engine for inference, which is
            pointwise.

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167; ``flax.nnx.BatchNorm``; cuDNN documentation,
    ``CUDNN_BATCH_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> zeros, ones = jnp.zeros(16), jnp.ones(16)
        >>> x = jnp.ones((2, 8, 8, 16))
        >>> y, (mean, var) = jc.ops.batch_norm(x, ones, zeros, zeros, ones, training=True)
        >>> y.shape, mean.shape
        ((2, 8, 8, 16), (16,))
    """
    training = _python_bool(training)
    x = floating("x", x)
    order = channels_second(x, axis, 2, "(batch, ..., channels)")
    image = transpose(x, order)
    if residual is not None:
        residual = transpose(epilogue.like_result(floating("residual", residual), x.shape), order)
    running = _running(x.shape[axis], running_mean, running_var)
    y, new = _normalized(
        image, scale, bias, running, residual, training, momentum, epsilon, activation, options,
        implementation,
    )  # fmt: skip
    return transpose(y, np.argsort(order)), new


def conv_batch_norm(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    *,
    training: bool,
    momentum: Scalar = 0.9,
    epsilon: Scalar = 1e-5,
    residual: jax.Array | None = None,
    activation: Activation = None,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    dimension_numbers: Any = None,
    precision: Any = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> tuple[jax.Array, Running]:
    """Convolution followed by batch normalization.

    ``batch_norm(conv(x, w), ...)``, see :func:`batch_norm` and :func:`conv`. In inference, scale
    and statistics become the epilogue of the convolution, in one plan.

    Args:
        x, w, strides, padding, dilation, groups, dimension_numbers, precision: as in :func:`conv`.
        scale, bias, running_mean, running_var, training, momentum, epsilon: as in
            :func:`batch_norm`.
        residual, activation: as in :func:`batch_norm`.
        implementation, options: as in :func:`conv`.

    Returns: (y, (mean, var)), as :func:`batch_norm`; y has the shape and dtype of the convolution.

    Raises: as :func:`conv` and :func:`batch_norm`. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD`` and ``CUDNN_BATCH_NORM``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((2, 8, 8, 16)), jnp.ones((32, 3, 3, 16))
        >>> zeros, ones = jnp.zeros(32), jnp.ones(32)
        >>> y, _ = jc.ops.conv_batch_norm(x, w, ones, zeros, zeros, ones, training=False,
        ...                               dimension_numbers=("NHWC", "OHWI", "NHWC"))
        >>> y.shape
        (2, 8, 8, 32)
    """
    training = _python_bool(training)
    x, w = promoted(x, w)
    if groups is None:
        groups = groups_of_shapes(x, w, dimension_numbers)
    arguments = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "dimension_numbers": dimension_numbers,
    }
    found = {"precision": precision, "options": options, "implementation": implementation}
    image, weight, shape, spec, _ = prepared(x, w, **arguments)
    image, weight = floating("x", image), floating("w", weight)
    running = _running(shape[1], running_mean, running_var)
    if not training:
        kind = wide_dtype(image, weight, *running)
        mean, variance = (v.astype(kind) for v in running)
        inv_std = jax.lax.rsqrt(variance + scalar("epsilon", epsilon))
        factor, offset = _parameters(scale, bias, shape, kind)
        factor = factor * inv_std
        y = conv(
            x, w, scale=factor, bias=offset - mean * factor, residual=residual,
            activation=activation, **arguments, **found,
        )  # fmt: skip
        return y, (jnp.asarray(running_mean), jnp.asarray(running_var))
    if residual is not None:
        wanted = tuple(shape[axis] for axis in np.argsort(spec.out_spec))
        residual = transpose(epilogue.like_result(residual, wanted), spec.out_spec)
    y = conv(x, w, **arguments, **found)
    y, new = _normalized(
        transpose(y, spec.out_spec), scale, bias, running, residual, True, momentum, epsilon,
        activation, options, implementation,
    )  # fmt: skip
    return transpose(y, np.argsort(spec.out_spec)), new


def _normalized(
    image: jax.Array,
    scale: Any,
    bias: Any,
    running: Running,
    residual: jax.Array | None,
    training: bool,
    momentum: Scalar,
    epsilon: Scalar,
    activation: Activation,
    options: Options | None,
    implementation: str | None,
) -> tuple[jax.Array, Running]:
    """The normalized (N, C, ...), and the new running statistics."""
    shape, out = image.shape, str(image.dtype)
    # cuDNN supports one to three spatial dimensions.
    dims = shape if image.ndim in (3, 4, 5) else (*shape[:2], math.prod(shape[2:]))
    each = (1, shape[1], *(1,) * (len(dims) - 2))
    kind = wide_dtype(image, *running)
    given = (image, *per_channel(shape, scale, bias, kind))
    x, gamma, beta = (v.reshape(s) for v, s in zip(given, (dims, each, each), strict=True))
    residual = None if residual is None else residual.reshape(dims)
    activation = epilogue.activation_name(activation)
    number = scalar("epsilon", epsilon)
    if not training:
        mean, variance = (v.astype(kind).reshape(each) for v in running)
        inv_std = jax.lax.rsqrt(variance + number)
        function = chosen(INFERENCE, options, None, implementation)
        y = function(x, gamma, beta, mean, inv_std, residual, activation=activation, out=out)
        return y.reshape(shape), running
    function = chosen(TRAINING, options, None, implementation)
    zeros = jnp.zeros(each, kind)
    # With a residual, XLA's forward and the backward of relu without a mask are faster on an H200.
    masked = activation == "relu" and residual is None
    masked = masked and shape[1] % BITS == 0 and not is_sharded(x, 1)
    y, mean, variance = function(
        x, gamma, beta, zeros, zeros, residual, number, activation=activation, masked=masked,
        out=out,
    )  # fmt: skip
    count = math.prod((shape[0], *shape[2:]))
    biased = variance * ((count - 1) / count if count else math.nan)
    return y.reshape(shape), _moved(running, (mean.ravel(), biased.ravel()), momentum)


def _moved(running: Running, batch: Running, momentum: Scalar) -> Running:
    """The running statistics after a batch, in their dtypes."""
    momentum = scalar("momentum", momentum)

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        exact = momentum * old.astype(wide_dtype(old, new)) + (1 - momentum) * new
        return exact.astype(old.dtype)

    return moved(running[0], batch[0]), moved(running[1], batch[1])


def _python_bool(training: Any) -> bool:
    """GraphTypeError for arrays, whose value is not known while tracing."""
    if isinstance(training, (bool, np.bool_)):
        return bool(training)
    raise GraphTypeError(
        "training must be a Python bool",
        expected="True or False",
        got=shown(training),
        why="training and inference are different programs, selected while tracing",
        fix='jax.jit(..., static_argnames="training"), or jax.lax.cond between the two',
    )


def _running(channels: int, mean: Any, variance: Any) -> Running:
    named = ("running_mean", mean), ("running_var", variance)
    mean, variance = (parameter(name, floating(name, x), (channels,)) for name, x in named)
    return mean, variance


def _parameters(
    scale: Any, bias: Any, shape: tuple[int, ...], kind: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """(channels,) of at least float32."""
    factor, offset = per_channel((1, shape[1]), scale, bias, kind)
    return factor.ravel().astype(wide_dtype(factor)), offset.ravel().astype(wide_dtype(offset))
