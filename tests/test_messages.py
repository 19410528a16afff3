"""Wrong use, what it raises, which words it says, and that it points at the user's own line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

X, W = (1, 4, 8), (1, 8, 2)
ONES = jnp.ones(X)


def raised(function, *arrays, **static):
    with pytest.raises(jc.JaxCudnnError) as caught:
        jc.graph(function)(*arrays, **static)
    return caught.value


def own_line(function):
    return f"{__file__}:{function.__code__.co_firstlineno}"


def said(error):
    """The message without the user's line, which holds most words, too."""
    return str(error).replace(error.where or "no line", "")


BAD_CALLS = {
    "unknown port": (
        lambda g, x, w: g.matmul(x, w=w),
        TypeError,
        ["g.matmul", "'B'", "expected: g.matmul(A, B"],
    ),
    "missing port": (lambda g, x, w: g.matmul(x), TypeError, ["g.matmul", "'B'"]),
    "too many": (lambda g, x, w: g.relu(x, 0.0, 0.0, 1.0, 2.0), TypeError, ["g.relu", "too many"]),
    "rank": (
        lambda g, x, w: g.conv_fprop(x, x, padding=[1, 1]),
        ValueError,
        ["padding", "1 numbers", "[1, 1]"],
    ),
    "no contraction": (
        lambda g, x, w: g.matmul(w, x),
        ValueError,
        ["g.matmul", "'k'", "k = 2", "k = 4"],
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
    "boolean operand": (
        lambda g, x, w: x * np.ones(X, bool),
        TypeError,
        ["g.mul", "bool", "astype"],
    ),
    "compute type": (
        lambda g, x, w: g.relu(x, compute_data_type="INT64"),
        TypeError,
        ["g.relu", "float32", "int64"],
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
        lambda g, x, w: g.conv_fprop(x, x, dilation=[2]),
        ValueError,
        ["window", "at most 8", "15"],
    ),
    "conv mode": (
        lambda g, x, w: g.conv_fprop(x, x, convolution_mode="FULL"),
        ValueError,
        ["convolution_mode"],
    ),
    "list operand": (lambda g, x, w: g.relu([x]), TypeError, ["g.relu", "'input' is no tensor"]),
    "list attribute": (
        lambda g, x, w: g.relu(x, negative_slope=[1]),
        TypeError,
        ["g.relu", "'negative_slope'"],
    ),
    "string attribute": (lambda g, x, w: g.swish(x, swish_beta="a"), TypeError, ["'swish_beta'"]),
    "array attribute": (
        lambda g, x, w: g.relu(x, negative_slope=ONES[0, 0, 0]),
        TypeError,
        ["'negative_slope'", "static"],
    ),
    "out_dims": (lambda g, x, w: g.reduction(x, out_dims=1), ValueError, ["out_dims", "integers"]),
    "set_dim to nothing": (lambda g, x, w: g.reduction(x).set_dim(None), ValueError, ["integers"]),
    "only numbers": (lambda g, x, w: g.add(1.0, 2.0), TypeError, ["g.add", "[1.0, 2.0]"]),
    "huge number": (lambda g, x, w: x * 1e300, ValueError, ["g.mul", "float32", "1e+300"]),
    "dtype of an input": (
        lambda g, x, w: x.set_data_type("bfloat16"),
        ValueError,
        ["set_data_type", "input x", "astype"],
    ),
    "array method": (
        lambda g, x, w: x.astype("int8"),
        AttributeError,
        [".astype", "set_data_type"],
    ),
    "number returned": (lambda g, x, w: (g.relu(x), 1.0), TypeError, ["no graph tensor", "1.0"]),
    "nested": (lambda g, x, w: jc.graph(lambda h, y: h.relu(y))(x), TypeError, ["nested", ".fn(g"]),
}


@pytest.mark.parametrize("use", BAD_CALLS)
def test_wrong_call_points_at_the_users_line(use):
    function, kind, words = BAD_CALLS[use]
    error = raised(function, jnp.ones(X), jnp.ones(W))
    assert isinstance(error, kind)
    for word in words:
        assert word in said(error)
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
        assert word in said(error)


def test_unknown_method_suggests_the_nearest_and_lists_all():
    with pytest.raises(AttributeError, match=r"did you mean .*g\.conv_fprop") as caught:
        jc.graph(lambda g, x: g.conv(x, x))(jnp.ones(X))
    assert isinstance(caught.value, jc.GraphAttributeError)
    assert "relu" in caught.value.expected


RETURNS = {
    "array": (lambda g, x: jnp.ones(3), TypeError, "no graph tensor"),
    "number": (lambda g, x: (g.relu(x), 1.0), TypeError, "float: 1.0"),
    "nothing": (lambda g, x: None, ValueError, "no result"),
    "empty": (lambda g, x: [], ValueError, "no result"),
    "its argument": (lambda g, x: x, ValueError, "no result"),
}


@pytest.mark.parametrize("what", RETURNS)
def test_wrong_return_is_refused(what):
    function, kind, words = RETURNS[what]
    error = raised(function, jnp.ones(X))
    assert isinstance(error, kind)
    assert words in said(error)


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
