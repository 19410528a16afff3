"""Types, shapes, numbers and options of a ``jc.Graph``, also those that change late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import same

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry

X = jnp.arange(-8.0, 24.0).reshape(4, 8)


def test_data_types_of_the_graph_and_of_tensors():
    x = jnp.ones((1, 4, 8), "bfloat16")
    with jc.Graph(io_data_type="HALF", intermediate_data_type="bfloat16") as graph:
        h = graph.matmul(x, jnp.ones((1, 8, 4), "bfloat16"), compute_data_type="FLOAT")
        mean = graph.reduction(h, mode="AVG").set_dim([1, 4, 1])
        graph.exp(h).set_output(True)
        mean.set_output(True).set_data_type("torch.float32")  # the dtype's text is that of torch's
        y, rows = graph.tensor([4, 8], data_type="INT32"), graph.tensor(dim=[8, 16])
        for late in (graph.add(y, 1), graph.cmp_gt(y, 1), graph.add(y, 1).set_data_type("HALF")):
            late.set_output(True)
        for result in graph.rmsnorm(
            rows, graph.tensor(dim=[1, 16]), epsilon=1e-5, norm_forward_phase="TRAINING"
        ):
            result.set_output(True)  # statistics are float32 whatever the graph's type
    dtypes = {tensor.name: tensor.dtype for tensor in graph.spec.tensors}
    assert dtypes["matmul.0::C"] == "bfloat16"
    kinds = sorted(str(tensor.get_data_type()) for tensor in graph.get_outputs())
    assert kinds == ["bool", *["float16"] * 3, "float32", "float32", "int32"]


def test_later_operations_follow_what_changes_late():
    """Dtypes, compute types, Python numbers with them, and shapes."""
    halves, bytes_ = (jnp.ones((4, 8, 8), dtype) for dtype in ("bfloat16", "int8"))
    with jc.Graph() as graph:
        y, z = graph.add(jnp.ones((4, 8, 8)), 1.0), graph.add(jnp.ones((4, 8, 8)), 1.0)
        after = graph.relu(y)
        product, more = graph.matmul(z, bytes_), graph.add(z, 1)
        y.set_data_type("bfloat16")
        assert after.get_data_type() == jnp.bfloat16
        graph.matmul(after, halves).set_output(True)  # operands of one type
        z.set_data_type("int8")
        product.set_output(True)
        more.set_output(True)
        total = graph.reduction(X, mode="ADD")
        y = graph.identity(graph.relu(total))
        total.set_dim([4, 1]).set_output(True)
        y.set_data_type("float16")
        graph.add(X, y).set_output(True)
    assert y.get_dim() == [4, 1]
    shapes = [f"{t.dtype}{[*t.shape]}" for t in graph.spec.output_tensors]
    assert {*shapes} == {
        *("bfloat16[4, 8, 8]", "int32[4, 8, 8]", "int8[4, 8, 8]", "float32[4, 1]"),
        "float32[4, 8]",
    }
    computed = {n["name"]: n.get("compute_data_type") for n in graph.inspect()["nodes"]}
    assert computed["matmul.0"] == "INT32"


def of_number(data_type):
    """x + a scalar in host memory."""
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
    same(of_number("BFLOAT16")(x, jnp.ones(1, "bfloat16")), [1.0])
    same(of_number("FLOAT")(x, np.inf), [np.inf])
    assert of_number("INT32")(jnp.zeros(1, "int32"), 7.0).tolist() == [7]
    for data_type, number, words in (
        ("INT32", np.float32(np.nan), "not an integer"),
        ("INT32", 2**31, "out of range"),
        ("HALF", 1e5, "range of float16"),
    ):
        x = jnp.zeros(1, "int32" if data_type == "INT32" else "float32")
        with pytest.raises(jc.JaxCudnnError, match=words):
            of_number(data_type)(x, number)


def test_arrays_of_the_host_with_one_element_may_be_numbers_at_the_call():
    a = np.full((1, 1), 2.0, np.float32)
    with jc.Graph(inputs=[a], outputs=["exp.0::OUT_0"]) as graph:
        graph.exp(a)
    for number in (a, 2.0, a.astype(np.float64), jnp.asarray(a)):
        same(graph(number), np.exp(a))
    x = jnp.zeros((1, 1))
    with jc.Graph(inputs=[x, "s::b", "t::b"], outputs=["t::OUT_0"]) as graph:
        graph.mul(graph.add(x, a, name="s"), a, name="t").set_output(True)
    same(graph(x, 3.0, float("3")), [[9.0]])
    with pytest.raises(jc.GraphError, match=r"3\.0 and 2\.0"):
        graph(x, 3.0, 2.0)


def test_an_epsilon_is_a_constant_if_a_number_and_an_operand_if_an_array():
    x = jax.random.normal(jax.random.key(3), (6, 32, 1, 1))
    scale, bias = jnp.full((1, 32, 1, 1), 2.0), jnp.ones((1, 32, 1, 1))
    order = [f"ln::{port}" for port in ("input", "scale", "bias", "epsilon")]
    with jc.Graph(inputs=order, outputs=["ln::Y"]) as graph:
        epsilon = np.full((1, 1, 1, 1), 1e-3, np.float32)
        y, *_ = graph.layernorm(x, scale, bias, epsilon, name="ln", norm_forward_phase="TRAINING")
        y.set_output(True)
    want = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-3) * 2 + 1
    for given in (epsilon, 1e-3, np.float64(1e-3), jnp.full((1, 1, 1, 1), 1e-3)):
        same(graph(x, scale, bias, given), want)
    numbers = jax.make_jaxpr(lambda *args: graph(*args, 1e-3))(x, scale, bias)
    arrays = jax.make_jaxpr(graph)(x, scale, bias, jnp.float32(1e-3))
    specs = [jaxpr.eqns[-1].params["spec"] for jaxpr in (numbers, arrays)]
    assert [len(spec.inputs) for spec in specs] == [3, 4]
    with jax.enable_x64(True):
        assert graph(x, scale, bias, np.float64(1e-3)).dtype == jnp.float32


def test_changes_of_used_tensors_are_followed_once(monkeypatch):
    """By the next read, and by the complete graph."""
    node, inferred = registry()["relu"], []
    infer = node.infer
    monkeypatch.setattr(node, "infer", lambda self, x: inferred.append(self) or infer(self, x))
    with jc.Graph() as graph:
        results = [graph.relu(jnp.ones((4, 8), "bfloat16"))]
        for _ in range(5):
            results.append(graph.relu(results[-1]))
        for x in results[:-1]:
            x.set_data_type("float32")
        assert len(inferred) == 6
        assert results[-1].dtype == results[0].get_data_type() == "float32"
        assert len(inferred) == 12
        results[-1].set_output()
    assert len(inferred) == 18
