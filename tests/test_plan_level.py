"""The plan level: candidates, and one of them in the place of a plan's own."""

import copy
import dataclasses
import json
import pickle

import jax
import pytest
from cases import all_cases, conv_bias_relu, matmul_bias_gelu

import jax_cudnn as jc
from jax_cudnn._core.graph import record
from jax_cudnn._core.graph.spec import intern
from jax_cudnn._core.planning.collect import graphs

FLOATS = [jax.ShapeDtypeStruct((1, 64, 64), "float32")] * 2


@jc.graph
def product(g, a, b):
    return g.matmul(a, b)


@jc.graph
def two_products(g, a, b):
    return g.matmul(g.relu(g.matmul(a, b)), b)


def plan(function=conv_bias_relu.function, avals=conv_bias_relu.avals, **options):
    with jc.target("H200"):
        return jc.plan(function.with_options(**options), *avals)


# -- candidates ------------------------------------------------------------------------------------


@pytest.mark.deviceless
def test_candidates_say_what_heuristics_propose_without_building():
    made = plan()
    rows = made.candidates
    assert isinstance(rows, jc.Candidates)
    assert [row.index for row in rows] == [*range(len(rows))]
    own = [row for row in rows if {"A", "FALLBACK"} & {*row.modes}]
    assert rows[: len(own)] == tuple(own), "those of the plan's own heuristics come first"
    assert len(own) == made.candidate_count
    for mode in ("A", "B", "FALLBACK"):
        places = [row.modes[mode] for row in rows if mode in row.modes]
        assert sorted(places) == [*range(len(places))]
        assert places, f"mode {mode} proposes something"
    assert rows[rows.chosen].name == made.engine
    assert {row.supported for row in rows} == {True, None}, "only the plan's own is built"
    for row in rows:
        assert row.name.startswith(f"eng{row.engine}")
        assert row.workspace_bytes is not None
        assert ("TENSOR_CORE" in row.numeric_notes) == (row.engine not in (0, 11))


@pytest.mark.deviceless
def test_notes_of_candidates_are_those_that_options_choose_by():
    rows = plan().candidates
    for note in ("RUNTIME_COMPILATION", "SUPPORTS_CUDA_GRAPH_NATIVE_API"):
        chosen = plan(select_behavior_notes=note)
        assert note in rows[_position(rows, chosen)].behavior_notes
    chosen = plan(deselect_numeric_notes="TENSOR_CORE")
    assert "TENSOR_CORE" not in rows[_position(rows, chosen)].numeric_notes


def _position(rows, chosen):
    pinned = chosen.pinned
    (found,) = (r.index for r in rows if (r.engine, r.knobs) == tuple(pinned.values()))
    return found


@pytest.mark.deviceless
def test_what_options_leave_out_is_said():
    rows = plan(deselect_numeric_notes="TENSOR_CORE", max_workspace=0).candidates
    for row in rows:
        if "TENSOR_CORE" in row.numeric_notes:
            assert (row.supported, row.reason) == (False, "left out by the options")
        else:
            assert row.supported is not False
    limited = plan(max_workspace=0).candidates
    large = [row for row in limited if row.workspace_bytes]
    assert large, "no candidate needs workspace: take another graph"
    assert all("bytes of workspace" in row.reason and row.supported is False for row in large)


@pytest.mark.deviceless
def test_candidates_that_compute_wrongly_are_not_supported():
    """Of int8, two engines write results that are not the sums."""
    conv = jc.graph(lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]))
    avals = [jax.ShapeDtypeStruct(shape, "int8") for shape in ((8, 64, 28, 28), (64, 64, 3, 3))]
    rows = plan(conv, avals, implementation="cudnn").candidates
    wrong = {row.engine for row in rows if row.reason == "computes conv_fprop.0 wrongly"}
    assert wrong == {0, 28}
    assert rows[rows.chosen].engine not in wrong


@pytest.mark.deviceless
def test_building_decides_about_each():
    made = plan(matmul_bias_gelu.function, matmul_bias_gelu.avals)
    built = made.candidates.built()
    assert all(row.supported in (True, False) for row in built)
    assert any(row.supported for row in built)
    assert all(row.supported or row.reason for row in built)
    assert built.chosen == made.candidates.chosen
    again = built.built()
    assert again == built


