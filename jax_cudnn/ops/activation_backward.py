"""Gradients of the activations, element by element. They compute in float32.

Each takes ``loss``, the gradient of the loss by the activation's result, and ``input``, what the
activation was applied to, and gives the gradient by ``input``; cuDNN takes the two of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .._core.builder import register
from .._core.node import Example
from .activation import CLIPS, TANH_CUBIC, TANH_SCALE, Clipped, small
from .elementwise import IMAGES, ROWS, Pointwise, elementwise

_BACKWARD = (
    Example({"loss": IMAGES, "input": IMAGES}, "bfloat16"),
    Example({"loss": ROWS, "input": ROWS}, "float32"),
)


@elementwise(result="real", alike=True, examples=_BACKWARD)
def elu_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of elu: ``loss`` where ``input`` is positive, else ``loss * exp(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ELU_BWD``.
    """
    return loss * jnp.exp(jnp.fmin(input, 0))


@elementwise(result="real", alike=True, examples=_BACKWARD)
def gelu_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of gelu: ``loss * (Phi(input) + input * phi(input))``.

    Phi is the normal distribution function and ``phi(x) = exp(-x**2 / 2) / sqrt(2 pi)``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_BWD``.
    """
    density = jnp.exp(-0.5 * input * input) * (2 * np.pi) ** -0.5
    return loss * (0.5 * (1 + jax.lax.erf(input * 0.5**0.5)) + input * density)


@elementwise(result="real", alike=True, examples=_BACKWARD)
def gelu_approx_tanh_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of gelu_approx_tanh: ``loss * 0.5 * (1 + t + input * (1 - t**2) * u')``.

    ``t = tanh(u)``, ``u = sqrt(2 / pi) * (input + 0.044715 * input**3)``, and ``u'`` is its
    derivative. Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_APPROX_TANH_BWD``.
    """
    square = input * input
    t = jnp.tanh(TANH_SCALE * input * (1 + TANH_CUBIC * square))
    slope = TANH_SCALE * (1 + 3 * TANH_CUBIC * square)
    return loss * 0.5 * (1 + t + input * (1 - t * t) * slope)


@elementwise(result="real", alike=True, examples=_BACKWARD)
def sigmoid_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of sigmoid: ``loss * s * (1 - s)`` with ``s = sigmoid(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SIGMOID_BWD``.
    """
    s = jax.nn.sigmoid(input)
    return loss * s * (1 - s)


@elementwise(result="real", alike=True, examples=_BACKWARD)
def softplus_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of softplus: ``loss * sigmoid(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SOFTPLUS_BWD``.
    """
    return loss * jax.nn.sigmoid(input)


@elementwise(result="real", alike=True, examples=_BACKWARD)
def tanh_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of tanh: ``loss * (1 - tanh(input)**2)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_TANH_BWD``.
    """
    t = jnp.tanh(input)
    return loss * (1 - t * t)


@register
@dataclass(frozen=True)
class ReluBackward(Clipped):
    """Gradient of relu with its slope and clips.

    ``OUT_0 = negative_slope * loss`` where ``input <= lower_clip``, 0 where
    ``input >= upper_clip``, else ``loss`` (also where ``input`` is NaN); without arguments 0 where
    ``input <= 0``, else ``loss``.

    Args: as relu's; ``loss`` and ``input`` of one shape.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_BWD``.
    """

    method = "relu_backward"
    alike = True
    dims = "loss: ..., input: ... -> OUT_0: ..."
    examples = (*_BACKWARD, *small(("loss", "input"), *CLIPS))

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        above = loss if self.upper_clip is None else jnp.where(input >= self.upper_clip, 0.0, loss)
        return (jnp.where(input <= self.low, self.slope * loss if self.slope else 0.0, above),)


@register
@dataclass(frozen=True)
class LeakyReluBackward(Pointwise):
    """Gradient of leaky_relu: ``negative_slope * loss`` where ``input <= 0``, else ``loss``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_BWD`` with a slope.
    """

    method = "leaky_relu_backward"
    alike = True
    dims = "loss: ..., input: ... -> OUT_0: ..."
    result = "real"
    examples = (
        Example({"loss": IMAGES, "input": IMAGES}, "bfloat16", {"negative_slope": 0.01}),
        Example({"loss": ROWS, "input": ROWS}, "float32", {"negative_slope": 0.3}),
    )

    negative_slope: float

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.where(input <= 0, self.negative_slope * loss, loss),)


@register
@dataclass(frozen=True)
class SwishBackward(Pointwise):
    """Gradient of swish: ``loss * s * (1 + b * input * (1 - s))`` with ``s = sigmoid(b * input)``.

    Args:
        loss, input: broadcast.
        swish_beta: the ``b`` of the formula, 1 when omitted.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SWISH_BWD``.
    """

    method = "swish_backward"
    alike = True
    dims = "loss: ..., input: ... -> OUT_0: ..."
    result = "real"
    examples = (*_BACKWARD, *small(("loss", "input"), {"swish_beta": 1.5}))

    swish_beta: float | None = None

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        scaled = (1.0 if self.swish_beta is None else self.swish_beta) * input
        s = jax.nn.sigmoid(scaled)
        return (loss * s * (1 + scaled * (1 - s)),)
