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
# # Training a mixture of experts
#
# A small GPT learns the topics of Python's own help, character by character. Its feed-forward
# layers are `jax_cudnn.flax.MoE`: a router sends each character to two of eight experts, and a
# second loss keeps them equally busy. On a CPU it trains in seconds.

# %%
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_cudnn.flax as jnn

on_gpu = jax.default_backend() == "gpu"
width, depth, heads, length = (256, 4, 4, 256) if on_gpu else (32, 2, 2, 32)
batch, steps = (32, 500) if on_gpu else (16, 200)
experts, of_each_token = 8, 2

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
# ## The model
# Each block returns its result and the loss that balances its experts: their number times the sum
# over experts of the share of the tokens they get and the mean probability the router gives them.
# It is 1 where all are equally busy.


# %%
class Block(nnx.Module):
    """Causal attention and a mixture of experts, each after a norm."""

    def __init__(self, rngs):
        self.norm1 = jnn.RMSNorm(width, rngs=rngs)
        self.attention = jnn.MultiHeadAttention(
            heads, width, is_causal=True, decode=False, rngs=rngs
        )
        self.norm2 = jnn.RMSNorm(width, rngs=rngs)
        self.experts = jnn.MoE(width, 2 * width, experts, of_each_token, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        y, balance = self.experts(self.norm2(x), return_loss=True)
        return x + y, balance


class GPT(nnx.Module):
    """Characters (N, T) to logits (N, T, vocabulary), and the mean loss of balance."""

    def __init__(self, rngs):
        normal = nnx.initializers.normal(0.02)
        self.characters = nnx.Embed(len(characters), width, embedding_init=normal, rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(depth))
        self.norm = jnn.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.characters.attend(self.norm(x)), jnp.stack(balances).mean()


# %% [markdown]
# ## Training
# Twice from the same parameters: with the loss of balance, times 0.02, and without.


# %%
def loss_of(model, excerpt, factor):
    logits, balance = model(excerpt[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, excerpt[:, 1:]).mean()
    return loss + factor * balance, (loss, balance)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, excerpt, factor):
    gradients, losses = nnx.grad(loss_of, has_aux=True)(model, excerpt, factor)
    optimizer.update(model, gradients)
    return losses


def train(factor):
    """The model, and both losses of each step."""
    model, drawn = GPT(nnx.Rngs(0)), np.random.default_rng(0)
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
    losses = [step(model, optimizer, excerpts(drawn), factor) for _ in range(steps)]
    return model, np.array(losses)


balanced, with_balance = train(0.02)
free, without = train(0.0)

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
for losses, name in ((with_balance, "with the loss of balance"), (without, "without")):
    for column, axis in enumerate(axes):
        axis.plot(losses[:, column], label=name)
axes[0].set(xlabel="step", ylabel="loss per character, nats")
axes[1].set(xlabel="step", ylabel="loss of balance")
axes[1].legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# A model that knows only how often each character occurs would have their entropy as loss.

# %%
shares = np.unique(tokens, return_counts=True)[1] / len(tokens)
entropy = -np.sum(shares * np.log(shares))
print(f"entropy of the characters {entropy:.3f}")
for losses, name in ((with_balance, "with the loss of balance"), (without, "without")):
    loss, balance = losses[-20:].mean(0)
    print(f"{name}: last losses {loss:.3f}, balance {balance:.2f}")
    assert loss < 0.85 * entropy
    assert loss < losses[:5, 0].mean() - 1
assert with_balance[-20:, 1].mean() < without[-20:, 1].mean()

# %% [markdown]
# ## Which experts are used
# The share of the characters of a batch that each expert of the first block gets. With two experts
# of eight for each character, an equal share is a quarter.


# %%
def use(model, excerpt):
    """(experts,): by the router of the first block."""
    block = model.blocks[0]
    x = model.characters(excerpt[:, :-1]) + model.positions(jnp.arange(length))
    x = x + block.attention(block.norm1(x))
    chosen = jax.lax.top_k(block.experts.router(block.norm2(x)), of_each_token)[1]
    return jax.nn.one_hot(chosen, experts).sum(2).mean((0, 1))


excerpt = excerpts(np.random.default_rng(1))
used = {"with": np.array(use(balanced, excerpt)), "without": np.array(use(free, excerpt))}

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for shift, (name, share) in zip((-0.2, 0.2), used.items(), strict=True):
    axes.bar(np.arange(experts) + shift, share, 0.4, label=f"{name} the loss of balance")
axes.axhline(of_each_token / experts, color="gray", linewidth=1)
axes.set(xlabel="expert", ylabel="share of the characters")
axes.legend()
figure.tight_layout()
plt.show()

# %%
for name, share in used.items():
    print(f"{name}: {np.round(share, 2)}, the busiest {share.max() * experts / of_each_token:.2f}")
    np.testing.assert_allclose(share.sum(), of_each_token, rtol=1e-5)
assert used["with"].max() < used["without"].max()
assert used["with"].min() > 0.02
