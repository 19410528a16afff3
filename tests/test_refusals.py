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
from jax_cudnn._core.graph.dims import packed_strides
from jax_cudnn._core.planning import build, choice, planner, workspace
from jax_cudnn._core.planning.limits import known_reasons

pytestmark = pytest.mark.usefixtures("by_cudnn")

IMAGE, WEIGHT = ((2, 64, 8, 8), jnp.bfloat16), ((64, 64, 3, 3), jnp.bfloat16)
MATRIX = ((1, 64, 64), jnp.bfloat16)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


UNSUPPORTED = {
    "two convolutions": (
        lambda g, x, w: conv(g, g.relu(conv(g, x, w)).set_data_type("bfloat16"), w),
        [IMAGE, WEIGHT],
        [r"engine \d+: ", r"conv_fprop\.1::Y: bfloat16\[2,64,8,8\]"],
    ),
    "two matmuls": (
        lambda g, x, w: g.matmul(g.matmul(x, w), w),
        [MATRIX, MATRIX],
        [
            r"matmul\.1: it needs matmul\.0, and such chains ran on no GPU",
            "split the function into smaller graphs",
        ],
    ),
    "mixed dtypes": (
        conv,
        [IMAGE, (WEIGHT[0], jnp.float16)],
        [r"different types \(bfloat16 and float16\)", "give both operands one dtype"],
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
    assert plan.candidate_count >= 1
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
        (lambda g, x, w, b: g.mul(g.matmul(x, w), g.exp(b)), [(1, 64, 64)] * 2 + [(1, 1, 64)]),
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
    assert wrong_engines(spec) == {0: "conv_fprop.0", 28: "conv_fprop.0"}
    with jc.target("H200"):
        plan = jc.plan(graph, *INT8_CONV)
    assert int(re.match(r"eng(\d+)", plan.engine)[1]) not in (0, 28)


def test_other_convolutions_have_all_engines():
    spec = jc.graph(conv).trace(*(jax.ShapeDtypeStruct(*aval) for aval in (IMAGE, WEIGHT)))[1].spec
    assert wrong_engines(spec) == {}
    as_floats = jc.graph(lambda g, x, w: conv(g, x, w).set_data_type("float32"))
    assert wrong_engines(as_floats.trace(*INT8_CONV)[1].spec) == {}


MATRICES = [((1, 64, 64), jnp.float32)] * 2
WRONG = {  # found by random graphs on an H200: function, operands, engines (of 0 to 80) and knobs
    "relu with a slope behind a matmul": (
        lambda g, a, b: g.relu(g.matmul(a, b), negative_slope=0.1),
        MATRICES,
        {0: "relu.0"},
    ),
    "leaky relu behind a matmul": (
        lambda g, a, b: g.leaky_relu(g.matmul(a, b), negative_slope=0.1),
        MATRICES,
        {0: "leaky_relu.0"},
    ),
    "plain relu behind a matmul": (lambda g, a, b: g.relu(g.matmul(a, b)), MATRICES, {}),
    "relu with a slope alone": (lambda g, a: g.relu(a, negative_slope=0.1), MATRICES[:1], {}),
    "float32 matmul with a narrow result": (
        lambda g, a, b: g.matmul(a, b).set_data_type("float16"),
        MATRICES,
        {0: "matmul.0"},
    ),
    "conv with two results": (
        lambda g, x, w: (lambda y: (y, g.relu(y)))(conv(g, x, w)),
        [IMAGE, WEIGHT],
        dict.fromkeys(range(81), "conv_fprop.0"),
    ),
    "dgrad with a wide result": (
        lambda g, dy, w: g.conv_dgrad(dy, w, padding=[1, 1], out_dims=list(IMAGE[0])).set_data_type(
            "float32"
        ),
        [IMAGE, WEIGHT],
        {8: "conv_dgrad.0"},
    ),
    "what is computed beside a convolution": (
        lambda g, x, w: g.add(g.relu(x), conv(g, x, w)),
        [((2, 64, 8, 8), jnp.float32), ((64, 64, 3, 3), jnp.float32)],
        {8: "conv_fprop.0"},
    ),
    "what is computed beside a gradient": (
        lambda g, x, w: g.add(g.relu(x), g.conv_dgrad(x, w, padding=[1, 1])),
        [((2, 64, 8, 8), jnp.float32), ((64, 64, 3, 3), jnp.float32)],
        {8: "conv_dgrad.0"},
    ),
    "nothing beside a convolution": (
        lambda g, x, w: g.relu(g.add(x, conv(g, x, w))),
        [((2, 64, 8, 8), jnp.float32), ((64, 64, 3, 3), jnp.float32)],
        {},
    ),
}


@pytest.mark.parametrize(("function", "avals", "engines"), WRONG.values(), ids=WRONG)
def test_engines_found_wrong_are_known(function, avals, engines):
    spec = jc.graph(function).trace(*(jax.ShapeDtypeStruct(*aval) for aval in avals))[1].spec
    assert wrong_engines(spec) == engines
    assert choice.distrusted(spec, 7, {"KERNEL_CFG": 29}) == ""


def wrong_engines(spec):
    found = {engine: choice.distrusted(spec, engine, {}) for engine in range(81)}
    return {engine: name for engine, name in found.items() if name}


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

    def get_behavior_notes_for_plan_at_index(self, index):
        return []

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
            backend_version=lambda: 91900,
        )
        return build._build(spec, fake, workspace.Limit(2**30)), graph.built

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
        with build.reasons_of(spec, FakeCudnn):
            raise RuntimeError("CUDNN_STATUS_ALLOC_FAILED: out of memory")
    with pytest.raises(jc.UnsupportedGraphError):
        with build.reasons_of(spec, FakeCudnn):
            raise RuntimeError("bad descriptor")


# -- structures of which cuDNN computes a part only ------------------------------------------------

HALF, BATCH = jnp.bfloat16, (1, 32, 64)
STRUCTURES = {  # found by random graphs on an H200: function, operands, words of the reason
    "pieces that have nothing in common": (
        lambda g, x, y: (g.relu(x), g.relu(y)),
        [IMAGE, IMAGE],
        "nothing in common",
    ),
    "tensors of two ranks": (
        lambda g, x, a: (g.relu(x), g.relu(a)),
        [IMAGE, MATRIX],
        "tensors of ranks 3, 4",
    ),
    "indices of matrices": (
        lambda g, x: g.add(x, g.gen_index(x, axis=0)),
        [((64, 128), "float32")],
        "tensors of rank 2, where gen_index.0 takes three dimensions or more",
    ),
    "a convolution of vectors beside a matmul": (
        lambda g, x, w, a: (g.conv_fprop(x, w), g.matmul(a, x)),
        [(BATCH, HALF), ((8, 32, 1), HALF), ((1, 16, 32), HALF)],
        "tensors of ranks 3, 4",
    ),
    "an operand computed before a convolution": (
        lambda g, x, w: conv(g, g.relu(x).set_data_type("bfloat16"), w),
        [IMAGE, WEIGHT],
        "conv_fprop.0 takes no operand",
    ),
    "an operand of a matmul that is returned, too": (
        lambda g, a, b: (lambda r: (r, g.matmul(r, b)))(g.relu(a).set_data_type("bfloat16")),
        [MATRIX, MATRIX],
        "not for that alone",
    ),
    "something of the weights, beside": (
        lambda g, x, w: (conv(g, x, w), g.relu(w)),
        [IMAGE, WEIGHT],
        "is beside conv_fprop.0",
    ),
    "something small after a convolution, of another shape": (
        lambda g, x, w, r: g.add(g.conv_fprop(x, w), r),
        [((2, 64, 1, 1), HALF), ((64, 64, 1, 1), HALF), ((2, 64, 8, 8), HALF)],
        "broadcasting|another shape",
    ),
    "one tensor as both operands": (
        lambda g, x: g.conv_wgrad(x, x, padding=[1, 1], out_dims=[64, 64, 3, 3]),
        [IMAGE],
        "both operands are the same tensor",
    ),
    "a result in another order behind a convolution": (
        lambda g, x, w: g.relu(conv(g, x, w)).set_stride([4096, 64, 8, 1]),
        [((2, 64, 8, 8), jnp.float32), ((64, 64, 3, 3), jnp.float32)],
        r"OUT_0 of relu.0 lies in memory in the order \[0, 1, 2, 3\], beside arrays of a conv",
    ),
    "a result in no order behind a convolution that states one": (
        lambda g, x, w: g.relu(
            conv(g, x.set_stride([4096, 64, 8, 1]), w.set_stride([576, 9, 3, 1])).set_stride(
                [4096, 64, 8, 1]
            )
        ),
        [((2, 64, 8, 8), jnp.float32), ((64, 64, 3, 3), jnp.float32)],
        r"OUT_0 of relu.0 lies in memory in the order \[0, 2, 3, 1\], beside arrays of a conv",
    ),
    "one matrix as both operands": (
        lambda g, a: g.matmul(a, a),
        [MATRIX],
        "both operands are the same tensor",
    ),
    "one matrix as both operands, computed": (
        lambda g, a: g.matmul(g.erf(a).set_data_type("bfloat16"), a),
        [MATRIX],
        "both operands are made of the same tensor: compute one before",
    ),
    "a mean in 16 bits for a gradient": (
        lambda g, x, s, m, v: g.layernorm_backward(x, x, s, m, v)[0],
        [((64, 1024), HALF), ((1, 1024), HALF), ((64, 1), HALF), ((64, 1), "float32")],
        "its mean in float32, not bfloat16",
    ),
    "float8 behind a batch norm": (
        lambda g, x, s, b, m, v: g.batchnorm(x, s, b, m, v, 1e-5, 0.1)[0].set_data_type(
            "float8_e4m3fn"
        ),
        [IMAGE, *[((1, 64, 1, 1), "float32")] * 4],
        "writes no float8_e4m3fn behind it",
    ),
    "statistics in 16 bits": (
        lambda g, x, s: [y.set_data_type(x.dtype) for y in g.rmsnorm(x, s, epsilon=1e-5)],
        [((64, 1024), HALF), ((1, 1024), HALF)],
        "its inv_var in float32, not bfloat16",
    ),
    "rows that are not aligned, computed before a matmul": (
        lambda g, a, b: g.matmul(g.relu(a).set_data_type("bfloat16"), b),
        [((1, 64, 33), HALF), ((1, 33, 64), HALF)],
        "no multiple of 16 bytes",
    ),
    "a copy that changes nothing": (
        lambda g, x, w: (lambda y: (g.gelu(y), g.identity(y).set_data_type("float32")))(
            conv(g, x, w)
        ),
        [IMAGE, WEIGHT],
        "changes nothing",
    ),
    "indices beside a convolution": (
        lambda g, x, w: g.add(conv(g, x, w), g.gen_index(x, axis=0)),
        [IMAGE, WEIGHT],
        "counts wrongly",
    ),
    "a flipped weight, fused": (
        lambda g, x, w: g.relu(g.conv_fprop(x, w, convolution_mode="CONVOLUTION")),
        [IMAGE, WEIGHT],
        "flipped weight",
    ),
    "a slope and an upper clip behind a matmul": (
        lambda g, a, b: g.relu(g.matmul(a, b), negative_slope=0.1, upper_clip=1.0),
        [MATRIX, MATRIX],
        "a slope and an upper clip",
    ),
    "row-major weights beside channels-last images": (
        lambda g, x, w: g.conv_fprop(x, w.set_stride([576, 9, 3, 1])),
        [IMAGE, WEIGHT],
        "weight lies in memory",
    ),
}


@pytest.mark.parametrize(("function", "avals", "words"), STRUCTURES.values(), ids=STRUCTURES)
def test_what_cudnn_computes_in_part_only_is_not_asked_for(function, avals, words):
    spec = jc.graph(function).trace(*(jax.ShapeDtypeStruct(*aval) for aval in avals))[1].spec
    assert re.search(words, "; ".join(known_reasons(spec).values()))


def test_what_stands_right_is_asked_for():
    def fused(g, x, w, s, t, mask):  # all that is beside and after a convolution
        y = g.mul(conv(g, x, w), g.mul(s, t))
        y = g.binary_select(g.bias(y, t), 0.0, mask)
        return y, g.reduction(y, mode="ADD", out_dims=[1, 64, 1, 1])

    channels = ((1, 64, 1, 1), HALF)
    avals = [IMAGE, WEIGHT, channels, channels, (IMAGE[0], jnp.bool_)]
    spec = jc.graph(fused).trace(*(jax.ShapeDtypeStruct(*aval) for aval in avals))[1].spec
    assert known_reasons(spec) == {}
