"""jc.ops.batch_norm and conv_batch_norm beside plain jnp in float64 and Flax."""

import dataclasses
import doctest
import functools
import itertools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import cotangents_of, exactly, outcome
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import (
    ALL,
    FLOAT32_ON_GPU,
    TF32_ON_GPU,
    TOLERANCES,
    Transformations,
    graphs_of,
    methods,
    primitives,
    relative_error,
    shapes_of,
)

import jax_cudnn as jc

pytestmark = pytest.mark.wide

S = jax.ShapeDtypeStruct
MOMENTUM = np.float32(0.7)
ACTIVATIONS = sorted(jc.ops.epilogue._ACTIVATIONS)
# What these keep for their derivative is the result itself, by its sign.
BY_THE_RESULT = ("relu", "relu6", "leaky_relu")


# -- what the functions mean -----------------------------------------------------------------------


def activated(name, y):
    if name == "gelu_exact":
        return jax.nn.gelu(y, approximate=False)
    return y if name is None else jnp.tanh(y) if name == "tanh" else getattr(jax.nn, name)(y)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call of batch_norm; operands are x, running_mean, running_var, momentum and then scale,
    bias and residual, as far as it has them."""

    x: tuple[int, ...]
    axis: int = -1
    training: bool = True
    scale: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    epsilon: float = 1e-3
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def y(self):
        return self.x

    @property
    def channels(self):
        return self.y[self.axis]

    @property
    def arrays(self):
        """Shapes of x, or of x and w."""
        return (self.x,)

    @property
    def names(self):
        return [name for name in ("scale", "bias", "residual") if getattr(self, name)]

    def operands(self, dtype="float32", parameters="float32", seed=0):
        random = np.random.default_rng(seed)
        shapes = {"scale": (self.channels,), "bias": (self.channels,), "residual": self.y}
        dtypes = {"scale": parameters, "bias": parameters, "residual": dtype}

        def drawn(shape, dtype):
            return jnp.asarray(random.standard_normal(shape) + 0.5, dtype)

        mean = drawn((self.channels,), parameters)
        given = [drawn(shapes[name], dtypes[name]) for name in self.names]
        x = [drawn(shape, dtype) for shape in self.arrays]
        return [*x, mean, jnp.abs(mean[::-1]) + 0.5, jnp.asarray(MOMENTUM), *given]

    def avals(self, dtype="bfloat16", parameters="float32"):
        return [S(a.shape, a.dtype) for a in self.operands(dtype, parameters)]

    def split(self, operands):
        count = len(self.arrays)
        mean, var, momentum, *given = operands[count:]
        return operands[:count], mean, var, momentum, dict(zip(self.names, given, strict=True))

    @property
    def arguments(self):
        own = {"training": self.training, "epsilon": self.epsilon, "activation": self.activation}
        return {**own, **self.keywords}

    def __call__(self, *operands, **keywords):
        """[y, mean, var]"""
        (x,), mean, var, momentum, given = self.split(operands)
        scale, bias, residual = (given.get(name) for name in ("scale", "bias", "residual"))
        y, new = jc.ops.batch_norm(
            x, scale, bias, mean, var, residual=residual, axis=self.axis,
            **{"momentum": momentum, **self.arguments, **keywords},
        )  # fmt: skip
        return [y, *new]

    def plain(self, *operands):
        """The same in jnp, in the precision of its operands."""
        (x,), mean, var, momentum, given = self.split(operands)
        return self.normalized(x, mean, var, momentum, **given)

    def normalized(self, x, mean, var, momentum, scale=None, bias=None, residual=None):
        axes = tuple(a for a in range(x.ndim) if a != self.axis % x.ndim)
        along = lambda v: jnp.expand_dims(v, axes)  # noqa: E731
        new = mean, var
        if self.training:
            new = of_batch = jnp.mean(x, axes), jnp.var(x, axes)
            mean, var = (
                mean + (1 - momentum) * (new[0] - mean),
                momentum * var + (1 - momentum) * (new[1]),
            )
            new, (center, spread) = (mean, var), of_batch
        else:
            center, spread = mean, var
        y = (x - along(center)) / jnp.sqrt(along(spread) + self.epsilon)
        y = y if scale is None else y * along(scale)
        y = y if bias is None else y + along(bias)
        y = y if residual is None else y + residual
        return [activated(self.activation, y), *new]


@dataclasses.dataclass(frozen=True, eq=False)
class Conv(Case):
    """A call of conv_batch_norm; w follows x."""

    w: tuple[int, ...] = ()
    numbers: Any = ("NHWC", "HWIO", "NHWC")
    conv: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fused: bool = False

    @property
    def arrays(self):
        return self.x, self.w

    @property
    def y(self):
        return jax.eval_shape(self.convolved, S(self.x, "float32"), S(self.w, "float32")).shape

    @property
    def channels(self):
        return self.y[self.axis]

    def convolved(self, x, w):
        rank = x.ndim - 2
        given = {"strides": 1, "padding": "SAME", "dilation": 1, "groups": 1, **self.conv}
        strides, dilation = (
            (given[k],) * rank if isinstance(given[k], int) else given[k]
            for k in ("strides", "dilation")
        )
        return lax.conv_general_dilated(
            x, w, strides, given["padding"], rhs_dilation=dilation,
            dimension_numbers=self.numbers, feature_group_count=given["groups"],
        )  # fmt: skip

    def __call__(self, *operands, **keywords):
        (x, w), mean, var, momentum, given = self.split(operands)
        scale, bias, residual = (given.get(name) for name in ("scale", "bias", "residual"))
        y, new = jc.ops.conv_batch_norm(
            x, w, scale, bias, mean, var, residual=residual, dimension_numbers=self.numbers,
            fused_statistics=self.fused, **self.conv,
            **{"momentum": momentum, **self.arguments, **keywords},
        )  # fmt: skip
        return [y, *new]

    def plain(self, *operands):
        (x, w), mean, var, momentum, given = self.split(operands)
        return self.normalized(self.convolved(x, w), mean, var, momentum, **given)


# Relative to an array's norm: of sums in float32, and of what is rounded twice.
ROUNDED = {"float32": TOLERANCES["float32"], "bfloat16": 2**-8, "float16": 2**-11}


def assert_close(got, want, slack=1.0, through="float32"):
    """All of it finite, and as near as its dtype allows, and what it is computed ``through``."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        allowed = slack * max(ROUNDED[str(a.dtype)], ROUNDED[through])
        assert relative_error(a, b) <= allowed, (a.dtype, a.shape, relative_error(a, b), allowed)


def check(case, operands, slack=1.0, want=None, through="float32"):
    """Values and gradients, with cotangents of y and of both statistics."""
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(case, operands, cotangents)
    assert [g.dtype for g in got[1]] == [o.dtype for o in operands]
    want = want or exactly(case.plain, operands, cotangents)
    assert_close(got, want, slack, through)
    return got, want


def same(f, plain, *operands):
    """Values only."""
    got, want = jax.jit(lambda *a: (f(*a), plain(*a)))(*operands)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def with_(case, **changes):
    return dataclasses.replace(case, **changes)


