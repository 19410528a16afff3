"""Plans of a ``jc.Graph``: values of scalars, order, and candidates by index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.reference import evaluate

ROWS, SCALE, BIAS = jnp.ones((8, 64, 1, 1)), jnp.ones((1, 64, 1, 1)), jnp.zeros((1, 64, 1, 1))
EPSILON = np.full((1, 1, 1, 1), 1e-5, np.float32)
X = jnp.ones((64, 128))


def layernorm(epsilon=EPSILON, implementation="xla"):
    """By default a plan that runs in XLA: it needs no cuDNN, and its spec says what it computes."""
    order = ["ln::input", "ln::scale", "ln::bias", "ln::epsilon"]
    with jc.Graph(inputs=order, outputs=["ln::Y"], implementation=implementation) as graph:
        if epsilon is None:
            kind = {"data_type": "FLOAT", "is_pass_by_value": True}
            epsilon = graph.tensor(dim=[1, 1, 1, 1], name="eps", **kind)
        given = {"input": ROWS, "scale": SCALE, "bias": BIAS, "epsilon": epsilon}
        y, *_ = graph.layernorm(**given, norm_forward_phase="TRAINING", name="ln")
        y.set_output(True)
    return graph


def product():
    a, b = (jax.ShapeDtypeStruct((1, 512, 512), "bfloat16") for _ in range(2))
    with jc.Graph(implementation="cudnn", inputs=[a, b], outputs=["m::C"]) as graph:
        graph.matmul(a, b, name="m").set_output(True)
    return graph


def constants(plan):
    return [tensor.value for tensor in plan.spec.constants]


@pytest.fixture
def h200():
    with jc.target("H200"):
        yield


@pytest.mark.usefixtures("h200")
def test_a_plan_has_the_number_that_the_graph_was_built_with_or_is_given():
    made = layernorm().plan()
    x = 0.01 * jax.random.normal(jax.random.key(0), ROWS.shape)
    assert constants(made) == [np.float32(1e-5)]
    (got,) = evaluate(made.spec, x, SCALE, BIAS)
    np.testing.assert_allclose(got, layernorm()(x, SCALE, BIAS, 1e-5), rtol=1e-5)
    assert constants(jc.Plan.deserialize(made.serialize())) == [np.float32(1e-5)]
    assert constants(layernorm().plan(numbers={"ln::epsilon": 0.5})) == [0.5]
    several = layernorm(None).plan(numbers={"eps": np.float32(0.5)}, gpus=["h200"])
    assert constants(several["H200"]) == [0.5]
    for numbers, words in (
        ({"ln::epsilonn": 1.0}, "did you mean"),
        ({"ln::epsilon": 1e300}, "float32"),
    ):
        with pytest.raises(jc.GraphError, match=words):
            layernorm().plan(numbers=numbers)


@pytest.mark.usefixtures("h200")
def test_a_plan_without_its_numbers_does_not_run():
    made = layernorm(None).plan()
    for call in (
        lambda: made.execute(ROWS, SCALE, BIAS),
        made.serialize,
        lambda: made.populate_cuda_graph(1, [], []),
        lambda: made.update_cuda_graph(1, [], []),
    ):
        with pytest.raises(jc.GraphError, match="without the values of its scalars"):
            call()
    assert np.isnan(constants(made)[0]), "no number is made up"

    @jc.graph_cache
    def norm(epsilon):
        return {"graph": layernorm(epsilon)}

    kept = norm(EPSILON)["graph"]
    assert kept is norm(2 * EPSILON)["graph"], "graphs that are kept stand for all numbers"
    assert np.isnan(constants(kept.plan())[0])


@pytest.mark.usefixtures("h200")
def test_a_plan_has_the_order_of_calls():
    with jc.Graph(implementation="xla") as graph:
        a, b = graph.tensor_like(X, name="a"), graph.tensor_like(X, name="b")
        graph.neg(graph.sub(a, b).set_output(True).set_name("y")).set_output(True).set_name("z")
    assert graph.plan().spec.inputs == ("a", "b")
    graph.set_io_tuples(["b", "a"], ["z", "y"])
    for results in (evaluate(graph.plan().spec, X, 3 * X), graph(X, 3 * X)):
        assert [float(y[0, 0]) for y in results] == [-2.0, 2.0]


@pytest.mark.deviceless
@pytest.mark.usefixtures("h200")
def test_indices_mean_the_candidates():
    graph = product()
    rows = graph.plan().candidates
    assert graph.get_execution_plan_count() == len(rows)
    other = next(row.index for row in rows if row.index != rows.chosen)
    row = rows[other]
    assert graph.get_plan_name_at_index(other) == row.name
    assert graph.get_engine_and_knobs_at_index(other) == (row.engine, row.knobs)
    assert graph.get_behavior_notes_for_plan_at_index(other) == row.behavior_notes
    assert graph.get_behavior_notes() == rows[rows.chosen].behavior_notes
    chosen = graph.build_plan_at_index(other)
    assert chosen.engine == row.name
    assert graph.get_workspace_size_plan_at_index(other) == chosen.workspace_bytes
    for wrong in (-1, len(rows)):
        for call in (graph.get_plan_name_at_index, graph.build_plan_at_index, graph.select_plan):
            with pytest.raises(jc.GraphError, match="no such candidate"):
                call(wrong)
    created = product()
    created.create_execution_plan(row.engine, row.knobs)
    for one in (created, graph.select_plan(other), graph.with_options(**chosen.pinned)):
        assert one.get_execution_plan_count() == 1
        assert one.get_plan_name_at_index(0) == one.plan().engine == row.name
        assert one.build_plan_at_index(0) == one.plan()


@pytest.mark.deviceless
@pytest.mark.usefixtures("h200")
def test_the_usual_sequence_works_inside_of_the_with_or_after_it():
    with jc.Graph(inputs=["mm::B", "mm::A"], outputs=["y"]) as graph:
        y = graph.matmul(X[None], X.T[None], name="mm").set_output(True).set_name("y")
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(["A"]).deselect_workspace_greater_than(2**20)
        graph.check_support()
        made = graph.build_plans()
        assert graph.get_workspace_size() == made.workspace_bytes <= 2**20
        y.set_data_type("bfloat16")  # it is open still
    assert made.spec.inputs == graph.spec.inputs == ("mm::B", "mm::A")
    assert [t.dtype for t in made.spec.output_tensors] == ["float32"]
    assert graph(X.T[None], X[None]).dtype == jnp.bfloat16
    behind = product()
    behind.create_execution_plans(["B"])
    made = behind.build_plans()
    assert "B" in made.candidates[made.candidates.chosen].modes


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
def test_calls_and_plans_on_the_gpu_have_the_number(key):
    half = np.full_like(EPSILON, 0.5)
    graph, x = layernorm(half, "cudnn"), jax.random.normal(key, ROWS.shape)
    want = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 0.5)
    called = jax.jit(lambda x: graph(x, SCALE, BIAS, 0.5))(x)
    for got in (called, graph.plan().execute(x, SCALE, BIAS)):
        np.testing.assert_allclose(jax.tree.leaves(got)[0], want, rtol=1e-4, atol=1e-4)
