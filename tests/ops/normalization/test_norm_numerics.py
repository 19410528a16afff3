"""What norms lose: rows of any length and mean, what is not finite;
and their values and gradients on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cotangents_of, exactly, outcome
from norm_calls import IN_FLOAT32, KINDS, PLANNED, ROUNDED, assert_close, instance
from norm_calls import case as case_of

ROWS = {  # means and deviations
    "float32": [(0, 1), (1e3, 1), (1e4, 1)],
    "bfloat16": [(0, 1), (1e2, 1)],
    "float16": [(0, 1), (1e3, 1), (0, 4e4)],
}


def check_rows(length, dtype, kind, times=1, **keywords):
    """Rows of several means and deviations, also constant ones and of float16's largest numbers:
    y and the gradient are within what float32 statistics and one rounding cost, so many ``times``.
    A mean is known to half of its last place, the error of all distances from it."""
    random = np.random.default_rng(0)
    means, deviations = (v[:, None] for v in np.transpose([*ROWS[dtype], (3, 0), (0, 0)]))
    rows = np.clip(random.standard_normal((len(means), length)) * deviations + means, -65504, 65504)
    case = dataclasses.replace(KINDS[kind], x=rows.shape)
    parameters = [random.standard_normal(length) + 0.5 for _ in case.shapes[1:]]
    operands = [jnp.asarray(a, dtype) for a in (rows, *parameters)]
    cotangents = [jnp.asarray(random.standard_normal(rows.shape), dtype)]
    run = functools.partial(case.y, **keywords)
    y, (dx, *_) = jax.device_get(outcome(run, operands, *cotangents))
    f = lambda *o: case.plain(*o)[0]  # noqa: E731
    want, (want_dx, *_) = exactly(f, *jax.device_get([operands, *cotangents]))
    wide = np.asarray(operands[0], np.float64)
    centre = wide.mean(1, keepdims=True) if kind == "layer" else 0 * means
    inv = (np.mean((wide - centre) ** 2, 1, keepdims=True) + 1e-6) ** -0.5
    last, of_mean = ROUNDED[dtype] + IN_FLOAT32, 4 * 2.0**-23 * np.abs(centre) * inv
    least = (2.0**-24 if dtype == "float16" else 1e-6) * (deviations + 1)
    for a, b in ((y, want), (dx, want_dx)):
        size, distance = (np.linalg.norm(v, axis=1, keepdims=True) for v in (b, a - b))
        allowed = size * (last + 2 * of_mean) + (of_mean + least) * length**0.5
        assert (distance <= times * allowed).all()


RUNS = [("layer", "float32"), ("layer", "float16"), ("rms", "bfloat16")]


@pytest.mark.parametrize("length", [1, 7, 1000, pytest.param(16385, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "dtype"), RUNS)
def test_rows_of_any_length_and_mean(kind, dtype, length):
    check_rows(length, dtype, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [*PLANNED, "instance, channels second"])
def test_values_and_gradients_on_the_gpu(name, dtype):
    """In cuDNN's plans: XLA runs none of them."""
    case = PLANNED.get(name) or case_of(instance, (1, 32, 8, 10), (1,), axis=1)
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
