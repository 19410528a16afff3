"""Training of Flax's models on random data: a model, its data and optimizer, and a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_cudnn as jc

from .models import GPT2, Gemma2, ResNet, UNet3D, ViT, multiply_adds
from .tables import CUDNN, LOSS, OURS, PLAIN, STEP, WHOLE

Batch = tuple[jax.Array, jax.Array]
_TINY_GEMMA = {"heads": (4, 2), "size": 16, "hidden": 64, "window": 16}
_DTYPE = jnp.bfloat16  # of the computation; parameters are float32


@dataclass(frozen=True)
class FlaxCase:
    """A model in plain Flax, trained on random data.

    Attributes:
        name: model and size.
        what: one line for the reader.
        model: makes it, of ``rngs``, and of an ``attention_fn`` where it attends.
        batch: inputs and labels, drawn by a key on the device.
        optimizer: of optax.
        items: how many of ``unit`` a step is of.
        attends: whether the model takes an ``attention_fn``.
        steps: whether the loss and the whole step are accelerated, too.
    """

    name: str
    what: str
    model: Callable[..., nnx.Module]
    batch: Callable[[jax.Array], Batch]
    optimizer: optax.GradientTransformation
    items: int
    unit: str
    attends: bool = True
    steps: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that differ: without attention there is no other function of it."""
        return (OURS, PLAIN, WHOLE, *([LOSS, STEP] * self.steps), *([CUDNN] * self.attends))

    def flops(self, model: nnx.Module) -> int:
        """Of a step: those of the forward, and twice as many of its gradients."""
        inputs, _ = jax.eval_shape(self.batch, jax.random.key(0))
        return 3 * 2 * multiply_adds(model, inputs)

    def make(self, side: str) -> nnx.Module:
        """The model as this side's user writes it, before any layer is swapped."""
        more = {"attention_fn": _attention_by_cudnn} if side == CUDNN else {}
        drawn = jax.random.key(0, impl="rbg")  # whose many draws compile in a quarter of the time
        return self.model(rngs=nnx.Rngs(drawn), **more)


