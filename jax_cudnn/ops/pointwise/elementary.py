"""Element-wise functions of one operand. They compute in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims
from ..._core.graph.dtypes import FP4
from ..._core.graph.planned import About, Example
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensor, Values
from .elementwise import IMAGES, ROWS, Pointwise, elementwise, usual

_POSITIVE = (
    Example({"input": IMAGES}, "bfloat16", positive=("input",)),
    Example({"input": ROWS}, "float32", positive=("input",)),
)
_ERF = 2 / math.pi**0.5


@register
class Identity(Pointwise):
    """Identity ``OUT_0 = input``; with ``set_data_type`` on the result, a cast.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_IDENTITY``.
    """

    method = "identity"
    dtypes = (*Pointwise.dtypes, FP4)
    algebra = Pointwise.algebra._replace(chooses=True)
    ports = Dims.parse("input: ... -> OUT_0: ...")
    about = About(jax_names=("positive",))
    examples = usual("input")

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: with equal types, the result is not written.
        if graph.anchors and tensors["input"].dtype == tensors["OUT_0"].dtype:
            return Reason("it changes nothing, and then cuDNN does not write its result")
        return super().support(tensors, graph)

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (input,)

    def xla(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (input,)  # converted once, to the result's dtype

    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"input": ()}

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor:
        return t


@elementwise(
    chooses=True,
    jax_names=("abs", "absolute", "fabs"),
    slopes={"input": lambda g, t, input: g.binary_select(t, -t, input >= 0.0)},
)
def abs(input: jax.Array) -> jax.Array:
    """Magnitude ``OUT_0 = |input|``. Source: cuDNN documentation, ``CUDNN_POINTWISE_ABS``."""
    return jnp.abs(input)


@elementwise(chooses=True, jax_names=("negative", "neg"), slopes={"input": lambda g, t: -t})
def neg(input: jax.Array) -> jax.Array:
    """Negation ``OUT_0 = -input``; unsigned integers saturate at 0.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_NEG``.
    """
    return -input


@elementwise(jumps=True, jax_names=("ceil",), slopes={"input": None})
def ceil(input: jax.Array) -> jax.Array:
    """The smallest integer not below ``input``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_CEIL``.
    """
    return jnp.ceil(input)


@elementwise(jumps=True, jax_names=("floor",), slopes={"input": None})
def floor(input: jax.Array) -> jax.Array:
    """The largest integer not above ``input``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_FLOOR``.
    """
    return jnp.floor(input)


@elementwise(
    result="real",
    smooth=False,
    jax_names=("cos",),
    slopes={"input": lambda g, t, input: -(t * g.sin(input))},
)
def cos(input: jax.Array) -> jax.Array:
    """Cosine of radians. Source: cuDNN documentation, ``CUDNN_POINTWISE_COS``."""
    return jnp.cos(input)


@elementwise(
    result="real",
    smooth=False,
    jax_names=("sin",),
    slopes={"input": lambda g, t, input: t * g.cos(input)},
)
def sin(input: jax.Array) -> jax.Array:
    """Sine of radians. Source: cuDNN documentation, ``CUDNN_POINTWISE_SIN``."""
    return jnp.sin(input)


@elementwise(
    result="real",
    smooth=False,
    jax_names=("tan",),
    slopes={"input": lambda g, t, OUT_0: t * (OUT_0 * OUT_0 + 1.0)},
)
def tan(input: jax.Array) -> jax.Array:
    """Tangent of radians. Source: cuDNN documentation, ``CUDNN_POINTWISE_TAN``."""
    return jnp.tan(input)


@elementwise(
    result="real",
    jax_names=("erf",),
    slopes={"input": lambda g, t, input: t * (g.exp(-(input * input)) * _ERF)},
)
def erf(input: jax.Array) -> jax.Array:
    """Error function ``2 / sqrt(pi) * integral from 0 to input of exp(-t**2) dt``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_ERF``.
    """
    return jax.lax.erf(input)


@elementwise(
    result="real",
    smooth=False,
    jax_names=("exp",),
    slopes={"input": lambda g, t, OUT_0: t * OUT_0},
)
def exp(input: jax.Array) -> jax.Array:
    """Exponential ``OUT_0 = e**input``. Source: cuDNN documentation, ``CUDNN_POINTWISE_EXP``."""
    return jnp.exp(input)


@elementwise(
    singular=True,
    result="real",
    jax_names=("log",),
    examples=_POSITIVE,
    slopes={"input": lambda g, t, input: t / input},
)
def log(input: jax.Array) -> jax.Array:
    """Natural logarithm: NaN below 0, -inf at 0.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_LOG``.
    """
    return jnp.log(input)


@elementwise(
    singular=True,
    result="real",
    jax_names=("reciprocal",),
    examples=_POSITIVE,
    slopes={"input": lambda g, t, OUT_0: -(t * (OUT_0 * OUT_0))},
)
def reciprocal(input: jax.Array) -> jax.Array:
    """Reciprocal ``OUT_0 = 1 / input``.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RECIPROCAL``.
    """
    return 1 / input


@elementwise(
    singular=True,
    result="real",
    jax_names=("rsqrt",),
    examples=_POSITIVE,
    slopes={"input": lambda g, t, input, OUT_0: t * (OUT_0 / input * -0.5)},
)
def rsqrt(input: jax.Array) -> jax.Array:
    """Reciprocal square root ``OUT_0 = input**-0.5``: inf at 0, NaN below.

    Source: cuDNN documentation, ``CUDNN_POINTWISE_RSQRT``.
    """
    return jax.lax.rsqrt(input)


@elementwise(
    result="real",
    jax_names=("sqrt",),
    examples=_POSITIVE,
    slopes={"input": lambda g, t, OUT_0: t / (OUT_0 + OUT_0)},
)
def sqrt(input: jax.Array) -> jax.Array:
    """Square root: NaN below 0. Source: cuDNN documentation, ``CUDNN_POINTWISE_SQRT``."""
    return jnp.sqrt(input)