IMAGE = Case((4, 5, 3, 6))
WITH_ALL = with_(IMAGE, residual=True, activation="relu")
each_phase = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])

# -- values and gradients --------------------------------------------------------------------------

PLACES = [
    ((9, 5), -1),
    ((9, 5), 1),
    ((4, 6, 5), -1),
    ((4, 5, 6), 1),
    ((4, 5, 3, 6), -1),
    ((4, 8, 3, 5), 1),
    ((4, 3, 7, 5), 2),
    ((3, 2, 4, 3, 6), -1),
    ((3, 6, 2, 4, 3), -4),
    ((2, 3, 2, 2, 3, 4), -1),
    ((2, 4, 3, 2, 2, 3), 1),
    ((2, 3, 2, 7, 2, 3), -3),
]


@pytest.mark.parametrize(("shape", "axis"), PLACES, ids=str)
def test_any_rank_with_its_channels_anywhere(shape, axis):
    case = Case(shape, axis, residual=True, activation="silu")
    operands = case.operands()
    ((y, mean, var), _), _ = check(case, operands)
    assert y.shape == shape
    assert mean.shape == var.shape == (shape[axis],)
    case = with_(case, training=False)
    same(case, case.plain, *operands)


@each_phase
@pytest.mark.parametrize("names", [(), ("scale",), ("bias",), ("residual",)], ids=str)
def test_what_is_none_is_left_out(names, training):
    given = {name: name in names for name in ("scale", "bias", "residual")}
    case = with_(IMAGE, training=training, **given)
    check(case, case.operands())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_jax_nns(name):
    case = with_(IMAGE, residual=True, activation=name)
    operands = case.operands()
    (got, _), _ = check(case, operands)
    given = [f for f, named in jc.ops.epilogue._FUNCTIONS.items() if named == name]
    if given:
        same(lambda *a: case(*a, activation=given[0]), lambda *_: got, *operands)
    case = with_(case, training=False)
    same(case, case.plain, *operands)


@each_phase
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float16", "bfloat16"),
    ],
)
def test_dtypes_of_x_and_of_parameters(dtype, parameters, training):
    """y has that of x, statistics and gradients those of their operands; y is rounded once, in
    training also in front of the residual, and the gradient by x in two parts."""
    case = with_(IMAGE, training=training, residual=True)
    (got, _), (want, _) = check(case, case.operands(dtype, parameters), slack=2.0)
    assert [g.dtype for g in got] == [dtype, parameters, parameters]
    once = {"float32": 1e-6, "bfloat16": 2**-9, "float16": 2**-12}
    assert relative_error(got[0], want[0]) <= once[dtype] * (1.5 if training else 1)


@pytest.mark.parametrize(
    ("dtype", "training"), [("bfloat16", True), ("float16", True), ("bfloat16", False)]
)
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_sixteen_bits_with_an_activation(name, dtype, training):
    """What the activation keeps, and the gradient that leaves it, are rounded, too; y once, and in
    training but for relu also in front of residual and activation."""
    case = with_(IMAGE, residual=True, activation=name, training=training)
    (got, _), (want, _) = check(case, case.operands(dtype), through=dtype, slack=2.0)
    once = {"bfloat16": 2**-9, "float16": 2**-12}[dtype]
    assert relative_error(got[0], want[0]) <= once * (2 if training and name != "relu" else 1)


def test_parameters_of_different_dtypes():
    x, mean, var, momentum, scale, bias = IMAGE.operands("bfloat16")
    operands = [x, mean.astype("float16"), var, momentum, scale.astype("bfloat16"), bias]
    check(IMAGE, operands)


def test_cotangents_of_some_results_only():
    """Of y alone, and of each statistic alone."""
    operands = IMAGE.operands()
    for i, result in enumerate(jax.eval_shape(IMAGE, *operands)):
        (cotangent,) = cotangents_of([result])
        got = outcome(lambda *a, i=i: IMAGE(*a)[i], operands, cotangent)[1]
        want = exactly(lambda *a, i=i: IMAGE.plain(*a)[i], operands, cotangent)[1]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        moves = [bool(np.any(b)) for b in want]  # x, mean, var, momentum, scale, bias
        assert (
            moves
            == [
                [True, False, False, False, True, True],
                [True, True, False, True, False, False],
                [True, False, True, True, False, False],
            ][i]
        )


@pytest.mark.parametrize("shape", [(1, 6), (1, 1, 1, 6)], ids=str)
def test_a_batch_of_one_element_per_channel(shape):
    """It is its own mean: y is the bias, and x has no derivative."""
    case = Case(shape)
    operands = case.operands()
    ((y, _, var), (dx, *_)), _ = check(case, operands)
    np.testing.assert_array_equal(y, jnp.broadcast_to(operands[-1], shape))
    np.testing.assert_allclose(var, MOMENTUM * operands[2], rtol=1e-6)
    assert dx.shape == shape


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
@each_phase
def test_empty_arrays(shape, training):
    case = Case(shape, training=training)
    y, mean, var = case(*case.operands())
    assert y.shape == shape
    assert mean.shape == var.shape == shape[-1:]
    unknown = training and shape[-1] > 0  # as jnp.mean's of nothing
    assert np.isnan(mean).all() == np.isnan(var).all() == (unknown or not shape[-1])
    (dx, *_) = outcome(case, case.operands(), cotangents_of([y, mean, var]))[1]
    assert dx.shape == shape


def test_nan_in_the_running_statistics_stays_out_of_a_training_step():
    """Nor does infinity reach y: the sums of fused_statistics are of distances from the mean."""
    x, mean, var, momentum, scale, bias = IMAGE.operands()
    conv = Conv(IMAGE.x, w=(3, 3, 6, 6))
    w = conv.operands()[1]
    for case, arrays in ((IMAGE, [x]), (conv, [x, w]), (with_(conv, fused=True), [x, w])):
        good = case.plain(*arrays, mean, var, momentum, scale, bias)
        cotangents = [jnp.sin(good[0]), mean, var]
        for bad in (jnp.full(6, jnp.nan), jnp.full(6, jnp.inf)):
            operands = [*arrays, bad, bad, momentum, scale, bias]
            (y, *new), (dx, *_) = outcome(case, operands, cotangents)
            np.testing.assert_allclose(y, good[0], rtol=1e-4, atol=1e-4)
            assert not np.isfinite(new).any()
            assert np.isfinite(dx).all()


# -- momentum and epsilon --------------------------------------------------------------------------

NUMBERS = [
    1,
    0.25,
    np.float32(0.25),
    np.float64(0.25),
    np.asarray(0.25, np.float32),
    jnp.float32(0.25),
    jnp.bfloat16(0.25),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__} {n}")
def test_momentum_and_epsilon_in_any_form(number):
    for training in (True, False):
        case = with_(IMAGE, training=training, epsilon=float(number))
        operands = case.operands()
        operands[3] = jnp.float32(number)
        constant = lambda *a, c=case: c(*a, momentum=number, epsilon=number)  # noqa: E731
        same(constant, case.plain, *operands)
        traced = jax.jit(lambda n, *a, c=case: c(*a, momentum=n, epsilon=n))
        same(lambda *_: traced(number, *operands), case.plain, *operands)  # noqa: B023


