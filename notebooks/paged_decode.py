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
# # Paged decode
#
# A server keeps keys and values of many requests in pages of a few tokens, so that memory is given
# out page by page. `jc.ops.paged_dot_product_attention` attends to them where they lie; here a
# small model's layer decodes with them, and gets what attention over whole arrays gives.

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
# ## Pages and tables
# Pages are (P, U, K, H): P of them with U tokens each, K heads of keys, of size H. Token t of
# example b is the one at `t % U` of page `table[b, t // U]`. The pages of an example lie anywhere,
# and what is behind its length may be anything finite.

# %%
B, P, U, N, K, H = 3, 16, 16, 8, 2, 64
empty = jnp.zeros((P, U, K, H), jnp.bfloat16)
table = jnp.array([[3, 7, 1, 14], [0, 8, 2, 15], [5, 4, 9, 11]], jnp.int32)
prompt_lengths = jnp.array([37, 5, 48], jnp.int32)
longest = 48

heads = (N, K, K)
query, key, value = (normal((B, longest, n, H), jnp.bfloat16) for n in heads)

# %% [markdown]
# ## Prefill
# The prompt's keys and values are written into the pages, those of each example up to its length.
# Then all its queries attend to them, causally. Several queries count from the last one and the
# last key: `bottom_right` is the default here.

# %%
start = jnp.zeros(B, jnp.int32)
write = jax.jit(jc.ops.write_pages)
key_pages = write(empty, key, table, start, seq_lengths=prompt_lengths)
value_pages = write(empty, value, table, start, seq_lengths=prompt_lengths)


@jax.jit
def prefill(query, key_pages, value_pages):
    return jc.ops.paged_dot_product_attention(
        query,
        key_pages,
        value_pages,
        table,
        query_seq_lengths=prompt_lengths,
        key_value_seq_lengths=prompt_lengths,
        is_causal=True,
    )


@jax.jit
def plain(query, key, value, lengths):
    wide = (a.astype(jnp.float32) for a in (query, key, value))
    return jax.nn.dot_product_attention(*wide, is_causal=True, key_value_seq_lengths=lengths)


out, want = prefill(query, key_pages, value_pages), plain(query, key, value, prompt_lengths)
for example, length in enumerate([37, 5, 48]):
    check(out[example, :length], want[example, :length])

# %% [markdown]
# ## Decode
# One token a step: its key and value go to their places, and one query for each example attends to
# all that is there. Lengths are arrays, so each step is the same program.


# %%
@jax.jit
def step(key_pages, value_pages, lengths, token):
    query, key, value = token
    key_pages = jc.ops.write_pages(key_pages, key, table, lengths)
    value_pages = jc.ops.write_pages(value_pages, value, table, lengths)
    out = jc.ops.paged_dot_product_attention(
        query, key_pages, value_pages, table, key_value_seq_lengths=lengths + 1
    )
    return key_pages, value_pages, lengths + 1, out


tokens = [tuple(normal((B, 1, n, H), jnp.bfloat16) for n in heads) for _ in range(3)]
lengths, outs = prompt_lengths, []
for token in tokens:
    key_pages, value_pages, lengths, out = step(key_pages, value_pages, lengths, token)
    outs.append(out)

# %% [markdown]
# The same over whole arrays: the tokens behind each example's prompt.

# %%
places = jnp.arange(B)[:, None], prompt_lengths[:, None] + jnp.arange(3)
whole = [
    jnp.pad(prompt, [(0, 0), (0, 3), (0, 0), (0, 0)])
    .at[places]
    .set(jnp.concatenate([token[i] for token in tokens], 1))
    for i, prompt in enumerate((query, key, value))
]
check(jnp.concatenate(outs, 1), plain(*whole, lengths)[places])

# %% [markdown]
# ## The plan

# %%
with planned():
    plan = jc.plan(
        jc.ops.paged_dot_product_attention,
        *(tokens[0][0], key_pages, value_pages, table),
        key_value_seq_lengths=lengths,
    )
print(plan.explain())
