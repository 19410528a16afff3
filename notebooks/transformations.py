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
# A derivative of a graph is a graph, and so is a batch. cuDNN plans them like any graph.

# %%
import jax
import jax.numpy as jnp
from helpers import check, draw, normal, planned

import jax_cudnn as jc


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
# The forward is one graph, and so is the whole backward: the derivative of relu, the sum for the
# bias, and two convolutions. It is cut where cuDNN has no engine for the whole.

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
draw(plans)

# %% [markdown]
# The forward keeps as few bytes as possible for the backward. For relu it keeps the result, which
# exists anyway, so there is no additional array here. Values that can be recomputed elementwise
# from kept ones are not kept.

# %%
assert plans["conv_bias_relu"].residuals == ()

# %% [markdown]
# Unused gradients are not computed: with frozen weights there is no weight gradient.

# %%
with planned():
    of_images = jc.plans(jax.grad(lambda x: loss(conv_bias_relu, x, w, b)), x)
calls = [call.name for call in of_images["conv_bias_relu (backward)"].spec.calls]
assert not [name for name in calls if name.startswith("conv_wgrad")]
print(calls)

# %% [markdown]
# ## jvp
# A tangent is a graph, too, linear in the incoming tangents. Here only the weight has a tangent,
# which adds one convolution.

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
# A batch is folded into an existing dimension of the graph, so there is one plan and no loop:
# batched images into the batch dimension, batched weights into the output features, and both
# together into groups. If there are several ways, the one that moves the fewest bytes is used.

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
# ## Nested transformations
# Per-sample gradients are vmap of grad. A Hessian-vector product is jvp of grad.


# %%
@jax.jit
def per_sample(x, w, b):
    def of_one(x, dy):
        return jax.grad(lambda w: jnp.sum(conv_bias_relu(x[None], w, b)[0] * dy))(w)

    return jax.vmap(of_one)(x, dy)


def plain_per_sample(x, w, b):
    def of_one(x, dy):
        return jax.grad(lambda w: jnp.sum(plain(x[None], w, b)[0] * dy))(w)

    return jax.vmap(of_one)(x, dy)


check(per_sample(x, w, b), plain_per_sample(*wide))


@jc.graph
def gelu_matmul(g, a, b):
    return g.gelu_approx_tanh(g.matmul(a, b))


def curvature(function, a, b, db):
    return jax.jvp(jax.grad(lambda b: jnp.sum(function(a, b) ** 2)), (b,), (db,))[1]


a, c, dc = normal((3, 1, 32, 32)) / 6
got = jax.jit(curvature, static_argnums=0)(gelu_matmul, a, c, dc)
check(got, curvature(lambda a, b: jax.nn.gelu(a @ b), a, c, dc), 2e-2)

# %% [markdown]
# ## Which graph is wrong?
# `jc.bisect` runs a program, compares each graph with its reference, and reports which
# differs most or produces the first NaN.

# %%
report = jc.bisect(lambda x, w, b: loss(conv_bias_relu, x, w, b), x, w, b)
print(str(report).split("\n\n")[0])
