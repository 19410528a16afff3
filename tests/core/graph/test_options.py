"""Options: what they accept, where they come from, and what they do to the choice of a plan."""

import pickle
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import product

import jax_cudnn as jc
from jax_cudnn._core.graph.options import normal_precision
from jax_cudnn._core.planning import choice

X, W, B = (
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in ((8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1))
)
FLOATS = tuple(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (X, W, B))
MATRICES = tuple(jax.ShapeDtypeStruct((1, 64, 64), jnp.float32) for _ in range(2))


@jc.graph
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b))


def plan(function=conv_bias_relu, avals=(X, W, B), implementation="cudnn", **options):
    """Of cuDNN's choice: XLA, which may run a graph by default, heeds few of the options."""
    with jc.target("H200"):
        made = jc.plan(function.with_options(implementation=implementation, **options), *avals)
    (plan,) = made.execution_plans
    assert made.pinned == plan.pinned
    return plan


def spec(function=product, avals=MATRICES):
    return function.trace(*avals)[1].spec


WRONG = (
    ({"determinstic": True}, "deterministic"),
    ({"deselect_numeric_notes": ["TENSOR_CORES"]}, "TENSOR_CORE"),
    ({"heuristics": ("C",)}, "FALLBACK"),
    ({"max_workspace": -1}, "at least 0"),
    ({"knobs": {"TILE_SIZE": 1}}, "engine="),
    ({"deterministic": 1}, "True or False"),
    ({"precision": "double"}, "highest"),
)


def test_wrong_option_is_said_in_words():
    for options, words in WRONG:
        with pytest.raises(jc.JaxCudnnError, match=re.escape(words)):
            conv_bias_relu.with_options(**options)


def test_options_are_part_of_the_graph_and_kept_by_functions():
    member = type("Member", (), {"name": "NONDETERMINISTIC"})()  # of cuDNN's frontend
    named = jc.Options(deselect_numeric_notes=["NONDETERMINISTIC"])
    assert jc.Options(deselect_numeric_notes=member) == named
    assert jc.Options(engine=3, knobs={"TILEK": 1, "EDGE": 2}).knobs == (("EDGE", 2), ("TILEK", 1))
    both = jc.graph(deterministic=True)(conv_bias_relu.fn).with_options(max_workspace=8)
    assert both.options == jc.Options(deterministic=True, max_workspace=8)
    limited = product.with_options(max_workspace=1024)
    assert product.with_options(max_workspace=1024) is limited  # and shares traces
    assert pickle.loads(pickle.dumps(limited)).options == limited.options
    other = spec(limited)
    assert spec().canonical() != other.canonical()
    assert pickle.loads(pickle.dumps(other)) == other


def test_precision_is_laxs_and_comes_from_jax_unless_it_is_given():
    """And concerns graphs with float32 products alone."""
    spellings = (None, jax.lax.Precision.HIGH, "tensorfloat32", ("default", "highest"))
    assert [*map(normal_precision, spellings)] == ["default", "high", "high", "highest"]
    relu = jc.graph(lambda g, x: g.relu(x))
    with jax.default_matmul_precision("highest"):
        assert spec().options.precision == "highest"
        assert spec(product.with_options(precision="default")).options.precision == "default"
        assert spec(relu, MATRICES[:1]).options.precision == "default"
    assert spec().options.precision == "default"
    lowered = jax.jit(product.with_options(precision="highest")).lower(*MATRICES).as_text()
    assert "HIGHEST" in lowered
    assert "HIGHEST" not in jax.jit(product).lower(*MATRICES).as_text()


def test_xlas_flag_asks_for_determinism(monkeypatch):
    for flags, expected in (
        ("", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_exclude_nondeterministic_ops=1 --xla_foo=true", True),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert spec().options.deterministic is expected


@pytest.mark.deviceless
def test_max_workspace_holds_and_says_what_is_needed():
    wgrad = jc.graph(lambda g, x, y: g.conv_wgrad(x, y, padding=[1, 1]).set_dim([64, 64, 3, 3]))
    image = jax.ShapeDtypeStruct((32, 64, 56, 56), "float32")
    most = plan(wgrad, (image, image)).workspace_bytes
    assert most > 0, "no plan here needs workspace: take other shapes"
    for limit in (most - 1, 0):
        try:
            assert plan(wgrad, (image, image), max_workspace=limit).workspace_bytes <= limit
        except jc.UnsupportedGraphError as error:
            refused = str(error)
            assert "bytes of workspace" in refused


@pytest.mark.deviceless
def test_explicit_engine_is_used_or_refused_in_words():
    chosen = plan()
    explicit = plan(engine=chosen.engine_id)
    assert (explicit.engine_id, explicit.candidates) == (chosen.engine_id, 1)
    with pytest.raises(jc.UnsupportedGraphError, match="engine=9999"):
        plan(engine=9999)
    with pytest.raises(jc.JaxCudnnError, match="TILE_SIZE"):
        plan(engine=chosen.engine_id, knobs={"NO_SUCH_KNOB": 1})
    for implementation in ("cudnn", "split"):
        again = plan(implementation=implementation, **chosen.pinned)
        assert (again.engine_id, again.knobs) == (chosen.engine_id, chosen.knobs)
        assert again.candidates == 1


@pytest.mark.deviceless
def test_explicit_engine_does_not_override_the_notes():
    """cuDNN would build a named engine without looking at its notes."""
    free = plan(avals=FLOATS)
    for notes in ({"precision": "highest"}, {"select_behavior_notes": "RUNTIME_COMPILATION"}):
        with pytest.raises(jc.UnsupportedGraphError):
            plan(avals=FLOATS, engine=free.engine_id, **notes)
        other = plan(avals=FLOATS, **notes)
        assert plan(avals=FLOATS, engine=other.engine_id, **notes).engine_id == other.engine_id


@pytest.mark.deviceless
def test_compute_type_of_a_graph_is_that_of_its_product():
    compute = "fast_float_for_fp8"
    avals = [jax.ShapeDtypeStruct((1, 64, 64), "float8_e4m3fn") for _ in range(2)]
    fused = jc.graph(compute_data_type=compute)(lambda g, a, b: g.relu(g.matmul(a, b) * 0.5))
    computes = [call.node.compute_data_type for call in fused.trace(*avals)[1].spec.calls]
    assert computes == [compute, "float32", "float32"]
    assert plan(fused, avals).engine
    with pytest.raises(jc.GraphTypeError, match="compute_data_type"):  # that it does not have
        product.with_options(compute_data_type="float32")(*[jnp.ones((1, 8, 8), "int8")] * 2)


@pytest.mark.deviceless
def test_float32_convolutions_leave_tensor_cores_out():
    """Which engine remains is cuDNN's business; that it is another one shows the notes at work."""
    assert plan(avals=FLOATS, precision="high").engine != plan(avals=FLOATS).engine
    assert plan(precision="high").engine == plan().engine  # bfloat16 has nothing to lose
    strict = spec(conv_bias_relu.with_options(precision="high"), FLOATS)
    assert "TENSOR_CORE" in choice.left_out(strict)
    assert "NONDETERMINISTIC" in choice.left_out(spec(product.with_options(deterministic=True)))


@pytest.mark.deviceless
def test_float32_matmuls_at_high_precision_are_refused_in_words():
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match=r"(?s)TF32.*bfloat16"):
        jc.plan(product.with_options(implementation="cudnn", precision="high"), *MATRICES)
