"""Models in plain Flax, without dropout: ResNet v1.5, a U-Net of volumes, ViT, GPT-2 and Gemma 2.

Sources: K. He et al., "Deep Residual Learning for Image Recognition", 2015, with strides in the 3x3
convolutions; A. Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, whose head reads the
mean of the patches (L. Beyer et al., "Better plain ViT baselines for ImageNet-1k", 2022);
A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; O. Cicek et al.,
"3D U-Net", 2016; Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Bottleneck(nnx.Module):
    """Convolutions of 1x1, 3x3 and 1x1 beside the identity, or beside a projection."""

    def __init__(
        self, inputs: int, features: int, stride: int, *, dtype: Any = None, rngs: nnx.Rngs
    ):
        conv = partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
        norm = partial(nnx.BatchNorm, momentum=0.9, dtype=dtype, rngs=rngs)
        outputs = 4 * features
        self.conv1 = conv(inputs, features, (1, 1))
        self.norm1 = norm(features)
        self.conv2 = conv(features, features, (3, 3), strides=stride, padding=1)
        self.norm2 = norm(features)
        self.conv3 = conv(features, outputs, (1, 1))
        self.norm3 = norm(outputs, scale_init=nnx.initializers.zeros_init())
        self.projects = stride != 1 or inputs != outputs
        if self.projects:
            self.conv4 = conv(inputs, outputs, (1, 1), strides=stride)
            self.norm4 = norm(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.projects:
            x = self.norm4(self.conv4(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """ResNet-50 by default; images (N, H, W, 3) to logits (N, classes)."""

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        *,
        width: int = 64,
        classes: int = 1000,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.stem = nnx.Conv(3, width, (7, 7), strides=2, padding=3, use_bias=False, **how)
        self.norm = nnx.BatchNorm(width, momentum=0.9, **how)
        made, inputs = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                features, stride = width * 2**stage, 2 if stage and not number else 1
                made.append(Bottleneck(inputs, features, stride, **how))
                inputs = 4 * features
        self.blocks = nnx.List(made)
        self.head = nnx.Linear(inputs, classes, **how)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class Block(nnx.Module):
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``; x (N, T, width)."""

    def __init__(
        self, width: int, heads: int, causal: bool, attention_fn: Any, dtype: Any, rngs: nnx.Rngs
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.causal = causal
        self.norm1 = nnx.LayerNorm(width, **how)
        self.attention = nnx.MultiHeadAttention(
            heads, width, attention_fn=attention_fn, decode=False, **how
        )
        self.norm2 = nnx.LayerNorm(width, **how)
        self.up = nnx.Linear(width, 4 * width, **how)
        self.down = nnx.Linear(4 * width, width, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), is_causal=self.causal)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


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
        attention_fn: Any = nnx.dot_product_attention,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        window = (patch, patch)
        self.patches = nnx.Conv(3, width, window, strides=patch, padding="VALID", **how)
        normal = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(normal(rngs.params(), (1, (size // patch) ** 2, width)))
        self.blocks = nnx.List(
            Block(width, heads, False, attention_fn, **how) for _ in range(depth)
        )
        self.norm = nnx.LayerNorm(width, **how)
        self.head = nnx.Linear(width, classes, **how)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


class GPT2(nnx.Module):
    """GPT-2 of 124M parameters by default; tokens (N, T) to logits (N, T, vocabulary).

    The vocabulary of 50257 is padded to a multiple of 128, and the logits are products with the
    tokens' own embeddings. ``out_sharding`` is that of the embedded tokens, on explicit axes.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        attention_fn: Any = nnx.dot_product_attention,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        normal = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=normal, **how)
        self.positions = nnx.Embed(length, width, embedding_init=normal, **how)
        self.blocks = nnx.List(Block(width, heads, True, attention_fn, **how) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, **how)

    def __call__(self, tokens: jax.Array, out_sharding: Any = None) -> jax.Array:
        x = self.tokens(tokens, out_sharding) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


class UNet3D(nnx.Module):
    """A U-Net of volumes (N, D, H, W, channels) to logits (N, D, H, W, classes).

    Two convolutions of 3x3x3 with batch norm and relu at each of ``levels`` sizes on the way down
    and up, of which each size has half of the voxels by side and twice the features.
    """

    def __init__(
        self,
        channels: int = 4,
        classes: int = 4,
        width: int = 32,
        levels: int = 4,
        *,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        widths = [width * 2**level for level in range(levels)]

        def twice(inputs: int, features: int) -> nnx.Sequential:
            layers = []
            for of in (inputs, features):
                layers += [
                    nnx.Conv(of, features, (3, 3, 3), use_bias=False, **how),
                    nnx.BatchNorm(features, momentum=0.9, **how),
                    nnx.relu,
                ]
            return nnx.Sequential(*layers)

        inputs = [channels, *widths[:-1]]
        self.down = nnx.List(twice(a, b) for a, b in zip(inputs, widths, strict=True))
        pairs = [*itertools.pairwise(widths)][::-1]
        self.grow = nnx.List(
            nnx.ConvTranspose(wide, thin, (2, 2, 2), strides=(2, 2, 2), **how)
            for thin, wide in pairs
        )
        self.up = nnx.List(twice(2 * thin, thin) for thin, _ in pairs)
        self.head = nnx.Conv(width, classes, (1, 1, 1), **how)

    def __call__(self, volumes: jax.Array) -> jax.Array:
        x, kept = volumes, []
        for level, block in enumerate(self.down):
            if level:
                x = nnx.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
            x = block(x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(jnp.concatenate([grow(x), kept.pop()], axis=-1))
        return self.head(x)


def _cap(x: jax.Array, limit: float) -> jax.Array:
    return limit * jnp.tanh(x / limit)


class GemmaBlock(nnx.Module):
    """Grouped attention of capped scores, in a window or not, and a gated feed-forward, each
    between two RMS norms; x (N, T, width)."""

    def __init__(
        self,
        width: int,
        heads: tuple[int, int],
        size: int,
        hidden: int,
        window: int | None,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        linear = partial(nnx.LinearGeneral, use_bias=False, **how)
        self.window = window
        self.norms = nnx.List(nnx.RMSNorm(width, **how) for _ in range(4))
        self.query = linear(width, (heads[0], size))
        self.key = linear(width, (heads[1], size))
        self.value = linear(width, (heads[1], size))
        self.out = linear((heads[0], size), width, axis=(-2, -1))
        self.gate = nnx.Linear(width, hidden, use_bias=False, **how)
        self.up = nnx.Linear(width, hidden, use_bias=False, **how)
        self.down = nnx.Linear(hidden, width, use_bias=False, **how)

    def attend(self, x: jax.Array) -> jax.Array:
        query, key, value = self.query(x), self.key(x), self.value(x)
        batch, length, heads, size = query.shape
        groups = key.shape[2]
        query = query.reshape(batch, length, groups, heads // groups, size) * size**-0.5
        scores = _cap(jnp.einsum("btghd,bsgd->bghts", query, key), 50.0)
        row, column = jnp.arange(length)[:, None], jnp.arange(length)
        seen = row >= column
        if self.window is not None:
            seen &= row - column < self.window
        weights = jax.nn.softmax(jnp.where(seen, scores, -2.3e38), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bghts,bsgd->btghd", weights, value)
        return self.out(mixed.reshape(batch, length, heads, size))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.norms[1](self.attend(self.norms[0](x)))
        y = self.norms[2](x)
        return x + self.norms[3](self.down(nnx.gelu(self.gate(y)) * self.up(y)))


class Gemma2(nnx.Module):
    """Tokens (N, T) to logits (N, T, vocabulary), as Gemma 2 without its code of positions.

    By default 8 layers of the width of its 2B, with heads of 128 features as those of its 27B;
    every second layer sees a window.
    """

    def __init__(
        self,
        vocabulary: int = 32768,
        width: int = 2304,
        depth: int = 8,
        heads: tuple[int, int] = (16, 8),
        size: int = 128,
        hidden: int = 9216,
        window: int = 1024,
        *,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        how: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        normal = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(vocabulary, width, embedding_init=normal, **how)
        self.blocks = nnx.List(
            GemmaBlock(width, heads, size, hidden, None if layer % 2 else window, **how)
            for layer in range(depth)
        )
        self.norm = nnx.RMSNorm(width, **how)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens)
        x = x * jnp.asarray(math.sqrt(x.shape[-1]), x.dtype)
        for block in self.blocks:
            x = block(x)
        return _cap(self.tokens.attend(self.norm(x)).astype(jnp.float32), 30.0)


def multiply_adds(model: nnx.Module, inputs: jax.ShapeDtypeStruct) -> int:
    """Of the products and convolutions of a forward; of causal attention's products the half."""

    def of(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                total += of(inner) if hasattr(inner, "eqns") else 0
            shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
            if equation.primitive.name == "dot_general":
                (contracted, _), (batch, _) = equation.params["dimension_numbers"]
                size = math.prod(shapes[2]) * math.prod(shapes[0][i] for i in contracted)
                total += size // (2 if causal and batch else 1)
            elif equation.primitive.name == "conv_general_dilated":
                features = equation.params["dimension_numbers"].rhs_spec[0]
                window = math.prod(shapes[1]) // shapes[1][features]
                window //= math.prod(equation.params["lhs_dilation"])
                total += math.prod(shapes[2]) * window
        return total

    blocks = getattr(model, "blocks", ())
    causal = any(getattr(block, "causal", False) for block in blocks)
    graphdef, state = nnx.split(model)
    closed = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, inputs)
    return of(closed.jaxpr)
