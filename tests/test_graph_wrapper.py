"""``jc.Graph``: cuDNN's wrapper for JAX arrays. What it builds is a graph function's spec."""

import gc
import itertools
import json
import weakref

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz.graphs import random_graph
from jax.experimental.layout import Format, Layout

import jax_cudnn as jc
from jax_cudnn._core.graph.calls import signature
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn.interop.canonical import with_usual_orders

SPATIAL = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
X = jax.random.normal(jax.random.key(0), (2, 16, 6, 5))
W = jax.random.normal(jax.random.key(1), (8, 16, 3, 3))
B = jax.random.normal(jax.random.key(2), (1, 8, 1, 1))


@jc.graph
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, **SPATIAL), b))


def built(x=X, w=W, b=B, **options):
    """The same as a Graph, with every kind of name."""
    with jc.Graph(**options) as graph:
        conv = graph.conv_fprop(x, weight=w, **SPATIAL, name="conv2d")
        y = graph.relu(graph.bias(input=conv, bias=b))
        y.set_output(True).set_name("out").set_uid(77)
    return graph


def same(got, want):
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-5, atol=1e-5
    )


# -- references and calls --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["conv2d::image", "conv2d::weight", "bias.0::bias"], ["relu.0::OUT_0"]),
        (["conv2d::0", "conv2d::1", "bias.0::1"], ["out"]),
        ([1, 2, 4], [77]),
        ([X, W, B], ["RELU.0::out_0"]),
    ],
)
@pytest.mark.parametrize("when", ["given", "inside", "afterwards"])
def test_every_kind_of_reference_at_any_time(inputs, outputs, when):
    with jc.Graph(**({"inputs": inputs, "outputs": outputs} if when == "given" else {})) as graph:
        y = graph.conv_fprop(X, weight=W, **SPATIAL, name="conv2d")
        y = graph.relu(graph.bias(input=y, bias=B))
        y.set_output(True).set_name("out").set_uid(77)
        if when == "inside":
            graph.set_io_tuples(inputs, outputs)
    if when == "afterwards":
        graph.set_io_tuples(inputs, outputs)
    same(graph(X, W, B, handle="any", workspace=None), conv_bias_relu(X, W, B))


def test_tensors_refer_to_themselves_and_order_is_free():
    with jc.Graph(io_data_type="FLOAT") as graph:
        x = graph.tensor(name="X", dim=[4, 8])
        y = graph.sub(graph.exp(x), graph.tensor_like(jnp.ones((4, 8)), name="Z"))
        both = x + y
        both.set_output(True)
        y.set_output(True)
    graph.set_io_tuples(["Z", x], [both, y])
    a, b = jnp.full((4, 8), 3.0), jnp.full((4, 8), 0.5)
    first, second = graph(a, b)
    same(first, b + jnp.exp(b) - a)
    same(second, jnp.exp(b) - a)
    assert [t.get_is_virtual() for t in (x, y, both)] == [False] * 3


def test_tensors_are_found():
    graph = built(io_data_type="FLOAT")
    out = graph.find_tensor("out")
    assert out is graph.query_tensor_attributes_of_uid(77) is graph.get_outputs()[0]
    assert (out.get_name(), out.get_uid(), out.get_dim()) == ("out", 77, [2, 8, 6, 5])
    assert (out.get_data_type(), out.get_is_pass_by_value()) == (np.float32, False)
    assert [t.get_name() for t in graph.get_inputs()] == [
        "conv2d::image",
        "conv2d::weight",
        "bias.0::bias",
    ]


def test_a_mask_does_not_make_chosen_integers_floats():
    x, mask = jnp.arange(6, dtype="int32"), jnp.arange(6) % 2 == 0
    with jc.Graph(inputs=["s::input0", "s::mask"], outputs=["s::OUT_0"]) as graph:
        graph.binary_select(x, 3, mask, name="s")
    got = graph(x, mask)
    assert got.dtype == "int32"
    np.testing.assert_array_equal(got, jnp.where(mask, x, 3))


@pytest.mark.parametrize("uids", [*itertools.permutations([100, 1, 2]), (2, 3, 1), (None, 1, 100)])
def test_uids_that_are_given_stay(uids):
    with jc.Graph(io_data_type="FLOAT") as graph:
        made = [graph.tensor(name=n, dim=[2], uid=uid) for n, uid in zip("xyz", uids, strict=True)]
        out = graph.add(graph.add(made[0], made[1]), made[2]).set_output(True)
        out.set_uid(50).set_uid(4)
    given = [tensor.get_uid() for tensor in made]
    assert [uid for uid in given if uid in uids] == [uid for uid in uids if uid]
    assert len({*given, 4}) == 4
    for tensor in (*made, out):
        assert graph.find_tensor(tensor.get_uid()) is tensor


def test_no_operation_is_hidden_by_a_method():
    own = {name for kind in jc.Graph.__mro__[:-1] for name in vars(kind)}
    assert not own & {*REGISTRY}
    assert {*REGISTRY} <= {*dir(jc.Graph())}


def test_operators_take_arrays_and_numbers():
    x = jnp.arange(1.0, 5.0).reshape(2, 2)
    left, right = jnp.full((2, 2), 3.0), np.full((2, 2), 5.0, np.float32)
    with jc.Graph(inputs=[x, left, right], outputs=["out"]) as graph:
        y = right - left * graph.sqrt(x) / 2
        y.set_output(True).set_name("out")
    same(graph(x, left, right), right - left * jnp.sqrt(x) / 2)


def test_a_dictionary_gives_a_new_one_and_changes_nothing():
    graph = built()
    given = {"conv2d::image": X, 2: W, "bias.0::bias": B}
    result = graph(given)
    assert [*given] == ["conv2d::image", 2, "bias.0::bias"]
    assert [*result] == [*given, "relu.0::OUT_0"]
    assert result["conv2d::image"] is X
    same(result["relu.0::OUT_0"], conv_bias_relu(X, W, B))


def test_dictionaries_of_any_keys_inside_jit():
    x, y = jnp.full(3, 2.0), jnp.ones(3)
    with jc.Graph() as graph:
        graph.sub(x, y, name="s").set_output(True)
    a, b = graph.get_inputs()
    (y_uid,) = (tensor.get_uid() for tensor in graph.get_outputs())
    for keys in (1, 2), (a, b), ("s::a", 2), (a, "s::b"):
        out = y_uid if all(isinstance(key, int) for key in keys) else "s::OUT_0"
        call = jax.jit(lambda *args, keys=keys, out=out: graph(dict(zip(keys, args)))[out])  # noqa: B905
        same(call(x, y), x - y)


