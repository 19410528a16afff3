"""A convolution, batch normalization and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..ops import epilogue
from ..ops.epilogue import Activation
from .convolution import Conv, plain, windows
from .layer import finished, fusible, shallow
from .normalization import BatchNorm, move, normalized, parameters


class ConvNormAct(nnx.Module):
    """``activation(norm(conv(x)) + residual)`` for an ``nnx.Conv`` and an ``nnx.BatchNorm``.

    With running averages it is one cuDNN plan, in which the normalization is the epilogue of the
    convolution. In training there are two plans: the convolution, and the normalization with the
    activation.

    Args:
        in_features: as for ``nnx.Conv``.
        out_features: as for ``nnx.Conv``.
        kernel_size: as for ``nnx.Conv``.
        strides: as for ``nnx.Conv``.
        activation: as for ``jax_cudnn.ops.conv_batch_norm``, or None.
        use_running_average: as for ``nnx.BatchNorm``.
        momentum: as for ``nnx.BatchNorm``.
        epsilon: as for ``nnx.BatchNorm``.
        use_bias: whether the convolution has a bias.
        dtype: as for both layers.
        param_dtype: as for both layers.
        rngs: as for both layers.
        **conv: other arguments of ``nnx.Conv``.

    The parameters and statistics are those of the inner layers ``conv`` and ``norm``, with Flax's
    names, shapes and initialisers.

    The two layers run sequentially, each as it does alone, if either falls back to Flax; if an
    inner layer has an activation or another class; or for a bias of the convolution, input
    dilation, negative padding, a ``dtype`` other than that of the convolution's result, or a
    residual that broadcasts or widens the result.

    Source: ``jax_cudnn.ops.conv_batch_norm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> block = jnn.ConvNormAct(3, 16, (3, 3), 2, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 8, 8, 3))).shape
        (2, 4, 4, 16)
        >>> block.eval()
        >>> sorted(nnx.to_pure_dict(nnx.state(block))["norm"])
        ['bias', 'mean', 'scale', 'var']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        activation: Activation = "relu",
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **conv: Any,
    ):
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.conv = Conv(
            in_features, out_features, kernel_size, strides, use_bias=use_bias, **shared, **conv
        )
        self.norm = BatchNorm(
            out_features,
            use_running_average=use_running_average,
            momentum=momentum,
            epsilon=epsilon,
            **shared,
        )
        self.activation = epilogue.activation_name(activation)

    @classmethod
    def of(cls, conv: nnx.Conv, norm: nnx.BatchNorm, activation: Activation = None) -> Self:
        """Makes a block that shares the Variables of two layers, of Flax or of this package. The
        activation replaces the norm's own; None keeps that. The constructor of a derived class is
        not called.

        Raises:
            GraphError: a layer has another class.
        """
        made = shallow(nnx.Module(), cls)
        made.conv, made.norm = Conv.of(conv), BatchNorm.of(norm)
        given = made.norm.activation if activation is None else activation
        made.norm.activation, made.activation = None, epilogue.activation_name(given)
        return made

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Applies the block to x (*batch, *spatial, in_features); the residual broadcasts to the
        result."""
        norm, averages = self.norm, use_running_average
        residual = None if residual is None else jnp.asarray(residual)
        if averages is None:
            averages = getattr(norm, "use_running_average", None)
        prepared = None if averages is None else self._fused(x, residual)
        if prepared is None:
            return self._of_layers(x, use_running_average, residual)
        found, window, shape = prepared
        if residual is not None:
            residual = residual.reshape(-1, *shape[x.ndim - found.x.ndim + 1 :])
        y, running = ops.conv_batch_norm(
            found.x,
            found.kernel,
            *parameters(norm),
            norm.mean[...],
            norm.var[...],
            training=not averages,
            momentum=norm.momentum,
            epsilon=norm.epsilon,
            residual=residual,
            activation=self.activation,
            precision=self.conv.precision,
            **window,
        )
        if not averages:
            move(norm, running)
        return y.reshape(shape)

    def _of_layers(self, x: jax.Array, averages: bool | None, residual: Any) -> jax.Array:
        """Runs the layers sequentially, whatever their classes."""
        norm, y = self.norm, self.conv(x)
        if type(norm) is BatchNorm and norm.activation is None:
            return normalized(norm, y, averages, None, residual, self.activation)
        y = norm(y) if averages is None else norm(y, use_running_average=averages)
        return finished(y, self.activation, residual=residual)

    def _fused(self, x: jax.Array, residual: jax.Array | None) -> Any:
        """The result of :func:`windows` if both layers fit into one graph, whose dtype is that of
        both results and of the sum with the residual; else None."""
        conv, norm = self.conv, self.norm
        if type(conv) is not Conv or type(norm) is not BatchNorm:
            return None
        alone = conv.bias is None and conv.activation is None and norm.activation is None
        if not alone or norm.axis != -1 or norm.unfused or not plain(conv):
            return None
        of_norm = [v for v in (norm.mean[...], norm.var[...], *parameters(norm)) if v is not None]
        prepared = windows(conv, x)
        if prepared is None or not fusible(*of_norm):
            return None
        found, _, shape = prepared
        dtypes = {found.x.dtype, jnp.dtype(found.out)}
        dtypes |= {jnp.dtype(norm.dtype or jnp.float32)}  # at least that of the statistics
        if len(dtypes) > 1 or any(v.shape != shape[-1:] for v in of_norm):
            return None
        fits = residual is None or (
            residual.shape == shape
            and fusible(residual)
            and jnp.result_type(found.x, residual) == found.x.dtype
        )
        return prepared if fits else None
