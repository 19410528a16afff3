"""Attention in the conventions of ``jax.nn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.layout import packed_strides
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from ..arguments import chosen, flags
from . import arguments
from .arguments import attributes
from .bias import LENGTHS
from .masks import fill_with_mean, masked_bias
from .reference import Band
from .score_mod.value import listed


def with_sinks_alone(
    residual: jax.Array, sink: jax.Array, queries: jax.Array | None, keys: jax.Array
) -> jax.Array:
    """The residual (B, T, N) with sinks for the queries of batch elements without keys, which the
    graph has treated as having no queries."""
    i, (count, heads) = jnp.arange(residual.shape[1])[:, None], residual.shape[1:]
    there = i < (count if queries is None else jnp.asarray(queries)[:, None, None])
    alone = there & (keys[:, None, None] <= 0)
    return jnp.where(alone, sink.astype(residual.dtype).reshape(heads), residual)


def _attention(
    g, q, k, v, bias, lengths, extras, operands=(), *, score_mod, heads_first, **attributes
):
    for x in () if heads_first else (q, k, v):
        x.set_stride(packed_strides(x.shape, arguments.BY_TOKEN))
    named = {} if bias is None else {"bias": bias}
    named |= zip(LENGTHS, lengths, strict=False)
    if score_mod is not None:
        named |= {"score_mod": score_mod, "score_mod_operands": operands}
    out, statistic = g.sdpa(q, k, v, **named, **extras, **attributes)
    if not heads_first:
        out.set_stride(packed_strides(out.shape, arguments.BY_TOKEN))
    return out, statistic


ATTENTION = GraphFunction(_attention, name="dot_product_attention")


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    bottom_right: bool = False,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    sink: jax.Array | None = None,
    alibi: bool = False,
    block_mask: jax.Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_operands: Sequence[Any] = (),
    heads_first: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Scaled dot-product attention with the arguments of :func:`jax.nn.dot_product_attention`.

    ``softmax(scale * query key^T + bias) value`` for each head, over the keys that a query sees.
    Letters: B batch elements, T queries, S keys, N query heads, K key and value heads, H and E
    the head sizes of keys and of values.

    Args:
        query: (B, T, N, H) or (T, N, H); bfloat16, float16 or float32; float64 runs in XLA. In
            float32 cuDNN runs only the forward pass, without lengths and with products in TF32,
            and nothing if JAX's default matmul precision is "highest".
        key: (B, S, K, H) or (S, K, H), of query's dtype. Each key head serves N / K consecutive
            query heads.
        value: (B, S, V, E) or (S, V, E), of query's dtype. E may differ from H, and V from K: each
            value head serves N / V consecutive query heads.
        bias: added to the scaled scores; of rank 4 or less, broadcast to (B, N, T, S) and rounded
            to query's dtype. Differentiable. It is copied to full size for cuDNN if it is
            broadcast over keys, or over queries when its gradient is needed; ``explain()`` reports
            this. (``g.sdpa`` keeps a float32 bias with 16-bit queries; cuDNN runs that forward.)
        mask: True where a query sees a key, broadcast like bias: a mask (B, T, S) needs
            ``mask[:, None]``. It becomes a bias of its shape in memory. ``is_causal``,
            ``local_window_size`` and lengths cost nothing instead, and skip hidden tiles of keys.
        scale: factor of the scores, by default ``H**-0.5``; or an array that multiplies the query.
        is_causal: a query sees keys up to its own position.
        query_seq_lengths: (B,) in int32, the number of queries of each batch element, clipped to
            [0, T]; rows after it are 0.
        key_value_seq_lengths: (B,) in int32, the number of keys, clipped to [0, S]. Values after
            the lengths must be finite: kernels may read them, with weight 0.
        local_window_size: (left, right), or one integer for both: how many keys before and after
            its own position a query sees (2**30 or more: all). With ``is_causal``, none after.
        bottom_right: align the last query with the last key, as with cached keys of earlier
            tokens. By default the first ones are aligned.
        dropout_rate: the probability of dropping a weight, a Python scalar in [0, 1); the
            remaining weights are divided by ``1 - dropout_rate``.
        dropout_rng: a jax.random key, typed or raw uint32 data; required by dropout_rate. One key
            gives one mask, for the forward pass and derivatives; a new key does not recompile.
            The mask depends on the key and the position within the arrays of a call: on a mesh,
            fold the device index into the key. Under vmap the calls run sequentially. cuDNN and
            XLA draw different masks.
        sink: one logit per head, (N,) in float32, added to the sum of the softmax without a value,
            so that a query may attend to nothing. Differentiable.
        alibi: subtract a slope per head times the distance to the key (Press et al. 2022,
            arXiv:2108.12409): ``2 ** (-8 i / N)``, i = 1 ... N, if N is a power of two, otherwise
            as in the authors' code. Requires ``is_causal``.
        block_mask: which tiles of 128 queries see which tiles of 128 keys, booleans of shape
            (B or 1, N or 1, ceil(T / 128), ceil(S / 128)). cuDNN 9.26 and newer run the forward
            pass on Blackwell; the backward pass and all other GPUs run in XLA, which computes
            every tile.
        score_mod: ``f(score, b, h, q, kv, *score_mod_operands)``, a jnp function that returns the
            modified scaled scores. ``score`` is (B, N, T, S) in float32; the indices of batch
            element, head, query and key are int32 and broadcast with it. Operators, comparisons,
            ``jnp.where`` and elementwise functions become part of cuDNN's kernel, as does their
            derivative; the function must not combine different scores. ``bias`` is added to its
            result, then ``is_causal``, window and lengths hide keys. With ALiBi, dropout, sinks
            or block masks it runs in XLA. ``jax_cudnn.ops.score_mods`` has common ones. Equal
            functions are traced once; closures work as under ``jax.jit``, and arrays they capture
            are traced at each call.
        score_mod_operands: arrays passed to score_mod, broadcast like bias: floats as float32,
            integers as int32, booleans as booleans. Float operands are differentiable, in XLA. An
            operand broadcast over queries, such as (B, 1, 1, S), is copied to full size for cuDNN;
            ``jax_cudnn.plan(...).explain()`` reports the bytes and alternatives.
        heads_first: query, key and value are (B, N, T, H), (B, K, S, H) and (B, K, S, E), and the
            result (B, N, T, E), or all without B. Neither form is copied.
        return_residual: also return the log-sum-exp of each row.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Returns: (B, T, N, E) or (T, N, E), of query's dtype. With ``return_residual`` also the natural
    log-sum-exp of the softmax's input, (B, T, N) or (T, N) in float32 (or float64), or with N
    before T under ``heads_first``. Both are differentiable, and are kept for the backward pass.

    Differences from ``jax.nn``:

    - A query that sees no key because of ``is_causal``, window or lengths returns 0 and a residual
      of -inf, as cuDNN's kernels do (jax.nn's "xla" returns the mean of all values).
    - If ``mask`` hides all remaining keys, the result is the mean of all values, as in jax.nn (here
      of those within the lengths; 0 with a sink).
    - A bias of -inf for all keys returns 0 (jax.nn: NaN). Large negative biases for all keys of a
      query give inexact gradients, and from about -1e5 wrong ones, because the backward pass reads
      the log-sum-exp in float32: use ``mask`` instead.
    - A float32 bias is rounded to query's dtype (jax.nn adds it in float32).
    - The residual is float32 and differentiable. With a sink it includes the sink, and equals the
      sink if a query sees no key.

    ``options=Options(deterministic=True)`` makes gradients reproducible. cuDNN's engine for that
    takes ``2 B N T S`` bytes of workspace on Hopper and older GPUs. If that exceeds
    ``Options.max_workspace`` (by default a quarter of the GPU's memory), cuDNN 9.25 and newer run
    a slower engine with linear workspace on Hopper; otherwise the backward pass falls back to XLA.
    ``jax_cudnn.plan(...).explain()`` reports the choice and the bytes.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: cuDNN does not support it, with ``implementation="cudnn"``.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691; cuDNN documentation,
    "Scaled Dot Product Attention".

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q, k = jnp.ones((2, 128, 8, 64), "bfloat16"), jnp.ones((2, 128, 2, 64), "bfloat16")
        >>> jc.ops.dot_product_attention(q, k, k, is_causal=True).shape
        (2, 128, 8, 64)
    """

    is_causal, bottom_right, alibi, heads_first, return_residual = flags(
        is_causal=is_causal,
        bottom_right=bottom_right,
        alibi=alibi,
        heads_first=heads_first,
        return_residual=return_residual,
    )
    (q, k, v), had_batch = arguments.batched(heads_first, query=query, key=key, value=value)
    queries, keys, values = (arguments.by_token(x, heads_first) for x in (q, k, v))
    arguments.check_operands(queries, keys, values)
    scores, dtype = arguments.scores_of(queries, keys), q.dtype
    q, scale = arguments.scaled(q, scale)
    band = seen = arguments.band_of(is_causal, local_window_size, bottom_right)
    if not heads_first:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    lengths = ends = arguments.lengths_of(scores, query_seq_lengths, key_value_seq_lengths)
    rate, extras = arguments.extensions(
        scores, dtype, dropout_rate, dropout_rng, sink, alibi, block_mask, is_causal
    )
    operands = listed(score_mod_operands)
    if score_mod is not None or operands:
        if alibi or sink is not None:  # XLA runs it, with separate band and lengths
            limits = Band(), ()
        else:  # they become part of the function
            limits, lengths, seen = (band, lengths), (), Band()
        score_mod, operands = arguments.modification(score_mod, operands, scores, dtype, *limits)
    bias, rows = masked_bias(
        bias, mask, scores, dtype, band, ends, block_mask=block_mask,
        fill=sink is None,  # with a sink, such a query sees the sink
    )  # fmt: skip
    out, statistic = chosen(ATTENTION, options, None, implementation)(
        q, k, v, bias, lengths, extras, operands,
        **attributes(float(scale), seen), use_alibi_mask=alibi, dropout_probability=rate,
        score_mod=score_mod, heads_first=heads_first,
    )  # fmt: skip
    out, statistic = fill_with_mean(out, statistic, v, rows, ends)
    out = out if heads_first else jnp.swapaxes(out, 1, 2)
    if not return_residual:
        return out if had_batch else out[0]
    statistic = jnp.swapaxes(statistic[..., 0], 1, 2)
    if sink is not None and key_value_seq_lengths is not None:
        statistic = with_sinks_alone(
            statistic, jnp.asarray(sink), query_seq_lengths, jnp.asarray(key_value_seq_lengths)
        )
    if heads_first:
        statistic = jnp.swapaxes(statistic, 1, 2)
    return (out, statistic) if had_batch else (out[0], statistic[0])
