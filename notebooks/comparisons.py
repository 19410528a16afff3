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
# # Comparisons, logic, selection
#
# Graphs can compare, combine booleans and select, with masks that never reach memory.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from helpers import check, draw, normal, planned

import jax_cudnn as jc

# %%
a, b = normal((2, 8, 64, 16, 16))

# %% [markdown]
# ## Comparisons
# `cmp_eq`, `cmp_neq`, `cmp_gt`, `cmp_ge`, `cmp_lt` and `cmp_le` give booleans. They compare in
# float32; with NaN all but `cmp_neq` are False.


# %%
@jc.graph
def compare(g, a, b):
    return [getattr(g, f"cmp_{name}")(a, b) for name in ("eq", "neq", "gt", "ge", "lt", "le")]


with_nan = a.at[0].set(jnp.nan).at[1].set(b[1])
plain = [getattr(jnp, n) for n in ("equal", "not_equal", "greater", "greater_equal", "less")]
plain.append(jnp.less_equal)
for got, want in zip(jax.jit(compare)(with_nan, b), plain, strict=True):
    assert got.dtype == bool
    np.testing.assert_array_equal(got, want(with_nan, b))

# %% [markdown]
# ## Logic
# `logical_and`, `logical_or` and `logical_not` take booleans only. A float is an error.


# %%
@jc.graph
def unequal_or(g, a, b, mask):
    return g.logical_or(mask, g.logical_not(g.cmp_eq(a, b)))


mask = a > 1
np.testing.assert_array_equal(jax.jit(unequal_or)(with_nan, b, mask), mask | (with_nan != b))
with planned():
    print(jc.plan(unequal_or, a, b, mask).explain())

try:
    jc.graph(lambda g, a, b: g.logical_and(a, b))(a, b)
except jc.GraphTypeError as error:
    print(error.summary, error.expected, error.got, sep="\n- ")
else:
    raise AssertionError

# %% [markdown]
# In JAX a boolean is a byte. At the edge of a plan, XLA converts it to float32 for cuDNN, because
# cuDNN stores boolean arrays as bits, and int8 mixed with other dtypes does not compile. Inside a
# plan booleans cost nothing.
#
# ## Selection
# `binary_select(input0, input1, mask)` is `jnp.where(mask, input0, input1)`. A NaN that is not
# selected does not spread, not even in derivatives.


# %%
@jc.graph
def inner(g, a, b):
    near = g.logical_and(g.cmp_gt(a, -1.0), g.cmp_lt(a, 1.0))
    return g.binary_select(a, b, near)


near = (a > -1) & (a < 1)
np.testing.assert_array_equal(jax.jit(inner)(a, b), jnp.where(near, a, b))
gradient = jax.grad(lambda a: inner(a, b).sum())(a)
np.testing.assert_array_equal(gradient, near)
assert not jnp.isnan(inner(a, jnp.where(near, jnp.nan, b))[near]).any()
with planned():
    plan = jc.plan(inner, a, b)
assert len(plan.execution_plans) == 1
print(plan.explain())
draw(plan)

# %% [markdown]
# ## Indices
# `gen_index` gives the index along an axis, so that a mask can be computed from positions: a lower
# triangle of each image.


# %%
@jc.graph
def lower_triangle(g, a):
    row, column = g.gen_index(a, axis=2), g.gen_index(a, axis=3)
    return g.binary_select(a, 0.0, g.cmp_ge(row, column))


np.testing.assert_array_equal(jax.jit(lower_triangle)(a), jnp.tril(a))
with planned():
    print(jc.plan(lower_triangle, a))

figure, (left, right) = plt.subplots(1, 2, figsize=(5, 2.6))
left.imshow(a[0, 0])
left.set_title("image")
right.imshow(lower_triangle(a)[0, 0])
right.set_title("lower_triangle(image)")
plt.show()

# %% [markdown]
# ## After a product
# Selection is elementwise, so it can be the epilogue of a product.


# %%
@jc.graph
def masked_product(g, x, y, mask):
    return g.binary_select(g.matmul(x, y), 0.0, mask)


x, y = normal((2, 4, 64, 64), jnp.bfloat16)
mask = jnp.tril(jnp.ones((4, 64, 64), bool))
want = jnp.where(mask, jnp.matmul(x, y, preferred_element_type=jnp.float32), 0)
check(jax.jit(masked_product)(x, y, mask), want)
with planned():
    plan = jc.plan(masked_product, x, y, mask)
assert len(plan.execution_plans) == 1
print(plan.explain())
draw(plan)
