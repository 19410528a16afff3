"""A residual network for images: ResNet v1.5, whose strides are those of the 3x3 convolutions.

Source: K. He et al., "Deep Residual Learning for Image Recognition", 2015.
"""

from __future__ import annotations

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
        self.stride = stride
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
        self.stem = nnx.Conv(
            3, width, (7, 7), strides=2, padding=3, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        made, inputs = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                features, stride = width * 2**stage, 2 if stage and not number else 1
                made.append(Bottleneck(inputs, features, stride, dtype=dtype, rngs=rngs))
                inputs = 4 * features
        self.blocks = nnx.List(made)
        self.head = nnx.Linear(inputs, classes, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def multiply_adds(model: ResNet, size: int) -> int:
    """Of the forward of one image of ``size`` by ``size``: convolutions and the head."""
    size = math.ceil(size / 2)
    total = math.prod(model.stem.kernel_shape) * size**2
    size = math.ceil(size / 2)
    for block in model.blocks:
        total += math.prod(block.conv1.kernel_shape) * size**2
        size = math.ceil(size / block.stride)
        behind = [block.conv2, block.conv3, *([block.conv4] if block.projects else [])]
        total += sum(math.prod(conv.kernel_shape) for conv in behind) * size**2
    return total + model.head.in_features * model.head.out_features
