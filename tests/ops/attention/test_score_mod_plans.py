"""Functions of attention's scores by cuDNN: plans, what is left to XLA, and the GPU."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import drawing, qkv
from score_mod_checks import (
    OF_INFINITY,
    PLANNED,
    S,
    biased,
    drawn,
    floats,
    gradients,
    prepared,
    softcap,
)  # fmt: skip
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.wire import wire

ours = jc.ops.dot_product_attention
X, LENGTHS = S((2, 256, 4, 64), "bfloat16"), jnp.array([200, 256], "int32")


@pytest.fixture
def normal(key):
    return drawing(key)


def plans_of(function, avals, gpu="H200", places=(0, 1, 2)):
    with jc.target(gpu):
        return [*jc.plans(gradients(function, places), *avals).values()]


BEGUN_WITH_NUMBERS = ("cases", "bounds")  # their derivatives
OFTEN = ("softcap, lengths", "documents", "row", "remainders", *BEGUN_WITH_NUMBERS)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(pytest.param(n, "H200", marks=[pytest.mark.long] * (n not in OFTEN)) for n in PLANNED),
        ("softcap, window", "B200"),
    ],
)
def test_forward_and_backward_are_a_plan_each(name, gpu):
    """Where some query may see no key XLA makes its statistic finite before the backward."""
    forward, backward = plans_of(*prepared(name), gpu)
    (segment,) = forward.segments
    assert segment.plan is not None
    *before, last = backward.segments
    assert (last.plan is None) == (name in BEGUN_WITH_NUMBERS)
    assert [s.spec.calls[-1].node.method for s in before] in ([], ["binary_select"])


def two_selections(q, a, c):
    """cuDNN 9.19 ends the process."""
    change = lambda s, b, h, i, j, a, c: jnp.where(  # noqa: E731
        i < a, jnp.where(j < c, s, -jnp.inf), -jnp.inf
    )
    return ours(q, q, q, score_mod=change, score_mod_operands=(a, c))


def hidden(s, b, h, q, kv):
    return jnp.where((q >= 30) & (q <= 40), -jnp.inf, s)


def begun(s, *_):
    return 1 / (2 + s * s) - s


NUMBERS = [S((2, 1, 1, 1), "int32")] * 2
BOTTOM = {"is_causal": True, "bottom_right": True, "query_seq_lengths": LENGTHS}
XLAS = {  # words of the reason, and the last of whose graphs; on an H200 some gave other numbers
    "combine the conditions with &": (two_selections, [X, *NUMBERS]),
    "not supported": (
        gradients(
            functools.partial(
                ours, **BOTTOM, key_value_seq_lengths=LENGTHS, score_mod=softcap(5.0)
            ),
            (0, 1, 2),
        ),
        [X] * 3,
    ),
    "first operand": (gradients(functools.partial(ours, score_mod=begun), (0, 1, 2)), [X] * 3),
    "first operand.": (gradients(functools.partial(ours, score_mod=hidden), (0, 1, 2)), [X] * 3),
    "dBias": (
        gradients(functools.partial(ours, score_mod=softcap(5.0)), (0, 3)),
        [X, X, X, S((1, 4, 256, 256), "bfloat16")],
    ),
}  # fmt: skip


@pytest.mark.deviceless
@pytest.mark.parametrize("words", XLAS)
def test_what_cudnn_does_not_plan_or_computes_wrongly_is_left_to_xla(words):
    function, avals = XLAS[words]
    with jc.target("H200"):
        *before, last = jc.plans(function, *avals).values()
    assert all(len(plan.execution_plans) == 1 for plan in before)
    assert not last.execution_plans
    assert any(words.rstrip(".") in segment.reason for segment in last.segments)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 4, 1, 1), (2, 4, 256, 1)),
        ((2, 1, 1, 256), (2, 1, 256, 256)),
        ((1, 4, 1, 1), (1, 4, 1, 1)),
        ((2, 1, 256, 1), (2, 1, 256, 1)),
    ],
)
def test_operands_reach_cudnn_in_shapes_that_it_reads_rightly(shape, wanted):
    call = lambda q, a: ours(q, q, q, score_mod=biased, score_mod_operands=(a,))  # noqa: E731
    with jc.target("H200"):
        (plan,) = jc.plans(call, X, S(shape, "float32")).values()
    (segment,) = plan.segments
    assert segment.plan is not None
    assert plan.spec.input_tensors[-1].shape == shape
    assert wire(plan.spec).input_tensors[-1].shape == wanted
    (advice,) = plan.explain().to_json()["segments"][0]["advice"] or [""]
    assert (f"to {list(wanted)}, {4 * math.prod(wanted):,} bytes" in advice) == (shape != wanted)


@pytest.mark.deviceless
def test_a_graph_computes_operands_that_cudnn_reads_wrongly_before():
    @jc.graph
    def attention(g, q, a):
        return g.sdpa(q, q, q, score_mod=biased, score_mod_operands=[g.exp(a)])[0]

    with jc.target("H200"):
        row = S((2, 1, 1, 256), "float32")
        before, last = jc.plan(attention, S((2, 4, 256, 64), "bfloat16"), row).segments
    assert (before.plan is None, last.plan is None) == (True, False)
    assert wire(last.spec).input_tensors[-1].shape == (2, 1, 256, 256)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", OF_INFINITY)
def test_a_backward_that_makes_no_number_of_what_tiles_hold_beyond_the_scores_is_xlas(name):
    change, operands = OF_INFINITY[name]
    avals = [S(shape, dtype) for shape, dtype in operands]
    run = lambda q, k, v, *a: ours(q, k, v, score_mod=change, score_mod_operands=a)  # noqa: E731
    for t, s in ((256, 384), (256, 200), (100, 256)):
        q, k = S((2, t, 4, 64), "bfloat16"), S((2, s, 4, 64), "bfloat16")
        watched = jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow")
        with watched[0], watched[1], watched[2]:  # it is tried whatever is watched for
            forward, backward = plans_of(run, [q, k, k, *avals])
        assert forward.segments[0].plan is not None
        *_, segment = backward.segments
        assert (segment.plan is None) == ((t, s) != (256, 384))
        if segment.plan is None:
            assert f"of {t} queries and {s} keys cuDNN's backward gives" in segment.reason
            assert "query_seq_lengths" in segment.reason


# -- on the GPU ------------------------------------------------------------------------------------


def compare(function, exact, operands):
    """Results and gradients beside the reference in float32."""
    places = floats(operands)
    wide = [x.astype("float32") if i in places else x for i, x in enumerate(operands)]
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, places))(*wide)
    got = jax.jit(function)(*operands), *jax.jit(gradients(function, places))(*operands)
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        assert relative_error(a, b) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype, normal):
    function, avals = prepared(name, None, dtype)
    compare(function, prepared(name, "xla", "float32")[0], [drawn(normal, a) for a in avals])


@pytest.mark.gpu
@pytest.mark.parametrize("t", [96, 192])
@pytest.mark.parametrize("name", OF_INFINITY)
def test_gradients_of_tiles_that_are_not_full_on_the_gpu(name, t, normal):
    change, operands = OF_INFINITY[name]
    arrays = qkv(normal, t=t, s=160, h=64, dtype="bfloat16")
    given = [drawn(normal, S(shape, dtype)) for shape, dtype in operands]
    run = functools.partial(ours, score_mod=change, score_mod_operands=given)
    compare(run, functools.partial(run, implementation="xla"), arrays)


LONG = {"b": 1, "t": 2048, "s": 2048, "n": 8, "k": 2, "h": 128}
RUNS = {  # sizes, a function, options
    "hidden by the function": ({"t": 128, "s": 64}, hidden, {}),
    "hidden by a window": ({"t": 128, "s": 64}, softcap(5.0), {"local_window_size": (16, 0)}),
    "many tiles": (  # of which indices are those of the whole
        LONG,
        lambda s, b, h, q, kv: 4 * jnp.tanh(s / 4) - (h + 1.0) * (q - kv) / 512,
        {"is_causal": True, "implementation": "cudnn"},
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_queries_that_see_no_key_and_long_sequences_on_the_gpu(name, normal):
    sizes, change, options = RUNS[name]
    arrays = qkv(normal, **{"k": 2, "h": 64, **sizes}, dtype="bfloat16")
    run = functools.partial(ours, score_mod=change, **options)
    compare(run, functools.partial(run, implementation="xla"), arrays)
    if "hidden" in name:
        none = slice(30, 41) if change is hidden else slice(80, 128)
        out, residual = jax.jit(functools.partial(run, return_residual=True))(*arrays)
        assert not out[:, none].any()
        assert np.isneginf(residual[:, none]).all()