def test_a_supplied_output_gives_shape_and_dtype():
    graph = built()
    buffer = np.zeros((2, 8, 30), np.float16)
    result = graph({"conv2d::image": X, "conv2d::weight": W, "bias.0::bias": B, "out": buffer})
    assert (result["out"].shape, result["out"].dtype) == (buffer.shape, buffer.dtype)
    assert not buffer.any()
    assert "relu.0::OUT_0" not in result
    want = conv_bias_relu(X, W, B).reshape(buffer.shape)
    np.testing.assert_allclose(result["out"].astype(jnp.float32), want, rtol=1e-3, atol=1e-3)


def test_it_is_one_function_of_its_arrays_under_every_transformation():
    graph = built(inputs=[X, W, B], outputs=["out"])

    def loss(function):
        return lambda *args: (function(*args) ** 2).sum()

    same(jax.jit(graph)(X, W, B), conv_bias_relu(X, W, B))
    gradients = jax.jit(jax.grad(loss(graph), (0, 1, 2)))(X, W, B)
    jax.tree.map(same, gradients, jax.grad(loss(conv_bias_relu), (0, 1, 2))(X, W, B))
    xs = jnp.stack([X, -X])
    all_at_once = conv_bias_relu(xs.reshape(4, 16, 6, 5), W, B).reshape(2, 2, 8, 6, 5)
    same(jax.vmap(graph, (0, None, None))(xs, W, B), all_at_once)
    tangents = jax.jvp(graph, (X, W, B), (X, W, B))[1]
    same(tangents, jax.jvp(conv_bias_relu, (X, W, B), (X, W, B))[1])
    exported = jax.export.export(jax.jit(graph))(X, W, B)
    same(exported.call(X, W, B), graph(X, W, B))
    named = jax.jit(lambda arrays: graph(arrays)["relu.0::OUT_0"])
    same(named({"conv2d::image": X, "conv2d::weight": W, "bias.0::bias": B}), graph(X, W, B))


# -- what is built ---------------------------------------------------------------------------------


def spec_of(function, *avals):
    return function.trace(*avals)[1].spec.canonical()


def test_the_spec_is_that_of_a_graph_function():
    assert built().spec.canonical() is spec_of(conv_bias_relu, X, W, B)


class Alike:
    """A Graph with the results of a graph function's g: tuples without None, and statistics of
    attention unless they are declined."""

    def __init__(self, graph):
        self.graph = graph

    def __getattr__(self, method):
        def call(*args, **kwargs):
            if "generate_stats" in signature(REGISTRY[method]).parameters:
                kwargs = {"generate_stats": True, **kwargs}
            made = getattr(self.graph, method)(*args, **kwargs)
            return tuple(x for x in made if x is not None) if isinstance(made, list) else made

        return call


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_are_those_of_graph_functions(seed):
    """But for memory orders that only say what is so anyway."""
    drawn = random_graph(seed)
    with jc.Graph(options=drawn.function.options) as graph:
        inputs = [graph.tensor_like(aval) for aval in drawn.avals]
        outputs = drawn.function.fn(Alike(graph), *inputs)
        graph.set_io_tuples(inputs, outputs)
    assert graph.spec.canonical() is with_usual_orders(drawn.spec).canonical()


def test_strides_that_say_the_usual_are_not_stated():
    with jc.Graph(io_data_type=np.float32) as graph:
        x = graph.tensor(dim=[2, 16, 6, 5], stride=[480, 1, 80, 16])
        w = graph.tensor(dim=[8, 16, 3, 3], stride=[144, 1, 48, 16])
        y = graph.conv_fprop(x, w, **SPATIAL)
        y = graph.relu(graph.bias(y, graph.tensor(dim=[1, 8, 1, 1], stride=[8, 1, 8, 8])))
        y.set_output(True).set_stride([240, 1, 40, 8])
    assert graph.spec.canonical() is spec_of(conv_bias_relu, X, W, B)
    assert y.get_stride() == [240, 1, 40, 8]


def test_strides_are_memory_order():
    with jc.Graph(io_data_type="bfloat16", inputs=["A", "B"], outputs=["C"]) as graph:
        a = graph.tensor(name="A", dim=[2, 4, 8])
        b = graph.tensor(name="B", dim=[2, 8, 4], stride=[32, 1, 8])
        c = graph.matmul(a, b).set_name("C").set_stride([16, 1, 4]).set_output(True)
    orders = {tensor.name: tensor.order for tensor in graph.spec.tensors}
    assert orders == {"A": None, "B": (0, 2, 1), "matmul.0::C": (0, 2, 1)}
    assert [t.get_stride() for t in (a, b, c)] == [[32, 8, 1], [32, 1, 8], [16, 1, 4]]
    assert graph(jnp.ones((2, 4, 8), "bfloat16"), jnp.ones((2, 8, 4), "bfloat16")).shape == (
        2,
        4,
        4,
    )


