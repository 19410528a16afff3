"""What options promise, on the GPU: full float32, equal bits, workspace, engines."""

import jax
import numpy as np
import oracle
import pytest
from helpers import normal

import jax_cudnn as jc

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("by_cudnn")]


@jc.graph
def fprop(g, x, w, y):
    return g.conv_fprop(x, w, padding=[1, 1])


@jc.graph
def dgrad(g, x, w, y):
    return g.conv_dgrad(y, w, padding=[1, 1]).set_dim(x.shape)


@jc.graph
def wgrad(g, x, w, y):
    return g.conv_wgrad(x, y, padding=[1, 1]).set_dim(w.shape)


def operands(key, dtype, channels=64):
    shapes = [(8, channels, 28, 28), (channels, channels, 3, 3), (8, channels, 28, 28)]
    return [x.astype(dtype) for x in normal(key, *shapes)]


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("function", [fprop, dgrad, wgrad], ids=lambda f: f.name)
def test_float32_at_high_precision_is_no_tf32(function, precision, key):
    arrays = operands(key, "float32")
    with jax.default_matmul_precision(precision):
        _, trace = function.trace(*arrays)
        used = [arrays[i] for i in trace.operands]
        (want,) = oracle.evaluate(trace.spec, used)
        got = jax.jit(function)(*arrays)
    assert oracle.distance(got, want) < 1e-5
    loose = oracle.distance(jax.jit(function.with_options(precision="default"))(*arrays), want)
    assert loose > 5e-5, "TF32 is allowed by default, and its rounding is larger"


@pytest.mark.parametrize("function", [dgrad, wgrad], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_plans_give_equal_bits(function, dtype, key):
    arrays = operands(key, dtype)
    run = jax.jit(function.with_options(deterministic=True))
    first = np.asarray(run(*arrays))
    for _ in range(30):
        np.testing.assert_array_equal(np.asarray(run(*arrays)), first)


def test_max_workspace_is_kept_and_the_result_right(key):
    arrays = operands(key, "bfloat16")
    limited = wgrad.with_options(max_workspace=0)
    assert jc.plan(limited, *arrays).workspace_bytes == 0
    _, trace = limited.trace(*arrays)
    oracle.check_outputs(
        trace.spec, [arrays[i] for i in trace.operands], [jax.jit(limited)(*arrays)], on_gpu=True
    )
