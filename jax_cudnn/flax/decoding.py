"""Attention to a cache, called by Flax's layer as its attention_fn."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import ops
from .._core.errors import GraphError
from .._core.graph.options import Options


def cached(
    layer: Any,
    attention: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    **named: Any,
) -> jax.Array:
    """Writes new keys and values to the layer's ``cached_key`` and ``cached_value``, and attends to
    them; each token attends to those before it, whatever is_causal says."""
    keys, values, index = layer.cached_key, layer.cached_value, layer.cache_index
    *batch, most, heads, size = keys.shape
    count = key.shape[-3]
    if key.shape != (*batch, count, heads, size) or count > most:
        raise GraphError(
            "Autoregressive cache shape error",
            expected=f"keys {[*batch, 1, heads, size]}, or up to {most} tokens",
            got=str(list(key.shape)),
            fix="call init_cache with the shape of the inputs",
        )
    first = index[...]
    zero = jnp.zeros_like(first)
    at = (*(zero for _ in batch), first, zero, zero)
    for cache, new in ((keys, key), (values, value)):
        cache[...] = lax.dynamic_update_slice(cache[...], new.astype(cache.dtype), at)
    index[...] = first + count
    return attention(
        query,
        keys[...],
        values[...],
        key_value_seq_lengths=jnp.broadcast_to(first + count, math.prod(batch)),
        is_causal=count > 1,
        bottom_right=count > 1 or layer.local_window_size is not None,
        **named,
    )


def paged(
    layer: Any,
    attention: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = True,
    local_window_size: Any = None,
    module: Any = None,
    precision: Any = None,
    **_: Any,
) -> jax.Array:
    """Writes new keys and values to the layer's ``paged_cache``, and attends to them."""
    given = {
        "mask": mask is not None,
        "dropout": dropout_rate > 0 and not deterministic,
        "sow_weights": module is not None,
        "attention_fn": attention is not ops.attention_fn,
    }
    if any(given.values()):
        raise GraphError(
            "attention to a paged cache does not support these",
            expected="no arguments but lengths, is_causal and local_window_size",
            got=", ".join(name for name in given if given[name]),
            fix="leave out page_size: the cache is then one array",
        )
    four = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    out = layer.paged_cache(
        *four, local_window_size=local_window_size, options=Options(precision=precision)
    )
    return out.reshape(query.shape)