@pytest.mark.deviceless
def test_candidates_print_as_a_table_and_are_data():
    rows = plan().candidates
    first, header, *lines, legend = str(rows).splitlines()
    assert first == f"{len(rows)} candidates on H200"
    assert header.split()[:6] == ["engine", "A", "B", "FALLBACK", "workspace", "supported"]
    assert len(lines) == len(rows)
    starred = [line for line in lines if line.split()[0].endswith("*")]
    assert [line.split()[1] for line in starred] == [rows[rows.chosen].name]
    assert "plan's own" in legend
    data = json.loads(json.dumps(rows.to_json()))
    assert data[0]["knobs"] == rows[0].knobs
    assert [row["name"] for row in data] == [row.name for row in rows]


@pytest.mark.deviceless
def test_profiles_have_candidates_of_their_own():
    plans = jc.plan(product, *FLOATS, gpus=["A100", "H200"])
    names = {gpu: {row.name for row in made.candidates} for gpu, made in plans.items()}
    assert names["A100"] != names["H200"]
    assert plans["A100"].candidates.gpu == "A100"


# -- one of them -----------------------------------------------------------------------------------


@pytest.mark.deviceless
def test_select_gives_the_plan_of_a_candidate():
    made = plan()
    rows = made.candidates
    assert made.select(rows.chosen) is made
    for row in (rows[1], rows[-1], rows[rows.chosen - 1]):
        chosen = made.select(row.index)
        assert chosen.engine == row.name
        assert chosen.pinned == {"engine": row.engine, "knobs": row.knobs}
        assert chosen.gpu == made.gpu
        assert chosen == made.select(row)
        assert rows.chosen != row.index
        names = [other.name for other in chosen.candidates]
        assert names == [other.name for other in rows], "a choice changes no candidates"
        assert chosen.candidates.chosen == row.index


@pytest.mark.deviceless
def test_a_choice_goes_into_functions_and_wrapped_graphs():
    made = plan()
    other = next(row for row in made.candidates if row.index != made.candidates.chosen)
    pinned = made.select(other).pinned
    assert plan(**pinned).engine == other.name
    with jc.Graph(io_data_type="HALF", inputs=["x"], outputs=["y"]) as graph:
        x = graph.tensor(name="x", dim=[4, 64, 16, 16], stride=[64 * 256, 1, 64 * 16, 64])
        graph.relu(x).set_output(True).set_name("y")
    with jc.target("H200"):
        chosen = graph.plan().select(len(graph.plan().candidates) - 1)
        assert graph.with_options(**chosen.pinned).plan().engine == chosen.engine


@pytest.mark.deviceless
def test_a_wrapped_graph_has_pygraphs_methods_of_candidates():
    with jc.Graph(io_data_type="BFLOAT16", inputs=["a", "b"], outputs=["y"]) as graph:
        a, b = (graph.tensor(name=name, dim=[2, 64, 64]) for name in "ab")
        graph.matmul(a, b).set_output(True).set_name("y")
    with jc.target("H200"):
        rows = graph.plan().candidates
        assert graph.get_execution_plan_count() <= len(rows)
        other = next(row.index for row in rows if row.index != rows.chosen)
        assert graph.get_plan_name_at_index(other) == rows[other].name
        engine, knobs = graph.get_engine_and_knobs_at_index(other)
        assert (engine, knobs) == (rows[other].engine, rows[other].knobs)
        assert graph.get_behavior_notes_for_plan_at_index(other) == rows[other].behavior_notes
        assert graph.get_behavior_notes() == rows[rows.chosen].behavior_notes
        chosen = graph.build_plan_at_index(other)
        assert chosen.engine == rows[other].name
        assert graph.get_workspace_size_plan_at_index(other) == chosen.workspace_bytes
        assert graph.select_plan(other).plan().engine == chosen.engine
        for call in (graph.get_plan_name_at_index, graph.select_plan):
            with pytest.raises(jc.GraphError, match="no such candidate"):
                call(len(rows))


@pytest.mark.deviceless
def test_a_candidate_of_another_mode_can_be_taken():
    made = plan(heuristics="FALLBACK", deselect_behavior_notes="CUBLASLT_DEPENDENCY")
    others = [row for row in made.candidates if "FALLBACK" not in row.modes]
    assert others
    chosen = made.select(others[0])
    assert chosen.engine == others[0].name
    notes = {"deselect_behavior_notes": "CUBLASLT_DEPENDENCY"}
    assert plan(heuristics="FALLBACK", **notes, **chosen.pinned).engine == others[0].name


@pytest.mark.deviceless
def test_what_cannot_be_selected_is_refused_in_words():
    made = plan(deselect_numeric_notes="TENSOR_CORE")
    left_out = next(row for row in made.candidates if row.supported is False)
    with pytest.raises(jc.UnsupportedGraphError, match="cannot be taken") as caught:
        made.select(left_out)
    assert "left out by the options" in str(caught.value)
    for wrong in (1000, "first"):
        with pytest.raises(jc.GraphError, match="no such candidate") as caught:
            made.select(wrong)
        assert repr(wrong) in str(caught.value)


