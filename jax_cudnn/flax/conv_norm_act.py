"""A convolution, the batch normalization of its result, and an activation."""

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
    convolution's result's, a residual that widens it or broadcasts, an activation or another class
    of a layer inside, and whatever is Flax's own way for one of the two: they compute one after the
    other, each as it does by itself.

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
        """The block of two layers of Flax's, or of :class:`Conv` and :class:`BatchNorm`, whose
        Variables it shares. The activation comes in the place of the norm's own, which it is where
        None is given. A derived class's constructor is not called. GraphError for other layers."""
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
        """Of x (*batch, *spatial, in_features), and a residual that broadcasts to the result."""
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
        """One layer after the other, whatever they are."""
        norm, y = self.norm, self.conv(x)
        if type(norm) is BatchNorm and norm.activation is None:
            return normalized(norm, y, averages, None, residual, self.activation)
        y = norm(y) if averages is None else norm(y, use_running_average=averages)
        return finished(y, self.activation, residual=residual)

    def _fused(self, x: jax.Array, residual: jax.Array | None) -> Any:
        """What :func:`windows` gives where both layers are one graph, whose dtype is that of both
        results and of the sum with the residual."""
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
        dtypes |= {jnp.dtype(norm.dtype or jnp.float32)}  # that of the statistics, at least
        if len(dtypes) > 1 or any(v.shape != shape[-1:] for v in of_norm):
            return None
        fits = residual is None or (
            residual.shape == shape
            and fusible(residual)
            and jnp.result_type(found.x, residual) == found.x.dtype
        )
        return prepared if fits else None