def _attention_by_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **others: Any,  # without dropout they say nothing
) -> jax.Array:
    """``jax.nn``'s attention on cuDNN, as an ``attention_fn`` of Flax."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=is_causal, implementation="cudnn"
    )


def step(
    model: nnx.Module, optimizer: nnx.Optimizer, inputs: jax.Array, labels: jax.Array
) -> jax.Array:
    """One update of a classifier; the loss before it, of logits in float32."""

    def loss_of(model: nnx.Module) -> jax.Array:
        logits = model(inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def loss_step(
    model: nnx.Module, optimizer: nnx.Optimizer, inputs: jax.Array, labels: jax.Array
) -> jax.Array:
    """As :func:`step`, with the loss in ``jc.accelerate``, of a model without further state."""
    graph, parameters = nnx.split(model)

    def loss_of(parameters: nnx.State, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, parameters)(inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grad = jax.value_and_grad(jc.accelerate(loss_of))
    loss, gradients = grad(parameters, inputs, labels)
    optimizer.update(model, gradients)
    return loss


def cases(tiny: bool = False) -> list[FlaxCase]:
    """Models at the sizes that people train; or the same models of few layers and features."""
    if tiny:
        attending = {"width": 32, "depth": 1, "heads": 4}
        return [
            _resnet("resnet/tiny", 4, 32, 10, {"blocks": (1, 1), "width": 8}),
            _vit("vit/tiny", 4, 16, 10, {"patch": 4, **attending}),
            _gpt2("gpt2/tiny", 2, 32, 64, attending, steps=True),
            _gemma2("gemma2/tiny", 2, 32, 64, {**_TINY_GEMMA, "width": 32, "depth": 2}),
            _unet("unet3d/tiny", 2, 8, {"width": 8, "levels": 2}),
        ]
    return [
        _resnet("resnet50/batch-256", 256, 224, 1000),
        _vit("vit-b-16/batch-256", 256, 224, 1000, steps=True),
        _gpt2("gpt2-124m/32x1024", 32, 1024, 50304, steps=True),
        _gpt2("gpt2-124m/4x8192", 4, 8192, 50304),
        _gpt2("gpt-1.3b/4x2048", 4, 2048, 50304, {"width": 2048, "depth": 24, "heads": 16}),
        _gemma2("gemma2-8-layers/2x4096", 2, 4096, 32768),
        _gemma2("gemma2-8-layers/1x8192", 1, 8192, 32768, {"window": 4096}),
        _unet("unet3d/2x128", 2, 128),
        _unet("unet3d/2x64", 2, 64),
    ]


def _resnet(
    name: str, batch: int, size: int, classes: int, model: Any = None, **more: Any
) -> FlaxCase:
    return FlaxCase(
        name,
        f"images of {size} x {size}; SGD with momentum",
        partial(ResNet, classes=classes, dtype=_DTYPE, **(model or {})),
        partial(_images, batch, size, classes),
        optax.sgd(0.02, momentum=0.9),
        batch,
        "images",
        attends=False,
        **more,
    )


def _vit(
    name: str, batch: int, size: int, classes: int, model: Any = None, **more: Any
) -> FlaxCase:
    return FlaxCase(
        name,
        f"images of {size} x {size}, the head reads the patches' mean; AdamW",
        partial(ViT, size=size, classes=classes, dtype=_DTYPE, **(model or {})),
        partial(_images, batch, size, classes),
        optax.adamw(1e-4),
        batch,
        "images",
        **more,
    )


def _gpt2(
    name: str, batch: int, length: int, vocabulary: int, model: Any = None, **more: Any
) -> FlaxCase:
    return FlaxCase(
        name,
        f"vocabulary of {vocabulary}, logits by the tokens' embeddings; AdamW",
        partial(GPT2, vocabulary=vocabulary, length=length, dtype=_DTYPE, **(model or {})),
        partial(_tokens, batch, length, vocabulary),
        optax.adamw(1e-4),
        batch * length,
        "tokens",
        **more,
    )


def _gemma2(name: str, batch: int, length: int, vocabulary: int, model: Any = None) -> FlaxCase:
    model = {"window": 1024, **(model or {})}
    return FlaxCase(
        name,
        f"vocabulary of {vocabulary}, scores capped at 50, windows of {model['window']}; AdamW",
        partial(Gemma2, vocabulary=vocabulary, dtype=_DTYPE, **model),
        partial(_tokens, batch, length, vocabulary),
        optax.adamw(1e-4),
        batch * length,
        "tokens",
        attends=False,
    )


def _unet(name: str, batch: int, size: int, model: Any = None) -> FlaxCase:
    return FlaxCase(
        name,
        f"volumes of {size} x {size} x {size}; SGD with momentum",
        partial(UNet3D, dtype=_DTYPE, **(model or {})),
        partial(_volumes, batch, size),
        optax.sgd(0.02, momentum=0.9),
        batch,
        "volumes",
        attends=False,
    )


def _tokens(batch: int, length: int, vocabulary: int, key: jax.Array) -> Batch:
    drawn = jax.random.randint(key, (batch, length + 1), 0, vocabulary)
    return drawn[:, :-1], drawn[:, 1:]


def _volumes(batch: int, size: int, key: jax.Array) -> Batch:
    voxels, kinds = jax.random.split(key)
    space = (batch, size, size, size)
    volumes = jax.random.normal(voxels, (*space, 4), _DTYPE)
    return volumes, jax.random.randint(kinds, space, 0, 4)


def _images(batch: int, size: int, classes: int, key: jax.Array) -> Batch:
    pixels, kinds = jax.random.split(key)
    images = jax.random.normal(pixels, (batch, size, size, 3), _DTYPE)
    return images, jax.random.randint(kinds, (batch,), 0, classes)