@each_phase
def test_gradient_by_epsilon(training):
    case = with_(IMAGE, training=training)
    operands, epsilon = case.operands(), jnp.float32(0.3)
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(lambda e, *a: case(*a, epsilon=e), [epsilon, *operands], cotangents)
    plain = lambda e, *a: with_(case, epsilon=e).plain(*a)  # noqa: E731
    assert_close(got, exactly(plain, [epsilon, *operands], cotangents), slack=5)
    assert abs(got[1][0]) > 1e-2


def test_another_momentum_is_no_other_graph():
    """Neither of numbers nor of arrays: it is not in the graph."""
    found = {
        graphs_of(lambda *a, m=momentum: IMAGE(*a, momentum=m), *IMAGE.avals())[0]
        for momentum in (0.9, 0.99, np.float32(0.5), jnp.float32(0.1))
    }
    assert len(found) == 1


def train(normalize, steps):
    """Losses and the last statistics of a few steps with a schedule of momentum and of epsilon;
    and how often a step was traced."""
    random = np.random.default_rng(3)
    batches = [jnp.asarray(random.standard_normal((6, 5, 4)) + t, "float32") for t in range(steps)]
    traces = []

    def loss(parameters, running, x, momentum, epsilon):
        y, running = normalize(x, *parameters, *running, momentum, epsilon)
        return jnp.mean(jnp.sin(y) * x), running

    @jax.jit
    def step(parameters, running, x, t):
        traces.append(t)
        momentum, epsilon = 1 - 1 / (t + 2), 10.0 ** -(t + 1)
        of = jax.value_and_grad(loss, has_aux=True)
        (value, running), slopes = of(parameters, running, x, momentum, epsilon)
        return [p - 0.3 * d for p, d in zip(parameters, slopes, strict=True)], running, value

    parameters, running = [jnp.ones(4), jnp.zeros(4)], (jnp.zeros(4), jnp.ones(4))
    losses = []
    for t, x in enumerate(batches):
        parameters, running, value = step(parameters, running, x, jnp.float32(t))
        losses.append(value)
    return losses, parameters, running, len(traces)


