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
# # Batch normalization
#
# Training with running statistics, the backward pass, inference, and fusion with an activation.

# %%
import jax
import jax.numpy as jnp
from helpers import check, draw, normal, planned

import jax_cudnn as jc

# %%
x = (2 * normal((8, 64, 14, 14)) + 1).astype(jnp.bfloat16)
dy = normal(x.shape, jnp.bfloat16)
per_channel = (1, 64, 1, 1)
scale = 1 + 0.1 * normal(per_channel)
bias = normal(per_channel)
running_mean, running_var = jnp.zeros(per_channel), jnp.ones(per_channel)
EPSILON, MOMENTUM = 1e-5, 0.1


def plain(x, scale, bias):
    x = x.astype(jnp.float32)
    mean, var = (f(x, (0, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
    inverse = jax.lax.rsqrt(var + EPSILON)
    return (x - mean) * inverse * scale + bias, mean, var, inverse


# %% [markdown]
# ## Forward in training
# Parameters and statistics are (1, C, 1, 1) in float32. The node takes the running statistics and
# returns the new ones together with those of the batch. cuDNN's momentum is the weight of the batch
# statistics, and its running variance is updated with the unbiased variance.


# %%
@jc.graph
def forward(g, x, scale, bias, running_mean, running_var):
    return g.batchnorm(
        input=x,
        scale=scale,
        bias=bias,
        in_running_mean=running_mean,
        in_running_var=running_var,
        epsilon=EPSILON,
        momentum=MOMENTUM,
    )


y, mean, inverse, new_mean, new_var = jax.jit(forward)(x, scale, bias, running_mean, running_var)
want_y, want_mean, want_var, want_inverse = plain(x, scale, bias)
check(y, want_y)
check(mean, want_mean)
check(inverse, want_inverse)
check(new_mean, MOMENTUM * want_mean)
count = x.size // 64
check(new_var, 1 - MOMENTUM + MOMENTUM * want_var * count / (count - 1))
print(y.dtype, mean.shape, mean.dtype)

# %%
with planned():
    plan = jc.plan(forward, x, scale, bias, running_mean, running_var)
print(plan.explain())

# %% [markdown]
# ## Backward


# %%
@jc.graph
def backward(g, dy, x, scale, mean, inverse):
    return g.batchnorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=inverse)


wide = x.astype(jnp.float32), scale, bias
wanted = jax.vjp(lambda *a: plain(*a)[0], *wide)[1](dy.astype(jnp.float32))
for got, want in zip(jax.jit(backward)(dy, x, scale, mean, inverse), wanted, strict=True):
    check(got, want)


def loss(x, scale, bias):
    y, *_ = forward(x, scale, bias, running_mean, running_var)
    return jnp.sum(y.astype(jnp.float32) * dy)


for got, want in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias), wanted, strict=True):
    check(got, want)

# %% [markdown]
# ## Inference
# With given statistics, batch normalization is elementwise. It is a separate node, which falls back
# to XLA because cuDNN has no engine for it.


# %%
@jc.graph
def inference(g, x, mean, inverse, scale, bias):
    return g.batchnorm_inference(input=x, mean=mean, inv_variance=inverse, scale=scale, bias=bias)


check(jax.jit(inference)(x, mean, inverse, scale, bias), y)
with planned():
    plan = jc.plan(inference, x, mean, inverse, scale, bias)
assert plan.engine == "XLA"
print(plan.segments[0].reason)

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.batch_norm` follows Flax: channels last, momentum as the weight of the old statistics, the
# biased variance. An activation after the normalization is part of the same plan. For relu the
# forward keeps one bit per element, which the backward plan reads.

# %%
parameters = [a.reshape(64) for a in (scale, bias, running_mean, running_var)]
image = x.transpose(0, 2, 3, 1)


def normalized(image, scale, bias):
    return jc.ops.batch_norm(
        image, scale, bias, *parameters[2:], training=True, momentum=0.9, activation="relu"
    )


y, (new_mean, new_var) = jax.jit(normalized)(image, *parameters[:2])
check(y.transpose(0, 3, 1, 2), jax.nn.relu(want_y))
check(new_mean, 0.1 * want_mean.reshape(64))
check(new_var, 0.9 + 0.1 * want_var.reshape(64))


def loss(image, scale, bias):
    return jnp.sum(normalized(image, scale, bias)[0].astype(jnp.float32) ** 2)


def plain_loss(image, scale, bias):
    x, parameters = image.transpose(0, 3, 1, 2), (a.reshape(per_channel) for a in (scale, bias))
    return jnp.sum(jax.nn.relu(plain(x, *parameters)[0]) ** 2)


gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(image, *parameters[:2])
wanted = jax.grad(plain_loss, (0, 1, 2))(image.astype(jnp.float32), *parameters[:2])
for got, want in zip(gradients, wanted, strict=True):
    check(got, want, 2e-2)

# %%
with planned():
    plans = jc.plans(jax.grad(loss, (0, 1, 2)), image, *parameters[:2])
for plan in plans.values():
    print(plan.explain())
draw(plans)

# %% [markdown]
# For inference, pass `training=False`. The running statistics stay the same.

# %%
y, running = jc.ops.batch_norm(image, *parameters, training=False)
check(y.transpose(0, 3, 1, 2), x.astype(jnp.float32) * scale / (1 + EPSILON) ** 0.5 + bias)
check(running[1], parameters[3])
