"""Names of a ``jc.Graph`` beside those of cuDNN's own, and what its wrong use raises."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning import frontend

SPATIAL = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
X, W, B = jnp.ones((2, 16, 6, 5)), jnp.ones((8, 16, 3, 3)), jnp.ones((1, 8, 1, 1))
Q = [jnp.ones((1, 1, 8, 8))] * 3
Error, Type, Attribute = jc.GraphError, jc.GraphTypeError, jc.GraphAttributeError


def built(**options):
    with jc.Graph(**options) as graph:
        y = graph.bias(graph.conv_fprop(X, W, **SPATIAL, name="conv"), B)
        graph.relu(y).set_output(True).set_name("out").set_uid(77)
    return graph


# Names of cuDNN's frontend that a Graph and its tensors have not: the keys of inspect()'s context,
# kernels in Python, operations that no node is for, and how the frontend keeps its tensors.
ABSENT = re.compile(
    r"_.*|context|(gdn2?|gdp|kda|mamba2)(_\w+)?|moe_\w+|block_scale_\w+|rope(_backward)?"
    r"|owner|scalar_type|\w+_assigned|alignment_value"
)


def answers(thing, name):
    """Whether a name is there, if only with words about what to do instead."""
    try:
        getattr(thing, name)
    except jc.GraphAttributeError as error:
        return error.fix is not None and "did you mean" not in error.fix
    except AttributeError:
        return False
    return True


@pytest.mark.deviceless
def test_names_of_the_frontends_graphs_and_tensors_are_there_or_said_why_not():
    cudnn, graph = frontend.load(), built()
    theirs, tensor = cudnn.pygraph(), graph.find_tensor("out")
    tensors = {*dir(theirs.tensor(dim=[4], stride=[1])), *dir(cudnn.tensor)}
    missing = {n for n in dir(theirs) if n not in REGISTRY and not answers(graph, n)}
    missing |= {*dir(cudnn.Graph)} - {*dir(graph)} | {n for n in tensors if not answers(tensor, n)}
    assert not {name for name in missing if not ABSENT.fullmatch(name)}


def e(g):
    return g.exp(X, name="e").set_output(True)


def vector(g, **options):
    return g.tensor(dim=[4], data_type="FLOAT", **options)


def used(g):
    x = vector(g)
    g.exp(x).set_output(True)
    return x


SEED = jnp.ones((1, 1, 1, 1))
BUILDING = [
    # references
    (lambda g: g.exp(X), Error, "set_output"),
    (lambda g: [e(g), g.set_io_tuples([X], [g.log(X)])], Error, "not listed"),
    (lambda g: [e(g), g.set_io_tuples(["e::inptu"], [])], Error, "did you mean 'e::input'"),
    (lambda g: [g.exp(X, name="a"), g.log(X, name="a")], Error, "two nodes are called 'a'"),
    (lambda g: [g.exp(X).set_uid(9), g.log(X).set_uid(9)], Error, "two tensors"),
    # tensors
    (lambda g: vector(g).set_output(True), Error, "identity"),
    (lambda g: g.exp(g.tensor(dim=[4])), Error, "io_data_type"),
    (lambda g: used(g).set_dim([5]), Error, "after it was"),
    (lambda g: used(g).set_data_type("HALF"), Error, "before an operation takes"),
    (lambda g: vector(g, is_pass_by_value=True), Error, "one element"),
    (lambda g: g.tensor(dim=[4, 4], stride=[8, 1], data_type="FLOAT"), Error, "pack"),
    (lambda g: g.exp(jax.ShapeDtypeStruct((4,), "float64")), Type, "float64"),
    # operations
    (lambda g: g.conv_fprop(X, W[:, :3], **SPATIAL), Error, "conv_fprop"),
    (lambda g: g.conv_forward(X), Attribute, "did you mean"),
    (lambda g: g.sdpa(*Q, dropout=(0.5, SEED, SEED)), Type, "jax.random.key_data"),
    (lambda g: g.sdpa(*Q, attn_scale=jnp.float32(0.5)), Type, "multiply q by it"),
    (lambda g: g.sdpa(*Q, use_padding_mask=True), Error, "seq_len_q and seq_len_kv"),
]


@pytest.mark.parametrize(("build", "kind", "words"), BUILDING)
def test_errors_while_building(build, kind, words):
    with pytest.raises(kind) as caught, jc.Graph() as graph:
        build(graph)
    assert words in str(caught.value)


CALLS = [
    (lambda g: g(X, W), Type, "3: conv::image"),
    (lambda g: g(X[:1], W, B), Error, "graph_cache"),
    (lambda g: g(X.astype("bfloat16"), W, B), Type, "bfloat16"),
    (lambda g: g({"conv::inptu": X}), Error, "'conv::inptu'"),
    (lambda g: built()(X, W, B), Error, "set_io_tuples"),
    (lambda g: jc.Graph()(X), Error, "is not built"),
]


@pytest.mark.parametrize(("call", "kind", "words"), CALLS)
def test_errors_of_calls(call, kind, words):
    with pytest.raises(kind) as caught:
        call(built(inputs=[X, W, B], outputs=["out"]))
    assert words in str(caught.value)


def test_an_error_leaves_nothing_built():
    graph = jc.Graph(inputs=["exp.0::inptu"], outputs=["exp.0::OUT_0"])
    with pytest.raises(Error, match="did you mean"), graph:
        graph.exp(X).set_output(True)
    with pytest.raises(Error, match="is not built"):
        graph({"exp.0::input": X})
    with graph:
        graph.log(X).set_output(True)
        for early in (lambda: graph(X), lambda: graph.spec, graph.with_options):
            with pytest.raises(Error, match="being built"):
                early()
        graph.set_io_tuples(["log.0::input"], ["log.0::OUT_0"])
    assert [node["tag"] for node in json.loads(str(graph))["nodes"]] == ["LOG"]
