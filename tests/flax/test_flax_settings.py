"""Settings of layers, each compared with Flax; what falls back to Flax, and what is rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import Case, assert_near, gradients, outcome

import jax_cudnn as jc
import jax_cudnn.flax as jnn


def described(case):
    return "-".join([case.ours.__name__, str(len(case.shape)), *case.named])


def compare(case: Case, key, steps=2e-5, derive=True, **calls):
    """Results, running statistics and gradients; gradients take most of the time."""
    x = jax.random.normal(key, case.shape)
    layers = [*case.both()]
    run = gradients if derive else nnx.jit(lambda m, x, **calls: [m(x, **calls)])
    ours, theirs = (run(layer, x, **calls) for layer in layers)
    assert_near(*map(nnx.state, layers), steps)
    assert [y.shape for y in ours] == [y.shape for y in theirs]
    assert_near(ours, theirs, steps)


def conv(**settings):
    return Case(jnn.Conv, (4, 8, (3, 2)), (2, 9, 10, 4), settings)


def transposed(padding, transpose_kernel, strides):
    settings = {"padding": padding, "transpose_kernel": transpose_kernel, "strides": strides}
    return Case(jnn.ConvTranspose, (4, 8, (3, 2)), (2, 5, 6, 4), settings)


def einsum(equation, kernel, bias, shape):
    return Case(jnn.Einsum, (equation, kernel, bias), shape)


def norm(cls, *arguments, shape=(3, 4, 5, 6), **settings):
    return Case(cls, arguments, shape, settings, "relu" if cls is jnn.BatchNorm else None)


MOVED = {"kernel_dilation": (2, 1), "strides": (1, 2)}
LINEN = {"promote_dtype": lambda x, **_: x, "param_dtype": jnp.float16, "shape": (4, 8)}
GENERAL = jnn.LinearGeneral
DERIVED = [
    conv(padding="CIRCULAR", **MOVED),
    conv(padding=[(-1, 2), (0, 1)], **MOVED),
    conv(input_dilation=(2, 1), padding=1, strides=2),
    conv(feature_group_count=2, mask=np.tri(3 * 2 * 2, 8).reshape(3, 2, 2, 8)),
    transposed([(1, 2), (0, 1)], False, (3, 2)),
    transposed("SAME", True, 1),
    Case(GENERAL, (3, 4), (6, 3, 5), {"axis": 1, "batch_axis": {0: 6}}),
    einsum("bij,jk->kbi", (4, 5), (5,), (2, 3, 4)),
    einsum("bij,bjk->bik", (2, 4, 5), (2, 5), (2, 3, 4)),
    norm(jnn.LayerNorm, 20, reduction_axes=(2, 1), feature_axes=(1, 2)),
    norm(jnn.RMSNorm, 4, reduction_axes=1, feature_axes=1),
    norm(jnn.BatchNorm, 5, axis=2, momentum=0.7, epsilon=0.1),
]
COMPUTED = [
    conv(strides=None, kernel_dilation=None, input_dilation=None, precision="highest"),
    conv(preferred_element_type=jnp.float32, dtype=jnp.float16),
    Case(jnn.Conv, (3, 4, (3, 3)), (2, 4, 8, 3), {"padding": [(-1, -1), (0, 0)]}),  # no window fits
    Case(jnn.ConvTranspose, (3, 4, (3, 3)), (2, 2, 2, 3), {"padding": [(0, 0), (0, 0)]}),
    transposed([(9, 4)] * 2, True, 2),  # no gradient's
    Case(GENERAL, (3, (4, 5)), (6, 7, 3), {"batch_axis": {0: 6}}),
    einsum("nta,hab->nthb", (8, 2, 4), (8, 4), (16, 11, 2)),
    einsum("aab,bc->ac", (3, 4), None, (2, 2, 3)),
    einsum("abd,bc->c", (3, 4), (4,), (2, 3, 5)),
    einsum("bthd,hdo->bto", (4, 8, 6), (6,), (2, 5, 1, 8)),  # dimensions of 1 broadcast
    norm(jnn.LayerNorm, 6, reduction_axes=(1, 2), feature_axes=-1),
    norm(jnn.GroupNorm, 6, 3, reduction_axes=(1, 2, -1)),
    norm(jnn.BatchNorm, 3, axis=0),
    norm(jnn.BatchNorm, 8, **LINEN),
    norm(jnn.Linear, 8, 8, **LINEN),
]


@pytest.mark.parametrize("case", DERIVED + COMPUTED, ids=described)
def test_settings_are_flaxs(case: Case, key):
    small = {"dtype", "param_dtype"} & case.named.keys()
    compare(case, key, 2**-9 if small else 2e-5, derive=case in DERIVED)


@pytest.mark.parametrize(
    ("cls", "arguments", "named", "words"),
    [
        (jnn.Linear, (2, 4), {"dot_general": jc.ops.dot_general}, "dot_general"),
        (jnn.BatchNorm, (4,), {"axis_name": "rows"}, "named axis"),
        (jnn.Linear, (2, 4), {"precision": "F16_F16_F32"}, "F16_F16_F32"),
        (jnn.Einsum, ("...b,bc->...c", (2, 4)), {"einsum_op": np.einsum}, "einsum_op"),
        (jnn.Conv, (2, 4, 3), {"conv_general_dilated": jc.ops.conv_general_dilated}, "dilated"),
        (jnn.ConvTranspose, (2, 4, 3), {"padding": "same"}, "padding 'same'"),
    ],
)
def test_why_a_layer_is_not_fused(cls, arguments, named, words):
    assert words in str(cls(*arguments, **named, rngs=nnx.Rngs(0)).unfused)


@pytest.mark.parametrize(
    "case",
    [
        Case(jnn.LinearGeneral, (3, 4), (5, 2, 3), {"batch_axis": {0: 6}}),
        Case(jnn.Einsum, ("bthk,hkd->btd", (2, 4, 8), (8,)), (3, 5, 4, 2)),
        Case(jnn.Conv, (4, 4, (3, 3)), (2, 8, 8, 6), {"feature_group_count": 2}),
        Case(jnn.ConvTranspose, (3, 4, (3, 3)), (2, 8, 8, 5)),
        Case(jnn.BatchNorm, (4,), (2, 5), activation="relu"),
        Case(jnn.RMSNorm, (4,), (2, 5)),
        Case(jnn.GroupNorm, (4, 2), (2, 3, 6), {"use_scale": False, "use_bias": False}),
    ],
    ids=described,
)
def test_what_does_not_fit_is_refused_in_flaxs_words(case: Case):
    ours, theirs = (outcome(layer, jnp.ones(case.shape)) for layer in case.both())
    assert isinstance(theirs, tuple), theirs
    assert ours == theirs
