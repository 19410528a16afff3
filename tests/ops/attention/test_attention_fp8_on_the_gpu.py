"""Attention in fp8 by cuDNN on the GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import bounds, drawing
from test_attention_fp8 import (
    E4M3,
    E5M2,
    GRADIENTS,
    PLANNED,
    avals,
    backward,
    check,
    factors,
    forward,
    fp8_operands,
    loss,
    ours,
    settled,
    with_lengths,
)
from transformations import relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture
def normal(key):
    return drawing(key)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize("name", ["grouped", "lengths", "window", "realistic"])
def test_results_and_gradients(name, scaling, normal):
    sizes, band, lengths = PLANNED[name]
    operands = [normal(a.shape, a.dtype) for a in avals(**sizes)]
    weights = normal(operands[0].shape)
    function = with_lengths(functools.partial(ours, **band), lengths)
    if scaling == "delayed":
        exact = functools.partial(function, implementation="xla")
        function = functools.partial(function, scaling=settled(exact, operands, weights))
    function = functools.partial(function, implementation="cudnn")
    check(function, operands, weights, **bounds(**band), **lengths)


@pytest.mark.parametrize("bound", [None, 0])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_largest_values_and_statistics(dtype, bound, normal):
    """The largest weight is of softmax's, not of what a kernel multiplies before it divides."""
    operands, most = (
        fp8_operands(normal, dtype, 2, 8, 2, 512, 384, 128),
        float(jnp.finfo(dtype).max),
    )
    along = {"attn_scale": 128**-0.5, "right_bound": bound}
    first = factors("sdpa_fp8", scale_s=most, descale_s=1 / most, scale_o=64.0)
    scales = {
        "scale_dP": 2.0**12,
        "descale_dP": 2.0**-12,
        "descale_dO": 1 / 64,
        "descale_o": 1 / 64,
    }
    scales |= dict.fromkeys(("scale_dQ", "scale_dK", "scale_dV"), 256.0)
    second = factors("sdpa_fp8_backward", scale_s=most, descale_s=1 / most, **scales)
    grad = (normal(operands[0].shape) * 64).astype(E5M2)

    def run(node, implementation, *given):
        node = functools.partial(node.with_options(implementation=implementation), **along)
        return [np.asarray(x, np.float64) for x in jax.jit(node)(*given)]

    got, want = (run(forward, i, operands, first) for i in ("cudnn", "xla"))
    np.testing.assert_allclose(got[1], want[1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-2 if bound is None else 0.12)
    np.testing.assert_allclose(got[3], want[3], rtol=0.12)
    assert relative_error(got[0], want[0]) < GRADIENTS
    given = (
        [*operands, jnp.asarray(want[0]).astype(dtype), grad],
        jnp.asarray(want[1], "f4"),
        second,
    )
    got, want = (run(backward, i, *given) for i in ("cudnn", "xla"))
    for at in range(3):  # results are rounded, so largest values agree to their digits
        assert relative_error(got[at], want[at]) < GRADIENTS
        assert np.abs(got[at]).max() / 256 == pytest.approx(got[3 + at].item(), rel=0.13)
    np.testing.assert_allclose(np.ravel(got[3:]), np.ravel(want[3:]), rtol=0.12)


def test_cudnn_saturates_and_queries_may_see_no_key(normal):
    operands = fp8_operands(normal, E4M3, 1, 2, 2, 128, 128, 128)
    run = jax.jit(forward.with_options(implementation="cudnn"))
    out = np.asarray(run(operands, factors("sdpa_fp8", scale_o=1e6))[0], np.float32)
    assert np.abs(out).max() == 448
    operands = [normal(a.shape, a.dtype) for a in avals(t=64, s=64)]
    function = with_lengths(ours, {"queries": [40, 64], "keys": [64, 0]})
    out = jax.jit(function)(*operands)
    assert not out[0, 40:].any()
    for x in (out, *jax.jit(jax.grad(loss(function), (0, 1, 2)))(*operands)):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        assert not x[1].any()
