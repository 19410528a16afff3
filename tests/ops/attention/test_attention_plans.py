"""What cuDNN plans of attention, and what it is not asked for, without a GPU."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import (
    CAUSAL,
    KEY,
    LAST,
    ONE_ARRAY,
    PLANNED,
    UNSEEING,
    drawing,
    of_kind,
    of_one_array,
    of_several_dtypes,
    ours,
    planned,
    unseeing,
)
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.graph import layout
from jax_cudnn._core.graph.wire import wire

pytestmark = pytest.mark.deviceless
S = jax.ShapeDtypeStruct
X, STATS = S((2, 4, 128, 64), "bfloat16"), S((2, 4, 128, 1), "float32")
TOKENS = S((2, 128, 4, 64), "bfloat16")


@pytest.fixture
def normal(key):
    return drawing(key)


def gradients(function, count=3):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), tuple(range(count)))


def plans_of(normal, name, gpu, **given):
    function, operands, _ = planned(normal, name, **given)
    with jc.target(gpu):
        step = gradients(lambda *x: function(*x)[0], len(operands))
        return jc.plans(step, *operands)


def engines(plans):
    """cuDNN's, of all graphs in order; None where XLA runs a part."""
    return [segment.plan and segment.plan.engine for p in plans.values() for segment in p.segments]


OFTEN = ("grouped heads, causal", "window, lengths", "a row of bias", "dropout and all")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(pytest.param(n, "H200", marks=[pytest.mark.long] * (n not in OFTEN)) for n in PLANNED),
        ("grouped heads, causal", "B200"),
        ("a row of bias", "A100"),
        ("sink, lengths", "A100"),
    ],
)
def test_forward_and_backward_are_a_plan_each(name, gpu, normal):
    found = plans_of(normal, name, gpu)
    assert [*found] == ["dot_product_attention", "dot_product_attention (backward)"]
    # With lengths XLA adds up the gradient of sinks.
    assert engines(found).count(None) == (name in ("sink, lengths", "dropout and all"))
    assert len(engines(found)) - engines(found).count(None) == 2
    if name == "alibi of six heads":  # the slopes are an operand of the plan
        for plan in found.values():
            (segment,) = plan.segments
            (table,) = segment.plan.tables
            np.testing.assert_allclose(table, oracle_attention.slopes(6), rtol=1e-6)


@pytest.mark.parametrize("heads_first", [False, True])
def test_arrays_are_read_where_they_lie(heads_first):
    """(B, T, N, H) in memory is cuDNN's (B, N, T, H) with other strides: nothing is copied."""
    q, k = S((2, 256, 4, 64), "bfloat16"), S((2, 256, 2, 64), "bfloat16")
    if heads_first:
        q, k = S((2, 4, 256, 64), "bfloat16"), S((2, 2, 256, 64), "bfloat16")
    attend = functools.partial(ours, heads_first=heads_first, implementation="cudnn", **CAUSAL)
    with jc.target("H200"):
        text = jax.jit(gradients(attend)).trace(q, k, k).lower(lowering_platforms=("cuda",))
    text = text.as_text()
    calls = [line for line in text.splitlines() if "@jax_cudnn" in line]
    assert len(calls) == 2
    by_token, by_head = (f"dense<{x}> : tensor<4xindex>" for x in ([3, 1, 2, 0], [3, 2, 1, 0]))
    for call in calls:
        layouts = call.partition("operand_layouts = ")[2]
        assert (by_token in layouts) != heads_first
        assert (by_token in call.partition("result_layouts = ")[2]) != heads_first
        assert (by_head in layouts) or not heads_first
    assert not heads_first or "stablehlo.transpose" not in text


# -- what is XLA's, with a reason ------------------------------------------------------------------


def backward(g, q, k, v, o, dO, stats):
    dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
    return dq, dk.set_data_type("float32"), dv


def grad_of_bias_read(g, q, k, v, o, dO, stats, bias):
    return g.relu(g.sdpa_backward(q, k, v, o, dO, stats, bias=bias, dBias=True)[3])


