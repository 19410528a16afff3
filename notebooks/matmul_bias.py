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
# A matmul with its epilogue as one plan; then the other plans that cuDNN proposes for it, and how
# to choose one.

# %%
import jax
import jax.numpy as jnp
from helpers import bars, check, draw, normal, on_gpu, planned

import jax_cudnn as jc

# %% [markdown]
# ## The graph
# `g.matmul` multiplies (batch, M, K) by (batch, K, N). Inside the graph the product is float32, so
# only the output is rounded. The bias is broadcast along its dimensions of size 1.

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
draw(plan)

# %% [markdown]
# ## A transposed weight
# Strides give the memory order of an operand. Here the weight is an array (N, K), and the graph
# sees its transpose without a copy. By default XLA runs this graph, and `explain()` gives the
# reason: on an H200 a matmul with only a bias is measured to be faster in XLA, whose library also
# fuses the bias. With an activation after it, or with `implementation="cudnn"` as above, it runs on
# cuDNN.


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
# `jc.ops.matmul` takes operands of any rank, a bias along the last dimension, an activation and a
# residual.

# %%
gelu = jc.ops.matmul(a, b, bias=bias[0, 0], activation="gelu")
check(gelu, jax.nn.gelu(plain(a, b, bias)))
check(jc.ops.matmul(a, weight, bias=bias[0, 0], transpose_b=True), y)

# %% [markdown]
# ## What cuDNN proposes
# Heuristics propose engines with knobs, the expected fastest first. Modes A and B are two sets of
# heuristics; FALLBACK lists engines that work, in no order of speed. Listing does not build the
# candidates, so some may turn out not to be supported.

# %%
candidates = plan.candidates
assert candidates[candidates.chosen].engine == plan.pinned["engine"]
print(candidates)

# %% [markdown]
# ## Choosing another one
# `built` tries to build each. `select` returns the plan of one, for this GPU. `pinned` holds the
# options that select this engine and its knobs in any program.

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
# Notes select a kind of engine; `max_workspace` limits the bytes. A graph without an engine of that
# kind is cut or falls back to XLA: here there is no precompiled engine. The other two run in XLA by
# the default above.

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
# On the GPU, `autotune` times the plans. Pass the options of the fastest to the function.

# %%
if on_gpu:
    best = plan.autotune(a, b, bias)
    plans = {"first proposal": plan, "chosen above": other, "fastest": best}
    for name, each in plans.items():
        print(f"{name}: {each}")
    times = {name: each.time(a, b, bias) for name, each in plans.items()}
    bars(times, "One matmul with a bias")
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
