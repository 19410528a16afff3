"""Attention over variable-length sequences packed along the token axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, shown
from .._core.graph.options import Options
from .._core.graph.trace import GraphFunction
from .arguments import chosen, flags, floating, int32
from .attention import Sdpa
from .attention_base import BOTTOM_RIGHT, TOP_LEFT
from .attention_operands import check_operands, scaled, window_bounds


def _packed(g, q, k, v, bias, lengths, offsets, *, limits, **attributes):
    from .attention_packed import PackedSdpa  # lazy, for a fast import

    ports = {"q": q, "k": k, "v": v, **lengths, **offsets}
    if bias is not None:
        ports["bias"] = bias
    queries, keys = limits
    node = PackedSdpa(Sdpa.create(**attributes), queries, keys, q.shape[0], k.shape[0])
    return g._append(node, {port: x._state for port, x in ports.items()})


PACKED = GraphFunction(_packed, name="packed_dot_product_attention")


def packed_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    *,
    query_offsets: jax.Array,
    max_query_length: int,
    key_value_offsets: jax.Array | None = None,
    max_key_value_length: int | None = None,
    scale: Any = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    bottom_right: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Scaled dot-product attention over variable-length sequences, packed along the token axis.

    Sequence i holds the tokens ``offsets[i]`` to ``offsets[i + 1] - 1``, without padding, and its
    queries see only its own keys: ``softmax(scale * query key^T + bias) value`` for each head (the
    THD layout). Letters: B sequences, T queries and S keys in total, N query heads, K key and value
    heads, H and E the head sizes of keys and of values. Offsets follow from lengths by
    ``jnp.cumulative_sum(lengths, include_initial=True, dtype="int32")``.

    Args:
        query: (T, N, H); bfloat16 or float16; float32 and float64 run in XLA.
        key: (S, K, H), of query's dtype. Each key head serves N / K consecutive query heads.
        value: (S, K, E), of query's dtype. E may differ from H.
        bias: added to the scaled scores, indexed by position in a sequence; broadcast to (B, N,
            max_query_length, max_key_value_length) and rounded to query's dtype. Differentiable.
        query_offsets: (B + 1,) in int32, ascending, between 0 and T. Tokens before the first and
            after the last offset belong to no sequence.
        max_query_length: at least the largest number of queries in a sequence; excess queries are
            ignored, and their results are 0. Each value needs its own plan, so use few.
        key_value_offsets: (B + 1,) in int32, between 0 and S; by default ``query_offsets``.
        max_key_value_length: the same for keys; by default max_query_length for self-attention,
            otherwise S.
        scale: factor of the scores, by default ``H**-0.5``. An array multiplies the query.
        is_causal: a query sees keys up to its own position in the sequence.
        local_window_size: (left, right), or one integer for both: how many keys before and after
            its own position a query sees (2**30 or more: all). With ``is_causal``, none after.
        bottom_right: align the last query of a sequence with its last key. By default the first
            ones are aligned.
        return_residual: also return the log-sum-exp of each row.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Returns: (T, N, E) of query's dtype. With ``return_residual`` also the natural log-sum-exp of
    the softmax's input, (T, N) in float32. Queries that see no key, and tokens of no sequence, have
    results and gradients of 0 and a residual of -inf. Both results are differentiable.

    Memory is linear in the number of tokens; cuDNN's workspace for the backward pass holds the
    query gradient in float32. Offsets are clipped to the valid range, so no other memory is read.
    All tokens must be finite: a tile at the end of a sequence may read the next one, with weight 0.

    Under vmap the calls run sequentially; pass all sequences in one call instead.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: cuDNN does not support it, with ``implementation="cudnn"``.

    Source: cuDNN documentation, "Scaled Dot Product Attention", ragged tensors.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q, k = jnp.ones((100, 8, 64), "bfloat16"), jnp.ones((100, 2, 64), "bfloat16")
        >>> offsets = jnp.array([0, 30, 90], "int32")  # sequences of 30 and 60 tokens
        >>> jc.ops.packed_dot_product_attention(
        ...     q, k, k, query_offsets=offsets, max_query_length=64, is_causal=True
        ... ).shape
        (100, 8, 64)
    """
    is_causal, bottom_right, return_residual = flags(
        is_causal=is_causal, bottom_right=bottom_right, return_residual=return_residual
    )
    query, key, value = (
        _tokens(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    check_operands(query[None], key[None], value[None])
    query, scale = scaled(query, scale)
    left, right = window_bounds(local_window_size)
    queries, most = _offsets("query_offsets", query_offsets), (query.shape[0], key.shape[0])
    given = [_limit("max_query_length", max_query_length), most[1]]
    if key_value_offsets is None:
        keys, given[1] = queries, given[0]
    else:
        keys = _offsets("key_value_offsets", key_value_offsets)
    if keys.shape != queries.shape:
        raise GraphError(
            "key_value_offsets and query_offsets have different shapes",
            expected=f"int32{list(queries.shape)}, the shape of query_offsets",
            got=f"int32{list(keys.shape)}",
        )
    if max_key_value_length is not None:
        given[1] = _limit("max_key_value_length", max_key_value_length)
    batch, heads = queries.shape[0] - 1, query.shape[1]
    bias = _bias(bias, (batch, heads, *given), query)
    # A plan's limits are at most the number of tokens; a symbolic number bounds nothing.
    limits = tuple(
        max(1, min(size, tokens)) if isinstance(tokens, int) else size
        for size, tokens in zip(given, most, strict=True)
    )
    if bias is not None and limits != (*given,):
        bias = bias[:, :, : limits[0], : limits[1]]
    if 0 in (batch, *query.shape, *key.shape, *value.shape):
        out = jnp.zeros((*query.shape[:2], value.shape[2]), query.dtype)
        statistic = jnp.full(query.shape[:2], -jnp.inf)
        return (out, statistic) if return_residual else out
    queries, keys = (jnp.clip(x, 0, size) for x, size in zip((queries, keys), most, strict=True))
    out, statistic = chosen(PACKED, options, None, implementation)(
        query, key, value, bias,
        {"seq_len_q": _lengths(queries, limits[0]), "seq_len_kv": _lengths(keys, limits[1])},
        _in_elements(queries, keys, query, key, value),
        limits=limits,
        attn_scale=float(scale),
        diagonal_alignment=BOTTOM_RIGHT if bottom_right else TOP_LEFT,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=0 if is_causal else right,
    )  # fmt: skip
    return (out, statistic[..., 0]) if return_residual else out


def _tokens(name: str, x: Any) -> jax.Array:
    x = floating(name, x)
    if x.ndim != 3:
        raise GraphError(
            f"{name} has the wrong rank",
            expected="rank 3 (tokens, heads, head size): (T, N, H), (S, K, H) and (S, K, E)",
            got=f"{name} of shape {list(x.shape)}",
        )
    return x


def _offsets(name: str, x: Any) -> jax.Array:
    x = int32(name, x)
    if x.ndim != 1 or x.shape[0] < 1 or x.dtype != jnp.int32:
        raise GraphError(
            f"{name} is not valid",
            expected="int32[B + 1], the start of each sequence and the end of the last one",
            got=f"{x.dtype}{list(x.shape)}",
            fix='from lengths: jnp.cumulative_sum(lengths, include_initial=True, dtype="int32")',
        )
    return x


def _limit(name: str, x: Any) -> int:
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool) or x < 1:
        raise GraphError(
            f"{name} is not valid",
            expected="a Python integer of at least 1",
            got=shown(x),
            why="it is static: each value needs its own plan",
        )
    return int(x)


def _lengths(offsets: jax.Array, limit: int) -> jax.Array:
    return jnp.clip(jnp.diff(offsets), 0, limit).reshape(-1, 1, 1, 1)


def _in_elements(
    queries: jax.Array, keys: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> dict[str, jax.Array]:
    """The offsets within each array, counted in elements."""
    n, h = query.shape[1:]
    k, e = value.shape[1:]
    per_token = {"q": n * h, "o": n * e, "stats": n}
    found = {kind: queries * size for kind, size in per_token.items()}
    found |= {"k": keys * (k * h), "v": keys * (k * e)}
    return {f"ragged_offset_{kind}": x.reshape(-1, 1, 1, 1) for kind, x in found.items()}


def _bias(bias: Any, scores: tuple[int, ...], query: jax.Array) -> jax.Array | None:
    if bias is None:
        return None
    bias = floating("bias", bias)
    shape = (*(1,) * (4 - bias.ndim), *bias.shape)
    if bias.ndim > 4 or any(a not in (1, b) for a, b in zip(shape, scores, strict=True)):
        raise GraphError(
            "bias does not fit the scores",
            expected="a shape that broadcasts to (B, N, max_query_length, max_key_value_length) = "
            f"{list(scores)}",
            got=f"shape {list(bias.shape)}",
        )
    return bias.astype(query.dtype).reshape(shape)
