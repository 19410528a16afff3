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
# # RMS normalization
#
# `x / sqrt(mean(x**2) + epsilon) * scale`: forward in training and inference, backward, and what is
# done by default where cuDNN is measured to be slower than XLA.

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


# %%
x = normal((8, 128, 2048), jnp.bfloat16)
scale = (1 + 0.1 * normal((1, 1, 2048))).astype(jnp.bfloat16)
dy = normal(x.shape, jnp.bfloat16)
EPSILON = 1e-6


def plain(x, scale):
    x, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    inverse = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x * inverse * scale, inverse


# %% [markdown]
# ## Forward
# The node normalizes the dims in which the scale is larger than 1. In training its second result is
# the inverse of the root mean square of each row, which the backward reads.


# %%
@jc.graph
def forward(g, x, scale):
    y, inv_var = g.rmsnorm(input=x, scale=scale, epsilon=EPSILON, norm_forward_phase="TRAINING")
    return y, inv_var.set_data_type("float32")


y, inverse = jax.jit(forward)(x, scale)
for got, want in zip((y, inverse), plain(x, scale), strict=True):
    check(got, want)
with planned():
    plan = jc.plan(forward.with_options(implementation="cudnn"), x, scale)
print(plan.explain())

# %% [markdown]
# ## Backward
# As a node of its own, and as the derivative of the forward. Without a bias there is no gradient of
# one: `has_dbias=False`.


# %%
@jc.graph
def backward(g, dy, x, scale, inverse):
    return g.rmsnorm_backward(grad=dy, input=x, scale=scale, inv_variance=inverse, has_dbias=False)


_, pull_back = jax.vjp(lambda *a: plain(*a)[0], *(a.astype(jnp.float32) for a in (x, scale)))
wanted = pull_back(dy.astype(jnp.float32))
for got, want in zip(jax.jit(backward)(dy, x, scale, inverse), wanted, strict=True):
    check(got, want)


def loss(x, scale):
    return jnp.sum(forward(x, scale)[0].astype(jnp.float32) * dy)


for got, want in zip(jax.jit(jax.grad(loss, (0, 1)))(x, scale), wanted, strict=True):
    check(got, want)

# %% [markdown]
# ## Who runs it
# The default, `"split"`, leaves to XLA what cuDNN is measured to be slower at: rows of 128
# elements, say. The reason has the figure. `"cudnn"` means cuDNN or an error.

# %%
short, short_scale = x[..., :128], scale[..., :128]
with planned():
    for rows, by in ((x, scale), (short, short_scale)):
        for implementation in "split", "cudnn":
            asked = forward.with_options(implementation=implementation)
            plans = jc.plans(jax.grad(lambda x, s, f=asked: f(x, s)[0].sum(), (0, 1)), rows, by)
            for name, plan in plans.items():
                print(f"{rows.shape[-1]} elements, {implementation}, {name}: {plan.engine}")
                if plan.segments[0].reason:
                    print("   ", plan.segments[0].reason)

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.rms_norm` takes the axes and a scale of their shape. A scale that decays to 0 is given as
# such. An epsilon that is another Python number makes no other plan; one that is an array may be
# computed, and then XLA normalizes.

# %%
check(jc.ops.rms_norm(x, scale[0, 0]), y)
check(jc.ops.rms_norm(x, scale[0, 0] - 1, zero_centered_scale=True), y)
check(jax.jit(lambda epsilon: jc.ops.rms_norm(x, scale[0, 0], epsilon=epsilon))(1e-6), y)
