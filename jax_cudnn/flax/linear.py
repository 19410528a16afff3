"""Linear: a product whose bias and activation cuDNN runs in its epilogue."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx
from jax import lax

from .. import ops
from ..ops.epilogue import Activation
from .layer import Layer, activated


class Linear(Layer, nnx.Linear):
    """``flax.nnx.Linear``, its bias and an activation fused: ``activation(x W + b)``.

    Args: those of ``nnx.Linear``, and
        activation: what ``jax_cudnn.ops.matmul`` takes, or None.

    Shapes: x (..., in_features), the result (..., out_features); kernel (in_features,
    out_features), bias (out_features,), as in Flax.

    A ``dot_general`` of one's own, or an ``out_sharding``, computes by Flax's way, the activation
    behind it.

    Source: ``flax.nnx.Linear``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.Linear(3, 4, activation="relu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
        (2, 4)
    """

    own: ClassVar = {"activation": None}
    activation: Activation

    def unfused(self) -> str | None:
        if self.dot_general is not lax.dot_general:
            return "it has a dot_general of its own"
        return None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.unfused() or out_sharding is not None:
            return activated(super().__call__(inputs, out_sharding), self.activation)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        return ops.matmul(
            x,
            kernel,
            bias=bias,
            activation=self.activation,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
