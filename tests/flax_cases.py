"""The layers that replace Flax's, by name, with arguments for tests."""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_cudnn.flax as jnn

RANDOM = {name: nnx.initializers.normal(1.0) for name in ("bias_init", "scale_init")}


@functools.cache
def followed(cls, activation):
    """A class of Flax followed by an activation."""

    def call(self, *args, **named):
        return getattr(jax.nn, activation)(cls.__call__(self, *args, **named))

    return type(cls.__name__, (cls,), {"__call__": call})


@dataclass(frozen=True)
class Case:
    ours: type
    arguments: tuple
    shape: tuple
    """The input's shape."""
    named: dict[str, Any] = field(default_factory=dict)

    activation: str | None = None
    """Our layer's activation; Flax's layer is followed by the function of jax.nn."""

    def made(self, cls, seed=0, **named):
        """A layer of our class or of Flax's, with random biases and scales."""
        taken = inspect.signature(self.ours).parameters
        random = {name: init for name, init in RANDOM.items() if name in taken}
        named = {**random, **self.named, **named}
        if self.activation and issubclass(cls, self.ours):
            named["activation"] = self.activation
        elif self.activation:
            cls = followed(cls, self.activation)
        return cls(*self.arguments, **named, rngs=nnx.Rngs(seed))

    def both(self, **named):
        """Our layer and Flax's, with equal parameters."""
        return (self.made(cls, **named) for cls in (self.ours, self.ours.flaxs()))


CASES = {
    "linear": Case(jnn.Linear, (8, 16), (4, 8)),
    "linear without bias": Case(jnn.Linear, (8, 16), (2, 4, 8), {"use_bias": False}),
    "linear_general": Case(jnn.LinearGeneral, ((2, 8), (4, 6)), (3, 2, 8), {"axis": (-2, -1)}),
    "einsum": Case(jnn.Einsum, ("btd,dhk->bthk", (8, 2, 4), (2, 4)), (3, 5, 8)),
    "conv": Case(jnn.Conv, (8, 16, (3, 3), 2), (2, 6, 6, 8)),
    "conv_transpose": Case(jnn.ConvTranspose, (8, 16, (2, 2), (2, 2)), (2, 4, 4, 8)),
    "batch_norm": Case(jnn.BatchNorm, (8,), (4, 5, 5, 8)),
    "batch_norm relu": Case(jnn.BatchNorm, (8,), (4, 5, 5, 8), activation="relu"),
    "layer_norm": Case(jnn.LayerNorm, (8,), (2, 4, 8)),
    "rms_norm": Case(jnn.RMSNorm, (8,), (2, 4, 8)),
    "group_norm": Case(jnn.GroupNorm, (8, 2), (2, 3, 3, 8)),
    "instance_norm": Case(jnn.InstanceNorm, (8,), (2, 3, 3, 8)),
    "attention": Case(
        jnn.MultiHeadAttention, (2, 8), (2, 12, 8), {"decode": False, "use_bias": False}
    ),
}


def gradients(layer, x, **named):
    """The result, and gradients of a weighted sum of it by Variables and input."""

    @nnx.jit
    def run(layer, x):
        def weighted(layer, x):
            y = layer(x, **named).astype(jnp.float32)
            weights = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return (y * weights).sum(), y

        return nnx.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(layer, x)

    (_, y), found = run(layer, x)
    return y, *jax.tree.leaves(found)


def inputs(*shape, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def outcome(layer, x):
    """A result; or the type of an error, and the first line of its message."""
    try:
        return layer(x)
    except Exception as error:
        return type(error), str(error).split("\n")[0]


def loss(layer, *arrays, **named):
    """A sum, because gradients of a mean would be too small to be missed."""
    return (layer(*arrays, **named).astype(jnp.float32) ** 2).sum()


def without_key_bias(tree):
    """The leaves of a tree of gradients, without a key's bias, whose gradient is only rounding."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf for path, leaf in leaves if "['key']['bias']" not in jax.tree_util.keystr(path)]


def assert_near(got, want, steps=1e-5):
    """Compares arrays with a tolerance relative to the largest value of each."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=steps * np.max(np.abs(b), initial=1e-3))


WITHIN = {"float32": 2e-6, "bfloat16": 4e-2}


def close(got, want, within=WITHIN["float32"]):
    """Compares dtypes and values."""
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (got, want)]
    assert dtypes[0] == dtypes[1]
    assert_near(got, want, within)
