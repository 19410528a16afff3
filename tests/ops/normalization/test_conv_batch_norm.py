"""jc.ops.conv_batch_norm beside float64, what fused statistics lose, and what both refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_calls import Case, check, check_on_gpu, loss, moving, planned, with_
from transformations import TF32_ON_GPU, TOLERANCES, graphs_of, methods, relative_error

import jax_cudnn as jc

ALL = "scale bias residual"
FUSED, INFERENCE = {"fused": True}, {"training": False}
PLAIN = Case((2, 5, 6, 4), w=(3, 3, 4, 6))
STRIDED = {"strides": (2, 1), "padding": [(1, 2), (0, 1)], "dilation": (1, 2)}
CALLS = {
    "plain": PLAIN,
    "fused": with_(PLAIN, fused=True, given=ALL, activation="gelu"),
    "inference": with_(PLAIN, training=False, given=ALL, activation="silu"),
    "by default": Case((2, 4, 5, 6), 1, w=(6, 4, 3, 3), numbers=None, given="bias"),
    "laid out anew": Case(
        (5, 6, 2, 4), 0, w=(6, 4, 3, 3), numbers=("HWNC", "OIHW", "CHWN"), fused=True, given=ALL
    ),
    "windows": Case((2, 7, 6, 4), w=(3, 2, 4, 6), conv=STRIDED, activation="relu", given=ALL),
    "groups": Case((2, 5, 6, 4), w=(3, 3, 2, 6), conv={"groups": 2}, fused=True, given="scale"),
    "1D": Case((3, 9, 4), w=(3, 4, 6), numbers=("NHC", "HIO", "NHC"), training=False, given=""),
    "3D": Case((2, 3, 4, 3, 4), w=(2, 2, 2, 4, 6), numbers=("NDHWC", "DHWIO", "NDHWC"), fused=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_statistics_and_gradients(name):
    check(CALLS[name], CALLS[name].operands())


@pytest.mark.parametrize(
    ("dtype", "parameters", "way"),
    [
        ("bfloat16", "float32", {}),
        ("float16", "bfloat16", FUSED),
        ("bfloat16", "bfloat16", INFERENCE),
    ],
)
def test_sixteen_bits(dtype, parameters, way):
    """In training the convolution's result is rounded before it is normalized."""
    case = with_(PLAIN, **way, given=ALL, activation="silu")
    ((y, *new), _), _ = check(case, case.operands(dtype, parameters), slack=1.5, through=dtype)
    assert [v.dtype for v in (y, *new)] == [dtype, parameters, parameters]


def test_inference_with_statistics_in_sixteen_bits_computes_in_float32():
    """1 / sqrt(var + epsilon) of a bfloat16 variance is not rounded to bfloat16."""
    case = with_(PLAIN, training=False)
    operands = case.operands("float32", "bfloat16")
    got, want = case(*operands)[0], case.plain(*(o.astype("float32") for o in operands))[0]
    assert relative_error(got, want) <= TOLERANCES["float32"]


def test_fused_statistics_are_those_of_the_rounded_result():
    """In bfloat16: y is normalized by the statistics of what is normalized."""
    case = with_(PLAIN, fused=True, given="", epsilon=0)
    y, *_ = case(*case.operands("bfloat16"))
    np.testing.assert_allclose(np.float32(y).mean((0, 1, 2)), 0, atol=2**-9)
    np.testing.assert_allclose(np.float32(y).std((0, 1, 2)), 1, atol=2**-9)


def losses(case, ratio):
    """Relative errors of the variance with fused statistics and without, where the running mean is
    as many deviations off; of exact products, because x has few bits and weights are 0 and 1."""
    x, w, _, var, _, scale, bias = case.operands()
    x, w = jnp.round(x * 64) / 64, jnp.tile(jnp.eye(case.x[-1]), (2, 1)).reshape(case.w)
    y = np.asarray(jnp.concatenate([x, x], -1), np.float64)
    of_batch, spread = y.mean((0, 1, 2)), y.var((0, 1, 2))
    mean = jnp.asarray(of_batch + ratio * np.sqrt(spread), "float32")
    operands = [x, w, mean, var, jnp.float32(0), scale, bias]
    return [
        np.max(np.abs(np.asarray(jax.jit(with_(case, fused=fused))(*operands)[2]) / spread - 1))
        for fused in (True, False)
    ]


@pytest.mark.parametrize("ratio", [0, 10, 1000])
def test_what_fused_statistics_lose(ratio):
    """About ``1e-6 * (1 + ratio**2)`` of the variance; without them nothing."""
    fused, unfused = losses(with_(BIG, x=(8, 6, 6, 8), w=(16, 1, 1, 8)), ratio)
    assert fused <= 4e-6 * (1 + ratio**2)
    assert unfused <= 2e-6
    assert ratio < 1000 or fused >= 1e-4, "so that the test shows a loss where there is one"


