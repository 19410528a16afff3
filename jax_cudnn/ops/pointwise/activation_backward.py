"""Gradients of the activations. They compute in float32.

Each takes ``loss``, the gradient with respect to the activation's result, and ``input``, the
activation's operand, and returns the gradient with respect to ``input``. cuDNN requires equal
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims
from ..._core.graph.node import frozen
from ..._core.graph.planned import Example
from ..._core.rules import Derivation, GraphTensor, Values
from .activation import CLIPS, TANH_CUBIC, TANH_SCALE, Clipped, small
from .elementwise import IMAGES, ROWS, Pointwise, Slope, elementwise

_BACKWARD = (
    Example({"loss": IMAGES, "input": IMAGES}, "bfloat16"),
    Example({"loss": ROWS, "input": ROWS}, "float32"),
)


def _gradient(**slopes: Slope) -> Callable[[Callable[..., jax.Array]], type[Pointwise]]:
    """Decorator: :func:`elementwise` for a gradient without attributes. It is linear in ``loss``,
    so the slope of that is the gradient itself."""

    def make(function: Callable[..., jax.Array]) -> type[Pointwise]:
        def itself(g: Any, t: Any, input: Any) -> Any:
            return getattr(g, function.__name__)(t, input)

        every = {"loss": itself, **slopes}
        return elementwise(result="real", alike=True, examples=_BACKWARD, slopes=every)(function)

    return make


class _Gradient(Pointwise):
    """A gradient with attributes; in the input it is piecewise constant."""

    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"loss": ("input",)}
    alike = True
    ports = Dims.parse("loss: ..., input: ... -> OUT_0: ...")

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor | None:
        if port == "input":
            return None
        return getattr(g, self.method)(t, values["input"], **self.keywords())


@_gradient(
    input=lambda g, t, loss, input: g.binary_select(
        0.0, t * (loss * g.exp(g.min(input, 0.0))), input >= 0.0
    ),
)
def elu_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of elu: ``loss`` where ``input`` is positive, otherwise ``loss * exp(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ELU_BWD``.
    """
    return loss * jnp.exp(jnp.fmin(input, 0))


@_gradient()
def gelu_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of gelu: ``loss * (Phi(input) + input * phi(input))``.

    Phi is the normal distribution function, and ``phi(x) = exp(-x**2 / 2) / sqrt(2 pi)``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_BWD``.
    """
    density = jnp.exp(-0.5 * input * input) * (2 * np.pi) ** -0.5
    return loss * (0.5 * (1 + jax.lax.erf(input * 0.5**0.5)) + input * density)


@_gradient()
def gelu_approx_tanh_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of gelu_approx_tanh: ``loss * 0.5 * (1 + t + input * (1 - t**2) * u')``.

    ``t = tanh(u)``, ``u = sqrt(2 / pi) * (input + 0.044715 * input**3)``, and ``u'`` is its
    derivative. Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_APPROX_TANH_BWD``.
    """
    square = input * input
    t = jnp.tanh(TANH_SCALE * input * (1 + TANH_CUBIC * square))
    slope = TANH_SCALE * (1 + 3 * TANH_CUBIC * square)
    return loss * 0.5 * (1 + t + input * (1 - t * t) * slope)


@_gradient(
    input=lambda g, t, loss, input: g.sigmoid_backward(
        t * (loss * (g.sigmoid(input) * -2.0 + 1.0)), input
    ),
)
def sigmoid_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of sigmoid: ``loss * s * (1 - s)`` with ``s = sigmoid(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SIGMOID_BWD``.
    """
    s = jax.nn.sigmoid(input)
    return loss * s * (1 - s)


@_gradient(
    input=lambda g, t, loss, input: g.sigmoid_backward(t * loss, input),
)
def softplus_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of softplus: ``loss * sigmoid(input)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SOFTPLUS_BWD``.
    """
    return loss * jax.nn.sigmoid(input)


@_gradient(
    input=lambda g, t, loss, input: g.tanh_backward(t * (loss * (g.tanh(input) * -2.0)), input),
)
def tanh_backward(loss: jax.Array, input: jax.Array) -> jax.Array:
    """Gradient of tanh: ``loss * (1 - tanh(input)**2)``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_TANH_BWD``.
    """
    t = jnp.tanh(input)
    return loss * (1 - t * t)


@register
class ReluBackward(_Gradient, Clipped):
    """Gradient of relu with its slope and clips.

    ``OUT_0 = negative_slope * loss`` where ``input <= lower_clip``, 0 where
    ``input >= upper_clip``, otherwise ``loss`` (also where ``input`` is NaN); without attributes 0
    where ``input <= 0``, otherwise ``loss``.

    Args:
        loss, input: of one shape.
        negative_slope, lower_clip, upper_clip: as in relu.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_BWD``.
    """

    method = "relu_backward"
    examples = (*_BACKWARD, *small(("loss", "input"), *CLIPS))

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        above = loss if self.upper_clip is None else jnp.where(input >= self.upper_clip, 0.0, loss)
        return (
            jnp.where(input <= self.low, self.steepness * loss if self.steepness else 0.0, above),
        )


@register
@frozen
class LeakyReluBackward(_Gradient):
    """Gradient of leaky_relu: ``negative_slope * loss`` where ``input <= 0``, otherwise ``loss``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_BWD`` with a slope.
    """

    method = "leaky_relu_backward"
    result = "real"
    examples = (
        Example({"loss": IMAGES, "input": IMAGES}, "bfloat16", {"negative_slope": 0.01}),
        Example({"loss": ROWS, "input": ROWS}, "float32", {"negative_slope": 0.3}),
    )

    negative_slope: float

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.where(input <= 0, self.negative_slope * loss, loss),)


@register
@frozen
class SwishBackward(_Gradient):
    """Gradient of swish: ``loss * s * (1 + b * input * (1 - s))`` with ``s = sigmoid(b * input)``.

    Args:
        loss, input: broadcast.
        swish_beta: ``b`` in the formula; default 1.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SWISH_BWD``.
    """

    method = "swish_backward"
    result = "real"
    examples = (*_BACKWARD, *small(("loss", "input"), {"swish_beta": 1.5}))

    swish_beta: float | None = None

    def reference(self, loss: jax.Array, input: jax.Array) -> tuple[jax.Array, ...]:
        scaled = (1.0 if self.swish_beta is None else self.swish_beta) * input
        s = jax.nn.sigmoid(scaled)
        return (loss * s * (1 + scaled * (1 - s)),)

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor | None:
        return NotImplemented if port == "input" else super().slope(g, port, t, values)
