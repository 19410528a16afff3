"""Rotary embeddings of MultiHeadAttention: what is rotated, and the positions while decoding."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError


def check_rope(rope: Any) -> None:
    """Raises GraphError if this is neither a function nor None."""
    if rope is not None and not callable(rope):
        raise GraphError(
            "rope is not a function",
            expected="jax_cudnn.ops.rotary_embedding, or None",
            got=f"rope={rope!r}",
            fix="pass options as functools.partial(jax_cudnn.ops.rotary_embedding, base=...)",
        )


def check_self_attention(inputs_q: jax.Array, inputs_k: jax.Array) -> None:
    """Raises GraphError if keys and queries have different inputs."""
    if inputs_k is not inputs_q:
        raise GraphError(
            "rope is for self-attention",
            expected="no inputs_k",
            got=f"inputs_q {inputs_q.shape}, and other inputs_k {inputs_k.shape}",
            why="keys have the positions of the queries",
            fix="leave out inputs_k if it is the same array, or rope=",
        )


def next_positions(layer: Any, shape: tuple[Any, ...]) -> jax.Array | None:
    """Of new tokens (*batch, T, N, H), which follow those in the layer's cache; None for a batch
    that the cache rejects."""
    *batch, count, _, _ = shape
    if layer.paged_cache is None:
        return layer.cache_index[...] + jnp.arange(count, dtype=jnp.int32)
    lengths = layer.paged_cache.lengths[...]
    if lengths.size != math.prod(batch):
        return None
    counts = jnp.arange(count, dtype=jnp.int32).reshape(*(1,) * len(batch), count)
    return lengths.reshape(*batch, 1) + counts
