"""Attention of a Graph in cuDNN's words: masks, dropout, arrays that lie as tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

KEY = jax.random.key(0)
Q, K = jnp.ones((1, 2, 4, 8)), jnp.cos(jnp.arange(128.0)).reshape(1, 2, 8, 8)


def attention(**words):
    with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O"]) as graph:
        graph.sdpa(Q, K, jnp.sin(K), **words, name="a")
    return graph(Q, K, jnp.sin(K))


@pytest.mark.parametrize(
    "words",
    [
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
        {"use_causal_mask": True, "diagonal_band_right_bound": 2},
        {"sliding_window_length": 2, "diagonal_band_left_bound": 3},
    ],
)
def test_words_that_contradict_each_other_are_refused(words):
    with pytest.raises(jc.GraphError, match="contradict each other") as caught:
        attention(**words)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        (
            {"use_causal_mask_bottom_right": True, "diagonal_alignment": "TOP_LEFT"},
            {"diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
        ),
        (
            {"use_causal_mask": True, "sliding_window_length": 3},
            {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0},
        ),
    ],
)
def test_words_of_masks_are_bounds(words, bounds):
    found = attention(**words)
    np.testing.assert_array_equal(found, attention(**bounds))
    assert not np.allclose(found, attention())


def test_attention_of_tokens_is_jaxs():
    q, k, v = jax.random.normal(KEY, (3, 2, 16, 4, 8))  # B S H D
    transposed = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O", "a::STATS"]) as graph:
        words = {"use_causal_mask": True, "sliding_window_length": 4, "use_padding_mask": False}
        given = dict(zip("qkv", transposed, strict=True), attn_scale=np.float32(8**-0.5))
        out, stats = graph.sdpa(name="a", **given, **words, is_inference=False)
        out.set_output(True).set_dim([2, 4, 16, 8]).set_stride([512, 8, 32, 1])
        stats.set_output(True).set_data_type("FLOAT")
    got, _ = graph(*transposed)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
    np.testing.assert_allclose(got.transpose(0, 2, 1, 3), want, rtol=1e-4, atol=1e-5)
    assert graph.spec.tensor(graph.spec.outputs[0]).order == (0, 2, 1, 3)


def test_seed_and_offset_of_dropout_are_one_integer_or_two_words():
    q = jax.random.normal(KEY, (1, 2, 8, 16))
    with jc.Graph(inputs=["a::q", "seed", "offset"], outputs=["a::O"]) as graph:
        words = [graph.tensor([1, 1, 1, 1], data_type="INT64", name=n) for n in ("seed", "offset")]
        graph.sdpa(q, q, q, dropout=(0.5, *words), name="a")
    assert {(*t.shape, t.dtype.name) for t in words} == {(1, 1, 1, 2, "uint32")}

    def pair(number):
        low, high = number % 2**32, number % 2**64 // 2**32
        return jnp.array([low, high], "uint32").reshape(1, 1, 1, 2)

    for seed, offset in ((7, 9), (-3, 5)):
        want = graph(q, pair(seed), pair(offset))
        for kind in (int, np.int64, jnp.int32, lambda x: np.full((1, 1, 1, 1), x)):
            assert np.array_equal(graph(q, kind(seed), kind(offset)), want)
        given = [jnp.full((1, 1, 1, 1), x, "int32") for x in (seed, offset)]
        assert np.array_equal(jax.jit(graph)(q, *given), want)
    large = 2**40 + 7
    assert np.array_equal(graph(q, np.int64(large), large), graph(q, pair(large), pair(large)))
    assert not np.array_equal(graph(q, large, large), graph(q, 7, 7))
