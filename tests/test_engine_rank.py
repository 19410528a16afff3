"""Where measurements decide which of cuDNN's candidates is tried first, or that XLA is faster."""

import jax
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.node import LOSES
from jax_cudnn._core.planning import choice, frontend

FORWARD = {"layernorm": 3, "rmsnorm": 2}


def arrays(kind, rows, columns, dtype="bfloat16"):
    return [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        *(jax.ShapeDtypeStruct((1, columns), dtype) for _ in range(FORWARD[kind] - 1)),
    ]


def forward(kind, phase):
    def function(g, x, scale, bias=None):
        given = (x, scale) if bias is None else (x, scale, bias)
        return getattr(g, kind)(*given, epsilon=1e-5, norm_forward_phase=phase)

    return jc.graph(function)


def backward(kind):
    def function(g, dy, x, scale, mean, inv_var):
        if kind == "layernorm":
            return g.layernorm_backward(dy, x, scale, mean, inv_var)
        return g.rmsnorm_backward(dy, x, scale, inv_var, has_dbias=False)

    return jc.graph(function)


def of_backward(rows, columns, dtype="bfloat16"):
    x, scale = arrays("rmsnorm", rows, columns, dtype)
    statistic = jax.ShapeDtypeStruct((rows, 1), "float32")
    return x, x, scale, statistic, statistic


def ranks(function, operands, *candidates):
    spec = function.trace(*operands)[1].spec
    return [choice.rank(spec, engine, knobs) for engine, knobs in candidates]


@pytest.mark.parametrize(
    ("phase", "neighbours", "alone"), [("TRAINING", 3, 5), ("INFERENCE", 4, 6)]
)
def test_rows_alone_come_before_rows_with_neighbours_and_those_before_any_shape(
    phase, neighbours, alone
):
    candidates = (alone, {}), (neighbours, {"KERNEL_CFG": 2}), (1, {})
    found = ranks(forward("layernorm", phase), arrays("layernorm", 64, 4096), *candidates)
    assert found == sorted(found)
    assert len({*found}) == 3
    assert found[0] == 0
    assert found[-1] == LOSES
    found = ranks(forward("rmsnorm", phase), arrays("rmsnorm", 64, 4096), *candidates)
    assert found == [0, 0, LOSES]


SPLIT = {"STAGES": 1, "KERNEL_CFG": 3, "SPLIT_COLS": 1, "TILE_COLS": 2}
FAST = {"STAGES": 1, "KERNEL_CFG": 2, "OCCUPANCY": 1, "SPLIT_COLS": 0, "TILE_COLS": 3}


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "knobs", "first"),
    [
        ("layernorm", 1024, 12288, SPLIT, True),
        ("rmsnorm", 1024, 12288, SPLIT, True),
        ("layernorm", 32768, 12288, SPLIT, False),
        ("layernorm", 1024, 8192, SPLIT, False),
        ("layernorm", 8192, 4096, FAST, True),
        ("layernorm", 8192, 4096, FAST | {"OCCUPANCY": 2}, False),
        ("rmsnorm", 8192, 4096, FAST, False),
        ("layernorm", 8192, 8192, FAST, False),
    ],
)
def test_knobs_of_the_backward_that_come_first(kind, rows, columns, knobs, first):
    usual = {"STAGES": 1, "KERNEL_CFG": 0, "SPLIT_COLS": 0, "TILE_COLS": 4}
    found = ranks(backward(kind), of_backward(rows, columns), (4, knobs), (4, usual), (1, {}))
    assert found == [-1 if first else 0, 0, LOSES]


def test_an_operation_beside_the_normalization_changes_no_rank():
    def function(g, x, scale):
        return g.relu(g.rmsnorm(x, scale, epsilon=1e-5, norm_forward_phase="INFERENCE"))

    operands = arrays("rmsnorm", 64, 4096)
    assert ranks(jc.graph(function), operands, (1, {}), (4, {})) == [LOSES, 0]
    assert ranks(jc.graph(lambda g, x, w: g.relu(x)), operands, (1, {})) == [0]


@pytest.mark.parametrize("kind", [*FORWARD])
def test_what_only_a_slow_engine_takes_is_left_to_xla(kind):
    rows = 64, 1000
    graphs = [
        (forward(kind, "TRAINING"), arrays(kind, *rows)),
        (backward(kind), of_backward(*rows)),
    ]
    with jc.target("H200"):
        for function, operands in graphs:
            plan = jc.plan(function, *operands)
            (segment,) = plan.segments
            assert segment.plan is None
            assert segment.reason.endswith(": only eng1 takes it, and XLA is faster than that")
            assert segment.reason in str(plan.explain())
            asked = jc.plan(function.with_options(implementation="cudnn"), *operands)
            assert asked.execution_plans[0].engine_id == 1


@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
def test_a_slow_engine_that_heuristics_propose_first_is_not_taken(phase):
    """Without a GPU they do so for shapes that are not in a table of theirs."""
    with jc.target("H200"):
        plan = jc.plan(forward("layernorm", phase), *arrays("layernorm", 4096, 4096))
    (made,) = plan.execution_plans
    assert made.candidates > 1
    assert made.engine_id != 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4096, 8192])
@pytest.mark.parametrize(("phase", "engine"), [("TRAINING", 5), ("INFERENCE", 6)])
def test_rows_alone_on_the_gpu(phase, engine, rows):
    if frontend.versions()[0] != "9.19.0" or "H200" not in jax.devices()[0].device_kind:
        pytest.skip("measured on an H200 with cuDNN 9.19")
    plan = jc.plan(forward("layernorm", phase), *arrays("layernorm", rows, 4096))
    assert plan.execution_plans[0].engine_id == engine


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*FORWARD])
def test_the_slow_engine_is_right(kind):
    rng = np.random.default_rng(0)
    function = forward(kind, "TRAINING")
    operands = [rng.normal(0.5, 1, a.shape).astype(a.dtype) for a in arrays(kind, 64, 1000)]
    got = jax.jit(function.with_options(implementation="cudnn"))(*operands)
    want = jax.jit(function.with_options(implementation="xla"))(*operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=2e-2)
