"""Where measurements decide which of cuDNN's candidates is tried first, or that XLA is faster."""

import jax
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import choice, frontend, losses, placement

S = jax.ShapeDtypeStruct
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


def tried(function, operands, *candidates):
    """The positions of candidates in the order in which they are tried."""
    return choice.order(function.trace(*operands)[1].spec, candidates)


@pytest.mark.parametrize(
    ("phase", "neighbours", "alone"), [("TRAINING", 3, 5), ("INFERENCE", 4, 6)]
)
def test_rows_alone_come_before_rows_with_neighbours_and_those_before_any_shape(
    phase, neighbours, alone
):
    given = (1, {}), (neighbours, {"KERNEL_CFG": 2}), (alone, {"STAGES": 0}), (alone, {"STAGES": 1})
    order = tried(forward("layernorm", phase), arrays("layernorm", 64, 4096), *given)
    assert order == [2, 3, 1, 0]
    assert tried(forward("rmsnorm", phase), arrays("rmsnorm", 64, 4096), *given) == [1, 2, 3, 0]


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
    order = tried(backward(kind), of_backward(rows, columns), (1, {}), (4, usual), (4, knobs))
    assert order == ([2, 1, 0] if first else [1, 2, 0])


def test_only_what_stands_around_an_anchor_has_ranks():
    def function(g, x, scale):
        return g.relu(g.rmsnorm(x, scale, epsilon=1e-5, norm_forward_phase="INFERENCE"))

    operands = arrays("rmsnorm", 64, 4096)
    assert tried(jc.graph(function), operands, (1, {}), (4, {})) == [1, 0]
    assert tried(jc.graph(lambda g, x, w: g.relu(x)), operands, (1, {}), (4, {})) == [0, 1]


ROWS = (64, 1000)
SLOW = [
    *((forward(kind, "TRAINING"), arrays(kind, *ROWS)) for kind in FORWARD),
    *((backward(kind), of_backward(*ROWS)) for kind in FORWARD),
]
each_slow = pytest.mark.parametrize(
    ("function", "operands"), SLOW, ids=["layernorm", "rmsnorm", "its backward", "rms backward"]
)


@pytest.mark.deviceless
@each_slow
def test_what_only_a_slow_engine_takes_is_left_to_xla(function, operands):
    with jc.target("H200"):
        plan = jc.plan(function, *operands)
        (segment,) = plan.segments
        assert segment.plan is None
        assert "eng1 alone is left, and XLA is faster (NVIDIA H200, cuDNN 9.19" in segment.reason
        assert "not of 1000" in str(plan.explain())
        for options in ({"implementation": "cudnn"}, {"engine": 1}):
            asked = jc.plan(function.with_options(**options), *operands)
            assert asked.execution_plans[0].engine_id == 1


@pytest.mark.deviceless
@each_slow
def test_where_nobody_measured_it_cudnn_runs_it(function, operands):
    with jc.target("A100"):
        assert jc.plan(function, *operands).execution_plans[0].engine_id == 1


@pytest.mark.deviceless
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("first", ["cudnn", "split"])
def test_a_split_on_disk_is_of_the_implementation_that_asked(first, tmp_path, monkeypatch):
    """Of derivatives "cudnn" looks for splits, too. Here nothing but the slow engine tells them
    apart: the architecture has no patterns."""
    bare = {**losses.table()["90"], "patterns": {}}
    monkeypatch.setattr(losses, "table", lambda: {"90": bare})
    jc.configure(plan_cache=tmp_path)
    found = {}
    for implementation in (first, *({"cudnn", "split"} - {first})):
        placement.clear()
        loss = lambda x, s: jc.ops.rms_norm(x, s).astype("float32").sum()  # noqa: E731
        with jc.target("H200"), jc.implementation(implementation):
            plans = jc.plans(jax.grad(loss), *arrays("rmsnorm", *ROWS)[:1], S((1000,), "bfloat16"))
        found[implementation] = [len(plan.execution_plans) for plan in plans.values()]
    assert found == {"cudnn": [1, 1], "split": [0, 0]}


@pytest.mark.deviceless
@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
def test_a_slow_engine_that_heuristics_propose_first_is_not_taken(phase):
    """Without a GPU they do so for shapes that are not in a table of theirs."""
    with jc.target("H200"):
        plan = jc.plan(forward("layernorm", phase), *arrays("layernorm", 4096, 4096))
    (made,) = plan.execution_plans
    assert made.candidates > 1
    assert made.engine_id != 1


def measured_here():
    if frontend.versions()[0] != "9.19.0" or "H200" not in jax.devices()[0].device_kind:
        pytest.skip("measured on an H200 with cuDNN 9.19")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4096, 8192])
@pytest.mark.parametrize(("phase", "engine"), [("TRAINING", 5), ("INFERENCE", 6)])
def test_rows_alone_on_the_gpu(phase, engine, rows):
    measured_here()
    plan = jc.plan(forward("layernorm", phase), *arrays("layernorm", rows, 4096))
    assert plan.execution_plans[0].engine_id == engine


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "rows", "columns", "knobs"),
    [
        ("layernorm", 8192, 4096, FAST),
        ("layernorm", 1024, 12288, {"SPLIT_COLS": 1}),
        ("rmsnorm", 1024, 12288, {"SPLIT_COLS": 1}),
    ],
)
def test_the_first_knobs_are_proposed_and_taken(kind, rows, columns, knobs):
    measured_here()
    plan = jc.plan(backward(kind), *of_backward(rows, columns))
    assert knobs.items() <= plan.pinned["knobs"].items()


@pytest.mark.gpu
@each_slow
def test_the_slow_engine_is_right(function, operands):
    rng = np.random.default_rng(0)
    given = [np.abs(rng.normal(0.5, 1, a.shape)).astype(a.dtype) for a in operands]
    got = jax.jit(function.with_options(implementation="cudnn"))(*given)
    want = jax.jit(function.with_options(implementation="xla"))(*given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)
