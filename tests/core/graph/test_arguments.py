"""What goes through a graph: arguments and results of all kinds, and what g's tensors can do."""

import dataclasses
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

X = (2, 3, 4)
scale = jc.graph(lambda g, x, k: x * k)


@jc.graph
def module_level(g, x):
    return g.relu(x)


@pytest.fixture
def x(key):
    return jax.random.normal(key, X)


def spec_of(function, *arrays):
    return jc.graph(function).trace(*arrays)[1].spec


class Pair(NamedTuple):
    a: Any
    b: Any


# -- arguments and results -------------------------------------------------------------------------


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
        lambda g, x, y: {"sum": (s := g.add(x, y)), "out": g.relu(s)},
        lambda x, y: {"sum": x + y, "out": jax.nn.relu(x + y)},
        2,
    ),
    "none, unused": (lambda g, x, y: (None, g.relu(y)), lambda x, y: (None, jax.nn.relu(y)), 1),
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
    spec = spec_of(lambda g, x, y, z: (g.add(g.mul(x, z), 3.0), g.relu(y))[1], x, x, x)
    assert [call.node.method for call in spec.calls] == ["relu"]
    assert (spec.inputs, len(spec.tensors), len(spec.constants)) == (("y",), 2, 0)


LIFTED = {
    "static": lambda x: scale(x, 2.0),
    "array": lambda x: scale(x, jnp.float32(2)),
    "vmap": lambda x: jax.vmap(scale, (None, 0))(x, jnp.full(1, 2.0))[0],
    "scan": lambda x: jax.lax.scan(lambda c, k: (scale(c, k), None), x, jnp.full(1, 2.0))[0],
    "numpy's float64": lambda x: jc.graph(lambda g, x: x * np.float64(2))(x),
}


@pytest.mark.parametrize("how", LIFTED)
def test_scalar_stands_beside_tensors_of_any_rank(how, x):
    got = LIFTED[how](x)
    np.testing.assert_allclose(got, 2 * x, rtol=1e-6)
    assert LIFTED["static"](x.astype("bfloat16")).dtype == jnp.bfloat16


def test_scalar_that_was_used_as_one_stays_one(x):
    function = jc.graph(lambda g, x, k: (g.relu(k), x * k))
    with pytest.raises(jc.GraphError, match="different ranks"):
        function(x, jnp.float32(2))
    used_twice = jc.graph(lambda g, x, k: (x * k, x + k))(x, jnp.float32(2))
    np.testing.assert_allclose(used_twice[1], x + 2, rtol=1e-6)


def test_arguments_may_be_called_like_constants_and_results():
    def named(g, c0, c1, c2, c3):
        return (c0 * 2.0 + c1) * 3.0 + c2 * 5.0 + c3

    got = jc.graph(named)(*(jnp.full((1, 1), float(v)) for v in (1, 10, 100, 1000)))
    assert got.item() == (1 * 2 + 10) * 3 + 500 + 1000
    keys = {"relu.0::OUT_0": jnp.full((1, 1), 7.0), "captured0": jnp.full((1, 1), 11.0)}
    outer = jnp.full((1, 1), 13.0)
    function = jc.graph(lambda g, d: g.relu(d["relu.0::OUT_0"]) * d["captured0"] + outer)
    assert function(keys).item() == 7 * 11 + 13


def test_statics_that_are_equal_and_yet_different(x):
    y = jnp.ones((1, 1))
    plus, minus = (jc.graph(lambda g, y, z=z: y * z)(y).item() for z in (0.0, -0.0))
    assert (np.signbit(plus), np.signbit(minus)) == (False, True)
    assert np.signbit(scale(y, -0.0).item()) > np.signbit(scale(y, 0.0).item())
    specs = [spec_of(lambda g, y: y * float("nan"), y) for _ in "ab"]
    assert specs[0] is specs[1]
    function = jc.graph(lambda g, x, *, s: g.relu(x) if isinstance(s, Pair) else g.sigmoid(x))
    np.testing.assert_allclose(function(x, s=Pair(1, 2)), jax.nn.relu(x))
    np.testing.assert_allclose(function(x, s=(1, 2)), jax.nn.sigmoid(x), rtol=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Param:
    """A box of one array that stands for it, as Flax has."""

    value: jax.Array

    def __jax_array__(self):
        return self.value


def test_boxes_foreign_dtypes_classes_and_pickles(x):
    np.testing.assert_allclose(scale(x, Param(x)), x * x, rtol=1e-6)
    closed = Param(x)
    np.testing.assert_allclose(jc.graph(lambda g, y: y * closed)(x), x * x, rtol=1e-6)
    others = (jax.random.key(0), jnp.ones(2, complex), jnp.arange(3))  # pass through
    _, got = jc.graph(lambda g, x, *others: (g.relu(x), others))(x, *others)
    assert [a.dtype for a in got] == [a.dtype for a in others]

    class Layer:
        activation = module_level

    np.testing.assert_array_equal(Layer().activation(x), jax.nn.relu(x))
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_empty_arrays_run_everywhere():
    function, empty = jax.jit(module_level), jnp.ones((2, 0, 4))
    assert function(empty).shape == empty.shape
    with jc.target("H200"):
        text = function.trace(empty).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text


# -- tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray, np.float64])
def test_operators_beside_tensors_numbers_and_arrays(make, x):
    one = np.full((1, 1, 4), 1.5, np.float32)

    def op(x, y, c):
        return 2 + x * 0.5 + 0.5 * x + x * True + (x + c) * c + c * (c + x) * y

    constant = make(one)
    got = jc.graph(lambda g, x, y: g.relu(op(x, y, constant)))(x, x + 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, jax.nn.relu(op(x, x + 1, one)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spelling", [jnp.bfloat16, "BFLOAT16", np.dtype(jnp.bfloat16)])
def test_set_data_type_rounds_the_output_and_what_follows(spelling, x):
    f = jc.graph(lambda g, x: (y := g.mul(x, 1.0).set_data_type(spelling), g.mul(y, 1.0)))
    rounded, follower = f(x)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(follower.astype(jnp.float32), rounded.astype(jnp.float32))


def test_tensors_have_pygraphs_attributes_and_setters(x):
    def function(g, x, dim):
        assert (x.name, x.shape, x.ndim, x.dtype, x.get_dim()) == ("x", X, 3, jnp.float32, [*X])
        assert "float32[2,3,4]" in repr(x)
        y = g.reduction(x, mode="ADD", name="n").set_output(True).set_name("y")
        return y.set_dim(dim)

    for dim in ((2, 1, 4), (2.0, 1.0, 4.0)):
        assert spec_of(function, x, dim).is_static
    np.testing.assert_allclose(jc.graph(function)(x, (2, 1, 4)), x.sum(1, keepdims=True), atol=1e-5)


def test_tensors_are_of_one_graph_and_typed_before_they_are_used(x):
    leaked = []
    jc.graph(lambda g, x: (leaked.append(x), g.relu(x))[1])(x)
    with pytest.raises(jc.GraphError, match="another graph"):
        jc.graph(lambda g, y: g.add(y, leaked[0]))(x)
    with pytest.raises(jc.GraphError, match="after relu"):
        jc.graph(lambda g, x: (y := g.relu(x), g.relu(y), y.set_data_type("float16"))[1])(x)
