"""What cuDNN refuses, and what is refused before it is asked: in words, with what to do.

As users read it under ``implementation="cudnn"``; by default XLA runs what is refused.
"""

import math
import re
import types

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import build, choice, planner
from jax_cudnn._core.dims import packed_strides

pytestmark = pytest.mark.usefixtures("by_cudnn")

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
    assert str(plan).startswith(f"{plan.engine} for H200, ")
    (made,) = plan.execution_plans
    assert str(made).startswith(f"{plan.engine} for NVIDIA H200, ")


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


# -- what cuDNN would accept and compute wrongly ---------------------------------------------------

FULL, ROW, COLUMN = (4, 64, 8, 8), (1, 64, 1, 1), (4, 1, 8, 8)
MISCOMPUTED = {
    "computed small, then broadcast": (
        lambda g, x, b: g.mul(x, g.exp(b)),
        [FULL, ROW],
        [r"mul\.0: b is computed in the graph with shape \[1, 64, 1, 1\]", "before the call"],
    ),
    "computed small from two": (
        lambda g, x, b: g.sub(g.add(b, 1.0), x),
        [FULL, COLUMN],
        [r"sub\.0: a is computed in the graph with shape \[4, 1, 8, 8\]", r"\[4, 64, 8, 8\]"],
    ),
    "two small ones multiplied": (
        lambda g, x, b: g.mul(x, g.mul(b, b)),
        [FULL, ROW],
        [r"mul\.1: b is computed in the graph", "before the call"],
    ),
    "a small comparison picks": (
        lambda g, x, b: g.binary_select(x, 0.0, g.cmp_gt(b, 0.0)),
        [FULL, ROW],
        [r"binary_select\.0: ", r"\[1, 64, 1, 1\]"],
    ),
    "relu_backward of a smaller loss": (
        lambda g, x, b: g.relu_backward(b, x),
        [FULL, ROW],
        [r"relu_backward\.0: ", "of one shape"],
    ),
    "relu_backward of a smaller input": (
        lambda g, x, b: g.relu_backward(x, b),
        [FULL, COLUMN],
        [r"relu_backward\.0: ", "of one shape"],
    ),
}


@pytest.mark.parametrize("what", MISCOMPUTED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_cudnn_would_compute_wrongly_is_not_planned(what, dtype, monkeypatch):
    """Known without asking cuDNN, and right where XLA runs it."""
    function, shapes, patterns = MISCOMPUTED[what]
    graph = jc.graph(function)
    arrays = [jnp.linspace(-1, 1, math.prod(s)).reshape(s).astype(dtype) for s in shapes]
    assert graph(*arrays).shape == FULL

    def asked(*_):
        raise AssertionError("cuDNN was asked")

    monkeypatch.setattr(planner, "_build", asked)
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(graph, *arrays)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), str(caught.value)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda g, x, b: g.mul(x, b), [FULL, ROW]),
        (lambda g, x, b: g.exp(g.mul(x, b)), [FULL, COLUMN]),
        (lambda g, x, b: g.mul(g.exp(x), b), [FULL, ROW]),
        (lambda g, x, b: g.relu_backward(x, b), [FULL, FULL]),
        (lambda g, x, b: g.mul(g.matmul(x, x), g.exp(b)), [(1, 64, 64), (1, 1, 64)]),
    ],
)
def test_what_lies_beside_it_is_planned(function, shapes):
    """An operand may broadcast, and beside a matmul a computed value, too."""
    avals = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    with jc.target("H200"):
        assert jc.plan(jc.graph(function), *avals).engine


@pytest.mark.deviceless
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_float32_matrices_are_not_multiplied_in_tf32_against_the_users_will(precision):
    avals = [jax.ShapeDtypeStruct((1, 64, 64), "float32")] * 2
    matmul = jc.graph(lambda g, a, b: g.matmul(a, b), precision=precision)
    with pytest.raises(jc.UnsupportedGraphError) as caught, jc.target("H200"):
        jc.plan(matmul, *avals)
    assert "in TF32 only" in caught.value.reasons["matmul.0"]
    assert repr(precision) in str(caught.value)


# -- engines that compute wrongly ----------------------------------------------------------------

INT8_CONV = [jax.ShapeDtypeStruct(s, "int8") for s in ((2, 16, 8, 8), (16, 16, 3, 3))]


@pytest.mark.deviceless
def test_engines_that_compute_integer_convolutions_wrongly_are_not_chosen():
    graph = jc.graph(conv)
    spec = graph.trace(*INT8_CONV)[1].spec
    assert spec.output_tensors[0].dtype == "int32"
    assert choice.distrusted(spec) == {0: "conv_fprop.0", 28: "conv_fprop.0"}
    with jc.target("H200"):
        plan = jc.plan(graph, *INT8_CONV)
    assert int(re.match(r"eng(\d+)", plan.engine)[1]) not in (0, 28)


def test_other_convolutions_have_all_engines():
    spec = jc.graph(conv).trace(*(jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT)))[1].spec
    assert choice.distrusted(spec) == {}
    as_floats = jc.graph(lambda g, x, w: conv(g, x, w).set_data_type("float32"))
    assert choice.distrusted(as_floats.trace(*INT8_CONV)[1].spec) == {}


class FakeGraph:
    """A graph for which cuDNN proposes these engines, in this order, and builds them all."""

    def __init__(self, engines):
        self.engines, self.built = engines, []

    def validate(self):
        pass

    build_operation_graph = validate

    def get_execution_plan_count(self):
        return len(self.engines)

    def get_plan_name_at_index(self, index):
        return f"eng{self.engines[index]}"

    def get_engine_and_knobs_at_index(self, index):
        return self.engines[index], {}

    def build_plan_at_index(self, index):
        self.built.append(self.engines[index])

    def get_workspace_size(self):
        return 0

    def serialize(self):
        return b""


@pytest.fixture
def built_from(monkeypatch):
    """Builds an integer convolution from the engines that cuDNN would propose."""
    monkeypatch.setattr(build, "_emit", lambda *_: None)
    monkeypatch.setattr(build.choice, "propose", lambda *_: None)
    monkeypatch.setattr(build.ubjson, "decode", lambda blob: blob)
    monkeypatch.setattr(build, "decode", lambda spec, blob, name, *_: name)
    spec = jc.graph(conv).trace(*INT8_CONV)[1].spec

    def from_engines(*engines):
        graph = FakeGraph(engines)
        fake = types.SimpleNamespace(
            pygraph=lambda **_: graph,
            data_type=types.SimpleNamespace(FLOAT=0),
            cudnnGraphNotSupportedError=NotImplementedError,
        )
        return build._build(spec, fake), graph.built

    return from_engines


def test_distrusted_engines_are_passed_over_and_not_even_built(built_from):
    assert built_from(28, 0, 4, 1) == ("eng4", [4])
    assert built_from(1, 28) == ("eng1", [1])


def test_a_graph_with_distrusted_engines_only_is_refused_in_words(built_from):
    with pytest.raises(jc.UnsupportedGraphError) as caught:
        built_from(0, 28)
    wrongly = "computes conv_fprop.0 wrongly"
    assert caught.value.reasons == {"eng0": wrongly, "eng28": wrongly}


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
