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
# # Instance normalization
#
# Each channel of each image is normalized independently: as a graph, its backward pass, inference,
# and group normalization.

# %%
import jax
import jax.numpy as jnp
from helpers import bars, check, draw, normal, on_gpu, planned, seconds

import jax_cudnn as jc

# %%
x = (2 * normal((4, 32, 16, 16)) + 1).astype(jnp.bfloat16)
scale = 1 + 0.1 * normal((1, 32, 1, 1))
bias = normal((1, 32, 1, 1))
dy = normal(x.shape, jnp.bfloat16)
EPSILON = 1e-5


def plain(x, scale, bias):
    x = x.astype(jnp.float32)
    mean, var = (f(x, (2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
    inverse = jax.lax.rsqrt(var + EPSILON)
    return (x - mean) * inverse * scale + bias, mean, inverse


# %% [markdown]
# ## Forward
# Statistics are (N, C, 1, 1), one for each channel of each image.


# %%
@jc.graph
def forward(g, x, scale, bias):
    y, mean, inverse = g.instancenorm(
        input=x, scale=scale, bias=bias, epsilon=EPSILON, norm_forward_phase="TRAINING"
    )
    return y, mean.set_data_type("float32"), inverse.set_data_type("float32")


y, mean, inverse = jax.jit(forward)(x, scale, bias)
for got, want in zip((y, mean, inverse), plain(x, scale, bias), strict=True):
    check(got, want)
assert mean.shape == (4, 32, 1, 1)

# %% [markdown]
# ## Backward
# As a node, and as the derivative of the forward.


# %%
@jc.graph
def backward(g, dy, x, scale, mean, inverse):
    return g.instancenorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=inverse)


def loss(x, scale, bias):
    return jnp.sum(forward(x, scale, bias)[0].astype(jnp.float32) * dy)


wide = x.astype(jnp.float32), scale, bias
wanted = jax.vjp(lambda *a: plain(*a)[0], *wide)[1](dy.astype(jnp.float32))
by_node = jax.jit(backward)(dy, x, scale, mean, inverse)
by_grad = jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
for node, grad, want in zip(by_node, by_grad, wanted, strict=True):
    check(node, want)
    check(grad, want)

# %% [markdown]
# ## cuDNN or XLA
# On an H200 cuDNN is measured to be slower than XLA here, so XLA runs it by default. cuDNN's sums
# in the backward pass over several images are wrong there, so the backward never runs on cuDNN.

# %%
choices = {name: forward.with_options(implementation=name) for name in ("split", "cudnn")}
with planned():
    plans = {name: jc.plan(choice, x, scale, bias) for name, choice in choices.items()}
    for name, plan in plans.items():
        print(f"{name}: {plan.segments[0].reason or plan.engine}")
    try:
        jc.plan(backward.with_options(implementation="cudnn"), dy, x, scale, mean, inverse)
    except jc.UnsupportedGraphError as error:
        print(error.summary, *error.reasons.values(), sep="\n")
    else:
        raise AssertionError
draw(plans)
if on_gpu:
    bars(seconds(choices, x, scale, bias), "Instance normalization, forward")

# %% [markdown]
# ## Inference
# Without statistics there is one result.


# %%
@jc.graph
def inference(g, x, scale, bias):
    return g.instancenorm(x, scale, bias, EPSILON, norm_forward_phase="INFERENCE")


check(jax.jit(inference)(x, scale, bias), y)

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.instance_norm` takes channels last, or at `axis`. `jc.ops.group_norm` normalizes
# groups of neighbouring channels; with as many groups as channels it is instance normalization.

# %%
image = x.transpose(0, 2, 3, 1)
last = jc.ops.instance_norm(image, scale.reshape(32), bias.reshape(32))
check(last.transpose(0, 3, 1, 2), y)
groups = jc.ops.group_norm(image, 32, scale.reshape(32), bias.reshape(32))
check(groups, last, 2e-2)

in_eights = image.reshape(4, 16, 16, 4, 8).astype(jnp.float32)
mean, var = (f(in_eights, (1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
want = ((in_eights - mean) * jax.lax.rsqrt(var + EPSILON)).reshape(image.shape)
check(jc.ops.group_norm(image, 4), want)
