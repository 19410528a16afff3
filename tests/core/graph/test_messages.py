"""Wrong use: which kind of error it raises, what it says, and that it points at the user's line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_cudnn as jc
from jax_cudnn._core.errors import shown

X, W = (1, 4, 8), (1, 8, 2)
ONES = jnp.ones(X)
Type, Value = TypeError, ValueError


def raised(function, *arrays, run=lambda f: f):
    with pytest.raises(jc.JaxCudnnError) as caught:
        run(jc.graph(function))(*arrays)
    return caught.value


# What must be said; "g.m" is the method that the message must offer.
FOREIGN = {
    "jnp.sort": (lambda g, x: jnp.sort(x), ["sort", "g offers"]),
    "jnp.sum": (lambda g, x: jnp.sum(x), ["use g.reduction("]),
    "nn.gelu": (lambda g, x: jax.nn.gelu(x), ["use g.gelu_approx_tanh("]),
    "lax.conv": (lambda g, x: lax.conv_general_dilated(x, x, (1,), "SAME"), ["g.conv_fprop"]),
    "np.tanh": (lambda g, x: np.tanh(x), ["use g.tanh("]),
    "index": (lambda g, x: x[0], ["indexing", "use g.slice("]),
    "if": (lambda g, x: g.relu(x) if x else x, ["if, while, and, or", "g.binary_select("]),
    "eq": (lambda g, x: x == 0, ["comparison eq"]),
    "numpy_neq": (lambda g, x: np.ones(X) != x, ["use g.cmp_neq("]),
    "mod": (lambda g, x: x % 2, ["operator mod", "use g.mod("]),
}


@pytest.mark.parametrize("use", FOREIGN)
def test_foreign_function_is_a_type_error_that_says_what_to_use(use):
    function, words = FOREIGN[use]
    error = raised(function, ONES, run=jax.jit)
    assert isinstance(error, jc.GraphTypeError)
    assert error.where.startswith(f"{__file__}:{function.__code__.co_firstlineno}")
    said = str(error).replace(error.where, "")  # the user's line holds most words, too
    for word in (*words, "graph tensor", "apply jnp outside the graph"):
        assert word in said


WRONG = {
    "port": (lambda g, x, w: g.matmul(x, w=w), Type, ["g.matmul", "'B'", "expected: g.matmul(A"]),
    "k": (lambda g, x, w: g.matmul(w, x), Value, ["g.matmul", "'k'", "k = 2", "k = 4"]),
    "shapes": (lambda g, x, w: x - w, Value, ["g.sub", "do not broadcast", "[1, 8, 2]"]),
    "window": (lambda g, x, w: g.conv_fprop(x, x, dilation=[2]), Value, ["at most 8", "15"]),
    "reshape": (lambda g, x, w: g.reshape(x, out_dims=[5, 5]), Value, ["25 elements"]),
    "transpose": (lambda g, x, w: g.transpose(x, [0, 1, 1]), Value, ["each of 0 to 2 once"]),
    "step": (lambda g, x, w: g.slice(x, [slice(None, None, -1)] * 3), Value, ["at least 1"]),
    "complex": (lambda g, x, w: x * 1j, Type, ["g.mul", "complex"]),
    "bool": (lambda g, x, w: x * np.ones(X, bool), Type, ["g.mul", "bool", "astype"]),
    "typed": (lambda g, x, w: x.set_data_type("bfloat16"), Value, ["input x", "astype"]),
    "overflow": (lambda g, x, w: x * 1e300, Value, ["g.mul", "float32", "1e+300"]),
    "astype": (lambda g, x, w: x.astype("int8"), AttributeError, [".astype", "set_data_type"]),
    "name": (
        lambda g, x, w: g.conv(x, x),
        AttributeError,
        ["use g.conv_fprop"],
    ),
    "nested": (lambda g, x, w: jc.graph(lambda h, y: h.relu(y))(x), Type, ["nested", ".fn(g"]),
    "result": (lambda g, x, w: (g.relu(x), 1.0), Type, ["not a graph tensor", "got: 1.0"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_call_points_at_the_users_line(what):
    function, kind, words = WRONG[what]
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
    assert all(part in str(error) for part in (error.expected, error.got, error.why))


def test_values_are_shown_on_one_line():
    for value, text in (
        ({"a": np.ones((50, 4)), "b": (1.5,)}, "{'a': float64[50, 4] array, 'b': (1.5,)}"),
        ((np.int64(-3), "x"), "(-3, 'x')"),
        ({1: 2, "a": 3}, "{1: 2, 'a': 3}"),
        ([np.int64(7)] * 300, f"[{'7, ' * 300}"[:200]),
    ):
        assert shown(value) == text


def test_wrong_results_and_arguments_are_refused():
    for function, more, kind, words in (
        (lambda g, x: jnp.ones(3), (), Type, "not a graph tensor"),
        (lambda g, x: x, (), Value, "no result"),
        (lambda g, x, y: g.relu(y), (ONES.astype("complex64"),), Type, "complex64"),
        (lambda g, x, y: g.relu(x), (object(),), Type, "not an array"),
    ):
        error = raised(function, ONES, *more)
        assert isinstance(error, kind)
        assert words in str(error)
    with pytest.raises(ZeroDivisionError):  # the user's own pass through
        jc.graph(lambda g, x: g.relu(x, negative_slope=1 / 0))(ONES)


IMAGE, QUERY, MATRIX = (jnp.ones(shape) for shape in ((1, 4, 8, 8), (1, 8, 2, 8), (4, 4)))
FILTER = jnp.ones((4, 4, 3, 3))
OPS = jc.ops
SAID = {  # a call, and words of its error
    "traced strides": (lambda n: OPS.conv(IMAGE, FILTER, strides=n), "strides.*static_argnames"),
    "traced padding": (
        lambda n: OPS.conv(IMAGE, FILTER, padding=[(n, n)] * 2),
        "padding.*static_argnames",
    ),
    "traced groups": (lambda n: OPS.conv(IMAGE, FILTER, groups=n), "groups.*static_argnames"),
    "traced flag": (lambda n: OPS.matmul(MATRIX, MATRIX, transpose_b=n), "static_argnames"),
    "array as a flag": (
        lambda _: OPS.dot_product_attention(QUERY, QUERY, QUERY, is_causal=jnp.array(True)),
        "is_causal is not a Python bool",
    ),
    "channels": (lambda _: OPS.conv(IMAGE, FILTER[:, :3]), '"HWIO"'),
    "one gpu": (lambda _: jc.plan(OPS.matmul, MATRIX, MATRIX, gpu="H200"), r'gpus=\["H200"\]'),
    "several gpus": (
        lambda _: jc.accelerate(jnp.matmul).report(MATRIX, MATRIX, gpus=["H200"]),
        'gpu="H200"',
    ),
    "no graph": (
        lambda _: jc.plans(OPS.float8_matmul, MATRIX, MATRIX, gpus=["H200"]),
        "XLA runs some of jax_cudnn.ops",
    ),
    "float8 of integers": (
        lambda _: OPS.float8_matmul(MATRIX.astype("int32"), MATRIX),
        r"expected: bfloat16, float16, float32\n",
    ),
    "jax's name": (lambda _: jc.graph(lambda g, x: g.silu(x))(ONES), "use g.swish"),
    "another's name": (lambda _: jc.graph(lambda g, x: g.conv2d(x))(ONES), "use g.conv_fprop"),
    "misspelt dtype": (
        lambda _: jc.graph(lambda g, x: g.relu(x).set_data_type("flaot16"))(ONES),
        "did you mean 'float16'",
    ),
    "misspelt option": (
        lambda _: jc.graph(lambda g, x: g.relu(x), implemenation="cudnn"),
        "did you mean 'implementation'",
    ),
    "number as a key": (
        lambda _: OPS.dot_product_attention(*[QUERY] * 3, dropout_rate=0.1, dropout_rng=0),
        r"jax.random.key\(0\)",
    ),
    "frequencies and scale": (
        lambda _: OPS.rotary_embedding(QUERY, frequencies=OPS.rotary_frequencies(8)),
        "frequencies, scale = ",
    ),
    "frequencies and base": (
        lambda _: OPS.rotary_embedding(QUERY, frequencies=jnp.ones(4), base=5e5),
        "base is of the default frequencies",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_functions_say_what_to_do(name):
    call, words = SAID[name]
    with pytest.raises(jc.JaxCudnnError, match=f"(?s){words}"):
        jax.jit(call)(2)
