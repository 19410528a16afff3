"""Which attention cuDNN plans, and which runs in XLA, without a GPU."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, LAST, S, ours
from attention_table import (
    DROPOUT,
    KEYS,
    OF_INFINITY,
    ON_BLACKWELL,
    TABLE,
    UNSEEN,
    dense,
    fp8,
    gradients,
    in_pages,
    one_array,
    packed,
    softcap,
)  # fmt: skip
from helpers import lowered
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.ffi import MEMSET
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.layout import layout
from jax_cudnn._core.planning import cost
from jax_cudnn._core.planning.cost import roofline
from jax_cudnn._core.planning.execution_plan import RESULT, VIEW

pytestmark = pytest.mark.deviceless
X, TOKENS = S((2, 4, 128, 64), "bfloat16"), S((2, 128, 4, 64), "bfloat16")


def plans_of(row, gpu):
    function, avals, count = row
    with jc.target(gpu):
        return [*jc.plans(gradients(function, range(count)), *avals).values()]


OFTEN = ("row of bias", "dropout and all", "qkv", "packed, bias", "packed, dropout and all",
         "small pages", "pages, packed queries", "fp8", "softcap, lengths", "documents", "row",
         "cases", "all equal, bias")  # fmt: skip
OTHERS = [("row of bias", "A100"), ("sink, lengths", "A100"), ("packed, window", "B200"),
          ("pages, prefill", "B200"), ("softcap, window", "B200"),
          *((name, "B200") for name in ON_BLACKWELL)]  # fmt: skip
# Where some query may see no key XLA makes its statistic finite before the backward; with lengths
# it adds up the gradient of sinks; it finds the scales of fp8, and adds gradients of one array.
BESIDE = {"add", "cmp_le", "logical_not", "binary_select", "sdpa_sink_gradient"}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(pytest.param(n, "H200", marks=[pytest.mark.long] * (n not in OFTEN))
          for n in TABLE if n not in ON_BLACKWELL),
        *(pytest.param(*x, marks=[pytest.mark.long] * (i % 3 > 0)) for i, x in enumerate(OTHERS)),
    ],
)  # fmt: skip
def test_forward_and_backward_are_a_plan_each(name, gpu):
    both = forward, backward = plans_of(TABLE[name], gpu)
    assert len(forward.execution_plans) == 1
    # cuDNN has no backward for pages; and it computes one with a leading scalar wrongly.
    without = "pages" in name or name == "cases"
    assert len(backward.execution_plans) == (not without)
    fwd, bwd = (
        sum(cost.flops(*at) for at in p.spec.at_ports if at[0].node.anchor.product) for p in both
    )
    if "seq_len_q" in str(forward.spec):  # the lengths may all be 0
        written = sum(tensor.nbytes for tensor in forward.spec.output_tensors)
        assert (fwd, bwd) == (0, 0)
        if gpu == "H200" and len(forward.spec.calls) == 1:
            assert roofline(forward.spec, forward.site) < written / 4.7e12
    elif not without:
        assert 2.5 <= bwd / fwd <= 2.6
        function, avals, count = TABLE[name]
        if count == len(avals) and "fp8 forward" not in name:
            tangent = graphs_of(lambda *x: jax.jvp(function, x, x)[1], *avals)[-1]
            assert cost.cost(tangent).flops >= fwd
    for plan in both:
        left = [s for s in plan.segments if s.plan is None]
        assert all(s.reason for s in left)
        if not without and "fp8" not in name:
            assert {m for s in left for m in methods(s.spec)} <= BESIDE
        for s in plan.segments:
            if "alibi" in name and s.plan:  # the slopes are an operand of the plan
                np.testing.assert_allclose(s.plan.tables[0], oracle_attention.slopes(6), rtol=1e-6)


LIE = {  # rows, and how many arrays have tokens before heads in both calls
    "arrays": dense(k=2, **CAUSAL),
    "heads first": dense(t=4, n=256, s=2, k=256, heads_first=True, **CAUSAL),
    "qkv": one_array(n=8, k=2),
    "pages, heads first": in_pages(heads_first=True),
}


@pytest.mark.parametrize("name", LIE)
def test_arrays_are_read_where_they_lie(name):
    """(B, T, N, H) in memory is cuDNN's (B, N, T, H) with other strides: nothing is copied."""
    function, avals, count = LIE[name]
    step = gradients(function, range(count)) if "pages" not in name else function
    text = lowered(step, *avals)
    calls = [line for line in text.splitlines() if "@jax_cudnn" in line]
    assert len(calls) == (1 if "pages" in name else 2)
    for call in calls:
        layouts, _, results = call.partition("operand_layouts = ")[2].partition("result_layouts")
        types = call.rpartition("} : ")[2].partition(" -> ")
        for at, shapes in ((layouts, types[0]), (results, types[2])):
            arrays = shapes.count("64xbf16")
            turned = arrays if name == "arrays" else 0
            assert at.count("dense<[3, 1, 2, 0]> : tensor<4xindex>") == turned
    if name == "qkv":  # nor is it sliced and concatenated
        for operation in ("slice", "concatenate", "pad", "transpose"):
            assert f"stablehlo.{operation}" not in text
        for plan, arrays in zip(plans_of(LIE[name], "H200"), (1, 2), strict=True):
            views = [r[3] for r in plan.segments[0].plan.bindings if r[1] == VIEW]
            assert views == [2 * 64 * 8, 2 * 64 * 10] * arrays  # of keys and values, in bytes


