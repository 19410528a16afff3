"""Queries, keys and values of the same inputs in one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax.core import Tracer
from jax.sharding import AxisType

from .. import ops
from .._core.graph.options import Options
from .linear import LinearGeneral

_HALVES = ("bfloat16", "float16")
_SETTINGS = ("dtype", "precision", "preferred_element_type", "in_features", "axis")


def projected(layers: Sequence[Any], x: jax.Array) -> jax.Array | None:
    """The three projections of x, concatenated along the heads; None if they are not one product in
    16 bits, if there are so few tokens that concatenating the kernels costs more than it saves, or
    if devices may hold parts of the kernels.

    One product reads x once and writes its gradient once; attention reads the parts in place
    (:func:`jax_cudnn.ops.dot_product_attention_qkv`).

    Args:
        layers: the projections of queries, keys and values, with kernels (features, heads, size).
        x: (..., features).
    """
    one, *_ = layers
    if not all(type(layer) is LinearGeneral and _plain(layer) for layer in layers):
        return None
    same = all(getattr(layer, name) == getattr(one, name) for layer in layers for name in _SETTINGS)
    biases = [layer.bias for layer in layers]
    sizes = {layer.kernel.shape[::2] for layer in layers}
    if not same or len(sizes) > 1 or len({bias is None for bias in biases}) > 1:
        return None
    given = [layer.kernel[...] for layer in layers]
    given += [bias[...] for bias in biases if bias is not None]
    few = isinstance(x.size, int) and x.size < x.shape[-1] ** 2
    if few or not all(map(_whole, given)):
        return None
    x, *given = promote_dtype((x, *given), dtype=one.dtype)
    if x.dtype.name not in _HALVES:
        return None
    kernel, bias = jnp.concatenate(given[:3], 1), jnp.concatenate(given[3:]) if given[3:] else None
    y = ops.matmul(
        x,
        kernel.reshape(x.shape[-1], -1),
        bias=None if bias is None else bias.ravel(),
        precision=one.precision,
    )
    return y.reshape(*x.shape[:-1], *kernel.shape[1:])


def attention(
    joint: jax.Array,
    heads: int,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> jax.Array:
    """Attention for an array (*batch, tokens, heads of all three, size)."""
    out = ops.dot_product_attention_qkv(
        joint.reshape(-1, *joint.shape[-3:]),
        heads,
        is_causal=is_causal,
        local_window_size=local_window_size,
        options=Options(precision=precision),
    )
    return out.reshape(*joint.shape[:-2], heads, joint.shape[-1])


def _plain(layer: LinearGeneral) -> bool:
    one_axis = len(layer.in_features) == 1 and layer.axis == (-1,) and not layer.batch_axis
    untouched = layer.activation is None and layer.preferred_element_type is None
    untouched &= layer.promote_dtype is promote_dtype  # a custom one expects three arrays
    return one_axis and untouched and layer.unfused is None and len(layer.kernel.shape) == 3


def _whole(parameter: Any) -> bool:
    """Whether each device is known to hold the whole parameter: otherwise concatenating along the
    heads and splitting again would move parts between devices. A traced parameter does not say so
    without a mesh (``jax.jit(..., in_shardings=...)`` applies later) or with Auto axes."""
    if not isinstance(parameter, Tracer):
        return not isinstance(parameter, jax.Array) or parameter.sharding.is_fully_replicated
    sharding = jax.typeof(parameter).sharding
    mesh = sharding.mesh
    kinds = {kind for kind, n in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if n > 1}
    if mesh.empty or AxisType.Auto in kinds:
        return jax.device_count() == 1
    return not any(sharding.spec)