@pytest.mark.deviceless
def test_a_candidate_of_another_graph_is_refused():
    made, other = plan(), plan(product, FLOATS)
    known = {(row.engine, row.knobs) for row in made.candidates}
    foreign = next(r for r in other.candidates if (r.engine, r.knobs) not in known)
    with pytest.raises(jc.GraphError, match="no such candidate") as caught:
        made.select(foreign)
    assert foreign.name in str(caught.value)


@pytest.mark.deviceless
def test_a_cut_graph_has_parts_with_candidates():
    with jc.target("H200"):
        made = jc.plan(two_products, *FLOATS)
    assert len(made.execution_plans) == 2
    with pytest.raises(jc.GraphError, match=r"plan\.parts"):
        _ = made.candidates
    with pytest.raises(jc.GraphError, match=r"plan\.parts"):
        made.select(0)
    parts = made.parts
    assert [part.engine for part in parts] == [own.engine for own in made.execution_plans]
    for part in parts:
        assert part.candidates[part.candidates.chosen].name == part.engine
        other = part.select(len(part.candidates) - 1)
        assert other.spec.outputs == part.spec.outputs
    assert plan().parts == (plan(),)


def test_a_graph_of_xla_alone_has_no_candidates():
    relu = jc.graph(lambda g, x: g.relu(x)).with_options(implementation="xla")
    with jc.target("H200"):
        made = jc.plan(relu, jax.ShapeDtypeStruct((4, 4), "float32"))
    assert made.parts == ()
    with pytest.raises(jc.GraphError, match="not one cuDNN plan") as caught:
        _ = made.candidates
    assert "implementation='xla'" in caught.value.why
    assert "implementation='cudnn'" in caught.value.fix
    assert "parts" not in str(caught.value)


@pytest.mark.deviceless
def test_a_graph_that_is_left_to_xla_says_why():
    product = jc.graph(lambda g, a, b: g.matmul(a, b))
    with jc.target("H200"):
        made = jc.plan(product, *[jax.ShapeDtypeStruct((1, 64, 64), "float32")] * 2)
        left = jc.plan(product.with_options(precision="highest"), *FLOATS)
    assert made.only.engine
    with pytest.raises(jc.GraphError, match="not one cuDNN plan") as caught:
        _ = left.pinned
    assert caught.value.why == left.segments[0].reason
    assert caught.value.why


@pytest.mark.deviceless
def test_candidates_are_values():
    made = plan()
    rows, again = made.candidates, made.candidates
    assert rows == again
    assert hash(rows) == hash(again)
    assert len({*rows, *again}) == len(rows)
    assert pickle.loads(pickle.dumps(rows[0])) == copy.deepcopy(rows[0]) == rows[0]
    assert dict(rows[0].knobs) == rows[0].knobs
    with pytest.raises(TypeError):
        rows[0].knobs["TILE_SIZE"] = 1
    with pytest.raises(TypeError):
        rows[0].modes["A"] = 1


@pytest.mark.deviceless
def test_the_gpu_of_a_plan_is_no_part_of_its_value():
    made = plan()
    assert dataclasses.replace(made, site=None) == made
    with pytest.raises(jc.GraphError, match="plan the function again"):
        _ = dataclasses.replace(made, site=None).candidates


# -- as data ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_graphs_are_written_down_and_read(case):
    spec = case.function.trace(*case.avals)[1].spec
    text = json.dumps(record.encoded(spec))
    again = record.decoded(json.loads(text))
    assert again == spec
    assert intern(again) is intern(spec)


@pytest.mark.parametrize("operation", ["dot_product_attention", "layer_norm"])
def test_derived_graphs_are_written_down_and_read(operation):
    """With what they keep for derivatives, their families, and functions of scores."""
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
    if operation == "layer_norm":
        fn, avals = jc.ops.layer_norm, (x, *[jax.ShapeDtypeStruct((64,), "bfloat16")] * 2)
    else:
        softcap = lambda score, b, h, q, kv: 20 * jax.numpy.tanh(score / 20)  # noqa: E731
        fn = lambda q, k, v: jc.ops.dot_product_attention(q, k, v, score_mod=softcap)  # noqa: E731
        avals = (x, x, x)
    loss = lambda *arrays: fn(*arrays).astype("float32").sum()  # noqa: E731
    found = graphs(jax.grad(loss), avals, {})
    assert len(found) == 2
    for spec in found.values():
        assert record.decoded(json.loads(json.dumps(record.encoded(spec)))) == spec


