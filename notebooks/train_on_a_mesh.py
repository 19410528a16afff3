# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A GPT on a mesh
#
# A small GPT trains on a mesh of data x model: its batch is split over the data axis, its heads and
# hidden features over the model axis, as in Megatron. The arrays are sharded, and nothing else
# changes: each device computes its part of every cuDNN call. On a machine without eight GPUs, eight
# devices of the CPU take their place, and run the reference.

# %%
import collections
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc

devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices[:8]
)
width, depth, heads, length, batch, steps = 64, 2, 4, 64, 16, 150

# %% [markdown]
# ## Data
# The texts that `help("topics")` lists, as numbers of characters.

# %%
text = "".join(topics[name] for name in sorted(topics))
characters = sorted(set(text))
number_of = {character: number for number, character in enumerate(characters)}
tokens = np.array([number_of[character] for character in text], np.int32)


def excerpts(drawn):
    """A batch of excerpts, each one character longer than what the model reads."""
    first = drawn.integers(0, len(tokens) - length, batch)
    return tokens[first[:, None] + np.arange(length + 1)]


# %% [markdown]
# ## A model in plain JAX, with functions of `jax_cudnn.ops`


# %%
def initial(key):
    keys = iter(jax.random.split(key, 100))

    def normal(*shape):
        return 0.05 * jax.random.normal(next(keys), shape)

    def block():
        return {
            "norm1": jnp.ones(width),
            "qkv": normal(width, 3, heads, width // heads),
            "out": normal(heads, width // heads, width),
            "norm2": jnp.ones(width),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width),
        }

    return {
        "characters": normal(len(characters), width),
        "positions": normal(length, width),
        "blocks": [block() for _ in range(depth)],
        "norm": jnp.ones(width),
    }


def block(p, x):
    qkv = jnp.einsum("btd,dcnh->cbtnh", jc.ops.rms_norm(x, p["norm1"]), p["qkv"])
    y = jc.ops.dot_product_attention(*qkv, is_causal=True)
    x = x + jnp.einsum("btnh,nhd->btd", y, p["out"])
    hidden = jc.ops.matmul(jc.ops.rms_norm(x, p["norm2"]), p["up"], activation="gelu")
    return jc.ops.matmul(hidden, p["down"], residual=x)


def loss_of(p, excerpt):
    x = p["characters"][excerpt[:, :-1]] + p["positions"]
    for each in p["blocks"]:
        x = block(each, x)
    logits = jc.ops.rms_norm(x, p["norm"]) @ p["characters"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, excerpt[:, 1:]).mean()


optimizer = optax.adamw(3e-3, weight_decay=0.1)


@jax.jit
def step(p, state, excerpt):
    loss, gradients = jax.value_and_grad(loss_of)(p, excerpt)
    updates, state = optimizer.update(gradients, state, p)
    return optax.apply_updates(p, updates), state, loss


# %% [markdown]
# ## Shardings
# Heads and hidden features are split, as columns of the first product and rows of the second. The
# rest is on all devices.

# %%
split = {
    "qkv": P(None, None, "model"),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}


def placed(p):
    def place(path, x):
        return jax.device_put(x, NamedSharding(mesh, split.get(path[-1].key, P())))

    return jax.tree_util.tree_map_with_path(place, p)


def place(excerpt):
    return jax.device_put(excerpt, NamedSharding(mesh, P("data")))


# %% [markdown]
# ## What each device computes
# `jc.plans` shows the graphs of one device: half of the batch, one of four heads, a quarter of the
# hidden features. No operand is gathered; after the rows of the second product devices sum.

# %%
parameters = initial(jax.random.key(0))
example = place(excerpts(np.random.default_rng(0)))
with jc.target("H200"):
    plans = jc.plans(loss_of, placed(parameters), example)
print(plans)
assert plans["dot_product_attention"].spec.input_tensors[0].shape == (batch // 2, 1, length, 16)
assert "gathered" not in str(plans)

# %% [markdown]
# XLA's program has no all-gather, only sums.

# %%
sharded = placed(parameters)
program = step.lower(sharded, optimizer.init(sharded), example).compile().as_text()
collectives = collections.Counter(
    re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)\(", program)
)
print(dict(collectives))
assert collectives["all-gather"] == 0

# %% [markdown]
# ## Training
# On the mesh, and on one device for comparison.


# %%
def train(p, place):
    state, losses, drawn = optimizer.init(p), [], np.random.default_rng(0)
    for _ in range(steps):
        p, state, loss = step(p, state, place(excerpts(drawn)))
        losses.append(float(loss))
    return np.array(losses)


on_mesh, alone = train(sharded, place), train(parameters, jnp.asarray)

# %%
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(alone, "-", label="one device")
axes.plot(on_mesh, "--", label="2 x 4 devices")
axes.set(xlabel="step", ylabel="loss per character, nats")
axes.legend()
figure.tight_layout()
plt.show()

# %%
print(f"last losses {on_mesh[-10:].mean():.3f} on the mesh, {alone[-10:].mean():.3f} alone")
np.testing.assert_allclose(on_mesh[:20], alone[:20], rtol=1e-3)
assert on_mesh[-10:].mean() < 2.8
