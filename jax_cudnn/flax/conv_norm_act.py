"""A convolution, the batch normalization of its result, and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..ops.epilogue import Activation
from .convolution import Conv, batch, operands, plain, windows
from .layer import fusible
from .normalization import BatchNorm, move, parameters
from .operands import Operands


class ConvNormAct(nnx.Module):
    """``activation(norm(conv(x)) + residual)`` of an ``nnx.Conv`` and an ``nnx.BatchNorm``.

    With running averages all of it is one cuDNN plan, in which the normalization is the
    convolution's epilogue. In training there are two: the convolution, and the normalization with
    its activation.

    Args:
        in_features, out_features, kernel_size, strides: as for ``nnx.Conv``.
        activation: what ``jax_cudnn.ops.conv_batch_norm`` takes, or None.
        use_running_average, momentum, epsilon: as for ``nnx.BatchNorm``.
        dtype, param_dtype, rngs: as for both.
        use_bias, and others: those of ``nnx.Conv``; ``use_bias`` is False.

    Parameters and statistics are those of the two inside, ``conv`` and ``norm``: their names,
    shapes and initialisers are Flax's.

    A bias of the convolution, input dilation, negative padding, a ``dtype`` that is not the
    convolution's result's, and whatever is Flax's own way for one of the two: they compute one
    after the other, each as it does by itself.

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
            activation=activation,
            **shared,
        )

    @classmethod
    def of(cls, conv: nnx.Conv, norm: nnx.BatchNorm, activation: Activation = None) -> Self:
        """The block of two layers of Flax's, whose Variables it shares."""
        made = cls(1, 1, 1, rngs=nnx.Rngs(0))
        made.conv, made.norm = Conv.of(conv), BatchNorm.of(norm)
        made.norm.activation = activation
        return made

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Of x (*batch, *spatial, in_features), and a residual of the result's shape."""
        norm = self.norm
        averages = norm.use_running_average if use_running_average is None else use_running_average
        found = None if averages is None else self._fused(x)
        if found is None:
            return norm(self.conv(x), averages, residual=residual)
        image, window = windows(self.conv, found.x)
        lead = batch(self.conv, x)
        if residual is not None:
            residual = residual.reshape(-1, *residual.shape[len(lead) :])
        y, running = ops.conv_batch_norm(
            image,
            found.kernel,
            *parameters(norm),
            norm.mean[...],
            norm.var[...],
            training=not averages,
            momentum=norm.momentum,
            epsilon=norm.epsilon,
            residual=residual,
            activation=norm.activation,
            precision=self.conv.precision,
            **window,
        )
        if not averages:
            move(norm, running)
        return y.reshape(*lead, *y.shape[1:])

    def _fused(self, x: jax.Array) -> Operands | None:
        """Operands where both layers are one graph, whose dtype is that of both results."""
        conv, norm = self.conv, self.norm
        alone = conv.bias is None and conv.activation is None and norm.axis == -1
        if not alone or conv.unfused or norm.unfused or not plain(conv):
            return None
        found = operands(conv, x)
        if found is None or not fusible(norm.mean[...], norm.var[...], *parameters(norm)):
            return None
        out = norm.dtype or jnp.float32  # that of the statistics, at least
        return found if found.x.dtype == jnp.dtype(found.out) == jnp.dtype(out) else None
