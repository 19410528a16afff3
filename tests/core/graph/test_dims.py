"""Shapes that do not match, orders of strides, and dtypes: their spellings, and inside a graph."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.dims import Dims
from jax_cudnn._core.graph.dtypes import canonical
from jax_cudnn._core.graph.layout import order_of_strides

CONV = "image: n c *x, weight: k i *r -> Y: n k *y"
MATMUL = "A: b m k, B: b k n -> C: b m n"
POINTWISE = "a: ..., b: ... -> OUT_0: ..."


def match(text, *shapes, broadcast=""):
    dims = Dims.parse(text, broadcast)
    return dims, dims.match(dict(zip(dims.input_names, shapes, strict=True)))


def test_shapes_match_or_the_mismatch_is_said_in_words():
    for left, right in (((1, 3, 4), (5, 4, 6)), ((5, 3, 4), (1, 4, 6))):
        dims, sizes = match(MATMUL, left, right, broadcast="b")
        assert dims.shape("C", sizes) == (5, 3, 6)
    for text, shapes, words in (
        (MATMUL, [(2, 3, 4), (3, 4, 6)], ["dimension 'b'", "b = 2", "b = 3"]),
        (MATMUL, [(3, 4), (2, 4, 6)], ["'A'", "wrong rank", "[3, 4]", "(B, M, K)"]),
        (CONV, [(3,), (2, 4)], ["'image'", "at least 2 dimensions", "[3]"]),
        (POINTWISE, [(2, 3), (3,)], ["'a' and 'b'", "different ranks"]),
        (POINTWISE, [(2, 3), (0, 3)], ["do not broadcast", "[2, 3]", "[0, 3]"]),
    ):
        with pytest.raises(jc.GraphError) as caught:
            match(text, *shapes)
        for word in words:
            assert word in str(caught.value)


def member(name):
    """Of cudnn.data_type, which has a name."""
    return type("DataType", (), {"name": name})()


def test_every_spelling_of_a_dtype_has_one_name():
    names = {
        "bfloat16": [jnp.bfloat16, member("BFLOAT16"), "BFLOAT16"],
        "float32": [np.float32, "float32", member("FLOAT")],
        "float16": [np.dtype("float16"), "HALF"],
        "float8_e5m2": [ml_dtypes.float8_e5m2, member("FP8_E5M2")],
        "bool": [bool],
    }
    for name, spellings in names.items():
        assert [canonical(dtype) for dtype in spellings] == [name] * len(spellings)
    for dtype in ("float64", "nonsense", member("INT4"), "uint32"):
        with pytest.raises(jc.GraphTypeError, match="bfloat16") as caught:
            canonical(dtype)
        assert "astype" in caught.value.fix


def test_order_of_strides_knows_packed_tensors():
    for shape, strides, order in (
        ((2, 3, 4), [12, 1, 3], (0, 2, 1)),
        ((1, 3, 4), [99, 1, 3], (0, 2, 1)),
        ((2, 1, 4), [4, 7, 1], (0, 1, 2)),
        ((2, 3, 4), [24, 4, 1], None),
        ((2, 3, 4), [12, 4, 2], None),
        ((2, 3, 4), [0, 4, 1], None),
    ):
        assert order_of_strides(shape, strides) == order


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
    for one, product in ((A.astype("float32"), "matmul"), (A, "mul")):
        spec = lambda g, a, b, m=product: getattr(g, m)(g.relu(a), b)  # noqa: E731
        assert inside(spec, one, A) == {"relu.0::OUT_0": "float32"}
