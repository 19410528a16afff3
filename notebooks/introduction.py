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
# This notebook takes a small Flax model, runs its layers on cuDNN, and shows what runs where and
# how fast. Then it opens the hood: graphs, plans, and cuDNN's terms. It runs on an NVIDIA GPU.
# Without one, the layers run their reference in `jnp`, and plans are made for an H200.

# %%
import jax
import jax.numpy as jnp
from flax import nnx
from helpers import bars, check, draw, normal, on_gpu, planned, seconds

import jax_cudnn as jc
import jax_cudnn.flax as jnn

# %% [markdown]
# ## Your model
# A transformer block in plain Flax NNX, in bfloat16, and its training loss.

# %%
width, heads = 512, 8
batch, length = (8, 2048) if on_gpu else (2, 128)


class Block(nnx.Module):
    def __init__(self, rngs):
        how = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(width, **how)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **how)
        self.norm2 = nnx.LayerNorm(width, **how)
        self.up = nnx.Linear(width, 4 * width, **how)
        self.down = nnx.Linear(4 * width, width, **how)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


model = Block(nnx.Rngs(0))
x = normal((batch, length, width), jnp.bfloat16)

# %% [markdown]
# ## On cuDNN
# `accelerate` returns a copy of the model whose layers run on cuDNN. It shares the parameters with
# the original and gives the same results. `report` lists each layer, and why one was kept.

# %%
fast = jnn.accelerate(model)
print(jnn.report(fast))
check(fast(x), model(x))

# %% [markdown]
# ## What runs where
# `jc.plans` finds the cuDNN graphs in any JAX function, here in a training step's gradient. The
# table shows for each graph whether cuDNN or XLA runs it, the memory that it reads and writes, and
# its roofline: the shortest time that the GPU's peak rates allow. Where cuDNN is measured to be
# slower, XLA runs the graph.


# %%
def gradient_of(model):
    graphdef, state = nnx.split(model)

    def loss(state, x):
        return jnp.mean(nnx.merge(graphdef, state)(x).astype(jnp.float32) ** 2)

    return lambda x: jax.grad(loss)(state, x)


with planned():
    plans = jc.plans(gradient_of(fast), x)
print(plans)

# %% [markdown]
# ## How fast
# The time of one gradient. Attention gains most here: cuDNN never writes the (tokens, tokens)
# scores to memory.

# %%
gradients = {"Flax": gradient_of(model), "accelerated": gradient_of(fast)}
times = seconds(gradients, x, runs=20 if on_gpu else 1, rounds=5 if on_gpu else 1)
where = "on this GPU" if on_gpu else "on a CPU: the reference, not cuDNN"
bars(times, f"Gradient of a block {where}")

# %% [markdown]
# ## Without Flax
# The layers call functions of arrays, which you can call from any JAX program. Their arguments are
# those of `jax.nn` and `jax.lax` where these have the function.

# %%
image = normal((8, 28, 28, 64), jnp.bfloat16)
weight = normal((3, 3, 64, 64), jnp.bfloat16) / 24
bias = normal((64,), jnp.bfloat16)

layout = ("NHWC", "HWIO", "NHWC")
y = jc.ops.conv(image, weight, bias=bias, activation="relu", dimension_numbers=layout)
wide = image.astype(jnp.float32), weight.astype(jnp.float32)
plain = jax.lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=layout)
check(y, jax.nn.relu(plain + bias))

# %% [markdown]
# ## Under the hood: a graph
# cuDNN runs *graphs*: operations that it plans together and fuses where it has an engine for them.
# In jax_cudnn a graph is a Python function of `g` and arrays. `g` has the methods of
# `cudnn.pygraph`, with the same keywords. Inside the function the arrays are graph tensors: they
# have a shape, a dtype and strides, but no values. Shapes are in cuDNN's order: images (N, C, H,
# W), weights (O, I, R, S), a bias (1, C, 1, 1). Shapes do not say how an array lies in memory: XLA
# passes images to cuDNN channels-last.


# %%
@jc.graph
def conv_bias_relu(g, image, weight, bias):
    y = g.conv_fprop(image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    return g.relu(g.bias(y, bias))


image, weight = image.transpose(0, 3, 1, 2), weight.transpose(3, 2, 0, 1)
bias = bias.reshape(1, 64, 1, 1)
check(jax.jit(conv_bias_relu)(image, weight, bias), y.transpose(0, 3, 1, 2))
arrays, trace = conv_bias_relu.trace(image, weight, bias)
print(trace.spec)

# %% [markdown]
# The printed `GraphSpec` states each shape and dtype, and so each rounding: the convolution and the
# bias are float32 inside the graph, and only the output is rounded to bfloat16. The Python function
# runs once for each combination of shapes and dtypes.
#
# ## A plan
# In cuDNN a graph is validated, lowered to an operation graph, passed to heuristics, checked and
# built. Here this happens when XLA compiles the program. `jc.plan` does it now and returns the
# result: the engine with its knobs, its workspace, and what runs where.

# %%
with planned():
    plan = jc.plan(conv_bias_relu, image, weight, bias)
assert len(plan.execution_plans) == 1
print(plan.explain())

# %% [markdown]
# A graph for which cuDNN has no engine is cut into segments. Green segments run on cuDNN, grey ones
# in XLA.


# %%
@jc.graph
def residual_block(g, image, weight, bias):
    y = g.relu(g.bias(g.conv_fprop(image, weight, padding=[1, 1]), bias))
    y = g.bias(g.conv_fprop(y, weight, padding=[1, 1]), bias)
    y = g.relu(g.add(y, image))
    return g.resample(y, resample_mode="MAXPOOL", window=[2, 2], stride=[2, 2])


with planned():
    draw(jc.plan(residual_block, image, weight, bias))

# %% [markdown]
# ## Transformations
# A graph is a JAX function: `jit`, `grad`, `vmap`, `jvp`, `scan`, `shard_map`, `remat` and `export`
# take it.


# %%
def loss(weight):
    return jnp.sum(conv_bias_relu(image, weight, bias).astype(jnp.float32) ** 2)


def plain_loss(weight):
    y = jax.lax.conv(image.astype(jnp.float32), weight, (1, 1), "SAME")
    return jnp.sum(jax.nn.relu(y + bias) ** 2)


check(jax.jit(jax.grad(loss))(weight), jax.grad(plain_loss)(weight.astype(jnp.float32)))
with planned():
    print(jc.plans(jax.grad(loss), weight))

# %% [markdown]
# `jc.target("H200")` plans for a GPU that this machine does not have: cuDNN itself plans, in a
# separate process. A program can be lowered for it, too. The plan is an attribute of one custom
# call.

# %%
with jc.target("H200"):
    lowered = jax.jit(conv_bias_relu).trace(image, weight, bias).lower(lowering_platforms=("cuda",))
assert lowered.as_text().count("custom_call @jax_cudnn") == 1

# %% [markdown]
# ## Handle, workspace, variant pack
# - A cuDNN *handle* is a context on one device and stream. You do not create one: the library keeps
#   a pool for each device, takes a handle for the duration of a call, and sets XLA's stream on it.
# - The *workspace* is a result of the custom call, so XLA allocates it and plans its memory.
# - The *variant pack*, the pointers of the operands, is kept as long as the pointers stay the same.
#
# ## Errors
# An error points to the line that wrote the operation. It says what was expected, and what to do.


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