def test_a_train_loop_with_schedules_compiles_once():
    def plain(x, scale, bias, mean, var, momentum, epsilon):
        case = Case(x.shape, epsilon=epsilon)
        y, *new = case.plain(x, mean, var, momentum, scale, bias)
        return y, tuple(new)

    def ours(x, scale, bias, mean, var, momentum, epsilon):
        return jc.ops.batch_norm(
            x, scale, bias, mean, var, training=True, momentum=momentum, epsilon=epsilon
        )

    got, want = train(ours, 5), train(plain, 5)
    assert got[3] == 1
    for a, b in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(want[:3]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# -- beside Flax -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize(("use_scale", "use_bias"), [(True, True), (False, True), (False, False)])
def test_flax_has_the_same(axis, dtype, use_scale, use_bias):
    """Over some steps of training, and then in inference."""
    random = np.random.default_rng(4)
    batches = [jnp.asarray(2 * random.standard_normal((4, 6, 5, 6)) + t, dtype) for t in range(3)]
    layer = nnx.BatchNorm(
        6, axis=axis, momentum=0.8, epsilon=1e-3, use_scale=use_scale, use_bias=use_bias,
        dtype=jnp.dtype(dtype), use_fast_variance=False, rngs=nnx.Rngs(0),
    )  # fmt: skip
    scale = jnp.linspace(0.5, 2, 6) if use_scale else None
    bias = jnp.linspace(-1, 1, 6) if use_bias else None
    for parameter, value in ((layer.scale, scale), (layer.bias, bias)):
        if value is not None:
            parameter.set_value(value)
    running = jnp.zeros(6), jnp.ones(6)
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7}[dtype]  # Flax rounds after each operation

    def ours(x, running, training):
        return jc.ops.batch_norm(
            x, scale, bias, *running, training=training, momentum=0.8, epsilon=1e-3, axis=axis
        )

    for x in batches:
        y, running = ours(x, running, True)
        want = layer(x, use_running_average=False)
        assert y.dtype == want.dtype
        assert relative_error(y, want) <= tolerance
        np.testing.assert_allclose(running[0], layer.mean[...], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(running[1], layer.var[...], rtol=1e-5, atol=1e-5)
    y, same = ours(batches[0], running, False)
    want = layer(batches[0], use_running_average=True)
    assert relative_error(y, want) <= tolerance
    for a, b in zip(same, running, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_images_that_are_sharded_along_pixels_or_channels(activation):
    """On a mesh with explicit axes, where JAX slices no sharded axis."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (2, 8, 4, 16)) + 1
    zeros, ones = jnp.zeros(16), jnp.ones(16)

    def loss(x):
        y, _ = jc.ops.batch_norm(x, None, None, zeros, ones, training=True, activation=activation)
        return jnp.sum(y * y)

    want = jax.grad(loss)(x)
    with jax.set_mesh(mesh):
        for spec in (P(None, "d"), P(None, None, None, "d")):
            got = jax.jit(jax.grad(loss))(jax.device_put(x, jax.NamedSharding(mesh, spec)))
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_graphs_without_pixels():
    x = jax.random.normal(jax.random.key(0), (8, 16)) + 3
    each = jnp.ones((1, 16))
    batch = jc.graph(lambda g, x, s: g.batchnorm(x, s, s, s, s, 1e-5, 0.1)[0])
    got = jax.jit(jax.grad(lambda x: jnp.sum(batch(x, each) ** 3)))(x)
    plain = lambda x: (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) + 1  # noqa: E731
    want = jax.grad(lambda x: jnp.sum(plain(x) ** 3))(x)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


# -- large means -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, 30, 1000, 30000])
def test_large_means_with_small_variances(ratio):
    """The variance is of distances from the mean: what float32 loses of x itself is lost, and
    a mean that is off by an ulp of x moves y by as much, in deviations."""
    case = with_(IMAGE, x=(8, 6, 6, 4), epsilon=1e-12)
    x, mean, var, _, scale, bias = case.operands()
    operands = [x * 0.01 + 0.01 * ratio, mean, var, jnp.float32(0), scale, bias]
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got, want = outcome(case, operands, cotangents), exactly(case.plain, operands, cotangents)
    allowed = 1e-5 + 1e-6 * ratio
    errors = [relative_error(a, b) for a, b in zip(got[0], want[0], strict=True)]
    assert errors[0] <= allowed
    assert errors[1] <= 1e-6
    assert errors[2] <= 1e-6 + allowed**2  # the square of what the mean is off by
    assert relative_error(got[1][0], want[1][0]) <= 2 * allowed


# Images of which one pixel, or two of those that make the guess of the mean, are unlike the others.
OUTLIERS = {
    "56 x 56": ((8, 56, 56), [(28, 28)], 2e-6),
    "56 x 56, two": ((8, 56, 56), [(28, 28), (14, 14)], 2e-3),
    "64 x 64": ((2, 64, 64), [(32, 32)], 2e-6),
    "a corner": ((8, 56, 56), [(0, 0)], 2e-6),
    "256 x 256": ((1, 256, 256), [(128, 128), (64, 64)], 2e-6),
    "a row": ((4, 100000), [(50000,), (25000,)], 2e-6),
    "a volume": ((1, 40, 40, 40), [(20, 20, 20), (10, 10, 10)], 2e-6),
}


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("value", [0.0, 100.0, 1e5])
@pytest.mark.parametrize("name", OUTLIERS)
def test_statistics_of_images_with_an_outlier(name, value, mean):
    """Of up to 4096 pixels one pass takes a guess of the mean; a factor of so many is lost where
    two of the three that make it are outliers, and else none."""
    shape, places, allowed = OUTLIERS[name]
    x = np.random.default_rng(0).normal(mean, 1, (*shape, 2)).astype("float32")
    for place in places:
        x[(slice(None), *place)] = value
    one, zero = jnp.ones(2), jnp.zeros(2)
    norm = functools.partial(jc.ops.batch_norm, training=True, momentum=0.0)
    y, (got_mean, got) = jax.jit(norm)(x, one, zero, zero, one)
    axes = tuple(range(x.ndim - 1))
    wide = x.astype("float64")
    assert relative_error(got, wide.var(axes)) <= allowed
    spread = wide.std(axes)
    assert (
        np.abs(got_mean - wide.mean(axes)).max()
        <= (1e-6 + allowed) * (np.abs(wide.mean(axes)) + spread).max()
    )
    want = (wide - wide.mean(axes)) / np.sqrt(wide.var(axes) + 1e-5)
    assert relative_error(y, want) <= allowed + 1e-6 * np.abs(wide.mean(axes) / spread).max()


@pytest.mark.parametrize("ratio", [0, 1, 10, 100, 1000])
def test_what_fused_statistics_lose(ratio):
    """About ``1e-6 * (1 + ratio**2)`` of the variance, where ratio is the distance of the running
    mean from the batch's, in deviations; without them nothing. It is the error of two sums over 288
    elements in float32, whose difference the variance is."""
    case = Conv((8, 6, 6, 8), w=(1, 1, 8, 8), fused=True, epsilon=1e-5)
    x, w, _, var, _, scale, bias = case.operands()
    y = np.asarray(case.convolved(x, w), np.float64)
    of_batch, spread = y.mean((0, 1, 2)), y.var((0, 1, 2))
    mean = jnp.asarray(of_batch + ratio * np.sqrt(spread), "float32")
    operands = [x, w, mean, var, jnp.float32(0), scale, bias]
    fused, unfused = (
        np.max(np.abs(c(*operands)[2] / spread - 1)) for c in (case, with_(case, fused=False))
    )
    print(f"ratio {ratio}: relative error of the variance {fused:.1e}, unfused {unfused:.1e}")
    assert fused <= 4e-6 * (1 + ratio**2)
    assert unfused <= 2e-6
    if ratio >= 1000:  # so that the test shows a loss where there is one
        assert fused >= 1e-4


# -- transformations -------------------------------------------------------------------------------

TINY, TINY_CONV = with_(IMAGE, x=(3, 2, 2, 4)), Conv((2, 3, 3, 4), w=(2, 2, 4, 3))
OF_CONV = ("forward", "jvp_of_vjp", "vmap", "vmap_of_vjp")
TRANSFORMED = {
    "training": (with_(TINY, residual=True, activation="gelu"), ALL),
    "inference": (with_(TINY, x=(3, 4, 2, 2), axis=1, training=False, bias=False), ALL),
    "conv, fused": (with_(TINY_CONV, activation="tanh", fused=True), OF_CONV),
    "conv, inference": (with_(TINY_CONV, activation="tanh", training=False), OF_CONV),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name):
    """Of all operands: derivatives of both directions and orders, batches, remat, scan."""
    case, names = TRANSFORMED[name]
    operands = case.operands()
    transformations = Transformations(operands, jax.eval_shape(case, *operands))
    data = transformations.data()

    def run(f):
        every = lambda d: {name: getattr(transformations, name)(f, d) for name in names}  # noqa: E731
        return jax.jit(every)(data)

    got, want = run(case), run(case.plain)
    for name in names:
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            assert relative_error(a, b) < 5 * TOLERANCES["float32"], (name, a.shape)


@each_phase
def test_vmap_over_every_subset_of_operands(training):
    """Running statistics and momentum, which are one kind of operand here, go together."""
    case = with_(WITH_ALL, x=(2, 2, 3), training=training)
    one = case.operands()
    stacks = [jnp.stack([a, b]) for a, b in zip(one, case.operands(seed=5), strict=True)]
    subsets = [s for s in itertools.product((0, None), repeat=len(one) - 2) if 0 in s]
    assert len(subsets) == 31

    def each(f):
        def run(stacks, one):
            found = []
            for x, running, *rest in subsets:
                axes = (x, running, running, running, *rest)
                chosen = [s if a == 0 else x for s, x, a in zip(stacks, one, axes, strict=True)]
                found += jax.vmap(f, in_axes=axes)(*chosen)
            return found

        return run

    same(each(case), each(case.plain), stacks, one)


def test_a_dimension_of_vmap_becomes_channels():
    """Of training and of its backward: batches of batches are one graph each, of more channels."""
    case = with_(IMAGE, x=(4, 3, 3, 8))
    x, *rest = case.avals("float32")

    def gradients(x, *rest):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(case(*a)[0])), (0, 4, 5))(x, *rest)

    axes = (0, *(None for _ in rest))
    per_example = jax.vmap(gradients, axes)
    nested = jax.vmap(per_example, axes)
    for function, lead in ((per_example, (5,)), (nested, (2, 5))):
        forward, backward = graphs_of(function, S((*lead, *x.shape), x.dtype), *rest)
        assert methods(forward) == ["batchnorm"]
        assert methods(backward) == ["batchnorm_backward"]
        wide = (4, 8 * int(np.prod(lead)), 3, 3)
        assert shapes_of(forward, "batchnorm")["input"] == wide
        assert shapes_of(backward, "batchnorm_backward")["DX"] == wide


def test_gradients_of_each_example():
    case = with_(WITH_ALL, x=(1, 4, 3, 5))
    x, *rest, residual = case.operands()
    xs = jnp.stack([x, 2 * x + 1, -x])
    residuals = jnp.stack([residual, residual - 1, 1 - residual])

    def gradients(f):
        of = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[0])), (0, 4, 5, 6))
        return lambda x, r: of(x, *rest, r)

    def in_turn(xs, residuals):
        found = [gradients(case.plain)(*pair) for pair in zip(xs, residuals, strict=True)]
        return [jnp.stack(each) for each in zip(*found, strict=True)]

    same(jax.vmap(gradients(case)), in_turn, xs, residuals)


def test_statistics_are_carried_through_a_scan():
    case = with_(IMAGE, x=(4, 3, 5))
    random = np.random.default_rng(6)
    xs = jnp.asarray(random.standard_normal((4, *case.x)), "float32")
    _, mean, var, momentum, scale, bias = case.operands()

    def last(f):
        def run(xs, running, scale):
            def step(running, x):
                y, *new = f(x, *running, momentum, scale, bias)
                return tuple(new), jnp.sum(jnp.sin(y) * x)

            running, losses = jax.lax.scan(jax.checkpoint(step), running, xs)
            return jnp.sum(losses) + jnp.sum(jnp.cos(running[0]) * running[1])

        return jax.jit(jax.value_and_grad(run, (0, 1, 2)))(xs, (mean, var), scale)

    for a, b in zip(jax.tree.leaves(last(case)), jax.tree.leaves(last(case.plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_remat_keeps_nothing_of_the_forward():
    """With a policy that saves nothing the statistics are computed again."""
    case = with_(IMAGE, x=(4, 3, 3, 8))

    def kept(policy):
        loss = lambda *a: jnp.sum(jnp.sin(jax.checkpoint(case, policy=policy)(*a)[0]))  # noqa: E731
        specs = graphs_of(jax.grad(loss), *case.avals())
        return [m for spec in specs for m in methods(spec)]

    assert kept(jax.checkpoint_policies.nothing_saveable).count("batchnorm") == 2
    assert kept(jax.checkpoint_policies.everything_saveable).count("batchnorm") == 1


def test_donated_statistics():
    x, mean, var, momentum, scale, bias = IMAGE.operands()
    want = IMAGE.plain(x, mean, var, momentum, scale, bias)
    step = jax.jit(IMAGE, donate_argnums=(1, 2))
    got = step(x, mean, var, momentum, scale, bias)
    assert_close(got, want)
    assert mean.is_deleted()
    assert var.is_deleted()


@pytest.mark.parametrize("name", TRANSFORMED)
def test_shapes_without_values(name):
    case, _ = TRANSFORMED[name]
    found = jax.eval_shape(case, *case.avals("float16", "bfloat16"))
    channels = (case.channels,)
    assert [(f.shape, f.dtype) for f in found] == [
        (case.y, "float16"),
        (channels, "bfloat16"),
        (channels, "bfloat16"),
    ]


# -- several devices -------------------------------------------------------------------------------

needs_devices = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


def devices(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices("cpu")[:8]), ("data",), axis_types=(kind,))


@needs_devices
def test_inside_shard_map_each_device_has_its_own_statistics():
    case = with_(WITH_ALL, x=(2, 3, 3, 4), activation="silu")
    x, mean, var, momentum, scale, bias, residual = with_(case, x=(16, 3, 3, 4)).operands()
    batch, whole = P("data"), P()

    def local(f):
        def run(x, mean, var, scale, bias, residual):
            y, new_mean, new_var = f(x, mean, var, momentum, scale, bias, residual)
            return y, new_mean[None], new_var[None]

        return run

    def loss(f):
        return lambda *a: sum(jnp.sum(jnp.sin(r)) for r in f(*a))

    mapped = jax.shard_map(
        local(case), mesh=devices(), check_vma=True, out_specs=batch,
        in_specs=(batch, whole, whole, whole, whole, batch),
    )  # fmt: skip

    def parts(x, mean, var, scale, bias, residual):
        pairs = zip(jnp.split(x, 8), jnp.split(residual, 8), strict=True)
        found = [local(case.plain)(x, mean, var, scale, bias, r) for x, r in pairs]
        return [jnp.concatenate(each) for each in zip(*found, strict=True)]

    operands = (x, mean, var, scale, bias, residual)
    got = [*jax.jit(mapped)(*operands), *jax.jit(jax.grad(loss(mapped), range(6)))(*operands)]
    want = [*jax.jit(parts)(*operands), *jax.jit(jax.grad(loss(parts), range(6)))(*operands)]
    assert got[1].shape == (8, 4)
    assert np.ptp(np.asarray(got[1]), 0).min() > 1e-3  # they differ
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", [WITH_ALL, Conv((4, 5, 3, 6), w=(3, 3, 6, 4))], ids=["bn", "conv"])
def test_under_jit_statistics_are_those_of_the_whole_batch(case, kind):
    case = with_(case, x=(16, 3, 3, 6))
    operands = case.operands()
    mesh = devices(kind)
    batched = {0, len(operands) - 1} if case.residual else {0}
    sharded = [
        jax.device_put(x, NamedSharding(mesh, P("data") if i in batched else P()))
        for i, x in enumerate(operands)
    ]

    def loss(*a):
        y, mean, var = case(*a)
        return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

    def plain(*a):
        y, mean, var = case.plain(*a)
        return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

    moving = tuple(range(len(operands)))
    with jax.set_mesh(mesh):
        got = jax.jit(case)(*sharded), jax.jit(jax.grad(loss, moving))(*sharded)
    want = jax.jit(case.plain)(*operands), jax.jit(jax.grad(plain, moving))(*operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(jax.device_get(a), b, rtol=2e-4, atol=2e-4)


# -- conv_batch_norm -------------------------------------------------------------------------------

HWIO = ("NHWC", "HWIO", "NHWC")
CONVOLUTIONS = {
    "plain": Conv((2, 5, 6, 4), w=(3, 3, 4, 6)),
    "channels second": Conv((2, 4, 5, 6), 1, w=(6, 4, 3, 3), numbers=("NCHW", "OIHW", "NCHW")),
    "by default": Conv((2, 4, 5, 6), 1, w=(6, 4, 3, 3), numbers=None),
    "weights as cuDNN's": Conv((2, 5, 6, 4), w=(6, 3, 3, 4), numbers=("NHWC", "OHWI", "NHWC")),
    "laid out anew": Conv((5, 6, 2, 4), 0, w=(6, 4, 3, 3), numbers=("HWNC", "OIHW", "CHWN")),
    "strides": Conv((2, 7, 6, 4), w=(3, 2, 4, 6), conv={"strides": (2, 1), "padding": "VALID"}),
    "same, strided": Conv((2, 7, 6, 4), w=(3, 3, 4, 6), conv={"strides": 2}),
    "dilation": Conv((2, 7, 6, 4), w=(3, 2, 4, 6), conv={"dilation": (2, 1)}),
    "padding": Conv((2, 5, 6, 4), w=(3, 3, 4, 6), conv={"padding": [(1, 2), (0, 1)]}),
    "groups": Conv((2, 5, 6, 4), w=(3, 3, 2, 6), conv={"groups": 2}),
    "depthwise": Conv((2, 5, 6, 4), w=(3, 3, 1, 4), conv={"groups": 4}),
    "1D": Conv((3, 9, 4), w=(3, 4, 6), numbers=("NHC", "HIO", "NHC")),
    "3D": Conv((2, 3, 4, 3, 4), w=(2, 2, 2, 4, 6), numbers=("NDHWC", "DHWIO", "NDHWC")),
}
WAYS = {
    "training": {},
    "fused": {"fused": True},
    "inference": {"training": False},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_laxs(name):
    """Training in both ways, and inference."""
    case = CONVOLUTIONS[name]
    for way in WAYS.values():
        case = with_(CONVOLUTIONS[name], **way)
        same(case, case.plain, *case.operands())


@pytest.mark.parametrize("name", ["laid out anew", "strides", "groups", "1D", "3D"])
def test_gradients_of_convolutions(name):
    case = with_(CONVOLUTIONS[name], fused=True)
    check(case, case.operands())


@pytest.mark.parametrize(
    ("name", "given", "activation"),
    [
        ("plain", ("scale", "bias", "residual"), "gelu"),
        ("laid out anew", ("bias", "residual"), "relu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_convolutions_with_their_epilogue(way, name, given, activation):
    own = {name: name in given for name in ("scale", "bias", "residual")}
    case = with_(CONVOLUTIONS[name], **WAYS[way], **own, activation=activation)
    check(case, case.operands())


@pytest.mark.parametrize(
    ("dtype", "parameters"), [("bfloat16", "float32"), ("float16", "bfloat16")]
)
@pytest.mark.parametrize("way", WAYS)
def test_convolutions_in_sixteen_bits(way, dtype, parameters):
    """In training the convolution's result is rounded before it is normalized."""
    case = with_(CONVOLUTIONS["plain"], **WAYS[way], residual=True, activation="silu")
    ((y, *new), _), _ = check(case, case.operands(dtype, parameters), slack=1.5, through=dtype)
    assert y.dtype == dtype
    assert [n.dtype for n in new] == [parameters] * 2


def test_inference_with_statistics_in_sixteen_bits_computes_in_float32():
    """1 / sqrt(var + epsilon) of a bfloat16 variance is not rounded to bfloat16."""
    case = with_(CONVOLUTIONS["plain"], training=False)
    operands = case.operands("float32", "bfloat16")
    got, want = case(*operands)[0], case.plain(*(o.astype("float32") for o in operands))[0]
    assert relative_error(got, want) <= TOLERANCES["float32"]


def test_fused_statistics_are_those_of_the_rounded_result():
    """In bfloat16: y is normalized by the statistics of what is normalized."""
    case = with_(CONVOLUTIONS["plain"], fused=True, scale=False, bias=False, epsilon=0)
    y, *_ = case(*case.operands("bfloat16"))
    np.testing.assert_allclose(np.float32(y).mean((0, 1, 2)), 0, atol=2**-9)
    np.testing.assert_allclose(np.float32(y).std((0, 1, 2)), 1, atol=2**-9)


def test_fused_statistics_change_nothing_in_inference():
    case = with_(CONVOLUTIONS["plain"], training=False)
    (a,), (b,) = (graphs_of(c, *case.avals()) for c in (case, with_(case, fused=True)))
    assert a == b


# -- structure -------------------------------------------------------------------------------------


def loss(case):
    return lambda *a: jnp.sum(case(*a)[0].astype(jnp.float32))


def moving(case):
    """Positions of all but statistics and momentum."""
    count = len(case.arrays)
    return (*range(count), *range(count + 3, len(case.avals())))


def outputs(spec):
    return sorted((t.shape, t.dtype) for t in spec.output_tensors)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_the_forward_keeps_statistics_and_what_the_activation_needs(activation):
    case = with_(WITH_ALL, x=(4, 3, 3, 8), activation=activation)
    step = jax.value_and_grad(loss(case), moving(case))
    assert primitives(jax.make_jaxpr(step)(*case.avals())).count("cudnn") == 2
    forward, backward = graphs_of(step, *case.avals())
    assert methods(forward)[:2] == ["batchnorm", "add"]
    assert "batchnorm_backward" in methods(backward)
    image, each = ((4, 8, 3, 3), "bfloat16"), ((1, 8, 1, 1), "float32")
    kept = [each, each] + ([] if activation in (None, *BY_THE_RESULT) else [image])
    assert outputs(forward) == sorted([image, *kept])
    # x, the gradient, and what is kept of the activation: its result or what it is of.
    read = [(t.shape, t.dtype) for t in backward.input_tensors]
    assert read.count(image) == (2 if activation is None else 3)


def test_of_relu_alone_a_mask_is_kept():
    case = with_(IMAGE, x=(4, 3, 3, 8), activation="relu")
    forward, backward = graphs_of(jax.value_and_grad(loss(case), moving(case)), *case.avals())
    image, each = ((4, 8, 3, 3), "bfloat16"), ((1, 8, 1, 1), "float32")
    mask = ((4, 1, 3, 3), "uint8")
    assert outputs(forward) == sorted([image, each, each, mask])
    read = [(t.shape, t.dtype) for t in backward.input_tensors]
    assert (read.count(image), read.count(mask)) == (2, 1)


def test_without_an_activation_the_gradient_of_a_residual_is_that_of_the_result():
    case = with_(IMAGE, residual=True, x=(4, 3, 3, 8))
    _, backward = graphs_of(jax.grad(loss(case), moving(case)), *case.avals())
    assert methods(backward) == ["batchnorm_backward"]


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("training", ["conv_fprop", "batchnorm", "batchnorm_backward"]),
        ("fused", ["conv_fprop", "batchnorm_inference"]),
        ("inference", ["conv_fprop"]),
    ],
)
def test_graphs_of_a_convolutions_gradient(way, names):
    case = with_(CONVOLUTIONS["plain"], **WAYS[way], activation="relu")
    step = jax.value_and_grad(loss(case), moving(case))
    specs = graphs_of(step, *case.avals())
    assert len(specs) == {"inference": 2}.get(way, 4)
    forward = specs[: len(specs) // 2]
    found = [m for spec in specs for m in methods(spec)]
    assert all(found.count(name) == 1 for name in (*names, "conv_wgrad", "conv_dgrad"))
    images = [t for spec in forward for t in spec.output_tensors if len(t.shape) == 4]
    images = [t for t in images if t.shape[2:] != (1, 1)]
    # The convolution's result in training and y; in inference y, and what scale is multiplied by.
    assert len(images) == 2
    assert {t.dtype for t in images} == {"bfloat16"}


def test_inference_is_one_graph_in_which_nothing_moves():
    case = with_(WITH_ALL, training=False)
    (spec,) = graphs_of(case, *case.avals())
    assert methods(spec) == ["batchnorm_inference", "add", "relu"]
    assert len(spec.outputs) == 1


# -- plans without a GPU ---------------------------------------------------------------------------

BIG = with_(IMAGE, x=(8, 14, 14, 64))
BIG_CONV = Conv((8, 14, 14, 32), w=(64, 3, 3, 32), numbers=("NHWC", "OHWI", "NHWC"))
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])


