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


def test_pytrees_go_in_and_come_out(x):
    f = jc.graph(lambda g, p: jax.tree.map(lambda leaf: g.relu(leaf), p))
    for tree in ([x, -x], {"p": x, "q": (-x,)}, Pair(x, -x)):
        got, want = jax.jit(f)(tree), jax.tree.map(jax.nn.relu, tree)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    spec = spec_of(lambda g, first, p, *more: g.add(g.add(first, p["w"]), more[0]), x, {"w": x}, x)
    assert spec.inputs == ("first", "p.w", "x2")  # named after the arguments


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
def test_results_come_back_in_their_places(what, x):
    function, plain, outputs = RESULTS[what]
    got, want = jax.jit(jc.graph(function))(x, -x), plain(x, -x)
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

OPERATORS = {
    "numbers": lambda x, y, c: 2 + x * 0.5 + (0.5 * x + 2) + x * True,
    "arrays": lambda x, y, c: (x + c) * c + c * (c + x),
    "chain": lambda x, y, c: 0.5 * (c + x) * y + 1 + x,
}


@pytest.mark.parametrize("what", OPERATORS)
def test_operator(what, x):
    op = OPERATORS[what]
    one = np.full((1, 1, 4), 1.5, np.float32)

    def of(constant):
        return jc.graph(lambda g, x, y: g.relu(op(x, y, constant)))

    for make in (jnp.asarray, np.asarray, np.float64):
        got = of(make(one))(x, x + 1)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, jax.nn.relu(op(x, x + 1, one)), rtol=1e-5, atol=1e-6)


def test_set_data_type_rounds_the_output_and_what_follows(x):
    for spelling in (jnp.bfloat16, "BFLOAT16", np.dtype(jnp.bfloat16)):
        f = lambda g, x, s=spelling: (y := g.mul(x, 1.0).set_data_type(s), g.mul(y, 1.0))  # noqa: E731
        rounded, follower = jc.graph(f)(x)
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


def test_pygraphs_setters_and_shapes_of_any_integers_are_accepted(x):
    for dim in ([2, 1, 4], [2.0, 1.0, 4.0], np.array([2, 1, 4])):
        spec = spec_of(lambda g, x, d=dim: g.reduction(x, out_dims=d), x)
        assert spec.is_static
    named = lambda g, x: g.reduction(x, mode="ADD", name="n").set_output(True).set_name("y")  # noqa: E731
    got = jc.graph(lambda g, x: named(g, x).set_dim([2, 1, 4]))(x)
    np.testing.assert_allclose(got, x.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


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
