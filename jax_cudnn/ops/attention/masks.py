"""Masks: as a bias, and the queries whose keys they all hide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import wide_dtype
from ..._core.primitive import broadcasting
from . import extras
from .arguments import Lengths, bias_of, mask_of
from .reference import Band

_MASKED = -0.7  # times the largest finite value


def masked_bias(
    bias: Any,
    mask: Any,
    scores: Shape,
    dtype: Any,
    band: Band,
    lengths: Lengths,
    *,
    block_mask: Any = None,
    fill: bool = True,
) -> tuple[jax.Array | None, jax.Array | None]:
    """The bias with rank 4 and the mask folded in, and with ``fill`` the queries that see some key
    without the mask but none with it, (B or 1, N or 1, T, 1), for :func:`fill_with_mean`; both
    None without bias and mask."""
    mask, rows = mask_of(mask, scores), None
    if mask is not None and fill:
        rows = _fully_masked_rows(mask, scores, band, lengths, block_mask)
        # With all keys of these rows shown, unless that needs a larger mask, their scores are
        # ordinary values instead of the same large one.
        fits = all(a in (1, b) for a, b in zip(rows.shape[:3], mask.shape[:3], strict=True))
        mask = mask | (rows if fits else ~mask.any(-1, keepdims=True))
    bias = bias_of(bias, scores, dtype)
    if mask is None:
        return bias, None
    seen = jnp.zeros((), dtype) if bias is None else bias
    return jnp.where(mask, seen, jnp.asarray(_unseen(dtype), dtype)), rows


def _unseen(dtype: Any) -> float:
    """The score of a key hidden by a mask."""
    return _MASKED * float(jnp.finfo(dtype).max)


def _fully_masked_rows(
    mask: jax.Array, scores: Shape, band: Band, lengths: Lengths, block_mask: jax.Array | None
) -> jax.Array:
    t, s = scores[2:]
    queries, keys = lengths or (t, s)
    i, j = jnp.arange(t).reshape(1, 1, t, 1), jnp.arange(s).reshape(1, 1, 1, s)
    left = (i < queries) & (j < keys) & band.sees(i, j, keys - queries)
    if block_mask is not None:
        tiles = jnp.repeat(jnp.repeat(block_mask, extras.TILE, 2), extras.TILE, 3)
        left &= tiles[:, :, :t, :s]
    return left.any(-1, keepdims=True) & ~(left & mask).any(-1, keepdims=True)


def fill_with_mean(
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
    if lengths:
        _, keys = lengths
        value = jnp.where(jnp.arange(count).reshape(1, 1, count, 1) < keys, value, 0)
        count = keys
    kind = wide_dtype(value)
    mean = value.astype(kind).sum(2, keepdims=True) / count
    batch, heads, _, size = mean.shape
    groups = out.shape[1] // heads  # jnp.repeat does not support heads sharded over a mesh
    mean = jnp.tile(mean[:, :, None], (1, 1, groups, 1, 1)).reshape(batch, heads * groups, 1, size)
    chosen, mean = broadcasting(out, rows, mean)
    found = jnp.where(chosen, mean, out.astype(kind))  # the gradient's sum is then in float32
    return found.astype(out.dtype), jnp.where(chosen, _unseen(out.dtype), statistic)
