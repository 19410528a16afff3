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
# # First steps
#
# A cuDNN graph is a function of `g` and arrays. It is traced once for each shape, becomes a
# `GraphSpec`, and is planned by cuDNN when JAX lowers it for an NVIDIA GPU. Everywhere else it runs
# as its reference. This notebook runs on both.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc


@jc.graph
def conv_bias_relu(g, x, w, b):
    y = g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    return g.relu(g.bias(y, b))


keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (8, 64, 28, 28), jnp.bfloat16)
w = jax.random.normal(keys[1], (64, 64, 3, 3), jnp.bfloat16) / 24
b = jax.random.normal(keys[2], (1, 64, 1, 1), jnp.bfloat16)
y = jax.jit(conv_bias_relu)(x, w, b)
print(y.shape, y.dtype)

# %% [markdown]
# The same in plain JAX agrees up to the rounding of the output to bfloat16: values inside the graph
# are float32.

# %%
plain = jax.nn.relu(jax.lax.conv(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME") + b)
difference = jnp.linalg.norm(y - plain) / jnp.linalg.norm(plain)
assert difference < 5e-3
print(float(difference))

# %% [markdown]
# What is planned is a value that can be printed: shapes, dtypes and so every rounding point.

# %%
arrays, trace = conv_bias_relu.trace(x, w, b)
print(trace.spec)

# %% [markdown]
# ## Which plan?
# For the GPU of this process, or for one that is elsewhere: `jc.target` names it, and a real plan
# is built by cuDNN without any GPU.

# %%
with jc.target("H200"):
    plan = jc.plan(conv_bias_relu, x, w, b)
assert len(plan.execution_plans) == 1
print(plan)

# %% [markdown]
# ## A graph that cuDNN refuses
# It runs all the same: cut into plans that cuDNN has, and XLA runs what is left, in one program.
# `explain` says what runs where, and why. A value that crosses a cut is rounded where the graph
# says so, and only there: here inner values are bfloat16, as cuDNN's convolutions take them.


# %%
@jc.graph(intermediate_data_type="bfloat16")
def two_convolutions(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1]))
    y = g.relu(g.conv_fprop(y, w, padding=[1, 1]))
    return g.sub(y, g.reduction(y, mode="MAX", out_dims=[8, 1, 28, 28]))


with jc.target("H200"):
    plan = jc.plan(two_convolutions, x, w)
assert len(plan.execution_plans) == 2
print(plan.explain())

# %% [markdown]
# Who wants one cuDNN plan or nothing says so. Then the error prints the graph, cuDNN's reason for
# each engine, and what to change.

# %%
try:
    with jc.target("H200"):
        jc.plan(two_convolutions.with_options(implementation="cudnn"), x, w)
except jc.UnsupportedGraphError as error:
    print(error.fix)
else:
    raise AssertionError("cuDNN has learned something")

# %% [markdown]
# ## Transformations
# Gradients and vmap work; for now XLA computes them from the reference.


# %%
def loss(w):
    return jnp.sum(conv_bias_relu(x, w, b).astype(jnp.float32) ** 2)


gradient = jax.jit(jax.grad(loss))(w)
assert np.isfinite(np.asarray(gradient, np.float32)).all()
print(gradient.shape)
