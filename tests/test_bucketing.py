"""Sequences of any length in arrays of a few."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import graphs_of

import jax_cudnn as jc
from jax_cudnn._core.planning import variety

S = jax.ShapeDtypeStruct


def test_buckets_hold_their_lengths_with_little_padding():
    found = [jc.ops.bucket(n) for n in range(5000)]
    assert found[:3] == [128, 128, 128]
    assert all(a >= n for n, a in enumerate(found))
    assert found == sorted(found)
    assert all(a - n < n / 4 for n, a in enumerate(found) if n > 128)
    assert sorted({*found}) == [
        128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048,
        2560, 3072, 3584, 4096, 5120,
    ]  # fmt: skip


@pytest.mark.parametrize("per_doubling", [1, 3])
def test_steps_to_choose(per_doubling):
    found = [jc.ops.bucket(n, least=3, per_doubling=per_doubling) for n in range(1, 25)]
    assert {*found} == (
        {3, 6, 12, 24} if per_doubling == 1 else {3, 4, 5, 6, 8, 10, 12, 16, 20, 24}
    )
    assert all(a >= n for n, a in enumerate(found, 1))
    assert found[23] == 24
    assert found[22] == 24


@pytest.mark.parametrize("array", [np, jnp])
def test_padding_does_not_change_attention(array):
    random = np.random.default_rng(0)
    q, k, v = (array.asarray(random.standard_normal((2, 77, 4, 16)), "float32") for _ in range(3))
    want = jc.ops.dot_product_attention(q, k, v, is_causal=True)
    (q, lengths), (k, _), (v, _) = (jc.ops.pad_to_bucket(x, least=64) for x in (q, k, v))
    assert q.shape == k.shape == v.shape == (2, 80, 4, 16)
    assert type(q) is type(lengths) is type(array.zeros(()).reshape(1))
    lengths = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    got = jc.ops.dot_product_attention(q, k, v, is_causal=True, **lengths)
    np.testing.assert_allclose(got[:, :77], want, atol=2e-6)
    np.testing.assert_array_equal(got[:, 77:], 0)


@pytest.mark.parametrize("array", [np, jnp])
def test_lengths_are_brought_into_range(array):
    x, lengths = array.ones((3, 20, 2)), array.array([-1, 7, 25], "int32")
    assert jc.ops.pad_to_bucket(x, lengths=lengths)[1].tolist() == [0, 7, 20]


def test_lengths_of_shorter_examples_stay():
    tokens, lengths = jc.ops.pad_to_bucket(
        jnp.ones((3, 2, 9)), axis=-1, lengths=jnp.array([9, 4, 0], "int32"), least=8
    )
    assert tokens.shape == (3, 2, 10)
    assert lengths.tolist() == [9, 4, 0]
    np.testing.assert_array_equal(tokens[..., 9:], 0)
    assert jc.ops.pad_to_bucket(np.ones((3, 8)), least=8)[0].shape == (3, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jc.ops.bucket(-1), ["length", "-1"]),
        (lambda: jc.ops.bucket(2.5), ["length", "2.5", "static"]),
        (lambda: jc.ops.bucket(5, least=10), ["least=10", "per_doubling=4"]),
        (lambda: jc.ops.bucket(5, per_doubling=0), ["per_doubling", "0"]),
        (lambda: jc.ops.pad_to_bucket(jnp.ones((2, 3)), axis=2), ["axis=2", "[2, 3]"]),
        (lambda: jc.ops.pad_to_bucket(jnp.ones((2, 3)), axis=-2), ["axis=-2"]),
        (lambda: jc.ops.pad_to_bucket(jnp.ones(3)), ["rank 1"]),
        (
            lambda: jc.ops.pad_to_bucket(jnp.ones((2, 3)), lengths=jnp.ones(2)),
            ["int32[2]", "float32[2]"],
        ),
        (
            lambda: jc.ops.pad_to_bucket(jnp.ones((2, 3)), lengths=jnp.ones(3, "int32")),
            ["int32[2]", "int32[3]"],
        ),
    ],
)
def test_errors(call, words):
    with pytest.raises(jc.GraphError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(variety, "_MANY", 4)
    variety.clear()
    yield
    variety.clear()


def _packed(length):
    offsets = {"query_offsets": jnp.array([0, 4], "int32"), "max_query_length": length}
    x = S((length, 2, 8), "float32")
    return lambda q: jc.ops.packed_dot_product_attention(q, q, q, **offsets), x


def _softcap(length):
    cap = jc.ops.score_mods.softcap(2.0)
    x = S((1, length, 2, 8), "float32")
    return lambda q: jc.ops.dot_product_attention(q, q, q, score_mod=cap), x


@pytest.mark.parametrize("attention", [_packed, _softcap])
def test_so_is_attention_whose_operation_holds_shapes(attention, few, caplog):
    with caplog.at_level(logging.WARNING, "jax_cudnn"):
        for length in (8, 16, 24, 32):
            function, x = attention(length)
            (spec,) = graphs_of(function, x)
            variety.count(spec, "attention")
    assert "4 different shapes" in caplog.text


@pytest.mark.deviceless
def test_a_function_of_many_shapes_is_told_of(few, caplog):
    relu = jc.graph(lambda g, x: g.relu(x))
    tanh = jc.graph(lambda g, x: g.tanh(x))
    with caplog.at_level(logging.WARNING, "jax_cudnn"), jc.target("H200"):
        for length in (8, 16, 24, 24, 8):
            jc.warmup(relu, S((4, length), "float32"))
            jc.warmup(tanh, S((4, length), "float32"))
        assert not caplog.records
        jc.warmup(relu, S((4, 32), "float32"))
        (told,) = caplog.messages
        for length in (40, 48, 56):
            jc.warmup(relu, S((4, length), "float32"))
        assert len(caplog.messages) == 1, "told at 4, 8, 16 and so on"
        jc.warmup(relu, S((4, 64), "float32"))
    assert len(caplog.messages) == 2
    assert "4 different shapes" in told
    assert "[4,32]" in told.replace(" ", "")
    assert "pad_to_bucket" in told
