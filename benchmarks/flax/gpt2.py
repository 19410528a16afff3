"""A language model: GPT-2 without dropout.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import Attention, Block
from .transformer import multiply_adds as of_blocks


class GPT2(nnx.Module):
    """GPT-2 of 124M parameters by default; tokens (N, T) to logits (N, T, vocabulary).

    The vocabulary of 50257 is padded to a multiple of 128, and the logits are products with the
    tokens' own embeddings.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        attention_fn: Attention = nnx.dot_product_attention,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=normal, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=normal, dtype=dtype, rngs=rngs)
        how: dict[str, Any] = {"attention_fn": attention_fn, "dtype": dtype, "rngs": rngs}
        self.blocks = nnx.List(Block(width, heads, causal=True, **how) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def multiply_adds(model: GPT2, tokens: int) -> int:
    """Of the forward of one sequence of so many tokens."""
    width, vocabulary = model.tokens.features, model.tokens.num_embeddings
    blocks = of_blocks(width, len(model.blocks), tokens, causal=True)
    return blocks + tokens * width * vocabulary
