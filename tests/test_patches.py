"""Convolutions of patches: the result of lax's, as one with windows of one pixel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_cudnn as jc

IMAGES = ("NHWC", "HWIO", "NHWC")
# image, weight, strides, padding
PATCHES = {
    "square": ((2, 32, 32, 3), (8, 8, 3, 16), (8, 8), "VALID"),
    "what is left over": ((2, 35, 41, 3), (8, 8, 3, 16), (8, 8), "VALID"),
    "oblong": ((2, 12, 16, 6), (2, 4, 6, 16), (2, 4), 0),
    "fits": ((2, 32, 32, 3), (8, 8, 3, 16), (8, 8), "SAME"),
}
OTHERS = {
    "overlap": ((2, 32, 32, 3), (8, 8, 3, 16), (4, 4), "VALID"),
    "padding": ((2, 33, 33, 3), (8, 8, 3, 16), (8, 8), "SAME"),
    "many channels": ((2, 8, 8, 16), (2, 2, 16, 16), (2, 2), "VALID"),
    "odd patches": ((2, 9, 9, 3), (3, 3, 3, 16), (3, 3), "VALID"),
}


def arrays(name, key):
    image, weight, strides, padding = {**PATCHES, **OTHERS}[name]
    keys = jax.random.split(key, 3)
    drawn = [jax.random.normal(k, s) for k, s in zip(keys, (image, weight, (16,)), strict=True)]
    return drawn, strides, padding


def window(function, *operands):
    """The window of the convolution in a function's graph."""
    (eqn,) = (e for e in jax.make_jaxpr(function)(*operands).eqns if "spec" in e.params)
    (call,) = (c for c in eqn.params["spec"].calls if c.node.method == "conv_fprop")
    return eqn.params["spec"].tensor(dict(call.inputs)["weight"]).shape[2:]


@pytest.mark.parametrize("name", [*PATCHES, *OTHERS])
def test_results_and_gradients_are_laxs(name, key):
    operands, strides, padding = arrays(name, key)

    def ours(x, w, b):
        return jc.ops.conv(
            x, w, bias=b, activation="tanh", strides=strides, padding=padding,
            dimension_numbers=IMAGES,
        )  # fmt: skip

    def theirs(x, w, b):
        pads = padding if isinstance(padding, str) else [(padding, padding)] * 2
        y = lax.conv_general_dilated(x, w, strides, pads, dimension_numbers=IMAGES)
        return jnp.tanh(y + b)

    assert (set(window(ours, *operands)) == {1}) == (name in PATCHES)
    got, want = ours(*operands), theirs(*operands)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    for a, b in zip(
        *(jax.grad(lambda *x, f=f: f(*x).sum(), (0, 1, 2))(*operands) for f in (ours, theirs)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [*PATCHES, "overlap", "padding"])
def test_the_hook_cuts_patches_too(name, key):
    (x, w, _), strides, padding = arrays(name, key)
    padding = padding if isinstance(padding, str) else [(padding, padding)] * 2
    given = (strides, padding)

    def hook(x, w):
        return jc.ops.conv_general_dilated(x, w, *given, dimension_numbers=IMAGES)

    assert (set(window(hook, x, w)) == {1}) == (name in PATCHES)
    want = lax.conv_general_dilated(x, w, *given, dimension_numbers=IMAGES)
    np.testing.assert_allclose(hook(x, w), want, rtol=1e-4, atol=1e-4)


def test_groups_are_no_patches(key):
    x, w = jax.random.normal(key, (2, 4, 16, 16)), jax.random.normal(key, (8, 2, 8, 8))
    got = jc.ops.conv(x, w, strides=8, padding="VALID", groups=2)
    want = lax.conv_general_dilated(x, w, (8, 8), "VALID", feature_group_count=2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.deviceless
def test_a_first_layer_is_planned():
    """cuDNN takes it with its bias, forward and weight gradient."""
    S = jax.ShapeDtypeStruct
    avals = S((8, 224, 224, 3), "bfloat16"), S((16, 16, 3, 768), "bfloat16"), S((768,), "bfloat16")

    def layer(x, w, b):
        return jc.ops.conv(x, w, bias=b, strides=16, padding="VALID", dimension_numbers=IMAGES)

    def loss(x, w, b):
        return jnp.sum(layer(x, w, b).astype("float32") ** 2)

    with jc.target("H200"):
        plans = jc.plans(jax.grad(loss, (1, 2)), *avals)
    assert sum(len(plan.execution_plans) for plan in plans.values()) >= 2
