"""Attention over packed sequences, and over one array of queries, keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from ..arguments import chosen, flags, floating, integer
from . import arguments
from .arguments import attributes
from .bias import LENGTHS
from .masks import fill_with_mean, masked_bias
from .nodes import Sdpa
from .packed import Packed
from .storage import InOneArray, StoredSdpa

STATIC = "it is static: each value needs its own plan"


def _packed(g, q, k, v, bias, lengths, offsets, extras, *, limits, **attributes):
    ports = {"q": q, "k": k, "v": v, **lengths, **offsets, **extras}
    if bias is not None:
        ports["bias"] = bias
    queries, keys = limits
    storage = Packed(queries, keys, q.shape[0], k.shape[0])
    node = StoredSdpa(Sdpa.create(**attributes), storage)
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
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    sink: jax.Array | None = None,
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
        value: (S, V, E), of query's dtype. E may differ from H, and V from K.
        bias: added to the scaled scores, indexed by position in a sequence; broadcast to (B, N,
            max_query_length, max_key_value_length) and rounded to query's dtype. Differentiable.
        query_offsets: (B + 1,) in int32, ascending, between 0 and T. Tokens before the first and
            after the last offset belong to no sequence.
        max_query_length: at least the largest number of queries in a sequence; excess queries are
            ignored, and their results are 0. Each value needs its own plan, so use few.
        key_value_offsets: (B + 1,) in int32, between 0 and S; by default ``query_offsets``.
        max_key_value_length: the same for keys; by default max_query_length for self-attention,
            otherwise S.
        is_causal: a query sees keys up to its own position in the sequence.
        bottom_right: align the last query of a sequence with its last key. By default the first
            ones are aligned.
        dropout_rate, dropout_rng: as in :func:`dot_product_attention`; the mask depends on the
            sequence and the positions in it.
        sink: one logit per head, (N,) in float32, as in :func:`dot_product_attention`.
            Differentiable; XLA sums its gradient.
        scale, local_window_size, return_residual, implementation, options: as in
            :func:`dot_product_attention`.

    Returns: (T, N, E) of query's dtype. With ``return_residual`` also the natural log-sum-exp of
    the softmax's input, (T, N) in float32. Queries that see no key, and tokens of no sequence, have
    results and gradients of 0 and a residual of -inf (or the sink, if their sequence has keys).
    Both results are differentiable.

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
    expected = "rank 3 (tokens, heads, head size): (T, N, H), (S, K, H) and (S, K, E)"
    query, key, value = arguments.operands((3,), expected, query=query, key=key, value=value)
    arguments.check_operands(query[None], key[None], value[None])
    query, scale = arguments.scaled(query, scale)
    band = arguments.band_of(is_causal, local_window_size, bottom_right)
    queries, most = starts_of("query_offsets", query_offsets), (query.shape[0], key.shape[0])
    given = [integer("max_query_length", max_query_length, 1, STATIC), most[1]]
    if key_value_offsets is None:
        keys, given[1] = queries, given[0]
    else:
        keys = starts_of("key_value_offsets", key_value_offsets)
    if keys.shape != queries.shape:
        raise GraphError(
            "key_value_offsets and query_offsets have different shapes",
            expected=f"int32{list(queries.shape)}, the shape of query_offsets",
            got=f"int32{list(keys.shape)}",
        )
    if max_key_value_length is not None:
        given[1] = integer("max_key_value_length", max_key_value_length, 1, STATIC)
    batch, heads = queries.shape[0] - 1, query.shape[1]
    letters = "B, N, max_query_length, max_key_value_length"
    scores = batch, heads, *given
    bias = arguments.bias_of(bias, scores, query.dtype, letters, masks=False)
    rate, extras = arguments.extensions(
        scores, query.dtype, dropout_rate, dropout_rng, sink, False, None, is_causal
    )
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
    lengths = {"seq_len_q": _lengths(queries, limits[0]), "seq_len_kv": _lengths(keys, limits[1])}
    if sink is not None:  # cuDNN writes no results for sequences without keys
        lengths["seq_len_q"] = jnp.where(lengths["seq_len_kv"] > 0, lengths["seq_len_q"], 0)
    (_, n, h), (_, of_values, e) = query.shape, value.shape
    offsets = in_elements(queries, q=n * h, o=n * e, stats=n)
    offsets |= in_elements(keys, k=key.shape[1] * h, v=of_values * e)
    out, statistic = chosen(PACKED, options, None, implementation)(
        query, key, value, bias, lengths,
        offsets, extras,
        limits=limits, dropout_probability=rate,
        **attributes(float(scale), band),
    )  # fmt: skip
    return (out, statistic[..., 0]) if return_residual else out


def starts_of(name: str, x: Any) -> jax.Array:
    meaning = ", the start of each sequence and the end of the last one"
    fix = 'from lengths: jnp.cumulative_sum(lengths, include_initial=True, dtype="int32")'
    return arguments.integers(name, x, ("B + 1",), meaning, fix)


def _lengths(offsets: jax.Array, limit: int) -> jax.Array:
    return jnp.clip(jnp.diff(offsets), 0, limit).reshape(-1, 1, 1, 1)


def in_elements(starts: jax.Array, **sizes: int) -> dict[str, jax.Array]:
    """The offsets within arrays of these numbers of elements per token."""
    return {
        f"ragged_offset_{kind}": (starts * size).reshape(-1, 1, 1, 1)
        for kind, size in sizes.items()
    }


def _qkv(g, qkv, bias, lengths, *, heads, **attributes):
    ports = {"qkv": qkv} if bias is None else {"qkv": qkv, "bias": bias}
    ports |= zip(LENGTHS, lengths, strict=False)
    node = StoredSdpa(Sdpa.create(**attributes), InOneArray(heads))
    return g._append(node, {port: x._state for port, x in ports.items()})


QKV = GraphFunction(_qkv, name="dot_product_attention_qkv")


def dot_product_attention_qkv(
    qkv: jax.Array,
    num_heads: int | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    bottom_right: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Self-attention over queries, keys and values stored in one array, without copying them.

    ``dot_product_attention(qkv[:, :, :N], qkv[:, :, N : N + K], qkv[:, :, N + K :])``, without the
    copies of the three slices that XLA would make; the backward pass writes one array of gradients,
    without a concatenation. A joint projection computes qkv as
    ``jnp.einsum("btm,mhd->bthd", x, weights)``, with weights (model, N + 2 K, H). Letters: B batch
    elements, T tokens, N query heads, K key and value heads, H the head size.

    Args:
        qkv: (B, T, N + 2 K, H), query heads first, then key heads, then value heads, with
            ``num_heads``; or (B, T, 3, N, H), whose heads a mesh can shard: the others are
            gathered. dtypes as in :func:`dot_product_attention`.
        num_heads: N, the number of query heads. Each key head serves N / K consecutive ones.
        scale: factor of the scores, a Python scalar, by default ``H**-0.5``.
        bias, mask, is_causal, local_window_size, bottom_right: as in
            :func:`dot_product_attention`.
        query_seq_lengths, key_value_seq_lengths, return_residual: likewise.
        implementation, options: likewise.

    Returns: (B, T, N, H), and with ``return_residual`` (B, T, N) in float32, both as in
    :func:`dot_product_attention`.

    cuDNN cannot read other orders of heads, such as interleaved query, key and value heads: pass
    the parts to :func:`dot_product_attention`, which costs a copy.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: cuDNN does not support it, with ``implementation="cudnn"``.

    Source: cuDNN documentation, "Scaled Dot Product Attention", strides.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> qkv = jnp.ones((2, 128, 8 + 2 * 2, 64), "bfloat16")
        >>> jc.ops.dot_product_attention_qkv(qkv, 8, is_causal=True).shape
        (2, 128, 8, 64)
    """

    is_causal, bottom_right, return_residual = flags(
        is_causal=is_causal, bottom_right=bottom_right, return_residual=return_residual
    )
    qkv = floating("qkv", qkv)
    heads, of_keys = _counts(qkv, num_heads)
    arguments.check_size(qkv.shape[-1], qkv)
    scale = arguments.scalar_scale(qkv, scale)
    band = arguments.band_of(is_causal, local_window_size, bottom_right)
    scores = qkv.shape[0], heads, qkv.shape[1], qkv.shape[1]
    ends = arguments.lengths_of(scores, query_seq_lengths, key_value_seq_lengths)
    bias, rows = masked_bias(bias, mask, scores, qkv.dtype, band, ends)
    out, statistic = chosen(QKV, options, None, implementation)(
        qkv, bias, ends, heads=None if qkv.ndim == 5 else heads, **attributes(scale, band)
    )
    if rows is not None:
        values = qkv[:, :, 2] if qkv.ndim == 5 else qkv[:, :, -of_keys:]
        values = jnp.swapaxes(values, 1, 2)
        out, statistic = fill_with_mean(jnp.swapaxes(out, 1, 2), statistic, values, rows, ends)
        out = jnp.swapaxes(out, 1, 2)
    return (out, jnp.swapaxes(statistic[..., 0], 1, 2)) if return_residual else out


def _counts(qkv: jax.Array, heads: Any) -> tuple[int, int]:
    """The numbers of query heads and key heads."""
    if qkv.ndim == 5 and qkv.shape[2] == 3 and heads in (None, qkv.shape[3]):
        return qkv.shape[3], qkv.shape[3]
    valid = isinstance(heads, (int, np.integer)) and not isinstance(heads, bool) and heads > 0
    of_keys = (qkv.shape[2] - heads) // 2 if qkv.ndim == 4 and valid else 0
    if of_keys < 1 or qkv.shape[2] != heads + 2 * of_keys or heads % of_keys:
        raise GraphError(
            "qkv and num_heads do not fit together",
            expected="(B, T, 3, N, H), or (B, T, N + 2 K, H) with num_heads=N, a multiple of K",
            got=f"{list(qkv.shape)}, num_heads={heads!r}",
        )
    return int(heads), of_keys
