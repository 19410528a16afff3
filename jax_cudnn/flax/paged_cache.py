"""A cache of keys and values in pages, as Variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import ops
from .._core.errors import GraphError


class PagedCache(nnx.Module):
    """Keys and values of a decoding ``MultiHeadAttention``, in pages that a table names.

    Variables, all ``nnx.Cache``: ``key_pages`` and ``value_pages`` (pages, page_size, num_kv_heads,
    head_dim), ``page_table`` (batch, ceil(max_length / page_size)) and ``lengths`` (batch,), both
    int32. At first each example has pages of its own, one after the other; with fewer ``pages``
    than that takes, the table is to be written before the first call. A server gives pages to
    examples by writing into the table, and an example begins anew with a length of 0; entries
    behind its length may be anything. Tokens behind the last page of an example are not kept: a
    length beyond that is for the server to keep from happening, which knows it before the call.

    Args:
        batch: number of examples.
        max_length: the largest length of an example, to which the table has room.
        num_kv_heads: heads of keys and values.
        head_dim: their size.
        page_size: tokens in a page.
        pages: how many pages there are, by default as many as the table names.
        dtype: of keys and values.

    Raises:
        GraphError: page_size is no integer above 0; more tokens in one call than an example has
            room for; other examples than the cache has.

    Source: Kwon et al. 2023, arXiv:2309.06180; see
    :func:`jax_cudnn.ops.paged_dot_product_attention`.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> cache = jnn.PagedCache(2, 100, 4, 8, page_size=16)
        >>> x = jnp.ones((2, 1, 4, 8))
        >>> cache(x, x, x).shape, cache.key_pages.shape, cache.lengths[...].tolist()
        ((2, 1, 4, 8), (14, 16, 4, 8), [1, 1])
    """

    def __init__(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 16,
        pages: int | None = None,
        dtype: Any = jnp.float32,
    ):
        check_page_size(page_size)
        each = -(-max_length // page_size)
        count = batch * each if pages is None else pages
        shape = count, page_size, num_kv_heads, head_dim
        self.key_pages = nnx.Cache(jnp.zeros(shape, dtype))
        self.value_pages = nnx.Cache(jnp.zeros(shape, dtype))
        table = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
        self.page_table = nnx.Cache(table)
        self.lengths = nnx.Cache(jnp.zeros(batch, jnp.int32))

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, **named: Any
    ) -> jax.Array:
        """Attention of new tokens to those of the cache and to themselves, up to each one's own
        position.

        Args:
            query: (batch, T, N, head_dim).
            key: (batch, T, num_kv_heads, head_dim), which the cache has then.
            value: likewise.
            named: what :func:`jax_cudnn.ops.paged_dot_product_attention` takes.

        Returns: (batch, T, N, head_dim), of query's dtype.
        """
        table, lengths = self.page_table[...], self.lengths[...]
        if key.shape[0] != table.shape[0]:
            raise GraphError(
                "the cache is of another batch",
                expected=f"{table.shape[0]} examples, those of the page table",
                got=f"{key.shape[0]}",
                fix="call init_cache with the shape of the inputs, or make a PagedCache of as many",
            )
        room = table.shape[1] * self.key_pages.shape[1]
        if key.shape[1] > room:
            raise GraphError(
                "more tokens than a paged cache has room for",
                expected=f"up to {room} for an example: {table.shape[1]} pages in its row",
                got=f"{key.shape[1]} at once",
                fix="call init_cache with the largest length, or give a larger max_length",
            )
        for pages, new in ((self.key_pages, key), (self.value_pages, value)):
            pages[...] = ops.write_pages(pages[...], new, table, lengths)
        self.lengths[...] = lengths + key.shape[1]
        keys, values = self.key_pages[...], self.value_pages[...]
        out = ops.paged_dot_product_attention(
            query.astype(keys.dtype),
            keys,
            values,
            table,
            key_value_seq_lengths=self.lengths[...],
            is_causal=True,
            **named,
        )
        return out.astype(query.dtype)


def check_page_size(page_size: int) -> None:
    """GraphError for what is no number of tokens."""
    whole = isinstance(page_size, (int, np.integer)) and not isinstance(page_size, bool)
    if not whole or page_size < 1:
        raise GraphError(
            "page_size is no number of tokens", expected="an integer > 0", got=repr(page_size)
        )
