"""Products with weights of int8, and the scales that make them floats again."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.options import normal_precision
from .._core.graph.reference import kept
from .._core.primitive import dims_of, product_spec, without_explicit_axes
from .arguments import array, floating, integer
from .epilogue import Activation, Terms, apply_outside

_LARGEST = 127
_MANY_ROWS = 1024
"""From so many rows, an H200 is faster with a kernel that is dequantized before."""


def quantize_weights(
    kernel: jax.Array, group_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Weights as int8 and the scales of :func:`quantized_matmul`: ``kernel ~ quantized * scale``.

    A scale is the largest absolute value of its weights divided by 127, or 1 where they are all 0.
    The error of a weight is at most half a scale if the kernel is float32. NaN or infinity makes
    all that shares its scale NaN.

    Args:
        kernel: (features, out) floats.
        group_size: how many consecutive features share a scale, a divisor of ``features``; None
            for one scale for each column.

    Returns:
        (features, out) of int8, and scales of the kernel's dtype (float32 for float16): (out,), or
        (features // group_size, out).

    Raises:
        GraphTypeError: the kernel is not an array of floats.
        GraphError: the kernel is not a matrix, or ``group_size`` does not divide its features.

    Source: Jacob et al. 2018, arXiv:1712.05877, with a zero point of 0.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> quantized, scale = jc.ops.quantize_weights(jnp.array([[127.0, 0.5], [-63.5, 0.25]]))
        >>> quantized.tolist(), scale.tolist()
        ([[127, 127], [-64, 64]], [1.0, 0.003937007859349251])
    """
    kernel = floating("kernel", kernel)
    if kernel.ndim != 2:
        raise GraphError(
            "kernel is not a matrix", expected="(features, out)", got=f"{kernel.shape}"
        )
    features, out = kernel.shape
    size = features if group_size is None else integer("group_size", group_size, 1)
    if features % max(size, 1):
        raise GraphError(
            "group_size does not divide the features",
            expected=f"a divisor of {features}",
            got=f"group_size={size}",
        )
    groups = kernel.reshape(features // size if size else 1, size, out)
    groups = groups.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    most = jnp.max(jnp.abs(groups), axis=1, initial=0)
    dtype = jnp.float32 if kernel.dtype == jnp.float16 else kernel.dtype  # which may underflow
    scale = kept(jnp.where(most == 0, 1, most / _LARGEST), str(dtype)).astype(dtype)
    quantized = jnp.round(groups / scale[:, None].astype(groups.dtype))
    quantized = jnp.clip(quantized, -_LARGEST, _LARGEST).astype(jnp.int8).reshape(kernel.shape)
    return quantized, scale[0] if group_size is None else scale


def quantized_matmul(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation = None,
    precision: Any = None,
) -> jax.Array:
    """``activation(x @ (kernel * scale) + bias)`` with a kernel of int8.

    For fewer than 1024 rows, scales by column multiply the product, in float32: on a GPU, XLA then
    reads the kernel as int8. For fewer rows than a group has features, scales by group multiply the
    product of each group, (rows, groups, out) in x's dtype (float16: in float32); they are added up
    in float32. Otherwise the kernel is multiplied first, rounded to x's dtype, and during the
    product may be in memory like this, so for symbolic sizes, too. Under ``vmap``, rows are those
    of an example. XLA runs all of it, with what of x's rows and of ``out`` is sharded.

    Args:
        x: (..., features) floats.
        kernel: (features, out) of int8.
        scale: floats: (out,), or (groups, out) where ``groups`` divides ``features``.
        bias: (out,) or a scalar.
        activation, precision: as in :func:`jax_cudnn.ops.matmul`.

    Returns:
        (..., out) of x's dtype. x, scale and bias have gradients.

    Raises:
        GraphTypeError: x or scale are not floats, or the kernel is not int8.
        GraphError: the shapes do not fit.

    Source: :func:`quantize_weights` makes the operands.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> kernel, scale = jc.ops.quantize_weights(jnp.ones((64, 8)), group_size=32)
        >>> jc.ops.quantized_matmul(jnp.ones((2, 64)), kernel, scale).shape
        (2, 8)
    """
    x, kernel, scale = floating("x", x), array("kernel", kernel), floating("scale", scale)
    if kernel.dtype != jnp.int8:
        raise GraphTypeError(
            "the kernel is not int8",
            expected="int8 (features, out)",
            got=f"{kernel.dtype}{list(kernel.shape)}",
            fix="kernel, scale = jax_cudnn.ops.quantize_weights(kernel)",
        )
    groups = scale.shape[0] if scale.ndim == 2 else 1
    fits = kernel.ndim == 2 and scale.ndim in (1, 2) and scale.shape[-1] == kernel.shape[1]
    if not fits or kernel.shape[0] % max(groups, 1) or not groups:
        raise GraphError(
            "the scales do not fit the kernel",
            expected="a kernel (features, out), and scales (out,) or (groups, out), where groups "
            "divides features",
            got=f"kernel {kernel.shape}, scale {scale.shape}",
        )
    out = kernel.shape[1]
    if not x.ndim or x.shape[-1] != kernel.shape[0]:
        raise GraphError(
            "x does not fit the kernel",
            expected=f"(..., {kernel.shape[0]}) for a kernel of {kernel.shape}",
            got=f"{x.shape}",
            fix="transpose the kernel before quantize_weights" if x.shape[-1:] == (out,) else None,
        )
    *batch, features = x.shape
    size, rows, wide = features // groups, math.prod(batch), jnp.promote_types(x.dtype, jnp.float32)
    terms = Terms.of(
        None, bias, None, activation, shape=(*batch, out), features=out, rank=x.ndim, axis=-1
    )
    how, few = normal_precision(precision), False  # of symbolic sizes nothing is known
    if isinstance(rows, int):
        few = rows < (_MANY_ROWS if groups == 1 else size)

    def product(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
        parts, factors = kernel.reshape(groups, size, out), scale.reshape(groups, out).astype(wide)
        if few:
            # In float16 sums of int8 overflow.
            held = wide if groups == 1 or x.dtype == jnp.float16 else x.dtype
            each, parts = x.reshape(*batch, groups, size), parts.astype(x.dtype)
            found = jnp.einsum(
                "...gk,gkn->...gn", each, parts, preferred_element_type=held, precision=how
            )
            return (found.astype(wide) * factors).sum(-2)
        kernel = (parts.astype(wide) * factors[:, None]).astype(x.dtype).reshape(kernel.shape)
        return jnp.matmul(x, kernel, preferred_element_type=wide, precision=how)

    spec = product_spec(dims_of(x)[:-1], dims_of(kernel)[1])
    product = without_explicit_axes(product, (x, kernel, scale), spec)
    return apply_outside(product(x, kernel, scale), terms, x.dtype.name)
