"""What cuDNN refuses, and what is refused before it is asked: in words, with what to do.

As users read it under ``implementation="cudnn"``; by default XLA runs what is refused.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import conv, product, spec_of

import jax_cudnn as jc
from jax_cudnn._core.graph.layout import packed_strides
from jax_cudnn._core.planning.limits import known_reasons
from jax_cudnn._core.planning.unsupported import LEFT_OUT, engine_reasons, unsupported
from jax_cudnn._core.reasons import Kind

pytestmark = pytest.mark.usefixtures("by_cudnn")

HALF = jnp.bfloat16
IMAGE, WEIGHT, MATRIX = ((2, 64, 8, 8), HALF), ((64, 64, 3, 3), HALF), ((1, 64, 64), HALF)


def refusal(function, avals, gpu="H200", **options):
    avals = (jax.ShapeDtypeStruct(*aval) for aval in avals)
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target(gpu):
        jc.plan(jc.graph(function, **options), *avals)
    return caught.value


FLOAT32 = [((1, 64, 64), "float32")] * 2
FLOAT8 = [((1, 64, 64), "float8_e4m3fn")] * 2
REFUSED = {  # function, operands, options, words of the message
    "two convolutions": (
        lambda g, x, w: conv(g, g.relu(conv(g, x, w)).set_data_type("bfloat16"), w),
        [IMAGE, WEIGHT], {},
        [r"engine \d+: ", r"conv_fprop\.1::Y: bfloat16", "one convolution or matmul each"],
    ),
    "float8 on an A100": (product.fn, FLOAT8, {"gpu": "A100"}, ["use bfloat16 or float16"]),
    "left out by options": (
        conv, [IMAGE, WEIGHT], {"select_numeric_notes": "FFT"},
        ["relax the options", "excluded by the options", "FFT"],
    ),
    "TF32": (
        product.fn, FLOAT32, {"precision": "highest"},
        ["in TF32 only", "'highest'", "use bfloat16 or float16"],
    ),
    "two types": (
        conv, [IMAGE, (WEIGHT[0], "float16")], {},
        [r"different types \(bfloat16 and float16", "use one dtype for both operands"],
    ),
}  # fmt: skip


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


BLOCK = '{"engineId":%d}\nWarning: CUDNN_STATUS_%s; Reason: %s\n'
SAID = [  # by one engine each, as the frontend writes it
    (0, "NOT_SUPPORTED_ARCH_MISMATCH", "deviceVer < 900", Kind.ARCHITECTURE),
    (3, "NOT_SUPPORTED_SHAPE", "k % 8 != 0", Kind.SHAPE),
    (4, "NOT_SUPPORTED", "too odd", Kind.OTHER),
    (5, "NOT_SUPPORTED_GRAPH_PATTERN", "mmaNodeCount > 1", Kind.ANCHORS),
]


def test_reasons_are_ranked_and_advised_on_by_kind():
    reasons = engine_reasons("".join(BLOCK % row[:3] for row in SAID))
    assert [(who, r.kind) for who, r in reasons.items()] == [
        (f"engine {row[0]}", row[-1]) for row in SAID
    ]
    spec = spec_of(lambda g, a, b: g.relu(g.matmul(a, b)), MATRIX, MATRIX)
    error = unsupported(spec, reasons)
    assert [*error.reasons] == ["engine 5", "engine 3", "engine 4", "engine 0"]
    assert error.reason == error.reasons["engine 5"]
    cut, pad = error.fix.split("; ")
    assert ("cut" in cut, "multiple of 8" in pad) == (True, True)
    left_out = dict.fromkeys(("eng6", "eng7"), LEFT_OUT)
    error = unsupported(spec, reasons | left_out)
    assert error.reason == "2 plans, excluded by the options"
    assert error.fix.startswith("relax the options")
    alone = unsupported(spec_of(product.fn, MATRIX, MATRIX), reasons)  # nothing to cut
    assert alone.fix == pad


def narrow(tensor):
    return tensor.set_data_type("bfloat16")


def apart(y, *functions):
    return [function(y) for function in functions]


FULL_ROW = [((4, 64, 8, 8), HALF), ((1, 64, 1, 1), HALF)]
WIDE = [(shape, "float32") for shape, _ in (IMAGE, WEIGHT)]
ROWS, SCALE, STATISTIC = ((64, 1024), HALF), ((1, 1024), HALF), ((64, 1), HALF)
CHANNELS = ((1, 64, 1, 1), HALF)
NOT_ASKED_FOR = [  # most found by random graphs on an H200: function, operands, words of the reason
    (lambda g, x, b: g.mul(x, g.exp(b)), FULL_ROW, "b is computed in the graph"),
    (lambda g, x, b: g.relu_backward(b, x), FULL_ROW, "equal shapes only"),
    (
        lambda g, x, w, b: g.add(conv(g, x, w), b), [IMAGE, WEIGHT, ((1, 1, 8, 8), HALF)],
        "next to a full operand cuDNN takes",
    ),
    (
        lambda g, x, w: conv(g, x, w.set_stride(packed_strides(w.shape, (2, 3, 1, 0)))),
        [IMAGE, WEIGHT],  # such a filter was accepted and the result wrong (relative error 1.4)
        "channels-last",
    ),
    (
        lambda g, x, w: g.relu(conv(g, x, w)).set_stride([4096, 64, 8, 1]), WIDE,
        "but the arrays of the convolution",
    ),
    (lambda g, x, y: (g.relu(x), g.relu(y)), [IMAGE, IMAGE], "disconnected"),
    (lambda g, x, a: (g.relu(x), g.relu(a)), [IMAGE, MATRIX], "tensors of ranks 3, 4"),
    (
        lambda g, x: g.add(x, g.gen_index(x, axis=0)), [((64, 128), "float32")],
        "at least three dimensions",
    ),
    (lambda g, x, w: conv(g, narrow(g.relu(x)), w), [IMAGE, WEIGHT], "conv_fprop.0 takes no oper"),
    (
        lambda g, a, b: apart(narrow(g.relu(a)), lambda r: r, lambda r: g.matmul(r, b)),
        [MATRIX, MATRIX], "and is used elsewhere",
    ),
    (lambda g, x, w: (conv(g, x, w), g.relu(w)), [IMAGE, WEIGHT], "is independent of conv_fprop.0"),
    (
        lambda g, a, b, r: g.add(g.matmul(a, b), r), [MATRIX, ((1, 64, 1), HALF), MATRIX],
        "its shape differs",
    ),
    (
        lambda g, a, b, c: (g.matmul(a, b), g.matmul(c, b)),  # as in the gradient of one
        [MATRIX, MATRIX, MATRIX], "one plan holds one anchor",
    ),
    (lambda g, a, b: g.matmul(g.matmul(a, b), b), [MATRIX, MATRIX], "chains are not verified"),
    (
        lambda g, x: g.conv_wgrad(x, x, padding=[1, 1], out_dims=[64, 64, 3, 3]), [IMAGE],
        "both operands are the same tensor",
    ),
    (
        lambda g, a, b: g.matmul(a, b).set_stride([1, 128, 2]), [((2, 64, 64), HALF)] * 2,
        "the batch of the result is innermost",
    ),
    (lambda g, a: g.matmul(a, a), [MATRIX], "operands are the same tensor"),
    (lambda g, a: g.matmul(narrow(g.erf(a)), a), [MATRIX], "computed from the same tensor"),
    (
        lambda g, x, s, m, v: g.layernorm_backward(x, x, s, m, v)[0],
        [ROWS, SCALE, STATISTIC, ((64, 1), "float32")], "its mean in float32, not bfloat16",
    ),
    (
        lambda g, x, *s: g.batchnorm(x, *s, 1e-5, 0.1)[0].set_data_type("float8_e4m3fn"),
        [IMAGE, *[((1, 64, 1, 1), "float32")] * 4], "cannot write float8_e4m3fn after it",
    ),
    (
        lambda g, a, b: g.matmul(narrow(g.relu(a)), b), [((1, 64, 33), HALF), ((1, 33, 64), HALF)],
        "not a multiple of 16 bytes",
    ),
    (
        lambda g, x, w: apart(
            conv(g, x, w), g.gelu, lambda y: g.identity(y).set_data_type("float32")
        ), [IMAGE, WEIGHT], "changes nothing",
    ),
    (lambda g, x, w: g.add(conv(g, x, w), g.gen_index(x, axis=0)), [IMAGE, WEIGHT], "wrongly"),
    (
        lambda g, x, w: g.relu(g.conv_fprop(x, w, convolution_mode="CONVOLUTION")), [IMAGE, WEIGHT],
        "flipped weight",
    ),
    (
        lambda g, a, b: g.relu(g.matmul(a, b), negative_slope=0.1, upper_clip=1.0),
        [MATRIX, MATRIX], "a slope and an upper clip",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", NOT_ASKED_FOR, ids=[row[-1] for row in NOT_ASKED_FOR])
def test_what_cudnn_would_compute_wrongly_is_not_asked_for(row):
    function, avals, words = row
    assert words in "; ".join(map(str, known_reasons(spec_of(function, *avals)).values()))


def test_what_stands_right_is_asked_for():
    def fused(g, x, w, s, t, mask):  # all that is beside and after a convolution
        y = g.mul(conv(g, x, w), g.mul(s, t))
        y = g.binary_select(g.bias(y, t), 0.0, mask)
        return y, g.reduction(y, mode="ADD", out_dims=[1, 64, 1, 1])

    avals = [IMAGE, WEIGHT, CHANNELS, CHANNELS, (IMAGE[0], jnp.bool_)]
    assert known_reasons(spec_of(fused, *avals)) == {}
