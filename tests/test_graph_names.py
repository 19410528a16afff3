"""``jc.Graph`` beside cuDNN's own: its names, what it ignores, copies, and what changes late."""

import copy
import importlib.util
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning import frontend

X = jnp.arange(-8.0, 24.0).reshape(4, 8)
needs_frontend = pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed"
)


def relu():
    with jc.Graph(inputs=["r::input"], outputs=["y"]) as graph:
        graph.relu(input=X, name="r").set_output(True).set_name("y")
    return graph


# Names of cuDNN's frontend that a Graph has not, and why.
NOT_IN_GRAPHS = {
    r"context": "the keys of inspect()['context']",
    r"(gdn2?|gdp|kda|mamba2)(_\w+)?": "kernels of the frontend's own in Python",
    r"moe_\w+|block_scale_\w+|rope(_backward)?": "operations that no node is for",
}
NOT_IN_TENSORS = {
    r"owner|scalar_type|\w+_assigned|alignment_value": "how the frontend keeps its tensors",
}


def without(names, ours, reasons):
    missing = {name for name in names if not name.startswith("_")} - ours
    return {name for name in missing if not any(re.fullmatch(r, name) for r in reasons)}


def answers(thing, name):
    """Whether a name is there, if only with words about what to do instead."""
    try:
        getattr(thing, name)
    except jc.GraphAttributeError as error:
        return error.fix is not None and "did you mean" not in error.fix
    except AttributeError:
        return False
    return True


@needs_frontend
def test_names_of_the_frontends_graphs_and_tensors_are_there_or_said_why_not():
    cudnn = frontend.load()
    theirs = cudnn.pygraph()
    graph = relu()
    have = {n for n in dir(theirs) if n in REGISTRY or answers(graph, n)}
    assert not without(dir(theirs), have, NOT_IN_GRAPHS)
    assert not without(dir(cudnn.Graph), {*dir(graph)}, NOT_IN_GRAPHS)
    tensor = graph.find_tensor("y")
    for kind in (theirs.tensor(dim=[4], stride=[1]), cudnn.tensor):
        there = {name for name in dir(kind) if answers(tensor, name)}
        assert not without(dir(kind), there, NOT_IN_TENSORS)


def test_a_graph_shows_its_nodes_and_tensors():
    graph = relu()
    (node,) = graph.nodes
    assert graph.get_node("r") == node
    assert graph.get_node("s") is None
    assert (node.name, node.method, node.params) == ("r", "relu", {})
    assert node.outputs["OUT_0"] is graph.tensors["y"] is graph.find_tensor("y")
    assert [*graph.tensors] == ["r::input", "y"]
    y = graph.tensors["y"]
    assert (y.dim, y.stride, y.data_type, y.is_virtual) == ([4, 8], [8, 1], np.float32, False)
    assert (y.is_pass_by_value, y.pass_by_value, y.ragged_offset) == (False, None, None)
    assert (y.reordering_type, y.ragged_offset_multiplier) == ("NONE", 1)
    assert graph.inspect()["nodes"][0]["name"] == "r"


def test_json_has_numbers_as_numbers():
    with jc.Graph() as graph:
        y = graph.conv_fprop(
            X.reshape(1, 8, 4, 1), jnp.ones((8, 8, 1, 1)), padding=np.zeros(2, np.int64)
        )
        graph.relu(y, lower_clip=np.float32(0.5)).set_output(True)
    conv, relu = json.loads(str(graph))["nodes"]
    assert conv["pre_padding"] == [0, 0]
    assert relu["lower_clip"] == 0.5


# -- dictionaries ----------------------------------------------------------------------------------


def test_what_a_dictionary_holds_besides_is_handed_on():
    with jc.Graph() as graph:
        inner = graph.relu(X, name="r")
        graph.exp(inner, name="e").set_output(True)
    given = {"r::input": X, "step": 3, "r::OUT_0": None, 99: "other"}
    got = graph(given)
    np.testing.assert_allclose(got.pop("e::OUT_0"), np.exp(np.maximum(X, 0)), rtol=1e-6)
    assert got == given


def test_a_misspelled_input_is_missing_and_named():
    with pytest.raises(jc.GraphError, match=r"inputs are missing(.|\n)*'r::inptu'"):
        relu()({"r::inptu": X})


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))]
)
def test_copies_are_graphs_of_their_own(copied):
    graph = relu()
    other = copied(graph)
    np.testing.assert_array_equal(other(X), graph(X))
    assert other.spec is graph.spec
    assert str(other) == str(graph)
    by_name = copied(graph)
    np.testing.assert_array_equal(by_name({"r::input": X})["r::OUT_0"], np.maximum(X, 0))


@jc.graph_cache
def cached(x):
    return relu()


def test_a_cache_is_pickled_as_functions_are():
    assert pickle.loads(pickle.dumps(cached)) is cached
    assert copy.deepcopy(cached) is cached


# -- what changes late -----------------------------------------------------------------------------


