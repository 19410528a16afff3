# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why was this not fused?
#
# A graph for which cuDNN has no engine still runs: it is cut into segments that run on cuDNN or in
# XLA. `jc.explain` draws what is fused and what crosses the cuts, and `plan.explain()` says why.
# This notebook goes through the usual reasons, and what to do about each. Its plans are for an
# H200, which need not be here.

# %%
import logging

import jax
from helpers import aval
from IPython.display import display

import jax_cudnn as jc


def explain(function, *arrays):
    (picture,) = jc.explain(function, *arrays, gpu="H200").pictures.values()
    display(picture)
    print(picture.plan.explain())
    return picture.plan


x, w = aval((8, 64, 28, 28)), aval((64, 64, 3, 3))

# %% [markdown]
# ## Two products in one graph
# cuDNN's engines are built around one convolution or matmul, so the graph is cut between two.
# Tensors keep their dtype across a cut. It is float32, except for a tensor that enters a product
# with a 16-bit operand: it has the dtype of that operand. If the graph sets float32 there, the
# second convolution has a float32 and a bfloat16 operand, which cuDNN does not support: XLA runs
# it, and twice the bytes cross the cut.


# %%
@jc.graph
def two_convolutions(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1]))
    return g.relu(g.conv_fprop(y, w, padding=[1, 1]))


@jc.graph
def two_in_float32(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1])).set_data_type("float32")
    return g.relu(g.conv_fprop(y, w, padding=[1, 1]))


wide = explain(two_in_float32, x, w)
narrow = explain(two_convolutions, x, w)
assert len(wide.execution_plans) == 1
assert len(narrow.execution_plans) == 2
crossing = [plan.explain().to_json()["cut_bytes"] for plan in (wide, narrow)]
assert crossing[1] < crossing[0]

# %% [markdown]
# Two separate graphs, one with the intermediate value as output and one with it as input, are
# equivalent.
#
# The same for a whole program: `jc.explain` takes any JAX function. Its report says where each
# graph is called and how often, what it moves and takes at least (or was measured to take), and
# what to change, beginning with what concerns the most bytes.


# %%
def step(x, w):
    return two_in_float32(two_convolutions(x, w), w)


display(jc.explain(step, x, w, gpu="H200"))

# %% [markdown]
# ## Operations without a cuDNN engine
# Some operations always run in XLA: reshape, transpose, concatenate, pooling. Keep them outside of
# the graph where you can.


# %%
@jc.graph
def pooled(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1]))
    return g.resample(y, resample_mode="MAXPOOL", window=[2, 2], stride=[2, 2])


plan = explain(pooled, x, w)
assert [segment.engine == "XLA" for segment in plan.segments] == [False, True]

# %% [markdown]
# ## A broadcast that cuDNN computes wrongly
# Fused with a convolution, cuDNN 9.19 accepts every broadcast pattern, but computes only four
# correctly: full, (1, C, 1, 1), (N, 1, H, W) and a scalar. All other patterns run in XLA.


# %%
@jc.graph
def conv_add(g, x, w, b):
    return g.relu(g.add(g.conv_fprop(x, w, padding=[1, 1]), b))


by_row = explain(conv_add, x, w, aval((1, 1, 28, 1)))
assert len(by_row.segments) == 2
full = explain(conv_add, x, w, aval((8, 64, 28, 28)))
assert len(full.segments) == 1

# %% [markdown]
# ## Precision
# For a float32 matmul cuDNN has only TF32. With a higher precision, it falls back to XLA.


# %%
@jc.graph
def matmul_relu(g, a, b):
    return g.relu(g.matmul(a, b))


square = aval((1, 512, 512), "float32")
assert len(explain(matmul_relu, square, square).execution_plans) == 1
plan = explain(matmul_relu.with_options(precision="highest"), square, square)
assert plan.execution_plans == ()

# %% [markdown]
# ## cuDNN is slower
# Graphs at which cuDNN was measured to be slower run in XLA by default. The reason says by how much
# and on which GPU. `implementation="cudnn"` forces cuDNN.


# %%
@jc.graph
def instance_norm(g, x, scale, bias):
    return g.instancenorm(x, scale, bias, 1e-5, norm_forward_phase="INFERENCE")


parameters = aval((1, 64, 1, 1), "float32"), aval((1, 64, 1, 1), "float32")
plan = explain(instance_norm, x, *parameters)
assert plan.engine == "XLA"
assert (
    len(explain(instance_norm.with_options(implementation="cudnn"), x, *parameters).segments) == 1
)

# %% [markdown]
# ## One plan, or an error
# With `implementation="cudnn"` a graph that is not a single plan is an error. The error holds
# cuDNN's reason for each engine that was tried, and what to do.

# %%
try:
    with jc.target("H200"):
        jc.plan(two_convolutions.with_options(implementation="cudnn"), x, w)
except jc.UnsupportedGraphError as error:
    print(error.summary, error.why, error.fix, sep="\n- ")
    print(error.reasons)
else:
    raise AssertionError

# %% [markdown]
# ## Another dtype
# If the dtypes are the reason, the error says which to use: an A100 has no tensor cores for float8.

# %%
e4m3 = aval((1, 256, 256), "float8_e4m3fn")
try:
    with jc.target("A100"):
        jc.plan(matmul_relu.with_options(implementation="cudnn"), e4m3, e4m3)
except jc.UnsupportedGraphError as error:
    print(error.summary, error.fix, sep="\n- ")
else:
    raise AssertionError

# %% [markdown]
# ## While a program compiles
# At level DEBUG, the logger `jax_cudnn` reports the same: each segment, and why it runs in XLA.

# %%
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logger = logging.getLogger("jax_cudnn")
logger.addHandler(handler)
logger.setLevel(logging.DEBUG)
with jc.target("H200"):
    jax.jit(pooled).trace(x, w).lower(lowering_platforms=("cuda",))
print(*(line for line in messages if "pooled" in line), sep="\n")
assert any("resample" in line for line in messages)
