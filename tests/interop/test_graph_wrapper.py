"""``jc.Graph``: cuDNN's wrapper for JAX arrays. What it builds is a graph function's spec."""

import copy
import gc
import json
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import same, spec_of
from jax.experimental.layout import Format, Layout

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry

SPATIAL = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
X = jax.random.normal(jax.random.key(0), (2, 16, 6, 5))
W = jax.random.normal(jax.random.key(1), (8, 16, 3, 3))
B = jax.random.normal(jax.random.key(2), (1, 8, 1, 1))


@jc.graph
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, **SPATIAL), b))


def built(x=X, w=W, b=B, **options):
    """The same, as a Graph with every kind of name."""
    with jc.Graph(**options) as graph:
        conv = graph.conv_fprop(x, weight=w, **SPATIAL, name="conv2d")
        y = graph.relu(graph.bias(input=conv, bias=b))
        y.set_output(True).set_name("out").set_uid(77)
    return graph


def difference(**options):
    """Inputs 1 and 2, of which the first minus the second is uid 3."""
    with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"], **options) as graph:
        a, b = (graph.tensor([3], data_type="FLOAT", name=n) for n in "ab")
        graph.sub(a, b, name="s").set_output(True)
    return graph


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["conv2d::image", "conv2d::weight", "bias.0::bias"], ["relu.0::OUT_0"]),
        (["conv2d::0", "conv2d::1", "bias.0::1"], ["out"]),
        ([1, np.int64(2), 4], [77]),
        ([X, W, B], ["RELU.0::out_0"]),
    ],
)
def test_every_kind_of_reference_given_first_or_afterwards(inputs, outputs):
    afterwards = built()
    afterwards.set_io_tuples(inputs, outputs)
    for graph in (built(inputs=inputs, outputs=outputs), afterwards):
        same(graph(X, W, B, handle="any", workspace=None), conv_bias_relu(X, W, B))


def test_tensors_refer_to_themselves_and_are_found():
    with jc.Graph(io_data_type="FLOAT") as graph:
        x = graph.tensor(name="X", dim=[4, 8])
        y = graph.sub(graph.exp(x), graph.tensor_like(jnp.ones((4, 8)), name="Z"))
        both = (x + y).set_output(True)
        y.set_output(True).set_uid(50).set_uid(9).set_name("y")
    graph.set_io_tuples(["Z", x], [both, y])
    a, b = jnp.full((4, 8), 3.0), jnp.full((4, 8), 0.5)
    first, second = graph(a, b)
    same(first, b + jnp.exp(b) - a)
    same(second, jnp.exp(b) - a)
    assert graph.find_tensor("y") is graph.find_tensor(np.int32(9)) is graph.get_outputs()[1]
    assert graph.query_tensor_attributes_of_uid(9) is y
    assert graph.get_node("exp.0").inputs == {"input": x}
    assert graph.get_node("exp.1") is None
    for uids in ((2, 3, 1), (None, 1, 100)):  # those that are given stay
        with jc.Graph(io_data_type="FLOAT") as graph:
            given = [graph.tensor(name=n, dim=[2], uid=u) for n, u in zip("xyz", uids, strict=True)]
            graph.add(graph.add(given[0], given[1]), given[2]).set_output(True).set_uid(4)
        made = [tensor.get_uid() for tensor in given]
        assert [uid for uid in made if uid in uids] == [uid for uid in uids if uid]
        assert len({*made, 4}) == 4


def test_no_operation_is_hidden_by_a_method():
    own = {name for kind in jc.Graph.__mro__[:-1] for name in vars(kind)}
    assert not own & {*registry()}
    assert {*registry()} <= {*dir(jc.Graph())}


def test_dictionaries_give_new_ones_of_any_keys():
    graph = built()
    given = {"conv2d::image": X, 2: W, "bias.0::bias": B, "step": 3, "conv2d::Y": None}
    result = graph(given)
    assert [*result] == [*given, "relu.0::OUT_0"]
    assert result["conv2d::image"] is X
    same(result["relu.0::OUT_0"], conv_bias_relu(X, W, B))
    graph, x, y = difference(), jnp.full(3, 2.0), jnp.ones(3)
    a, _ = graph.get_inputs()
    same(jax.jit(lambda x, y: graph({2: y, a: x})["s::OUT_0"])(x, y), x - y)


def test_one_input_has_one_value():
    a, b = jnp.ones(3), jnp.full(3, 5.0)
    for declared in (False, True):
        with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"]) as graph:
            one = graph.tensor(dim=[3], data_type="FLOAT") if declared else a
            graph.add(one, one, name="s").set_output(True)
        same(graph(b, b), 2 * b)
        same(graph({"s::a": b, "s::b": b})["s::OUT_0"], 2 * b)
        same(jax.jit(lambda x, graph=graph: graph(x, x))(b), 2 * b)
        for call in (lambda: graph(a, b), lambda: jax.jit(graph)(b, b)):
            with pytest.raises(jc.GraphError, match="for s::a and s::b when the graph"):
                call()
    with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"]) as graph:
        graph.add(graph.tensor_like(a), graph.tensor_like(a), name="s").set_output(True)
    same(jax.jit(graph)(a, b), a + b)


