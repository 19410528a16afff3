"""The models of ``python -m benchmarks run flax``, and tiny ones of them for any machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import gpt2, resnet, vit
from .case import Batch, FlaxCase
from .tables import CUDNN, PLAIN

_DTYPE = jnp.bfloat16  # of the computation; parameters are float32


def cases(tiny: bool = False) -> list[FlaxCase]:
    """ResNet-50, ViT-B/16 and GPT-2 124M; or the same models of few layers and features."""
    if tiny:
        attending = {"width": 32, "depth": 1, "heads": 2}
        return [
            _resnet("resnet/tiny", 4, 32, 10, model={"blocks": (1, 1), "width": 8}),
            _vit("vit/tiny", 4, 16, 10, model={"patch": 4, **attending}),
            _gpt2("gpt2/tiny", 2, 32, 64, model=attending),
        ]
    return [
        _resnet("resnet50/batch-256", 256, 224, 1000, known={PLAIN: 37.9}, goal=32.8),
        _vit("vit-b-16/batch-256", 256, 224, 1000, known={PLAIN: 89.0, CUDNN: 68.0}, goal=59.0),
        _gpt2("gpt2-124m/32x1024", 32, 1024, 50304, known={PLAIN: 125.8, CUDNN: 66.0}, goal=60.0),
        _gpt2("gpt2-124m/4x8192", 4, 8192, 50304, known={CUDNN: 100.6}, goal=80.0),
    ]


def _resnet(
    name: str, batch: int, size: int, classes: int, model: dict[str, Any] | None = None, **more: Any
) -> FlaxCase:
    return FlaxCase(
        name,
        f"images of {size} x {size}; SGD with momentum",
        partial(resnet.ResNet, classes=classes, dtype=_DTYPE, **(model or {})),
        _images(batch, size, classes),
        optax.sgd(0.02, momentum=0.9),
        batch,
        "images",
        lambda made: batch * resnet.multiply_adds(made, size),
        attends=False,
        **more,
    )


def _vit(
    name: str, batch: int, size: int, classes: int, model: dict[str, Any] | None = None, **more: Any
) -> FlaxCase:
    return FlaxCase(
        name,
        f"images of {size} x {size}, the head reads the patches' mean; AdamW",
        partial(vit.ViT, size=size, classes=classes, dtype=_DTYPE, **(model or {})),
        _images(batch, size, classes),
        optax.adamw(1e-4),
        batch,
        "images",
        lambda made: batch * vit.multiply_adds(made),
        **more,
    )


def _gpt2(
    name: str,
    batch: int,
    length: int,
    vocabulary: int,
    model: dict[str, Any] | None = None,
    **more: Any,
) -> FlaxCase:
    def tokens(key: jax.Array) -> Batch:
        drawn = jax.random.randint(key, (batch, length + 1), 0, vocabulary)
        return drawn[:, :-1], drawn[:, 1:]

    return FlaxCase(
        name,
        f"vocabulary of {vocabulary}, logits by the tokens' embeddings; AdamW",
        partial(gpt2.GPT2, vocabulary=vocabulary, length=length, dtype=_DTYPE, **(model or {})),
        tokens,
        optax.adamw(1e-4),
        batch * length,
        "tokens",
        lambda made: batch * gpt2.multiply_adds(made, length),
        **more,
    )


def _images(batch: int, size: int, classes: int) -> Callable[[jax.Array], Batch]:
    def draw(key: jax.Array) -> Batch:
        pixels, kinds = jax.random.split(key)
        images = jax.random.normal(pixels, (batch, size, size, 3), _DTYPE)
        return images, jax.random.randint(kinds, (batch,), 0, classes)

    return draw
