"""Convolutions of patches: the result of lax's, as one with windows of one pixel."""

import jax
import numpy as np
import pytest
from jax import lax

import jax_cudnn as jc

IMAGES = ("NHWC", "HWIO", "NHWC")


def window(function, *operands):
    """The window of the convolution in a function's graph."""
    (eqn,) = (e for e in jax.make_jaxpr(function)(*operands).eqns if "spec" in e.params)
    (call,) = (c for c in eqn.params["spec"].calls if c.node.method == "conv_fprop")
    return eqn.params["spec"].tensor(dict(call.inputs)["weight"]).shape[2:]


@pytest.mark.parametrize(
    ("image", "weight", "strides", "padding", "cut"),
    [
        ((2, 35, 41, 3), (8, 8, 3, 16), (8, 8), "VALID", True),  # some pixels are left over
        ((2, 12, 16, 6), (2, 4, 6, 16), (2, 4), "SAME", True),
        ((2, 32, 32, 3), (8, 8, 3, 16), (4, 4), "VALID", False),  # they overlap
        ((2, 33, 33, 3), (8, 8, 3, 16), (8, 8), "SAME", False),  # padding
    ],
)
def test_results_and_gradients_are_laxs(image, weight, strides, padding, cut, key):
    keys = jax.random.split(key, 3)
    x, w, c = (jax.random.normal(k, s) for k, s in zip(keys, (image, weight, (1,)), strict=True))
    given = {"padding": padding, "dimension_numbers": IMAGES}

    def ours(x, w):
        return jc.ops.conv(x, w, strides=strides, **given)

    want, pull = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, strides, **given), x, w)
    cotangent = c * want
    assert (set(window(ours, x, w)) == {1}) == cut
    got, own_pull = jax.vjp(ours, x, w)
    for a, b in zip((got, *own_pull(cotangent)), (want, *pull(cotangent)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(abs(b).max()))


def test_groups_are_no_patches(key):
    x, w = jax.random.normal(key, (2, 4, 16, 16)), jax.random.normal(key, (8, 2, 8, 8))
    got = jc.ops.conv(x, w, strides=8, padding="VALID", groups=2)
    want = lax.conv_general_dilated(x, w, (8, 8), "VALID", feature_group_count=2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
