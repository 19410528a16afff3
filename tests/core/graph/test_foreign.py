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
ADVICE = "apply jnp outside the graph"

# What must be said; "g.m" is the method that the message must offer.
FOREIGN = {
    "jnp.sort": (lambda g, x: jnp.sort(x), ["sort", "g offers"]),
    "jnp.matmul": (lambda g, x: jnp.matmul(x, x), ["use g.matmul("]),
    "jnp.einsum": (lambda g, x: jnp.einsum("bij,bij->bij", x, x), ["use g.matmul("]),
    "jnp.sum": (lambda g, x: jnp.sum(x), ["use g.reduction("]),
    "jnp.where": (lambda g, x: jnp.where(x, x, x), ["use g.binary_select("]),
    "nn.gelu": (lambda g, x: jax.nn.gelu(x), ["use g.gelu_approx_tanh("]),
    "lax.dot_general": (
        lambda g, x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))),
        ["g.matmul"],
    ),
    "lax.conv": (lambda g, x: lax.conv_general_dilated(x, x, (1,), "SAME"), ["g.conv_fprop"]),
    "jax.vmap": (lambda g, x: jax.vmap(lambda y: y)(x), ["graph tensor"]),
    "np.tanh": (lambda g, x: np.tanh(x), ["use g.tanh("]),
    "np.add, written": (lambda g, x: np.add(x, x, out=np.ones(X)), ["use g.add("]),
    "np.asarray": (lambda g, x: np.asarray(x), ["graph tensor"]),
    "math.exp": (lambda g, x: math.exp(x), ["float()"]),
    "[0]": (lambda g, x: x[0], ["indexing", "use g.slice("]),
    "if": (lambda g, x: g.relu(x) if x else x, ["if, while, and, or", "g.binary_select("]),
    "==": (lambda g, x: x == 0, ["comparison eq"]),
    "numpy!=": (lambda g, x: np.ones(X) != x, ["use g.cmp_neq("]),
    "len": (lambda g, x: len(x), ["len()"]),
    "%": (lambda g, x: x % 2, ["operator mod", "use g.mod("]),
    "range": (lambda g, x: range(x), ["range() or an index"]),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_foreign_function_is_a_type_error_that_says_what_to_use(use):
    function, words = FOREIGN[use]
    for outer in (lambda f: f, jax.jit):
        with pytest.raises(jc.GraphTypeError) as caught:
            outer(jc.graph(function))(jnp.ones(X))
        error = caught.value
        assert error.where.startswith(f"{__file__}:{function.__code__.co_firstlineno}")
        said = str(error).replace(error.where, "")  # the user's line holds most words, too
        for word in (*words, "graph tensor", ADVICE):
            assert word in said


# -- operators are methods -----------------------------------------------------------------------

A = jnp.asarray([[[0.5, 1.0, 2.0, 3.0]]])
B = jnp.asarray([[[2.0, 1.0, 0.5, 1.5]]])
BINARY = ["add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge"]
METHODS = {"truediv": "div"}
MIRRORED = {"cmp_lt": "cmp_gt", "cmp_gt": "cmp_lt", "cmp_le": "cmp_ge", "cmp_ge": "cmp_le"}


def only_call(graph, *arrays):
    (call,) = graph.trace(*arrays)[1].spec.calls
    return call.node.method, [name for _, name in call.inputs]


@pytest.mark.parametrize("name", BINARY)
def test_operator_is_the_method_beside_tensors_numbers_and_arrays(name):
    op = getattr(operator, name)
    method = METHODS.get(name, f"cmp_{name}" if len(name) == 2 else name)
    between = jc.graph(lambda g, x, y: op(x, y))
    np.testing.assert_allclose(jax.jit(between)(A, B), op(A, B), rtol=1e-6)
    assert only_call(between, A, B) == (method, ["x", "y"])
    for value in (2, 1.5, B, np.asarray(B), np.float32(1.5)):
        right = jc.graph(lambda g, x, value=value: op(x, value))
        left = jc.graph(lambda g, x, value=value: op(value, x))
        np.testing.assert_allclose(right(A), op(A, value), rtol=1e-6)
        np.testing.assert_allclose(left(A), op(value, A), rtol=1e-6)
        called, names = only_call(right, A)
        assert (called, names[0]) == (method, "x")
        called, names = only_call(left, A)
        if called == method:
            assert names[1] == "x"
        else:  # Python asks the tensor for the mirrored comparison
            assert (called, names[0]) == (MIRRORED[method], "x")


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_matrix_product_operator_is_matmul(make):
    x, w = (np.arange(n, dtype=np.float32).reshape(s) for n, s in ((8, (1, 2, 4)), (12, (1, 4, 3))))
    between = jc.graph(lambda g, x, w: x @ w)
    behind, before = jc.graph(lambda g, x: x @ make(w)), jc.graph(lambda g, w: make(x) @ w)
    for got in (between(x, w), jax.jit(behind)(x), before(w)):
        np.testing.assert_array_equal(got, x @ w)


def test_operators_make_the_same_graph_as_the_methods():
    def operators(g, x, y):
        return np.less_equal(abs(-(x * 2.0 - y) / (y**2 + 1)), y)

    def methods(g, x, y):
        top = g.neg(g.sub(g.mul(x, 2.0), y))
        return g.cmp_le(g.abs(g.div(top, g.add(g.pow(y, 2), 1))), y)

    specs = [jc.graph(f).trace(A, B)[1].spec for f in (operators, methods)]
    assert specs[0].canonical() == specs[1].canonical()