def test_later_operations_follow_a_type_that_changes_late():
    halves = jnp.ones((4, 8, 8), jnp.bfloat16)
    with jc.Graph() as graph:
        y = graph.add(jnp.ones((4, 8, 8)), 1.0)
        z = graph.relu(y)
        y.set_data_type("bfloat16")
        assert z.get_data_type() == jnp.bfloat16
        graph.matmul(z, halves).set_output(True)  # operands of one type
    assert graph.spec.output_tensors[0].dtype == "bfloat16"


def test_types_in_which_operations_compute_and_numbers_follow_too():
    bytes_ = jnp.ones((4, 8, 8), jnp.int8)
    with jc.Graph() as graph:
        y = graph.add(jnp.ones((4, 8, 8)), 1.0)
        product, more = graph.matmul(y, bytes_), graph.add(y, 1)
        y.set_data_type("int8")
        product.set_output(True)
        more.set_output(True)
    assert [tensor.dtype for tensor in graph.spec.output_tensors] == ["int32", "int8"]
    (matmul,) = (node for node in graph.inspect()["nodes"] if node["tag"] == "MATMUL")
    assert matmul["compute_data_type"] == "INT32"


def test_a_shape_that_is_given_late_is_that_of_later_operations():
    with jc.Graph() as graph:
        total = graph.reduction(X, mode="ADD")
        y = graph.relu(total)
        total.set_dim([4, 1])
        assert y.get_dim() == [4, 1]
        graph.add(X, y).set_output(True)
    assert graph.spec.output_tensors[0].shape == (4, 8)


# -- the types of results --------------------------------------------------------------------------


def statistics(g):
    x = g.tensor(name="x", dim=[8, 16, 1, 1])
    scale = g.tensor(name="scale", dim=[1, 16, 1, 1])
    epsilon = g.tensor(name="epsilon", dim=[1, 1, 1, 1], data_type="FLOAT", is_pass_by_value=True)
    return g.rmsnorm(norm_forward_phase="TRAINING", input=x, scale=scale, epsilon=epsilon)


def test_statistics_are_float32_whatever_the_graphs_type():
    with jc.Graph(io_data_type="HALF") as graph:
        for result in statistics(graph):
            result.set_output(True)
    assert [str(tensor.dtype) for tensor in graph.get_outputs()] == ["float16", "float32"]


@needs_frontend
def test_a_comparison_is_a_number_to_what_computes_with_it():
    cudnn = frontend.load()
    kinds = dict.fromkeys(("io_data_type", "intermediate_data_type"), cudnn.data_type.FLOAT)
    g = cudnn.pygraph(compute_data_type=cudnn.data_type.FLOAT, **kinds)
    x, y = (g.tensor(name=name, dim=[4, 8], stride=[8, 1]) for name in "xy")
    above = g.cmp_gt(x, y)
    masked = g.mul(above, x)
    picked = g.binary_select(above, y, above)
    for result, name in ((masked, "masked"), (picked, "picked")):
        result.set_output(True).set_name(name)
    function = jc.from_pygraph(g, inputs=[x, y], outputs=["masked", "picked"])
    got = function(X, 0 * X + 3)
    np.testing.assert_array_equal(got[0], np.where(X > 3, X, 0))
    np.testing.assert_array_equal(got[1], np.where(X > 3, 1, 3))


# -- references that are numbers, and words for what is none ---------------------------------------


def numbered():
    with jc.Graph(inputs=["r::input"], outputs=["r::OUT_0"]) as graph:
        x = graph.tensor([4, 8], data_type="FLOAT", name="x", uid=1)
        graph.relu(x, name="r").set_output(True).set_uid(2)
    return graph


def test_uids_are_numbers_of_numpy_too():
    graph, x = numbered(), jnp.ones((4, 8))
    assert {*graph({np.int64(1): x})} == {1, 2}
    assert graph.find_tensor(np.int32(2)) is graph.find_tensor(2)
    with pytest.raises(jc.GraphError, match="no tensor"):
        graph.find_tensor(True)


def test_uids_alone_go_through_jit():
    graph, x = numbered(), jnp.full((4, 8), -1.0)
    result = jax.jit(graph)({1: x})
    assert {*result} == {*graph({1: x})} == {1, 2}
    assert float(result[2].max()) == 0
    assert {*graph({"x": x})} == {"x", "r::OUT_0"}


@pytest.mark.parametrize("uid", [None, 1.7, "a", True])
def test_a_uid_is_an_integer(uid):
    with pytest.raises(jc.GraphTypeError, match="set_uid") as caught, jc.Graph() as graph:
        graph.tensor([4, 8], data_type="FLOAT").set_uid(uid)
    assert "an integer" in str(caught.value)


def test_a_name_is_a_text():
    with pytest.raises(jc.GraphTypeError, match="name is no text"):
        jc.Graph(name=5)


def test_integers_and_truths_keep_their_dtype_beside_io_data_type():
    with jc.Graph(io_data_type="HALF") as graph:
        x = graph.tensor([4, 8], data_type="INT32")
        results = graph.add(x, 1), graph.cmp_gt(x, 1), graph.add(x, 1).set_data_type("HALF")
        for result in results:
            result.set_output(True)
    assert [t.dtype for t in graph.spec.output_tensors] == ["int32", "bool", "float16"]
