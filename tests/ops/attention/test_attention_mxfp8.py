"""Attention in fp8 with a scale for each block of 32 (MXFP8)."""

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
    rows, factors = (a if axis == -1 else a.swapaxes(2, 3) for a in (wide, factor))
    for start in range(0, rows.shape[-1], 32):
        block = np.abs(rows[..., start : start + 32]).max(-1)
        each = factors[..., start : start + 32]
        assert (each == each[..., :1]).all()
        assert (block <= most * each[..., 0]).all()
        assert (block > most * each[..., 0] / 2).all()
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
    """Of scales about 1: gradients of what has small scales are nothing in float8."""
    shapes = {"q": (1, 2, 32, 32), "k": (1, 1, 32, 32), "v": (1, 1, 32, 32), "dO": (1, 2, 32, 32)}
    wide = {name: normal(shape) for name, shape in shapes.items()}

    def given(**axes):
        found = {}
        for port, axis in axes.items():
            values, scales = quantize(wide[port.removesuffix("_T")], axis, E4M3)
            found[port] = (values / 100).astype(E4M3)
            found[f"descale_{port}"] = jnp.ones_like(scales)
        return found

    @jc.graph
    def forward(g, arrays):
        return g.sdpa_mxfp8(**arrays, attn_scale=0.1)

    @jc.graph
    def backward(g, arrays):
        return g.sdpa_mxfp8_backward(**arrays, attn_scale=0.1)

    first = given(q=-1, k=-1, v=-2)
    second = given(q=-1, q_T=-2, k=-1, k_T=-2, v=-1, dO=-1, dO_T=-2)
    out, stats, _ = forward(first)
    second |= {"o_f16": out, "dO_f16": wide["dO"].astype("bfloat16"), "stats": stats}
    for function, arrays in ((forward, first), (backward, second)):
        given = jax.tree.leaves(arrays)
        _, trace = function.trace(arrays)
        operands = [given[i] for i in trace.operands]
        errors = transformations.compare(trace.spec, operands, ("vjp", "jvp"))
        assert max(errors.values()) < 0.07, errors
    total = lambda arrays: jnp.sum(forward(arrays)[0].astype("f4"))  # noqa: E731
    with pytest.raises(jc.GraphTypeError, match="no derivative with respect to"):
        jax.grad(total)(first)
