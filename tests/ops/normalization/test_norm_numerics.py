"""What norms lose: rows of any length and mean, extremes of float16, constant and infinite rows;
and their values and gradients on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cotangents_of, exactly, outcome
from norm_calls import (
    IN_FLOAT32,
    KINDS,
    PLANNED,
    ROUNDED,
    assert_close,
    changed,
    layer,
    rms,
)

MEANS = {"float32": (0.0, 1e3, 1e4), "bfloat16": (0.0, 1e2), "float16": (0.0, 1e3)}
_DIGITS = 2.0**-23


def rows_of(length, dtype):
    """A row for each mean, of standard deviation 1, and a constant one; scale, bias, cotangent."""
    random = np.random.default_rng(0)
    means = np.array(MEANS[dtype])[:, None]
    rows = np.concatenate(
        [random.standard_normal((len(means), length)) + means, np.full((1, length), 3.0)]
    )
    others = [random.standard_normal(length) + 0.5 for _ in range(2)]
    return [jnp.asarray(a, dtype) for a in (rows, *others, random.standard_normal(rows.shape))]


def all_of(function, kind, x, scale, bias, cotangent):
    """y, statistics and gradients."""
    given = (x, scale, bias) if kind == "layer" else (x, scale)
    y, pull, statistics = jax.vjp(function, *given, has_aux=True)
    return {"y": y, "statistics": statistics, "gradients": pull(cotangent)}


def ours(kind, *operands, **keywords):
    def function(*given):
        y, *statistics = changed(f"{kind}, last", given[0].shape)(*given, **keywords)
        return y, statistics

    return all_of(function, kind, *operands)


def plain(kind, *operands):
    def function(*given):
        y, *statistics = changed(f"{kind}, last", given[0].shape).plain(*given)
        return y, statistics

    return all_of(function, kind, *operands)


def assert_rows(kind, got, x, scale, bias, cotangent, on_gpu=False):
    """Each element within what float32 statistics and one rounding of the result cost it.

    A mean is known to half of its last place, which is the error of all distances from it. On a GPU
    twice that; and cuDNN's variance is off by as much as one such distance.
    """
    wide = [np.asarray(a, np.float64) for a in (x, scale, bias, cotangent)]
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, jax.jit(functools.partial(plain, kind))(*wide))
    rows, scale, bias, cotangent = wide
    inv = want["statistics"][-1]
    mean = want["statistics"][0] if kind == "layer" else np.zeros_like(inv)
    last, times = ROUNDED[str(x.dtype)], 2 if on_gpu else 1
    xhat = np.abs((rows - mean) * inv)
    of_xhat = IN_FLOAT32 * (xhat + 1) + 2 * _DIGITS * np.abs(mean) * inv
    least = {"float16": 2.0**-24}.get(str(x.dtype), 1e-30)  # its subnormals' distance
    slope = cotangent * scale
    size = np.sqrt(np.mean(slope**2, 1, keepdims=True)) + np.abs(slope)
    bounds = [  # of y, and of the gradients by x, scale and bias
        np.abs(scale) * of_xhat + 1e-6,
        inv * size * (of_xhat * (2 * xhat + 2) + IN_FLOAT32),
        np.sum(np.abs(cotangent) * of_xhat, 0),
        IN_FLOAT32 * np.sum(np.abs(cotangent), 0),
    ]
    found, wanted = ([v["y"], *v["gradients"]] for v in (got, want))
    for a, b, bound in zip(found, wanted, bounds[: len(found)], strict=True):
        distance = np.abs(np.asarray(a, np.float64) - b) / times
        assert (distance <= bound + last * np.abs(b) + least).all(), (x.shape, x.dtype)
    if kind == "layer":
        off = np.abs(np.asarray(got["statistics"][0], np.float64) - mean)
        assert (off <= 2 * times * _DIGITS * np.abs(mean) + 1e-6).all()
    off = np.abs(np.asarray(got["statistics"][-1], np.float64) / inv - 1)
    of_mean = 2 * _DIGITS * np.abs(mean) * inv  # what it is off by is squared in the variance
    assert (off <= 2e-6 + (of_mean if on_gpu else of_mean**2)).all(), off


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 1000, 16385])
def test_rows_of_any_length_and_mean(length):
    runs = (("layer", "float32"), ("layer", "float16"), ("rms", "bfloat16"))
    operands = [rows_of(length, dtype) for _, dtype in runs]
    run = jax.jit(lambda given: [ours(kind, *a) for (kind, _), a in zip(runs, given, strict=True)])
    for (kind, _), got, given in zip(runs, run(operands), operands, strict=True):
        assert_rows(kind, got, *given)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("largest", [65504.0, 40 * 2.0**-24], ids=["largest", "subnormal"])
def test_float16s_extremes(kind, largest):
    """Squares of its largest numbers are beyond it, and those of its smallest are zero in it."""
    random = np.random.default_rng(0)
    x = np.clip(random.standard_normal((3, 64)) / 2, -1, 1) * largest
    x[0, :2] = (largest, -largest)
    case = changed(f"{kind}, last", x.shape)
    epsilon = 1e-12 if largest < 1 else 1e-5
    drawn = (x, np.ones(64), np.zeros(64))[: len(case.shapes)]
    given = [jnp.asarray(a, "float16") for a in drawn]
    cotangents = cotangents_of(jax.eval_shape(case, *given))
    cotangents = [cotangents[0], *(0 * c for c in cotangents[1:])]
    results, (dx, *others) = outcome(functools.partial(case, epsilon=epsilon), given, cotangents)
    want = exactly(functools.partial(case.plain, epsilon=epsilon), given, cotangents)
    assert_close([results, others], [want[0], list(want[1][1:])])
    # Gradients of x are beyond float16 where x is so small, and below it where x is so large.
    with np.errstate(over="ignore"):
        beyond = want[1][0].astype(np.float16)
    np.testing.assert_allclose(dx, beyond, rtol=2**-9, atol=2**-24)


def test_constant_rows():
    """Nothing is left of them; the gradient is finite."""
    x = jnp.stack([jnp.full(12, v, jnp.float32) for v in (0.0, 1.0, -7.0, 1e4)])
    y, pull = jax.vjp(lambda x: layer(x, bias=jnp.arange(12.0)), x)
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(12.0), (4, 12)))
    (dx,) = pull(jnp.ones_like(x).at[:, 0].set(13.0))
    np.testing.assert_allclose(dx[:, 0], np.full(4, 11 * 1e5**0.5), rtol=1e-4)
    gradient = jax.grad(lambda x: rms(x).sum())(jnp.zeros((2, 5)))
    np.testing.assert_allclose(gradient, np.full((2, 5), 1e3), rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_finite_stays_in_its_rows(name):
    """Of those that are normalized together: all else is as without it, forward and backward."""
    case = KINDS[name]
    x, *parameters = case.operands()
    first = (1,) + (0,) * (x.ndim - 1)
    together = np.isnan(case.plain(jnp.ones(case.x).at[first].set(np.nan), *parameters)[0])
    assert 0 < together.sum() < together.size

    @jax.jit
    def run(x):
        y, pull = jax.vjp(lambda x: case.y(x, *parameters), x)
        return y, pull(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))[0]

    for bad in (np.nan, np.inf):
        for got, want in zip(run(x.at[first].set(bad)), run(x), strict=True):
            np.testing.assert_array_equal(np.where(together, 0, got), np.where(together, 0, want))
            assert np.isnan(got[together]).any()


# -- on the GPU ------------------------------------------------------------------------------------

each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("name", [*PLANNED, "layer, neither", "instance, channels second"])
def test_values_and_gradients_on_the_gpu(name, dtype):
    """In cuDNN's plans: XLA runs none of them."""
    case = PLANNED.get(name) or changed(name, (6, 7, 96) if "layer" in name else (1, 32, 8, 10))
    operands = case.operands(dtype)
    y = functools.partial(case.y, implementation="cudnn")
    (cotangent,) = cotangents_of([jax.eval_shape(y, *operands)])
    got = outcome(y, operands, cotangent)
    want = exactly(lambda *o: case.plain(*o)[0], *jax.device_get([operands, cotangent]))
    # The gradient of one group's scale is summed over pixels after its rounding.
    assert_close(jax.device_get(got), want, slack=3 if name == "group, one" else 1.5)


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("length", [2, 7, 64, 65, 1000, 16385, 65536])
def test_rows_of_any_length_and_mean_on_the_gpu(length, kind, dtype):
    operands = rows_of(length, dtype)
    got = jax.jit(functools.partial(ours, kind, implementation="cudnn"))(*operands)
    got, operands = jax.device_get([got, operands])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        assert_rows(kind, got, *operands, on_gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance"])
def test_extremes_and_what_is_not_finite_on_the_gpu(name):
    """float16's largest numbers are normalized; NaN and infinity stay in their rows."""
    case = dataclasses.replace(PLANNED[name], x=(4, *PLANNED[name].x[1:]))
    x, *parameters = case.operands("float16")
    x = (jnp.clip(x / 3, -1, 1) * 65504).astype("float16")
    run = jax.jit(functools.partial(case.y, implementation="cudnn"))
    clean = np.asarray(run(x, *parameters), np.float32)
    wide = [np.asarray(a, np.float64) for a in (x, *parameters)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.enable_x64(True):
        want = np.asarray(case.plain(*wide)[0])
    np.testing.assert_allclose(clean, want, rtol=2**-9, atol=2**-9)
    for bad in (np.nan, np.inf):
        got = np.asarray(run(x.at[1].set(bad), *parameters), np.float32)
        assert not np.isfinite(got[1]).any()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))
