"""A vision transformer: ViT without dropout, whose head reads the mean of the patches.

Sources: A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020; without a token of its own
for the class L. Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .transformer import Attention, Block
from .transformer import multiply_adds as of_blocks


class ViT(nnx.Module):
    """ViT-B/16 by default; images (N, size, size, 3) to logits (N, classes).

    There are as many tokens as patches, 196 by default: of an odd number, as with a token for the
    class, ``jax.nn``'s cuDNN attention has no gradients.
    """

    def __init__(
        self,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        classes: int = 1000,
        attention_fn: Attention = nnx.dot_product_attention,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.patches = nnx.Conv(
            3, width, (patch, patch), strides=patch, padding="VALID", dtype=dtype, rngs=rngs
        )
        length = (size // patch) ** 2
        normal = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(normal(rngs.params(), (1, length, width)))
        how: dict[str, Any] = {"attention_fn": attention_fn, "dtype": dtype, "rngs": rngs}
        self.blocks = nnx.List(Block(width, heads, **how) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


def multiply_adds(model: ViT) -> int:
    """Of the forward of one image."""
    _, tokens, width = model.positions.shape
    blocks = of_blocks(width, len(model.blocks), tokens)
    patches = tokens * math.prod(model.patches.kernel_shape)
    return blocks + patches + width * model.head.out_features
