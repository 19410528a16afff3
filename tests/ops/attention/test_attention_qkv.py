"""Attention of queries, keys and values in one array: beside that of three."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import drawing, outcome

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
ours, three = jc.ops.dot_product_attention_qkv, jc.ops.dot_product_attention


@pytest.fixture
def normal(key):
    return drawing(key)


def parts(qkv, heads):
    of_keys = (qkv.shape[2] - heads) // 2
    return jnp.split(qkv, [heads, heads + of_keys], axis=2)


LEFT = jnp.ones((2, 1, 1, 9), bool).at[1, ..., :3].set(False)
CASES = {
    "window": {"is_causal": True, "local_window_size": (3, 0), "scale": 0.3},
    "from the last": {"is_causal": True, "bottom_right": True},
    "hidden queries": {"is_causal": True, "mask": LEFT},
    "lengths": {
        "query_seq_lengths": jnp.array([9, 4], "int32"),
        "key_value_seq_lengths": jnp.array([7, 9], "int32"),
    },
}


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_three_arrays(name, heads, normal):
    """Of 12 heads in all: 4 of each, and 6 of queries beside 3 of keys."""
    operands = normal((2, 9, 12, 8)), normal((1, heads, 9, 9))
    given = {"return_residual": True, **CASES[name]}
    along = normal((2, 9, heads, 8)), normal((2, 9, heads))
    got = outcome(lambda x, bias: ours(x, heads, bias, **given), operands, *along)
    want = outcome(lambda x, bias: three(*parts(x, heads), bias, **given), operands, *along)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_three_in_a_dimension_of_their_own(normal):
    qkv = normal((2, 9, 3, 4, 8))
    want = ours(qkv.reshape(2, 9, 12, 8), 4, is_causal=True)
    for heads in (None, 4):
        np.testing.assert_array_equal(ours(qkv, heads, is_causal=True), want)
