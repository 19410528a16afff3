"""A paged cache of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import ops
from .._core.errors import GraphError


class PagedCache(nnx.Module):
    """The keys and values of a decoding ``MultiHeadAttention``, in pages listed by a page table.

    Variables, all ``nnx.Cache``: ``key_pages`` and ``value_pages`` (pages, page_size, num_kv_heads,
    head_dim); ``page_table`` (batch, ceil(max_length / page_size)) and ``lengths`` (batch,), both
    int32. Initially each sequence has its own consecutive pages; with fewer ``pages`` than that,
    write the table before the first call. A server assigns pages by writing to the table, and
    starts a sequence by setting its length to 0; table entries past its length are ignored. Tokens
    past the last page of a sequence are lost: the server must prevent this before the call.

    Args:
        batch: number of sequences.
        max_length: the largest length of a sequence, which sets the width of the table.
        num_kv_heads: number of key and value heads.
        head_dim: size of each head.
        page_size: tokens per page.
        pages: number of pages; by default one for each entry of the table.
        dtype: dtype of keys and values.

    Raises:
        GraphError: page_size is not a positive integer; a call has more tokens than a sequence has
            room for, or another batch size than the cache.

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
        """Appends new keys and values to the cache; each new token attends to all tokens up to its
        own position.

        Args:
            query: (batch, T, N, head_dim).
            key: (batch, T, num_kv_heads, head_dim).
            value: like key.
            **named: other arguments of :func:`jax_cudnn.ops.paged_dot_product_attention`.

        Returns:
            (batch, T, N, head_dim), in query's dtype.
        """
        table, lengths = self.page_table[...], self.lengths[...]
        if key.shape[0] != table.shape[0]:
            raise GraphError(
                "the keys and the cache have different batch sizes",
                expected=f"{table.shape[0]} sequences, as in the page table",
                got=f"{key.shape[0]}",
                fix="call init_cache with the shape of the inputs, or make a larger PagedCache",
            )
        room = table.shape[1] * self.key_pages.shape[1]
        if key.shape[1] > room:
            raise GraphError(
                "more tokens than the paged cache has room for",
                expected=f"up to {room} per sequence: {table.shape[1]} pages per table row",
                got=f"{key.shape[1]} in one call",
                fix="call init_cache with the largest length, or pass a larger max_length",
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
    """Raises GraphError if page_size is not a positive integer."""
    whole = isinstance(page_size, (int, np.integer)) and not isinstance(page_size, bool)
    if not whole or page_size < 1:
        raise GraphError(
            "page_size is not a number of tokens", expected="an integer > 0", got=repr(page_size)
        )