def planned(function, *avals):
    """Name of a graph -> for each segment, whether cuDNN runs it, and the operations."""
    with jc.target("H200"):
        found = jc.plans(function, *avals)
    return {
        name: [(s.plan is not None, methods(s.spec)) for s in plan.segments]
        for name, plan in found.items()
    }


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [
        ("bfloat16", ()),
        ("bfloat16", ("relu",)),
        ("bfloat16", ("add", "relu")),
        ("float16", ("add", "relu")),
        ("float32", ()),
        ("float32", ("add", "relu")),
    ],
    ids=str,
)
def test_training_is_one_plan_and_its_backward_one(dtype, epilogue):
    activation = "relu" if "relu" in epilogue else None
    case = with_(BIG, residual="add" in epilogue, activation=activation)
    found = planned(jax.value_and_grad(loss(case), moving(case)), *case.avals(dtype))
    alone = epilogue == ("relu",)
    names = ["batchnorm", "relu_mask"] if alone else ["batchnorm", *epilogue]
    # Behind a residual cuDNN is measured to be slower than XLA.
    assert found["batch_norm"] == [("add" not in epilogue, names)]
    *before, backward = found["batch_norm (backward)"]
    assert backward == (True, ["masked"] * alone + ["batchnorm_backward"])
    assert [(by_cudnn, names[0]) for by_cudnn, names in before] == (
        [] if activation is None or alone else [(False, "relu_backward")]
    )
    forward = lambda *a: case(*a, implementation="cudnn")  # noqa: E731
    assert planned(forward, *case.avals(dtype)) == {"batch_norm": [(True, names)]}


