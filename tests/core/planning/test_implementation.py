"""Who runs a graph: "cudnn", "split" or "xla", as an argument and as a context; and what is said
of it. cuDNN's answers are made up here, but for tests marked deviceless."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowered

import jax_cudnn as jc
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning import planner
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

IMAGE = jax.ShapeDtypeStruct((4, 16, 10, 10), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((16, 16, 3, 3), jnp.bfloat16)


@jc.graph
def one(g, x, w):
    return g.relu(g.conv_fprop(x, w, padding=[1, 1]))


@jc.graph
def two(g, x, w):
    y = g.relu(g.conv_fprop(x, w, padding=[1, 1])).set_data_type("bfloat16")
    return g.sigmoid(g.conv_fprop(y, w, padding=[1, 1]))


@jc.graph
def shifted(g, x):
    return g.sub(x, g.reduction(x, mode="MAX", out_dims=[4, 1, 10, 10]))


@pytest.fixture
def built(made_up_plans, monkeypatch):
    """The graphs that were planned. cuDNN takes one convolution, or pointwise operations."""
    made = []

    def build(spec, site):
        methods = [call.node.method for call in spec.calls]
        if methods.count("conv_fprop") > 1 or {"reduction", "conv_wgrad"} & {*methods}:
            raise jc.UnsupportedGraphError("no engine", reasons={"engine 7": "too much in it"})
        made.append(methods)
        return ExecutionPlan("{}", "eng0", 91900, "NVIDIA H200", 64, 0, (), (), b"", 3)

    monkeypatch.setattr(planner, "_build", build)
    return made


def calls(text):
    return text.count("custom_call @jax_cudnn")


def engines(function, *avals):
    with jc.target("H200"):
        return jc.plan(function, *avals).engine


def test_cudnn_is_one_plan_or_an_error(built):
    strict = two.with_options(implementation="cudnn")
    with pytest.raises(jc.UnsupportedGraphError, match="two: no engine") as caught:
        lowered(strict, IMAGE, WEIGHT)
    assert "or remove implementation='cudnn'" in caught.value.fix
    assert calls(lowered(one.with_options(implementation="cudnn"), IMAGE, WEIGHT)) == 1


def test_xla_plans_nothing_needs_no_gpu_and_takes_symbolic_dimensions(built):
    plain = one.with_options(implementation="xla")
    traced = jax.jit(lambda x, w: plain(x, w)).trace(IMAGE, WEIGHT)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (calls(text), built) == (0, [])
    assert "stablehlo.convolution" in text
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), jnp.float32)
    relu = jc.graph(lambda g, x: g.relu(x)).with_options(implementation="xla")
    assert jax.export.export(jax.jit(relu), platforms=("cuda",))(rows).platforms == ("cuda",)


def test_an_argument_comes_before_the_context_which_is_part_of_jaxs_cache_keys(built):
    jitted, counts = jax.jit(two), []
    for name in ("split", "xla", "split", "xla"):
        with jc.target("H200"), jc.implementation(name):
            traced = jitted.trace(IMAGE, WEIGHT)
            counts.append(calls(traced.lower(lowering_platforms=("cuda",)).as_text()))
    assert counts == [2, 0, 2, 0]
    with jc.implementation("cudnn"):
        assert calls(lowered(two.with_options(implementation="split"), IMAGE, WEIGHT)) == 2
        with jc.implementation("xla"):
            assert calls(lowered(two, IMAGE, WEIGHT)) == 0
        with pytest.raises(jc.UnsupportedGraphError):
            lowered(two, IMAGE, WEIGHT)


def test_determinism_is_not_promised_for_what_xla_was_not_asked(built, monkeypatch):
    @jc.graph(deterministic=True)
    def gradients(g, loss, x):
        shapes = {"padding": [1, 1], "out_dims": [16, 16, 3, 3]}
        return g.conv_wgrad(x, loss, **shapes), g.reduction(loss, mode="ADD")

    with pytest.raises(jc.UnsupportedGraphError, match="deterministic=True") as caught:
        lowered(gradients, IMAGE, IMAGE)
    assert "conv_wgrad.0" in str(caught.value)
    assert calls(lowered(gradients.with_options(deterministic=False), IMAGE, IMAGE)) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_exclude_nondeterministic_ops=true")
    assert calls(lowered(gradients, IMAGE, IMAGE)) == 0


def test_explain_says_what_runs_where_and_why(built, caplog):
    caplog.set_level(logging.DEBUG, "jax_cudnn")
    with jc.target("H200"):
        plan = jc.plan(two, IMAGE, WEIGHT)
        of_xla = str(jc.plan(shifted, IMAGE).explain())
    data = json.loads(json.dumps(plan.explain().to_json()))
    assert (data["name"], data["gpu"], data["implementation"]) == ("two", "H200", "auto")
    assert [(s["operations"], s["runs_on"]) for s in data["segments"]] == [
        (["conv_fprop.0", "relu.0"], "cuDNN"),
        (["conv_fprop.1", "sigmoid.0"], "cuDNN"),
    ]
    assert data["cut_bytes"] == data["segments"][0]["writes_bytes"] == 4 * 16 * 10 * 10 * 2
    assert "1. XLA: reduction.0, sub.0" in of_xla
    assert "computed in the graph" in of_xla  # and then broadcast: cuDNN reads it out of bounds
    assert "two: cut in 2 segments" in caplog.text
    assert "shifted: XLA runs" in caplog.text


def test_after_a_warmup_nothing_is_planned(built):
    def program(x, w):
        def body(x, _):
            return one(x, w).astype(x.dtype), None

        return jax.lax.scan(body, two(x, w), None, length=3)[0]

    with jc.target("H200"):
        text = jc.warmup(program, IMAGE, WEIGHT).as_text()
    assert calls(text) == 3
    assert len(built) == 2  # one's graph is the first part of two's
    lowered(program, IMAGE, WEIGHT)
    for name in ("cudnn", "split"):
        lowered(one.with_options(implementation=name), IMAGE, WEIGHT)
    assert len(built) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_xla_keeps_the_roundings_inside_a_graph(dtype):
    """Left alone, its simplifier may leave out a conversion to a narrower float and back."""

    @jc.graph
    def through(g, x):
        return g.sub(x, g.mul(x, 1.0).set_data_type(dtype)).set_data_type("float32")

    x = jnp.concatenate([jnp.linspace(-3, 3, 1001), jnp.array([1e6, -1e6, 1e-4])]).reshape(1, -1)
    spec = through.trace(x)[1].spec
    limit = float(jnp.finfo(dtype).max)
    inside = jnp.clip(x, -limit, limit) if dtype.startswith("float8") else x
    want = np.asarray(x) - np.asarray(inside.astype(dtype).astype(jnp.float32))
    (got,) = jax.jit(functools.partial(evaluate, spec))(x)
    np.testing.assert_array_equal(got, want)
    text = jax.jit(functools.partial(evaluate, spec)).lower(x).as_text()
    assert f"m{jnp.finfo(dtype).nmant}" in text.split("reduce_precision", 1)[1].split("\n", 1)[0]
    # What the graph returns is stored in its dtype; a narrow one may be read in the same program.
    stored = jc.graph(lambda g, x: g.mul(x, 1.0).set_data_type(dtype)).trace(x)[1].spec
    text = jax.jit(functools.partial(evaluate, stored)).lower(x).as_text()
    assert ("reduce_precision" in text) == dtype.startswith("float8")
