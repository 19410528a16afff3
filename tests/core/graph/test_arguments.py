"""What may be given to a graph function, and from where: scalars, containers, classes, pickles."""

import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

scale = jc.graph(lambda g, x, k: x * k)


@jc.graph
def module_level(g, x):
    return g.relu(x)


@pytest.fixture
def x(key):
    return jax.random.normal(key, (2, 3, 4))


# -- numbers that a transformation has made arrays -----------------------------------------------

LIFTED = {
    "static": lambda x: scale(x, 2.0),
    "array": lambda x: scale(x, jnp.float32(2)),
    "vmap": lambda x: jax.vmap(scale, (None, 0))(x, jnp.full(1, 2.0))[0],
    "scan": lambda x: jax.lax.scan(lambda c, k: (scale(c, k), None), x, jnp.full(1, 2.0))[0],
    "numpy's float64": lambda x: jc.graph(lambda g, x: x * np.float64(2))(x),
}


@pytest.mark.parametrize("how", LIFTED)
def test_scalar_stands_beside_tensors_of_any_rank(how, x):
    np.testing.assert_allclose(LIFTED[how](x), 2 * x, rtol=1e-6)


def test_scalar_that_was_used_as_one_stays_one(x):
    function = jc.graph(lambda g, x, k: (g.relu(k), x * k))
    with pytest.raises(jc.GraphError, match="different ranks"):
        function(x, jnp.float32(2))
    used_twice = jc.graph(lambda g, x, k: (x * k, x + k))(x, jnp.float32(2))
    np.testing.assert_allclose(used_twice[1], x + 2, rtol=1e-6)
    for dtype in ("bfloat16", "float16"):
        assert (
            scale(x.astype(dtype), 2.0).dtype == jax.jit(scale)(x.astype(dtype), 2.0).dtype == dtype
        )


# -- names ---------------------------------------------------------------------------------------


def test_arguments_may_be_called_like_constants_and_results():
    def named(g, c0, c1, c2, c3):
        return (c0 * 2.0 + c1) * 3.0 + c2 * 5.0 + c3

    got = jc.graph(named)(*(jnp.full((1, 1), float(v)) for v in (1, 10, 100, 1000)))
    assert got.item() == (1 * 2 + 10) * 3 + 500 + 1000
    keys = {"relu.0::OUT_0": jnp.full((1, 1), 7.0), "captured0": jnp.full((1, 1), 11.0)}
    outer = jnp.full((1, 1), 13.0)
    function = jc.graph(lambda g, d: g.relu(d["relu.0::OUT_0"]) * d["captured0"] + outer)
    assert function(keys).item() == 7 * 11 + 13


# -- statics that are equal and yet different ------------------------------------------------------


def test_sign_of_a_zero_constant_is_kept_and_nan_is_one():
    y = jnp.ones((1, 1))
    plus, minus = (jc.graph(lambda g, y, z=z: y * z)(y).item() for z in (0.0, -0.0))
    assert (np.signbit(plus), np.signbit(minus)) == (False, True)
    specs = [jc.graph(lambda g, y: y * float("nan")).trace(y)[1].spec for _ in "ab"]
    assert specs[0] is specs[1]
    assert np.signbit(scale(y, -0.0).item()) > np.signbit(scale(y, 0.0).item())


class Pair(NamedTuple):
    a: float
    b: float


def test_static_containers_of_different_types_are_different(x):
    function = jc.graph(lambda g, x, *, s: g.relu(x) if isinstance(s, Pair) else g.sigmoid(x))
    np.testing.assert_allclose(function(x, s=Pair(1, 2)), jax.nn.relu(x))
    np.testing.assert_allclose(function(x, s=(1, 2)), jax.nn.sigmoid(x), rtol=1e-5)


# -- classes, containers, pickles ----------------------------------------------------------------


def test_graph_function_is_a_field_of_a_class(x):
    @dataclasses.dataclass
    class Layer:
        activation: object = module_level

    np.testing.assert_array_equal(Layer().activation(x), jax.nn.relu(x))
    assert Layer.activation is module_level
    assert pickle.loads(pickle.dumps(module_level)) is module_level


@jax.tree_util.register_pytree_node_class
class Param:
    """A box of one array that stands for it, as Flax has."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_boxes_of_one_array_and_foreign_dtypes(x):
    np.testing.assert_allclose(scale(x, Param(x)), x * x, rtol=1e-6)
    closed = Param(x)
    np.testing.assert_allclose(jc.graph(lambda g, y: y * closed)(x), x * x, rtol=1e-6)
    others = (jax.random.key(0), jnp.ones(2, complex), jnp.arange(3))  # pass through
    _, got = jc.graph(lambda g, x, *others: (g.relu(x), others))(x, *others)
    assert [a.dtype for a in got] == [a.dtype for a in others]


def test_empty_arrays_run_everywhere():
    function, empty = jax.jit(module_level), jnp.ones((2, 0, 4))
    assert function(empty).shape == empty.shape
    with jc.target("H200"):
        text = function.trace(empty).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text
