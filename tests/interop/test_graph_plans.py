"""The plans of a ``jc.Graph``: its numbers, its order, and its candidates by index."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.reference import evaluate

ROWS, SCALE, BIAS = jnp.ones((8, 64, 1, 1)), jnp.ones((1, 64, 1, 1)), jnp.zeros((1, 64, 1, 1))
EPSILON = np.full((1, 1, 1, 1), 1e-5, np.float32)
X = jnp.ones((64, 128))


def layernorm(epsilon=EPSILON):
    with jc.Graph(
        inputs=["ln::input", "ln::scale", "ln::bias", "ln::epsilon"], outputs=["ln::Y"]
    ) as graph:
        given = {"input": ROWS, "scale": SCALE, "bias": BIAS}
        if epsilon is None:
            epsilon = graph.tensor(
                dim=[1, 1, 1, 1], data_type="FLOAT", is_pass_by_value=True, name="eps"
            )
        graph.layernorm(**given, epsilon=epsilon, norm_forward_phase="TRAINING", name="ln")[
            0
        ].set_output(True)
    return graph


def of_xla(graph):
    """Plans of XLA alone need no cuDNN; what they compute is in their spec."""
    return graph.with_options(implementation="xla")


def constants(plan):
    return [tensor.value for tensor in plan.spec.constants]


# -- numbers ---------------------------------------------------------------------------------------


def test_a_plan_has_the_number_that_the_graph_was_built_with():
    with jc.target("H200"):
        made = of_xla(layernorm()).plan()
    x = 0.01 * jax.random.normal(jax.random.key(0), ROWS.shape)
    assert constants(made) == [np.float32(1e-5)]
    (got,) = evaluate(made.spec, x, SCALE, BIAS)
    np.testing.assert_allclose(got, layernorm()(x, SCALE, BIAS, 1e-5), rtol=1e-5)
    assert constants(jc.Plan.deserialize(made.serialize())) == [np.float32(1e-5)]


def test_numbers_in_float64_are_of_the_graphs_dtype():
    wide = np.full((1, 1, 1, 1), 0.5)
    with jax.enable_x64(True):
        graph = layernorm(wide)
        x = jax.random.normal(jax.random.key(0), ROWS.shape, "float32")
        results = [graph(x, SCALE, BIAS, e) for e in (wide, np.float64(0.5), 0.5)]
        by_tensor = layernorm(None)(x, SCALE, BIAS, wide)
        with jc.Graph(inputs=["mul::a", "mul::b"], outputs=["mul::OUT_0"]) as product:
            product.mul(x, product.tensor([1, 1, 1, 1], data_type="FLOAT"), name="mul")
        assert product(x, wide).dtype == jnp.float32
    want = layernorm()(x, SCALE, BIAS, np.float32(0.5))
    for got in (*results, by_tensor):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)


def test_numbers_are_arguments_of_a_plan():
    with jc.target("H200"):
        made = of_xla(layernorm()).plan(numbers={"ln::epsilon": 0.5})
        several = of_xla(layernorm(None)).plan(numbers={"eps": np.float32(0.5)}, gpus=["A100"])
    assert constants(made) == constants(several["A100"]) == [0.5]
    assert type(several["A100"]) is jc.Plan


def test_a_plan_without_its_numbers_does_not_run():
    graph = of_xla(layernorm(None))
    with jc.target("H200"):
        made = graph.plan()
    assert made.spec.inputs == ("ln::input", "ln::scale", "ln::bias")
    calls = {
        "execute": lambda: made.execute(ROWS, SCALE, BIAS),
        "serialize": made.serialize,
        "to_json": made.to_json,
        "populate_cuda_graph": lambda: made.populate_cuda_graph(1, [], []),
        "update_cuda_graph": lambda: made.update_cuda_graph(1, [], []),
    }
    for name, call in calls.items():
        with pytest.raises(jc.GraphError, match=f"{name} of a plan without its numbers") as caught:
            call()
        assert "graph.plan(numbers={'eps': ...})" in str(caught.value)
    assert np.isnan(constants(made)[0]), "no number is made up"


@pytest.mark.deviceless
def test_what_depends_on_no_number_is_told_without_it():
    graph = layernorm(None).with_options(implementation="cudnn")
    with jc.target("H200"):
        known = graph.plan(numbers={"eps": 1e-5})
        graph.check_support()
        assert graph.support(gpus=["H200"])
        assert graph.build_plans().engine == known.engine
        assert graph.get_workspace_size() == known.workspace_bytes
        assert graph.get_execution_plan_count() == len(known.candidates)
        other = graph.plan().select(len(known.candidates) - 1)
    assert np.frombuffer(known.only.scalars, np.float32)[0] == np.float32(1e-5)
    with pytest.raises(jc.GraphError, match="without its numbers"):
        other.execute(ROWS, SCALE, BIAS)


def test_graphs_that_are_kept_stand_for_all_numbers():
    @jc.graph_cache
    def norm(epsilon):
        return {"graph": of_xla(layernorm(epsilon))}

    with jc.target("H200"):
        assert np.isnan(constants(norm(EPSILON)["graph"].plan())[0])
    assert norm(EPSILON)["graph"] is norm(2 * EPSILON)["graph"]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"ln::input": 1.0}, "is_pass_by_value"),
        ({"ln::epsilon": jnp.ones(())}, "Python or NumPy number"),
        ({"ln::epsilonn": 1.0}, "did you mean"),
        ({"ln::epsilon": 1e300}, "float32"),
    ],
)
def test_numbers_that_are_none_are_refused(numbers, words):
    with jc.target("H200"), pytest.raises(jc.GraphError, match=words):
        of_xla(layernorm()).plan(numbers=numbers)


# -- order -----------------------------------------------------------------------------------------


def difference(**options):
    with jc.Graph(**options) as graph:
        a, b = graph.tensor_like(X, name="a"), graph.tensor_like(X, name="b")
        y = graph.sub(a, b).set_output(True).set_name("y")
        graph.neg(y).set_output(True).set_name("z")
    return graph


@pytest.mark.parametrize("late", [False, True])
def test_a_plan_has_the_order_of_calls(late):
    order = {"inputs": ["b", "a"], "outputs": ["z", "y"]}
    graph = difference(**({} if late else order), implementation="xla")
    if late:
        with jc.target("H200"):
            assert graph.plan().spec.inputs == ("a", "b")
        graph.set_io_tuples(**order)
    with jc.target("H200"):
        made = graph.plan()
    assert made.spec.inputs == graph.spec.inputs == ("b", "a")
    planned, called = evaluate(made.spec, X, 3 * X), graph(X, 3 * X)
    assert [float(y[0, 0]) for y in planned] == [float(y[0, 0]) for y in called] == [-2.0, 2.0]


def test_an_input_that_is_named_twice_is_one_of_a_plan():
    with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"], implementation="xla") as graph:
        graph.sub(X, X, name="s").set_output(True)
    with jc.target("H200"):
        assert len(graph.plan().spec.inputs) == 1


# -- candidates ------------------------------------------------------------------------------------


def product(**options):
    a, b = (jax.ShapeDtypeStruct((1, 512, 512), "bfloat16") for _ in range(2))
    with jc.Graph(implementation="cudnn", inputs=[a, b], outputs=["m::C"], **options) as graph:
        graph.matmul(a, b, name="m").set_output(True)
    return graph


@pytest.mark.deviceless
def test_indices_mean_the_candidates():
    graph = product()
    with jc.target("H200"):
        rows = graph.plan().candidates
        assert graph.get_execution_plan_count() == len(rows)
        names = [graph.get_plan_name_at_index(i) for i in range(len(rows))]
        assert names == [row.name for row in rows]
        for wrong in (-1, len(rows), "0", None):
            for call in (
                graph.get_plan_name_at_index,
                graph.get_workspace_size_plan_at_index,
                graph.build_plan_at_index,
                graph.select_plan,
            ):
                with pytest.raises(jc.GraphError, match="no such candidate"):
                    call(wrong)


@pytest.mark.deviceless
@pytest.mark.parametrize("how", ["create_execution_plan", "select_plan", "engine"])
def test_a_graph_that_names_an_engine_has_one_candidate(how):
    with jc.target("H200"):
        graph = product()
        row = graph.plan().candidates[-1]
        if how == "create_execution_plan":
            graph.create_execution_plan(row.engine, row.knobs)
        elif how == "select_plan":
            graph = graph.select_plan(row.index)
        else:
            graph = product(engine=row.engine, knobs=row.knobs)
        assert graph.get_execution_plan_count() == 1
        assert graph.get_plan_name_at_index(0) == graph.plan().engine == row.name
        assert graph.get_engine_and_knobs_at_index(0) == (row.engine, row.knobs)
        assert graph.get_behavior_notes_for_plan_at_index(0) == row.behavior_notes
        assert graph.build_plan_at_index(0) == graph.plan()
        assert graph.select_plan(0).plan().engine == row.name
        with pytest.raises(jc.GraphError, match="options name an engine"):
            graph.get_plan_name_at_index(1)


@pytest.mark.parametrize("numbers", [{}, {"eps": 0.5}])
def test_plans_are_found_under_every_spelling_of_a_gpu(numbers):
    made = of_xla(layernorm(None)).plan(gpus=["h200"], numbers=numbers)
    assert made["h200"] is made["H200"] is made["NVIDIA H200"]
    assert {*made} == {"H200"}
    for other in ("A100", "no GPU"):
        with pytest.raises(KeyError, match=other):
            made[other]


# -- the usual sequence ----------------------------------------------------------------------------


@pytest.mark.deviceless
def test_the_usual_sequence_follows_the_graph():
    graph = product()
    with jc.target("H200"):
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(["B"]).deselect_workspace_greater_than(2**20)
        graph.check_support()
        made = graph.build_plans()
    options = graph.spec.options
    assert (options.heuristics, options.max_workspace) == (("B",), 2**20)
    assert made.spec.options == options
    assert "B" in made.candidates[made.candidates.chosen].modes


@pytest.mark.deviceless
def test_the_usual_sequence_may_stand_inside_of_the_with():
    with jc.target("H200"), jc.Graph(inputs=["mm::B", "mm::A"], outputs=["y"]) as graph:
        y = graph.matmul(X[None], X.T[None], name="mm").set_output(True).set_name("y")
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(["A"]).deselect_workspace_greater_than(2**20)
        graph.check_support()
        made = graph.build_plans()
        assert graph.get_workspace_size() == made.workspace_bytes <= 2**20
        assert graph.build(["B"]).spec.options.heuristics == ("B",)
        assert graph.get_execution_plan_count() == len(made.candidates)
        assert graph.support(gpus=["H200"])
        y.set_data_type("bfloat16")  # it is open still
    assert made.spec.inputs == graph.spec.inputs == ("mm::B", "mm::A")
    assert made.spec.options == graph.spec.options
    assert [t.dtype for t in made.spec.output_tensors] == ["float32"]
    assert graph(X.T[None], X[None]).dtype == jnp.bfloat16


def test_what_is_planned_inside_of_the_with_is_what_was_written_so_far():
    with jc.target("H200"), jc.Graph(implementation="xla") as graph:
        x = graph.tensor([4, 8], data_type="FLOAT", name="x")
        with pytest.raises(jc.GraphError, match="no output"):
            graph.build_plans()
        y = graph.relu(x).set_output(True)
        first = graph.plan()
        graph.neg(y).set_output(True)
    assert [call.node.method for call in first.spec.calls] == ["relu"]
    assert [call.node.method for call in graph.spec.calls] == ["relu", "neg"]


def test_options_of_a_graph_that_was_called_stay():
    graph = difference(inputs=["a", "b"], outputs=["y", "z"])
    graph.create_execution_plans(["B"])
    graph(X, X)
    with pytest.raises(jc.GraphError, match="after it was called") as caught:
        graph.create_execution_plans(["A"])
    assert "graph.with_options(heuristics=...)" in str(caught.value)
    assert graph.with_options().create_execution_plans(["A"]).spec.options.heuristics == ("A",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deserialize", "jax_cudnn.Plan.deserialize"),
        ("execute_plan_at_index", "build_plan_at_index"),
        ("deselect_engines", "select_plan"),
        ("key", "graph.spec"),
        ("get_cuda_graph_retention", "command buffers"),
    ],
)
def test_what_is_elsewhere_is_said(name, words):
    with pytest.raises(jc.GraphAttributeError, match=words):
        getattr(difference(), name)


def test_a_finished_graph_can_be_looked_at():
    graph = difference()
    members = dict(inspect.getmembers(graph))
    assert "relu" not in members
    assert not hasattr(graph, "relu")
    assert {"plan", "spec", "nodes"} <= members.keys()


# -- copies ----------------------------------------------------------------------------------------


def test_a_copy_has_tensors_of_its_own():
    with jc.Graph(io_data_type="HALF", inputs=["x"], outputs=["y"]) as graph:
        inner = graph.exp(graph.tensor(name="x", dim=[4, 8]), name="e")
        graph.neg(inner).set_output(True).set_name("y")
    other = graph.with_options()
    other.set_io_tuples(["x"], ["y", inner])
    kept = other.get_outputs()[1]
    assert (kept.get_is_virtual(), inner.get_is_virtual()) == (False, True)
    assert kept.get_data_type() == other(jnp.ones((4, 8), "float16"))[1].dtype
    assert other.find_tensor(inner) is kept
    assert other.with_options().find_tensor(inner).get_is_virtual() is False
    assert graph.find_tensor(kept) is inner
    with pytest.raises(jc.GraphError, match="no tensor"):
        difference().find_tensor(inner)
    read = pickle.loads(pickle.dumps(other))
    assert read.find_tensor("y").get_is_virtual() is False


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_plan_of_a_norm_executes_as_its_graph_does():
    shape, order = (64, 1024, 1, 1), ["ln::input", "ln::scale", "ln::bias", "ln::epsilon"]
    with jc.Graph(inputs=order, outputs=["ln::Y"]) as graph:
        x, scale, bias = (
            graph.tensor(name=name, dim=dim, data_type="BFLOAT16")
            for name, dim in (("x", shape), ("s", (1, *shape[1:])), ("b", (1, *shape[1:])))
        )
        y, *_ = graph.layernorm(
            norm_forward_phase="TRAINING", input=x, scale=scale, bias=bias, epsilon=EPSILON,
            name="ln",
        )  # fmt: skip
        y.set_output(True)
    keys = jax.random.split(jax.random.key(3), 3)
    given = [
        (0.003 * jax.random.normal(k, tensor.shape)).astype(tensor.dtype)  # epsilon is felt
        for k, tensor in zip(keys, graph.spec.input_tensors[:3], strict=True)
    ]
    got, want = graph.plan().execute(*given), graph(*given, EPSILON)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    (exact,) = evaluate(graph.plan().spec, *given)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(exact, np.float32), rtol=2e-2, atol=1e-4
    )


@pytest.mark.gpu
def test_a_plan_of_another_order_executes_in_it():
    graph = difference(inputs=["b", "a"], outputs=["z", "y"])
    planned = graph.plan().execute(X, 3 * X)
    assert [float(y[0, 0]) for y in planned] == [-2.0, 2.0]
