"""MultiHeadAttention that decodes with a cache, paged or not; and what of it runs on cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import WITHIN, close
from test_flax_attention import BATCH, FEATURES, LENGTH, inputs, pair

import jax_cudnn as jc
import jax_cudnn.flax as jnn


@nnx.jit
def next_tokens(layer, part, mask):
    return layer(part, decode=True, mask=mask)


def decoded(layer, x, steps, mask=None):
    """The results for tokens in chunks of these sizes."""
    parts = jnp.split(x, np.cumsum(steps)[:-1], axis=-2)
    return jnp.concatenate([next_tokens(layer, part, mask) for part in parts], axis=-2)


def test_decoding_is_flaxs_with_masks_too():
    layers, x = pair(num_kv_heads=2, normalize_qk=True), inputs(2, 2, LENGTH, FEATURES)
    for mask in (None, (jnp.arange(LENGTH) % 3 != 1)[None, None, None, None]):
        found = []
        for layer in layers[::-1]:
            layer.init_cache(x.shape)
            cache = layer.cached_key, layer.cached_value, layer.cache_index
            found.append((decoded(layer, x, [1] * LENGTH, mask), [v[...] for v in cache]))
        close(*found)


@pytest.mark.parametrize(
    ("dtype", "window", "page_size"), [("float32", 3, None), ("bfloat16", None, 5)]
)
def test_several_tokens_at_a_time(dtype, window, page_size):
    """In a float32 cache, under nnx.jit, without rank promotion."""
    named = {"local_window_size": window, "page_size": page_size, "normalize_qk": True}
    named |= {"is_causal": True, "dtype": dtype, "decode": False}
    ours = jnn.MultiHeadAttention(4, FEATURES, **named, rngs=nnx.Rngs(0))
    x = inputs(dtype=dtype)
    with jax.numpy_rank_promotion("raise"):
        want = ours(x)
        for steps in ([LENGTH], [4, 1, 3]):
            ours.init_cache(x.shape)
            close(decoded(ours, x, steps), want, within=WITHIN[dtype])


def test_decoding_says_what_is_missing():
    _, ours = pair()
    with pytest.raises(ValueError, match="init_cache"):  # a view makes no cache
        nnx.view(ours, decode=True, batch_size=BATCH, max_length=LENGTH)(inputs()[:, :1])
    ours.init_cache((BATCH, LENGTH, FEATURES))
    for shape in ((3, 1, FEATURES), (BATCH, LENGTH + 1, FEATURES)):
        with pytest.raises(ValueError, match="Autoregressive cache shape error"):
            ours(inputs(*shape), decode=True)


def test_pages_that_a_server_gives():
    """Sequences of different lengths, with pages anywhere in a pool; one restarts."""
    _, ours = pair()
    x = inputs(3, 12, FEATURES)
    want = ours(x, is_causal=True)
    ours.paged_cache = jnn.PagedCache(3, 12, 4, 8, page_size=4, pages=11)
    cache = ours.paged_cache
    cache.page_table[...] = jnp.asarray([[7, 0, 9], [1, 10, 2], [4, 3, 8]], jnp.int32)
    decoded(ours, x[:, :6], [6])
    cache.lengths[...] = jnp.asarray([6, 2, 0], jnp.int32)
    at = cache.lengths[...][:, None] + jnp.arange(4)
    part = jnp.take_along_axis(x, at[..., None], axis=1)
    close(ours(part, decode=True), jnp.take_along_axis(want, at[..., None], axis=1))
    assert cache.lengths[...].tolist() == [10, 6, 4]


def test_pages_hold_tokens_and_no_more_and_take_no_mask_and_no_dropout():
    def layer(page_size):
        named = {"decode": True, "dropout_rate": 0.5, "deterministic": False}
        return jnn.MultiHeadAttention(4, FEATURES, page_size=page_size, **named, rngs=nnx.Rngs(0))

    for size in (0, 8.5):
        with pytest.raises(jc.GraphError, match="page_size is not a number of tokens"):
            layer(size)
    cache = jnn.PagedCache(2, LENGTH, 4, 8, page_size=4)
    x = inputs(2, LENGTH + 1, 4, 8)
    assert cache(*(x[:, :LENGTH],) * 3).shape == (2, LENGTH, 4, 8)
    with pytest.raises(jc.GraphError, match=f"up to {LENGTH} per sequence"):
        cache(x, x, x)
    ours, token = layer(4), inputs()[:, :1]
    ours.init_cache((BATCH, LENGTH, FEATURES))
    with pytest.raises(jc.GraphError, match="mask, dropout, sow_weights"):
        ours(token, mask=jnp.ones((1, 1, 1, LENGTH), bool), sow_weights=True)
    assert ours(token, deterministic=True).shape == token.shape


def large(**named):
    named = {"dtype": "bfloat16", "param_dtype": "bfloat16", "decode": False, **named}
    return jnn.MultiHeadAttention(8, 512, **named, rngs=nnx.Rngs(0))


@pytest.mark.deviceless
@pytest.mark.parametrize(("count", "page_size"), [(256, None), (8, None), (1, 16)])
def test_training_and_decoding_are_planned_on_cudnn(count, page_size, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    trains = count == 256
    named = {"local_window_size": 64, "is_causal": True} if trains else {"decode": True}
    layer = large(page_size=page_size, **named)
    layer.init_cache((4, 256, 512), "bfloat16")
    graph, state = nnx.split(layer)

    def run(state, x):
        layer = nnx.merge(graph, state)
        return layer(x).astype("float32").sum(), nnx.state(layer)

    run = jax.grad(run, has_aux=True, allow_int=True) if trains else run
    with jc.target("H200"):
        found = jc.plans(run, state, jax.ShapeDtypeStruct((4, count, 512), "bfloat16"))
    plans = {name: plan for name, plan in found.items() if "attention" in name}
    assert [*plans][:1] == ["dot_product_attention_qkv"] or not trains
    assert len(plans) == 1 + trains
    assert all(plan.engine for plan in plans.values())


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(("count", "window"), [(1, 64), (8, None)])
def test_decoding_on_the_gpu(count, window, page_size):
    ours = large(is_causal=True, local_window_size=window, page_size=page_size)
    x = inputs(4, 32, 512, dtype="bfloat16")
    ours.init_cache((4, 256, 512), "bfloat16")
    with jc.implementation("split"):
        got = decoded(ours, x, [count] * (32 // count))
    with jc.implementation("xla"):
        close(got, ours(x), within=WITHIN["bfloat16"])
