"""What norms lose: rows of any length and mean, what is not finite;
and their values and gradients on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cotangents_of, exactly, outcome
from norm_calls import IN_FLOAT32, KINDS, PLANNED, ROUNDED, assert_close, changed

ROWS = {  # means and deviations
    "float32": [(0, 1), (1e3, 1), (1e4, 1)],
    "bfloat16": [(0, 1), (1e2, 1)],
    "float16": [(0, 1), (1e3, 1), (0, 4e4)],
}
_DIGITS = 2.0**-23


def check_rows(length, dtype, kind, times=1, **keywords):
    """Rows of several means and deviations, also constant ones and of float16's largest numbers:
    each within what float32 statistics and one rounding of the result cost it, or as many ``times``
    that. A mean is known to half of its last place, the error of all distances from it."""
    random = np.random.default_rng(0)
    means, deviations = (v[:, None] for v in np.transpose([*ROWS[dtype], (3, 0), (0, 0)]))
    rows = np.clip(random.standard_normal((len(means), length)) * deviations + means, -65504, 65504)
    case = changed(kind, rows.shape)
    parameters = [random.standard_normal(length) + 0.5 for _ in case.shapes[1:]]
    operands = [jnp.asarray(a, dtype) for a in (rows, *parameters)]
    results = jax.eval_shape(case, *operands)
    cotangents = [jnp.asarray(random.standard_normal(rows.shape), dtype)]
    cotangents += [jnp.zeros(r.shape, r.dtype) for r in results[1:]]
    got = jax.device_get(outcome(functools.partial(case, **keywords), operands, cotangents))
    want = exactly(case.plain, *jax.device_get([operands, cotangents]))
    inv, last = want[0][-1], times * (ROUNDED[dtype] + IN_FLOAT32)
    of_mean = times * 4 * _DIGITS * np.abs(want[0][1] if kind == "layer" else 0) * inv
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a = np.asarray(a, np.float64)
        if b.ndim == 1:  # sums over the rows
            assert np.linalg.norm(a - b) <= np.linalg.norm(b) * last + of_mean.max() * length**0.5
            continue
        least = (2.0**-24 if dtype == "float16" else 1e-6) * b.shape[1] ** 0.5 * (deviations + 1)
        size = np.linalg.norm(b, axis=1, keepdims=True)
        distance = np.linalg.norm(a - b, axis=1, keepdims=True)
        if b.shape[1] == length:  # y, and the gradient by x, which inv_std enlarges
            assert (distance <= size * (last + 2 * of_mean) + of_mean * length**0.5 + least).all()
        else:
            power = 2 if times == 1 else 1  # cuDNN's variance is off by as much as the mean
            assert (distance <= size * (1e-5 * times + of_mean**power) + least).all()


RUNS = [("layer", "float32"), ("layer", "float16"), ("rms", "bfloat16")]


@pytest.mark.parametrize("length", [1, 7, 1000, pytest.param(16385, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "dtype"), RUNS)
def test_rows_of_any_length_and_mean(kind, dtype, length):
    check_rows(length, dtype, kind)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*PLANNED, "instance, channels second"])
def test_values_and_gradients_on_the_gpu(name, dtype):
    """In cuDNN's plans: XLA runs none of them."""
    case = PLANNED.get(name) or changed(name, (1, 32, 8, 10))
    operands = case.operands(dtype)
    y = functools.partial(case.y, implementation="cudnn")
    (cotangent,) = cotangents_of([jax.eval_shape(y, *operands)])
    got = outcome(y, operands, cotangent)
    want = exactly(lambda *o: case.plain(*o)[0], *jax.device_get([operands, cotangent]))
    # The gradient of one group's scale is summed over pixels after its rounding.
    assert_close(jax.device_get(got), want, slack=3 if name == "group, one" else 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 65, 1000, 65536])
@pytest.mark.parametrize(("kind", "dtype"), RUNS)
def test_rows_of_any_length_and_mean_on_the_gpu(kind, dtype, length):
    check_rows(length, dtype, kind, times=3, implementation="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms", "ada", "instance"])
def test_what_is_not_finite_stays_in_its_rows_on_the_gpu(name):
    case = dataclasses.replace(PLANNED[name], x=(4, *PLANNED[name].x[1:]))
    x, *parameters = case.operands("bfloat16")
    run = jax.jit(functools.partial(case.y, implementation="cudnn"))
    clean, got = (np.float32(run(v, *parameters)) for v in (x, x.at[1].set(np.nan)))
    assert not np.isfinite(got[1]).any()
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))
