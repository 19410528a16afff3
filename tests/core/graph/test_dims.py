"""Shapes of a node's ports that do not match, spellings of dtypes, and orders of strides."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph import layout
from jax_cudnn._core.graph.dims import Dims, order_of_strides
from jax_cudnn._core.graph.dtypes import FROM_CUDNN, TO_CUDNN, canonical, itemsize

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
        (MATMUL, [(2, 3, 4), (2, 5, 6)], ["'A' and 'B'", "dimension 'k'", "k = 4", "k = 5"]),
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
    assert len(FROM_CUDNN) == len(TO_CUDNN)
    sizes = {"bool": 1, "float8_e4m3fn": 1, "bfloat16": 2, "int64": 8}
    assert {name: itemsize(name) for name in sizes} == sizes
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


def traced(function, *shapes):
    return jc.graph(function).trace(*(jnp.zeros(shape) for shape in shapes))[1].spec


def test_products_keep_their_rank_and_operands_the_order_of_their_strides():
    spec = traced(lambda g, x, w: g.matmul(x.set_stride([12, 1, 3]), w), (2, 3, 4), (2, 4, 5))
    x, w = spec.input_tensors
    assert layout.major_to_minor(spec, x) == (0, 2, 1)
    assert layout.major_to_minor(spec, w) == (0, 1, 2)
    assert layout.view(spec, x) == ((2, 3, 4), [12, 1, 3])
    spec = traced(lambda g, x, w: g.conv_fprop(x, w), (2, 8, 10), (4, 8, 3))  # a row of two
    x, w = spec.input_tensors
    assert layout.view(spec, x) == ((2, 8, 1, 10), [80, 1, 80, 8])
    assert layout.view(spec, w) == ((4, 8, 1, 3), [24, 1, 24, 8])