class Foreign:
    """An array of another library: torch's has ``stride()`` in elements, CuPy's ``strides`` in
    bytes."""

    def __init__(self, array, dtype=None, elements=False):
        self.shape, self.dtype = array.shape, dtype or array.dtype
        self.itemsize = array.itemsize
        if elements:
            self.stride = lambda: tuple(step // array.itemsize for step in array.strides)
        else:
            self.strides = array.strides


class Exported:
    """An array that speaks DLPack alone."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries_are_taken():
    x, w, b = (Exported(np.array(a)) for a in (X, W, B))
    graph = built(x, w, b, inputs=[x, w, b], outputs=["out"])
    same(graph(x, w, b), conv_bias_relu(X, W, B))


ROWS = np.ones((2, 6, 8), np.float32)
COLUMNS = np.ones((2, 8, 6), np.float32).transpose(0, 2, 1)


@pytest.mark.parametrize(
    ("template", "order"),
    [
        (jnp.asarray(COLUMNS), None),
        (jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype), None),
        (ROWS, None),
        (ROWS.astype(np.float64), None),
        (COLUMNS, (0, 2, 1)),
        (Foreign(COLUMNS), (0, 2, 1)),
        (Foreign(COLUMNS, "torch.float32", elements=True), (0, 2, 1)),
        (Foreign(np.ones((2, 12, 8), np.float32)[:, ::2]), None),
    ],
)
@pytest.mark.parametrize("declared", [False, True])
def test_templates_say_shape_dtype_and_order(template, order, declared):
    with jc.Graph() as graph:
        x = graph.tensor_like(template, name="x") if declared else template
        y = graph.matmul(x, jnp.ones((2, 8, 4)))
        y.set_output(True)
    tensor = graph.spec.input_tensors[0]
    assert (tensor.shape, tensor.dtype, tensor.order) == ((2, 6, 8), "float32", order)
    graph.set_io_tuples([template, "matmul.0::B"], [y])
    same(graph(ROWS, np.ones((2, 8, 4), np.float32)), jnp.full((2, 6, 4), 8.0))


def test_memory_order_of_jax_arrays_is_taken_over():
    layout = Layout((0, 1, 3, 2))  # in images (0, 2, 3, 1) is said by None
    x = jax.device_put(X, Format(layout, X.sharding))
    with jc.Graph() as graph:
        graph.exp(x, name="e").set_output(True)
    (tensor,) = graph.spec.input_tensors
    assert (tensor.shape, tensor.order) == (X.shape, layout.major_to_minor)
    same(graph({"e::input": x})["e::OUT_0"], jnp.exp(X))


def test_tracers_are_templates_and_arrays_are_not_kept():
    graphs = []

    @jax.jit
    def f(x, w, b):
        graphs.append(built(x, w, b, inputs=[x, w, b], outputs=["out"]))
        return graphs[0](x, w, b)

    with jax.checking_leaks():
        same(f(X, W, B), conv_bias_relu(X, W, B))
    assert graphs[0].spec.canonical() is spec_of(conv_bias_relu, X, W, B)
    jax.vmap(jax.grad(lambda x, w, b: f(x, w, b).sum()), (None, None, 0))(X, W, jnp.stack([B, B]))
    x = X + 1
    graph, alive = built(x, inputs=[x, W, B], outputs=["out"]), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    same(graph(X, W, B), conv_bias_relu(X, W, B))


def test_the_same_array_is_the_same_input():
    x = jnp.arange(4.0).reshape(2, 2)
    with jc.Graph(inputs=[x], outputs=["mul.0::OUT_0"]) as graph:
        graph.mul(graph.add(x, 1.0), x).set_output(True)
    same(graph(x), (x + 1) * x)


@pytest.mark.parametrize("declared", [False, True])
def test_one_input_has_one_value(declared):
    with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"]) as graph:
        x = graph.tensor(dim=[3], data_type="FLOAT") if declared else jnp.ones(3)
        graph.add(x, x, name="s").set_output(True)
    a, b = jnp.ones(3), jnp.full(3, 5.0)
    same(graph(b, b), 2 * b)
    same(graph({"s::a": b, "s::b": b})["s::OUT_0"], 2 * b)
    same(jax.jit(lambda x: graph(x, x))(b), 2 * b)
    wrong = [
        lambda: graph(a, b),
        lambda: graph({"s::a": a, "s::b": b}),
        lambda: jax.jit(graph)(b, b),
        lambda: jax.grad(lambda *args: graph(*args).sum(), (0, 1))(b, b),
    ]
    for call in wrong:
        with pytest.raises(jc.GraphError, match=r"for s::a and s::b when the graph") as caught:
            call()
        for words in ("tensor_like", "jax.jit", f"same {'tensor' if declared else 'array'}"):
            assert words in str(caught.value)


def test_arrays_have_inputs_of_their_own_where_they_are_declared():
    x = jnp.ones(3)
    with jc.Graph(inputs=["s::a", "s::b"], outputs=["s::OUT_0"]) as graph:
        graph.add(graph.tensor_like(x), graph.tensor_like(x), name="s").set_output(True)
    same(jax.jit(graph)(x, 2 * x), 3 * x)


def test_the_order_of_a_graph_that_was_called_stays():
    x, y = jnp.full(3, 2.0), jnp.ones(3)
    with jc.Graph(io_data_type="FLOAT") as graph:
        half = graph.exp(graph.sub(x, y, name="s")).set_data_type("HALF")
        graph.neg(half, name="out").set_output(True)
    graph.set_io_tuples(["s::a", "s::b"], ["out::OUT_0"])
    graph.set_io_tuples([y, x], ["out::OUT_0"])
    jitted = jax.jit(graph)
    want = jitted(x, y)
    graph.set_io_tuples([y, x], ["out::OUT_0"])
    for inputs, outputs in ([x, y], ["out::OUT_0"]), ([y, x], ["out::OUT_0", half]):
        with pytest.raises(jc.GraphError, match=r"with_options\(\)"):
            graph.set_io_tuples(inputs, outputs)
    other = graph.with_options()
    other.set_io_tuples([x, y], ["out::OUT_0"])
    same(jax.jit(other)(y, x), want)
    same(jitted(x, y), want)


def test_a_dictionary_keeps_the_outputs_it_was_called_for():
    graph = built()
    graph({1: X, 2: W, 4: B})
    with pytest.raises(jc.GraphError, match="after it was called"):
        graph.set_io_tuples([X, W, B], ["conv2d::Y", "out"])
    graph.set_io_tuples([X, W, B], ["out"])
    same(graph(X, W, B), conv_bias_relu(X, W, B))


def test_a_call_that_failed_is_none():
    graph = built()
    with pytest.raises(jc.GraphError, match="set_io_tuples"):
        graph(X, W, B)
    graph.set_io_tuples([X, W, B], ["conv2d::Y", "out"])
    assert len(graph(X, W, B)) == 2


def test_one_input_may_have_one_number_twice():
    epsilon, x = np.ones((1, 1), np.float32), jnp.zeros((1, 1))
    with jc.Graph(inputs=[x, "s::b", "t::b"], outputs=["t::OUT_0"]) as graph:
        graph.mul(graph.add(x, epsilon, name="s"), epsilon, name="t").set_output(True)
    same(graph(x, 3.0, float("3")), [[9.0]])
    with pytest.raises(jc.GraphError, match=r"3\.0 and 2\.0"):
        graph(x, 3.0, 2.0)


# -- dtypes ----------------------------------------------------------------------------------------


def test_data_types_of_the_graph_and_of_tensors():
    x = jnp.ones((1, 4, 8), "bfloat16")
    with jc.Graph(io_data_type="HALF", intermediate_data_type="bfloat16") as graph:
        h = graph.matmul(x, jnp.ones((1, 8, 4), "bfloat16"), compute_data_type="FLOAT")
        mean = graph.reduction(h, mode="AVG").set_dim([1, 4, 1])
        y = graph.exp(h)
        for tensor in (y, mean):
            tensor.set_output(True)
        mean.set_data_type("torch.float32")  # the dtype's text is that of torch's
    dtypes = {tensor.name: tensor.dtype for tensor in graph.spec.tensors}
    assert dtypes["matmul.0::C"] == "bfloat16"
    assert dtypes["exp.0::OUT_0"] == "float16"
    assert dtypes["reduction.0::Y"] == "float32"
    assert graph.spec.options.intermediate_data_type == "bfloat16"


def test_setters_of_declared_inputs():
    with jc.Graph(inputs=["x", "y", "z"], outputs=["out::OUT_0"]) as graph:
        x = graph.tensor(name="x", dim=[2, 3], data_type="FLOAT").set_data_type("HALF")
        y = graph.tensor(name="y", dim=[1], stride=[1]).set_dim([2, 3]).set_stride([1, 2])
        z = graph.tensor_like(y, name="z")
        assert (y.get_data_type(), z.get_data_type()) == (None, None)
        y.set_data_type("BFLOAT16")
        z.set_data_type(jnp.float32)
        graph.add(graph.add(x, y), z, name="out").set_output(True)
        x.set_data_type("HALF").set_dim([2, 3])
    assert [(t.shape, t.dtype) for t in graph.spec.input_tensors] == [
        ((2, 3), dtype) for dtype in ("float16", "bfloat16", "float32")
    ]
    assert (y.get_data_type(), y.get_stride()) == (jnp.bfloat16, [1, 2])
    a = jnp.ones((2, 3))
    same(graph(a.astype("float16"), a.astype("bfloat16"), a), 3 * a)


def test_tensors_may_be_changed_after_they_were_used():
    x = jnp.ones((4, 6), "bfloat16")
    with jc.Graph() as graph:
        h = graph.reduction(x, mode="ADD")
        y = graph.exp(h)
        z = graph.identity(y)
        h.set_dim([4, 1]).set_output(True)
        y.set_data_type("float16")
        z.set_output(True)
    assert (y.shape, z.shape, z.dtype) == ((4, 1), (4, 1), jnp.float16)
    graph.set_io_tuples([x], [h, z])
    sums, exps = graph(x)
    assert (sums.dtype, exps.dtype) == (jnp.float32, jnp.float16)
    same(exps[:, 0], np.exp(6.0).astype(np.float16).repeat(4))


def test_weak_types_become_what_promotion_makes_of_them():
    with jc.Graph(inputs=["x", "n"], outputs=["add.0::OUT_0"]) as graph:
        x = graph.tensor(name="x", dim=[1], data_type="BFLOAT16")
        graph.add(x, graph.tensor(name="n", dim=[1], data_type="INT32")).set_output(True)
    same(graph(2, 3), [5.0])
    same(jax.jit(graph)(1.5, 3), [4.5])
    for number in (2.7, jnp.asarray(2.7), 2**40):
        with pytest.raises(jc.GraphTypeError):
            graph(1.0, number)
    with pytest.raises(jc.GraphTypeError, match="float32"):
        jax.jit(graph)(1.0, 2.7)


def of_number(data_type):
    """x + a number in the host's memory."""
    with jc.Graph(inputs=["x", "n"], outputs=["add.0::OUT_0"]) as graph:
        n = graph.tensor(name="n", dim=[1], data_type=data_type, is_pass_by_value=True)
        integral = data_type.startswith("INT")
        x = graph.tensor(name="x", dim=[1], data_type="INT32" if integral else "FLOAT")
        graph.add(x, n).set_output(True)
    return graph


def test_numbers_of_the_host_are_of_their_declared_type():
    x = jnp.zeros(1)
    for number in (0.1, np.full(1, 0.1, np.float32)):
        same(of_number("BFLOAT16")(x, number), [float(jnp.bfloat16(0.1))])
    same(of_number("FLOAT")(x, np.inf), [np.inf])
    assert of_number("INT32")(jnp.zeros(1, "int32"), 7.0).tolist() == [7]


@pytest.mark.parametrize(
    ("data_type", "number", "words"),
    [
        ("INT32", 2.5, "no integer"),
        ("INT32", np.float32(np.nan), "no integer"),
        ("INT32", 2**31, "out of range"),
        ("INT8", 128, "from -128 to 127"),
        ("FLOAT", 1e39, "too large"),
        ("HALF", 1e5, "range of float16"),
    ],
)
def test_numbers_that_a_type_cannot_hold(data_type, number, words):
    graph = of_number(data_type)
    with pytest.raises(jc.JaxCudnnError, match=words):
        graph(jnp.zeros(1, "int32" if data_type.startswith("INT") else "float32"), number)


def test_a_graph_of_numbers_alone_has_an_operand():
    a = np.full((1, 1), 2.0, np.float32)
    with jc.Graph(inputs=[a], outputs=["exp.0::OUT_0"]) as graph:
        graph.exp(a)
    for number in (a, 2.0, a.astype(np.float64), jnp.asarray(a)):
        same(graph(number), np.exp(a))
    same(jax.jit(lambda: graph(a))(), np.exp(a))
    function, avals = graph._of_operands({})
    assert [x.shape for x in jax.eval_shape(function, *avals)] == [(1, 1)]
    same(of_number("BFLOAT16")(jnp.zeros(1), jnp.ones(1, "bfloat16")), [1.0])


# -- operations that the frontend spells otherwise ---------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-3, np.full((1, 1, 1, 1), 1e-3, np.float32)])
def test_normalization_under_the_frontends_names(epsilon):
    x = jax.random.normal(jax.random.key(3), (6, 32, 1, 1))
    scale, bias = jnp.full((1, 32, 1, 1), 2.0), jnp.ones((1, 32, 1, 1))
    by_value = isinstance(epsilon, np.ndarray)
    with jc.Graph(
        inputs=["ln::input", "ln::scale", "ln::bias"] + ["ln::epsilon"] * by_value,
        outputs=["ln::Y", "ln::MEAN", "ln::INV_VARIANCE"],
    ) as graph:
        out, mean, inv_var = graph.layernorm(
            name="ln",
            input=x,
            norm_forward_phase="TRAINING",
            scale=scale,
            bias=bias,
            epsilon=epsilon,
        )
        for tensor in (out, mean, inv_var):
            tensor.set_output(True)
    y, mean, inv_var = graph(x, scale, bias, *[epsilon] * by_value)
    flat = x[:, :, 0, 0]
    same(mean[:, 0, 0, 0], flat.mean(1))
    same(inv_var[:, 0, 0, 0], jax.lax.rsqrt(flat.var(1) + 1e-3))
    same(y, (x - mean) * inv_var * 2 + 1)
    if by_value:  # a number of the host is a constant of the plan, an array an operand
        same(graph(x, scale, bias, 1e-3)[0], y)
        same(graph(x, scale, bias, jnp.full((1, 1, 1, 1), 1e-3))[0], y)
        numbers = jax.make_jaxpr(lambda *args: graph(*args, 1e-3))(x, scale, bias)
        arrays = jax.make_jaxpr(graph)(x, scale, bias, jnp.float32(1e-3))
        specs = [jaxpr.eqns[-1].params["spec"] for jaxpr in (numbers, arrays)]
        assert [len(spec.inputs) for spec in specs] == [3, 4]
        function = jc.graph(lambda g, x, s, b: g.layernorm(x, s, b, 1e-3))
        assert specs[0].canonical() is spec_of(function, x, scale, bias)


def test_results_that_a_node_has_not_are_none():
    x, scale = jnp.ones((4, 32)), jnp.ones((1, 32))
    with jc.Graph() as graph:
        y, inv_var = graph.rmsnorm(x, scale, norm_forward_phase="INFERENCE", epsilon=1e-5)
        out, stats = graph.sdpa(*[jnp.ones((1, 2, 8, 16))] * 3, is_inference=True)
        y.set_output(True)
        out.set_output(True)
    assert inv_var is None
    assert stats is None
    assert len(graph.spec.outputs) == 2


def test_attention_as_the_frontend_spells_it():
    q, k, v = jax.random.normal(jax.random.key(4), (3, 2, 16, 4, 8))  # B S H D
    transposed = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O", "a::STATS"]) as graph:
        out, stats = graph.sdpa(
            name="a",
            **dict(zip("qkv", transposed, strict=True)),
            attn_scale=8**-0.5,
            is_inference=False,
            use_causal_mask=True,
            sliding_window_length=4,
            use_padding_mask=False,
        )
        out.set_output(True).set_dim([2, 4, 16, 8]).set_stride([512, 8, 32, 1])
        stats.set_output(True).set_data_type("FLOAT")
    got, _ = graph(*transposed)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))
    np.testing.assert_allclose(got.transpose(0, 2, 1, 3), want, rtol=1e-4, atol=1e-5)
    assert graph.spec.tensor(graph.spec.outputs[0]).order == (0, 2, 1, 3)


