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
# # Training a ResNet
#
# A small residual network in plain Flax NNX learns scikit-learn's handwritten digits twice, from
# the same initial parameters: once as it is, and once with its layers moved to cuDNN by
# `jax_cudnn.flax.accelerate`. On an NVIDIA GPU the model is larger; on a CPU, where the layers run
# their reference, it trains in seconds.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jax_cudnn.flax as jnn

on_gpu = jax.default_backend() == "gpu"
width, blocks, epochs = (64, (2, 2, 2), 30) if on_gpu else (8, (1, 1), 8)
dtype = jnp.bfloat16 if on_gpu else jnp.float32  # of the computation; parameters are float32
batch = 64

# %% [markdown]
# ## Data
# 1797 images of 8 x 8, a fifth of which is held out for the test.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order, :, :, None] / 16 - 0.5).astype(np.float32)
labels = digits.target[order].astype(np.int32)
kept = len(labels) // 5
test_images, train_images = images[:kept], images[kept:]
test_labels, train_labels = labels[:kept], labels[kept:]
print(train_images.shape, test_images.shape)

# %% [markdown]
# ## A model in plain Flax
# Nothing here refers to cuDNN.


# %%
class Block(nnx.Module):
    """Two convolutions, added to the input or to a projection of it."""

    def __init__(self, inputs, features, stride, rngs):
        def conv(inputs, size, strides):
            return nnx.Conv(
                inputs, features, (size, size), strides, use_bias=False, dtype=dtype, rngs=rngs
            )

        def norm():
            return nnx.BatchNorm(features, momentum=0.9, dtype=dtype, rngs=rngs)

        self.conv1, self.norm1 = conv(inputs, 3, stride), norm()
        self.conv2, self.norm2 = conv(features, 3, 1), norm()
        self.projects = inputs != features
        if self.projects:
            self.conv3, self.norm3 = conv(inputs, 1, stride), norm()

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.projects:
            x = self.norm3(self.conv3(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """Images (N, 8, 8, 1) to logits (N, 10)."""

    def __init__(self, rngs):
        self.stem = nnx.Conv(1, width, (3, 3), dtype=dtype, rngs=rngs)
        made, inputs = [], width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                made.append(Block(inputs, width * 2**stage, stride, rngs))
                inputs = width * 2**stage
        self.blocks = nnx.List(made)
        self.head = nnx.Linear(inputs, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)


# %% [markdown]
# ## The same model on cuDNN
# `accelerate` returns a copy that shares its parameters with the original, so training one would
# train the other. The comparison needs separate parameters: here the original is a second model
# from the same seed. The report lists each layer, and why one was kept.

# %%
plain = ResNet(nnx.Rngs(0))
ours = jnn.accelerate(ResNet(nnx.Rngs(0)))
report = jnn.report(ours)
print(report)
assert {entry.name for entry in report.kept} == {"BatchNorm"}  # XLA fuses it with its relu

# %% [markdown]
# ## Training


# %%
@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, images, labels):
    def loss_of(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def hits(model, images, labels):
    return jnp.mean(jnp.argmax(model(images), -1) == labels)


def train(model):
    """The loss of each step, and the test accuracy after each epoch."""
    steps = epochs * (len(train_labels) // batch)
    rate = optax.cosine_decay_schedule(0.05, steps)
    optimizer = nnx.Optimizer(model, optax.sgd(rate, momentum=0.9), wrt=nnx.Param)
    drawn, losses, accuracies = np.random.default_rng(1), [], []
    for _ in range(epochs):
        order = drawn.permutation(len(train_labels))
        for first in range(0, len(order) - batch + 1, batch):
            chosen = order[first : first + batch]
            losses.append(step(model, optimizer, train_images[chosen], train_labels[chosen]))
        model.eval()  # the running statistics normalize
        accuracies.append(float(hits(model, test_images, test_labels)))
        model.train()
    return np.array(losses), np.array(accuracies)


curves = {"Flax": train(plain), "jax_cudnn.flax": train(ours)}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for (name, (losses, accuracies)), style in zip(curves.items(), ("-", "--"), strict=True):
    left.plot(losses, style, label=name)
    right.plot(range(1, epochs + 1), accuracies, style, label=name)
left.set(xlabel="step", ylabel="loss", yscale="log")
right.set(xlabel="epoch", ylabel="test accuracy")
left.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Both learn along the same curve. The layers round in a different order, so small differences
# remain.

# %%
for name, (losses, accuracies) in curves.items():
    print(f"{name}: last losses {losses[-10:].mean():.3f}, accuracy {accuracies[-1]:.3f}")
    assert losses[-10:].mean() < 0.2
    assert accuracies[-1] > 0.95
(flax_losses, flax_accuracies), (our_losses, our_accuracies) = curves.values()
np.testing.assert_allclose(our_losses[:3], flax_losses[:3], rtol=0.05)
assert abs(our_losses - flax_losses).mean() < 0.05
assert abs(our_accuracies[-1] - flax_accuracies[-1]) < 0.02

# %% [markdown]
# ## Parameters are interchangeable
# Parameters trained with one set of layers run with the other.

# %%
nnx.update(plain, nnx.state(ours))
plain.eval()
ours.eval()
share = [float(hits(model, test_images, test_labels)) for model in (plain, ours)]
print(share)
assert abs(share[0] - share[1]) < 0.01
