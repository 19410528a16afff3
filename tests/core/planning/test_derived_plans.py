"""Plans of graphs that were derived from others: names, residuals; under "cudnn", too."""

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core import auto
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.planning import losses, planner
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

IMAGE = jax.ShapeDtypeStruct((4, 16, 10, 10), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((16, 16, 3, 3), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((1, 16, 1, 1), jnp.bfloat16)


@jc.graph
def scaled(g, x, w, s):
    return g.gelu(g.mul(g.conv_fprop(x, w, padding=[1, 1]), s))


def loss(function):
    return lambda *operands: jnp.sum(function(*operands).astype(jnp.float32))


@pytest.fixture
def cudnn_takes(made_up_plans, monkeypatch):
    """Decides which graphs cuDNN plans: a function of their methods."""

    def set_to(answer):
        def build(spec, site):
            if not answer([call.node.method for call in spec.calls]):
                raise jc.UnsupportedGraphError("no engine", reasons={"engine 7": "it does not"})
            return ExecutionPlan("{}", "eng0", 91900, "NVIDIA H200", 64, 0, (), (), b"", 3)

        auto.clear()
        monkeypatch.setattr(planner, "_build", build)

    return set_to


def plans(function, *avals):
    with jc.target("H200"):
        return jc.plans(function, *avals)


def owners(plan):
    """Operation -> who runs it."""
    return {call.name: s.engine for s in plan.segments for call in s.spec.calls}


def one_product(methods):
    return sum(bool(registry()[method].anchor) for method in methods) <= 1


def test_all_graphs_of_a_gradient_have_plans_under_their_names_with_residuals(cudnn_takes):
    cudnn_takes(one_product)
    found = plans(jax.grad(loss(scaled), (0, 1, 2)), IMAGE, WEIGHT, SCALE)
    assert [*found] == ["scaled", "scaled (backward)"]
    with jc.target("H200"), pytest.raises(jc.GraphError, match=r"jax_cudnn\.plans"):
        jc.plan(jax.grad(loss(scaled)), IMAGE, WEIGHT, SCALE)
    (kept,) = found["scaled"].residuals
    assert (kept.shape, kept.dtype) == (IMAGE.shape, "bfloat16")  # the convolution's result
    data = found["scaled"].explain().to_json()
    assert data["residuals"] == [{"tensor": str(kept), "bytes": 4 * 16 * 10 * 10 * 2}]
    roles = [plan.explain().to_json()["role"] for plan in found.values()]
    assert roles == ["forward", "backward"]


def test_strict_derivatives_may_be_cut_but_not_leave_products_to_xla(cudnn_takes):
    strict = scaled.with_options(implementation="cudnn")
    cudnn_takes(lambda methods: one_product(methods) and "reduction" not in methods)
    gradient = jax.grad(loss(strict), (0, 1, 2))
    backward = plans(gradient, IMAGE, WEIGHT, SCALE)["scaled (backward)"]
    engine = owners(backward)
    assert engine["conv_dgrad.0"] == engine["conv_wgrad.0"] == "eng0"
    assert "XLA" in engine.values()
    cudnn_takes(lambda methods: one_product(methods) and "conv_wgrad" not in methods)
    with pytest.raises(jc.UnsupportedGraphError, match=r"cuDNN does not run conv_wgrad\.0"):
        plans(gradient, IMAGE, WEIGHT, SCALE)


def test_strict_derivatives_are_cudnns_where_it_is_measured_to_lose(cudnn_takes, monkeypatch):
    cudnn_takes(one_product)
    monkeypatch.setattr(losses, "table", lambda: {"90": {"patterns": {"conv_wgrad": "0.5"}}})
    slower = lambda spec, sm: spec.calls[0].node.method == "conv_wgrad" and "slower"  # noqa: E731
    monkeypatch.setattr(losses, "loss", slower)
    split = jax.grad(loss(scaled), 1)
    assert owners(plans(split, IMAGE, WEIGHT, SCALE)["scaled (backward)"])["conv_wgrad.0"] == "XLA"
    strict = jax.grad(loss(scaled.with_options(implementation="cudnn")), 1)
    engine = owners(plans(strict, IMAGE, WEIGHT, SCALE)["scaled (backward)"])
    assert engine["conv_wgrad.0"] == "eng0"


def test_an_engine_is_the_forwards_alone(cudnn_takes):
    """Of the backward the number means another engine, or none."""
    cudnn_takes(one_product)
    pinned = scaled.with_options(engine=3)
    (forward,) = plans(pinned, IMAGE, WEIGHT, SCALE).values()
    assert forward.spec.options.engine == 3
    backward = plans(jax.grad(loss(pinned)), IMAGE, WEIGHT, SCALE)["scaled (backward)"]
    assert backward.spec.options.engine is None