def test_a_padding_mask_is_that_of_the_lengths():
    q, lengths = jnp.ones((1, 1, 8, 8)), jnp.full((1, 1, 1, 1), 4, "int32")
    given = {"q": q, "k": q, "v": q, "seq_len_q": lengths, "seq_len_kv": lengths}
    specs = []
    for said in ({}, {"use_padding_mask": True}):
        with jc.Graph() as graph:
            graph.sdpa(**given, **said)[0].set_output(True)
        specs.append(graph.spec.canonical())
    assert specs[0] is specs[1]


def test_dropout_is_found_in_its_tuple():
    q, word = jnp.ones((1, 2, 8, 16), "bfloat16"), jnp.zeros((1, 1, 1, 2), "uint32")
    with jc.Graph() as graph:
        out, _ = graph.sdpa(q, q, q, dropout=(0.5, word, word + 1), name="a")
        out.set_output(True)
    result = graph({"a::q": q, "a::dropout::1": word, "a::dropout::2": word})
    assert set(np.unique(result["a::O"].astype(np.float32))) != {1.0}


@pytest.mark.parametrize("dtype", ["INT32", "INT64"])
def test_seed_and_offset_of_dropout_are_one_integer_or_two_words(dtype):
    q = jax.random.normal(jax.random.key(0), (1, 2, 8, 16))
    with jc.Graph(inputs=["a::q", "seed", "offset"], outputs=["a::O"]) as graph:
        words = [
            graph.tensor([1, 1, 1, 1], data_type=dtype, name=name) for name in ("seed", "offset")
        ]
        graph.sdpa(q, q, q, dropout=(0.5, *words), name="a")
    assert {(*t.shape, t.dtype.name) for t in words} == {(1, 1, 1, 2, "uint32")}

    def pair(number):
        low, high = number % 2**32, number % 2**64 // 2**32
        return jnp.array([low, high], "uint32").reshape(1, 1, 1, 2)

    for seed, offset in ((7, 9), (-3, 5)):
        want = graph(q, pair(seed), pair(offset))
        for kind in (int, np.int32, np.int64, jnp.int32, lambda x: np.full((1, 1, 1, 1), x)):
            assert np.array_equal(graph(q, kind(seed), kind(offset)), want)
        given = [jnp.full((1, 1, 1, 1), x, "int32") for x in (seed, offset)]
        assert np.array_equal(jax.jit(graph)(q, *given), want)
    large = 2**40 + 7
    assert np.array_equal(graph(q, np.int64(large), large), graph(q, pair(large), pair(large)))
    assert not np.array_equal(graph(q, large, large), graph(q, 7, 7))


