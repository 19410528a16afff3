"""Element-wise arithmetic of two operands. It computes in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.planned import Example
from ..._core.rules import Derivation, GraphTensor
from .elementwise import IMAGES, ROWS, elementwise, usual

_CHANNELS = (8, 64, 14, 14), (1, 64, 1, 1)


def _binary(*ports: str, positive: tuple[str, ...] = ()) -> tuple[Example, ...]:
    """Examples with equal shapes, and with a bias per channel."""
    return (
        Example(dict.fromkeys(ports, IMAGES), "bfloat16", positive=positive),
        Example(dict.fromkeys(ports, ROWS), "float32", positive=positive),
        Example(dict(zip(ports, _CHANNELS, strict=True)), "float16", positive=positive),
    )


def _slope_of_base(g: Derivation, t: Any, input0: Any, input1: Any) -> GraphTensor:
    """``t * y * x**(y - 1)``, and 0 for the exponent 0."""
    return t * (input1 * g.pow(input0, g.binary_select(1.0, input1 - 1.0, g.cmp_eq(input1, 0.0))))


def _slope_of_exponent(g: Derivation, t: Any, input0: Any, OUT_0: Any) -> GraphTensor:
    """``t * x**y * log(x)``, and 0 for the base 0."""
    return t * (OUT_0 * g.log(g.binary_select(1.0, input0, g.cmp_eq(input0, 0.0))))


@elementwise(
    jax_names=("add",),
    adds=True,
    examples=(*_binary("a", "b"), Example({"a": IMAGES, "b": IMAGES}, "int32")),
    slopes={"a": lambda g, t: t, "b": lambda g, t: t},
)
def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum ``OUT_0 = a + b`` of two tensors of equal rank; dimensions of size 1 broadcast.

    Adds integers in float32, which is exact up to 2**24; the result saturates.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_ADD``.
    """
    return a + b


@elementwise(
    jax_names=("subtract", "sub"),
    examples=usual("a", "b"),
    slopes={"a": lambda g, t: t, "b": lambda g, t: -t},
)
def sub(a: jax.Array, b: jax.Array) -> jax.Array:
    """Difference ``OUT_0 = a - b``; dimensions of size 1 broadcast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_SUB``.
    """
    return a - b


