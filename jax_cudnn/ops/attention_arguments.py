"""Dropout, sinks, ALiBi and block masks as arguments of the attention functions."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.dtypes import wide_dtype
from . import attention_extras as extras
from .arguments import array
from .attention_operands import Aval


def further(
    query: Aval,
    key: Aval,
    dropout_rate: Any,
    dropout_rng: Any,
    sink: Any,
    alibi: bool,
    block_mask: Any,
    is_causal: bool,
) -> tuple[float | None, dict[str, jax.Array]]:
    """The node's dropout_probability and its operands by port, for a query (B, T, N, H) and a key
    (B, S, K, H)."""
    rate, operands = _rate(dropout_rate), {}
    if rate is not None:
        operands["seed"] = _seed(dropout_rng)
        operands["offset"] = jnp.zeros((1, 1, 1, 2), jnp.uint32)
    if sink is not None:
        operands["sink_token"] = _sink(sink, query)
    if block_mask is not None:
        operands["block_mask"] = _tiles(block_mask, query, key)
    if alibi and not is_causal:
        raise GraphError(
            "alibi without is_causal",
            expected="is_causal=True",
            got=f"is_causal={is_causal!r}",
            why="ALiBi defines slopes only for earlier keys",
            fix="pass is_causal=True, or pass other distances as bias",
        )
    return rate, operands


def with_sinks_alone(
    residual: jax.Array, sink: jax.Array, queries: jax.Array | None, keys: jax.Array
) -> jax.Array:
    """The residual (B, T, N) with sinks for the queries of batch elements without keys, which the
    graph has treated as having no queries."""
    i, (count, heads) = jnp.arange(residual.shape[1])[:, None], residual.shape[1:]
    there = i < (count if queries is None else jnp.asarray(queries)[:, None, None])
    alone = there & (keys[:, None, None] <= 0)
    return jnp.where(alone, sink.astype(residual.dtype).reshape(heads), residual)


def _rate(rate: Any) -> float | None:
    number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not number or not 0 <= float(rate) < 1:
        raise GraphError(
            "dropout_rate is not valid",
            expected="a Python scalar, at least 0 and below 1",
            got=shown(rate),
            why="it is static; under jax.jit list it in static_argnames",
        )
    return float(rate) or None


def _seed(key: Any) -> jax.Array:
    """The key as cuDNN's seed, low word first: ``jax.random.key(7)`` is seed 7."""
    if key is None:
        raise GraphError(
            "dropout_rate without dropout_rng",
            expected="a random key, such as jax.random.key(0)",
            got="dropout_rng=None",
            fix="pass dropout_rng, or omit dropout_rate outside of training",
        )
    key = array("dropout_rng", key, "a jax.random key")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        data = jax.random.key_data(key)
        key = data if data.size == 2 else jax.random.bits(key, (2,), jnp.uint32)
    if key.shape != (2,) or key.dtype != jnp.uint32:
        raise GraphTypeError(
            "dropout_rng is not a key",
            expected="one jax.random key, or its data, uint32[2]",
            got=f"{key.dtype}{list(key.shape)}",
        )
    return key[::-1].reshape(1, 1, 1, 2)


def _sink(sink: Any, query: Aval) -> jax.Array:
    sink, heads = array("sink", sink), query.shape[2]
    if sink.shape != (heads,) or not jnp.issubdtype(sink.dtype, jnp.floating):
        raise GraphError(
            "sink is not valid",
            expected=f"float32[{heads}], one logit per query head",
            got=f"{sink.dtype}{list(sink.shape)}",
        )
    return sink.astype(wide_dtype(query)).reshape(1, heads, 1, 1)


def _tiles(mask: Any, query: Aval, key: Aval) -> jax.Array:
    mask = array("block_mask", mask)
    b, n = query.shape[0], query.shape[2]
    wanted = b, n, *extras.tiles(query.shape[1], key.shape[1])
    fits = mask.ndim == 4 and mask.shape[2:] == wanted[2:]
    fits = fits and all(s in (1, w) for s, w in zip(mask.shape, wanted, strict=True))
    if not fits or mask.dtype != jnp.bool_:
        raise (GraphTypeError if fits else GraphError)(
            "block_mask is not valid",
            expected=f"bool{list(wanted)}, or 1 in the first two dimensions",
            got=f"{mask.dtype}{list(mask.shape)}",
            why=f"each element covers {extras.TILE} queries and {extras.TILE} keys",
        )
    packed = extras.packed(mask)
    return jnp.broadcast_to(packed, (b, n, *packed.shape[2:]))
