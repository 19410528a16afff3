"""Queries whose keys are all hidden by a mask: the mean of the values, as in jax.nn, and its
gradient."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._core.graph.dtypes import wide_dtype
from . import attention_extras as extras
from .attention_operands import Aval, unseen
from .attention_reference import Band

Lengths = Sequence[jax.Array] | None


def hidden(
    mask: jax.Array | None,
    query: Aval,
    key: Aval,
    *,
    band: Band,
    lengths: Lengths,
    block_mask: jax.Array | None = None,
) -> jax.Array | None:
    """The queries that see some key without ``mask`` but none with it, (B or 1, N or 1, T, 1); None
    if there is no mask.

    Args:
        mask: of rank 4.
        query, key: (B, T, N, H) and (B, S, K, H).
        lengths: of queries and of keys, (B, 1, 1, 1) each.
    """
    if mask is None:
        return None
    t, s = query.shape[1], key.shape[1]
    queries, keys = lengths or (t, s)
    i, j = jnp.arange(t).reshape(1, 1, t, 1), jnp.arange(s).reshape(1, 1, 1, s)
    left = (i < queries) & (j < keys) & band.sees(i, j, keys - queries)
    if block_mask is not None:
        tiles = jnp.repeat(jnp.repeat(block_mask, extras.TILE, 2), extras.TILE, 3)
        left &= tiles[:, :, :t, :s]
    return left.any(-1, keepdims=True) & ~(left & mask).any(-1, keepdims=True)


def shown(mask: jax.Array | None, rows: jax.Array | None) -> jax.Array | None:
    """The mask with all keys of these rows shown, unless that needs a larger mask: their scores are
    then ordinary values instead of the same large one."""
    if mask is None or rows is None:
        return mask
    fits = all(a in (1, b) for a, b in zip(rows.shape[:3], mask.shape[:3], strict=True))
    return mask | (rows if fits else ~mask.any(-1, keepdims=True))


def with_means(
    out: jax.Array, statistic: jax.Array, value: jax.Array, rows: jax.Array | None, lengths: Lengths
) -> tuple[jax.Array, jax.Array]:
    """The result (B, N, T, E) with the mean of a batch element's values (B, K, S, E) in these rows,
    and the statistic (B, N, T, 1) of hidden keys.

    If all scores of a row are the same large value, its statistic does not resolve the logarithm of
    their count, from which the backward pass computes their weights.
    """
    if rows is None:
        return out, statistic
    count = value.shape[2]
    if lengths is not None:
        _, keys = lengths
        value = jnp.where(jnp.arange(count).reshape(1, 1, count, 1) < keys, value, 0)
        count = keys
    kind = wide_dtype(value)
    mean = value.astype(kind).sum(2, keepdims=True) / count
    batch, heads, _, size = mean.shape
    groups = out.shape[1] // heads  # jnp.repeat does not support heads sharded over a mesh
    mean = jnp.tile(mean[:, :, None], (1, 1, groups, 1, 1)).reshape(batch, heads * groups, 1, size)
    found = jnp.where(rows, mean, out.astype(kind))  # the gradient's sum is then in float32
    return found.astype(out.dtype), jnp.where(rows, unseen(out.dtype), statistic)
