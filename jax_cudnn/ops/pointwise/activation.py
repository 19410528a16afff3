"""Element-wise activations. They compute in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims
from ..._core.graph.node import Algebra, frozen
from ..._core.graph.planned import About, Engines, Example
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensor, Values
from .elementwise import IMAGES, ROWS, Pointwise, elementwise, usual

_SMALL = (2, 8, 6, 6)
TANH_SCALE, TANH_CUBIC = (2 / math.pi) ** 0.5, 0.044715
_UNARY = (*usual("input"), Example.of("input: 4 32 15 17", "float16"))


def with_attributes(graph: GraphSpec) -> Engines:
    """Without the engine (cuBLASLt) that treats every relu as max(input, 0), measured with cuDNN
    9.19."""
    return Engines(wrong=(0,) if graph.anchors else ())


def small(ports: tuple[str, ...], *attributes: dict[str, float]) -> tuple[Example, ...]:
    """One small example per set of attributes."""
    return tuple(Example(dict.fromkeys(ports, _SMALL), "float32", values) for values in attributes)


@elementwise(
    result="real",
    jax_names=("elu",),
    rounding="near 0, exp(x) - 1 loses the digits that expm1 keeps",
    slopes={"input": lambda g, t, input: g.elu_backward(t, input)},
)
def elu(input: jax.Array) -> jax.Array:
    """Exponential linear unit: ``input`` where positive, otherwise ``exp(input) - 1`` (alpha = 1).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ELU_FWD``, ``CUDNN_ATTR_POINTWISE_ELU_ALPHA``.
    """
    return jax.nn.elu(input)


@elementwise(
    result="real",
    jax_names=("gelu",),
    examples=_UNARY,
    slopes={"input": lambda g, t, input: g.gelu_approx_tanh_backward(t, input)},
)
def gelu_approx_tanh(input: jax.Array) -> jax.Array:
    """GELU in its tanh approximation, ``jax.nn.gelu(input, approximate=True)``.

    ``OUT_0 = 0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_APPROX_TANH_FWD``.
    """
    # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), which keeps the digits of small results, and XLA
    # computes it faster.
    u = TANH_SCALE * input * (1 + TANH_CUBIC * input * input)
    return input * jax.nn.sigmoid(2 * u)


@elementwise(
    result="real",
    jax_names=("gelu",),
    examples=_UNARY,
    slopes={"input": lambda g, t, input: g.gelu_backward(t, input)},
)
def gelu(input: jax.Array) -> jax.Array:
    """GELU ``OUT_0 = input * Phi(input)`` with the normal distribution function Phi.

    This is ``jax.nn.gelu(input, approximate=False)``: ``0.5 * input * (1 + erf(input / sqrt(2)))``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_FWD``.
    """
    return jax.nn.gelu(input, approximate=False)


@elementwise(
    result="real",
    jax_names=("sigmoid", "logistic", "expit"),
    examples=_UNARY,
    slopes={"input": lambda g, t, input: g.sigmoid_backward(t, input)},
)
def sigmoid(input: jax.Array) -> jax.Array:
    """Logistic function ``OUT_0 = 1 / (1 + exp(-input))``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SIGMOID_FWD``.
    """
    return jax.nn.sigmoid(input)


@elementwise(
    result="real",
    jax_names=("softplus",),
    slopes={"input": lambda g, t, input: g.softplus_backward(t, input)},
)
def softplus(input: jax.Array) -> jax.Array:
    """Softplus ``OUT_0 = log(1 + exp(input))`` (beta is 1), without overflow.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SOFTPLUS_FWD``,
    ``CUDNN_ATTR_POINTWISE_SOFTPLUS_BETA``.
    """
    return jax.nn.softplus(input)


@elementwise(
    result="real",
    jax_names=("tanh",),
    slopes={"input": lambda g, t, input: g.tanh_backward(t, input)},
)
def tanh(input: jax.Array) -> jax.Array:
    """Hyperbolic tangent. Source: cuDNN documentation, ``CUDNN_POINTWISE_TANH_FWD``."""
    return jnp.tanh(input)


@frozen
class Clipped(Pointwise):
    """The attributes of relu and of its gradient."""

    negative_slope: float | None = None
    lower_clip: float | None = None
    upper_clip: float | None = None

    @property
    def steepness(self) -> float:
        return self.negative_slope or 0.0

    @property
    def low(self) -> float:
        return self.lower_clip or 0.0

    @property
    def is_plain(self) -> bool:
        return not self.steepness and not self.low and self.upper_clip is None

    @property
    def algebra(self) -> Algebra:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Pointwise.algebra._replace(chooses=self.is_plain)


CLIPS = (
    {"lower_clip": 0.0, "upper_clip": 1.5},
    {"negative_slope": 0.125},
    {"negative_slope": 0.25, "lower_clip": 0.5},
)


@register
class Relu(Clipped):
    """Rectified linear unit with optional slope and clips.

    ``OUT_0 = lower_clip + negative_slope * (input - lower_clip)`` where ``input <= lower_clip``,
    otherwise ``min(input, upper_clip)``; without attributes ``max(input, 0)``.

    Args:
        input: any shape.
        negative_slope: slope below ``lower_clip``; default 0.
        lower_clip: default 0. upper_clip: default none.

    NaN stays NaN, as in jnp, with one exception: cuDNN's precompiled convolution engines with a
    fused relu return 0 (measured with cuDNN 9.19 on an H200; relu alone or after a matmul
    returns NaN).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_FWD``.
    """

    method = "relu"
    ports = Dims.parse("input: ... -> OUT_0: ...")
    about = About(jax_names=("relu", "relu6"))
    examples = (*_UNARY, *small(("input",), *CLIPS), Example.of("input: 64 1", "float32"))

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: with both, 0.7 of relative error.
        if graph.anchors and self.steepness and self.upper_clip is not None:
            return Reason(
                "it follows a convolution or matmul and has both a slope and an upper clip"
            )
        return super().support(tensors, graph)

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        return Engines() if self.is_plain else with_attributes(graph)

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        low, slope = self.low, self.steepness
        above, high = input, self.upper_clip
        if high is not None:
            above = jnp.where(input >= high, high, input)
        return (jnp.where(input <= low, low + slope * (input - low) if slope else low, above),)

    def xla(self, input: jax.Array) -> tuple[jax.Array, ...] | None:
        # The only relu that XLA adds to a product. The maximum is exact in any dtype.
        return (jnp.maximum(input, 0),) if self.is_plain else None

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor:
        # The result determines the branch, unless a negative slope flips signs or rounding moves
        # the result across a clip.
        clips = [clip for clip in (self.low, self.upper_clip) if clip is not None]
        exact = all(float(np.asarray(c, d)) == c for c in clips for d in ("float16", jnp.bfloat16))
        source = "OUT_0" if self.steepness >= 0 and exact else "input"
        return g.relu_backward(
            t, values[source], self.negative_slope, self.lower_clip, self.upper_clip
        )


@register
@frozen
class LeakyRelu(Pointwise):
    """Leaky relu: ``input`` where positive, otherwise ``negative_slope * input``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_FWD`` with a slope.
    """

    method = "leaky_relu"
    ports = Dims.parse("input: ... -> OUT_0: ...")
    result = "real"
    about = About(jax_names=("leaky_relu",))
    examples = (
        Example({"input": IMAGES}, "bfloat16", {"negative_slope": 0.01}),
        Example({"input": ROWS}, "float32", {"negative_slope": 0.3}),
    )

    negative_slope: float

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        return with_attributes(graph)

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.where(input <= 0, self.negative_slope * input, input),)

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor:
        source = values["OUT_0" if self.negative_slope >= 0 else "input"]
        return g.leaky_relu_backward(t, source, self.negative_slope)


@register
@frozen
class Swish(Pointwise):
    """Swish (SiLU) ``OUT_0 = input * sigmoid(swish_beta * input)``.

    Args:
        input: any shape.
        swish_beta: default 1.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SWISH_FWD``.
    """

    method = "swish"
    ports = Dims.parse("input: ... -> OUT_0: ...")
    result = "real"
    about = About(jax_names=("silu", "swish"))
    examples = (*_UNARY, *small(("input",), {"swish_beta": 1.5}))

    swish_beta: float | None = None

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        beta = 1.0 if self.swish_beta is None else self.swish_beta
        return (input * jax.nn.sigmoid(beta * input),)

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor:
        return g.swish_backward(t, values["input"], self.swish_beta)
