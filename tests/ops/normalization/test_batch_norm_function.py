"""jc.ops.batch_norm x its options, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_calls import IMAGE, Case, with_
from helpers import cotangents_of, exactly, outcome, same
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import relative_error

ROUNDED = [  # with dtypes of x and of parameters
    (with_(IMAGE, given="scale bias residual"), "float16", "float32"),
    (Case((2, 3, 2, 7, 2, 3), -3, given="", activation="leaky_relu"), "bfloat16", "float32"),
    (
        Case((5, 6, 2, 4), 0, w=(6, 4, 3, 3), numbers=("HWNC", "OIHW", "CHWN"), fused=True),
        *("float32", "bfloat16"),
    ),
]


@pytest.mark.parametrize(("case", "dtype", "parameters"), ROUNDED)
def test_values_are_rounded_once_to_xs_dtype_and_statistics_to_theirs(case, dtype, parameters):
    """In front of residual and activation also; of axes that random calls do not have."""
    operands = case.operands(dtype, parameters)
    got, want = case(*operands), exactly(case.plain, operands, case(*operands))[0]
    assert [g.dtype for g in got] == [dtype, parameters, parameters]
    once = {"float32": 2e-5, "bfloat16": 2**-9, "float16": 2**-12}
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) <= 2 * once[str(a.dtype)]


@pytest.mark.parametrize("fused", [None, False, True], ids=["alone", "conv", "fused"])
def test_nan_in_the_running_statistics_stays_out_of_a_training_step(fused):
    """Nor does infinity reach y: the sums of fused_statistics are of distances from the mean."""
    case = IMAGE if fused is None else with_(IMAGE, w=(3, 3, 6, 6), fused=fused)
    count = len(case.arrays)
    operands = case.operands()
    good = case.plain(*operands)
    for value in (np.nan, np.inf):
        bad = jnp.full(6, value, jnp.float32)
        given = [*operands[:count], bad, bad, *operands[count + 2 :]]
        (y, *new), (dx, *_) = outcome(case, given, [jnp.sin(good[0]), *good[1:]])
        np.testing.assert_allclose(y, good[0], rtol=1e-4, atol=1e-4)
        assert not np.isfinite(new).any()
        assert np.isfinite(dx).all()


@pytest.mark.parametrize("number", [1, jnp.bfloat16(0.25)], ids=["int", "array"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_momentum_and_epsilon_in_any_form_and_the_gradient_by_it(number, training):
    case = with_(IMAGE, training=training, epsilon=float(number))
    operands = case.operands()
    operands[3] = jnp.float32(number)
    want = case.plain(*operands)
    same(case(*operands, momentum=number, epsilon=number), want, 1e-4)
    cotangents = cotangents_of(want)
    given = [jnp.float32(number), *operands]
    got = outcome(lambda e, *a: case(*a, epsilon=e), given, cotangents)
    same(got, exactly(lambda e, *a: with_(case, epsilon=e).plain(*a), given, cotangents), 2e-4)


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")
@pytest.mark.parametrize(
    ("w", "kind", "spec"),
    [
        ((3, 3, 8, 4), AxisType.Auto, P("data")),
        ((), AxisType.Explicit, P(None, None, None, "data")),  # where no axis is sliced
    ],
)
def test_under_jit_statistics_are_those_of_the_whole_batch(w, kind, spec):
    case = Case((16, 3, 3, 8), activation="relu", w=w)
    x, *others = case.operands()
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",), axis_types=(kind,))
    whole = [jax.device_put(v, NamedSharding(mesh, P())) for v in others]

    def both(f):
        def total(*a):
            y, mean, var = f(*a)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

        return jax.jit(lambda *a: (f(*a), jax.grad(total, tuple(range(len(a))))(*a)))

    with jax.set_mesh(mesh):
        got = jax.device_get(both(case)(jax.device_put(x, NamedSharding(mesh, spec)), *whole))
    same(got, both(case.plain)(x, *others), 2e-4)
