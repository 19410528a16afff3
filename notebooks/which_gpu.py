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
# # Which GPU runs my graph?
#
# `jc.support` finds out from cuDNN on which GPU models a graph is a single plan. `jc.target` plans
# and lowers for a GPU that this machine does not have. Neither needs a GPU.

# %%
import json
from importlib import resources

import jax
import jax.numpy as jnp
from helpers import aval, on_gpu
from IPython.display import display

import jax_cudnn as jc

# %% [markdown]
# ## A table
# cuDNN itself plans, in a separate process, from a profile of each GPU model. A star marks profiles
# that come from public specifications. GPUs of this machine are planned for with their handle.


# %%
@jc.graph
def fp8_matmul(g, a, b):
    return g.matmul(a, b).set_data_type("bfloat16")


@jc.graph
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b))


x, w, b = aval((8, 64, 28, 28)), aval((64, 64, 3, 3)), aval((1, 64, 1, 1))
e4m3 = aval((1, 256, 256), "float8_e4m3fn")
of_conv = jc.support(conv_bias_relu, x, w, b, gpus=["A100", "H100", "H200", "B200"])
assert of_conv
print(of_conv)

# %%
of_fp8 = jc.support(fp8_matmul, e4m3, e4m3, gpus=["A100", "H200"])
assert not of_fp8
assert of_fp8["H200"]
print(of_fp8)

# %% [markdown]
# The result is true if each graph is a single plan on each GPU. Its rows and `to_json` are for
# programs. A graph that is not a single plan still runs, cut or in XLA.

# %%
row = of_fp8["A100", "fp8_matmul"]
print(row.supported, "-", row.reason)
print(of_conv.to_json()["rows"][0].keys())
for gpu in ("A100", "H200"):
    display(*jc.explain(fp8_matmul, e4m3, e4m3, gpu=gpu).pictures.values())

# %% [markdown]
# ## A whole program
# `support` finds the graphs in any JAX function, through jit, scan, cond and gradients.


# %%
def loss(w, x, b):
    y = jc.ops.conv(x, w, bias=b, activation="relu", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return jnp.sum(jc.ops.layer_norm(y).astype(jnp.float32))


gradient = jax.jit(jax.grad(loss))
print(jc.support(gradient, w, x, aval((64,)), gpus=["H200"]))

# %% [markdown]
# `jc.explain` shows the program on one GPU: where each graph is called, what is fused into which
# plan, what crosses memory between plans, and the least time that takes.

# %%
report = jc.explain(gradient, w, x, aval((64,)), gpu="H200")
assert len(report.pictures) == 4
display(report)

# %% [markdown]
# ## A plan for one GPU
# Inside `jc.target` plans are for that GPU. A program can be lowered for it, too. When it is
# compiled on the GPU, the plans are made again with the device's handle and may be faster.

# %%
with jc.target("H200"):
    plan = jc.plan(conv_bias_relu, x, w, b)
    lowered = jax.jit(conv_bias_relu).trace(x, w, b).lower(lowering_platforms=("cuda",))
print(plan)
assert "@jax_cudnn" in lowered.as_text()

elsewhere = jc.plan(conv_bias_relu, x, w, b, gpus=["A100", "B200"])
print(*elsewhere.values(), sep="\n")

# %% [markdown]
# On a machine with a GPU, `jc.plan` uses that GPU by default.

# %%
if on_gpu:
    print(jc.plan(conv_bias_relu, x, w, b))
else:
    try:
        jc.plan(conv_bias_relu, x, w, b)
    except jc.TargetError as error:
        print(error.summary, error.fix, sep="\n- ")

# %% [markdown]
# ## A profile of your GPU
# A profile is cuDNN's description of a device. On a machine with the GPU, write
# `cudnn.create_device_properties(0).serialize()` to a file and pass it to `Profile.from_json`. As
# an example, here is the package's profile of an H200 with half the SMs.

# %%
file = resources.files("jax_cudnn._core.planning.deviceless") / "profiles" / "h200.json"
properties = json.loads(file.read_text())["properties"]
properties["multiProcessorCount"] //= 2
mine = jc.Profile.from_json(json.dumps(properties), name="half an H200")
with jc.target(mine):
    print(jc.plan(conv_bias_relu, x, w, b))
