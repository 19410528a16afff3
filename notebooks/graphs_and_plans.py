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
# # Graphs and plans in detail
#
# What a graph states, what the library decides for it, and how to change that.

# %%
import time

import jax
import jax.numpy as jnp
from helpers import check, draw, normal, on_gpu, planned

import jax_cudnn as jc

# %% [markdown]
# ## The function
# `g` comes first; the other arguments are arrays, in any pytree. Keyword arguments and Python
# scalars are static: a new value makes a new graph. Returned tensors, in any pytree, are the
# outputs. Arrays that the function closes over become operands.


# %%
x = normal((4, 128, 256), jnp.bfloat16)
layer = {
    "kernel": normal((1, 256, 256), jnp.bfloat16) / 16,
    "bias": normal((1, 1, 256), jnp.bfloat16),
}
gain = jnp.full((1, 1, 256), 2.0)


@jc.graph
def dense(g, x, layer, *, slope):
    h = g.matmul(x, layer["kernel"])
    h = (h + layer["bias"]) * gain
    y = g.leaky_relu(h, negative_slope=slope)
    return {"before": h, "after": y}


def plain(x, layer, slope):
    x, kernel = (a.astype(jnp.float32) for a in (x, layer["kernel"]))
    h = (x @ kernel + layer["bias"]) * gain
    return {"before": h, "after": jax.nn.leaky_relu(h, slope)}


# jit traces keyword arguments, so bind static ones outside of it.
results = jax.jit(lambda x, layer: dense(x, layer, slope=0.1))(x, layer)
for name, want in plain(x, layer, 0.1).items():
    check(results[name], want)

# %% [markdown]
# ## Defaults: dtypes
# The printed trace shows each decision. Operators become operations, `gain` becomes an input, and
# inner values are float32. An output has the promoted dtype of its inputs: float32, because of
# `gain`.

# %%
arrays, trace = dense.trace(x, layer, slope=0.1)
print(trace.spec)

# %% [markdown]
# You can change each: `.set_data_type` sets the dtype of one tensor, `intermediate_data_type` of
# all inner ones, and `compute_data_type` the dtype in which products accumulate. The reference
# rounds inner values in the same way.


# %%
@jc.graph(intermediate_data_type="bfloat16")
def rounded(g, x, kernel):
    h = g.matmul(x, kernel, compute_data_type="float32")
    return g.exp(h).set_data_type("float16")


y = jax.jit(rounded)(x, layer["kernel"])
product = (x.astype(jnp.float32) @ layer["kernel"].astype(jnp.float32)).astype(jnp.bfloat16)
check(y, jnp.exp(product.astype(jnp.float32)))
print(rounded.trace(x, layer["kernel"])[1].spec)

# %% [markdown]
# ## Defaults: memory order
# Images are channels-last for cuDNN. Row-major arrays are copied once, at the start and the end of
# a chain of graphs. Packed strides declare any other memory order.


# %%
@jc.graph
def of_tokens(g, x, kernel):
    x.set_stride([256, 4 * 256, 1])  # (tokens, batch, features) in memory
    return g.matmul(x, kernel)


tokens_first = x.swapaxes(0, 1)
got = jax.jit(lambda t, kernel: of_tokens(t.swapaxes(0, 1), kernel))(tokens_first, layer["kernel"])
check(got, x.astype(jnp.float32) @ layer["kernel"].astype(jnp.float32))

# %% [markdown]
# ## Shapes that you must set
# A reduction, a reshape or a data gradient does not determine the shape of its result. Pass it to
# the operation, or set it afterwards.


# %%
@jc.graph
def sums(g, x):
    one = g.reduction(x, mode="ADD", out_dims=[4, 128, 1])
    other = g.reduction(x, mode="MAX").set_dim([4, 128, 1])
    return one, other


total, largest = jax.jit(sums)(x)
check(total, x.astype(jnp.float32).sum(-1, keepdims=True))
check(largest, x.max(-1, keepdims=True))

# %% [markdown]
# ## Heuristics
# cuDNN's heuristics propose candidates, mode by mode. The first that can be built becomes the plan.
# The default is mode A, then FALLBACK.


# %%
@jc.graph(implementation="cudnn")
def conv_relu(g, x, w):
    return g.relu(g.conv_fprop(x, w, padding=[1, 1]))


image = normal((8, 64, 28, 28), jnp.bfloat16)
weight = normal((64, 64, 3, 3), jnp.bfloat16) / 24
for mode in "A", "B", "FALLBACK":
    with planned():
        plan = jc.plan(conv_relu.with_options(heuristics=[mode]), image, weight)
    print(f"{mode}: {plan.candidate_count} candidates, {plan}")

# %%
with planned():
    plan = jc.plan(conv_relu, image, weight)
print("\n".join(str(plan.candidates).splitlines()[:8]))

# %% [markdown]
# ## Notes, workspace, determinism
# Options exclude candidates. They are arguments of `jc.graph` and `with_options`, or one value that
# many functions share. They are part of the graph, so its gradients and batches inherit them.

# %%
careful = jc.Options(deterministic=True, max_workspace=2**20, implementation="cudnn")
with planned():
    plan = jc.plan(conv_relu.with_options(options=careful), image, weight)
    backwards = jc.plans(
        jax.grad(lambda w: conv_relu.with_options(options=careful)(image, w).sum()), weight
    )
assert plan.workspace_bytes <= 2**20
for name, each in backwards.items():
    assert each.spec.options.deterministic
    print(name, "-", each)
draw(backwards)

# %% [markdown]
# ## Plans are values
# You can inspect a plan, select it among its candidates, save it as bytes, and run it alone on its
# GPU. If a graph is cut, `parts` are the plans of its cuDNN segments.

# %%
with planned():
    plan = jc.plan(conv_relu, image, weight)
data = plan.serialize()
again = jc.Plan.deserialize(data)
assert again.engine == plan.engine
assert again.to_json() == plan.to_json()
print(f"{len(data):,} bytes, {sorted(plan.to_json())}")
wanted = jax.nn.relu(
    jax.lax.conv(image.astype(jnp.float32), weight.astype(jnp.float32), (1, 1), "SAME")
)
if on_gpu:
    check(again.execute(image, weight), wanted)
    print(f"{1e6 * again.time(image, weight):.1f} us")

# %% [markdown]
# ## Planned once
# Plans are kept in memory, and on disk in the user's cache folder: the next process does not plan
# again. `jc.configure(plan_cache=FOLDER)` selects another folder. `jc.warmup` plans a whole program
# ahead of time.

# %%
if on_gpu:
    jc.warmup(conv_relu, image, weight)
with planned():
    began = time.perf_counter()
    jc.plan(conv_relu, image, weight)
    print(f"{1e3 * (time.perf_counter() - began):.1f} ms")
check(jax.jit(conv_relu)(image, weight), wanted)
