"""Flax's dot_product_attention on cuDNN, argument for argument."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dtypes import FLOATS
from ..._core.graph.options import Options, normal_precision
from .arguments import band_of
from .functions import dot_product_attention

log = logging.getLogger("jax_cudnn")


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    *,
    local_window_size: int | tuple[int, int] | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    bottom_right: bool = False,
    **others: Any,
) -> jax.Array:
    """``flax.nnx.dot_product_attention`` and ``flax.linen.dot_product_attention`` on cuDNN.

    Use it as ``nnx.MultiHeadAttention(..., attention_fn=jax_cudnn.ops.attention_fn)``, and likewise
    with ``linen.MultiHeadDotProductAttention``. It calls
    :func:`jax_cudnn.ops.dot_product_attention`, whose letters it uses.

    Args:
        query: (*batch, T, N, H), with any number of leading dimensions, or none.
        key: (*batch, S, K, H).
        value: (*batch, S, K, E).
        bias: added to the scores, broadcast to (*batch, N, T, S).
        mask: true, or nonzero, where a query sees a key; broadcast likewise.
        broadcast_dropout: share one dropout mask between all batch elements and heads.
        dropout_rng: a key; with ``broadcast_dropout=False`` cuDNN draws the mask, which differs
            from Flax's.
        dropout_rate: the probability of dropping a weight.
        deterministic: disable dropout.
        dtype: of the operands and the result, by default the promoted dtype of the operands.
        precision: lax's precision; "highest" avoids TF32 for float32.
        module: where the attention weights are sown.
        promote_dtype: NNX's function that promotes the operands.
        is_causal: a query sees keys up to its own position.
        force_fp32_for_softmax: no effect: softmax is always float32, and the result has the
            operands' dtype.
        einsum_dot_general: as in Linen.
        qk_attn_weights_einsum: as in Linen.
        attn_weights_value_einsum: as in Linen.
        local_window_size: as in ``dot_product_attention``; set it with ``functools.partial``.
        key_value_seq_lengths: likewise, (B,) with all batch dimensions flattened.
        bottom_right: likewise.
        others: further arguments of ``dot_product_attention``: sink, alibi, score_mod, options, ...

    Returns: (*batch, T, N, E).

    It falls back to Flax's implementation, with a line in the debug log of the logger
    ``jax_cudnn``, for sown attention weights, shared dropout masks (Flax's default: pass
    ``broadcast_dropout=False``), custom einsums, other dtypes and empty arrays. It also leaves a
    ``dropout_rate`` outside of [0, 1) to Flax, whose newer versions reject it.

    A query that sees no key because of ``is_causal``, window or lengths alone returns 0. If
    ``mask`` hides all remaining keys, the result is the mean of all values, as in Flax (here of
    those within the lengths).

    Raises:
        GraphError: shapes or arguments do not fit, or Flax's implementation is needed but does not
            support ``others``.
        UnsupportedGraphError: cuDNN does not support it, under
            ``jax_cudnn.implementation("cudnn")``.

    Source: ``flax.nnx.dot_product_attention``, ``flax.linen.dot_product_attention``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x = jnp.ones((2, 3, 16, 4, 8), "bfloat16")
        >>> jc.ops.attention_fn(x, x, x, is_causal=True).shape
        (2, 3, 16, 4, 8)
    """
    if promote_dtype is None:
        dtype = _dtype(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    rate = 0.0 if deterministic and 0 <= dropout_rate < 1 else dropout_rate
    einsums = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    reason = _flaxs_reason(query, key, value, module, einsums, rate, broadcast_dropout)
    if reason is None:
        *batch, t, n, _ = query.shape
        if precision is not None:
            options = others.get("options") or Options()
            others["options"] = replace(options, precision=normal_precision(precision))
        out = dot_product_attention(
            _in_one_batch(query),
            _in_one_batch(key),
            _in_one_batch(value),
            _broadcasting_batch(bias, batch),
            _broadcasting_batch(None if mask is None else mask.astype(bool), batch),
            is_causal=is_causal,
            local_window_size=local_window_size,
            key_value_seq_lengths=key_value_seq_lengths,
            bottom_right=bottom_right,
            dropout_rate=rate,
            dropout_rng=dropout_rng if rate else None,
            **others,
        )
        return out if query.ndim <= 4 else out.reshape(*batch, t, n, value.shape[-1])
    if others:
        raise GraphError(
            "Flax's attention does not support these arguments",
            expected="arguments of Flax's dot_product_attention",
            got=", ".join(sorted(others)),
            why=f"attention_fn falls back to Flax's implementation because of {reason}",
            fix="remove these arguments, or the cause of the fallback",
        )
    log.debug("attention_fn falls back to Flax's implementation: %s", reason)
    hidden = _seen(query, key, is_causal, local_window_size, key_value_seq_lengths, bottom_right)
    masks = [x for x in (mask, hidden) if x is not None]
    return _flaxs(module, einsums, force_fp32_for_softmax)(
        query,
        key,
        value,
        bias,
        functools.reduce(jnp.logical_and, masks) if masks else None,
        broadcast_dropout,
        dropout_rng,
        rate,
        deterministic,
        dtype,
        precision,
        module,
    )


def _dtype(*arrays: Any) -> Any:
    dtype = jnp.result_type(*arrays)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(dtype, jnp.float32)


def _flaxs_reason(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    module: Any,
    einsums: dict[str, Any],
    rate: float,
    broadcast_dropout: bool,
) -> str | None:
    """Why attention_fn falls back to Flax's implementation, or None."""
    if module is not None:
        return "sown attention weights"
    if any(einsums.values()):
        return "a custom einsum"
    if not 0 <= rate < 1:
        return f"the dropout_rate {rate}"
    if rate and broadcast_dropout:
        return "a dropout mask shared by batch elements and heads"
    if str(query.dtype) not in FLOATS:
        return f"the dtype {query.dtype}"
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty array"
    return None