def test_what_a_packed_plan_leaves_unwritten_is_zero_beforehand():
    """O and Stats, whose zero is -inf; dQ, dK and dV."""
    function, avals, count = TABLE["packed, window"]
    text = lowered(gradients(function, range(count)), *avals)
    calls = [line for line in text.splitlines() if "@jax_cudnn" in line]
    minus_infinity = np.float32(-np.inf).view(np.uint32)
    for line, wanted in zip(calls, ({0: 0, 1: minus_infinity}, {0: 0, 1: 0, 2: 0}), strict=True):
        given = re.search(r"rows = dense<(.*?)> : tensor", line)[1]
        if given.startswith('"0x'):
            numbers = np.frombuffer(bytes.fromhex(given[3:-1]), "<i8")
        else:
            numbers = np.array(eval(given))
        _, *rows = numbers.reshape(-1, 4)
        set_first = [(rows[at], word, size) for word, kind, at, size in rows if kind == MEMSET]
        assert {result: word for (_, _, result, _), word, _ in set_first} == wanted
        assert all((kind, size) == (RESULT, whole) for (_, kind, _, whole), _, size in set_first)
        assert "output_operand_alias" not in line  # XLA loses it where it fuses slices of operands


def rounded(g, q, k, v, o, dO, stats):
    dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
    return dq, dk.set_data_type("float32"), dv


def two_selections(s, b, h, i, j, a, c):
    """cuDNN 9.19 crashes the process."""
    return jnp.where(i < a, jnp.where(j < c, s, -jnp.inf), -jnp.inf)


def begun(s, *_):
    return 1 / (2 + s * s) - s


def backward_of(row):
    function, avals, count = row
    return gradients(function, range(count)), avals


NUMBERS = [((2, 1, 1, 1), "int32")] * 2
SIX = [*[X] * 5, S((2, 4, 128, 1), "float32")]
LENGTHS, WIDE = ([100, 128], [128, 30]), S(X.shape, "float32")


def by_columns(g, q, k, v, bias):
    _, h, t, s = bias.get_dim()
    return g.sdpa(q, k, v, bias=bias.set_stride([h * t * s, t * s, 1, t]))[0]