def test_the_order_of_a_graph_that_was_called_stays():
    graph, x, y = difference(), jnp.full(3, 2.0), jnp.ones(3)
    graph.set_io_tuples(["s::b", "s::a"], ["s::OUT_0"])
    jitted = jax.jit(graph)
    same(jitted(x, y), y - x)
    with pytest.raises(jc.GraphError, match=r"with_options\(\)"):
        graph.set_io_tuples(["s::a", "s::b"], ["s::OUT_0"])
    other = graph.with_options()
    other.set_io_tuples(["s::a", "s::b"], ["s::OUT_0"])
    same(jax.jit(other)(x, y), x - y)
    same(jitted(x, y), y - x)


def test_a_supplied_output_gives_shape_and_dtype():
    graph, want = built(), conv_bias_relu(X, W, B)
    for shape in ((2, 8, 30), (480,), (2, 2, 4, 6, 5)):
        buffer = np.zeros(shape, np.float16)
        result = graph({1: X, 2: W, 4: B, "out": buffer})["out"]
        assert (result.shape, result.dtype) == (shape, jnp.float16)
        assert not buffer.any()
        np.testing.assert_allclose(result, want.reshape(shape), rtol=1e-2, atol=1e-2)
    for *wrong, words in (
        ((2, 6, 5, 8), "float32", "another shape"),
        ((2, 8, 6, 5), "int32", "cannot hold it"),
    ):
        with pytest.raises(jc.JaxCudnnError, match=words):
            graph({1: X, 2: W, 4: B, 77: jax.ShapeDtypeStruct(*wrong)})


def test_strides_are_memory_order_unless_they_say_the_usual():
    with jc.Graph(io_data_type=np.float32) as graph:
        x = graph.tensor(dim=[2, 16, 6, 5], stride=[480, 1, 80, 16])
        w = graph.tensor(dim=[8, 16, 3, 3], stride=[144, 1, 48, 16])
        y = graph.conv_fprop(x, w, **SPATIAL)
        y = graph.relu(graph.bias(y, graph.tensor(dim=[1, 8, 1, 1], stride=[8, 1, 8, 8])))
        y.set_output(True).set_stride([240, 1, 40, 8])
    assert (
        graph.spec.canonical()
        is built().spec.canonical()
        is spec_of(conv_bias_relu.fn, X, W, B).canonical()
    )