@elementwise(
    multiplies=True,
    jax_names=("multiply", "mul"),
    examples=_binary("a", "b"),
    slopes={"a": lambda g, t, b: t * b, "b": lambda g, t, a: t * a},
)
def mul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product ``OUT_0 = a * b`` of two tensors of equal rank; dimensions of size 1 broadcast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_MUL``.
    """
    return a * b


@elementwise(
    singular=True,
    result="real",
    jax_names=("divide", "true_divide", "div"),
    examples=_binary("a", "b", positive=("b",)),
    slopes={"a": lambda g, t, b: t / b, "b": lambda g, t, b, OUT_0: -(t * (OUT_0 / b))},
)
def div(a: jax.Array, b: jax.Array) -> jax.Array:
    """Quotient ``OUT_0 = a / b``, true division; dimensions of size 1 broadcast.

    Integers give float32. Division by zero gives an infinity, or NaN for 0 / 0.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_DIV``.
    """
    return a / b


@elementwise(
    chooses=True,
    jax_names=("fmin", "minimum"),
    examples=usual("input0", "input1"),
    slopes={
        "input0": lambda g, t, input0, input1: g.binary_select(t, 0.0, input0 < input1),
        "input1": lambda g, t, input0, input1: g.binary_select(0.0, t, input0 < input1),
    },
)
def min(input0: jax.Array, input1: jax.Array) -> jax.Array:
    """The smaller operand; dimensions of size 1 broadcast.

    If one operand is NaN, the result is the other, as in jnp.fmin (jnp.minimum returns NaN):
    without ``CUDNN_ATTR_POINTWISE_NAN_PROPAGATION`` NaN does not propagate.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_MIN``.
    """
    return jnp.fmin(input0, input1)


@elementwise(
    chooses=True,
    jax_names=("fmax", "maximum"),
    examples=(
        *usual("input0", "input1"),
        Example({"input0": IMAGES, "input1": IMAGES}, "int8"),
    ),
    slopes={
        "input0": lambda g, t, input0, input1: g.binary_select(t, 0.0, input0 > input1),
        "input1": lambda g, t, input0, input1: g.binary_select(0.0, t, input0 > input1),
    },
)
def max(input0: jax.Array, input1: jax.Array) -> jax.Array:
    """The larger operand; dimensions of size 1 broadcast.

    If one operand is NaN, the result is the other, as in jnp.fmax (jnp.maximum returns NaN):
    without ``CUDNN_ATTR_POINTWISE_NAN_PROPAGATION`` NaN does not propagate.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_MAX``.
    """
    return jnp.fmax(input0, input1)


@elementwise(
    singular=True,
    jumps=True,
    jax_names=("fmod", "rem"),
    examples=_binary("input0", "input1", positive=("input1",)),
    slopes={
        "input0": lambda g, t: t,
        "input1": lambda g, t, input0, input1, OUT_0: (
            -(t * g.floor((input0 - OUT_0) / input1 + 0.5))
        ),
    },
)
def mod(input0: jax.Array, input1: jax.Array) -> jax.Array:
    """Floating-point remainder ``OUT_0 = input0 - input1 * trunc(input0 / input1)``.

    As C's fmod and jnp.fmod, the result has the sign of ``input0`` (in Python's ``%`` and jnp.mod
    it has the sign of the divisor). Dimensions of size 1 broadcast; a divisor of 0 gives NaN.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_MOD``.
    """
    return jnp.fmod(input0, input1)


@elementwise(
    singular=True,
    jax_names=("power", "pow", "float_power"),
    rounding="the relative error of x**y grows with y * log(x)",
    examples=_binary("input0", "input1", positive=("input0",)),
    slopes={"input0": _slope_of_base, "input1": _slope_of_exponent},
)
def pow(input0: jax.Array, input1: jax.Array) -> jax.Array:
    """Power ``OUT_0 = input0 ** input1``; dimensions of size 1 broadcast.

    As C's powf: NaN for a negative base with a non-integer exponent, 1 for exponent 0.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_POW``.
    """
    return jnp.power(input0, input1)


@elementwise(
    smooth=False,
    examples=usual("a", "b"),
    slopes={"a": lambda g, t: t, "b": lambda g, t, b: t * (b + b)},
)
def add_square(a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds a square: ``OUT_0 = a + b * b``; dimensions of size 1 broadcast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ADD_SQUARE``.
    """
    return a + b * b


@elementwise(
    shaped="input",
    adds=True,
    examples=(
        Example({"input": IMAGES, "bias": (1, 64, 1, 1)}, "bfloat16"),
        Example.of("input: 2 128 96, bias: 1 1 96", "float32"),
    ),
    slopes={"input": lambda g, t: t, "bias": lambda g, t: t},
)
def bias(input: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a bias: ``OUT_0 = input + bias``, with the shape of ``input``.

    Args:
        input: any rank, for example (N, C, H, W) or (B, M, N).
        bias: same rank; each dimension is 1 or equal to that of ``input``, for example (1, C, 1, 1)
            or (1, 1, N).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ADD``.
    """
    return input + bias


@elementwise(
    shaped="input",
    multiplies=True,
    examples=(
        Example({"input": IMAGES, "scale": (1, 64, 1, 1)}, "bfloat16"),
        Example.of("input: 2 128 96, scale: 1 1 96", "float32"),
    ),
    slopes={
        "input": lambda g, t, scale: t * scale,
        "scale": lambda g, t, input: t * input,
    },
)
def scale(input: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies by a scale: ``OUT_0 = input * scale``, with the shape of ``input``.

    Args:
        input: any rank, for example (N, C, H, W) or (B, M, N).
        scale: same rank; each dimension is 1 or equal to that of ``input``, for example
            (1, C, 1, 1) or (1, 1, N).

    Source: cuDNN documentation, ``CUDNN_POINTWISE_MUL``.
    """
    return input * scale
