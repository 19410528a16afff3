"""What goes through a graph: pytrees of arguments and results, and what g's tensors can do."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

X = (2, 3, 4)


@pytest.fixture
def x(key):
    return jax.random.normal(key, X)


def spec_of(function, *arrays):
    return jc.graph(function).trace(*arrays)[1].spec


# -- arguments and results -------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


@pytest.mark.parametrize("tree", [lambda a, b: [a, b], lambda a, b: {"p": a, "q": (b,)}, Pair])
def test_pytrees_go_in_and_come_out(tree, x):
    f = jc.graph(lambda g, p: jax.tree.map(lambda leaf: g.relu(leaf), p))
    got = jax.jit(f)(tree(x, -x))
    want = tree(jax.nn.relu(x), jax.nn.relu(-x))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_inputs_are_named_after_the_arguments(x):
    spec = spec_of(lambda g, first, p, *more: g.add(g.add(first, p["w"]), more[0]), x, {"w": x}, x)
    assert spec.inputs == ("first", "p.w", "x2")


RESULTS = {
    "pass_through": (lambda g, x, y: (x, g.relu(x), y), lambda x, y: (x, jax.nn.relu(x), y), 1),
    "duplicate": (lambda g, x, y: [g.relu(x)] * 2, lambda x, y: [jax.nn.relu(x)] * 2, 1),
    "intermediate": (
        lambda g, x, y: (lambda s: {"sum": s, "out": g.relu(s)})(g.add(x, y)),
        lambda x, y: {"sum": x + y, "out": jax.nn.relu(x + y)},
        2,
    ),
    "none_kept": (lambda g, x, y: (None, g.relu(x)), lambda x, y: (None, jax.nn.relu(x)), 1),
    "unused_operand": (lambda g, x, y: g.relu(y), lambda x, y: jax.nn.relu(y), 1),
    "same_operand_twice": (lambda g, x, y: g.mul(x, x), lambda x, y: x * x, 1),
}


@pytest.mark.parametrize("what", RESULTS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_come_back_in_their_places(what, wrap, x):
    function, plain, outputs = RESULTS[what]
    got, want = wrap(jc.graph(function))(x, -x), plain(x, -x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(spec_of(function, x, x).outputs) == outputs


def test_operations_and_operands_that_reach_no_output_are_pruned(x):
    def function(g, x, y, z):
        g.add(g.mul(x, z), 3.0)
        return g.relu(y)

    spec = spec_of(function, x, x, x)
    assert [call.node.method for call in spec.calls] == ["relu"]
    assert spec.inputs == ("y",)
    assert len(spec.tensors) == 2
    assert not spec.constants


# -- tensors ---------------------------------------------------------------------------------------

ONE = np.full((1, 1, 4), 1.5, np.float32)
OPERATORS = {
    "x + y": lambda x, y, c: x + y,
    "x * y": lambda x, y, c: x * y,
    "x + 2": lambda x, y, c: x + 2,
    "2 + x": lambda x, y, c: 2 + x,
    "x * 0.5": lambda x, y, c: x * 0.5,
    "0.5 * x": lambda x, y, c: 0.5 * x,
    "x * True": lambda x, y, c: x * True,
    "x + c": lambda x, y, c: x + c,
    "c + x": lambda x, y, c: c + x,
    "x * c": lambda x, y, c: x * c,
    "c * x": lambda x, y, c: c * x,
    "chain": lambda x, y, c: 0.5 * (c + x) * y + 1,
}


@pytest.mark.parametrize(
    "make", [jnp.asarray, np.asarray, np.float64], ids=["jax", "numpy", "float64"]
)
@pytest.mark.parametrize("what", OPERATORS)
def test_operator(what, make, x):
    op, c = OPERATORS[what], make(ONE)
    got = jc.graph(lambda g, x, y: g.relu(op(x, y, c)))(x, x + 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, jax.nn.relu(op(x, x + 1, ONE)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_python_numbers_do_not_promote(dtype, x):
    assert jc.graph(lambda g, x: 2.0 * x + 1)(x.astype(dtype)).dtype == dtype


@pytest.mark.parametrize("spelling", [jnp.bfloat16, "bfloat16", "BFLOAT16", np.dtype(jnp.bfloat16)])
def test_set_data_type_rounds_the_output_and_what_follows(spelling, x):
    f = jc.graph(lambda g, x: (lambda y: (y, g.mul(y, 1.0)))(g.mul(x, 1.0).set_data_type(spelling)))
    rounded, follower = f(x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(follower.astype(jnp.float32), rounded.astype(jnp.float32))


def test_set_data_type_after_use_is_refused(x):
    def function(g, x):
        y = g.relu(x)
        z = g.relu(y)
        y.set_data_type("float16")
        return z

    with pytest.raises(jc.GraphError, match="after relu"):
        jc.graph(function)(x)


def test_set_dim_gives_a_reduction_its_shape(x):
    got = jc.graph(lambda g, x: g.reduction(x, mode="ADD").set_dim([2, 1, 4]))(x)
    np.testing.assert_allclose(got, x.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [[1.0, 3.0, 1.0], np.array([1, 3, 1])], ids=["floats", "numpy"])
def test_output_dimensions_become_integers(dim, x):
    assert spec_of(lambda g, x: g.reduction(x, out_dims=dim), x).is_static


def test_pygraphs_setters_and_name_are_accepted(x):
    got = jc.graph(lambda g, x: g.relu(x, name="n").set_output(True).set_name("y"))(x)
    np.testing.assert_array_equal(got, jax.nn.relu(x))


def test_tensor_knows_shape_dtype_and_name(x):
    def function(g, x):
        assert (x.name, x.shape, x.ndim, x.dtype, x.get_dim()) == ("x", X, 3, jnp.float32, [*X])
        assert "float32[2,3,4]" in repr(x)
        return g.relu(x)

    assert jc.graph(function)(x).shape == X


def test_tensor_of_another_graph_is_refused(x):
    leaked = []
    jc.graph(lambda g, x: (leaked.append(x), g.relu(x))[1])(x)
    with pytest.raises(jc.GraphError, match="another graph"):
        jc.graph(lambda g, y: g.add(y, leaked[0]))(x)


def test_array_without_dimensions_stands_for_a_number(x):
    got = jc.graph(lambda g, x: jnp.float32(2) * x + np.float32(1))(x)
    np.testing.assert_allclose(got, 2 * x + 1, rtol=1e-6)