@pytest.mark.parametrize("make", [np.full, jnp.full])
def test_seed_and_offset_may_be_arrays(make):
    q, word = jnp.ones((1, 2, 8, 16)), make((1, 1, 1, 1), 7, np.int32)
    with jc.Graph(inputs=["a::q", "a::seed", "a::offset"], outputs=["a::O"]) as graph:
        graph.sdpa(q, q, q, dropout=(0.5, word, make((1, 1, 1, 1), 9, np.int32)), name="a")
    assert graph(q, word, word).shape == q.shape


def test_seed_that_is_no_integer_is_said_in_words():
    q = jnp.ones((1, 2, 8, 16))
    with pytest.raises(jc.GraphTypeError, match="'seed' has the wrong") as caught, jc.Graph() as g:
        g.sdpa(q, q, q, dropout=(0.5, jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))))
    assert "jax.random.key_data" in str(caught.value)


@pytest.mark.parametrize(
    "scale",
    [
        lambda g: np.full((1, 1, 1, 1), 0.5),
        lambda g: jnp.float32(0.5),
        lambda g: g.tensor([1, 1, 1, 1], data_type="FLOAT", is_pass_by_value=True),
    ],
    ids=["NumPy", "JAX", "tensor"],
)
def test_attn_scale_is_no_operand(scale):
    q = jnp.ones((1, 2, 8, 16))
    with (
        pytest.raises(jc.GraphTypeError, match="attn_scale is a tensor") as caught,
        jc.Graph() as g,
    ):
        g.sdpa(q, q, q, attn_scale=scale(g))
    assert "multiply q by it" in str(caught.value)


def test_attn_scale_is_a_number_of_numpy_too():
    q = jnp.ones((1, 2, 8, 16))
    with jc.Graph() as graph:
        graph.sdpa(q, q, q, attn_scale=np.float32(0.5))[0].set_output(True)
    (call,) = graph.spec.calls
    assert call.node.attn_scale == 0.5


# -- supplied outputs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(2, 8, 6, 5), (2, 8, 30), (480,), (2, 8, 1, 6, 5), (2, 2, 4, 6, 5)]
)
def test_a_supplied_output_may_merge_and_split_neighbours(shape):
    graph = built()
    want = conv_bias_relu(X, W, B)
    result = graph({1: X, 2: W, 4: B, 77: jax.ShapeDtypeStruct(shape, "float16")})[77]
    assert (result.shape, result.dtype) == (shape, jnp.float16)
    np.testing.assert_allclose(result, want.reshape(shape), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(2, 6, 5, 8), (8, 2, 6, 5), (16, 5, 6), (30, 16)])