@pytest.mark.deviceless
def test_a_plan_is_read_as_it_was_written():
    with jc.target("H200"):
        cut = jc.plan(two_products, *FLOATS)
    for made in (plan(), cut, plan().select(1)):
        read = jc.Plan.deserialize(made.serialize())
        assert read == made
        assert read.site is None
        assert str(read.explain()) == str(made.explain())
        assert json.loads(json.dumps(made.to_json())) == json.loads(made.serialize())
        assert read.serialize() == made.serialize()


@pytest.mark.deviceless
def test_what_is_no_plan_is_refused_in_words():
    good = plan().serialize()
    deep = b"[" * 100_000
    for wrong in (b"", b"\xff", b"[]", b'{"kind": 1}', good[:-1], deep, None):
        with pytest.raises(jc.GraphError, match="these bytes are no plan"):
            jc.Plan.deserialize(wrong)
    later = json.loads(good) | {"format": 99}
    with pytest.raises(jc.GraphError, match="another format"):
        jc.Plan.deserialize(json.dumps(later).encode())
    for damage in ({"segments": [{}]}, {"graph": ["os:system", {}]}, {"graph": 3}):
        other = json.loads(good) | damage
        with pytest.raises(jc.GraphError, match="cannot be read"):
            jc.Plan.deserialize(json.dumps(other).encode())


def edited(content, path, value):
    """Serialized content with one value changed."""
    data = json.loads(content)
    *most, last = path
    place = data
    for key in most:
        place = place[key]
    place[last] = value
    return json.dumps(data).encode()


GRAPH = ("graph", 1)  # its fields; each tuple is ["tuple", [...]]
TENSOR = (*GRAPH, "tensors", 1, 0, 1)
OWN = ("segments", 0, "plan")


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ((*TENSOR, "shape"), ["tuple", ["64", 128]], "Tensor.shape"),
        ((*TENSOR, "shape"), 64, "Tensor.shape"),
        ((*TENSOR, "dtype"), 3, "Tensor.dtype"),
        ((*TENSOR, "dtype"), "bfloat17", "bfloat17"),
        ((*TENSOR, "name"), "other", "no tensor"),
        ((*GRAPH, "inputs"), ["tuple", [1]], "GraphSpec.inputs"),
        ((*OWN, "workspace_bytes"), "0", "workspace_bytes"),
        ((*OWN, "workspace_bytes"), True, "workspace_bytes"),
        ((*OWN, "text"), None, "ExecutionPlan.text"),
        ((*OWN, "bindings"), [["1", 0, 0, 0]], "bindings"),
        ((*OWN, "scalars"), 3, "plan cannot be read"),
        (("segments", 0, "calls"), ["0"], "PlannedSegment.calls"),
        (("segments", 0, "plan"), [], "plan cannot be read"),
        (("name",), 3, "Plan.name"),
    ],
    ids=str,
)
def test_a_plan_with_values_of_other_types_is_refused_in_words(path, value, word):
    with pytest.raises(jc.GraphError, match="this plan cannot be read") as caught:
        jc.Plan.deserialize(edited(plan().serialize(), path, value))
    assert word in str(caught.value)


def test_numbers_that_json_has_not_are_texts():
    hidden = jc.graph(lambda g, x: g.max(x, -jax.numpy.inf))
    x = jax.ShapeDtypeStruct((8, 8, 8), "float32")
    with jc.target("H200"):
        made = jc.plan(hidden.with_options(implementation="xla"), x)
    text = json.dumps(made.to_json(), allow_nan=False)
    assert json.loads(text) == json.loads(made.serialize())
    assert jc.Plan.deserialize(made.serialize()) == made
    for number in (float("inf"), -float("inf")):
        assert record.decoded(json.loads(json.dumps(record.encoded((number,))))) == (number,)
    assert record.encoded(float("nan")) == ["float", "nan"]


NO_VALUES = (
    "os:system",
    "_core.package:version",
    "_core.graph.spec:intern",
    "_core.planning.selection:Plan",  # of another module
    "_core.planning.progress:Clock",  # not frozen
)


@pytest.mark.parametrize("title", NO_VALUES)
def test_reading_a_graph_runs_nothing_but_its_classes(title):
    with pytest.raises(ValueError, match=title):
        record.decoded([title, {}])
    with pytest.raises(TypeError, match="cannot be written down"):
        record.encoded(jax.numpy.ones(3))
