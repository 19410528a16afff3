"""What cuDNN refuses, and what is refused before it is asked: in words, with what to do."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import build
from jax_cudnn._core.dims import packed_strides

IMAGE, WEIGHT = ((2, 64, 8, 8), jnp.bfloat16), ((64, 64, 3, 3), jnp.bfloat16)
MATRIX = ((1, 64, 64), jnp.bfloat16)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


UNSUPPORTED = {
    "two convolutions": (
        lambda g, x, w: conv(g, g.relu(conv(g, x, w)), w),
        [IMAGE, WEIGHT],
        [r"engine \d+: ", r"conv_fprop\.1::Y: bfloat16\[2,64,8,8\]"],
    ),
    "two matmuls": (
        lambda g, x, w: g.matmul(g.matmul(x, w), w),
        [MATRIX, MATRIX],
        [
            r"engine \d+: this pattern of operations is not supported",
            "one convolution or matmul each",
        ],
    ),
    "mixed dtypes": (
        conv,
        [IMAGE, (WEIGHT[0], jnp.float16)],
        [r"engine \d+: ", "bfloat16 or float16 inputs"],
    ),
    "rounded reduction": (
        lambda g, x, w: g.reduction(g.relu(x), out_dims=[1, 1, 64]).set_data_type("bfloat16"),
        [MATRIX, MATRIX],
        ["leave a reduction's result float32", "must be the last node"],
    ),
    "broadcast over channels and batch": (
        lambda g, x, w, b: g.add(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((1, 1, 8, 8), jnp.bfloat16)],
        [
            r"add.0: broadcasting \[1, 1, 8, 8\] to \[2, 64, 8, 8\]",
            r"\[1, 64, 1, 1\]",
            "jnp.broadcast_to",
        ],
    ),
    "broadcast over space": (
        lambda g, x, w, b: g.bias(conv(g, x, w), b),
        [IMAGE, WEIGHT, ((2, 64, 1, 1), jnp.bfloat16)],
        [r"bias.0: broadcasting \[2, 64, 1, 1\]", "jnp.broadcast_to"],
    ),
    "both operands broadcast": (
        lambda g, x, w: g.mul(g.relu(x), w),
        [((2, 64, 1, 1), jnp.bfloat16), ((1, 64, 8, 8), jnp.bfloat16)],
        [r"mul.0: broadcasting"],
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_graph_is_printed_with_reasons_and_advice(what):
    function, avals, patterns = UNSUPPORTED[what]
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(jc.graph(function), *(jax.ShapeDtypeStruct(*aval) for aval in avals))
    error, text = caught.value, str(caught.value)
    assert isinstance(error, NotImplementedError)
    assert error.reasons
    assert error.fix
    assert error.graph.startswith("graph(x: bfloat16[")
    for pattern in (*patterns, "what to do: ", "cuDNN's reasons:", "return "):
        assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


@pytest.mark.deviceless
def test_two_convolutions_are_explained_in_words():
    function, avals, _ = UNSUPPORTED["two convolutions"]
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(jc.graph(function), *(jax.ShapeDtypeStruct(*aval) for aval in avals))
    assert "one convolution or matmul each" in caught.value.fix
    assert not any(reason.startswith("mmaNodeCount") for reason in caught.value.reasons.values())


@pytest.mark.deviceless
def test_plan_of_a_supported_graph_describes_itself():
    with jc.target("H200"):
        plan = jc.plan(jc.graph(conv), *(jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT)))
    assert plan.candidates >= 1
    assert str(plan).startswith(plan.engine)
    assert "NVIDIA H200" in str(plan)


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", [(64, 1), (4, 64, 1), (8, 1, 28, 28), (2, 2, 2, 2, 2, 2, 4)])
def test_pointwise_graphs_of_one_channel_or_high_rank_are_planned(shape):
    with jc.target("H200"):
        plan = jc.plan(
            jc.graph(lambda g, x: g.relu(x * 0.5)), jax.ShapeDtypeStruct(shape, "float32")
        )
    assert plan.engine


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("gpu", "dtypes", "supported"),
    [
        ("A100", ("float8_e4m3fn", "float8_e4m3fn"), "bfloat16, float16"),
        ("H200", ("bfloat16", "float16"), "bfloat16, float16, float32, float8_e4m3fn"),
    ],
)
def test_unsupported_types_are_told_with_those_that_are_supported(gpu, dtypes, supported):
    avals = [jax.ShapeDtypeStruct((1, 64, 64), dtype) for dtype in dtypes]
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target(gpu):
        jc.plan(jc.graph(lambda g, a, b: g.matmul(a, b)), *avals)
    assert f"operands of {supported}" in caught.value.expected


@pytest.mark.deviceless
def test_plans_left_out_by_options_are_counted_and_the_options_named():
    avals = (jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT))
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(jc.graph(select_numeric_notes="FFT")(conv), *avals)
    assert "loosen the options" in caught.value.fix
    assert "FFT" in caught.value.fix
    assert any("left out by the options" in r for r in caught.value.reasons.values())
    assert len(caught.value.reasons) <= 3


@pytest.mark.parametrize("order", [(2, 3, 1, 0), (1, 0, 2, 3)])
def test_filters_in_an_order_that_cudnn_misreads_are_refused(order):
    """On an H200 such a filter was accepted and the result wrong (relative error 1.4)."""

    def conv_hwio(g, x, w):
        return conv(g, x, w.set_stride(packed_strides(w.shape, order)))

    with pytest.raises(jc.UnsupportedGraphError, match="channels-last"), jc.target("H200"):
        jc.plan(jc.graph(conv_hwio), *(jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT)))


def test_failure_of_the_device_is_no_unsupported_graph():
    spec = jc.graph(lambda g, x: g.relu(x)).trace(jnp.ones((2, 2)))[1].spec

    class FakeCudnn:
        cudnnGraphNotSupportedError = NotImplementedError

    with pytest.raises(jc.LibraryError, match="failed while planning"):
        with build._reasons_of(spec, FakeCudnn):
            raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED: out of memory")
    with pytest.raises(jc.UnsupportedGraphError):
        with build._reasons_of(spec, FakeCudnn):
            raise RuntimeError("bad descriptor")
