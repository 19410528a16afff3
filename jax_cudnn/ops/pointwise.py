"""Pointwise operations. All compute in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.dims import Shape
from .._core.errors import GraphError
from .._core.node import Example, Node

if TYPE_CHECKING:
    from .._core.spec import Tensor

_BINARY = (
    Example({"a": (8, 64, 28, 28), "b": (8, 64, 28, 28)}, "bfloat16"),
    Example({"a": (1, 128, 96), "b": (1, 128, 96)}, "float32"),
    Example({"a": (8, 64, 14, 14), "b": (1, 64, 1, 1)}, "float16"),
)
_UNARY = (
    Example({"input": (8, 64, 28, 28)}, "bfloat16"),
    Example({"input": (1, 128, 96)}, "float32"),
    Example({"input": (4, 32, 15, 17)}, "float16"),
)


def _f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


@register
@dataclass(frozen=True)
class Add(Node):
    """Sum ``OUT_0 = a + b`` of two tensors of one rank; dimensions of size 1 broadcast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ADD``.
    """

    method = "add"
    dims = "a: ..., b: ... -> OUT_0: ..."
    jax_names = ("add",)
    examples = _BINARY

    def reference(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return (_f32(a) + _f32(b),)


@register
@dataclass(frozen=True)
class Mul(Node):
    """Product ``OUT_0 = a * b`` of two tensors of one rank; dimensions of size 1 broadcast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_MUL``.
    """

    method = "mul"
    dims = "a: ..., b: ... -> OUT_0: ..."
    jax_names = ("multiply", "mul")
    examples = _BINARY

    def reference(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return (_f32(a) * _f32(b),)


@register
@dataclass(frozen=True)
class Bias(Node):
    """Adds a bias: ``OUT_0 = input + bias``, with the shape of ``input``.

    Args:
        input: any rank, for example (N, C, H, W) or (B, M, N).
        bias: the same rank, each dimension 1 or that of ``input``: (1, C, 1, 1), (1, 1, N).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ADD``.
    """

    method = "bias"
    dims = "input: ..., bias: ... -> OUT_0: ..."
    examples = (
        Example({"input": (8, 64, 28, 28), "bias": (1, 64, 1, 1)}, "bfloat16"),
        Example({"input": (2, 128, 96), "bias": (1, 1, 96)}, "float32"),
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        outputs = super().infer(inputs)
        shape = inputs["input"].shape
        if outputs["OUT_0"][0] != shape:
            raise GraphError(
                "bias is larger than input",
                expected=f"each dimension of bias to be 1 or that of input {list(shape)}",
                got=f"bias of shape {list(inputs['bias'].shape)}",
                fix="swap the arguments, or use add, which broadcasts both ways",
            )
        return outputs

    def reference(self, input: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
        return (_f32(input) + _f32(bias),)


@register
@dataclass(frozen=True)
class Relu(Node):
    """Rectified linear unit with optional slope and clips.

    ``OUT_0 = lower_clip + negative_slope * (input - lower_clip)`` where ``input <= lower_clip``,
    else ``min(input, upper_clip)``; without arguments ``max(input, 0)``.

    Args:
        input: any shape.
        negative_slope: slope below ``lower_clip`` (0 when omitted).
        lower_clip: 0 when omitted. upper_clip: none when omitted.

    NaN stays NaN, as in jnp, but not everywhere: cuDNN's precompiled convolution engines with a
    fused relu give 0 (measured with cuDNN 9.19 on an H200; alone and after a matmul it is NaN).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RELU_FWD``.
    """

    method = "relu"
    dims = "input: ... -> OUT_0: ..."
    jax_names = ("relu", "relu6", "leaky_relu", "maximum")
    examples = (
        *_UNARY,
        Example({"input": (2, 8, 6, 6)}, "float32", {"lower_clip": 0.0, "upper_clip": 6.0}),
        Example({"input": (2, 8, 6, 6)}, "float32", {"negative_slope": 0.125}),
        Example({"input": (2, 8, 6, 6)}, "float32", {"negative_slope": 0.25, "lower_clip": 0.5}),
        Example({"input": (64, 1)}, "float32"),
    )

    negative_slope: float | None = None
    lower_clip: float | None = None
    upper_clip: float | None = None

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        x = _f32(input)
        low = 0.0 if self.lower_clip is None else self.lower_clip
        slope = 0.0 if self.negative_slope is None else self.negative_slope
        high = x if self.upper_clip is None else jnp.minimum(x, self.upper_clip)
        return (jnp.where(x <= low, low + slope * (x - low) if slope else low, high),)


@register
@dataclass(frozen=True)
class GeluApproxTanh(Node):
    """GELU by its tanh approximation, ``jax.nn.gelu(input, approximate=True)``.

    ``OUT_0 = 0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_GELU_APPROX_TANH_FWD``.
    """

    method = "gelu_approx_tanh"
    dims = "input: ... -> OUT_0: ..."
    jax_names = ("gelu",)
    examples = _UNARY

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.nn.gelu(_f32(input), approximate=True),)


@register
@dataclass(frozen=True)
class Sigmoid(Node):
    """Logistic function ``OUT_0 = 1 / (1 + exp(-input))``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SIGMOID_FWD``.
    """

    method = "sigmoid"
    dims = "input: ... -> OUT_0: ..."
    jax_names = ("sigmoid", "logistic", "expit")
    examples = _UNARY

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.nn.sigmoid(_f32(input)),)


@register
@dataclass(frozen=True)
class Swish(Node):
    """Swish (SiLU) ``OUT_0 = input * sigmoid(swish_beta * input)``.

    Args:
        input: any shape.
        swish_beta: 1 when omitted.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SWISH_FWD``.
    """

    method = "swish"
    dims = "input: ... -> OUT_0: ..."
    jax_names = ("silu", "swish")
    examples = (*_UNARY, Example({"input": (2, 8, 6, 6)}, "float32", {"swish_beta": 1.5}))

    swish_beta: float | None = None

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        x = _f32(input)
        beta = 1.0 if self.swish_beta is None else self.swish_beta
        return (x * jax.nn.sigmoid(beta * x),)