SINGLE, SIX = S(TOKENS.shape, "float32"), [X] * 5 + [STATS]
REASONS = {  # a function, operands, GPU, words of the reason
    "lengths of float32": (
        lambda *x: ours(*x, key_value_seq_lengths=jnp.array([64, 30], "int32")),
        [SINGLE] * 3, "H200", ["of float32", "behind seq_len_q"],
    ),
    "gradient of float32": (gradients(ours), [SINGLE] * 3, "H200", []),
    "results of another dtype": (
        jc.graph(lambda g, q: g.sdpa(q, q, q)[0].set_data_type("float32")),
        [X], "H200", ["O in bfloat16 alone"],
    ),
    "gradients of another dtype": (jc.graph(backward), SIX, "H200", ["dK in bfloat16 alone"]),
    "dropout from the last": (
        gradients(lambda *x: ours(*x, dropout_rate=0.1, dropout_rng=KEY, **LAST)),
        [TOKENS] * 3, "H200", ["Bottom right causal mask", "of its family"],
    ),
    "dropout and dBias": (
        gradients(lambda *x: ours(*x, dropout_rate=0.1, dropout_rng=KEY), 4),
        [*[TOKENS] * 3, S((1, 4, 128, 128), "bfloat16")], "B200", ["of its family"],
    ),
    "tiles": (
        gradients(lambda *x: ours(*x, block_mask=jnp.ones((1, 1, 1, 1), bool))),
        [TOKENS] * 3, "H200", ["Blackwell GPU and cuDNN 9.26", "takes no block mask"],
    ),
    "workspace": (
        gradients(functools.partial(ours, options=jc.Options(deterministic=True))),
        [S((1, 32768, 64, 64), "bfloat16")] * 3, "A100", ["a quarter of the GPU's memory"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_it_is_xlas_with_a_reason(name):
    function, operands, gpu, words = REASONS[name]
    with jc.target(gpu):
        plans = [*jc.plans(function, *operands).values()]
    *_, last = [segment for plan in plans for segment in plan.segments]
    assert last.plan is None
    reasons = " ".join(s.reason or "" for plan in plans for s in plan.segments)
    assert last.reason
    for word in words:
        assert word in reasons, reasons


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("port", ["v", "k", "o", "dO"])
def test_operands_of_several_dtypes_are_xlas(port, dtype, normal):
    """cuDNN plans them, and reads all in one dtype."""
    graph, operands = of_several_dtypes(normal, port, dtype)
    with jc.target("H200"):
        (segment,) = jc.plan(graph, *operands).segments
    assert segment.plan is None
    assert f"{port} {dtype}" in segment.reason


def test_heads_of_no_multiple_of_eight_are_refused_with_what_to_do():
    x = S((2, 128, 4, 60), "bfloat16")
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match="with zeros to 64"):
        jc.plan(functools.partial(ours, implementation="cudnn"), x, x, x)


def test_what_reads_a_result_runs_behind_the_plan():
    """On an H200 a plan that added to dQ missed a pointer. Results stay in 16 bits for it."""

    def added(g, q, k, v, o, dO, stats):
        dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
        return g.add(dq, q), dk, dv

    forward = lambda g, q: g.relu(g.sdpa(q, q, q)[0])  # noqa: E731
    for function, operands in ((forward, [X]), (added, SIX)):
        with jc.target("H200"):
            attention, behind = jc.plan(jc.graph(function), *operands).segments
        assert "a plan by itself" in attention.reason or "a plan by itself" in behind.reason
        written = [t for t in attention.spec.output_tensors if t.shape[-1] > 1]  # not Stats
        assert {t.dtype for t in written} == {"bfloat16"}
        assert attention.plan is not None
        assert "sdpa" not in str(methods(behind.spec))


@pytest.mark.parametrize("name", ONE_ARRAY)
def test_one_array_at_several_ports_is_planned(name):
    """The frontend turns the dims of keys and values, which would be turned twice."""
    bias = [S((1, 4, 128, 128), "bfloat16")] * (name == "all")
    with jc.target("H200"):
        plans = jc.plans(of_one_array(name, "cudnn"), X, X, X, *bias)
    assert [len(plan.execution_plans) for plan in plans.values()] == [1, 1]


@pytest.mark.parametrize("name", UNSEEING)
def test_queries_that_a_band_hides_all_keys_of_are_planned(name, normal):
    run, operands, _ = unseeing(normal, name, "split", "bfloat16")
    with jc.target("H200"):
        forward, *_ = jc.plans(run, *operands).values()
    (segment,) = forward.segments
    assert (segment.plan is not None) != (name == "window"), segment.reason


def test_a_tangent_reads_the_mask_that_the_forward_draws():
    dropped = functools.partial(ours, dropout_rate=0.1, dropout_rng=KEY)
    with jc.target("H200"):
        plans = jc.plans(lambda *x: jax.jvp(dropped, x[:3], x[3:])[1], *[TOKENS] * 6)
    (forward,) = plans["dot_product_attention"].segments
    drawn, tangent = plans["dot_product_attention (tangent)"].segments
    assert forward.plan.engine == drawn.plan.engine
    assert tangent.plan is None
    assert drawn.spec.tensor(drawn.spec.outputs[0]).shape == (2, 4, 128, 128)


# -- a bias of which queries or keys share elements ------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "qkv", "packed"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 160), (1, 4, 96, 1), (2, 4, 1, 1)], ids=str)
def test_cudnn_sees_a_bias_of_all_queries_and_keys(kind, shape):
    """Queries with a stride of 0, keys by a broadcast before the call, and a gradient of all."""
    attend, avals, scores = of_kind(kind)
    kept = tuple(a if b > 1 else 1 for a, b in zip(scores, shape, strict=True))
    avals = [*avals, S(kept, "bfloat16")]
    whole = (*kept[:2], *scores[2:])
    of_all = gradients(functools.partial(attend, implementation="cudnn"), len(avals))
    with jc.target("H200"):
        plans = [*jc.plans(of_all, *avals).values()]
    assert [s.plan is not None for plan in plans for s in plan.segments] == [True, True]
    assert "adds up" in " ".join(str(plans[1].explain()).split())
    forward, second = map(wire, graphs_of(of_all, *avals))
    (call,) = second.calls
    for port in ("bias", "dBias"):
        assert second.tensor(dict((*call.inputs, *call.outputs))[port]).shape == whole
    bias = forward.tensor(dict(forward.calls[0].inputs)["bias"])
    assert bias.shape == (*kept[:3], scores[3])
    shown = [(view.dims, view.strides[2:]) for view in layout.views(forward, bias)]
    assert shown == ([(whole, (0, 1))] if shape[2] == 1 else [])


def test_what_else_makes_or_reads_a_bias_is_no_part_of_the_plan():
    def before(g, q, bias):
        positive = g.relu(bias)
        return g.sdpa(q, q, q, bias=positive)[0], positive

    def beside(g, q, bias):
        return g.sdpa(q, q, q, bias=bias)[0], g.relu(bias)

    row = S((2, 1, 1, 128), "bfloat16")
    for graph, operands in ((before, [X]), (beside, [X]), (grad_of_bias_read, SIX)):
        with jc.target("H200"):
            segments = jc.plan(jc.graph(graph), *operands, row).segments
        found = {s.spec.calls[0].node.method: (len(s.spec.calls), s.plan is None) for s in segments}
        (attention,) = (x for name, x in found.items() if "sdpa" in name)
        assert attention == (1, False)


@pytest.mark.parametrize("shape", [(2, 1, 1, 160), (2, 1, 96, 1)], ids=str)
def test_explain_says_what_a_bias_costs_and_what_to_use_instead(shape):
    attend, avals, _ = of_kind("arrays")
    with jc.target("H200"):
        said = [
            " ".join(str(jc.plan(attend, *avals, *bias).explain()).split())
            for bias in ([S(shape, "bfloat16")], [])
        ]
    assert ("first broadcasts the bias to [2, 1, 96, 160]" in said[0]) == (shape[3] == 1)
    for word in ("read in full", "is_causal", "local_window_size", "lengths"):
        assert [word in x for x in said] == [True, False]


# -- one order of sums -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arrays", "packed", "qkv", "fp8"])
def test_a_deterministic_backward_states_its_workspace(kind):
    """On Hopper it is of all scores in 16 bits, which fp8's backward does without."""
    attend, avals, scores = of_kind(kind, length=2048, width=128)
    found = []
    for options in ({"deterministic": True}, {}, {"deterministic": True, "max_workspace": 2**24}):
        step = gradients(functools.partial(attend, options=jc.Options(**options)), len(avals))
        nodes = [call.node for spec in graphs_of(step, *avals) for call in spec.calls]
        (node,) = [n for n in nodes if n.method.endswith("backward")]
        assert node.keywords().get("use_deterministic_algorithm", False) == bool(options)
        if kind != "fp8":
            with jc.target("H200"):
                *_, last = jc.plans(step, *avals).values()
            found += last.segments
    if kind != "fp8":
        ordered, free, limited = found
        assert ordered.plan.workspace_bytes >= math.prod(scores) > free.plan.workspace_bytes
        if limited.plan is None:
            assert f"{ordered.plan.workspace_bytes:,} bytes of workspace" in limited.reason
        else:  # from cuDNN 9.25 on
            assert limited.plan.workspace_bytes <= 2**24
