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
# An inference server keeps the keys and values of many requests in pages of a few tokens, so that
# it can allocate memory page by page. `jc.ops.paged_dot_product_attention` reads the pages in
# place. Here one attention layer decodes with pages and matches attention over contiguous arrays.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from helpers import check, draw, normal, planned

import jax_cudnn as jc

# %% [markdown]
# ## Pages and tables
# Pages are (P, U, K, H): P pages of U tokens each, with K heads of size H. Token t of sequence b is
# at `t % U` in page `table[b, t // U]`. The pages of a sequence can be anywhere, and the values
# after its length can be anything finite.

# %%
B, P, U, N, K, H = 3, 16, 16, 8, 2, 64
empty = jnp.zeros((P, U, K, H), jnp.bfloat16)
table = jnp.array([[3, 7, 1, 14], [0, 8, 2, 15], [5, 4, 9, 11]], jnp.int32)
prompt_lengths = jnp.array([37, 5, 48], jnp.int32)
longest = 48

heads = (N, K, K)
query, key, value = (normal((B, longest, n, H), jnp.bfloat16) for n in heads)

# %% [markdown]
# Where the prompts are: one row for each page, one color for each sequence, white where it is free.

# %%
owner = np.full((P, U), np.nan)
for sequence, length in enumerate(prompt_lengths):
    for token in range(length):
        owner[table[sequence, token // U], token % U] = sequence
figure, axes = plt.subplots(figsize=(4, 4))
axes.imshow(owner, cmap="Set2", vmin=0, vmax=7)
axes.set(xlabel="token in the page", ylabel="page", xticks=range(0, U, 5), yticks=range(P))
plt.show()

# %% [markdown]
# ## Prefill
# The keys and values of each prompt are written into its pages, up to its length. Then all its
# queries attend to them, causally. Here the causal mask is aligned at the last query and the last
# key: `bottom_right` is the default.

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
for sequence, length in enumerate([37, 5, 48]):
    check(out[sequence, :length], want[sequence, :length])

# %% [markdown]
# ## Decode
# Each step adds one token: its key and value are written into the pages, and one query for each
# sequence attends to all tokens so far. Lengths are arrays, so all steps run the same program.


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
# The same with contiguous arrays: the new tokens follow each sequence's prompt.

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
draw(plan)