@pytest.mark.deviceless
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("shape", [(32, 64), (8, 9, 64), (2, 5, 4, 3, 64), (2, 3, 4, 3, 2, 64)])
def test_every_rank_is_planned(shape):
    case = Case(shape)
    found = planned(jax.value_and_grad(loss(case), moving(case)), *case.avals())
    assert found == {
        "batch_norm": [(True, ["batchnorm"])],
        "batch_norm (backward)": [(True, ["batchnorm_backward"])],
    }


@pytest.mark.deviceless
@pytest.mark.usefixtures("by_cudnn")
@DTYPES
def test_inference_of_a_convolution_is_one_plan_with_its_epilogue(dtype):
    case = with_(BIG_CONV, training=False, residual=True, activation="relu")
    (segments,) = planned(case, *case.avals(dtype)).values()
    assert segments == [(True, ["conv_fprop", "mul", "add", "add", "relu"])]


@pytest.mark.deviceless
@DTYPES
def test_fused_statistics_are_one_plan_with_the_convolution(dtype):
    case = with_(BIG_CONV, fused=True, activation="relu")
    found = planned(case, *case.avals(dtype))
    assert found == {
        "conv_batch_norm": [(True, ["conv_fprop", "sub", "reduction", "mul", "reduction"])],
        "batch_norm": [(False, ["batchnorm_inference", "relu"])],
    }