def test_a_supplied_output_is_not_transposed(shape):
    with pytest.raises(jc.GraphError, match="another shape") as caught:
        built()({1: X, 2: W, 4: B, 77: np.zeros(shape, np.float32)})
    assert "transpose" in str(caught.value)


def test_a_supplied_output_cuts_off_nothing():
    with jc.Graph() as graph:
        graph.exp(X).set_name("y").set_output(True)
        graph.cmp_gt(X, 0.0).set_name("z").set_output(True)
    for dtype in ("int32", "bool"):
        with pytest.raises(jc.GraphTypeError, match="cannot hold it"):
            graph({"exp.0::input": X, "y": jax.ShapeDtypeStruct(X.shape, dtype)})
    truths = graph({"exp.0::input": X, "z": jax.ShapeDtypeStruct(X.shape, "int8")})["z"]
    np.testing.assert_array_equal(truths, X > 0)


def test_one_output_under_two_keys_is_in_both():
    want = conv_bias_relu(X, W, B)
    empty = jnp.zeros_like(want)
    result = built()({1: X, 2: W, 4: B, "out": empty, "relu.0::OUT_0": empty.reshape(2, 8, 30)})
    same(result["out"], want)
    same(result["relu.0::OUT_0"], want.reshape(2, 8, 30))
    assert {*result} == {1, 2, 4, "out", "relu.0::OUT_0"}


# -- plans -----------------------------------------------------------------------------------------


def test_options_under_the_frontends_names():
    with jc.Graph(heuristics=["B"], max_workspace=2**20) as graph:
        graph.exp(X).set_output(True)
        graph.deselect_numeric_notes(["NONDETERMINISTIC"])
        graph.deselect_numeric_notes(["WINOGRAD"])
        graph.select_behavior_notes(["RUNTIME_COMPILATION"])
        graph.deselect_workspace_greater_than(2**10).create_execution_plans(["A", "FALLBACK"])
    options = graph.spec.options
    assert options.deselect_numeric_notes == ("NONDETERMINISTIC", "WINOGRAD")
    assert options.select_behavior_notes == ("RUNTIME_COMPILATION",)
    assert (options.max_workspace, options.heuristics) == (2**10, ("A", "FALLBACK"))
    other = graph.with_options(engine=3, implementation="xla")
    assert (other.spec.options.engine, graph.spec.options.engine) == (3, None)


def test_other_options_leave_the_graph_as_it_is():
    with jc.Graph(inputs=[X], outputs=["exp.0::OUT_0"]) as graph:
        y = graph.exp(X)
        z = graph.log(graph.add(y, B.reshape(1, 1, 8, 1)[:, :, :1]))
    other = graph.with_options(deterministic=True)
    other.set_io_tuples([X, "add.0::b"], [y, z])
    assert len(other(X, jnp.ones((1, 1, 1, 1)))) == 2
    same(graph(X), jnp.exp(X))
    assert len(graph.spec.calls) == 1
    virtual = [json.loads(str(g))["tensors"]["log.0::OUT_0"]["is_virtual"] for g in (graph, other)]
    assert virtual == [z.get_is_virtual(), False] == [True, False]
    graph.with_options().set_io_tuples([X], [y])


def test_outputs_of_another_graph_change_no_dtypes_of_this_one():
    with jc.Graph(io_data_type="HALF", outputs=["neg.0::OUT_0"]) as graph:
        y = graph.exp(graph.tensor(dim=[2, 3], data_type="FLOAT"))
        z = graph.neg(y)
    before = graph.spec.canonical(), str(graph), y.dtype
    graph.with_options().set_io_tuples(["exp.0::input"], [z, y])
    assert (graph.with_options().spec.canonical(), str(graph), y.dtype) == before


def test_a_set_io_tuples_that_fails_changes_nothing():
    with jc.Graph(inputs=[X], outputs=["exp.0::OUT_0"]) as graph:
        y = graph.exp(X)
        z = graph.log(graph.add(y, X + 1))
    before = graph.spec, [t.get_name() for t in graph.get_inputs()]
    with pytest.raises(jc.GraphError, match="not the inputs"):
        graph.set_io_tuples([X], [y, z])
    assert (graph.spec, [t.get_name() for t in graph.get_inputs()]) == before
    assert z.get_is_virtual()
    same(graph(X), jnp.exp(X))


def test_contexts_at_the_call_decide():
    graph = built(inputs=[X, W, B], outputs=["out"])

    def spec():
        return jax.make_jaxpr(graph)(X, W, B).eqns[-1].params["spec"]

    usual = spec()
    with jc.implementation("xla"), jax.default_matmul_precision("highest"):
        other = spec()
    assert (usual.options.implementation, usual.options.precision) == ("split", "default")
    assert (other.options.implementation, other.options.precision) == ("xla", "highest")


@pytest.mark.deviceless
def test_it_is_planned_as_a_graph_function():
    shapes = (8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1)
    x, w, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    graph = built(x, w, b, inputs=[x, w, b], outputs=["out"])
    (own,) = graph.plan(gpus=["H200"]).values()
    (theirs,) = jc.plan(conv_bias_relu, x, w, b, gpus=["H200"]).values()
    assert own.engine == theirs.engine
    assert jc.plan(graph, x, w, b, gpus=["H200"])["H200"].engine == own.engine
    assert graph.support(gpus=["H200"])
    pinned = graph.with_options(**own.pinned)
    assert pinned.plan(gpus=["H200"])["H200"].engine == own.engine
    with jc.target("H200"):
        graph.check_support()
        assert graph.get_workspace_size() == own.workspace_bytes
        assert graph.build_plans().engine == own.engine
        text = jax.jit(graph).trace(x, w, b).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("jax_cudnn") >= 1
    assert "stablehlo.convolution" not in text


@pytest.mark.deviceless
def test_a_number_of_the_host_leaves_a_norm_in_one_plan():
    x, scale = jnp.ones((64, 1024), "bfloat16"), jnp.ones((1, 1024), "bfloat16")
    epsilon = np.full((1, 1), 1e-5, np.float32)
    with jc.Graph(implementation="cudnn") as graph:
        y, _ = graph.rmsnorm(x, scale, epsilon=epsilon, norm_forward_phase="INFERENCE", name="n")
        y.set_output(True)
    assert len(graph.plan(gpus=["H200"])["H200"].segments) == 1


# -- text ------------------------------------------------------------------------------------------