def _flaxs(module: Any, einsums: dict[str, Any], force_fp32_for_softmax: bool) -> Callable:
    """Flax's function: Linen's for arguments that NNX's does not support."""
    from flax import linen
    from flax.nnx.nn import attention  # nnx's public name may be bound to this hook

    if any(einsums.values()) or force_fp32_for_softmax or isinstance(module, linen.Module):
        return functools.partial(
            linen.dot_product_attention, force_fp32_for_softmax=force_fp32_for_softmax, **einsums
        )
    return attention.dot_product_attention


def _in_one_batch(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) if x.ndim > 4 else x


def _broadcasting_batch(x: Any, batch: list[int]) -> Any:
    """An array that broadcasts to (*batch, N, T, S), as one that broadcasts to (B, N, T, S)."""
    if x is None or len(batch) < 2 or x.ndim <= 3:
        return x
    own = x.shape[:-3]
    if set(own) == {1}:
        return x.reshape(1, *x.shape[-3:])
    return _in_one_batch(jnp.broadcast_to(x, (*batch, *x.shape[-3:])))


def _seen(
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    window: Any,
    lengths: jax.Array | None,
    bottom_right: bool,
) -> jax.Array | None:
    """The keys within band and lengths, as a mask (*batch or 1, 1, T, S)."""
    band = band_of(is_causal, window, bottom_right)
    if band.left is band.right is lengths is None:
        return None
    (*batch, t, _, _), s = query.shape, key.shape[-3]
    count = (
        jnp.asarray(s).reshape((1,) * (len(batch) + 3))
        if lengths is None
        else lengths.reshape(*batch, 1, 1, 1)
    )
    ones = (1,) * (len(batch) + 1)
    i, j = jnp.arange(t).reshape(*ones, t, 1), jnp.arange(s).reshape(*ones, 1, s)
    return (j < count) & band.sees(i, j, count - t)
