"""Attention in the conventions of ``jax.nn``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.graph.dims import packed_strides
from .._core.graph.options import Options
from .._core.graph.trace import GraphFunction
from .arguments import chosen, flags, floating
from .attention_base import BOTTOM_RIGHT, TOP_LEFT
from .attention_operands import (
    BY_TOKEN,
    additive,
    by_token,
    check_operands,
    lengths_of,
    masking,
    modification,
    operand,
    scaled,
    window_bounds,
)
from .attention_reference import Band
from .score_mod import listed


def _attention(
    g,
    q,
    k,
    v,
    bias,
    lengths,
    extras,
    operands=(),
    *,
    scale,
    left,
    right,
    bottom_right,
    alibi,
    dropout,
    score_mod=None,
    heads_first=False,
):
    for x in () if heads_first else (q, k, v):
        x.set_stride(packed_strides(x.shape, BY_TOKEN))
    named = {} if bias is None else {"bias": bias}
    if lengths is not None:
        named |= {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    named |= extras
    if score_mod is not None:
        named |= {"score_mod": score_mod, "score_mod_operands": operands}
    out, statistic = g.sdpa(
        q, k, v, **named,
        attn_scale=scale,
        diagonal_alignment=BOTTOM_RIGHT if bottom_right else TOP_LEFT,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
        use_alibi_mask=alibi,
        dropout_probability=dropout,
    )  # fmt: skip
    if not heads_first:
        out.set_stride(packed_strides(out.shape, BY_TOKEN))
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
    """Scaled dot-product attention, with the arguments of :func:`jax.nn.dot_product_attention`.

    ``softmax(scale * query key^T + bias) value`` for each head, over the keys that a query sees.
    Letters: B examples, T queries, S keys, N heads of queries, K of keys and values, H and E their
    sizes.

    Args:
        query: (B, T, N, H) or (T, N, H); bfloat16, float16 or float32. Of float32
            cuDNN runs the forward alone, without lengths, with products in TF32, and nothing where
            JAX's default matmul precision is "highest".
        key: (B, S, K, H) or (S, K, H), of query's dtype. Each head serves N / K neighbouring ones
            of query.
        value: (B, S, K, E) or (S, K, E), of query's dtype. E may differ from H.
        bias: added to the scaled scores; of rank 4 or less and broadcast to (B, N, T, S); for
            cuDNN copied where keys share its elements, and where its own gradient is wanted and
            queries do, which ``explain()`` states. Rounded to query's dtype: ``g.sdpa`` keeps one
            in float32 beside 16-bit queries (cuDNN plans that forward). Has a gradient.
        mask: True where a key is seen, broadcast like bias. It becomes a bias of its shape in
            memory; what can be said by ``is_causal``, ``local_window_size`` or lengths costs
            nothing, and tiles of keys that these hide are passed over.
        scale: factor of the scores, by default ``H**-0.5``. An array multiplies the query.
        is_causal: a query sees keys up to its own position.
        query_seq_lengths: (B,) in int32, how many queries each example has; the rest give 0. A
            length below 0 is 0, and one above T is T.
        key_value_seq_lengths: (B,) in int32, how many keys, from 0 up to S likewise. What is behind
            the lengths must be finite: tiles hold some of it, with weights of 0.
        local_window_size: (left, right) or one number for both: a query sees so many keys before
            and after its own position. With ``is_causal`` none after.
        bottom_right: positions are counted so that the last query and the last key are at the
            same, as where keys of earlier tokens are cached.
        dropout_rate: how probably a weight is dropped, a Python number, at least 0 and below 1; the
            others are divided by one minus that.
        dropout_rng: a key of jax.random, typed or raw uint32 data, which dropout_rate needs. A key
            gives one mask, in the forward and in derivatives; another key is no other program. The
            mask of an element follows from the key and its place in the arrays of one call: on a
            mesh fold the device's index into the key. With vmap the calls run in turn. cuDNN's
            masks are others than XLA's.
        sink: a logit for each head, (N,) in float32, that is in the sum of softmax and has no
            value: a query may attend to nothing. Has a gradient.
        alibi: lower scores by a slope for each head times the distance of the key (Press et al.
            2022, arXiv:2108.12409): ``2 ** (-8 i / N)``, i = 1 ... N, where N is a power of two,
            and as in its code else. With ``is_causal`` alone.
        block_mask: which tiles of 128 queries see which tiles of 128 keys, booleans of shape
            (B or 1, N or 1, ceil(T / 128), ceil(S / 128)). cuDNN has a forward for Blackwell (from
            9.26 on); the backward, and all on other GPUs, is XLA's, which computes every tile.
        score_mod: ``f(score, b, h, q, kv, *score_mod_operands)``, a function in jnp that gives what
            stands for the scaled scores: ``score`` is (B, N, T, S) in float32, and the indices of
            example, head, query and key are int32 and broadcast with it. Operators, comparisons,
            ``jnp.where``, and functions of each element become part of cuDNN's kernel, and so does
            their derivative; nothing may look at other scores. ``bias`` is added to its result, and
            ``is_causal``, window and lengths hide keys of it; with ALiBi, dropout, sinks or block
            masks XLA runs it. Ready ones are in ``jax_cudnn.ops.score_mods``. A function that is
            equal to an earlier one is not traced again; what it closes over is as under
            ``jax.jit``, arrays are traced at each call.
        score_mod_operands: arrays that it reads, broadcast like bias; floats come to it as float32,
            integers as int32 and booleans as such. Those of floats have gradients, which XLA
            computes. For cuDNN one that queries share, (B, 1, 1, S) say, is broadcast to all of
            them in memory; ``jax_cudnn.plan(...).explain()`` says how many bytes, and what to use.
        heads_first: query, key and value are (B, N, T, H), (B, K, S, H) and (B, K, S, E), and the
            result (B, N, T, E), or all without B. Either form is read where it lies.
        return_residual: also return the logarithm of each row's sum of exponentials.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Returns: (B, T, N, E) or (T, N, E), of query's dtype; with ``return_residual`` also the natural
    logarithm of the sum of ``exp`` of what softmax gets, (B, T, N) or (T, N) in float32, N before T
    with ``heads_first``. Both may be differentiated; the forward keeps both for that.

    Where it differs from ``jax.nn``: a query that sees no key by ``is_causal``, window or lengths
    gives 0 and a residual of -inf, as cuDNN's kernels do (jax.nn's "xla" gives the mean of all
    values). Where ``mask`` hides all keys that these leave, it gives the mean of all values, as
    jax.nn (here of those within the lengths, and 0 with a sink). A bias of -inf for all keys gives
    0 (jax.nn: NaN); one of large negative numbers for all keys of a query has inexact gradients,
    from about -1e5 on wrong ones, because the backward reads the logarithm of the row's sum in
    float32: say it by ``mask``. A bias in float32 is rounded to query's dtype (jax.nn adds it in
    float32). The residual is float32, and differentiated. With a sink, the
    residual contains it, and is the sink where a query sees no key.

    ``options=Options(deterministic=True)`` gives gradients that are the same in each run. cuDNN's
    engine for that takes ``2 B N T S`` bytes of workspace on Hopper and older GPUs. Where that is
    more than ``Options.max_workspace``, by default a quarter of the GPU's memory, cuDNN 9.25 and
    newer run a slower engine on Hopper whose workspace is linear; else XLA runs the backward.
    ``jax_cudnn.plan(...).explain()`` says which, and how many bytes.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, where cuDNN does not run it.

    Source: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023, arXiv:2307.08691; cuDNN documentation,
    "Scaled Dot Product Attention".

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q, k = jnp.ones((2, 128, 8, 64), "bfloat16"), jnp.ones((2, 128, 2, 64), "bfloat16")
        >>> jc.ops.dot_product_attention(q, k, k, is_causal=True).shape
        (2, 128, 8, 64)
    """
    from .attention_arguments import further, with_sinks_alone  # importing jax_cudnn does without
    from .attention_hidden import hidden, shown, with_means

    is_causal, bottom_right, alibi, heads_first, return_residual = flags(
        is_causal=is_causal,
        bottom_right=bottom_right,
        alibi=alibi,
        heads_first=heads_first,
        return_residual=return_residual,
    )
    rank = floating("query", query).ndim
    named = (("query", query), ("key", key), ("value", value))
    q, k, v = (operand(name, x, rank, heads_first) for name, x in named)
    queries, keys, values = (by_token(x, heads_first) for x in (q, k, v))
    check_operands(queries, keys, values)
    q, scale = scaled(q, scale)
    left, right = window_bounds(local_window_size)
    if is_causal:
        right = 0
    if not heads_first:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    lengths = ends = lengths_of(query_seq_lengths, key_value_seq_lengths, queries, keys)
    band = Band(left, right, bottom_right)
    rate, extras = further(
        queries, keys, dropout_rate, dropout_rng, sink, alibi, block_mask, is_causal
    )
    operands = listed(score_mod_operands)
    if score_mod is not None or operands:
        if alibi or sink is not None:  # XLA runs it, with a band and lengths of its own
            limits = Band(), ()
        else:  # they become a part of the function
            limits, lengths = (band, lengths or ()), None
            left, right, bottom_right = None, None, False
        score_mod, operands = modification(score_mod, operands, queries, keys, *limits)
    mask, rows = masking(mask, queries, keys), None
    if sink is None:  # or else the sink is what such a query sees
        rows = hidden(mask, queries, keys, band=band, lengths=ends, block_mask=block_mask)
    out, statistic = chosen(ATTENTION, options, None, implementation)(
        q, k, v, additive(bias, shown(mask, rows), queries, keys), lengths, extras, operands,
        scale=float(scale), left=left, right=right, bottom_right=bottom_right,
        alibi=alibi, dropout=rate, score_mod=score_mod, heads_first=heads_first,
    )  # fmt: skip
    out, statistic = with_means(out, statistic, v, rows, ends)
    out = out if heads_first else jnp.swapaxes(out, 1, 2)
    if not return_residual:
        return out if rank == 4 else out[0]
    statistic = jnp.swapaxes(statistic[..., 0], 1, 2)
    if sink is not None and key_value_seq_lengths is not None:
        statistic = with_sinks_alone(
            statistic, jnp.asarray(sink), query_seq_lengths, jnp.asarray(key_value_seq_lengths)
        )
    if heads_first:
        statistic = jnp.swapaxes(statistic, 1, 2)
    return (out, statistic) if rank == 4 else (out[0], statistic[0])