REASONS = {  # a function and operands, words of the reason; on an H200 by default
    "one query": ((dense()[0], [S((2, 1, 4, 64), "float32"), *[S((2, 9, 2, 64), "float32")] * 2]),
        ["computes sdpa.0 wrongly"]),
    "lengths of float32": ((dense(lengths=LENGTHS)[0], [S(TOKENS.shape, "float32")] * 3),
        ["after seq_len_q"]),
    "gradients of other dtypes": ((jc.graph(rounded), SIX), ["dK only in bfloat16"]),
    "one query of each": (packed(t=4, s=9, ends=[(0, 1, 1, 2), (0, 3, 6, 9)], longest=(1, 3))[:2],
        ["whatever its length"]),
    "bias by columns": ((jc.graph(by_columns), [X, X, X, S((1, 1, 128, 128), "bfloat16")]),
        ["fastest dimension"]),
    "one query that is not there": (backward_of(dense(t=1, lengths=([1, 0], [9, 9]))),
        ["gradients of one query unwritten"]),
    "keys of another dtype": ((jc.graph(lambda g, *x: g.sdpa_backward(*x)), [X, WIDE, *SIX[2:]]),
        ["k float32"]),
    "dropout from the last": (backward_of(dense(**DROPOUT, **LAST)),
        ["Bottom right causal mask", "of a related graph"]),
    "dropout and dBias": (backward_of(TABLE["dropout, bias"]), ["of a related graph"], "B200"),
    "packed, dropout and sink": (backward_of(packed(n=4, k=4, sink=True, **DROPOUT)),
        ["not been compared"]),
    "tiles": (backward_of(dense(block_mask=jnp.ones((1, 1, 1, 1), bool), t=128, s=128)),
        ["Blackwell GPU and cuDNN 9.26", "does not support a block mask"]),
    "packed": (backward_of(TABLE["packed, window"]), ["LSE is not supported"], "A100"),
    "fp8 from the last": (TABLE["fp8, from the last"][:2], ["Blackwell"]),
    # Here an H200 wrote zeros to part of dQ, with lengths and without.
    **{f"fp8 of a part of a tile, {len(ends)} lengths": (
        backward_of(dense(attend=fp8, t=100, s=100, h=128, lengths=ends)), ["multiples of 128"])
        for ends in ((), LENGTHS)},
    "queries that see no key": (backward_of(UNSEEN), []),
    "two selections": (dense(score_mod=two_selections, operands=NUMBERS)[:2],
        ["combine the conditions with &"]),
    "score_mod from the last": (backward_of(dense(score_mod=softcap(5.0), lengths=LENGTHS, **LAST)),
        ["not supported"]),
    "a number first": (backward_of(dense(score_mod=begun)), ["first operand"]),
    "score_mod and dBias": (
        (gradients(TABLE["softcap, bias"][0], (0, 3)), TABLE["softcap, bias"][1]), ["dBias"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_it_is_xlas_with_a_reason(name):
    """On an H200 some of these gave wrong values, missed pointers, or wrote out of bounds."""
    (function, operands), words, *gpu = REASONS[name]
    with jc.target(*gpu or ["H200"]):
        plans = [*jc.plans(function, *operands).values()]
        if name in ("packed", "fp8 from the last"):
            with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
                jc.plans(function, *operands)
    assert not plans[-1].execution_plans
    reasons = " ".join(s.reason or "" for plan in plans for s in plan.segments)
    assert plans[-1].segments[-1].reason
    assert all(word in reasons for word in words), reasons


@pytest.mark.parametrize(
    "row",
    [dense(t=1, k=2, bias=(2, 1, 1, 256)), dense(t=1, k=2, alibi=True, **CAUSAL),
     one_array(t=1, k=2, bias=(1, 4, 1, 1)), packed(bias=(1, 8, 1, 160), ends=(range(6), KEYS))],
    ids=["bias", "alibi", "qkv", "packed"],
)  # fmt: skip
def test_one_query_of_grouped_heads_has_no_engine_that_is_wrong_there(row):
    plan = jc.plan(row[0], *row[1], gpus="H200")["H200"]
    assert not {p.pinned["engine"] for p in plan.execution_plans} & {1, 2}


@pytest.mark.parametrize("name", OF_INFINITY)
def test_a_backward_that_makes_no_number_of_what_tiles_hold_beyond_the_scores_is_xlas(name):
    change, operands = OF_INFINITY[name]
    for t, s in ((256, 384), (256, 200), (100, 256)):
        row = dense(t=t, s=s, score_mod=change, operands=operands)
        watched = jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow")
        with watched[0], watched[1], watched[2]:  # the check ignores these modes
            forward, backward = plans_of(row, "H200")
        assert forward.segments[0].plan is not None
        *_, segment = backward.segments
        assert (segment.plan is None) == ((t, s) != (256, 384))
        if segment.plan is None:
            assert f"cuDNN's backward pads {t} queries and {s} keys" in segment.reason


def test_what_reads_a_result_or_shares_a_bias_is_no_part_of_the_plan():
    """On an H200 a plan that added to dQ missed a pointer. Results stay in 16 bits."""

    def added(g, q, k, v, o, dO, stats):
        dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
        return g.add(dq, q), dk, dv

    def of_relu(g, q, bias):
        positive = g.relu(bias)
        return g.sdpa(q, q, q, bias=positive)[0], positive

    row = S((2, 1, 1, 128), "bfloat16")
    graphs = [
        (lambda g, q: g.relu(g.sdpa(q, q, q)[0]), [X]), (added, SIX), (of_relu, [X, row]),
        (lambda g, *x: g.relu(g.sdpa_backward(*x[:6], bias=x[6], dBias=True)[3]), [*SIX, row]),
    ]  # fmt: skip
    for function, operands in graphs:
        with jc.target("H200"):
            segments = jc.plan(jc.graph(function), *operands).segments
        (attention,) = (s for s in segments if s.plan is not None and "sdpa" in str(s.spec))
        assert len(attention.spec.calls) == 1
        written = [t for t in attention.spec.output_tensors if t.shape[-1] > 1]  # not Stats
        assert {t.dtype for t in written} == {"bfloat16"}


def test_a_tangent_reads_the_mask_that_the_forward_draws():
    dropped = functools.partial(ours, **DROPOUT)
    with jc.target("H200"):
        plans = jc.plans(lambda *x: jax.jvp(dropped, x[:3], x[3:])[1], *[TOKENS] * 6)
    (forward,) = plans["dot_product_attention"].segments
    drawn, tangent = plans["dot_product_attention (tangent)"].segments
    assert forward.plan.engine == drawn.plan.engine
    assert tangent.plan is None
    assert drawn.spec.tensor(drawn.spec.outputs[0]).shape == (2, 4, 128, 128)


ENDS = (0, 60, 96), (0, 100, 160)
KINDS = {
    "arrays": (functools.partial(dense, t=96, s=160), (2, 4, 96, 160)),
    "qkv": (functools.partial(one_array, t=96), (2, 4, 96, 96)),
    "packed": (functools.partial(packed, t=96, s=160, n=4, ends=ENDS), (2, 4, 60, 100)),
}


@pytest.mark.parametrize(
    ("kind", "shared"), [("arrays", (1, 4, 9, 1)), ("qkv", (2, 4, 1, 1)), ("packed", (2, 1, 1, 9))]
)
def test_cudnn_sees_a_bias_of_all_queries_and_keys(kind, shared):
    """Queries with a stride of 0, keys by a broadcast before the call, and a gradient of all."""
    make, scores = KINDS[kind]
    shape = tuple(a if b > 1 else 1 for a, b in zip(scores, shared, strict=True))
    whole = (*shape[:2], *scores[2:])
    function, avals, count = make(bias=shape, implementation="cudnn")
    plans = plans_of((function, avals, count), "H200")
    assert [s.plan is not None for plan in plans for s in plan.segments] == [True, True]
    assert "cuDNN writes" in " ".join(str(plans[1].explain()).split())
    graphs = graphs_of(gradients(function, range(count)), *avals)
    forward, second = (boundary(spec).planned for spec in graphs)
    (call,) = second.calls
    for port in ("bias", "dBias"):
        assert second.tensor(dict((*call.inputs, *call.outputs))[port]).shape == whole
    bias = forward.tensor(dict(forward.calls[0].inputs)["bias"])
    assert bias.shape == (*shape[:3], scores[3])
    shown = [(view.dims, view.strides[2:]) for view in layout(forward).parts.get(bias.name, ())]
    assert shown == ([(whole, (0, 1))] if shape[2] == 1 else [])


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((2, 4, 1, 1), (2, 4, 256, 1)), ((2, 1, 1, 256), (2, 1, 256, 256)), ((1, 4, 1, 1), None)],
)
def test_operands_of_score_mod_reach_cudnn_in_shapes_that_it_reads_rightly(shape, wanted):
    add = {"score_mod": lambda *x: x[0] + x[-1]}
    function, avals, _ = dense(operands=((shape, "float32"),), **add)
    with jc.target("H200"):
        plan = jc.plan(function, *avals)
    (segment,) = plan.segments
    assert segment.plan is not None
    assert boundary(plan.spec).planned.input_tensors[-1].shape == (wanted or shape)
    if wanted:
        told = " ".join(str(plan.explain()).split())
        assert f"to {list(wanted)}, {4 * math.prod(wanted):,} bytes" in told


@pytest.mark.deviceless
@pytest.mark.parametrize("heads", [1, 2])
def test_one_query_of_one_head_has_no_plan_backward(heads):
    """cuDNN's planner ends the process there."""

    def gradients(q, k):
        attend = lambda q, k: jc.ops.dot_product_attention(q, k, k)  # noqa: E731
        out, pull = jax.vjp(attend, q, k)
        return pull(jnp.sin(out))

    q, k = (jax.ShapeDtypeStruct((1, n, heads, 64), "bfloat16") for n in (1, 128))
    said = str(jc.support(gradients, q, k, gpus=["H200"]))
    assert ("planner fails with one query" in said) == (heads == 1)
