"""Wrong use, what it raises, which words it says, and that it points at the user's own line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

X, W = (1, 4, 8), (1, 8, 2)
ONES = jnp.ones(X)
Type, Value = TypeError, ValueError


def raised(function, *arrays):
    with pytest.raises(jc.JaxCudnnError) as caught:
        jc.graph(function)(*arrays)
    return caught.value


BAD_CALLS = [
    # operands
    (lambda g, x, w: g.matmul(x, w=w), Type, ["g.matmul", "'B'", "expected: g.matmul(A, B"]),
    (lambda g, x, w: g.matmul(x), Type, ["g.matmul", "'B'"]),
    (lambda g, x, w: g.relu(x, 0.0, 0.0, 1.0, 2.0), Type, ["g.relu", "too many"]),
    (lambda g, x, w: g.add(x, None), Type, ["'b' is no tensor", "None"]),
    (lambda g, x, w: x + "a", Type, ["g.add", "'b' is no tensor", "'a'"]),
    (lambda g, x, w: g.relu([x]), Type, ["g.relu", "'input' is no tensor"]),
    (lambda g, x, w: g.add(1.0, 2.0), Type, ["g.add", "[1.0, 2.0]"]),
    # shapes
    (lambda g, x, w: g.matmul(w, x), Value, ["g.matmul", "'k'", "k = 2", "k = 4"]),
    (lambda g, x, w: g.add(x, w), Value, ["g.add", "do not broadcast", "[1, 8, 2]"]),
    (lambda g, x, w: x - w, Value, ["g.sub", "do not broadcast"]),
    (lambda g, x, w: g.bias(g.reduction(x), x), Value, ["bias is larger", "swap"]),
    (lambda g, x, w: g.conv_fprop(x, x, padding=[1, 1]), Value, ["padding", "1 numbers"]),
    (lambda g, x, w: g.conv_fprop(x, x, dilation=[2]), Value, ["window", "at most 8", "15"]),
    (lambda g, x, w: g.reduction(x, out_dims=[1, 2, 1]), Value, ["out_dims=[1, 2, 1]"]),
    (lambda g, x, w: g.reduction(x).set_dim([1, 3, 1]), Value, ["[1, 3, 1]"]),
    (lambda g, x, w: g.relu(x).set_dim([1, 1, 1]), Value, ["follows from its inputs"]),
    # dtypes
    (lambda g, x, w: x * 1j, Type, ["g.mul", "complex"]),
    (lambda g, x, w: x * np.ones(X, bool), Type, ["g.mul", "bool", "astype"]),
    (lambda g, x, w: g.matmul(x, np.ones(W, "int32")), Type, ["matmul", "'B'", "astype"]),
    (lambda g, x, w: g.relu(x, compute_data_type="INT64"), Type, ["float32", "int64"]),
    (lambda g, x, w: x.set_data_type("bfloat16"), Value, ["set_data_type", "input x", "astype"]),
    (lambda g, x, w: x * 1e300, Value, ["g.mul", "float32", "1e+300"]),
    # attributes
    (lambda g, x, w: g.reduction(x, mode="MUL_"), Value, ["reduction mode", "'ADD'"]),
    (lambda g, x, w: g.reduction(x, out_dims=1), Value, ["out_dims", "integers"]),
    (lambda g, x, w: g.reduction(x).set_dim(None), Value, ["integers"]),
    (lambda g, x, w: g.conv_fprop(x, w, padding=[1], pre_padding=[1]), Value, ["twice"]),
    (lambda g, x, w: g.conv_fprop(x, w, stride=[0]), Value, ["stride", "at least 1"]),
    (lambda g, x, w: g.conv_fprop(x, x, convolution_mode="FULL"), Value, ["convolution_mode"]),
    (lambda g, x, w: g.relu(x, negative_slope=[1]), Type, ["g.relu", "'negative_slope'"]),
    (lambda g, x, w: g.relu(x, negative_slope=ONES[0, 0, 0]), Type, ["static"]),
    (lambda g, x, w: g.swish(x, swish_beta="a"), Type, ["'swish_beta'"]),
    # names
    (lambda g, x, w: x.astype("int8"), AttributeError, [".astype", "set_data_type"]),
    (lambda g, x, w: g.conv(x, x), AttributeError, ["did you mean", "g.conv_fprop", "relu"]),
    (lambda g, x, w: jc.graph(lambda h, y: h.relu(y))(x), Type, ["nested", ".fn(g"]),
    (lambda g, x, w: (g.relu(x), 1.0), Type, ["no graph tensor", "float: 1.0"]),
]


@pytest.mark.parametrize(("function", "kind", "words"), BAD_CALLS)
def test_wrong_call_points_at_the_users_line(function, kind, words):
    error = raised(function, ONES, jnp.ones(W))
    assert isinstance(error, kind)
    said = str(error).replace(error.where, "")  # the user's line holds most words, too
    for word in words:
        assert word in said
    assert error.where.startswith(f"{__file__}:{function.__code__.co_firstlineno}")


def test_line_is_the_innermost_of_the_users_helpers():
    def helper(g, x, w):
        return g.matmul(w, x)

    error = raised(lambda g, x, w: g.relu(helper(g, x, w)), ONES, jnp.ones(W))
    assert f":{helper.__code__.co_firstlineno + 1}, in helper: return g.matmul(w, x)" in error.where
    for part in (error.expected, error.got, error.why, error.where):
        assert part
        assert part in str(error)


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "words"),
    [
        (lambda g, x: jnp.ones(3), [ONES], Type, "no graph tensor"),
        (lambda g, x: None, [ONES], Value, "no result"),
        (lambda g, x: [], [ONES], Value, "no result"),
        (lambda g, x: x, [ONES], Value, "no result"),
        (lambda g, x: g.relu(x), [ONES.astype("complex64")], Type, "complex64"),
        (lambda g, x, y: g.relu(x), [ONES, object()], Type, "no array"),
        (lambda g, x, y: g.relu(x), [ONES, len], Type, "no array"),
        (lambda g, x, y: g.relu(x), [ONES, jax.ShapeDtypeStruct], Type, "no array"),
    ],
)
def test_wrong_results_and_arguments_are_refused(function, arguments, kind, words):
    error = raised(function, *arguments)
    assert isinstance(error, kind)
    assert words in str(error)


def test_users_own_exceptions_pass_through():
    def function(g, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        jc.graph(function)(ONES)
