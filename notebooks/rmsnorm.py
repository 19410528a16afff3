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
# `x / sqrt(mean(x**2) + epsilon) * scale`: forward, backward, and the default where
# cuDNN is measured to be slower than XLA.

# %%
import jax
import jax.numpy as jnp
from helpers import bars, check, draw, normal, on_gpu, planned, seconds

import jax_cudnn as jc

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
# As a separate node, and as the derivative of the forward. `has_dbias=False` because there is no
# bias.


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
# ## cuDNN or XLA
# By default, with `"split"`, XLA runs the graphs at which cuDNN is measured to be slower, such as
# the backward of rows of 128 elements, drawn below. The reason gives the figure. `"cudnn"` means
# cuDNN or an error.

# %%
short, short_scale = x[..., :128], scale[..., :128]


def gradient_with(implementation):
    chosen = forward.with_options(implementation=implementation)
    return jax.grad(lambda x, scale: jnp.sum(chosen(x, scale)[0].astype(jnp.float32)), (0, 1))


choices = {name: gradient_with(name) for name in ("split", "cudnn")}
for rows, by in ((x, scale), (short, short_scale)):
    size = rows.shape[-1]
    with planned():
        plans = {name: jc.plans(choice, rows, by) for name, choice in choices.items()}
    drawn = {f"{i}, {graph}": plan for i, both in plans.items() for graph, plan in both.items()}
    for name, plan in drawn.items():
        print(f"{size} elements, {name}: {plan.segments[0].reason or plan.engine}")
    if on_gpu:
        bars(seconds(choices, rows, by), f"Gradient, rows of {size} elements")
draw(drawn)

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.rms_norm` takes the axes and a scale of their shape. `zero_centered_scale=True` adds 1 to
# the scale. Changing an epsilon that is a Python scalar does not make a new plan. An epsilon that
# is an array can be computed, and then XLA runs the normalization.

# %%
check(jc.ops.rms_norm(x, scale[0, 0]), y)
check(jc.ops.rms_norm(x, scale[0, 0] - 1, zero_centered_scale=True), y)
check(jax.jit(lambda epsilon: jc.ops.rms_norm(x, scale[0, 0], epsilon=epsilon))(1e-6), y)
