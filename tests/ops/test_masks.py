"""relu with a mask of bits: values, derivatives, batches, and the plans that write and read it."""

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
plain = normalized(lambda g, y: g.relu(y))


def operands(key, shape=(4, 16, 5, 6), dtype="float32"):
    keys = jax.random.split(key, 6)
    channels = (1, shape[1], *(1,) * (len(shape) - 2))
    shapes = (shape, channels, channels, channels, channels, shape)
    dtypes = (dtype, *["float32"] * 4, dtype)
    return [jax.random.normal(k, s).astype(d) for k, s, d in zip(keys, shapes, dtypes, strict=True)]


def avals(shape=(32, 64, 56, 56), dtype="bfloat16"):
    made = jax.eval_shape(lambda: operands(jax.random.key(0), shape, dtype))
    return tuple(made)


def loss(function):
    return lambda *args: jnp.sum(jnp.sin(function(*args).astype(jnp.float32)))


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


def test_gradients_of_a_result_in_float8(key):
    """Which masked does not take."""
    rounded = jc.graph(lambda g, x: g.relu_mask(x)[0].set_data_type("float8_e5m2"))
    x = jax.random.normal(key, (2, 16, 3, 4))
    along = jnp.ones(x.shape, "float8_e5m2")
    np.testing.assert_array_equal(jax.vjp(rounded, x)[1](along)[0], x > 0)


def test_the_derivative_keeps_the_mask_and_not_the_result():
    _, backward = graphs_of(jax.grad(loss(masked)), *avals())
    (kept,) = (str(t) for t in backward.input_tensors if "MASK" in t.name)
    assert "uint8[32,8,56,56]" in kept
    assert not any("OUT_0" in t.name and "d(" not in t.name for t in backward.input_tensors)


def test_what_cudnn_gets_of_a_mask():
    """Nothing, where nothing reads it; alone, a comparison with what relu gives."""
    assert methods(wire(masked.trace(*avals())[1].spec)) == ["batchnorm", "add", "relu"]

    @jc.graph
    def mask(g, x, scale, bias, mean, var, residual):
        return g.relu_mask(g.batchnorm(x, scale, bias, mean, var, 1e-5, 0.1)[0] + residual)[1]

    sent = wire(mask.trace(*avals())[1].spec)
    assert methods(sent) == ["batchnorm", "add", "relu", "cmp_gt"]
    assert sent.tensor(sent.outputs[0]).dtype == "bool"
    assert sent.outputs[1] == dict(sent.calls[2].outputs)["OUT_0"]  # written, and dropped


@pytest.mark.gpu
def test_on_the_gpu(key):
    args = operands(key, (16, 64, 14, 14), "bfloat16")
    for of in (lambda f: f, lambda f: jax.grad(loss(f), (0, 1, 2, 5))):
        got, want = (jax.tree.leaves(jax.jit(of(f))(*args)) for f in (masked, plain))
        for a, b in zip(got, want, strict=True):
            a, b = (np.asarray(v, np.float64) for v in (a, b))
            assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