class Foreign:
    """An array of another library: torch's has ``stride()`` in elements, CuPy's ``strides`` in
    bytes; the rest have only DLPack."""

    def __init__(self, array, dtype=None, elements=False):
        self.array, self.shape, self.dtype = array, array.shape, dtype or array.dtype
        self.itemsize = array.itemsize
        if elements:
            self.stride = lambda: tuple(step // array.itemsize for step in array.strides)
        else:
            self.strides = array.strides

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


ROWS = np.ones((2, 6, 8), np.float32)
COLUMNS = np.ones((2, 8, 6), np.float32).transpose(0, 2, 1)


@pytest.mark.parametrize(
    ("template", "order"),
    [
        (jax.device_put(ROWS, Format(Layout((0, 2, 1)), jnp.ones(1).sharding)), (0, 2, 1)),
        (ROWS.astype(np.float64), None),
        (COLUMNS, (0, 2, 1)),
        (Foreign(COLUMNS), (0, 2, 1)),
        (Foreign(COLUMNS, "torch.float32", elements=True), (0, 2, 1)),
        (Foreign(np.ones((2, 12, 8), np.float32)[:, ::2]), None),
    ],
)
def test_templates_say_shape_dtype_and_order(template, order):
    with jc.Graph() as graph:
        y = graph.matmul(template, jnp.ones((2, 8, 4))).set_output(True)
    tensor = graph.spec.input_tensors[0]
    assert (tensor.shape, tensor.dtype, tensor.order) == ((2, 6, 8), "float32", order)
    graph.set_io_tuples([template, "matmul.0::B"], [y])
    same(graph(Foreign(ROWS), np.ones((2, 8, 4), np.float32)), jnp.full((2, 6, 4), 8.0))


def test_tracers_are_templates_and_arrays_are_not_kept():
    graphs = []

    @jax.jit
    def f(x, w, b):
        graphs.append(built(x, w, b, inputs=[x, w, b], outputs=["out"]))
        return graphs[0](x, w, b)

    with jax.checking_leaks():
        same(f(X, W, B), conv_bias_relu(X, W, B))
    assert graphs[0].spec.canonical() is spec_of(conv_bias_relu.fn, X, W, B).canonical()
    jax.vmap(jax.grad(lambda x, w, b: f(x, w, b).sum()), (None, None, 0))(X, W, jnp.stack([B, B]))
    x = X + 1
    graph, alive = built(x, inputs=[x, W, B], outputs=["out"]), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    same(graph(X, W, B), conv_bias_relu(X, W, B))


def test_it_prints_as_json():
    data = json.loads(str(built(io_data_type="FLOAT")))
    assert data["nodes"][1]["inputs"]["input"] == data["nodes"][0]["outputs"]["Y"] == "conv2d::Y"
    tensor = data["tensors"]["out"]
    assert (tensor["uid"], tensor["data_type"], tensor["stride"]) == (77, "FLOAT", [240, 1, 40, 8])
    with jc.Graph() as graph:  # numbers, infinite ones too
        graph.max(graph.relu(X, lower_clip=np.float32(0.5)), -jnp.inf).set_output(True)
    relu, largest = json.loads(graph.to_json())["nodes"]
    assert (relu["lower_clip"], "-inf" in largest["inputs"].values()) == (0.5, True)


def test_copies_have_separate_tensors():
    with jc.Graph(io_data_type="HALF", inputs=["x"], outputs=["y"]) as graph:
        inner = graph.exp(graph.tensor(name="x", dim=[4, 8]), name="e")
        graph.neg(inner).set_output(True).set_name("y")
    before = graph.spec.canonical(), str(graph), inner.dtype
    other = graph.with_options()
    other.set_io_tuples(["x"], ["y", inner])
    kept = other.get_outputs()[1]
    assert (kept.get_is_virtual(), inner.get_is_virtual()) == (False, True)
    assert kept.get_data_type() == other(jnp.ones((4, 8), "float16"))[1].dtype
    assert other.find_tensor(inner) is kept
    assert graph.find_tensor(kept) is inner
    assert (graph.with_options().spec.canonical(), str(graph), inner.dtype) == before
    for other in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert (other.spec, str(other)) == (graph.spec, str(graph))
        same(other(jnp.ones((4, 8), "float16")), graph(jnp.ones((4, 8), "float16")))


Q = [jnp.ones((1, 1, 8, 8))] * 3
SEED = jnp.ones((1, 1, 1, 1))
Error, Type, Attribute = jc.GraphError, jc.GraphTypeError, jc.GraphAttributeError


def used(g):
    x = g.tensor(dim=[4], data_type="FLOAT")
    g.exp(x).set_output(True)
    return x


BUILDING = [
    (lambda g: g.exp(X), Error, "set_output"),
    (lambda g: [used(g), g.set_io_tuples([X], [g.log(X)])], Error, "not listed"),
    (lambda g: [used(g), g.set_io_tuples(["exp.0::inptu"], [])], Error, "'exp.0::input'"),
    (lambda g: [g.exp(X).set_uid(9), g.log(X).set_uid(9)], Error, "two tensors"),
    (lambda g: g.exp(g.tensor(dim=[4])), Error, "io_data_type"),
    (lambda g: used(g).set_dim([5]), Error, "after it was"),
    (lambda g: used(g).set_data_type("HALF"), Error, "before an operation uses"),
    (lambda g: g.tensor(dim=[4, 4], stride=[2, 1], data_type="FLOAT"), Error, "overlap"),
    (lambda g: g.conv_forward(X), Attribute, "did you mean"),
    (lambda g: g.sdpa(*Q, dropout=(0.5, SEED, SEED)), Type, "jax.random.key_data"),
    (lambda g: g.sdpa(*Q, attn_scale=jnp.float32(0.5)), Type, "multiply q by it"),
    (lambda g: g.sdpa(*Q, use_padding_mask=True), Error, "seq_len_q and seq_len_kv"),
]


@pytest.mark.parametrize(("build", "kind", "words"), BUILDING)
def test_errors_while_building(build, kind, words):
    with pytest.raises(kind) as caught, jc.Graph() as graph:
        build(graph)
    caught.value.where = None  # the line itself, which holds the words
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda g: g(X, W), Type, "3: conv2d::image"),
        (lambda g: g(X[:1], W, B), Error, "graph_cache"),
        (lambda g: g(X.astype("bfloat16"), W, B), Type, "bfloat16"),
        (lambda g: g({"conv2d::inptu": X}), Error, "'conv2d::inptu'"),
        (lambda g: built()(X, W, B), Error, "set_io_tuples"),
        (lambda g: jc.Graph()(X), Error, "is not built"),
    ],
)
def test_errors_of_calls(call, kind, words):
    with pytest.raises(kind, match=words):
        call(built(inputs=[X, W, B], outputs=["out"]))