@pytest.mark.parametrize(
    ("way", "names", "count"),
    [
        ({}, ["conv_fprop", "batchnorm", "batchnorm_backward"], 4),
        (FUSED, ["conv_fprop", "batchnorm_inference"], 4),
        (INFERENCE, ["conv_fprop"], 2),
    ],
)
def test_graphs_of_the_gradient(way, names, count):
    case = with_(PLAIN, **way, activation="relu")
    specs = graphs_of(jax.value_and_grad(loss(case), moving(case)), *case.avals())
    assert len(specs) == count
    found = [m for spec in specs for m in methods(spec)]
    assert all(found.count(name) == 1 for name in (*names, "conv_wgrad", "conv_dgrad"))
    made = [t for spec in specs[: count // 2] for t in spec.output_tensors]
    images = [t.dtype for t in made if t.shape[2:] not in ((), (1, 1))]
    # The convolution's result in training and y; in inference y, and what scale is multiplied by.
    assert images == ["bfloat16"] * 2


# -- what is refused -------------------------------------------------------------------------------

NORM = {"x": jnp.ones((4, 5, 3, 6)), "scale": None, "bias": None, "running_mean": jnp.zeros(6)}
NORM |= {"running_var": jnp.ones(6), "training": True}
CONV = NORM | {"w": jnp.ones((6, 6, 3, 3)), "dimension_numbers": ("NHWC", "OIHW", "NHWC")}
ERRORS = [
    ({"running_mean": jnp.ones(5)}, r"running_mean does not fit[^$]*\(6,\)"),
    ({"running_var": jnp.ones((1, 6))}, "running_var does not fit"),
    ({"running_mean": jnp.ones(6, int)}, "running_mean has a dtype"),
    ({"running_var": jnp.ones(6, jnp.complex64)}, "running_var has a dtype"),
    ({"scale": jnp.ones((6, 1))}, r"scale does not fit[^$]*\(6,\)"),
    ({"bias": jnp.ones(6, bool)}, "bias has a dtype"),
    ({"residual": jnp.ones((4, 5, 1, 6))}, "residual does not fit"),
    ({"residual": jnp.ones(6)}, "residual does not fit"),
    ({"activation": "mish"}, "unknown activation"),
    ({"epsilon": jnp.ones(6)}, "epsilon is no number"),
    ({"momentum": jnp.ones(6)}, "momentum is no number"),
    ({"training": jnp.array(True)}, "Python bool"),
    ({"training": 1}, "Python bool"),
]
OF_BATCH_NORM = [
    ({"x": jnp.ones((4, 5, 3, 6), "int8")}, "x has a dtype"),
    ({"axis": 4}, "axis is not valid"),
    ({"axis": 0}, "not the first"),
    ({"axis": (1, 2)}, "no such axes"),
    ({"axis": "C"}, "no such axes"),
    ({"x": jnp.ones(6)}, "no such axes"),
]


@pytest.mark.parametrize(("wrong", "words"), [*ERRORS, *OF_BATCH_NORM], ids=lambda v: str(v)[:30])
def test_what_is_wrong_is_said(wrong, words):
    """Also in inference, where there is no momentum, and by convolutions."""
    with pytest.raises(jc.JaxCudnnError, match=words):
        jc.ops.batch_norm(**NORM | wrong)
    if "axis" not in wrong and "x" not in wrong:
        for more in ({}, {"fused_statistics": True}, {"training": False}):
            if not {*more} & {*wrong} and ("momentum" not in wrong or "training" not in more):
                with pytest.raises(jc.JaxCudnnError, match=words):
                    jc.ops.conv_batch_norm(**CONV | more | wrong)


def test_training_may_be_static():
    rest = {k: v for k, v in NORM.items() if k != "training"}
    norm = lambda training: jc.ops.batch_norm(training=training, **rest)[0]  # noqa: E731
    with pytest.raises(jc.GraphTypeError, match=r"Python bool[^$]*static_argnames"):
        jax.jit(norm)(True)
    step = jax.jit(norm, static_argnames="training")
    assert not np.array_equal(step(training=True), step(training=np.bool_(False)))


# -- plans -----------------------------------------------------------------------------------------

BIG = Case((8, 14, 14, 32), w=(64, 3, 3, 32), numbers=("NHWC", "OHWI", "NHWC"))


@pytest.mark.deviceless
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_inference_and_fused_statistics_are_one_plan_with_the_convolution(dtype):
    case = with_(BIG, training=False, given=ALL, activation="relu")
    with jc.implementation("cudnn"):
        (segments,) = planned(case, *case.avals(dtype)).values()
    assert segments == [(True, ["conv_fprop", "mul", "add", "add", "relu"])]
    case = with_(BIG, fused=True, activation="relu")
    assert planned(case, *case.avals(dtype)) == {
        "conv_batch_norm": [(True, ["conv_fprop", "sub", "reduction", "mul", "reduction"])],
        "batch_norm": [(False, ["batchnorm_inference", "relu"])],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, FUSED, INFERENCE], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_convolutions_on_the_gpu(dtype, way):
    case = with_(BIG, **way, given=ALL, activation="silu")
    allowed = {"float32": TF32_ON_GPU, "bfloat16": 2**-6, "float16": 2**-8}[dtype]
    check_on_gpu(case, case.plain, case.operands(dtype), allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 10, 100])
def test_what_fused_statistics_lose_on_the_gpu(ratio):
    fused, _ = losses(
        with_(BIG, x=(8, 14, 14, 32), w=(1, 1, 32, 64), numbers=("NHWC", "HWIO", "NHWC")), ratio
    )
    assert fused <= 2e-6 * (1 + ratio**2)
