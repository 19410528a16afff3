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
# # Introduction
#
# cuDNN runs *graphs*: operations on tensors, planned together and fused where an engine allows. In
# jax_cudnn a graph is a Python function of `g` and arrays. This notebook writes one, prints it,
# plans it and runs it. It runs on an NVIDIA GPU, and anywhere else on the reference in `jnp`.

# %%
import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc

on_gpu = jax.default_backend() == "gpu"


def planned():
    """Plans inside are for the GPU of this process, or for an H200 that is elsewhere."""
    return contextlib.nullcontext() if on_gpu else jc.target("H200")


random = np.random.default_rng(0)


def normal(shape, dtype=jnp.float32):
    """Random numbers, which are the same wherever the notebook runs."""
    return jnp.asarray(random.standard_normal(shape), dtype)


def distance(got, want):
    """The relative error, in the 2-norm."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# %% [markdown]
# ## Tensors
# Arrays have cuDNN's dims: images (N, C, H, W), weights (O, I, R, S), a bias (1, C, 1, 1). Dims say
# nothing of how an array lies in memory: XLA decides that, and hands images to cuDNN channels-last.

# %%
image = normal((8, 64, 28, 28), jnp.bfloat16)
weight = normal((64, 64, 3, 3), jnp.bfloat16) / 24
bias = normal((1, 64, 1, 1), jnp.bfloat16)


# %% [markdown]
# ## A graph
# `g` has the methods of `cudnn.pygraph`, with the same keywords. Inside of the function there are
# no arrays but graph tensors: they have a shape, a dtype and strides, and no values.


# %%
@jc.graph
def conv_bias_relu(g, image, weight, bias):
    y = g.conv_fprop(image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    print("inside:", y.get_dim(), y.dtype)
    return g.relu(g.bias(y, bias))


arrays, trace = conv_bias_relu.trace(image, weight, bias)
print(trace.spec)

# %% [markdown]
# What was printed is a `GraphSpec`, the value that everything else works on. It states each shape
# and dtype, so each rounding: the convolution and the bias are float32 inside of the graph, and the
# one rounding to bfloat16 is at the output. The function runs once for each kind of arguments: the
# line "inside" does not come again.

# %%
y = conv_bias_relu(image, weight, bias)
again = jax.jit(conv_bias_relu)(image, weight, bias)
assert distance(y, again) < 5e-3
plain = jax.lax.conv(*(x.astype(jnp.float32) for x in (image, weight)), (1, 1), "SAME")
plain = jax.nn.relu(plain + bias)
assert distance(y, plain) < 5e-3
print(y.shape, y.dtype, f"{distance(y, plain):.4f}")

# %% [markdown]
# ## Build
# In cuDNN a graph is validated, lowered to an operation graph, given to heuristics, checked and
# built. Here the operations are checked where they are written, and the rest is done when XLA
# compiles a program for a GPU. `jc.plan` does it now, and shows the result: the engine with its
# knobs, its workspace, and what runs where.

# %%
with planned():
    plan = jc.plan(conv_bias_relu, image, weight, bias)
assert len(plan.execution_plans) == 1
print(plan.explain())

# %% [markdown]
# `jc.target("H200")` plans for a GPU that is not here, by cuDNN itself, in a process of its own. A
# program can be lowered for it, too: the plan is an attribute of one custom call.

# %%
with jc.target("H200"):
    lowered = jax.jit(conv_bias_relu).trace(image, weight, bias).lower(lowering_platforms=("cuda",))
assert lowered.as_text().count("custom_call @jax_cudnn") == 1

# %% [markdown]
# ## Execute
# There is nothing to do for it: the function is a JAX function. `jit`, `grad`, `vmap`, `jvp`,
# `scan`, `shard_map`, `remat` and `export` take it.


# %%
def loss(weight):
    return jnp.sum(conv_bias_relu(image, weight, bias).astype(jnp.float32) ** 2)


def plain_loss(weight):
    y = jax.lax.conv(image.astype(jnp.float32), weight, (1, 1), "SAME")
    return jnp.sum(jax.nn.relu(y + bias) ** 2)


gradient = jax.jit(jax.grad(loss))(weight)
want = jax.grad(plain_loss)(weight.astype(jnp.float32))
assert distance(gradient, want) < 1e-2
print(gradient.shape, gradient.dtype, f"{distance(gradient, want):.4f}")

# %% [markdown]
# ## What became of the handle, the workspace and the variant pack
# A cuDNN *handle* is a context on one device and stream, which two threads must not use at a time.
# In jax_cudnn nobody makes one: the executor keeps a pool for each device, takes a handle for the
# time of a call, and sets XLA's stream on it. The *workspace* is a result of the custom call, so
# XLA allocates it and plans its memory. The *variant pack*, pointers by uid, is kept while the
# pointers stay the same. Graphs of the wrapper (`jc.Graph`) take `handle=` and `workspace=`
# for cuDNN's sake, and do not use them.

# %%
with jc.Graph(inputs=[image, weight], outputs=["conv::Y"], handle="any") as graph:
    graph.conv_fprop(image, weight, padding=[1, 1], name="conv").set_output(True)
assert graph(image, weight, handle="any").shape == (8, 64, 28, 28)

# %% [markdown]
# ## Errors
# They come from the line that wrote the operation, say what was expected, and what to do.


# %%
@jc.graph
def wrong(g, image, weight):
    return g.conv_fprop(image, weight, padding=[1, 1])


try:
    wrong(image, weight[:, :48])
except jc.GraphError as error:
    print(error.summary, error.expected, error.got, error.fix, sep="\n- ")
else:
    raise AssertionError("48 channels do not divide 64")