def test_it_prints_as_json():
    graph = built(name="block", io_data_type="FLOAT")
    data = json.loads(str(graph))
    assert data["context"]["name"] == "block"
    assert [node["tag"] for node in data["nodes"]] == ["CONV_FPROP", "BIAS", "RELU"]
    conv, bias, relu = data["nodes"]
    assert conv["inputs"] == {"image": "conv2d::image", "weight": "conv2d::weight"}
    assert bias["inputs"]["input"] == conv["outputs"]["Y"] == "conv2d::Y"
    assert relu["outputs"] == {"OUT_0": "out"}
    tensor = data["tensors"]["out"]
    assert (tensor["uid"], tensor["dim"], tensor["is_virtual"]) == (77, [2, 8, 6, 5], False)
    assert (tensor["data_type"], tensor["stride"]) == ("FLOAT", [240, 1, 40, 8])
    assert data["tensors"]["conv2d::Y"]["is_virtual"]
    assert repr(graph) == "<jax_cudnn.Graph block: conv2d bias.0 relu.0>"
    arrays = {"conv2d::image": X, "conv2d::weight": W, "bias.0::bias": B}
    assert "jit_block" in jax.jit(graph).lower(arrays).as_text()


def test_json_has_texts_for_what_is_no_finite_number():
    with jc.Graph() as graph:
        y = graph.max(jnp.ones((4, 8, 8)), -jnp.inf, name="max")
        graph.add(y, jnp.nan).set_output(True)

    def refuse(text):
        raise AssertionError(text)

    nodes = json.loads(graph.to_json(), parse_constant=refuse)["nodes"]
    numbers = [[x for x in node["inputs"].values() if "::" not in x] for node in nodes]
    assert numbers == [["-inf"], ["nan"]]


def test_json_has_numbers_and_shapes_that_were_given_late():
    with jc.Graph() as graph:
        total = graph.reduction(X)
        graph.mul(total, 0.5).set_output(True)
        total.set_dim([2, 1, 1, 1])
    reduction, product = json.loads(graph.to_json())["nodes"]
    assert reduction["out_dims"] == [2, 1, 1, 1]
    assert product["inputs"] == {"a": "reduction.0::OUT_0", "b": 0.5}


# -- errors ----------------------------------------------------------------------------------------


def no_output(graph):
    graph.exp(X)


def unlisted(graph):
    graph.exp(X).set_output(True)
    graph.set_io_tuples([X], [graph.log(X)])


def unknown(graph):
    graph.exp(X, name="exp").set_output(True)
    graph.set_io_tuples(["exp::inptu"], ["exp::OUT_0"])


def ambiguous(graph):
    graph.add(graph.tensor(name="x", dim=[4], data_type="FLOAT"), 1.0).set_name("x")
    graph.exp(X).set_output(True)
    graph.set_io_tuples(["x"], ["exp.0::OUT_0"])


def twice(graph):
    graph.exp(X, name="exp").set_output(True)
    graph.set_io_tuples([X], ["exp::OUT_0", "EXP::out_0"])


def missing(graph):
    graph.add(X, X + 1, name="add").set_output(True)
    graph.set_io_tuples(["add::a"], ["add::OUT_0"])


def no_input(graph):
    y = graph.exp(X, name="exp")
    graph.exp(y).set_output(True)
    graph.set_io_tuples(["exp::OUT_0"], ["exp.1::OUT_0"])


def used(graph):
    x = graph.tensor(dim=[4], data_type="FLOAT")
    graph.exp(x).set_output(True)
    return x


BUILDING = {
    "no output": (no_output, jc.GraphError, "set_output"),
    "unlisted output": (unlisted, jc.GraphError, "not listed"),
    "unknown reference": (unknown, jc.GraphError, "did you mean 'exp::input'"),
    "two names": (ambiguous, jc.GraphError, "name of several tensors"),
    "duplicate": (twice, jc.GraphError, "twice"),
    "missing input": (missing, jc.GraphError, "not the inputs"),
    "a result as input": (no_input, jc.GraphError, "the graph computes"),
    "two nodes of a name": (
        lambda g: [g.exp(X, name="a"), g.log(X, name="a")],
        jc.GraphError,
        "two nodes are called 'a'",
    ),
    "a uid of 65 bits": (lambda g: g.exp(X).set_uid(2**63), jc.GraphError, "64 bits"),
    "two tensors of a uid": (
        lambda g: [g.exp(X).set_uid(9), g.log(X).set_uid(9)],
        jc.GraphError,
        "two tensors",
    ),
    "an input as output": (
        lambda g: g.tensor(dim=[4], data_type="FLOAT").set_output(True),
        jc.GraphError,
        "identity",
    ),
    "no data type": (lambda g: g.exp(g.tensor(dim=[4])), jc.GraphError, "io_data_type"),
    "the shape of a used input": (lambda g: used(g).set_dim([5]), jc.GraphError, "after it was"),
    "the dtype of a used input": (
        lambda g: used(g).set_data_type("HALF"),
        jc.GraphError,
        "before an operation takes",
    ),
    "the dtype of an array": (
        lambda g: [g.exp(X, name="e"), g.find_tensor(X).set_data_type("HALF")],
        jc.GraphError,
        "astype",
    ),
    "no shape": (
        lambda g: g.tensor(dim=[4], data_type="FLOAT").set_dim(["a"]),
        jc.JaxCudnnError,
        "set_dim",
    ),
    "a vector by value at last": (
        lambda g: g.tensor(dim=[1], data_type="FLOAT", is_pass_by_value=True).set_dim([2]),
        jc.GraphError,
        "one element",
    ),
    "virtual": (
        lambda g: g.tensor(dim=[4], data_type="FLOAT", is_virtual=True),
        jc.GraphError,
        "intermediates",
    ),
    "a vector by value": (
        lambda g: g.tensor(dim=[4], data_type="FLOAT", is_pass_by_value=True),
        jc.GraphError,
        "one element",
    ),
    "by value late": (
        lambda g: g.tensor(dim=[4], data_type="FLOAT").set_is_pass_by_value(True),
        jc.GraphError,
        "one element",
    ),
    "reordered": (
        lambda g: g.exp(X).set_reordering_type("F8_128x4"),
        jc.GraphError,
        "quantize_mxfp8",
    ),
    "ragged offsets of several elements": (
        lambda g: g.exp(X).set_ragged_offset_multiplier(8),
        jc.GraphError,
        "multiply the offsets",
    ),
    "gaps": (
        lambda g: g.tensor(dim=[4, 4], stride=[8, 1], data_type="FLOAT"),
        jc.GraphError,
        "pack",
    ),
    "wrong shapes": (lambda g: g.conv_fprop(X, W[:, :3], **SPATIAL), jc.GraphError, "conv_fprop"),
    "wrong keyword": (lambda g: g.conv_fprop(X, weights=W), jc.GraphTypeError, "expected"),
    "no operation": (lambda g: g.conv_forward(X), jc.GraphAttributeError, "did you mean"),
    "a plan's method": (lambda g: g.serialize(), jc.GraphAttributeError, "graph.plan()"),
    "dropout": (
        lambda g: g.sdpa(*[jnp.ones((1, 1, 8, 8))] * 3, dropout=0.5),
        jc.GraphError,
        "(probability, seed, offset)",
    ),
    "a result given": (
        lambda g: g.sdpa(*[jnp.ones((1, 1, 8, 8))] * 3, rng_dump=X),
        jc.GraphTypeError,
        "rng_dump=True",
    ),
    "a padding mask without lengths": (
        lambda g: g.sdpa(*[jnp.ones((1, 1, 8, 8))] * 3, use_padding_mask=True),
        jc.GraphError,
        "seq_len_q and seq_len_kv",
    ),
    "lengths without a padding mask": (
        lambda g: g.sdpa(
            *[jnp.ones((1, 1, 8, 8))] * 3, seq_len_q=jnp.ones((1, 1, 1, 1)), use_padding_mask=False
        ),
        jc.GraphError,
        "leave use_padding_mask out",
    ),
    "float64": (
        lambda g: g.exp(jax.ShapeDtypeStruct((4,), "float64")),
        jc.GraphTypeError,
        "float64",
    ),
}


