"""MultiHeadAttention(rope=...): against rotations written out, with caches and pages, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import WITHIN, close
from test_flax_attention import BATCH, FEATURES, LENGTH, inputs
from test_flax_decoding import decoded

import jax_cudnn as jc
import jax_cudnn.flax as jnn

FREQUENCIES, SCALE = jc.ops.rotary_frequencies(
    8, 500.0, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
)
ROPES = {
    "default": jc.ops.rotary_embedding,
    "yarn": functools.partial(jc.ops.rotary_embedding, frequencies=FREQUENCIES, scale=SCALE),
    "partial": functools.partial(jc.ops.rotary_embedding, rotary_dim=4, interleaved=True),
}


def layer(rope=jc.ops.rotary_embedding, **named):
    named = {"num_kv_heads": 2, "is_causal": True, "decode": False, **named}
    return jnn.MultiHeadAttention(4, FEATURES, rope=rope, **named, rngs=nnx.Rngs(0))


def written_out(ours, x, positions=None):
    q, k, v = ours.query(x), ours.key(x), ours.value(x)
    if ours.normalize_qk:
        q, k = ours.query_ln(q), ours.key_ln(k)
    q, k = (ours.rope(y, positions) for y in (q, k))
    return ours.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("rope", ROPES)
def test_queries_and_keys_are_rotated(rope):
    ours, x = layer(ROPES[rope], normalize_qk=True), inputs()
    positions = jnp.asarray(np.random.default_rng(0).integers(0, 99, (BATCH, LENGTH)))
    close(ours(x), written_out(ours, x))
    close(ours(x, input_positions=positions), written_out(ours, x, positions))
    close(ours(x, input_positions=jnp.arange(LENGTH) + 7), ours(x), within=1e-5)
    assert abs(ours(x) - layer(None, normalize_qk=True)(x)).max() > 1e-2

    def total(f):
        return nnx.grad(lambda ours, x: jnp.sin(f(ours, x)).sum(), argnums=(0, 1))(ours, x)

    close(total(lambda ours, x: ours(x)), total(written_out), within=1e-5)


def test_of_16_bits_with_as_many_tokens_as_features():
    """Where projections without rope are one product, which attention reads in place."""
    ours = layer(dtype="bfloat16", num_kv_heads=4)
    x = inputs(4, 16, FEATURES, dtype="bfloat16")
    close(ours(x), written_out(ours, x), within=WITHIN["bfloat16"])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("page_size", [None, 3])
def test_decoding_is_the_whole_sequence(rope, page_size):
    ours, x = layer(ROPES[rope], page_size=page_size), inputs(2, BATCH, LENGTH, FEATURES)
    want = ours(x)
    with jax.numpy_rank_promotion("raise"):
        for steps in ([1] * LENGTH, [4, 1, 3]):
            ours.init_cache(x.shape)
            close(decoded(ours, x, steps), want, within=1e-5)


def test_pages_of_sequences_of_different_lengths():
    ours, x = layer(page_size=4), inputs(3, 12, FEATURES)
    want = ours(x)
    ours.init_cache(x.shape)
    decoded(ours, x[:, :6], [6])
    ours.paged_cache.lengths[...] = jnp.asarray([6, 2, 0], jnp.int32)
    at = ours.paged_cache.lengths[...][:, None] + jnp.arange(4)
    part = jnp.take_along_axis(x, at[..., None], axis=1)
    close(ours(part, decode=True), jnp.take_along_axis(want, at[..., None], axis=1), within=1e-5)


def test_the_model_around_it_is_accelerated_and_the_layer_stays():
    class Block(nnx.Module):
        def __init__(self):
            self.attention = layer(ROPES["yarn"])
            self.up = nnx.Linear(FEATURES, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.up(self.attention(x))

    model, x = Block(), inputs()
    fast = jnn.accelerate(model)
    assert fast.attention.rope is ROPES["yarn"]
    close(fast(x), model(x), within=1e-5)


@pytest.mark.parametrize(
    ("named", "call", "words"),
    [
        ({"rope": True}, {}, "rope is not a function.*functools.partial"),
        ({}, {"inputs_k": jnp.ones((BATCH, 3, FEATURES))}, "rope is for self-attention.*leave out"),
        (
            {"attention_fn": lambda q, k, v, **_: v, "num_kv_heads": 4},
            {},
            "Flax, which has no rope.*custom attention_fn",
        ),
        ({"rope": functools.partial(jc.ops.rotary_embedding, rotary_dim=9)}, {}, "rotary_dim"),
    ],
)
def test_errors(named, call, words):
    with pytest.raises(jc.GraphError, match=f"(?s){words}"):
        layer(**named)(inputs(), **call)


def test_a_batch_that_the_pages_do_not_have():
    ours = layer(page_size=4)
    ours.init_cache((BATCH, LENGTH, FEATURES))
    with pytest.raises(jc.GraphError, match="different batch sizes"):
        ours(inputs(3, 1, FEATURES), decode=True)


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no RoPE")
def test_is_flaxs_rope_and_not_beside_it():
    theirs = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    plain = layer(None, attention_fn=theirs, num_kv_heads=4)
    close(layer(num_kv_heads=4)(inputs()), plain(inputs()), within=1e-5)
    with pytest.raises(jc.GraphError, match=r"(?s)no rope.*rotates, too"):
        layer(attention_fn=theirs)(inputs())
