"""batch_norm and conv_batch_norm: plans, what both refuse, GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_calls import Case, loss, moving, planned, with_
from helpers import cotangents_of, exactly, outcome
from transformations import FLOAT32_ON_GPU, relative_error

import jax_cudnn as jc

ALL = "scale bias residual"
BIG = Case((8, 14, 14, 32), w=(64, 3, 3, 32), numbers=("NHWC", "OHWI", "NHWC"))


def check_large_means(case, ratio, least=1e-5):
    """What float32 loses of x is lost, and a mean that is off by an ulp moves y by as much."""
    x, mean, var, _, scale, bias = case.operands()
    operands = [x * 0.01 + 0.01 * ratio, mean, var, jnp.float32(0), scale, bias]
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got, (dx, *_) = jax.device_get(outcome(case, operands, cotangents))
    want, (want_dx, *_) = exactly(case.plain, *jax.device_get((operands, cotangents)))
    y, mean, variance = (relative_error(a, b) for a, b in zip(got, want, strict=True))
    allowed = least + 1e-6 * ratio
    assert y <= allowed
    assert mean <= least / 5
    assert variance <= least / 5 + allowed**2  # the square of what the mean is off by
    assert relative_error(dx, want_dx) <= 4 * allowed


def test_a_large_mean_with_small_variances():
    check_large_means(Case((8, 6, 6, 4), epsilon=1e-12), 30000)


# Images of which one pixel, or two of those that make the guess of the mean, are unlike the others.
OUTLIERS = [
    ((8, 56, 56), [(28, 28)], 2e-6),
    ((8, 56, 56), [(28, 28), (14, 14)], 2e-3),
    ((1, 40, 40, 40), [(20, 20, 20), (10, 10, 10)], 2e-6),
]


@pytest.mark.parametrize(("value", "mean"), [(0.0, 1000.0), (1e5, 0.0)])
@pytest.mark.parametrize(("shape", "places", "allowed"), OUTLIERS)
def test_statistics_of_images_with_an_outlier(shape, places, allowed, value, mean):
    """Of up to 4096 pixels one pass takes a guess of the mean; a factor of so many is lost where
    two of the three that make it are outliers, and else none."""
    x = np.random.default_rng(0).normal(mean, 1, (*shape, 2)).astype("float32")
    for place in places:
        x[(slice(None), *place)] = value
    one, zero = jnp.ones(2), jnp.zeros(2)
    _, (got_mean, got) = jc.ops.batch_norm(x, one, zero, zero, one, training=True, momentum=0.0)
    axes, wide = tuple(range(x.ndim - 1)), x.astype("float64")
    assert relative_error(got, wide.var(axes)) <= allowed
    largest = (np.abs(wide.mean(axes)) + wide.std(axes)).max()
    assert np.abs(got_mean - wide.mean(axes)).max() <= (1e-6 + allowed) * largest


NORM = {"x": jnp.ones((4, 5, 3, 6)), "scale": None, "bias": None, "running_mean": jnp.zeros(6)}
NORM |= {"running_var": jnp.ones(6), "training": True}
CONV = NORM | {"w": jnp.ones((6, 6, 3, 3)), "dimension_numbers": ("NHWC", "OIHW", "NHWC")}
ERRORS = [
    ({"running_mean": jnp.ones(5)}, r"running_mean does not fit[^$]*\(6,\)"),
    ({"running_mean": jnp.ones(6, int)}, "running_mean has a dtype"),
    ({"scale": jnp.ones((6, 1))}, r"scale does not fit[^$]*\(6,\)"),
    ({"residual": jnp.ones((4, 5, 1, 6))}, "residual does not fit"),
    ({"activation": "mish"}, "unknown activation"),
    ({"epsilon": jnp.ones(6)}, "epsilon is not a scalar"),
    ({"momentum": jnp.ones(6)}, "momentum is not a scalar"),
    ({"training": jnp.array(True)}, r"Python bool[^$]*static_argnames"),
]
OF_BATCH_NORM = [
    ({"x": jnp.ones((4, 5, 3, 6), "int8")}, "x has a dtype"),
    ({"axis": 4}, "axis is not valid"),
    ({"axis": 0}, "not the first"),
]


@pytest.mark.parametrize(("wrong", "words"), [*ERRORS, *OF_BATCH_NORM], ids=lambda v: str(v)[:30])
def test_what_is_wrong_is_said(wrong, words):
    with pytest.raises(jc.JaxCudnnError, match=words):
        jc.ops.batch_norm(**NORM | wrong)
    if "axis" not in wrong and "x" not in wrong:
        with pytest.raises(jc.JaxCudnnError, match=words):
            jc.ops.conv_batch_norm(**CONV | wrong)


IMAGES = Case((8, 14, 14, 64))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [("bfloat16", ("relu",)), ("float16", ("add", "relu")), ("float32", ())],
    ids=str,
)
def test_training_is_one_plan_and_its_backward_one(dtype, epilogue):
    activation = "relu" if "relu" in epilogue else None
    case = with_(IMAGES, given=ALL if "add" in epilogue else "scale bias", activation=activation)
    found = planned(jax.value_and_grad(loss(case), moving(case)), *case.avals(dtype))
    alone = epilogue == ("relu",)
    # Behind a residual cuDNN is measured to be slower than XLA.
    names = ["batchnorm", "relu_mask"] if alone else ["batchnorm", *epilogue]
    assert found["batch_norm"] == [("add" not in epilogue, names)]
    backward = found["batch_norm (backward)"]
    assert backward[-1] == (True, ["masked"] * alone + ["batchnorm_backward"])
    assert len(backward) == 1 + ("add" in epilogue)


@pytest.mark.deviceless
def test_inference_is_one_plan_with_the_convolution():
    dtype = "bfloat16"
    case = with_(BIG, training=False, given=ALL, activation="relu")
    with jc.implementation("cudnn"):
        (segments,) = planned(case, *case.avals(dtype)).values()
    assert segments == [(True, ["conv_fprop", "mul", "add", "add", "relu"])]


NORMS = [Case((32, 64)), Case((4, 9, 7, 8)), Case((4, 8, 9, 7), 1), Case((4, 9, 7, 1000))]
NORMS += [Case((2, 3, 4, 3, 2, 16))]
OTHERS = [with_(IMAGES, activation="relu", given=given) for given in ("scale bias", ALL)]
for way in ({}, {"training": False}):
    OTHERS.append(with_(BIG, activation="silu", given=ALL, **way))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*NORMS, *OTHERS])
def test_values_and_gradients_on_the_gpu(case, dtype):
    """Of a norm alone y and its gradients in one plan each: what statistics' cotangents add is
    XLA's. Others as they are by default."""
    alone = case in NORMS
    count = 1 if alone else 3
    f, plain = lambda *a: case(*a)[:count], lambda *a: case.plain(*a)[:count]
    operands = case.operands(dtype)
    cotangents = cotangents_of(jax.eval_shape(f, *operands))
    with jc.implementation("cudnn" if alone else "split"):
        got = jax.device_get(outcome(f, operands, cotangents))
    want = exactly(plain, *jax.device_get((operands, cotangents)))
    allowed = {"float32": FLOAT32_ON_GPU, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    allowed *= 1 if alone else 40 if case.w and dtype == "float32" else 4
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = [relative_error(a, b) for a, b in pairs]
    assert all(e <= allowed for e in errors), (errors, allowed)


@pytest.mark.gpu
def test_a_large_mean_on_the_gpu():
    check_large_means(Case((8, 12, 12, 64), epsilon=1e-12), 30000, FLOAT32_ON_GPU)
