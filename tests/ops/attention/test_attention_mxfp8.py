"""fp8 attention with one scale per block of 32 elements (MXFP8)."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
import transformations
from transformations import relative_error

import jax_cudnn as jc

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
quantize, dequantize = jc.ops.quantize_mxfp8, jc.ops.dequantize_mxfp8


@pytest.mark.parametrize(("dtype", "axis"), [(E4M3, -2), (E5M2, -1)])
def test_blocks_have_the_least_power_of_two_that_holds_their_values(axis, dtype, normal):
    x = normal((2, 3, 200, 80)) * jnp.exp2(jnp.round(6 * normal((2, 3, 200, 80))))
    values, scales = quantize(x, axis, dtype)
    assert (values.shape, values.dtype) == (x.shape, dtype)
    assert scales.shape == ((2, 3, 256, 4) if axis == -1 else (2, 3, 8, 128))
    assert scales.dtype == "float8_e8m0fnu"
    factor = oracle_attention.scales_of_blocks(np.asarray(scales, np.float64), x.shape, axis)
    most, wide = float(jnp.finfo(dtype).max), np.asarray(x, np.float64)
    for start in range(0, x.shape[axis], 32):
        part = np.arange(start, min(start + 32, x.shape[axis]))
        block = np.abs(wide.take(part, axis)).max(axis, keepdims=True)
        each = factor.take(part, axis)
        assert ((block <= most * each) & (block > most * each / 2)).all()
        assert (np.diff(each, axis=axis) == 0).all()
    got = dequantize(values, scales, axis)
    np.testing.assert_array_equal(got, np.asarray(values, np.float64) * factor)
    assert relative_error(np.asarray(got), wide) < (0.035 if dtype == E4M3 else 0.07)


def test_blocks_of_zeros_of_what_is_exact_of_what_is_no_number_and_of_nothing():
    x = jnp.zeros((1, 1, 3, 64)).at[0, 0, 1].set(448.0 * 2).at[0, 0, 2, :32].set(3.0)
    values, scales = quantize(x)
    np.testing.assert_array_equal(dequantize(values, scales), x)
    codes = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(-1)
    assert [int(codes[16 * row]) for row in range(3)] == [0, 128, 120]  # exponents -127, 1, -7
    for value in (np.nan, np.inf):
        got = dequantize(*quantize(jnp.ones((1, 1, 2, 64)).at[0, 0, 1, 3].set(value)))
        np.testing.assert_array_equal(np.isnan(got[0, 0, 1]), np.arange(64) < 32)
        np.testing.assert_array_equal(got[0, 0, 0], 1)
    assert dequantize(*quantize(jnp.ones((1, 0, 4, 32)))).shape == (1, 0, 4, 32)


@pytest.mark.long
def test_derivatives_are_by_the_values_alone(normal):
    """With scales of about 1: gradients with small scales would underflow in fp8."""
    arrays = {}
    for port, axis in {"q": -1, "k": -1, "v": -2}.items():
        values, scales = quantize(normal((1, 1 + (port == "q"), 32, 32)), axis)
        arrays[port] = (values / 100).astype(E4M3)
        arrays[f"descale_{port}"] = jnp.ones_like(scales)
    forward = jc.graph(lambda g, arrays: g.sdpa_mxfp8(**arrays, attn_scale=0.1))
    _, trace = forward.trace(arrays)
    operands = [jax.tree.leaves(arrays)[i] for i in trace.operands]
    errors = transformations.compare(trace.spec, operands, ("vjp", "jvp"))
    assert max(errors.values()) < 0.07, errors
    with pytest.raises(jc.GraphTypeError, match="no derivative with respect to"):
        jax.grad(lambda arrays: jnp.sum(forward(arrays)[0].astype("f4")))(arrays)