@pytest.mark.deviceless
def test_thirty_channels_are_refused_in_words_or_xlas():
    case = with_(BIG, x=(8, 14, 14, 30))
    words = "30 channels, which is no multiple of 8"
    with jc.target("H200"):
        with pytest.raises(jc.UnsupportedGraphError, match=words):
            jc.plans(lambda *a: case(*a, implementation="cudnn"), *case.avals())
        found = jc.plans(jax.grad(loss(case)), *case.avals())
    assert [*found] == ["batch_norm", "batch_norm (backward)"]
    for plan in found.values():
        assert [s.plan for s in plan.segments] == [None]
        assert words in str(plan.explain())


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": (1, 1, 1, 64)}, "one element"),
        ({"training": False}, "XLA runs it"),
    ],
    ids=str,
)
def test_what_else_is_xlas(changes, words):
    case = with_(BIG, **changes)
    with jc.target("H200"):
        (plan,) = jc.plans(case, *case.avals()).values()
        assert words in str(plan.explain())
        assert [s.plan for s in plan.segments] == [None]
        with pytest.raises(jc.UnsupportedGraphError, match=words):
            jc.plans(lambda *a: case(*a, implementation="cudnn"), *case.avals())


@pytest.mark.deviceless
def test_epsilon_as_an_array_is_xlas_and_a_number_is_not():
    def function(epsilon, *a):
        return BIG(*a, epsilon=epsilon)

    found = planned(function, S((), "float32"), *BIG.avals())
    assert found == {"batch_norm": [(False, ["batchnorm"])]}
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match="Python number"):
        jc.plans(
            lambda e, *a: BIG(*a, epsilon=e, implementation="cudnn"), S((), "float32"), *BIG.avals()
        )
    assert planned(lambda *a: BIG(*a), *BIG.avals()) == {"batch_norm": [(True, ["batchnorm"])]}


# -- what is refused -------------------------------------------------------------------------------

ERRORS = {
    "running_mean's shape": (
        {"running_mean": jnp.ones(5)},
        r"running_mean does not fit[^$]*\(6,\)",
    ),
    "running_var's shape": ({"running_var": jnp.ones((1, 6))}, "running_var does not fit"),
    "running_mean's dtype": ({"running_mean": jnp.ones(6, int)}, "running_mean has a dtype"),
    "running_var's dtype": ({"running_var": jnp.ones(6, jnp.complex64)}, "running_var has a dtype"),
    "scale's shape": ({"scale": jnp.ones((6, 1))}, r"scale does not fit[^$]*\(6,\)"),
    "scale's dtype": ({"scale": jnp.ones(6, int)}, "scale has a dtype"),
    "bias's shape": ({"bias": jnp.ones(3)}, "bias does not fit"),
    "bias's dtype": ({"bias": jnp.ones(6, bool)}, "bias has a dtype"),
    "residual's shape": ({"residual": jnp.ones((4, 5, 1, 6))}, "residual does not fit"),
    "residual's rank": ({"residual": jnp.ones(6)}, "residual does not fit"),
    "activation": ({"activation": "mish"}, "unknown activation"),
    "x's dtype": ({"x": jnp.ones((4, 5, 3, 6), "int8")}, "x has a dtype"),
    "epsilon": ({"epsilon": jnp.ones(6)}, "epsilon is no number"),
    "training as an array": ({"training": jnp.array(True)}, "Python bool"),
    "training as a word": ({"training": "False"}, "Python bool"),
    "training as a number": ({"training": 1}, "Python bool"),
}
ONLY_OF_BATCH_NORM = {
    "axis beyond the rank": ({"axis": 4}, "axis is not valid"),
    "axis before the first": ({"axis": -5}, "axis is not valid"),
    "the batch's axis": ({"axis": 0}, "not the first"),
    "two axes": ({"axis": (1, 2)}, "no such axes"),
    "a name": ({"axis": "C"}, "no such axes"),
    "a vector": ({"x": jnp.ones(6)}, "no such axes"),
}
CALLED = {
    "training": {"training": True},
    "inference": {"training": False},
    "conv": {"training": True, "w": jnp.ones((6, 6, 3, 3))},
    "conv, fused": {"training": True, "w": jnp.ones((6, 6, 3, 3)), "fused_statistics": True},
    "conv, inference": {"training": False, "w": jnp.ones((6, 6, 3, 3))},
}


