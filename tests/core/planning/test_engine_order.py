"""Where measurements decide which of cuDNN's candidates is tried first, or that XLA is faster."""

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core import auto
from jax_cudnn._core.planning import choice, losses

S = jax.ShapeDtypeStruct


@jc.graph
def layer(g, x, scale, bias):
    return g.layernorm(x, scale, bias, epsilon=1e-5, norm_forward_phase="TRAINING")


@jc.graph
def backward(g, dy, x, scale, mean, inv_var):
    return g.layernorm_backward(dy, x, scale, mean, inv_var)


def operands(function, rows, columns):
    x, scale = S((rows, columns), "bfloat16"), S((1, columns), "bfloat16")
    statistic = S((rows, 1), "float32")
    return (x, scale, scale) if function is layer else (x, x, scale, statistic, statistic)


USUAL = {"STAGES": 1, "KERNEL_CFG": 0, "SPLIT_COLS": 0, "TILE_COLS": 4}
SPLIT = {"STAGES": 1, "KERNEL_CFG": 3, "SPLIT_COLS": 1, "TILE_COLS": 2}
FAST = {"STAGES": 1, "KERNEL_CFG": 2, "OCCUPANCY": 1, "SPLIT_COLS": 0, "TILE_COLS": 3}
GIVEN = [(1, {}), (3, {}), (5, {"STAGES": 0}), (5, {"STAGES": 1})]


ORDERS = {
    # any shape's engine last, rows alone before rows with neighbours
    "forward": (layer, (64, 4096), GIVEN, [2, 3, 1, 0]),
    # of the backward, knobs that are measured to be faster
    "split columns": (backward, (1024, 12288), [(1, {}), (4, USUAL), (4, SPLIT)], [2, 1, 0]),
    "occupancy": (backward, (8192, 4096), [(1, {}), (4, USUAL), (4, FAST)], [2, 1, 0]),
    "usual": (backward, (8192, 8192), [(1, {}), (4, USUAL), (4, FAST)], [1, 2, 0]),
}


@pytest.mark.parametrize("what", ORDERS)
def test_the_order_in_which_candidates_are_tried(what):
    function, shape, candidates, order = ORDERS[what]
    spec = function.trace(*operands(function, *shape))[1].spec
    assert choice.order(spec, candidates) == order


@pytest.mark.deviceless
@pytest.mark.parametrize("function", [layer, backward], ids=["forward", "backward"])
def test_what_only_a_slow_engine_takes_is_xlas_where_that_was_measured(function):
    given = operands(function, 64, 1000)
    with jc.target("H200"):
        (segment,) = jc.plan(function, *given).segments
        assert segment.plan is None
        assert "only eng1 supports it, and XLA is faster" in segment.reason
        for options in ({"implementation": "cudnn"}, {"engine": 1}):
            asked = jc.plan(function.with_options(**options), *given)
            assert asked.execution_plans[0].engine_id == 1
    with jc.target("A100"):
        assert jc.plan(function, *given).execution_plans[0].engine_id == 1


@pytest.mark.deviceless
@pytest.mark.usefixtures("no_plans")
def test_a_split_on_disk_is_of_the_implementation_that_asked(tmp_path, monkeypatch):
    """Of derivatives "cudnn" looks for splits, too. Here nothing but the slow engine tells them
    apart: the architecture has no patterns."""
    bare = {**losses.table()["90"], "patterns": {}}
    monkeypatch.setattr(losses, "table", lambda: {"90": bare})
    jc.configure(plan_cache=tmp_path)
    found = {}
    for implementation in ("split", "cudnn"):
        auto.clear()
        loss = lambda x, s: jc.ops.rms_norm(x, s).astype("float32").sum()  # noqa: E731
        with jc.target("H200"), jc.implementation(implementation):
            plans = jc.plans(jax.grad(loss), S((64, 1000), "bfloat16"), S((1000,), "bfloat16"))
        found[implementation] = [len(plan.execution_plans) for plan in plans.values()]
    assert found == {"cudnn": [1, 1], "split": [0, 0]}
