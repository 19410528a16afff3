"""The dtypes of values inside a graph: float32, but beside a product's 16-bit operand."""

import jax
import numpy as np

import jax_cudnn as jc

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2, 8, 6, 6), "bfloat16")
W = 0.2 * jax.random.normal(KEYS[1], (8, 8, 3, 3), "bfloat16")
A = jax.random.normal(KEYS[2], (2, 8, 8), "bfloat16")
PAD = {"padding": [1, 1]}


@jc.graph
def conv_relu(g, x, w):
    return g.relu(g.conv_fprop(x, w, **PAD))


@jc.graph
def two(g, x, w):
    y = g.relu(g.conv_fprop(x, w, **PAD))
    return g.relu(g.conv_fprop(y, w, **PAD))


@jc.graph
def in_float32(g, x, w):
    y = g.relu(g.conv_fprop(x, w, **PAD)).set_data_type("float32")
    return g.relu(g.conv_fprop(y, w, **PAD))


def inside(function, *arrays):
    spec = jc.graph(function).trace(*arrays)[1].spec
    return {t.name: t.dtype for t in spec.tensors if t.name not in (*spec.inputs, *spec.outputs)}


def test_a_value_between_two_convolutions_is_rounded_as_a_result_is():
    spec = two.trace(X, W)[1].spec
    assert spec.tensor("conv_fprop.0::Y").dtype == "float32"
    assert spec.tensor("relu.0::OUT_0").dtype == "bfloat16"
    assert in_float32.trace(X, W)[1].spec.tensor("relu.0::OUT_0").dtype == "float32"
    np.testing.assert_array_equal(two(X, W), conv_relu(conv_relu(X, W), W))
    assert np.any(two(X, W) != in_float32(X, W))


def test_a_moved_value_and_its_source_have_one_dtype():
    def moved(g, a):
        y = g.relu(a)
        b = g.matmul(g.reshape(g.transpose(y, [0, 2, 1]), out_dims=[2, 8, 8]), a)
        return g.matmul(g.transpose(y, [0, 2, 1]), b)

    dtypes = inside(moved, A)
    assert len(dtypes) == 5
    assert set(dtypes.values()) == {"bfloat16"}
    other = lambda g, a, b: g.matmul(g.transpose(a, [0, 2, 1]), b)  # noqa: E731
    assert inside(other, A.astype("float16"), A) == {"transpose.0::OUT_0": "float16"}


def test_all_others_are_float32():
    """Of a float32 operand, or of a sum; beside no operand of 16 bits; and without a product."""
    for function, arrays in (
        (lambda g, a, b: g.matmul(g.relu(a), b), (A.astype("float32"), A)),
        (lambda g, a, b: g.matmul(g.reduction(a, "ADD").set_dim([2, 8, 1]), b), (A, A[:, :1])),
        (lambda g, a, b: g.matmul(g.relu(a), g.relu(b)), (A, A)),
        (lambda g, a, b: g.mul(g.relu(a), b), (A, A)),
    ):
        assert "bfloat16" not in inside(function, *arrays).values()
