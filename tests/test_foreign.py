"""Operators on a graph tensor, and what is no method of g: errors that say what to use."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_cudnn as jc

X = (1, 4, 8)
ONES = jnp.ones(X)
ADVICE = "apply jnp outside the graph"

# What must be said; "g.m" is the method that the message must offer.
FOREIGN = {
    "jnp.tanh": (lambda g, x: jnp.tanh(x), ["use g.tanh("]),
    "jnp.exp": (lambda g, x: jnp.exp(x), ["use g.exp("]),
    "jnp.sort": (lambda g, x: jnp.sort(x), ["sort", "g offers"]),
    "jnp.fft.fft": (lambda g, x: jnp.fft.fft(x), ["fft", "g offers"]),
    "jnp.matmul": (lambda g, x: jnp.matmul(x, x), ["use g.matmul("]),
    "jnp.dot": (lambda g, x: jnp.dot(x, x), ["use g.matmul("]),
    "jnp.einsum": (lambda g, x: jnp.einsum("bij,bij->bij", x, x), ["use g.matmul("]),
    "jnp.sum": (lambda g, x: jnp.sum(x), ["use g.reduction("]),
    "jnp.add": (lambda g, x: jnp.add(x, x), ["use g.add("]),
    "jnp.multiply": (lambda g, x: jnp.multiply(x, 2.0), ["use g.mul("]),
    "jnp.maximum": (lambda g, x: jnp.maximum(x, 0), ["maximum", "use g."]),
    "jnp.reshape": (lambda g, x: jnp.reshape(x, (4, 8)), ["use g.reshape("]),
    "jnp.where": (lambda g, x: jnp.where(x, x, x), ["use g.binary_select("]),
    "jnp.concatenate": (lambda g, x: jnp.concatenate([x, x]), ["use g.concatenate("]),
    "jnp.stack": (lambda g, x: jnp.stack([x, x]), ["use g.concatenate("]),
    "jnp.asarray": (lambda g, x: jnp.asarray(x), ["asarray"]),
    "jnp.float32": (lambda g, x: jnp.float32(x), ["float32"]),
    "nn.relu": (lambda g, x: jax.nn.relu(x), ["use g.relu("]),
    "nn.gelu": (lambda g, x: jax.nn.gelu(x), ["use g.gelu_approx_tanh("]),
    "nn.silu": (lambda g, x: jax.nn.silu(x), ["use g.swish("]),
    "nn.sigmoid": (lambda g, x: jax.nn.sigmoid(x), ["use g.sigmoid("]),
    "nn.softmax": (lambda g, x: jax.nn.softmax(x), ["softmax"]),
    "lax.add": (lambda g, x: lax.add(x, x), ["use g.add("]),
    "lax.mul": (lambda g, x: lax.mul(x, x), ["use g.mul("]),
    "lax.tanh": (lambda g, x: lax.tanh(x), ["use g.tanh("]),
    "lax.dot_general": (
        lambda g, x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))),
        ["g.matmul"],
    ),
    "lax.conv": (lambda g, x: lax.conv_general_dilated(x, x, (1,), "SAME"), ["g.conv_fprop"]),
    "lax.reduce_sum": (lambda g, x: lax.reduce_sum(x, (0,)), ["g.reduction"]),
    "lax.scan": (lambda g, x: lax.scan(lambda c, y: (c, y), x, x), ["scan"]),
    "jax.vmap": (lambda g, x: jax.vmap(lambda y: y)(x), ["graph tensor"]),
    "jax.jit": (lambda g, x: jax.jit(lambda y: y)(x), ["graph tensor"]),
    "np.tanh": (lambda g, x: np.tanh(x), ["use g.tanh("]),
    "np.sinh": (lambda g, x: np.sinh(x), ["sinh", "g offers"]),
    "np.add, reduced": (lambda g, x: np.add.reduce(x), ["add"]),
    "np.add, written": (lambda g, x: np.add(x, x, out=np.ones(X)), ["use g.add("]),
    "np.asarray": (lambda g, x: np.asarray(x), ["graph tensor"]),
    "math.exp": (lambda g, x: math.exp(x), ["float()"]),
    "[0]": (lambda g, x: x[0], ["indexing", "use g.slice("]),
    "if": (lambda g, x: g.relu(x) if x else x, ["if, while, and, or", "g.binary_select("]),
    "and": (lambda g, x: x and x, ["if, while, and, or"]),
    "max": (lambda g, x: max(x, 0), ["if, while, and, or"]),
    "==": (lambda g, x: x == 0, ["comparison eq"]),
    "0==": (lambda g, x: 0 == x, ["comparison eq"]),
    "array==": (lambda g, x: ONES == x, ["eq"]),
    "!=": (lambda g, x: x != x, ["comparison ne"]),
    "numpy!=": (lambda g, x: np.ones(X) != x, ["use g.cmp_neq("]),
    "len": (lambda g, x: len(x), ["len()"]),
    "float": (lambda g, x: float(x), ["float()"]),
    "int": (lambda g, x: int(x), ["int()"]),
    "iteration": (lambda g, x: [y for y in x], ["iter()"]),  # noqa: C416
    "%": (lambda g, x: x % 2, ["operator mod", "use g.mod("]),
    "2%": (lambda g, x: 2 % x, ["operator mod", "use g.mod("]),
    "array%": (lambda g, x: ONES % x, ["use g.mod("]),
    "//": (lambda g, x: x // 2, ["operator floordiv", "g offers"]),
    "2//": (lambda g, x: 2 // x, ["floordiv", "g offers"]),
    "divmod": (lambda g, x: divmod(x, 2), ["operator divmod", "g offers"]),
    "~": (lambda g, x: ~x, ["operator invert", "use g.logical_not("]),
    "+x": (lambda g, x: +x, ["operator pos"]),
    "range": (lambda g, x: range(x), ["range() or an index"]),
}


@pytest.mark.parametrize("use", FOREIGN)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_foreign_function_is_a_type_error_that_says_what_to_use(use, outer):
    function, words = FOREIGN[use]
    with pytest.raises(TypeError) as caught:
        outer(jc.graph(function))(jnp.ones(X))
    error = caught.value
    assert isinstance(error, jc.GraphTypeError)
    assert error.where.startswith(f"{__file__}:{function.__code__.co_firstlineno}")
    said = str(error).replace(error.where, "")  # the user's line holds most words, too
    for word in (*words, "graph tensor", ADVICE):
        assert word in said


# -- operators are methods -----------------------------------------------------------------------

BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "cmp_lt": operator.lt,
    "cmp_le": operator.le,
    "cmp_gt": operator.gt,
    "cmp_ge": operator.ge,
}
MIRRORED = {"cmp_lt": "cmp_gt", "cmp_gt": "cmp_lt", "cmp_le": "cmp_ge", "cmp_ge": "cmp_le"}
A = jnp.asarray([[[0.5, 1.0, 2.0, 3.0]]])
B = jnp.asarray([[[2.0, 1.0, 0.5, 1.5]]])
eager_and_jit = pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])


def only_call(graph, *arrays):
    (call,) = graph.trace(*arrays)[1].spec.calls
    return call


@pytest.mark.parametrize("method", BINARY)
@eager_and_jit
def test_operator_between_tensors_is_the_method(method, outer):
    op = BINARY[method]
    graph = jc.graph(lambda g, x, y: op(x, y))
    np.testing.assert_allclose(outer(graph)(A, B), op(A, B), rtol=1e-6)
    call = only_call(graph, A, B)
    assert call.node.method == method
    assert [name for _, name in call.inputs] == ["x", "y"]


OTHERS = {"int": 2, "float": 1.5, "jax": B, "numpy": np.asarray(B), "scalar": np.float32(1.5)}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("method", BINARY)
@eager_and_jit
def test_operator_beside_a_number_or_an_array_on_either_side(method, other, outer):
    op, value = BINARY[method], OTHERS[other]
    right, left = (
        jc.graph(lambda g, x: op(x, value)),
        jc.graph(lambda g, x: op(value, x)),
    )
    np.testing.assert_allclose(outer(right)(A), op(A, value), rtol=1e-6)
    np.testing.assert_allclose(outer(left)(A), op(value, A), rtol=1e-6)
    call = only_call(right, A)
    assert call.node.method == method
    assert call.inputs[0][1] == "x"
    call = only_call(left, A)
    names = [name for _, name in call.inputs]
    if call.node.method == method:
        assert names[1] == "x"
    else:  # Python asks the tensor for the mirrored comparison
        assert (call.node.method, names[0]) == (MIRRORED[method], "x")


@pytest.mark.parametrize(("method", "op"), [("neg", operator.neg), ("abs", abs)])
@eager_and_jit
def test_operator_of_one_tensor_is_the_method(method, op, outer):
    graph = jc.graph(lambda g, x: op(x))
    np.testing.assert_array_equal(outer(graph)(A - 1), op(A - 1))
    assert only_call(graph, A).node.method == method


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@eager_and_jit
def test_matrix_product_operator_is_matmul(make, outer):
    x, w = (np.arange(n, dtype=np.float32).reshape(s) for n, s in ((8, (1, 2, 4)), (12, (1, 4, 3))))
    between = jc.graph(lambda g, x, w: x @ w)
    behind, before = jc.graph(lambda g, x: x @ make(w)), jc.graph(lambda g, w: make(x) @ w)
    for got in (outer(between)(x, w), outer(behind)(x), outer(before)(w)):
        np.testing.assert_array_equal(got, x @ w)
    for graph, arrays in ((between, (x, w)), (behind, (x,)), (before, (w,))):
        assert only_call(graph, *arrays).node.method == "matmul"


def test_numpys_function_behind_an_operator_is_the_method():
    graph = jc.graph(lambda g, x, y: np.less_equal(np.subtract(x, np.asarray(B)), y))
    np.testing.assert_array_equal(graph(A, B), A - B <= B)
    calls = graph.trace(A, B)[1].spec.calls
    assert [call.node.method for call in calls] == ["sub", "cmp_le"]


def test_operators_make_the_same_graph_as_the_methods():
    def operators(g, x, y):
        return abs(-(x * 2.0 - y) / (y**2 + 1))

    def methods(g, x, y):
        top = g.neg(g.sub(g.mul(x, 2.0), y))
        return g.abs(g.div(top, g.add(g.pow(y, 2), 1)))

    specs = [jc.graph(f).trace(A, B)[1].spec for f in (operators, methods)]
    assert specs[0].canonical() == specs[1].canonical()
    assert [call.node.method for call in specs[0].calls] == "mul sub neg pow add div abs".split()


def test_an_operator_between_what_does_not_fit_names_its_line():
    with pytest.raises(jc.GraphError) as caught:
        jc.graph(lambda g, x, y: x - y)(jnp.ones((1, 3)), jnp.ones((1, 4)))
    assert "g.sub" in str(caught.value)
    assert caught.value.where.startswith(__file__)
