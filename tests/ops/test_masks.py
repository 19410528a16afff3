"""relu with a mask of bits: its values, what derivatives keep, and what cuDNN gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.graph.wire import wire


def normalized(relu):
    def function(g, x, scale, bias, mean, var, residual):
        y = g.batchnorm(x, scale, bias, mean, var, 1e-5, 0.1)[0]
        return relu(g, y + residual).set_data_type(x.dtype)

    return jc.graph(function)


masked = normalized(lambda g, y: g.relu_mask(y)[0])
IMAGE, CHANNELS = (32, 64, 56, 56), (1, 64, 1, 1)
AVALS = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in ((IMAGE, "bfloat16"), *[(CHANNELS, "float32")] * 4, (IMAGE, "bfloat16"))
]


@pytest.mark.parametrize("shape", [(2, 8, 3), (2, 24, 2, 3, 2)])
def test_bits_are_those_of_the_channels(shape, key):
    x = jax.random.normal(key, shape)
    y, mask = jc.graph(lambda g, x: g.relu_mask(x))(x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    assert (mask.shape, mask.dtype) == ((shape[0], shape[1] // 8, *shape[2:]), jnp.uint8)
    bits = np.unpackbits(np.asarray(mask), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits, np.asarray(x) > 0)
    t = jax.random.normal(jax.random.key(1), shape)
    through = jc.graph(lambda g, t, mask: g.masked(t, mask))(t, mask)
    np.testing.assert_array_equal(through, np.where(np.asarray(x) > 0, t, 0))


def test_the_derivative_keeps_the_mask_and_not_the_result():
    def loss(*args):
        return jnp.sum(jnp.sin(masked(*args).astype(jnp.float32)))

    _, backward = graphs_of(jax.grad(loss), *AVALS)
    (kept,) = (str(t) for t in backward.input_tensors if "MASK" in t.name)
    assert "uint8[32,8,56,56]" in kept
    assert not any("OUT_0" in t.name and "d(" not in t.name for t in backward.input_tensors)


def test_what_cudnn_gets_of_a_mask():
    """Nothing, where nothing reads it; alone, a comparison with what relu gives."""
    assert methods(wire(masked.trace(*AVALS)[1].spec)) == ["batchnorm", "add", "relu"]

    @jc.graph
    def mask(g, x, scale, bias, mean, var, residual):
        return g.relu_mask(g.batchnorm(x, scale, bias, mean, var, 1e-5, 0.1)[0] + residual)[1]

    sent = wire(mask.trace(*AVALS)[1].spec)
    assert methods(sent) == ["batchnorm", "add", "relu", "cmp_gt"]
    assert sent.tensor(sent.outputs[0]).dtype == "bool"
    assert sent.outputs[1] == dict(sent.calls[2].outputs)["OUT_0"]  # written, and dropped
