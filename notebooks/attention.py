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
# # Attention
#
# Scaled dot-product attention, forward and backward: cuDNN's node, the same through `jc.Graph`, and
# `jc.ops.dot_product_attention`, which takes the arguments of `jax.nn.dot_product_attention` and
# more.

# %%
from functools import partial

import jax
import jax.numpy as jnp
from helpers import bars, check, draw, normal, on_gpu, planned, seconds

import jax_cudnn as jc

# %%
B, T, N, K, H = 2, 128, 4, 2, 64
query, key, value, d_out = (normal((B, T, heads, H), jnp.bfloat16) for heads in (N, K, K, N))


def plain(query, key, value, **how):
    wide = (a.astype(jnp.float32) for a in (query, key, value))
    return jax.nn.dot_product_attention(*wide, **how)


causal = plain(query, key, value, is_causal=True)

# %% [markdown]
# ## The node
# cuDNN's dims are (batch, heads, tokens, size of a head); heads of queries may be a multiple of
# those of keys and values. Masks are bounds of a band of diagonals: a right bound of 0 is causal; a
# left bound adds a sliding window. `Stats` is the natural logarithm of each row's sum of
# exponentials, which the backward reads.


# %%
def heads_first(x):
    return x.swapaxes(1, 2)


@jc.graph
def attend(g, q, k, v):
    return g.sdpa(q, k, v, attn_scale=H**-0.5, diagonal_band_right_bound=0, generate_stats=True)


q, k, v, d_o = map(heads_first, (query, key, value, d_out))
out, stats = jax.jit(attend)(q, k, v)
check(heads_first(out), causal)
print(out.shape, stats.shape, stats.dtype)

# %%
with planned():
    plan = jc.plan(attend, q, k, v)
print(plan.explain())

# %% [markdown]
# ## The backward node


# %%
@jc.graph
def attend_backward(g, q, k, v, o, d_o, stats):
    return g.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=H**-0.5, diagonal_band_right_bound=0)


def plain_vjp(query, key, value):
    wide = (a.astype(jnp.float32) for a in (query, key, value))
    _, pull_back = jax.vjp(lambda *a: jax.nn.dot_product_attention(*a, is_causal=True), *wide)
    return pull_back(d_out.astype(jnp.float32))


wanted = plain_vjp(query, key, value)
for got, want in zip(jax.jit(attend_backward)(q, k, v, out, d_o, stats), wanted, strict=True):
    check(heads_first(got), want)

# %% [markdown]
# ## With `jc.Graph`
# `jc.Graph` takes the keywords of cuDNN's frontend: `use_causal_mask`, `is_inference`, and an
# output's dims and strides. Here the strides place the result as (batch, tokens, heads, size).

# %%
dims, strides = [B, N, T, H], [T * N * H, H, N * H, 1]
with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O"]) as graph:
    out, no_stats = graph.sdpa(
        q=q, k=k, v=v, attn_scale=H**-0.5, is_inference=True, use_causal_mask=True, name="a"
    )
    out.set_output(True).set_dim(dims).set_stride(strides)
assert no_stats is None
check(heads_first(graph(q, k, v)), causal)

# %% [markdown]
# ## In JAX's conventions
# Arrays are (batch, tokens, heads, size) and are read in place. The gradient takes one forward and
# one backward plan.


# %%
def loss(query, key, value):
    y = jc.ops.dot_product_attention(query, key, value, is_causal=True)
    return jnp.sum(y.astype(jnp.float32) * d_out)


check(jc.ops.dot_product_attention(query, key, value, is_causal=True), causal)
gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
for got, want in zip(gradients, wanted, strict=True):
    check(got, want)
with planned():
    plans = jc.plans(jax.grad(loss, (0, 1, 2)), query, key, value)
for name, plan in plans.items():
    print(f"{name}: {plan.workspace_bytes} bytes of workspace")
    print("  ", plan.engine)
draw(plans)

# %% [markdown]
# For long sequences the fused kernels pay off most: XLA writes the scores of all pairs of tokens to
# memory, cuDNN keeps them on the chip.

# %%
if on_gpu:
    long = [normal((2, 4096, 8, H), jnp.bfloat16) for _ in range(3)]

    def gradient_of(attention):
        def loss(*arrays):
            return jnp.sum(attention(*arrays, is_causal=True).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))

    compared = {"XLA": jax.nn.dot_product_attention, "cuDNN": jc.ops.dot_product_attention}
    times = seconds({name: gradient_of(f) for name, f in compared.items()}, *long)
    bars(times, "Gradient of causal attention, 4096 tokens")

# %% [markdown]
# ## Structured and arbitrary masks
# Causal masks, windows and lengths cost nothing: cuDNN skips tiles that are fully masked. An
# arbitrary boolean mask becomes a bias in memory, and `explain` reports its size.

# %%
lengths = jnp.array([50, T], jnp.int32)
how = {"is_causal": True, "local_window_size": (31, 0), "key_value_seq_lengths": lengths}
got, want = (f(query, key, value, **how) for f in (jc.ops.dot_product_attention, plain))
check(got[1], want[1])
check(got[0, :81], want[0, :81])  # later rows see no key: 0 here, a mean of values in jax.nn

seen = jnp.tril(jnp.ones((1, 1, T, T), bool))
check(jc.ops.dot_product_attention(query, key, value, mask=seen), causal)
with planned():
    plan = jc.plan(jc.ops.dot_product_attention, query, key, value, None, seen)
print(plan.explain())

# %% [markdown]
# ## A function of the scores
# `score_mod` is a function in jnp that becomes part of cuDNN's kernels, derivative included. Here
# it caps the scores.


# %%
def softcap(score, b, h, q, kv):
    return 2.0 * jnp.tanh(score / 2.0)


def capped(query, key, value):
    return jc.ops.dot_product_attention(query, key, value, is_causal=True, score_mod=softcap)


def plain_capped(query, key, value):
    key, value = (jnp.repeat(a.astype(jnp.float32), N // K, 2) for a in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query.astype(jnp.float32), key) * H**-0.5
    scores = jnp.where(seen, 2 * jnp.tanh(scores / 2), -jnp.inf)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), value)


check(jax.jit(capped)(query, key, value), plain_capped(query, key, value))


def capped_loss(attention, query, key, value):
    return jnp.sum(attention(query, key, value).astype(jnp.float32) * d_out)


got = jax.jit(jax.grad(partial(capped_loss, capped)))(query, key, value)
want = jax.grad(partial(capped_loss, plain_capped))(query.astype(jnp.float32), key, value)
check(got, want)
with planned():
    print(jc.plan(capped, query, key, value))

# %% [markdown]
# ## Dropout
# Dropout takes a key of jax.random, and drops the same weights in the forward and the backward
# pass. Another key does not recompile the program.


# %%
@jax.jit
def dropped(query, key, value, rng):
    return jc.ops.dot_product_attention(query, key, value, dropout_rate=0.5, dropout_rng=rng)


one, same, two = (dropped(query, key, value, jax.random.key(seed)) for seed in (1, 1, 2))
assert bool((one == same).all())
assert bool((one != two).any())
