"""Layers in the place of Flax's: constructor, parameters and results."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_cudnn.flax as jnn
from jax_cudnn.flax.layer import SWAPPED

LAYERS = {"linear": (jnn.Linear, (8, 16), {}, (4, 8))}


def made(cls, arguments, named):
    return cls(*arguments, **named, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_flaxs(name):
    cls, arguments, named, _ = LAYERS[name]
    ours, theirs = (made(c, arguments, named) for c in (cls, cls.flaxs()))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))
    nnx.update(ours, nnx.state(theirs))


@pytest.mark.parametrize("name", LAYERS)
def test_results_are_flaxs(name, key):
    cls, arguments, named, shape = LAYERS[name]
    theirs = made(cls.flaxs(), arguments, named)
    x = jax.random.normal(key, shape)
    np.testing.assert_allclose(cls.of(theirs)(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ours", SWAPPED.values())
def test_arguments_are_flaxs_and_ours(ours):
    taken = list(inspect.signature(ours).parameters)
    assert taken == [*list(inspect.signature(ours.flaxs().__init__).parameters)[1:], *ours.own]


def test_an_activation_is_fused_and_kept():
    layer = jnn.Linear(8, 16, activation="relu", rngs=nnx.Rngs(0))
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    want = jax.nn.relu(nnx.Linear(8, 16, rngs=nnx.Rngs(0))(x))
    np.testing.assert_allclose(nnx.merge(*nnx.split(layer))(x), want, rtol=1e-5, atol=1e-6)
