"""The blocks that both transformers are made of: attention and feed-forward behind norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Attention = Callable[..., jax.Array]


class Block(nnx.Module):
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``; x (N, T, width)."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        attention_fn: Attention = nnx.dot_product_attention,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.causal = causal
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, attention_fn=attention_fn, decode=False, dtype=dtype, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=self.causal)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


def multiply_adds(width: int, depth: int, tokens: int, *, causal: bool = False) -> int:
    """Of the forward of one sequence; of causal attention those products that count, the half."""
    attention = 2 * tokens**2 * width // (2 if causal else 1)
    return depth * (12 * tokens * width**2 + attention)
