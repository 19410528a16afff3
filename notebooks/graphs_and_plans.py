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
# What can be said in a graph, what is decided for it, and how to decide otherwise.

# %%
import contextlib
import time

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


def check(got, want, tolerance=1e-2):
    """Prints the relative error in the 2-norm, which is to be below the tolerance."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < tolerance, error
    print(f"{error:.1e}")


# %% [markdown]
# ## The function
# `g` comes first; the other arguments are arrays, in any pytree. Keyword arguments and Python
# numbers are static: another value is another graph. Returned tensors, in any pytree, are the
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


# Keyword arguments of a jitted function are traced: static ones are bound outside of it.
results = jax.jit(lambda x, layer: dense(x, layer, slope=0.1))(x, layer)
for name, want in plain(x, layer, 0.1).items():
    check(results[name], want)

# %% [markdown]
# ## What is decided: dtypes
# The trace is printed with each decision. Operators are operations, `gain` has become an input, and
# inner values are float32. An output has the promoted dtype of its inputs: float32, because of
# `gain`.

# %%
arrays, trace = dense.trace(x, layer, slope=0.1)
print(trace.spec)

# %% [markdown]
# Each is open: `.set_data_type` rounds one tensor, `intermediate_data_type` all inner ones, and
# `compute_data_type` says in what products accumulate. An inner rounding is done, in the reference,
# too.


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
# ## What is decided: memory order
# Images are channels-last for cuDNN, and row-major arrays are copied once, where a chain of graphs
# begins and ends. A tensor that lies otherwise says so by packed strides.


# %%
@jc.graph
def of_tokens(g, x, kernel):
    x.set_stride([256, 4 * 256, 1])  # (tokens, batch, features) in memory
    return g.matmul(x, kernel)


tokens_first = x.swapaxes(0, 1)
got = jax.jit(lambda t, kernel: of_tokens(t.swapaxes(0, 1), kernel))(tokens_first, layer["kernel"])
check(got, x.astype(jnp.float32) @ layer["kernel"].astype(jnp.float32))

# %% [markdown]
# ## What must be said: open shapes
# A reduction, a reshape, a data gradient leave the result's shape open. It is given to the
# operation or set afterwards.


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
# A plan is looked for among what cuDNN's heuristics propose, mode after mode, and the first that
# can be built is taken. By default A is asked, then FALLBACK.


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
# Options leave candidates out. They are arguments of `jc.graph` and `with_options`, or a value that
# many functions share. They are part of the graph, so they reach its gradients and batches.

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

# %% [markdown]
# ## Plans are values
# A plan can be looked at, chosen among its candidates, kept as bytes, and run by itself where its
# GPU is. Of a graph that is cut, `parts` are the plans of cuDNN's segments.

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
# Plans are kept in memory, and on disk in the user's cache folder: the next process plans nothing.
# `jc.configure(plan_cache=FOLDER)` names another one. `jc.warmup` plans a whole program ahead.

# %%
if on_gpu:
    jc.warmup(conv_relu, image, weight)
with planned():
    began = time.perf_counter()
    jc.plan(conv_relu, image, weight)
    print(f"{1e3 * (time.perf_counter() - began):.1f} ms")
check(jax.jit(conv_relu)(image, weight), wanted)
