"""Functions of attention's scores, ready for ``score_mod=``.

Each is a function ``f(score, b, h, q, kv, *operands)`` as users write them, see
:func:`jax_cudnn.ops.dot_product_attention`. Equal ones are traced once: they are values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.node import float32_range


@dataclass(frozen=True)
class softcap:
    """Bounds the scores: ``cap * tanh(score / cap)``.

    Args:
        cap: the bound, above 0; 50 in Gemma 2.

    Raises GraphError for others. Source: Gemma Team 2024, arXiv:2408.00118.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((2, 128, 8, 64), "bfloat16")
        >>> capped = jc.ops.score_mods.softcap(30.0)
        >>> jc.ops.dot_product_attention(q, q, q, is_causal=True, score_mod=capped).shape
        (2, 128, 8, 64)
    """

    cap: float
    hides_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not float32_range("cap", self.cap) > 0:
            raise GraphError("cap is not valid", expected="a number above 0", got=repr(self.cap))

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.cap * jnp.tanh(score * (1 / self.cap))


def documents(score: Any, b: Any, h: Any, q: Any, kv: Any, of_queries: Any, of_keys: Any) -> Any:
    """Hides the keys of other documents than the query's, where several are one sequence.

    Give ``score_mod_operands=(of_queries, of_keys)`` in int32, (B, 1, T, 1) and (B, 1, 1, S): the
    number of each token's document.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((1, 6, 1, 8))
        >>> number = jnp.array([0, 0, 0, 1, 1, 1])
        >>> given = number.reshape(1, 1, 6, 1), number.reshape(1, 1, 1, 6)
        >>> jc.ops.dot_product_attention(
        ...     q, q, q, score_mod=jc.ops.score_mods.documents, score_mod_operands=given
        ... ).shape
        (1, 6, 1, 8)
    """
    return jnp.where(of_queries == of_keys, score, -jnp.inf)


@dataclass(frozen=True)
class prefix:
    """Causal attention, but for the first keys, which all queries see (a prefix language model).

    Args:
        length: how many keys these are, at least 0.

    Raises GraphError for others. Source: Raffel et al. 2020, arXiv:1910.10683.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q = jnp.ones((2, 128, 8, 64), "bfloat16")
        >>> seen = jc.ops.score_mods.prefix(16)
        >>> jc.ops.dot_product_attention(q, q, q, score_mod=seen).shape
        (2, 128, 8, 64)
    """

    length: int
    hides_queries: ClassVar[bool] = False  # all see the first key

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 0:
            raise GraphError(
                "length is not valid", expected="an integer of at least 0", got=repr(self.length)
            )

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return jnp.where((kv <= q) | (kv < self.length), score, -jnp.inf)