@pytest.mark.parametrize("name", BUILDING)
def test_errors_while_building(name):
    build, kind, words = BUILDING[name]
    with pytest.raises(kind) as caught, jc.Graph() as graph:
        build(graph)
    assert words in str(caught.value)


CALLS = {
    "too few": (lambda g: g(X, W), jc.GraphTypeError, "3: conv2d::image"),
    "another shape": (lambda g: g(X[:1], W, B), jc.GraphError, "graph_cache"),
    "another dtype": (lambda g: g(X.astype("bfloat16"), W, B), jc.GraphTypeError, "bfloat16"),
    "no array": (lambda g: g("x", W, B), jc.GraphTypeError, "no array"),
    "missing": (lambda g: g({"conv2d::image": X}), jc.GraphError, "conv2d::weight"),
    "intermediate": (lambda g: g({"conv2d::Y": X}), jc.GraphError, "neither"),
    "wrong buffer": (
        lambda g: g({1: X, 2: W, 4: B, 77: X}),
        jc.GraphError,
        "another shape",
    ),
    "an operation": (lambda g: g.exp(X), jc.GraphAttributeError, "after the graph was built"),
    "a member of the recorder": (lambda g: g.references, jc.GraphAttributeError, "no operation"),
    "another member": (lambda g: g.handles, jc.GraphAttributeError, "no operation"),
    "with again": (lambda g: g.__enter__(), jc.GraphError, "built already"),
    "options": (
        lambda g: g.with_options(compute_data_type="float16"),
        jc.GraphError,
        "jax_cudnn.Graph(...)",
    ),
    "overrides": (lambda g: g(X, W, B, override_shapes=[]), TypeError, "override_shapes"),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_calls(name):
    call, kind, words = CALLS[name]
    with pytest.raises(kind) as caught:
        call(built(inputs=[X, W, B], outputs=["out"]))
    assert words in str(caught.value)


def test_positional_calls_need_an_order_and_a_graph_its_end():
    with pytest.raises(jc.GraphError, match="set_io_tuples"):
        built()(X, W, B)
    with pytest.raises(jc.GraphError, match="is not built"):
        jc.Graph()(X)
    with jc.Graph() as graph:
        graph.exp(X).set_output(True)
        for early in (lambda: graph(X), lambda: graph.spec, graph.with_options):
            with pytest.raises(jc.GraphError, match="being built"):
                early()


@pytest.mark.parametrize("name", ["sm_count", "sm_version", "device_property"])
def test_devices_are_named_by_target(name):
    with pytest.raises(jc.GraphError, match=r"jax_cudnn\.target"):
        jc.Graph(**{name: 90})


def test_an_error_at_the_end_leaves_nothing_built():
    graph = jc.Graph(inputs=["exp.0::inptu"], outputs=["exp.0::OUT_0"])
    with pytest.raises(jc.GraphError, match="did you mean"), graph:
        graph.exp(X).set_output(True)
    with pytest.raises(jc.GraphError, match="is not built"):
        graph({"exp.0::input": X})
    with graph:
        graph.exp(X).set_output(True)
        graph.set_io_tuples(["exp.0::input"], ["exp.0::OUT_0"])
    same(graph(X), jnp.exp(X))


def test_outputs_that_cannot_be_change_nothing():
    """Lengths that are computed in the graph do not fit attention over pages."""
    q, pool = jnp.ones((2, 4, 1, 8)), jnp.ones((6, 2, 16, 8))
    table, lengths = jnp.zeros((2, 1, 3, 1), "int32"), jnp.ones((2, 1, 1, 1), "int32")
    with jc.Graph(io_data_type="HALF") as graph:
        y = graph.exp(q).set_output(True)
        computed = graph.add(lengths, lengths).set_data_type("int32")
        pages = {f"paged_attention_{x}_table": table for x in "kv"}
        lengths = {"seq_len_q": computed, "seq_len_kv": computed}
        kept, _ = graph.sdpa(graph.neg(y), pool, pool, **pages, **lengths)
    before = graph.spec, str(graph), graph.get_inputs()[0].get_stride()
    with pytest.raises(jc.GraphError, match="computed in the graph"):
        graph.set_io_tuples([q, pool, "add.0::a", "add.0::b", table], [kept, y])
    assert (graph.spec, str(graph), graph.get_inputs()[0].get_stride()) == before
    assert kept.get_is_virtual()
    assert len(graph({"exp.0::input": q})) == 2


@pytest.mark.parametrize("name", ["inputs", "outputs", "heuristics"])
def test_lists_are_lists(name):
    with pytest.raises(jc.GraphTypeError, match=f"{name} is no list"):
        jc.Graph(**{name: np.array(["A", "B"])})


def test_a_missing_input_is_named():
    with pytest.raises(jc.GraphError) as caught, jc.Graph() as graph:
        missing(graph)
    assert caught.value.fix == "add add::b"


def test_an_error_inside_leaves_nothing_built():
    graph = jc.Graph()

    def build():
        with graph:
            graph.exp(X).set_output(True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    with graph:
        graph.log(X).set_output(True)
    assert [node["tag"] for node in json.loads(str(graph))["nodes"]] == ["LOG"]
