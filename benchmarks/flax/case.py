"""A model with its data and optimizer, and a step of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .tables import CUDNN, OURS, PLAIN

Batch = tuple[jax.Array, jax.Array]


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
        multiply_adds: of the model's forward of one batch.
        attends: whether the model takes an ``attention_fn``.
        known: ms that were measured on an H200 before, by side.
        goal: ms for an H200.
    """

    name: str
    what: str
    model: Callable[..., nnx.Module]
    batch: Callable[[jax.Array], Batch]
    optimizer: optax.GradientTransformation
    items: int
    unit: str
    multiply_adds: Callable[[Any], int]
    attends: bool = True
    known: Mapping[str, float] | None = None
    goal: float | None = None

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that differ: without attention there is no other function of it."""
        return (OURS, PLAIN, CUDNN) if self.attends else (OURS, PLAIN)

    def flops(self, model: nnx.Module) -> int:
        """Of a step: those of the forward, and twice as many of its gradients."""
        return 3 * 2 * self.multiply_adds(model)

    def make(self, side: str) -> nnx.Module:
        """The model as this side's user writes it, before any layer is swapped."""
        more = {"attention_fn": attention_by_cudnn} if side == CUDNN else {}
        drawn = jax.random.key(0, impl="rbg")  # whose many draws compile in a quarter of the time
        return self.model(rngs=nnx.Rngs(drawn), **more)


def attention_by_cudnn(
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


@nnx.jit(donate_argnums=(0, 1))
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
