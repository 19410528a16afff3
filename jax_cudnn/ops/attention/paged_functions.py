"""Attention over a paged cache of keys and values, and writing tokens to the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from ..._core.primitive import without_explicit_axes
from ..arguments import chosen, flags, int32, integer
from . import arguments
from .arguments import attributes, operands
from .bias import LENGTHS
from .nodes import Sdpa
from .packed_functions import STATIC, in_elements, starts_of
from .paged import Paged
from .storage import StoredSdpa

_FORMS = "query and new (B, T, N, H), pages (P, U, K, H)"


def _paged(g, q, k, v, operands, *, heads_first, most, **attributes):
    ports = {"q": q, "k": k, "v": v, **operands}
    node = StoredSdpa(Sdpa.create(**attributes), Paged(heads_first, max_seq_len_q=most))
    return g._append(node, {port: x._state for port, x in ports.items()})


PAGED = GraphFunction(_paged, name="paged_dot_product_attention")


def paged_dot_product_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    bias: jax.Array | None = None,
    *,
    key_value_seq_lengths: jax.Array,
    query_seq_lengths: jax.Array | None = None,
    query_offsets: jax.Array | None = None,
    max_query_length: int | None = None,
    value_page_table: jax.Array | None = None,
    heads_first: bool = False,
    scale: Any = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    bottom_right: bool = True,
    sink: jax.Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> Any:
    """Scaled dot-product attention over a paged cache of keys and values, as used for serving.

    Token t of batch element b is in slot ``t % U`` of page ``page_table[b, t // U]``. Each head
    computes ``softmax(scale * query key^T) value`` over these tokens, without gathering them in
    memory. One query per batch element is a decoding step; several with ``is_causal`` are a prefill
    (the last part of a prompt, whose keys are already in the pages). Letters: B batch elements, T
    queries, n pages per batch element, P pages of U tokens in total, N query heads, K key and value
    heads, H and E the head sizes of keys and of values.

    Args:
        query: (B, T, N, H); bfloat16 or float16; float32 and float64 run in XLA. With
            ``query_offsets`` (T, N, H), the queries of all batch elements.
        key_pages: (P, U, K, H), of query's dtype. Each key head serves N / K consecutive query
            heads.
        value_pages: (P, U, V, E), of query's dtype; V may differ from K, and with
            ``value_page_table`` P and U from those of the keys.
        page_table: (B, n) in int32, indices in [0, P). Entries after a sequence's length may be
            anything. Indices are clipped to this range, so no other memory is read.
        key_value_seq_lengths: (B,) in int32, the number of keys of each batch element, at most
            n * U. Slots after it must hold finite values: kernels may read them, with weight 0.
        query_seq_lengths: (B,) in int32, the number of queries, by default T; rows after it are 0.
        bias: added to the scaled scores, broadcast to (B, N, T, n * U) and rounded to query's
            dtype; T is max_query_length with ``query_offsets``. Differentiable.
        query_offsets: (B + 1,) in int32, ascending: queries of batch element i are
            ``query[query_offsets[i]:query_offsets[i + 1]]``, as in
            :func:`packed_dot_product_attention`, instead of query_seq_lengths: prefill and decoding
            in one call.
        max_query_length: with ``query_offsets`` at least the largest number of queries of a batch
            element; excess queries are ignored, and their results are 0. It is static.
        sink: one logit per head, (N,) in float32, as in :func:`dot_product_attention`.
        value_page_table: the same for value_pages, by default page_table. If one cache holds keys
            in its even pages and values in its odd ones, pass it as both, with the tables
            ``2 * t`` and ``2 * t + 1``.
        heads_first: pages are (P, K, U, H) and (P, K, U, E). Neither form is copied.
        bottom_right: align the last query of a batch element with its last key; if False, align
            the first ones.
        scale, is_causal, local_window_size, return_residual, implementation, options: as in
            :func:`dot_product_attention`.

    Returns: (B, T, N, E) of query's dtype, 0 for queries that see no key. With ``return_residual``
    also the natural log-sum-exp of the softmax's input, (B, T, N) in float32. With
    ``query_offsets`` both are without B. A batch element without keys does not see its sink.

    Derivatives run in XLA, which gathers the keys of a few batch elements at a time: cuDNN has no
    derivative for paged keys. If vmap does not map the pages, its axis joins the batch.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: cuDNN does not support it, with ``implementation="cudnn"``.

    Source: Kwon et al. 2023, arXiv:2309.06180; cuDNN documentation, "Scaled Dot Product Attention",
    paged attention.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> query, pages = jnp.ones((2, 1, 8, 64), "bfloat16"), jnp.ones((9, 16, 2, 64), "bfloat16")
        >>> table, lengths = jnp.array([[3, 1], [0, 8]], "int32"), jnp.array([20, 7], "int32")
        >>> jc.ops.paged_dot_product_attention(
        ...     query, pages, pages, table, key_value_seq_lengths=lengths
        ... ).shape
        (2, 1, 8, 64)
    """
    heads_first, is_causal, bottom_right, return_residual = flags(
        heads_first=heads_first,
        is_causal=is_causal,
        bottom_right=bottom_right,
        return_residual=return_residual,
    )
    keys, values = operands((4,), _FORMS, key_pages=key_pages, value_pages=value_pages)
    rank = 4 if query_offsets is None else 3
    (query,) = operands((rank,), _FORMS, query=query)
    slots, held = (arguments.by_token(x, heads_first) for x in (keys, values))
    arguments.check_operands(query if rank == 4 else query[None], slots, held, paged=True)
    query, scale = arguments.scaled(query, scale)
    band = arguments.band_of(is_causal, local_window_size, bottom_right)
    heads, size, offsets, most = *query.shape[-2:], {}, None
    if query_offsets is None:
        batch, count = query.shape[:2]
    elif query_seq_lengths is not None:
        raise GraphError("query_offsets and query_seq_lengths", expected="one of them")
    else:
        count = most = integer("max_query_length", max_query_length, 1, STATIC)
        starts = jnp.clip(starts_of("query_offsets", query_offsets), 0, query.shape[0])
        batch, query_seq_lengths = starts.shape[0] - 1, jnp.diff(starts)
        of_values = values.shape[3]
        offsets = in_elements(starts, q=heads * size, o=heads * of_values, stats=heads)
    if count == 1 and bottom_right:  # the last query sees all keys anyway, and cuDNN has faster
        band = replace(band, right=None)  # engines for this
    value_table = page_table if value_page_table is None else value_page_table
    tables = {
        "page_table_k": _table("page_table", page_table, batch, keys.shape[0]),
        "page_table_v": _table("value_page_table", value_table, batch, values.shape[0]),
    }
    slots = [t.shape[2] * x.shape[1] for t, x in zip(tables.values(), (slots, held), strict=True)]
    if slots[0] != slots[1]:
        raise GraphError(
            "keys and values have different numbers of slots",
            expected="as many pages per batch element times tokens per page",
            got=f"{slots[0]} and {slots[1]}",
            fix="pass value_page_table for pages of values of another size",
        )
    key_value_seq_lengths = int32("key_value_seq_lengths", key_value_seq_lengths)
    scores = batch, heads, count, slots[0]
    lengths = arguments.lengths_of(scores, query_seq_lengths, key_value_seq_lengths)
    if 0 in (batch, *query.shape):
        out = jnp.zeros((*query.shape[:-1], values.shape[3]), query.dtype)
        return (out, jnp.full(query.shape[:-1], -jnp.inf)) if return_residual else out
    more: dict[str, jax.Array] = {}
    bias = arguments.bias_of(bias, scores, query.dtype, "B, N, T, n * U", masks=False)
    if bias is not None:
        more["bias"] = bias
    behind = count == 1 and not most  # cuDNN has no sink for one query
    if sink is not None and not behind:  # nor writes it results without keys
        more |= arguments.extensions(scores, query.dtype, 0.0, None, sink, False, None, is_causal)[
            1
        ]
        lengths = [jnp.where(lengths[1] > 0, lengths[0], 0), lengths[1]]
    out, statistic = chosen(PAGED, options, None, implementation)(
        query, keys, values,
        tables | dict(zip(LENGTHS, lengths, strict=True)) | offsets | more,
        heads_first=heads_first, most=most, **attributes(float(scale), band),
    )  # fmt: skip
    statistic = statistic[..., 0]
    if sink is not None and behind:
        out, statistic = _with_sink(
            out, statistic, arguments.sink_of(sink, heads, query.dtype)[:, :, 0]
        )
    if not return_residual:
        return out
    return out, statistic if most else jnp.swapaxes(statistic, 1, 2)


def _with_sink(
    out: jax.Array, statistic: jax.Array, sink: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The result (B, 1, N, E) and the statistic (B, N, 1) with a sink (1, N, 1)."""
    unseen = jnp.isneginf(statistic)
    total = jnp.logaddexp(jnp.where(unseen, 0, statistic), sink)
    part = jnp.exp(jnp.where(unseen, 0, statistic) - total)
    return (out * part[:, None]).astype(out.dtype), jnp.where(unseen, -jnp.inf, total)


def write_pages(
    pages: jax.Array,
    new: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    seq_lengths: jax.Array | None = None,
    heads_first: bool = False,
) -> jax.Array:
    """Write new tokens to pages in the layout of :func:`paged_dot_product_attention`.

    Token t of ``new[b]`` goes to position ``positions[b] + t`` of batch element b. Under
    ``jax.jit`` with donated pages (``donate_argnums``) the update is in place.

    Args:
        pages: (P, U, K, H), or (P, K, U, H) with ``heads_first``.
        new: (B, T, K, H); cast to the dtype of pages.
        page_table: (B, n) in int32. Tokens for a page out of range, or after a batch element's
            last page, are dropped.
        positions: (B,) in int32, the number of tokens that each batch element already has.
        seq_lengths: (B,) in int32, how many of the T tokens are valid; by default all.
        heads_first: pages are (P, K, U, H).

    Returns: the shape and dtype of pages.

    Raises:
        GraphError: shapes or dtypes do not fit.

    Source: Kwon et al. 2023, arXiv:2309.06180.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> pages, new = jnp.zeros((9, 16, 2, 64)), jnp.ones((2, 1, 2, 64))
        >>> table, lengths = jnp.array([[3, 1], [0, 8]], "int32"), jnp.array([20, 7], "int32")
        >>> pages = jc.ops.write_pages(pages, new, table, lengths)
        >>> bool((pages[1, 4] == 1).all() and (pages[0, 7] == 1).all())
        True
    """
    pages, new = operands((4,), _FORMS, pages=pages, new=new)
    count, tokens = pages.shape[0], pages.shape[2 if heads_first else 1]
    sizes = (pages.shape[1 if heads_first else 2], pages.shape[3])
    batch, length = new.shape[:2]
    if new.shape[2:] != sizes:
        raise GraphError(
            "new does not fit the pages",
            expected=f"(B, T, K, H) with K, H = {list(sizes)}",
            got=str(list(new.shape)),
        )
    table = arguments.integers("page_table", page_table, (batch, "n"))
    first = arguments.integers("positions", positions, (batch,))
    valid = seq_lengths
    if valid is not None:
        valid = arguments.integers("seq_lengths", valid, (batch,))
    if count == 0:
        return pages

    def run(pages: Any, new: Any, table: Any, first: Any, valid: Any) -> jax.Array:
        step = jnp.arange(length, dtype=jnp.int32)[None, :]
        at = first[:, None] + step
        page = jnp.take_along_axis(table, at // tokens, axis=1, mode="fill", fill_value=count)
        there = (at >= 0) & (page >= 0)
        if valid is not None:
            there &= step < valid[:, None]
        page, slot = jnp.where(there, page, count), at % tokens  # page ``count`` is dropped
        place = (page, slice(None), slot) if heads_first else (page, slot)
        return pages.at[place].set(new.astype(pages.dtype), mode="drop")

    arrays = pages, new, table, first, valid
    return without_explicit_axes(run, arrays, jax.typeof(pages).sharding.spec)(*arrays)


def _table(name: str, x: Any, batch: int, count: int) -> jax.Array:
    """(B, 1, n, 1), with indices of existing pages."""
    return jnp.clip(arguments.integers(name, x, (batch, "n")), 0, count - 1)[:, None, :, None]
