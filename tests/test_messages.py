"""Wrong use, what it raises, which words it says, and that it points at the user's own line."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_cudnn as jc

X, W = (1, 4, 8), (1, 8, 2)
ONES = jnp.ones(X)
ADVICE = "apply jnp outside the graph"

# One line each, so that the line named in the message can be compared. ``say`` lists what must
# occur; "g.m" among them is the method that the message must offer.
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
    "1-": (lambda g, x: 1 - x, ["rsub"]),
    "array-": (lambda g, x: ONES - x, ["sub"]),
    "numpy-": (lambda g, x: np.ones(X) - x, ["sub"]),
    "/": (lambda g, x: x / 2, ["div"]),
    "1/": (lambda g, x: 2 / x, ["rtruediv"]),
    "@": (lambda g, x: x @ x, ["matmul", "g.matmul"]),
    "array@": (lambda g, x: ONES @ x, ["matmul", "g.matmul"]),
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


def raised(function, *arrays, **static):
    with pytest.raises(jc.JaxCudnnError) as caught:
        jc.graph(function)(*arrays, **static)
    return caught.value


def own_line(function):
    return f"{__file__}:{function.__code__.co_firstlineno}"


@pytest.mark.parametrize("use", FOREIGN)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_foreign_function_is_a_type_error_that_says_what_to_use(use, outer):
    function, words = FOREIGN[use]
    with pytest.raises(TypeError) as caught:
        outer(jc.graph(function))(jnp.ones(X))
    error = caught.value
    assert isinstance(error, jc.GraphTypeError)
    for word in (*words, "graph tensor", ADVICE):
        assert word in str(error)
    assert error.where.startswith(own_line(function))


BAD_CALLS = {
    "unknown port": (
        lambda g, x, w: g.matmul(x, w=w),
        TypeError,
        ["g.matmul", "'B'", "expected: g.matmul(A, B"],
    ),
    "missing port": (lambda g, x, w: g.matmul(x), TypeError, ["g.matmul", "'B'"]),
    "too many": (lambda g, x, w: g.relu(x, 0.0, 0.0, 1.0, 2.0), TypeError, ["g.relu", "too many"]),
    "rank": (
        lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]),
        ValueError,
        ["padding", "1 numbers", "[1, 1]"],
    ),
    "no contraction": (
        lambda g, x, w: g.matmul(w, x),
        ValueError,
        ["g.matmul", "'k'", "k = 2", "k = 1"],
    ),
    "no broadcast": (
        lambda g, x, w: g.add(x, w),
        ValueError,
        ["g.add", "do not broadcast", "[1, 8, 2]"],
    ),
    "bias too large": (
        lambda g, x, w: g.bias(g.reduction(x), x),
        ValueError,
        ["bias is larger", "swap"],
    ),
    "None operand": (
        lambda g, x, w: g.add(x, None),
        TypeError,
        ["g.add", "'b' is no tensor", "None"],
    ),
    "string operand": (lambda g, x, w: x + "a", TypeError, ["g.add", "'b' is no tensor", "'a'"]),
    "complex operand": (lambda g, x, w: x * 1j, TypeError, ["g.mul", "complex"]),
    "integer operand": (
        lambda g, x, w: x * np.ones(X, int),
        TypeError,
        ["g.mul", "int32", "astype"],
    ),
    "scalar array": (lambda g, x, w: x * jnp.float32(2), ValueError, ["g.mul", "ranks", "reshape"]),
    "compute type": (
        lambda g, x, w: g.relu(x, compute_data_type="HALF"),
        TypeError,
        ["g.relu", "float32"],
    ),
    "reduction mode": (
        lambda g, x, w: g.reduction(x, mode="MUL_"),
        ValueError,
        ["reduction mode", "'ADD'"],
    ),
    "reduction dims": (
        lambda g, x, w: g.reduction(x, out_dims=[1, 2, 1]),
        ValueError,
        ["out_dims=[1, 2, 1]"],
    ),
    "set_dim": (lambda g, x, w: g.reduction(x).set_dim([1, 3, 1]), ValueError, ["[1, 3, 1]"]),
    "set_dim elsewhere": (
        lambda g, x, w: g.relu(x).set_dim([1, 1, 1]),
        ValueError,
        ["follows from its inputs"],
    ),
    "both paddings": (
        lambda g, x, w: g.conv_fprop(x, w, padding=[1], pre_padding=[1]),
        ValueError,
        ["twice"],
    ),
    "negative stride": (
        lambda g, x, w: g.conv_fprop(x, w, stride=[0]),
        ValueError,
        ["stride", "at least 1"],
    ),
    "large window": (
        lambda g, x, w: g.conv_fprop(x[:] if 0 else w, x),
        ValueError,
        ["window", "8"],
    ),
    "conv mode": (
        lambda g, x, w: g.conv_fprop(x, x, convolution_mode="FULL"),
        ValueError,
        ["convolution_mode"],
    ),
    "nested": (lambda g, x, w: jc.graph(lambda h, y: h.relu(y))(x), TypeError, ["nested", ".fn(g"]),
}


@pytest.mark.parametrize("use", BAD_CALLS)
def test_wrong_call_points_at_the_users_line(use):
    function, kind, words = BAD_CALLS[use]
    error = raised(function, jnp.ones(X), jnp.ones(W))
    assert isinstance(error, kind)
    for word in words:
        assert word in str(error)
    assert error.where.startswith(own_line(function))


def test_line_is_the_innermost_of_the_users_helpers():
    def helper(g, x, w):
        return g.matmul(w, x)

    error = raised(lambda g, x, w: g.relu(helper(g, x, w)), jnp.ones(X), jnp.ones(W))
    assert f":{helper.__code__.co_firstlineno + 1}, in helper: return g.matmul(w, x)" in error.where


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("int32", ["matmul", "'A'", "bfloat16", "astype"]),
        ("bool", ["bool"]),
        ("complex64", ["complex64", "astype"]),
    ],
)
def test_wrong_dtype_says_what_is_taken(dtype, words):
    error = raised(lambda g, x, w: g.matmul(x, w), jnp.ones(X, dtype), jnp.ones(W))
    assert isinstance(error, TypeError)
    for word in words:
        assert word in str(error)


def test_unknown_method_suggests_the_nearest_and_lists_all():
    with pytest.raises(AttributeError, match=r"did you mean g\.conv_fprop.*relu"):
        jc.graph(lambda g, x: g.conv(x, x))(jnp.ones(X))


RETURNS = {
    "array": (lambda g, x: jnp.ones(3), TypeError, "no graph tensor"),
    "number": (lambda g, x: (g.relu(x), 1.0), TypeError, "float: 1.0"),
    "generator": (lambda g, x: (yield g.relu(x)), TypeError, "generator"),
    "nothing": (lambda g, x: None, ValueError, "no result"),
    "empty": (lambda g, x: [], ValueError, "no result"),
    "its argument": (lambda g, x: x, ValueError, "no result"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_wrong_return_is_refused(what):
    function, kind, words = RETURNS[what]
    error = raised(function, jnp.ones(X))
    assert isinstance(error, kind)
    assert words in str(error)


@pytest.mark.parametrize(
    "argument", [object(), len, jax.ShapeDtypeStruct], ids=["object", "function", "class"]
)
def test_argument_that_is_no_array_is_named(argument):
    error = raised(lambda g, x, y: g.relu(x), jnp.ones(X), argument)
    assert isinstance(error, TypeError)
    assert "no array" in str(error)


def test_every_part_of_a_message_is_an_attribute_and_a_line():
    error = raised(lambda g, x, w: g.matmul(w, x), jnp.ones(X), jnp.ones(W))
    for part in (error.expected, error.got, error.why, error.where):
        assert part
        assert part in str(error)


def test_users_own_exceptions_pass_through():
    def function(g, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        jc.graph(function)(jnp.ones(X))


# -- known gaps: remove the mark with the fix ------------------------------------------------------

GAPS = {
    "np.sum": (lambda g, x: np.sum(x), "sum"),
    "list operand": (lambda g, x: g.relu([x]), "is no tensor"),
    "unhashable attribute": (lambda g, x: g.relu(x, negative_slope=[1]), "negative_slope"),
    "string attribute": (lambda g, x: g.relu(x, negative_slope="a"), "negative_slope"),
    "array attribute": (lambda g, x: g.relu(x, negative_slope=ONES[0, 0, 0]), "negative_slope"),
    "out_dims": (lambda g, x: g.reduction(x, out_dims=1), "out_dims"),
    "set_dim": (lambda g, x: g.reduction(x).set_dim(None), "set_dim"),
    "only numbers": (lambda g, x: g.add(1.0, 2.0), "tensor"),
    "huge number": (lambda g, x: x * 1e300, "float32"),
    "no tensor returned": (lambda g, x: (g.relu(x), 1.0), "no graph tensor"),
    "dtype of an input": (lambda g, x: g.relu(x.set_data_type("bfloat16")), "set_data_type"),
    "attribute of arrays": (lambda g, x: x.astype("bfloat16"), "graph tensor"),
}


@pytest.mark.xfail(reason="message without our words or the user's line", strict=True)
@pytest.mark.parametrize("use", GAPS)
def test_known_gap(use):
    function, word = GAPS[use]
    error = raised(function, jnp.ones(X))
    assert word in error.summary
    assert error.where.startswith(own_line(function))
