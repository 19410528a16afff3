"""A linear layer with weights of int8 against the layer that it is made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn


@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize(("cls", "named"), [(nnx.Linear, {}), (jnn.Linear, {"activation": "gelu"})])
def test_the_layer_is_near_the_one_that_it_is_made_from(cls, named, group_size, key):
    linear = cls(64, 8, rngs=nnx.Rngs(0), bias_init=nnx.initializers.ones, **named)
    made = jnn.QuantizedLinear(linear, group_size=group_size)
    x = jax.random.normal(key, (2, 5, 64))
    assert np.allclose(nnx.jit(lambda m, x: m(x))(made, x), linear(x), atol=0.05)
    assert not np.array_equal(made(x), linear(x))
    assert made.kernel.dtype == "int8"
    assert made.bias is linear.bias


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("use_bias", [False, True])
def test_dtypes_are_flaxs(group_size, use_bias):
    for dtype in (None, "bfloat16"):
        linear = nnx.Linear(64, 8, dtype=dtype, use_bias=use_bias, rngs=nnx.Rngs(0))
        made = jnn.QuantizedLinear(linear, group_size=group_size)
        for kind in ("float32", "bfloat16"):
            x = jnp.ones((2, 64), kind)
            assert made(x).dtype == linear(x).dtype


def test_only_biases_are_trained():
    made = jnn.QuantizedLinear(nnx.Linear(64, 8, rngs=nnx.Rngs(0)))
    gradient = nnx.grad(lambda m: m(jnp.ones((3, 64))).sum())(made)
    assert [path for path, _ in nnx.to_flat_state(gradient)] == [("bias",)]


def test_an_abstract_layer_takes_a_checkpoint():
    linear = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    made = jnn.QuantizedLinear(linear, group_size=16)
    abstract = nnx.eval_shape(
        lambda: jnn.QuantizedLinear(nnx.Linear(64, 8, rngs=nnx.Rngs(1)), group_size=16)
    )
    nnx.update(abstract, nnx.state(made))
    assert np.array_equal(abstract(jnp.ones((2, 64))), made(jnp.ones((2, 64))))


def test_what_cannot_be_quantized():
    with pytest.raises(jc.GraphTypeError, match="takes a trained layer"):
        jnn.QuantizedLinear(nnx.LinearGeneral(4, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(jc.GraphError, match="divide"):
        jnn.QuantizedLinear(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), group_size=24)
