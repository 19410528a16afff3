"""Attention over one array of queries, keys and values, in the conventions of ``jax.nn``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError
from .._core.graph.options import Options
from .._core.graph.trace import GraphFunction
from .arguments import chosen, flags, floating, number
from .attention import Sdpa
from .attention_base import BOTTOM_RIGHT, TOP_LEFT
from .attention_operands import additive, check_size, lengths_of, masking, window_bounds
from .attention_reference import Band


def _qkv(g, qkv, bias, lengths, *, heads, **attributes):
    from .attention_qkv import QkvSdpa  # lazy, for a fast import

    ports = {"qkv": qkv} if bias is None else {"qkv": qkv, "bias": bias}
    if lengths is not None:
        ports |= {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    node = QkvSdpa(Sdpa.create(**attributes), heads)
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
            ``num_heads``; or (B, T, 3, N, H). dtypes as in :func:`dot_product_attention`.
        num_heads: N, the number of query heads. Each key head serves N / K consecutive ones.
        bias: added to the scaled scores; of rank 4 or less, broadcast to (B, N, T, T) and rounded
            to qkv's dtype. Differentiable.
        mask: True where a query sees a key, broadcast like bias; it becomes a bias in memory.
        scale: factor of the scores, a Python scalar, by default ``H**-0.5``.
        is_causal: a query sees keys up to its own position.
        query_seq_lengths: (B,) in int32, the number of queries of each batch element; rows after
            it are 0.
        key_value_seq_lengths: (B,) in int32, the number of keys. Values after the lengths must be
            finite.
        local_window_size: (left, right), or one integer for both: how many keys before and after
            its own position a query sees (2**30 or more: all). With ``is_causal``, none after.
        bottom_right: align the last query with the last key.
        return_residual: also return the log-sum-exp of each row.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

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
    from .attention_hidden import hidden, shown, with_means  # lazy, for a fast import

    is_causal, bottom_right, return_residual = flags(
        is_causal=is_causal, bottom_right=bottom_right, return_residual=return_residual
    )
    qkv, heads, of_keys = _parts(floating("qkv", qkv), num_heads)
    check_size(qkv.shape[-1], qkv)
    scale = qkv.shape[-1] ** -0.5 if scale is None else number("scale", scale)
    left, right = window_bounds(local_window_size)
    b, t, _, size = qkv.shape
    query, key = (jax.ShapeDtypeStruct((b, t, n, size), qkv.dtype) for n in (heads, of_keys))
    ends = lengths_of(query_seq_lengths, key_value_seq_lengths, query, key)
    right = 0 if is_causal else right
    mask = masking(mask, query, key)
    rows = hidden(mask, query, key, band=Band(left, right, bottom_right), lengths=ends)
    out, statistic = chosen(QKV, options, None, implementation)(
        qkv, additive(bias, shown(mask, rows), query, key), ends,
        heads=heads,
        attn_scale=scale,
        diagonal_alignment=BOTTOM_RIGHT if bottom_right else TOP_LEFT,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
    )  # fmt: skip
    if rows is not None:
        values = jnp.swapaxes(qkv[:, :, -of_keys:], 1, 2)
        out, statistic = with_means(jnp.swapaxes(out, 1, 2), statistic, values, rows, ends)
        out = jnp.swapaxes(out, 1, 2)
    return (out, jnp.swapaxes(statistic[..., 0], 1, 2)) if return_residual else out


def _parts(qkv: jax.Array, heads: Any) -> tuple[jax.Array, int, int]:
    """The array with rank 4, and its numbers of query heads and key heads."""
    if qkv.ndim == 5 and qkv.shape[2] == 3 and heads in (None, qkv.shape[3]):
        b, t, _, n, h = qkv.shape
        return qkv.reshape(b, t, 3 * n, h), n, n
    valid = isinstance(heads, (int, np.integer)) and not isinstance(heads, bool) and heads > 0
    of_keys = (qkv.shape[2] - heads) // 2 if qkv.ndim == 4 and valid else 0
    if of_keys < 1 or qkv.shape[2] != heads + 2 * of_keys or heads % of_keys:
        raise GraphError(
            "qkv and num_heads do not fit together",
            expected="(B, T, 3, N, H), or (B, T, N + 2 K, H) with num_heads=N, a multiple of K",
            got=f"{list(qkv.shape)}, num_heads={heads!r}",
        )
    return qkv, int(heads), of_keys