def called(**arguments):
    given = {"x": jnp.ones((4, 5, 3, 6)), "scale": None, "bias": None}
    given |= {"running_mean": jnp.zeros(6), "running_var": jnp.ones(6), **arguments}
    if "w" not in given:
        return jc.ops.batch_norm(**given)
    numbers = ("NHWC", "OIHW", "NHWC")
    if given["x"].dtype != "float32":
        given["w"] = given["w"].astype(given["x"].dtype)
    return jc.ops.conv_batch_norm(**given, dimension_numbers=numbers)


@pytest.mark.parametrize("how", CALLED)
@pytest.mark.parametrize("what", [*ERRORS, *ONLY_OF_BATCH_NORM])
def test_wrong_arguments_are_said_in_words(what, how):
    if what in ONLY_OF_BATCH_NORM and "w" in CALLED[how]:
        how = how.replace("conv, fused", "conv").replace("conv, ", "").replace("conv", "training")
    wrong, words = (ERRORS | ONLY_OF_BATCH_NORM)[what]
    with pytest.raises(jc.JaxCudnnError, match=words):
        called(**{**CALLED[how], **wrong})


def test_what_the_table_of_errors_calls_is_right_without_them():
    for arguments in CALLED.values():
        y, _ = called(**arguments)
        assert y.shape == (4, 5, 3, 6)
        y, _ = called(**{**arguments, "training": np.bool_(arguments["training"])})
        assert y.shape == (4, 5, 3, 6)


@pytest.mark.parametrize("how", ["training", "conv", "conv, fused"])
def test_momentum_is_one_number(how):
    with pytest.raises(jc.GraphError, match="momentum is no number"):
        called(**CALLED[how], momentum=jnp.ones(6))


@pytest.mark.parametrize("how", ["training", "conv"])
def test_training_that_jit_has_traced_is_said_in_words(how):
    rest = {k: v for k, v in CALLED[how].items() if k != "training"}
    with pytest.raises(jc.GraphTypeError, match=r"Python bool[^$]*static_argnames"):
        jax.jit(lambda training: called(training=training, **rest))(True)
    step = jax.jit(
        lambda training: called(training=training, **rest)[0], static_argnames="training"
    )
    assert not np.array_equal(step(training=True), step(training=False))


def test_docstring_examples_run():
    module = sys.modules[jc.ops.batch_norm.__module__]
    result = doctest.testmod(module)
    assert result.attempted >= 8
    assert result.failed == 0


# -- on a GPU --------------------------------------------------------------------------------------

ON_GPU = {"float32": FLOAT32_ON_GPU, "bfloat16": 2**-8, "float16": 2**-10}
GPU_SHAPES = [
    (32, 64),
    (8, 10, 64),
    (4, 9, 7, 8),
    (4, 9, 7, 64),
    (4, 9, 7, 1000),
    (64, 1, 1, 64),
    (1, 9, 7, 64),
    (2, 5, 4, 3, 16),
    (2, 3, 4, 3, 2, 16),
]


def check_on_gpu(f, plain, operands, allowed):
    """Values and gradients beside float64 on the CPU."""
    cotangents = cotangents_of(jax.eval_shape(f, *operands))
    got = jax.device_get(outcome(f, operands, cotangents))
    want = exactly(plain, *jax.device_get((operands, cotangents)))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = [relative_error(a, b) for a, b in pairs]
    print([f"{e:.1e}" for e in errors], f"of {allowed:.1e}")
    assert all(e <= allowed for e in errors), errors


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@DTYPES
def test_training_on_the_gpu(shape, dtype):
    """y and its gradients in one plan each: what statistics' cotangents add is XLA's."""
    for axis in (-1, 1) if len(shape) > 2 and shape[1] % 8 == 0 else (-1,):
        case = Case(shape, axis)
        y, plain = lambda *a: case(*a)[:1], lambda *a: case.plain(*a)[:1]  # noqa: B023
        check_on_gpu(y, plain, case.operands(dtype), ON_GPU[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 30, 64, 1000])
@pytest.mark.parametrize("name", [None, "relu", "silu"])
@DTYPES
def test_training_with_an_epilogue_on_the_gpu(dtype, name, channels):
    """As it is by default: XLA runs the activation's backward."""
    case = Case((4, 9, 7, channels), residual=True, activation=name)
    allowed = ON_GPU[dtype] * (1 if name is None else 3)
    check_on_gpu(case, case.plain, case.operands(dtype), allowed)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@DTYPES
def test_the_epilogue_in_one_plan_on_the_gpu(dtype):
    case = Case((4, 9, 7, 64), residual=True, activation="relu")
    operands = case.operands(dtype)
    got = jax.device_get(jax.jit(case)(*operands))
    want = exactly(case.plain, jax.device_get(operands), [np.zeros(g.shape) for g in got])[0]
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) <= ON_GPU[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [30, 1000, 30000])
def test_large_means_on_the_gpu(ratio):
    """Not more is lost than of x itself, see test_large_means_with_small_variances."""
    case = Case((8, 12, 12, 64), epsilon=1e-12)
    x, mean, var, _, scale, bias = case.operands()
    operands = [x * 0.01 + 0.01 * ratio, mean, var, jnp.float32(0), scale, bias]
    with jc.implementation("cudnn"):
        got = jax.device_get(jax.jit(case)(*operands))
    want = exactly(case.plain, jax.device_get(operands), [np.zeros(g.shape) for g in got])[0]
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    print(ratio, errors)
    allowed = FLOAT32_ON_GPU + 1e-6 * ratio
    assert errors[0] <= allowed
    assert errors[1] <= 2e-6
    assert errors[2] <= 1e-5 + allowed**2


@pytest.mark.gpu
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("way", WAYS)
@DTYPES
def test_convolutions_on_the_gpu(dtype, way, residual):
    case = with_(BIG_CONV, **WAYS[way], residual=residual, activation="silu")
    allowed = {"float32": TF32_ON_GPU, "bfloat16": 2**-6, "float16": 2**-8}[dtype]
    check_on_gpu(case, case.plain, case.operands(dtype), allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 10, 100])
def test_what_fused_statistics_lose_on_the_gpu(ratio):
    """In float32, of exact products: weights are powers of two, and x has few bits."""
    case = with_(BIG_CONV, fused=True, w=(64, 1, 1, 32))
    x, _, _, var, _, scale, bias = case.operands()
    w = jnp.tile(jnp.eye(32), (2, 1)).reshape(64, 1, 1, 32)
    x = jnp.round(x * 64) / 64
    y = np.asarray(jnp.concatenate([x, x], -1), np.float64)
    of_batch, spread = y.mean((0, 1, 2)), y.var((0, 1, 2))
    mean = jnp.asarray(of_batch + ratio * np.sqrt(spread), "float32")
    got = jax.jit(case)(x, w, mean, var, jnp.float32(0), scale, bias)[2]
    error = np.max(np.abs(np.asarray(got) / spread - 1))
    print(f"ratio {ratio}: relative error of the variance {error:.1e}")
    assert error <= 2e-6 * (1 + ratio**2)
