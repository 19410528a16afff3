"""Common functions for ``score_mod=``.

Each is, or returns, a function ``f(score, b, h, q, kv, *operands)``, see
:func:`jax_cudnn.ops.dot_product_attention`. Equal arguments return the same function, which is
traced once.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .._core.errors import GraphError, shown
from .._core.graph.dtypes import float32_range
from .arguments import integer

__all__ = ["documents", "prefix", "softcap"]
__dir__ = __all__.copy  # dir() shows these alone


def softcap(cap: float) -> Callable[..., Any]:
    """Soft-cap the scores: ``cap * tanh(score / cap)``.

    Args:
        cap: the bound, a Python scalar above 0; 50 in Gemma 2.

    Raises:
        GraphError: cap is not a positive scalar.

    Source: Gemma Team 2024, arXiv:2408.00118.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((2, 128, 8, 64), "bfloat16")
        >>> capped = jc.ops.score_mods.softcap(30.0)
        >>> jc.ops.dot_product_attention(q, q, q, is_causal=True, score_mod=capped).shape
        (2, 128, 8, 64)
    """
    number = isinstance(cap, numbers.Real) and not isinstance(cap, bool)
    if not number or not float32_range("cap", cap) > 0:
        raise GraphError("cap is not valid", expected="a Python scalar above 0", got=shown(cap))
    return _capped(float(cap))


@functools.lru_cache(maxsize=256)
def _capped(cap: float) -> Callable[..., Any]:
    def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return cap * jnp.tanh(score * (1 / cap))

    return _showing(capped)


def prefix(length: int) -> Callable[..., Any]:
    """Causal attention with a prefix of keys that all queries see (a prefix language model).

    Args:
        length: the number of keys in the prefix, at least 0.

    Raises:
        GraphError: length is not a non-negative integer.

    Source: Raffel et al. 2020, arXiv:1910.10683.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((2, 128, 8, 64), "bfloat16")
        >>> seen = jc.ops.score_mods.prefix(16)
        >>> jc.ops.dot_product_attention(q, q, q, score_mod=seen).shape
        (2, 128, 8, 64)
    """
    return _prefixed(integer("length", length, 0))


@functools.lru_cache(maxsize=256)
def _prefixed(length: int) -> Callable[..., Any]:
    def seen(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return jnp.where((kv <= q) | (kv < length), score, -jnp.inf)

    return _showing(seen)  # each query sees at least the first key


def documents(score: Any, b: Any, h: Any, q: Any, kv: Any, of_queries: Any, of_keys: Any) -> Any:
    """Hide the keys of other documents, for sequences that hold several documents.

    Pass ``score_mod_operands=(of_queries, of_keys)`` in int32, (B, 1, T, 1) and (B, 1, 1, S): the
    index of each token's document. The second is copied to (B, 1, T, S) in memory for cuDNN;
    :func:`jax_cudnn.ops.packed_dot_product_attention` costs less for contiguous documents.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((1, 6, 1, 8))
        >>> document = jnp.array([0, 0, 0, 1, 1, 1])
        >>> operands = document.reshape(1, 1, 6, 1), document.reshape(1, 1, 1, 6)
        >>> jc.ops.dot_product_attention(
        ...     q, q, q, score_mod=jc.ops.score_mods.documents, score_mod_operands=operands
        ... ).shape
        (1, 6, 1, 8)
    """
    return jnp.where(of_queries == of_keys, score, -jnp.inf)


def _showing(function: Any) -> Callable[..., Any]:
    """Mark a function that leaves each query at least one key, so that statistics are finite."""
    function.hides_queries = False
    return function
