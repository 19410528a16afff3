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
# # Why was this not fused?
#
# A graph that cuDNN has no engine for runs all the same: cut into plans that it has, with XLA
# between them. `plan.explain()` says what runs where, how many bytes cross the cuts, and why. This
# notebook takes the usual reasons one by one, with what to do about each.

# %%
import contextlib
import logging

import jax

import jax_cudnn as jc

on_gpu = jax.default_backend() == "gpu"


def planned():
    """Plans inside are for the GPU of this process, or for an H200 that is elsewhere."""
    return contextlib.nullcontext() if on_gpu else jc.target("H200")


def explain(function, *arrays):
    with planned():
        plan = jc.plan(function, *arrays)
    print(plan.explain())
    return plan


def aval(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


x, w = aval((8, 64, 28, 28)), aval((64, 64, 3, 3))

# %% [markdown]
# ## Two products in one graph
# cuDNN's engines are built around one convolution or matmul. The graph is cut between them, each
# with the neighbours that it takes. Tensors keep their dtype across a cut: float32, but for what
# enters a product beside a 16-bit operand, which has that operand's. Where the graph says float32
# all the same, the second convolution has a float32 and a bfloat16 operand, which cuDNN does not
# take: XLA runs it, and twice the bytes cross the cut.


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
# With the value between them as an output of the one and the input of the other, they are two
# graphs that say the same.
#
# ## What cuDNN has no engine for
# Some operations are XLA's everywhere: reshape, transpose, concatenate, pooling. What can stand
# outside of the graph is better there.


# %%
@jc.graph
def pooled(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1]))
    return g.resample(y, resample_mode="MAXPOOL", window=[2, 2], stride=[2, 2])


plan = explain(pooled, x, w)
assert [segment.engine == "XLA" for segment in plan.segments] == [False, True]

# %% [markdown]
# ## A broadcast that is computed wrongly
# Beside a convolution cuDNN 9.19 accepts every pattern of broadcasts, and computes four of them
# right: full, (1, C, 1, 1), (N, 1, H, W) and a single number. The others are not asked of it.


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
# For a float32 matmul cuDNN has TF32 and nothing else. Who asks for more gets XLA's.


# %%
@jc.graph
def matmul_relu(g, a, b):
    return g.relu(g.matmul(a, b))


square = aval((1, 512, 512), "float32")
assert len(explain(matmul_relu, square, square).execution_plans) == 1
plan = explain(matmul_relu.with_options(precision="highest"), square, square)
assert plan.execution_plans == ()

# %% [markdown]
# ## cuDNN could, and is slower
# Kinds of graphs at which cuDNN was measured to lose are XLA's by default. The reason says by how
# much and where. `implementation="cudnn"` asks for cuDNN.


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
# Under `implementation="cudnn"` a graph that is no single plan is an error. It holds cuDNN's reason
# for each engine that was asked, and what to do.

# %%
try:
    with planned():
        jc.plan(two_convolutions.with_options(implementation="cudnn"), x, w)
except jc.UnsupportedGraphError as error:
    print(error.summary, error.why, error.fix, sep="\n- ")
    print(error.reasons)
else:
    raise AssertionError

# %% [markdown]
# ## Another dtype
# Where it is about dtypes, the error names those for which there is a plan: an A100 has no tensor
# cores for float8.

# %%
e4m3 = aval((1, 256, 256), "float8_e4m3fn")
try:
    with jc.target("A100"):
        jc.plan(matmul_relu.with_options(implementation="cudnn"), e4m3, e4m3)
except jc.UnsupportedGraphError as error:
    print(error.summary, error.expected, sep="\n- ")
else:
    raise AssertionError

# %% [markdown]
# ## While a program compiles
# The logger `jax_cudnn` tells the same at the level of debug: every segment, and why XLA runs its
# own.

# %%
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logger = logging.getLogger("jax_cudnn")
logger.addHandler(handler)
logger.setLevel(logging.DEBUG)
with planned():
    jax.jit(pooled).trace(x, w).lower(lowering_platforms=("cuda",))
print(*(line for line in told if "pooled" in line), sep="\n")
assert any("resample" in line for line in told)
