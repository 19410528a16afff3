"""The strings that state the shapes of a node's ports: parsing, matching, and errors in words."""

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


def test_malformed_string_is_refused_when_parsed():
    for text in ("", "a: b", "-> Y: n", "a: n ->", "a: *x *y -> b: *x", "a: ... *x -> b: ..."):
        with pytest.raises(ValueError, match=r"dims must read|more than one group"):
            Dims.parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "sizes"),
    [
        (CONV, [(2, 3, 8, 9), (4, 1, 5, 6)], {"*x": (8, 9), "i": 1, "*r": (5, 6)}),
        (CONV, [(2, 3), (4, 3)], {"*x": (), "*r": ()}),
        ("x: *r c -> y: c", [(7, 8, 9)], {"*r": (7, 8), "c": 9}),
        ("x: n *r c -> y: c", [(6, 9)], {"n": 6, "*r": (), "c": 9}),
        (POINTWISE, [(2, 1, 4), (1, 3, 4)], {"...": (2, 3, 4)}),
        (POINTWISE, [(0, 3), (1, 3)], {"...": (0, 3)}),
    ],
)
def test_letters_and_groups_get_their_sizes(text, shapes, sizes):
    _, got = match(text, *shapes)
    assert {axis: got[axis] for axis in sizes} == sizes


@pytest.mark.parametrize(
    ("text", "shapes", "words"),
    [
        (MATMUL, [(2, 3, 4), (2, 5, 6)], ["'A' and 'B'", "dimension 'k'", "k = 4", "k = 5"]),
        (MATMUL, [(2, 3, 4), (3, 4, 6)], ["dimension 'b'", "b = 2", "b = 3"]),
        (MATMUL, [(3, 4), (2, 4, 6)], ["'A'", "wrong rank", "[3, 4]", "(B, M, K)"]),
        (CONV, [(3,), (2, 4)], ["'image'", "at least 2 dimensions", "[3]"]),
        (POINTWISE, [(2, 3), (3,)], ["'a' and 'b'", "different ranks"]),
        (POINTWISE, [(2, 3), (0, 3)], ["do not broadcast", "[2, 3]", "[0, 3]"]),
    ],
)
def test_mismatch_names_the_ports_and_what_was_expected(text, shapes, words):
    with pytest.raises(jc.GraphError) as caught:
        match(text, *shapes)
    for word in words:
        assert word in str(caught.value)


def test_output_shape_joins_letters_groups_and_broadcast_letters():
    dims, sizes = match(CONV, (2, 3, 8, 9), (4, 3, 5, 6))
    assert (dims.input_names, dims.output_names) == (("image", "weight"), ("Y",))
    assert dims.shape("Y", {**sizes, "*y": (4, 4)}) == (2, 4, 4, 4)
    for left, right in (((1, 3, 4), (5, 4, 6)), ((5, 3, 4), (1, 4, 6))):
        dims, sizes = match(MATMUL, left, right, broadcast="b")
        assert dims.shape("C", sizes) == (5, 3, 6)
    with pytest.raises(jc.GraphError, match="dimension 'k'"):
        match(MATMUL, (1, 3, 4), (1, 3, 4), broadcast="b")


# -- dtypes -----------------------------------------------------------------------------------


def member(name):
    """Of cudnn.data_type, which has a name."""
    return type("DataType", (), {"name": name})()


def test_every_spelling_of_a_dtype_has_one_name():
    names = {
        "bfloat16": [jnp.bfloat16, member("BFLOAT16"), "BFLOAT16"],
        "float32": [np.float32, "float32", member("FLOAT")],
        "float16": [np.dtype("float16"), "HALF"],
        "float8_e4m3fn": [member("FP8_E4M3")],
        "float8_e5m2": [ml_dtypes.float8_e5m2],
        "bool": [bool],
        "int8": [jnp.zeros((), jnp.int8).dtype],
    }
    for name, spellings in names.items():
        assert [canonical(dtype) for dtype in spellings] == [name] * len(spellings)
    assert len(FROM_CUDNN) == len(TO_CUDNN)
    sizes = {"bool": 1, "float8_e4m3fn": 1, "bfloat16": 2, "int64": 8}
    assert {name: itemsize(name) for name in sizes} == sizes
    for dtype in ("float64", np.complex64, "DOUBLE", "nonsense", member("INT4"), "uint32"):
        with pytest.raises(jc.GraphTypeError, match="bfloat16") as caught:
            canonical(dtype)
        assert "astype" in caught.value.fix


# -- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((2, 3, 4), [12, 1, 3], (0, 2, 1)),
        ((2, 3, 4), [1, 2, 6], (2, 1, 0)),
        ((1, 3, 4), [99, 1, 3], (0, 2, 1)),
        ((2, 1, 4), [4, 7, 1], (0, 1, 2)),
        ((2, 3, 4), [24, 4, 1], None),
        ((2, 3, 4), [12, 4, 2], None),
        ((2, 3, 4), [0, 4, 1], None),
    ],
)
def test_order_of_strides_knows_packed_tensors(shape, strides, order):
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
    assert layout.major_to_minor(spec, x) == (0, 2, 1)
    assert layout.view(spec, x) == ((2, 8, 1, 10), [80, 1, 80, 8])
    assert layout.view(spec, w) == ((4, 8, 1, 3), [24, 1, 24, 8])
