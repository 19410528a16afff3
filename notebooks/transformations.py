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
# # vmap, grad and jvp of fused operations
#
# A derivative of a graph is a graph, and so is a batch of it. cuDNN plans those like any other.

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
@jc.graph
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b))


def plain(x, w, b):
    x, w = (a.astype(jnp.float32) for a in (x, w))
    return jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME") + b)


x = normal((4, 32, 14, 14), jnp.bfloat16)
w = normal((32, 32, 3, 3), jnp.bfloat16) / 17
b = normal((1, 32, 1, 1), jnp.bfloat16)
dy = normal((4, 32, 14, 14))


def loss(function, x, w, b):
    return jnp.sum(function(x, w, b).astype(jnp.float32) * dy)


# %% [markdown]
# ## grad
# The forward is one graph, and so is the whole backward: relu's, the sum for the bias, and two
# convolutions. It is cut where cuDNN has no engine for all of it.

# %%
gradients = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
wide = [a.astype(jnp.float32) for a in (x, w, b)]
wanted = gradients(plain, *wide)
for got, want in zip(gradients(conv_bias_relu, x, w, b), wanted, strict=True):
    check(got, want)
with planned():
    plans = jc.plans(jax.grad(lambda *a: loss(conv_bias_relu, *a), (0, 1, 2)), x, w, b)
assert [*plans] == ["conv_bias_relu", "conv_bias_relu (backward)"]
for plan in plans.values():
    print(plan.explain())

# %% [markdown]
# What the backward needs of the forward is chosen so that few bytes are kept: of relu its result,
# which is there anyway. Here that is no further array. What is computed element by element from
# what is kept is not kept itself.

# %%
assert plans["conv_bias_relu"].residuals == ()

# %% [markdown]
# A gradient that nobody uses is not computed: with frozen weights there is no weight gradient.

# %%
with planned():
    of_images = jc.plans(jax.grad(lambda x: loss(conv_bias_relu, x, w, b)), x)
calls = [call.name for call in of_images["conv_bias_relu (backward)"].spec.calls]
assert not [name for name in calls if name.startswith("conv_wgrad")]
print(calls)

# %% [markdown]
# ## jvp
# A tangent is a graph, too, linear in the tangents that come in. Only the weight moves here, so it
# is one convolution more.

# %%
dw = normal(w.shape, w.dtype)
value, tangent = jax.jit(lambda w, dw: jax.jvp(lambda w: conv_bias_relu(x, w, b), (w,), (dw,)))(
    w, dw
)
_, want = jax.jvp(lambda w: plain(x, w, b), (wide[1],), (dw.astype(jnp.float32),))
check(tangent, want)
with planned():
    plans = jc.plans(lambda w, dw: jax.jvp(lambda w: conv_bias_relu(x, w, b), (w,), (dw,)), w, dw)
for name, plan in plans.items():
    print(name, "-", [call.name for call in plan.spec.calls], plan.engine)

# %% [markdown]
# ## vmap
# A batch becomes a dimension that the graph has, so there is one plan and no loop. Of images it is
# their batch; of weights it is features of the result, or groups where both are batched. Of several
# ways the one that moves fewest bytes is taken.

# %%
images, weights = jnp.stack([x, 2 * x, -x]), jnp.stack([w, -w, w / 2])
for axes in (0, None, None), (None, 0, None), (0, 0, None):
    operands = [
        many if axis == 0 else one
        for axis, one, many in zip(axes, (x, w, b), (images, weights, b), strict=True)
    ]
    batched = jax.vmap(conv_bias_relu, axes)
    check(jax.jit(batched)(*operands), jax.vmap(plain, axes)(*operands))
    with planned():
        ((name, plan),) = jc.plans(batched, *operands).items()
    assert len(plan.execution_plans) == len(plan.segments) == 1
    print(axes, *plan.spec.input_tensors, sep="\n    ")

# %% [markdown]
# ## All of them nested
# Gradients by example are vmap of grad, a Hessian times a vector is jvp of grad.


# %%
@jax.jit
def by_example(x, w, b):
    def of_one(x, dy):
        return jax.grad(lambda w: jnp.sum(conv_bias_relu(x[None], w, b)[0] * dy))(w)

    return jax.vmap(of_one)(x, dy)


def plain_by_example(x, w, b):
    def of_one(x, dy):
        return jax.grad(lambda w: jnp.sum(plain(x[None], w, b)[0] * dy))(w)

    return jax.vmap(of_one)(x, dy)


check(by_example(x, w, b), plain_by_example(*wide))


@jc.graph
def gelu_matmul(g, a, b):
    return g.gelu_approx_tanh(g.matmul(a, b))


def curvature(function, a, b, db):
    return jax.jvp(jax.grad(lambda b: jnp.sum(function(a, b) ** 2)), (b,), (db,))[1]


a, c, dc = normal((3, 1, 32, 32)) / 6
got = jax.jit(curvature, static_argnums=0)(gelu_matmul, a, c, dc)
check(got, curvature(lambda a, b: jax.nn.gelu(a @ b), a, c, dc), 2e-2)

# %% [markdown]
# ## Which of them is wrong?
# `jc.bisect` runs a program of this process's arrays step by step, each graph beside its reference,
# and says which differs most or makes the first NaN.

# %%
report = jc.bisect(lambda x, w, b: loss(conv_bias_relu, x, w, b), x, w, b)
print(str(report).split("\n\n")[0])
