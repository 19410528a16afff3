"""What cuDNN refuses, and what is refused before it is asked: in words, with what to do.

As users read it under ``implementation="cudnn"``; by default XLA runs what is refused.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.dims import packed_strides
from jax_cudnn._core.planning import planner
from jax_cudnn._core.planning.limits import known_reasons

pytestmark = pytest.mark.usefixtures("by_cudnn")

HALF = jnp.bfloat16
IMAGE, WEIGHT, MATRIX = ((2, 64, 8, 8), HALF), ((64, 64, 3, 3), HALF), ((1, 64, 64), HALF)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


def traced(function, avals):
    return jc.graph(function).trace(*(jax.ShapeDtypeStruct(*aval) for aval in avals))[1].spec


def refusal(function, avals, gpu="H200", **options):
    avals = (jax.ShapeDtypeStruct(*aval) for aval in avals)
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target(gpu):
        jc.plan(jc.graph(function, **options), *avals)
    return caught.value


def product(g, a, b):
    return g.matmul(a, b)


FLOAT32 = ((1, 64, 64), "float32")
FLOAT8 = ((1, 64, 64), "float8_e4m3fn")
REFUSED = {  # function, operands, options, words of the message
    "two convolutions": (
        lambda g, x, w: conv(g, g.relu(conv(g, x, w)).set_data_type("bfloat16"), w),
        [IMAGE, WEIGHT],
        {},
        [r"engine \d+: ", r"conv_fprop\.1::Y: bfloat16", "one convolution or matmul each"],
    ),
    "two matmuls": (
        lambda g, x, w: g.matmul(g.matmul(x, w), w),
        [MATRIX, MATRIX],
        {},
        [r"matmul\.1: it needs matmul\.0", "smaller graphs"],
    ),
    "mixed dtypes": (
        product,
        [MATRIX, (MATRIX[0], jnp.float16)],
        {},
        ["operands of one dtype", "operands of bfloat16, float16, float32"],
    ),
    "float8 on an A100": (
        product,
        [FLOAT8, FLOAT8],
        {"gpu": "A100"},
        ["operands of bfloat16, float16"],
    ),
    "rounded reduction": (
        lambda g, x, w: g.reduction(g.relu(x), out_dims=[1, 1, 64]).set_data_type("bfloat16"),
        [MATRIX, MATRIX],
        {},
        ["leave a reduction's result float32", "must be the last node"],
    ),
    "a broadcast": (
        lambda g, x, w, b: g.add(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((1, 1, 8, 8), HALF)],
        {},
        [r"\[1, 64, 1, 1\]", "jnp.broadcast_to"],
    ),
    "left out by options": (
        conv,
        [IMAGE, WEIGHT],
        {"select_numeric_notes": "FFT"},
        ["loosen the options", "left out by the options", "FFT"],
    ),
    "TF32 against the user's will": (
        product,
        [FLOAT32, FLOAT32],
        {"precision": "highest"},
        ["in TF32 only", "'highest'"],
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", REFUSED)
def test_an_unsupported_graph_is_printed_with_reasons_and_advice(what):
    function, avals, options, words = REFUSED[what]
    error = refusal(function, avals, **options)
    assert isinstance(error, NotImplementedError)
    assert error.reasons
    assert error.fix
    for pattern in (*words, "what to do: ", "cuDNN's reasons:", r"graph\(\w: ", "return "):
        assert re.search(pattern, str(error)), f"{pattern!r} is not in\n{error}"


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda g, x: g.relu(x * 0.5), [(64, 1)]),
        (lambda g, x: g.relu(x * 0.5), [(2, 2, 2, 2, 2, 2, 4)]),
        (lambda g, x, b: g.mul(g.exp(x), b), [(4, 64, 8, 8), (1, 64, 1, 1)]),
        (lambda g, x, b: g.exp(g.mul(x, b)), [(4, 64, 8, 8), (4, 1, 8, 8)]),
        (lambda g, x, w, b: g.mul(g.matmul(x, w), g.exp(b)), [(1, 64, 64)] * 2 + [(1, 1, 64)]),
    ],
)
def test_what_lies_beside_it_is_planned(function, shapes):
    """High ranks, one channel; an operand may broadcast, beside a matmul a computed one, too."""
    avals = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    with jc.target("H200"):
        assert jc.plan(jc.graph(function), *avals).engine


def test_cudnn_is_not_asked_where_the_reason_is_known(monkeypatch):
    def asked(*_):
        raise AssertionError("cuDNN was asked")

    monkeypatch.setattr(planner, "_build", asked)
    error = refusal(lambda g, x, b: g.mul(x, g.exp(b)), FULL_ROW)
    assert "before the call" in str(error)


# -- what cuDNN would accept and compute wrongly, or in part ---------------------------------------


def narrow(tensor):
    return tensor.set_data_type("bfloat16")


def apart(y, *functions):
    return [function(y) for function in functions]


FULL_ROW = [((4, 64, 8, 8), HALF), ((1, 64, 1, 1), HALF)]
WIDE = [(shape, "float32") for shape, _ in (IMAGE, WEIGHT)]
ROWS, SCALE, STATISTIC = ((64, 1024), HALF), ((1, 1024), HALF), ((64, 1), HALF)
CHANNELS, POINTS = ((1, 64, 1, 1), HALF), [((2, 64, 1, 1), HALF), ((64, 64, 1, 1), HALF)]
VECTORS = [((1, 32, 64), HALF), ((8, 32, 1), HALF), ((1, 16, 32), HALF)]
PACKED_IMAGE, PACKED_WEIGHT = [4096, 64, 8, 1], [576, 9, 3, 1]
NOT_ASKED_FOR = [  # most found by random graphs on an H200: function, operands, words of the reason
    (lambda g, x, b: g.mul(x, g.exp(b)), FULL_ROW, r"mul\.0: b is computed .* \[1, 64, 1, 1\]"),
    (lambda g, x, b: g.sub(g.add(b, 1.0), x), FULL_ROW, r"sub\.0: a is computed in the graph"),
    (lambda g, x, b: g.mul(x, g.mul(b, b)), FULL_ROW, r"mul\.1: b is computed in the graph"),
    (lambda g, x, b: g.binary_select(x, 0.0, g.cmp_gt(b, 0.0)), FULL_ROW, r"binary_select\.0: "),
    (lambda g, x, b: g.relu_backward(b, x), FULL_ROW, "of one shape"),
    (lambda g, x, b: g.relu_backward(x, b), FULL_ROW, "of one shape"),
    (lambda g, x, w: g.mul(g.relu(x), w), [POINTS[0], ((1, 64, 8, 8), HALF)], "broadcasting"),
    (lambda g, x, w, b: g.bias(conv(g, x, w), b), [IMAGE, WEIGHT, POINTS[0]], "broadcasting"),
    (
        lambda g, x, w, b: g.add(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((1, 1, 8, 8), HALF)],
        r"add.0: broadcasting \[1, 1, 8, 8\] to \[2, 64, 8, 8\]",
    ),
    (
        lambda g, x, w: conv(g, x, w.set_stride(packed_strides(w.shape, (2, 3, 1, 0)))),
        [IMAGE, WEIGHT],  # such a filter was accepted and the result wrong (relative error 1.4)
        "channels-last",
    ),
    (lambda g, x, w: g.conv_fprop(x, w.set_stride(PACKED_WEIGHT)), [IMAGE, WEIGHT], "lies in mem"),
    (lambda g, x, y: (g.relu(x), g.relu(y)), [IMAGE, IMAGE], "nothing in common"),
    (lambda g, x, a: (g.relu(x), g.relu(a)), [IMAGE, MATRIX], "tensors of ranks 3, 4"),
    (lambda g, x, w, a: (g.conv_fprop(x, w), g.matmul(a, x)), VECTORS, "tensors of ranks 3, 4"),
    (lambda g, x: g.add(x, g.gen_index(x, axis=0)), [((64, 128), "float32")], "three dimensions"),
    (lambda g, x, w: conv(g, narrow(g.relu(x)), w), [IMAGE, WEIGHT], "conv_fprop.0 takes no oper"),
    (
        lambda g, a, b: apart(narrow(g.relu(a)), lambda r: r, lambda r: g.matmul(r, b)),
        [MATRIX, MATRIX],
        "not for that alone",
    ),
    (lambda g, x, w: (conv(g, x, w), g.relu(w)), [IMAGE, WEIGHT], "is beside conv_fprop.0"),
    (
        lambda g, x, w, r: g.add(g.conv_fprop(x, w), r),
        [*POINTS, IMAGE],
        "broadcasting|another shape",
    ),
    (
        lambda g, x: g.conv_wgrad(x, x, padding=[1, 1], out_dims=[64, 64, 3, 3]),
        [IMAGE],
        "both operands are the same tensor",
    ),
    (lambda g, a: g.matmul(a, a), [MATRIX], "both operands are the same tensor"),
    (lambda g, a: g.matmul(narrow(g.erf(a)), a), [MATRIX], "are made of the same tensor"),
    (
        lambda g, x, w: g.relu(conv(g, x, w)).set_stride(PACKED_IMAGE),
        WIDE,
        r"OUT_0 of relu.0 lies in memory in the order \[0, 1, 2, 3\], beside arrays of a conv",
    ),
    (
        lambda g, x, w: g.relu(
            conv(g, x.set_stride(PACKED_IMAGE), w.set_stride(PACKED_WEIGHT)).set_stride(
                PACKED_IMAGE
            )
        ),
        WIDE,
        r"OUT_0 of relu.0 lies in memory in the order \[0, 2, 3, 1\], beside arrays of a conv",
    ),
    (
        lambda g, x, s, m, v: g.layernorm_backward(x, x, s, m, v)[0],
        [ROWS, SCALE, STATISTIC, ((64, 1), "float32")],
        "its mean in float32, not bfloat16",
    ),
    (
        lambda g, x, s: [narrow(y) for y in g.rmsnorm(x, s, epsilon=1e-5)],
        [ROWS, SCALE],
        "its inv_var in float32, not bfloat16",
    ),
    (
        lambda g, x, *s: g.batchnorm(x, *s, 1e-5, 0.1)[0].set_data_type("float8_e4m3fn"),
        [IMAGE, *[((1, 64, 1, 1), "float32")] * 4],
        "writes no float8_e4m3fn behind it",
    ),
    (
        lambda g, a, b: g.matmul(narrow(g.relu(a)), b),
        [((1, 64, 33), HALF), ((1, 33, 64), HALF)],
        "no multiple of 16 bytes",
    ),
    (
        lambda g, x, w: apart(
            conv(g, x, w), g.gelu, lambda y: g.identity(y).set_data_type("float32")
        ),
        [IMAGE, WEIGHT],
        "changes nothing",
    ),
    (lambda g, x, w: g.add(conv(g, x, w), g.gen_index(x, axis=0)), [IMAGE, WEIGHT], "wrongly"),
    (
        lambda g, x, w: g.relu(g.conv_fprop(x, w, convolution_mode="CONVOLUTION")),
        [IMAGE, WEIGHT],
        "flipped weight",
    ),
    (
        lambda g, a, b: g.relu(g.matmul(a, b), negative_slope=0.1, upper_clip=1.0),
        [MATRIX, MATRIX],
        "a slope and an upper clip",
    ),
]


@pytest.mark.parametrize(("function", "avals", "words"), NOT_ASKED_FOR)
def test_what_cudnn_would_compute_wrongly_is_not_asked_for(function, avals, words):
    reasons = known_reasons(traced(function, avals))
    assert re.search(words, "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def test_what_stands_right_is_asked_for():
    def fused(g, x, w, s, t, mask):  # all that is beside and after a convolution
        y = g.mul(conv(g, x, w), g.mul(s, t))
        y = g.binary_select(g.bias(y, t), 0.0, mask)
        return y, g.reduction(y, mode="ADD", out_dims=[1, 64, 1, 1])

    avals = [IMAGE, WEIGHT, CHANNELS, CHANNELS, (IMAGE[0], jnp.bool_)]
    assert known_reasons(traced(fused, avals)) == {}
