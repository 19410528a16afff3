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
# # Layer normalization
#
# The forward pass in training, with the statistics that the backward reads; the backward pass;
# inference. First as graphs with cuDNN's names, then as `jc.ops.layer_norm` with JAX's.

# %%
import jax
import jax.numpy as jnp
from helpers import check, draw, normal, planned

import jax_cudnn as jc

# %% [markdown]
# ## Shapes
# `g.layernorm` normalizes the dims in which the scale is larger than 1. Tokens of an embedding are
# (tokens, embedding, 1, 1) in cuDNN's samples, with a scale of (1, embedding, 1, 1). Here any
# rank works: (batch, tokens, embedding) with a scale of (1, 1, embedding) gives the same result.

# %%
x = (2 * normal((4, 128, 1024)) + 1).astype(jnp.bfloat16)
scale = (1 + 0.1 * normal((1, 1, 1024))).astype(jnp.bfloat16)
bias = normal((1, 1, 1024), jnp.bfloat16)
dy = normal(x.shape, jnp.bfloat16)
EPSILON = 1e-5


def plain(x, scale, bias):
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(x.var(-1, keepdims=True) + EPSILON)
    return (x - mean) * inverse * scale + bias, mean, inverse


# %% [markdown]
# ## Forward
# In training the node has three results; the statistics are float32, one for each row.


# %%
@jc.graph
def forward(g, x, scale, bias):
    y, mean, inv_var = g.layernorm(
        input=x, scale=scale, bias=bias, epsilon=EPSILON, norm_forward_phase="TRAINING"
    )
    return y, mean.set_data_type("float32"), inv_var.set_data_type("float32")


y, mean, inv_var = jax.jit(forward)(x, scale, bias)
for got, want in zip((y, mean, inv_var), plain(x, scale, bias), strict=True):
    check(got, want)
print(y.shape, y.dtype, mean.shape, mean.dtype)

# %%
with planned():
    plan = jc.plan(forward, x, scale, bias)
assert len(plan.execution_plans) == 1
print(plan.explain())

# %% [markdown]
# ## Backward
# The backward pass is a node, too. From the incoming gradient, the input, the scale and the two
# statistics it computes the gradients of input, scale and bias.


# %%
@jc.graph
def backward(g, dy, x, scale, mean, inv_var):
    return g.layernorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=inv_var)


gradients = jax.jit(backward)(dy, x, scale, mean, inv_var)
wide = [a.astype(jnp.float32) for a in (x, scale, bias)]
_, pull_back = jax.vjp(lambda *a: plain(*a)[0], *wide)
wanted = pull_back(dy.astype(jnp.float32))
for got, want in zip(gradients, wanted, strict=True):
    check(got, want)

# %% [markdown]
# You need not write it: the derivative of `forward` is that node. `jc.plans` shows the graphs of a
# gradient.


# %%
def loss(x, scale, bias):
    y, _, _ = forward(x, scale, bias)
    return jnp.sum(y.astype(jnp.float32) * dy)


for got, want in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias), wanted, strict=True):
    check(got, want)
with planned():
    plans = jc.plans(jax.grad(loss, (0, 1, 2)), x, scale, bias)
assert [*plans] == ["forward", "forward (backward)"]
for name, plan in plans.items():
    print(name, "-", plan)

# %% [markdown]
# ## Inference
# Without statistics the node has one result. In a graph function, pass
# `"INFERENCE"`; in `jc.Graph` the two statistics are None, as in cuDNN's frontend.


# %%
@jc.graph
def inference(g, x, scale, bias):
    return g.layernorm(x, scale, bias, EPSILON, norm_forward_phase="INFERENCE")


check(jax.jit(inference)(x, scale, bias), y)
with jc.Graph(inputs=[x, scale, bias], outputs=["ln::Y"]) as graph:
    y_only, no_mean, no_inv_var = graph.layernorm(
        input=x, scale=scale, bias=bias, epsilon=EPSILON, norm_forward_phase="INFERENCE", name="ln"
    )
    y_only.set_output(True)
assert no_mean is None
assert no_inv_var is None
check(graph(x, scale, bias), y)

# %% [markdown]
# ## What is fused
# A residual before the normalization, a zero-centered scale, and elementwise operations after it
# become part of the same plan if an engine supports them.


# %%
@jc.graph
def block(g, x, residual, scale, bias):
    y, _, _ = g.layernorm(g.add(x, residual), g.add(scale, 1.0), bias, EPSILON)
    return g.gelu_approx_tanh(y)


with planned():
    plan = jc.plan(block, x, dy, scale, bias)
print(plan.explain())
draw(plan)
want = jax.nn.gelu(plain(x.astype(jnp.float32) + dy, 1 + scale.astype(jnp.float32), bias)[0])
check(jax.jit(block)(x, dy, scale, bias), want)

# %% [markdown]
# ## In JAX's conventions
# `jc.ops.layer_norm` takes the axes, and a scale and a bias of their shape.

# %%
y, (mean, inverse) = jc.ops.layer_norm(x, scale[0, 0], bias[0, 0], return_statistics=True)
check(y, plain(x, scale, bias)[0])
first = jc.ops.layer_norm(x.swapaxes(1, 2), scale[0, 0], bias[0, 0], axis=1)
check(first.swapaxes(1, 2), y)
