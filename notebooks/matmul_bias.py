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
# # A matmul with a bias, and choosing its plan
#
# A product with its epilogue as one plan; then the plans that cuDNN proposes for it, and how to
# take another one.

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


def check(got, want, tolerance=1e-2):
    """Prints the relative error in the 2-norm, which is to be below the tolerance."""
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < tolerance, error
    print(f"{error:.1e}")


# %% [markdown]
# ## The graph
# `g.matmul` multiplies (batch, M, K) by (batch, K, N). Inside of the graph the product is float32,
# so the only rounding is that of the output. The bias is broadcast by its size of 1.

# %%
a = normal((4, 128, 256), jnp.bfloat16)
b = normal((4, 256, 512), jnp.bfloat16) / 16
bias = normal((1, 1, 512), jnp.bfloat16)


@jc.graph
def matmul_bias(g, a, b, bias):
    return g.bias(g.matmul(a, b), bias)


def plain(a, b, bias):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias


y = jax.jit(matmul_bias)(a, b, bias)
check(y, plain(a, b, bias))
with planned():
    plan = jc.plan(matmul_bias.with_options(implementation="cudnn"), a, b, bias)
print(plan.explain())

# %% [markdown]
# ## A weight that lies transposed
# Strides say how an operand lies. Here the weight is an array (N, K), of which the graph sees the
# transpose: it is read where it lies. Its plan by default is XLA's, as `explain()` says in words:
# an H200 is measured to run a product with a bias alone faster so, because XLA's library adds a
# bias, too. With an activation behind it it is cuDNN's, and where `implementation="cudnn"` asks for
# it, as above.


# %%
@jc.graph
def dense(g, a, weight, bias):
    weight.set_stride([256 * 512, 1, 256])
    return g.bias(g.matmul(a, weight), bias)


weight = b.swapaxes(1, 2)
check(jax.jit(lambda a, w, bias: dense(a, w.swapaxes(1, 2), bias))(a, weight, bias), y)
with planned():
    print(jc.plan(dense, a, b, bias))

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.matmul` takes any rank, a bias of the last dimension, an activation and a residual.

# %%
gelu = jc.ops.matmul(a, b, bias=bias[0, 0], activation="gelu")
check(gelu, jax.nn.gelu(plain(a, b, bias)))
check(jc.ops.matmul(a, weight, bias=bias[0, 0], transpose_b=True), y)

# %% [markdown]
# ## What cuDNN proposes
# Heuristics propose engines with knobs, in the order in which they expect them to be fast. Modes A
# and B are two sets of heuristics; FALLBACK lists what works, in no order of speed. Listing builds
# nothing, so it is not known yet whether each can be built.

# %%
candidates = plan.candidates
assert candidates[candidates.chosen].engine == plan.pinned["engine"]
print(candidates)

# %% [markdown]
# ## Taking another one
# `built` tries each. `select` gives the plan of one, for this GPU. `pinned` are the options that
# ask for this engine with its knobs, in any program.

# %%
built = candidates.built()
refused = [f"{each.name}: {each.reason}" for each in built if not each.supported]
print(f"{len(refused)} of {len(built)} cannot be built", *refused, sep="\n")
other = plan.select(next(each for each in reversed(built) if each.supported))
print(other)

chosen = matmul_bias.with_options(**other.pinned)
with planned():
    assert jc.plan(chosen, a, b, bias).engine == other.engine
check(jax.jit(chosen)(a, b, bias), plain(a, b, bias))

# %% [markdown]
# Notes choose a kind of engine, `max_workspace` the bytes. A graph for which there is none of that
# kind is cut, or XLA's: here there is no precompiled engine. The others are XLA's by the default
# above.

# %%
with planned():
    for notes in (
        {"deselect_behavior_notes": ["RUNTIME_COMPILATION"]},
        {"select_numeric_notes": ["TENSOR_CORE"]},
        {"max_workspace": 0},
    ):
        print(notes, jc.plan(matmul_bias.with_options(**notes), a, b, bias).engine)

# %% [markdown]
# ## The fastest one
# On the GPU itself plans are measured, and the fastest is an argument of the function from then on.

# %%
if on_gpu:
    best = plan.autotune(a, b, bias)
    for each in plan, other, best:
        print(f"{1e6 * each.time(a, b, bias):.1f} us  {each}")
    check(best.execute(a, b, bias), plain(a, b, bias))
    tuned = matmul_bias.with_options(**best.pinned)
    check(jax.jit(tuned)(a, b, bias), plain(a, b, bias))
else:
    try:
        plan.time(a, b, bias)
    except jc.TargetError as error:
        print(error.summary, error.fix, sep="\n- ")
    else:
        raise AssertionError
