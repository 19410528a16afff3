"""A linear layer with weights of int8, for inference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._core.errors import GraphTypeError, shown
from ..ops.quantized import quantize_weights, quantized_matmul


class QuantizedLinear(nnx.Module):
    """A trained ``nnx.Linear`` with weights of int8: ``activation(x @ (kernel * scale) + bias)``.

    Args:
        linear: an ``nnx.Linear`` or ``jnn.Linear``, whose activation is kept. It does not change.
        group_size: how many consecutive features share a scale; None for one scale for each output.

    Shapes: x (..., in_features), result (..., out_features). Variables: ``kernel`` (in_features,
    out_features) of int8, ``scale`` (out_features,), or (in_features // group_size, out_features);
    the layer's ``bias``. kernel and scale are no ``nnx.Param``, so that optimizers leave them.

    Raises:
        GraphTypeError: ``linear`` is not such a layer.
        GraphError: ``group_size`` does not divide the features.

    Source: :func:`jax_cudnn.ops.quantize_weights`, :func:`jax_cudnn.ops.quantized_matmul`.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.QuantizedLinear(nnx.Linear(64, 4, rngs=nnx.Rngs(0)), group_size=32)
        >>> layer(jnp.ones((2, 64))).shape, str(layer.kernel.dtype)
        ((2, 4), 'int8')
    """

    def __init__(self, linear: nnx.Linear, *, group_size: int | None = None):
        if not isinstance(linear, nnx.Linear):
            raise GraphTypeError(
                "QuantizedLinear takes a trained layer",
                expected="a flax.nnx.Linear",
                got=shown(linear),
                fix="jax_cudnn.ops.quantize_weights for other weights",
            )
        kernel, scale = quantize_weights(linear.kernel[...], group_size)
        if group_size is not None:  # in the dtype of the product, where XLA can multiply by it
            scale = scale.astype(linear.dtype or scale.dtype)
        self.kernel, self.scale = nnx.Variable(kernel), nnx.Variable(scale)
        self.bias = linear.bias
        self.dtype, self.precision = linear.dtype, linear.precision
        self.activation = getattr(linear, "activation", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale, bias = self.scale[...], None if self.bias is None else self.bias[...]
        terms: Any = (scale,) if bias is None else (scale, bias)
        return quantized_matmul(
            x.astype(self.dtype or jnp.result_type(x, *terms)),
            self.kernel[...],
            scale,
            bias=bias,
            activation=self.activation,
            precision=self.precision,
        )
