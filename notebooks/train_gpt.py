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
# # Training a GPT
#
# A small language model in plain Flax NNX learns the topics of Python's own help, character by
# character, twice, from the same initial parameters: once as it is, and once with its layers moved
# to cuDNN by `jax_cudnn.flax.accelerate` and a loss that holds no logits. On an NVIDIA GPU the
# model is larger; on a CPU, where the layers run their reference, it trains in seconds.

# %%
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn

on_gpu = jax.default_backend() == "gpu"
width, depth, heads, length = (384, 6, 6, 256) if on_gpu else (64, 2, 4, 64)
batch, steps = (64, 500) if on_gpu else (16, 250)
dtype = jnp.bfloat16 if on_gpu else jnp.float32  # of the computation; parameters are float32

# %% [markdown]
# ## Data
# The texts that `help("topics")` lists, half a million characters. Every tenth is held out for the
# test.

# %%
texts = [topics[name] for name in sorted(topics)]
characters = sorted(set("".join(texts)))
number_of = {character: number for number, character in enumerate(characters)}


def numbered(texts):
    return np.array([number_of[character] for character in "\n".join(texts)], np.int32)


test_tokens = numbered(texts[::10])
train_tokens = numbered(text for number, text in enumerate(texts) if number % 10)
print(f"{len(train_tokens)} and {len(test_tokens)} characters, {len(characters)} distinct")


def excerpts(tokens, drawn):
    """A batch of excerpts, and the same excerpts one character later."""
    first = drawn.integers(0, len(tokens) - length, batch)
    excerpt = tokens[first[:, None] + np.arange(length + 1)]
    return excerpt[:, :-1], excerpt[:, 1:]


# %% [markdown]
# ## A model in plain Flax
# Nothing here refers to cuDNN. The blocks are those of GPT-2.


# %%
class Block(nnx.Module):
    """Causal attention and a feed-forward layer, each after a norm, with residual connections."""

    def __init__(self, rngs):
        how = {"dtype": dtype, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(width, **how)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **how)
        self.norm2 = nnx.LayerNorm(width, **how)
        self.up = nnx.Linear(width, 4 * width, **how)
        self.down = nnx.Linear(4 * width, width, **how)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Characters (N, T) to hidden states (N, T, width), and these to logits of the next ones."""

    def __init__(self, rngs):
        normal = nnx.initializers.normal(0.02)
        how = {"embedding_init": normal, "dtype": dtype, "rngs": rngs}
        self.characters = nnx.Embed(len(characters), width, **how)
        self.positions = nnx.Embed(length, width, **how)
        self.blocks = nnx.List(Block(rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, hidden):
        return self.characters.attend(hidden).astype(jnp.float32)


# %% [markdown]
# ## The same model on cuDNN
# `accelerate` returns a copy that shares its parameters with the original, so training one would
# train the other. The comparison needs separate parameters: here the original is a second model
# from the same seed. The report lists each layer, and why one was kept.

# %%
plain = GPT(nnx.Rngs(0))
ours = jnn.accelerate(GPT(nnx.Rngs(0)))
report = jnn.report(ours)
print(report)
assert {entry.name for entry in report.kept} == {"Embed"}

# %% [markdown]
# ## Training
# The loss of the original is Optax's of all logits. `linear_cross_entropy` takes what the last
# layer reads and its weight instead, and computes the same in blocks of tokens: with the vocabulary
# of a large model the logits would be the largest array of the step.


# %%
def flax_loss(model, tokens, following):
    logits = model.logits(model(tokens))
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def our_loss(model, tokens, following):
    weight = model.characters.embedding[...].T.astype(dtype)
    return jc.ops.linear_cross_entropy(model(tokens), weight, following)


def train(model, loss_of):
    """The loss of each step, and the loss on the test text."""

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, tokens, following):
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens, following)
        optimizer.update(model, gradients)
        return loss

    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=0.1), wrt=nnx.Param)
    drawn = np.random.default_rng(0)
    losses = [step(model, optimizer, *excerpts(train_tokens, drawn)) for _ in range(steps)]
    unread = [nnx.jit(loss_of)(model, *excerpts(test_tokens, drawn)) for _ in range(10)]
    return np.array(losses), np.mean(unread)


curves = {"Flax": train(plain, flax_loss), "jax_cudnn.flax": train(ours, our_loss)}

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for (name, (losses, _)), style in zip(curves.items(), ("-", "--"), strict=True):
    axes.plot(losses, style, label=name)
axes.set(xlabel="step", ylabel="loss per character, nats")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Both learn along the same curve. The layers round in a different order, so small differences
# remain. A model that knows only how often each character occurs would have their entropy as loss.

# %%
shares = np.unique(train_tokens, return_counts=True)[1] / len(train_tokens)
entropy = -np.sum(shares * np.log(shares))
print(f"entropy of the characters {entropy:.3f}")
for name, (losses, unread) in curves.items():
    print(f"{name}: last losses {losses[-20:].mean():.3f}, on the test text {unread:.3f}")
    assert losses[-20:].mean() < (1.5 if on_gpu else 0.85 * entropy)
    assert unread < (2.0 if on_gpu else 0.9 * entropy)
(flax_losses, flax_unread), (our_losses, our_unread) = curves.values()
np.testing.assert_allclose(our_losses[:10], flax_losses[:10], rtol=0.01)
assert abs(our_losses - flax_losses).mean() < 0.1
assert abs(our_unread - flax_unread) < 0.1

# %% [markdown]
# ## What it writes
# One character at a time, sampled from the model's prediction.


# %%
@nnx.jit
def following(model, tokens, last, key):
    """A character sampled from the logits at position ``last`` of the excerpt."""
    return jax.random.categorical(key, model.logits(model(tokens[None])[0, last]) / 0.7)


def written(model, prompt, count):
    found = [number_of[character] for character in prompt]
    for key in jax.random.split(jax.random.key(0), count):
        read = found[-length:]
        excerpt = jnp.array(read + [0] * (length - len(read)))
        found.append(int(following(model, excerpt, len(read) - 1, key)))
    return "".join(characters[number] for number in found)


sample = written(ours, "The ", 300 if on_gpu else 80)
print(sample)
assert len(sample.split()) > 5
