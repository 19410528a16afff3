"""What is no method of g, applied to a graph tensor: errors that say what to use."""

import math

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
    "jnp.tanh": (lambda g, x: jnp.tanh(x), ["tanh", "g offers"]),
    "jnp.exp": (lambda g, x: jnp.exp(x), ["exp", "g offers"]),
    "jnp.matmul": (lambda g, x: jnp.matmul(x, x), ["matmul", "g.matmul"]),
    "jnp.dot": (lambda g, x: jnp.dot(x, x), ["dot", "g.matmul"]),
    "jnp.einsum": (lambda g, x: jnp.einsum("bij,bij->bij", x, x), ["einsum", "g.matmul"]),
    "jnp.sum": (lambda g, x: jnp.sum(x), ["sum", "g.reduction"]),
    "jnp.add": (lambda g, x: jnp.add(x, x), ["add", "g.add"]),
    "jnp.multiply": (lambda g, x: jnp.multiply(x, 2.0), ["multiply", "g.mul"]),
    "jnp.maximum": (lambda g, x: jnp.maximum(x, 0), ["maximum", "g.relu"]),
    "jnp.reshape": (lambda g, x: jnp.reshape(x, (4, 8)), ["reshape", "g offers"]),
    "jnp.where": (lambda g, x: jnp.where(x, x, x), ["where"]),
    "jnp.concatenate": (lambda g, x: jnp.concatenate([x, x]), ["concatenate"]),
    "jnp.stack": (lambda g, x: jnp.stack([x, x]), ["stack"]),
    "jnp.asarray": (lambda g, x: jnp.asarray(x), ["asarray"]),
    "jnp.float32": (lambda g, x: jnp.float32(x), ["float32"]),
    "nn.relu": (lambda g, x: jax.nn.relu(x), ["relu", "g.relu"]),
    "nn.gelu": (lambda g, x: jax.nn.gelu(x), ["gelu", "g.gelu_approx_tanh"]),
    "nn.silu": (lambda g, x: jax.nn.silu(x), ["silu", "g.swish"]),
    "nn.sigmoid": (lambda g, x: jax.nn.sigmoid(x), ["sigmoid", "g.sigmoid"]),
    "nn.softmax": (lambda g, x: jax.nn.softmax(x), ["softmax"]),
    "lax.add": (lambda g, x: lax.add(x, x), ["add", "g.add"]),
    "lax.mul": (lambda g, x: lax.mul(x, x), ["mul", "g.mul"]),
    "lax.tanh": (lambda g, x: lax.tanh(x), ["tanh"]),
    "lax.dot_general": (
        lambda g, x: lax.dot_general(x, x, (((2,), (2,)), ((0,), (0,)))),
        ["g.matmul"],
    ),
    "lax.conv": (lambda g, x: lax.conv_general_dilated(x, x, (1,), "SAME"), ["g.conv_fprop"]),
    "lax.reduce_sum": (lambda g, x: lax.reduce_sum(x, (0,)), ["g.reduction"]),
    "lax.scan": (lambda g, x: lax.scan(lambda c, y: (c, y), x, x), ["scan"]),
    "jax.vmap": (lambda g, x: jax.vmap(lambda y: y)(x), ["graph tensor"]),
    "jax.jit": (lambda g, x: jax.jit(lambda y: y)(x), ["graph tensor"]),
    "np.tanh": (lambda g, x: np.tanh(x), ["tanh", "g offers"]),
    "np.matmul": (lambda g, x: np.matmul(x, x), ["matmul", "g.matmul"]),
    "np.asarray": (lambda g, x: np.asarray(x), ["graph tensor"]),
    "math.exp": (lambda g, x: math.exp(x), ["float()"]),
    "-": (lambda g, x: x - x, ["sub"]),
    "1-": (lambda g, x: 1 - x, ["sub"]),
    "array-": (lambda g, x: ONES - x, ["sub"]),
    "numpy-": (lambda g, x: np.ones(X) - x, ["sub"]),
    "/": (lambda g, x: x / 2, ["div"]),
    "1/": (lambda g, x: 2 / x, ["truediv"]),
    "@": (lambda g, x: x @ x, ["matmul"]),
    "array@": (lambda g, x: ONES @ x, ["matmul"]),
    "**": (lambda g, x: x**2, ["pow"]),
    "negative": (lambda g, x: -x, ["neg"]),
    "[0]": (lambda g, x: x[0], ["indexing"]),
    "if": (lambda g, x: g.relu(x) if x else x, ["if, while, and, or"]),
    "and": (lambda g, x: x and x, ["if, while, and, or"]),
    "<": (lambda g, x: x < 0, ["lt"]),
    "max": (lambda g, x: max(x, 0), ["comparison"]),
    "len": (lambda g, x: len(x), ["len()"]),
    "float": (lambda g, x: float(x), ["float()"]),
    "int": (lambda g, x: int(x), ["int()"]),
    "iteration": (lambda g, x: [y for y in x], ["iter()"]),  # noqa: C416
    "%": (lambda g, x: x % 2, ["graph tensor"]),
    "abs": (lambda g, x: abs(x), ["graph tensor"]),
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


@pytest.mark.parametrize("use", ["@", "array@"])
def test_matrix_product_operator_offers_matmul(use):
    with pytest.raises(jc.GraphTypeError) as caught:
        jc.graph(FOREIGN[use][0])(jnp.ones(X))
    assert "use g.matmul(" in caught.value.fix
