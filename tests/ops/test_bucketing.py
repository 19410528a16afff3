"""Sequences of any length in arrays of a few."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import graphs_of

import jax_cudnn as jc
from jax_cudnn._core.planning import progress


def test_buckets_hold_their_lengths_with_little_padding():
    found = [jc.ops.bucket(n) for n in range(2100)]
    assert found == sorted(found)
    assert all(a >= n for n, a in enumerate(found))
    assert sorted({*found}) == [
        128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048,
        2560,
    ]  # fmt: skip
    for per_doubling, steps in ((1, {3, 6, 12, 24}), (3, {3, 4, 5, 6, 8, 10, 12, 16, 20, 24})):
        found = [jc.ops.bucket(n, least=3, per_doubling=per_doubling) for n in range(1, 25)]
        assert {*found} == steps
        assert all(a >= n for n, a in enumerate(found, 1))


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


def test_lengths_are_brought_into_range():
    for array in (np, jnp):
        x, lengths = array.ones((3, 20, 2)), array.array([-1, 7, 25], "int32")
        with jax.enable_x64(True):
            for given in (lengths, lengths.tolist()):
                assert jc.ops.pad_to_bucket(x, lengths=given)[1].tolist() == [0, 7, 20]
    tokens, lengths = jc.ops.pad_to_bucket(
        jnp.ones((3, 2, 9)), axis=-1, lengths=jnp.array([9, 4, 0], "int32"), least=8
    )
    assert (tokens.shape, lengths.tolist()) == ((3, 2, 10), [9, 4, 0])
    np.testing.assert_array_equal(tokens[..., 9:], 0)
    with pytest.raises(jc.GraphError, match="static"):
        jc.ops.bucket(2.5)
    with pytest.raises(jc.GraphError, match="int32"):
        jc.ops.pad_to_bucket(jnp.ones((2, 3)), lengths=jnp.ones(3, "int32"))


def test_a_function_of_many_shapes_is_told_of(monkeypatch, caplog):
    """At 4, 8, 16 and so on; attention's operations hold shapes of their own."""
    monkeypatch.setattr(progress, "_MANY", 4)
    progress._shapes.clear()
    cap = jc.ops.score_mods.softcap(2.0)
    relu = jc.graph(lambda g, x: g.relu(x)), (4,), ()
    capped = lambda q: jc.ops.dot_product_attention(q, q, q, score_mod=cap), (1,), (2, 8)

    def count(of, *lengths):
        function, before, behind = of
        for length in lengths:
            aval = jax.ShapeDtypeStruct((*before, length, *behind), "float32")
            progress.count_shapes(*graphs_of(function, aval), "some function")

    with caplog.at_level(logging.WARNING, "jax_cudnn"):
        count(relu, 8, 16, 24, 24, 8)
        count(capped, 8, 16, 24, 24, 8)
        assert not caplog.records
        count(capped, 32)
        count(relu, 32, 40, 48, 56)
        assert len(caplog.messages) == 2
        count(relu, 64)
    progress._shapes.clear()
    assert len(caplog.messages) == 3
    assert "pad_to_bucket" in caplog.messages[1]
