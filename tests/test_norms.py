"""jax_cudnn.ops' normalizations beside plain jnp in float64: values, gradients, transformations."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import cotangents_of, exactly, outcome
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import (
    ALL,
    TOLERANCES,
    Transformations,
    graphs,
    graphs_of,
    methods,
    primitives,
    relative_error,
    shapes_of,
    widened,
)

import jax_cudnn as jc
from jax_cudnn._core.graph.wire import wire
from jax_cudnn._core.planning import losses

pytestmark = pytest.mark.wide

S = jax.ShapeDtypeStruct


# -- what the functions mean -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of one of the functions; its operands are x, scale and bias, as far as it has them."""

    function: Callable[..., Any]
    x: tuple[int, ...]
    axes: tuple[int, ...]
    """The normalized ones."""
    own: tuple[int, ...]
    """Those that scale and bias have."""
    scale: bool = True
    bias: bool = True
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    groups: int = 0
    """Of channels, which are last."""

    @property
    def centred(self):
        return self.function is not jc.ops.rms_norm

    @property
    def shapes(self):
        one = tuple(self.x[axis] for axis in self.own)
        return (self.x, *(one for there in (self.scale, self.bias) if there))

    def operands(self, dtype="float32", seed=0):
        random = np.random.default_rng(seed)
        drawn = [random.standard_normal(shape) + 0.5 for shape in self.shapes]
        return [jnp.asarray(a, dtype) for a in drawn]

    def avals(self, dtype="bfloat16"):
        return [S(shape, dtype) for shape in self.shapes]

    def __call__(self, x, *parameters, **keywords):
        """y and the statistics, as a list."""
        values = iter(parameters)
        given = {name: next(values) for name in ("scale", "bias") if getattr(self, name)}
        keywords = {"return_statistics": True, **self.keywords, **keywords}
        found = self.function(x, **given, **keywords)
        return jax.tree.leaves(found)

    def y(self, *operands, **keywords):
        return self(*operands, return_statistics=False, **keywords)[0]

    def plain(self, x, *parameters, epsilon=None):
        """The same in jnp, in the precision of its operands."""
        default = 1e-6 if self.function is jc.ops.rms_norm else 1e-5
        epsilon = self.keywords.get("epsilon", default) if epsilon is None else epsilon
        values = iter(parameters)
        shape = [n if i in self.own else 1 for i, n in enumerate(self.x)]
        scale = next(values).reshape(shape) if self.scale else 1.0
        scale = scale + 1 if self.keywords.get("zero_centered_scale") and self.scale else scale
        bias = next(values).reshape(shape) if self.bias else 0.0
        axes, wide = self.axes, x
        if self.groups:
            wide = x.reshape(*x.shape[:-1], self.groups, -1)
            axes = (*range(1, x.ndim - 1), x.ndim)
        mean = jnp.mean(wide, axes, keepdims=True)
        from_mean = wide - mean if self.centred else wide
        inv = (jnp.mean(from_mean**2, axes, keepdims=True) + epsilon) ** -0.5
        y = (from_mean * inv).reshape(x.shape) * scale + bias
        found = [mean, inv] if self.centred else [inv]
        return [y, *(v.reshape(x.shape[0], -1) if self.groups else v for v in found)]


rms, layer, ada = jc.ops.rms_norm, jc.ops.layer_norm, jc.ops.ada_layer_norm
instance, group = jc.ops.instance_norm, jc.ops.group_norm
CENTRED_ON_ZERO = {"zero_centered_scale": True}

CASES = {
    "rms, last": Case(rms, (6, 10), (1,), (1,), bias=False),
    "rms, a vector": Case(rms, (12,), (0,), (0,), bias=False),
    "rms, no scale": Case(rms, (2, 3, 10), (2,), (2,), scale=False, bias=False),
    "rms, 1 + scale": Case(rms, (2, 3, 4, 8), (3,), (3,), bias=False, keywords=CENTRED_ON_ZERO),
    "rms, first": Case(rms, (6, 4, 3), (0,), (0,), bias=False, keywords={"axis": 0}),
    "rms, all": Case(rms, (3, 4), (0, 1), (0, 1), bias=False, keywords={"axis": (0, 1)}),
    "layer, last": Case(layer, (6, 10), (1,), (1,)),
    "layer, a vector": Case(layer, (12,), (0,), (0,)),
    "layer, neither": Case(layer, (2, 3, 10), (2,), (2,), scale=False, bias=False),
    "layer, scale": Case(layer, (4, 3, 10), (2,), (2,), bias=False),
    "layer, bias": Case(layer, (4, 3, 10), (2,), (2,), scale=False),
    "layer, 1 + scale": Case(layer, (2, 5, 8), (2,), (2,), keywords=CENTRED_ON_ZERO),
    "layer, middle": Case(layer, (2, 6, 3, 4), (1,), (1,), keywords={"axis": -3}),
    "layer, two last": Case(layer, (5, 3, 4), (1, 2), (1, 2), keywords={"axis": (-2, -1)}),
    "layer, first and last": Case(
        layer, (5, 3, 4), (0, 2), (0, 2), keywords={"axis": [2, 0], "epsilon": 0.1}
    ),
    "layer, all": Case(layer, (2, 3, 4), (0, 1, 2), (0, 1, 2), keywords={"axis": (0, 1, 2)}),
    "layer, rank 6": Case(layer, (2, 1, 3, 1, 2, 5), (5,), (5,)),
    "layer, axes of 1": Case(layer, (1, 4, 1, 6), (2, 3), (2, 3), keywords={"axis": (2, 3)}),
    "ada": Case(ada, (3, 4, 10), (2,), (0, 2)),
    "ada, rank 2": Case(ada, (3, 10), (1,), (0, 1), bias=False),
    "ada, 1 + scale": Case(ada, (2, 3, 2, 8), (3,), (0, 3), keywords=CENTRED_ON_ZERO),
    "instance": Case(instance, (2, 3, 5, 8), (1, 2), (3,)),
    "instance, one spatial axis": Case(instance, (2, 7, 3), (1,), (2,), scale=False),
    "instance, channels second": Case(instance, (2, 3, 4, 5), (2, 3), (1,), keywords={"axis": 1}),
    "instance, rank 6": Case(instance, (2, 2, 3, 2, 2, 3), (1, 2, 3, 4), (5,)),
    "group": Case(group, (2, 3, 4, 8), (), (3,), keywords={"num_groups": 4}, groups=4),
    "group, no spatial axis": Case(
        group, (3, 12), (), (1,), scale=False, keywords={"num_groups": 3}, groups=3
    ),
    "group, one": Case(
        group, (2, 5, 6), (), (2,), bias=False, keywords={"num_groups": 1}, groups=1
    ),
    "group, of each channel": Case(
        group, (2, 5, 6), (), (2,), keywords={"num_groups": 6}, groups=6
    ),
}
# One of each function, for what costs more.
KINDS = {
    "rms": CASES["rms, last"],
    "layer": CASES["layer, last"],
    "ada": CASES["ada"],
    "instance": CASES["instance"],
    "group": CASES["group"],
}
each_kind = pytest.mark.parametrize("name", KINDS)
# Of one element that is rounded once, relative to it; and of sums in float32.
ROUNDED = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11}
IN_FLOAT32 = 4e-6


IN_TWO_PARTS = 1.6  # each rounded, and their sum


def assert_close(got, want, slack=1.0):
    """All of it finite, and hardly farther from what is wanted than that is, rounded once."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, rounded = (np.asarray(v, np.float64) for v in (a, np.asarray(b).astype(a.dtype)))
        assert np.isfinite(a).all()
        allowed = 1.3 * np.linalg.norm(rounded - b) + IN_FLOAT32 * np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= slack * allowed + 1e-30, (a, b)


# -- values and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_values_statistics_and_their_gradients(name):
    """Cotangents come into y and the statistics."""
    case = CASES[name]
    operands = case.operands()
    cotangents = cotangents_of(jax.eval_shape(case.plain, *operands))
    got = outcome(case, operands, cotangents)
    assert_close(got, exactly(case.plain, operands, cotangents))
    y, *statistics = got[0]
    assert y.shape == case.x
    if not case.groups:
        kept = tuple(1 if i in case.axes else n for i, n in enumerate(case.x))
        assert [s.shape for s in statistics] == [kept] * len(statistics)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@each_kind
def test_sixteen_bits(name, dtype):
    """Rounded once; gradients that come also from statistics, in two parts."""
    case = KINDS[name]
    operands = case.operands(dtype)
    results = jax.eval_shape(case, *operands)
    assert [str(r.dtype) for r in results] == [dtype, *["float32"] * (len(results) - 1)]
    cotangents = cotangents_of(results)
    got = outcome(case, operands, cotangents)
    assert {str(g.dtype) for g in got[1]} == {dtype}
    assert_close(got, exactly(case.plain, operands, cotangents), slack=IN_TWO_PARTS)


@each_kind
def test_parameters_may_be_wider_than_x(name):
    case = KINDS[name]
    x, *parameters = case.operands("bfloat16")
    operands = [x, *(p.astype(jnp.float32) * 1.001 for p in parameters)]
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(case, operands, cotangents)
    assert got[0][0].dtype == jnp.bfloat16
    assert [g.dtype for g in got[1]] == [o.dtype for o in operands]
    assert_close(got, exactly(case.plain, operands, cotangents), slack=IN_TWO_PARTS)


@each_kind
def test_cotangents_of_some_results_only(name):
    """Of y alone, and of each statistic alone."""
    case = KINDS[name]
    operands = case.operands()
    results = jax.eval_shape(case, *operands)
    for i in range(len(results)):
        one = lambda *a, i=i: case(*a)[i]  # noqa: E731
        plain = lambda *a, i=i: case.plain(*a)[i]  # noqa: E731
        (cotangent,) = cotangents_of(results[i : i + 1])
        got = outcome(one, operands, cotangent)[1]
        want = exactly(plain, operands, cotangent)[1]
        assert_close(got[0], want[0])
        if i == 0:
            assert_close(got, want)
        else:
            assert not any(np.any(g) for g in got[1:]), "statistics know nothing of scale and bias"


@each_kind
def test_statistics_are_those_of_the_call_that_returns_them(name):
    case = KINDS[name]
    operands = case.operands()
    np.testing.assert_array_equal(case.y(*operands), case(*operands)[0])


# -- epsilon ---------------------------------------------------------------------------------------


@each_kind
def test_epsilon_as_an_array_with_its_gradient(name):
    case = KINDS[name]
    operands, epsilon = case.operands(), jnp.float32(0.3)
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(lambda e, *a: case(*a, epsilon=e), [epsilon, *operands], cotangents)
    want = exactly(lambda e, *a: case.plain(*a, epsilon=e), [epsilon, *operands], cotangents)
    assert_close(got, want)
    assert np.abs(want[1][0]) > 1e-2
    for a, b in zip(case(*operands, epsilon=0.3), got[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@each_kind
def test_another_epsilon_compiles_nothing(name):
    case = KINDS[name]
    operands = case.operands()
    traces = []

    @jax.jit
    def step(epsilon, *operands):
        traces.append(epsilon)
        return jax.value_and_grad(lambda e: jnp.sum(jnp.sin(case.y(*operands, epsilon=e))))(epsilon)

    epsilons = [jnp.float32(e) for e in (0.1, 0.2, 0.3)]
    eager = functools.partial(case.y, *operands)
    step(epsilons[0], *operands)
    eager(epsilon=epsilons[0])
    compiled = []

    def listener(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        values = {float(step(e, *operands)[0]) for e in epsilons}
        different = {float(np.abs(eager(epsilon=e)).sum()) for e in epsilons[:2]}
        assert (len(traces), compiled) == (1, [])
        jax.jit(lambda x: x + 1.25)(operands[0])
        assert compiled, "the listener hears of compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(values) == 3
    assert len(different) == 2


@pytest.mark.parametrize("epsilon", [0, 1, 1e-3, np.float32(1e-3), np.float64(1e-3)], ids=repr)
def test_a_number_is_in_the_graph(epsilon):
    """Also one of NumPy's: only what is computed in the program is an operand."""
    case = CASES["layer, last"]
    x = S((4, 6), "float32")
    (spec,) = graphs_of(lambda x: layer(x, epsilon=epsilon), x)
    (node,) = spec.calls
    assert spec.tensor(dict(node.inputs)["epsilon"]).value == float(epsilon)
    operands = case.operands()
    want = case.plain(*operands, epsilon=float(epsilon))[0]
    np.testing.assert_allclose(case.y(*operands, epsilon=epsilon), want, rtol=1e-5, atol=1e-5)


# -- beside Flax -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms", "layer", "instance", "group"])
def test_flax_has_the_same(name):
    case = KINDS[name]
    features = case.x[-1]
    common = {"epsilon": 1e-3, "rngs": nnx.Rngs(0)}
    module = {
        "rms": lambda: nnx.RMSNorm(features, **common),
        "layer": lambda: nnx.LayerNorm(features, use_fast_variance=False, **common),
        "instance": lambda: nnx.InstanceNorm(features, use_fast_variance=False, **common),
        "group": lambda: nnx.GroupNorm(features, 4, use_fast_variance=False, **common),
    }[name]()
    x, *parameters = case.operands()
    module.scale = nnx.Param(parameters[0])
    if len(parameters) > 1:
        module.bias = nnx.Param(parameters[1])
    want, pull = jax.vjp(lambda x: module(x), x)
    got, ours = jax.vjp(lambda x: case.y(x, *parameters, epsilon=1e-3), x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(ours(jnp.cos(x))[0], pull(jnp.cos(x))[0], rtol=1e-4, atol=1e-4)


# -- numerics --------------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 7, 8, 63, 64, 65, 1000, 4096, 16385, 65536)
MEANS = {"float32": (0.0, 1e3, 1e4), "bfloat16": (0.0, 1e2), "float16": (0.0, 1e3)}
_DIGITS = 2.0**-23


def rows_of(length, dtype, seed=0):
    """A row for each mean, of standard deviation 1, and a constant one; scale, bias, cotangent."""
    random = np.random.default_rng(seed)
    means = np.array(MEANS[dtype])[:, None]
    rows = np.concatenate(
        [random.standard_normal((len(means), length)) + means, np.full((1, length), 3.0)]
    )
    others = [random.standard_normal(length) + 0.5 for _ in range(2)]
    return [jnp.asarray(a, dtype) for a in (rows, *others, random.standard_normal(rows.shape))]


def row_norms(kind):
    """y, statistics and gradients of one of the two, as a function of all operands."""

    def run(function, x, scale, bias, cotangent):
        given = (x, scale, bias) if kind == "layer" else (x, scale)
        y, pull, statistics = jax.vjp(function, *given, has_aux=True)
        return {"y": y, "statistics": statistics, "gradients": pull(cotangent)}

    return run


def plain_rows(kind):
    case = CASES["layer, last" if kind == "layer" else "rms, last"]

    def function(x, *parameters):
        y, *statistics = dataclasses.replace(case, x=x.shape).plain(x, *parameters)
        return y, tuple(statistics)

    return function


def ours_rows(kind, **keywords):
    def function(x, *parameters):
        found = getattr(jc.ops, f"{kind}_norm")(x, *parameters, return_statistics=True, **keywords)
        return found[0], tuple(jax.tree.leaves(found[1]))

    return function


def assert_rows(kind, got, x, scale, bias, cotangent, on_gpu=False):
    """Each element within what float32 statistics and one rounding of the result cost it.

    A mean is known to half of its last place, which is the error of all distances from it. On a GPU
    twice that; and cuDNN's variance is off by as much as one such distance.
    """
    wide = [np.asarray(a, np.float64) for a in (x, scale, bias, cotangent)]
    with jax.enable_x64(True):
        want = jax.jit(functools.partial(row_norms(kind), plain_rows(kind)))(*wide)
        want = jax.tree.map(np.asarray, want)
    rows, scale, bias, cotangent = wide
    inv = want["statistics"][-1]
    mean = want["statistics"][0] if kind == "layer" else np.zeros_like(inv)
    last = ROUNDED[str(x.dtype)]
    xhat = np.abs((rows - mean) * inv)
    of_xhat = IN_FLOAT32 * (xhat + 1) + 2 * _DIGITS * np.abs(mean) * inv
    least = {"float16": 2.0**-24}.get(str(x.dtype), 1e-30)  # its subnormals' distance
    y_bound = last * np.abs(want["y"]) + np.abs(scale) * of_xhat + least + 1e-6
    slope = cotangent * scale
    size = np.sqrt(np.mean(slope**2, 1, keepdims=True)) + np.abs(slope)
    dx_bound = inv * size * (of_xhat * (2 * xhat + 2) + IN_FLOAT32)
    dx_bound += last * np.abs(want["gradients"][0]) + least
    for a, b, bound in (
        (got["y"], want["y"], y_bound),
        (got["gradients"][0], want["gradients"][0], dx_bound),
    ):
        distance = np.abs(np.asarray(a, np.float64) - b) / (2 if on_gpu else 1)
        assert (distance <= bound).all(), (x.shape, x.dtype, (distance / bound).max())
    by_scale = np.sum(np.abs(cotangent) * of_xhat, 0)
    sums = [(1, by_scale), (2, IN_FLOAT32 * np.sum(np.abs(cotangent), 0))]
    for i, bound in sums[: len(got["gradients"]) - 1]:
        b = want["gradients"][i]
        distance = np.abs(np.asarray(got["gradients"][i], np.float64) - b) / (2 if on_gpu else 1)
        assert (distance <= bound + last * np.abs(b) + least).all(), i
    if kind == "layer":
        off = np.abs(np.asarray(got["statistics"][0], np.float64) - mean)
        digits = _DIGITS * (2 if on_gpu else 1)
        assert (off <= 2 * digits * np.abs(mean) + 1e-6).all()
    off = np.abs(np.asarray(got["statistics"][-1], np.float64) / inv - 1)
    # What the mean is off by, squared, is added to the variance.
    of_mean = 2 * _DIGITS * np.abs(mean) * inv
    assert (off <= 2e-6 + (of_mean if on_gpu else of_mean**2)).all(), off


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_and_mean(length):
    """In float32, and by turns in one of the others."""
    narrow = ("bfloat16", "float16")[LENGTHS.index(length) % 2]
    runs = (("layer", "float32"), ("layer", narrow), ("rms", narrow))
    operands = {dtype: rows_of(length, dtype) for dtype in ("float32", narrow)}

    @jax.jit
    def run(operands):
        return [row_norms(kind)(ours_rows(kind), *operands[dtype]) for kind, dtype in runs]

    for (kind, dtype), got in zip(runs, run(operands), strict=True):
        assert_rows(kind, got, *operands[dtype])


def test_a_variance_of_squares_would_be_found_out():
    """mean(x**2) - mean(x)**2 in place of the mean of squared distances."""

    def hasty(x, scale, bias):
        mean = jnp.mean(x, 1, keepdims=True)
        inv = (jnp.mean(x * x, 1, keepdims=True) - mean * mean + 1e-5) ** -0.5
        return (x - mean) * inv * scale + bias, (mean, inv)

    operands = rows_of(1000, "float32")
    got = row_norms("layer")(hasty, *operands)
    with pytest.raises(AssertionError):
        assert_rows("layer", got, *operands)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", ["largest", "subnormal"])
def test_float16s_extremes(kind, size):
    """Squares of its largest numbers are beyond it, and those of its smallest are zero in it."""
    random = np.random.default_rng(0)
    scale = {"largest": 65504.0, "subnormal": 40 * 2.0**-24}[size]
    x = np.clip(random.standard_normal((3, 64)) / 2, -1, 1) * scale
    x[0, :2] = (scale, -scale)
    ones = np.ones(64)
    drawn = (x, ones, ones * 0, random.standard_normal((3, 64)))
    operands = [jnp.asarray(a, jnp.float16) for a in drawn]
    assert np.abs(np.asarray(operands[0], np.float64)).max() == scale
    epsilon = 1e-12 if size == "subnormal" else 1e-5
    got = jax.jit(functools.partial(row_norms(kind), ours_rows(kind, epsilon=epsilon)))(*operands)
    case = dataclasses.replace(
        CASES["layer, last" if kind == "layer" else "rms, last"],
        x=(3, 64),
        keywords={"epsilon": epsilon},
    )
    given = operands[: 3 if kind == "layer" else 2]
    results = jax.eval_shape(case.plain, *given)
    cotangents = [operands[3], *(jnp.zeros(r.shape) for r in results[1:])]
    (y, *statistics), gradients = exactly(case.plain, given, cotangents)
    # Gradients of x are beyond float16 where x is so small, and below it where x is so large.
    assert_close([got["y"], *got["statistics"]], [y, *statistics])
    assert_close(got["gradients"][1:], gradients[1:])
    with np.errstate(over="ignore"):
        beyond = np.asarray(gradients[0]).astype(np.float16).astype(np.float64)
    dx = np.asarray(got["gradients"][0], np.float64)
    assert (np.isinf(dx) == np.isinf(beyond)).all()
    there = np.isfinite(dx)
    np.testing.assert_allclose(dx[there], beyond[there], rtol=2**-9, atol=2**-24)


def test_constant_rows():
    """Nothing is left of them; the gradient is finite."""
    x = jnp.stack([jnp.full(12, v, jnp.float32) for v in (0.0, 1.0, -7.0, 1e4)])
    y, pull = jax.vjp(lambda x: layer(x, bias=jnp.arange(12.0)), x)
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(12.0), (4, 12)))
    (dx,) = pull(jnp.ones_like(x).at[:, 0].set(13.0))
    np.testing.assert_allclose(dx[:, 0], np.full(4, 11 * 1e5**0.5), rtol=1e-4)
    zero = jnp.zeros((2, 5))
    assert not rms(zero).any()
    np.testing.assert_allclose(
        jax.grad(lambda x: rms(x).sum())(zero), np.full((2, 5), 1e3), rtol=1e-5
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_kind
def test_what_is_not_finite_stays_in_its_rows(name, bad):
    """Of those that are normalized together: all else is as without it, forward and backward."""
    case = KINDS[name]
    x, *parameters = case.operands()
    spoiled = x.at[(1,) + (0,) * (x.ndim - 1)].set(bad)
    at = jnp.ones(case.x).at[(1, *((0,) * (x.ndim - 1)))].set(np.nan)
    together = np.isnan(case.plain(at, *parameters)[0])
    assert 0 < together.sum() < together.size

    @jax.jit
    def run(x):
        y, pull = jax.vjp(lambda x: case.y(x, *parameters), x)
        return y, pull(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))[0]

    for got, want in zip(run(spoiled), run(x), strict=True):
        np.testing.assert_array_equal(np.where(together, 0, got), np.where(together, 0, want))
        assert np.isnan(got[together]).any()


@pytest.mark.parametrize("channels", [1, 3, 7, 12])
def test_any_number_of_channels(channels):
    case = dataclasses.replace(KINDS["instance"], x=(2, 3, 5, channels))
    operands = case.operands("bfloat16")
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(case, operands, cotangents)
    assert_close(got, exactly(case.plain, operands, cotangents), slack=IN_TWO_PARTS)


# -- transformations -------------------------------------------------------------------------------

SMALL = {
    "rms": dataclasses.replace(CASES["rms, 1 + scale"], x=(2, 3, 6), axes=(2,), own=(2,)),
    "layer": Case(layer, (4, 3), (0,), (0,), keywords={"axis": 0}),
    "ada": dataclasses.replace(CASES["ada"], x=(2, 3, 4)),
    "instance": dataclasses.replace(CASES["instance"], x=(2, 3, 2, 4)),
    "group": Case(group, (2, 3, 4), (), (2,), keywords={"num_groups": 2}, groups=2),
}
each_small = pytest.mark.parametrize("name", SMALL)


def as_numpy(operands):
    return [np.asarray(x) for x in operands]


@each_small
def test_each_transformation(name):
    """Those of every graph, of y and the statistics: see transformations.py."""
    case = SMALL[name]
    operands = as_numpy(case.operands())
    transformations = Transformations(operands, jax.eval_shape(case, *operands))
    data = transformations.data()

    def run(f):
        return jax.jit(lambda d: {n: getattr(transformations, n)(f, d) for n in ALL})(data)

    got, want = run(case), run(case.plain)
    for transformation in ALL:
        pairs = zip(
            jax.tree.leaves(got[transformation]),
            jax.tree.leaves(want[transformation]),
            strict=True,
        )
        errors = [relative_error(a, b) for a, b in pairs]
        assert max(errors) <= 2 * TOLERANCES["float32"], (transformation, errors)


@each_small
def test_in_bfloat16_first_order_and_batches(name):
    case = SMALL[name]
    operands = as_numpy(case.operands("bfloat16"))
    transformations = Transformations(operands, jax.eval_shape(case, *operands))
    data = transformations.data()
    chosen = ("vjp", "jvp", "vmap", "vmap_of_vjp", "vjp_of_vmap")

    def run(f, data):
        return jax.jit(lambda d: {n: getattr(transformations, n)(f, d) for n in chosen})(data)

    got, want = run(case, data), run(case.plain, widened(data))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    assert max(relative_error(a, b) for a, b in pairs) <= TOLERANCES["bfloat16"]


def scalar(f, weights):
    """A sum of all results in which each element counts otherwise."""

    def function(*operands):
        return sum(jnp.vdot(w, jnp.sin(r)) for w, r in zip(weights, f(*operands), strict=True))

    return function


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rms", "layer", "instance"])
def test_jacobians_and_hessians(name):
    case = SMALL[name]
    operands = case.operands()
    weights = cotangents_of(jax.eval_shape(case, *operands))
    moving = tuple(range(len(operands)))

    def run(f):
        @jax.jit
        def all_of_them(operands):
            gradient = jax.grad(scalar(f, weights), moving)
            curved = lambda *o: sum(jnp.sum(jnp.cos(v)) for v in gradient(*o))  # noqa: E731
            return {
                "jacrev": jax.jacrev(f, moving)(*operands),
                "jacfwd": jax.jacfwd(f, moving)(*operands),
                "hessian": jax.hessian(scalar(f, weights), moving)(*operands),
                "grad of grad": jax.grad(curved, moving)(*operands),
            }

        return all_of_them(operands)

    got, want = run(case), run(case.plain)
    for key in got:
        for a, b in zip(jax.tree.leaves(got[key]), jax.tree.leaves(want[key]), strict=True):
            if np.linalg.norm(b):
                assert relative_error(a, b) <= 1e-4, key
            else:
                np.testing.assert_allclose(a, b, atol=1e-4)


@each_small
def test_the_gradient_is_linear_in_cotangents(name):
    """Its transpose is the tangent."""
    case = SMALL[name]
    operands = case.operands()
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    tangents = cotangents_of(operands, seed=5)

    @jax.jit
    def run(operands, cotangents, tangents):
        _, pull = jax.vjp(case, *operands)
        (back,) = jax.linear_transpose(pull, cotangents)(tuple(tangents))
        return back, jax.jvp(case, operands, tangents)[1]

    for a, b in zip(*run(operands, cotangents, tangents), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@each_small
def test_vmap_of_every_subset_of_operands(name):
    """At other axes each time, also of gradients; the results are those of one after the other."""
    case = SMALL[name]
    operands, size = case.operands(), 3
    random = np.random.default_rng(4)
    stacks = [jnp.asarray(random.standard_normal((size, *x.shape)) + x) for x in operands]
    stacks = [s.astype(x.dtype) for s, x in zip(stacks, operands, strict=True)]
    weights = cotangents_of(jax.eval_shape(case, *operands))
    subsets = [
        s
        for n in range(1, len(operands) + 1)
        for s in itertools.combinations(range(len(operands)), n)
    ]

    def run(f):
        both = lambda *o: (f(*o), jax.grad(scalar(f, weights), range(len(o)))(*o))  # noqa: E731

        @jax.jit
        def all_of_them(operands, stacks):
            found = []
            for count, subset in enumerate(subsets):
                axes = [(count + i) % operands[i].ndim if i in subset else None
                        for i in range(len(operands))]  # fmt: skip
                given = [
                    x if a is None else jnp.moveaxis(s, 0, a)
                    for x, s, a in zip(operands, stacks, axes, strict=True)
                ]
                found.append(jax.vmap(both, in_axes=tuple(axes))(*given))
            return found

        return all_of_them(operands, stacks)

    for a, b in zip(jax.tree.leaves(run(case)), jax.tree.leaves(run(case.plain)), strict=True):
        assert relative_error(a, b) <= 2 * TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance"])
def test_vmap_beside_an_epsilon_that_is_an_array(name):
    case = SMALL[name]
    operands, epsilons = case.operands(), jnp.float32([1e-3, 0.1, 2.0])
    both = [jnp.stack([x, x + 1, x - 2]) for x in operands[:2]]
    ways = {
        "epsilon": ((0, None, None), operands[:2]),
        "all": ((0, 0, 0), both),
        "all but epsilon": ((None, 0, 0), both),
    }
    for way, (axes, given) in ways.items():
        epsilon = epsilons if axes[0] == 0 else epsilons[1]
        got, want = (
            jax.vmap(lambda e, x, s, f=f: f(x, s, *operands[2:], epsilon=e), axes)(epsilon, *given)
            for f in (case, case.plain)
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=way)


@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance", "group"])
def test_inside_control_flow_and_remat(name):
    case = SMALL[name]
    x, *parameters = case.operands()
    stacks = [jnp.stack([p, p + 1, p - 1]) for p in parameters]

    def run(f, how):
        layer_of = lambda x, p: jnp.sin(f(x, *p)[0])  # noqa: E731
        if how == "remat":
            layer_of = jax.checkpoint(layer_of)
        elif how == "policy":
            layer_of = jax.checkpoint(layer_of, policy=jc.save_cudnn)

        def loss(x, stacks):
            if how == "cond":
                return jnp.sum(
                    jax.lax.cond(
                        x[(0,) * x.ndim] > -9, lambda: layer_of(x, parameters), lambda: x * 0
                    )
                )
            y, _ = jax.lax.scan(lambda c, p: (layer_of(c, p), None), x, stacks)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, stacks)

    want = {key: run(case.plain, key) for key in ("scan", "cond")}
    for how in ("scan", "remat", "policy", "cond"):
        for a, b in zip(
            jax.tree.leaves(run(case, how)),
            jax.tree.leaves(want["cond" if how == "cond" else "scan"]),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_the_policy_keeps_graphs_and_remat_computes_them_again():
    f = lambda x, s, b: jnp.sum(jnp.sin(layer(jnp.cos(x), s, b)))  # noqa: E731
    operands = KINDS["layer"].operands()

    def forwards(**policy):
        found = graphs_of(jax.value_and_grad(jax.checkpoint(f, **policy)), *operands)
        return [methods(spec) for spec in found].count(["layernorm"])

    assert (forwards(), forwards(policy=jc.save_cudnn)) == (2, 1)


@each_kind
def test_buffers_may_be_donated(name):
    case = KINDS[name]
    operands = case.operands()
    want = case.y(*operands)
    x, *parameters = operands
    got = jax.jit(case.y, donate_argnums=0)(x + 0, *parameters)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@each_kind
def test_shapes_without_values(name):
    case = KINDS[name]
    for dtype in ("float32", "bfloat16", "float16"):
        results = jax.eval_shape(case, *case.avals(dtype))
        assert results[0] == S(case.x, dtype)
        assert {str(r.dtype) for r in results[1:]} == {"float32"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [("rms", (0, 10)), ("layer", (0, 10)), ("ada", (0, 4, 10)), ("ada", (3, 0, 10)),
     ("instance", (0, 3, 5, 8)), ("group", (0, 3, 4, 8)), ("layer", (3, 0, 10))],
)  # fmt: skip
def test_no_rows(name, shape):
    case = dataclasses.replace(KINDS[name], x=shape)
    if len(shape) == 3 and name == "layer":
        case = dataclasses.replace(case, axes=(2,), own=(2,))
    operands = case.operands()
    for run in (lambda f: f, jax.jit):
        results, pull = run(functools.partial(jax.vjp, case))(*operands)
        assert results[0].shape == shape
        gradients = pull([jnp.ones_like(r) for r in results])
        assert [g.shape for g in gradients] == list(case.shapes)
        assert not any(np.any(g) for g in gradients)


def test_vmap_over_nobody():
    x = jnp.ones((0, 4, 6))
    assert jax.vmap(layer)(x).shape == (0, 4, 6)
    assert jax.vmap(jax.grad(lambda x: rms(x).sum()))(x).shape == (0, 4, 6)


def test_integers_beside_have_no_gradient():
    """None, and an integer in the same tree, go their ways."""

    def loss(tree):
        return jnp.sum(layer(tree["x"], tree["scale"], tree["bias"]) * tree["n"])

    tree = {"x": jnp.arange(12.0).reshape(3, 4), "scale": jnp.ones(4), "bias": None, "n": 2}
    got = jax.grad(loss, allow_int=True)(tree)
    assert got["bias"] is None
    assert got["n"].dtype == jax.dtypes.float0
    assert got["scale"].shape == (4,)


# -- what the programs hold ------------------------------------------------------------------------


def total(case, **keywords):
    return lambda *o: jnp.sum(jnp.sin(case.y(*o, **keywords).astype(jnp.float32)))


IN_ONE = {**KINDS, "group": CASES["group, one"]}
METHODS = {
    "rms": "rmsnorm", "layer": "layernorm", "ada": "adalayernorm", "instance": "instancenorm",
    "group": "layernorm",
}  # fmt: skip


@pytest.mark.parametrize("by", ["x", "all"])
@each_kind
def test_a_gradient_is_one_forward_and_one_backward(name, by):
    case = IN_ONE[name]
    avals = case.avals()
    argnums = tuple(range(len(avals))) if by == "all" else 0
    forward, backward = graphs_of(jax.grad(total(case), argnums), *avals)
    assert methods(forward) == [METHODS[name]]
    assert methods(backward) == [f"{METHODS[name]}_backward"]
    # Beside its operands the backward reads the statistics, and nothing of the size of x.
    assert forward.origin.residuals == ()
    ports = [port for port, name in forward.calls[0].outputs if name in forward.outputs]
    assert ports == (["Y", "inv_var"] if name == "rms" else ["Y", "mean", "inv_var"])
    large = [t for t in backward.input_tensors if np.prod(t.shape) >= np.prod(case.x)]
    assert len(large) == 2, "x and the cotangent"


@each_kind
def test_a_forward_without_gradient_has_no_statistics(name):
    case = IN_ONE[name]
    (alone,) = graphs_of(case.y, *case.avals())
    (call,) = wire(alone).calls
    assert (call.node.norm_forward_phase, [port for port, _ in call.outputs]) == (
        "INFERENCE",
        ["Y"],
    )
    (with_statistics,) = graphs_of(case, *case.avals())
    (call,) = wire(with_statistics).calls
    assert call.node.norm_forward_phase == "TRAINING"


@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance"])
def test_a_backward_writes_what_nobody_reads(name):
    """cuDNN's kernels write DScale and DBias always: they get memory, and are dropped."""
    case = KINDS[name]
    _, backward = graphs_of(jax.grad(total(case)), *case.avals())
    assert len(backward.outputs) == 1
    (call,) = wire(backward).calls
    written = [port for port, _ in call.outputs]
    assert written == (["DX", "DScale"] if name == "rms" else ["DX", "DScale", "DBias"])
    assert len(wire(backward).outputs) == len(written)
    assert wire(backward).outputs[0] == backward.outputs[0]


MAPPED = {
    # name, operands that are mapped -> the methods of the batched graph
    ("rms", "x"): ["rmsnorm"],
    # A scale of ones, and then each its own.
    ("rms", "x scale"): ["broadcast_to", "identity", "rmsnorm", "mul"],
    ("layer", "x"): ["layernorm"],
    ("layer", "x scale bias"): ["adalayernorm"],
    ("layer", "scale"): ["adalayernorm"],
    ("ada", "x"): ["adalayernorm"],
    ("ada", "x scale bias"): ["adalayernorm"],
    ("instance", "x"): ["instancenorm"],
    ("instance", "x scale bias"): ["instancenorm"],
}


def mapped_over(case, mapped):
    names = [n for n in ("x", "scale", "bias") if n == "x" or getattr(case, n)]
    axes = [0 if n in mapped.split() else None for n in names]
    avals = [
        S((3, *a.shape) if axis == 0 else a.shape, a.dtype)
        for a, axis in zip(case.avals(), axes, strict=True)
    ]
    return tuple(axes), avals


@pytest.mark.parametrize(("name", "mapped"), MAPPED)
def test_vmap_folds_into_the_node(name, mapped):
    case = KINDS[name]
    axes, avals = mapped_over(case, mapped)
    function = jax.vmap(case.y, in_axes=axes)
    (spec,) = graphs_of(function, *avals)
    assert methods(spec) == MAPPED[name, mapped]
    sizes = shapes_of(spec, METHODS[name] if mapped == "x" or name != "layer" else "adalayernorm")
    folded = {
        ("rms", "x"): (18, 10),
        ("layer", "x"): (18, 10),
        ("ada", "x"): (9, 4, 10),
        ("instance", "x"): (6, 8, 3, 5),
        ("instance", "x scale bias"): (2, 24, 3, 5),
    }
    assert sizes["input"] == folded.get((name, mapped), sizes["input"])
    found = primitives(jax.make_jaxpr(function)(*avals))
    assert not {"scan", "while"} & {*found}
    if mapped == "scale":
        assert sizes["scale"] == (3, 1, 10)


@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance"])
def test_gradients_of_each_example_are_one_graph(name):
    case = KINDS[name]
    axes, avals = mapped_over(case, "x")
    moving = tuple(range(len(avals)))
    function = jax.vmap(jax.grad(total(case), moving), in_axes=axes)
    forward, backward = graphs_of(function, *avals)
    assert methods(forward) == [METHODS[name]]
    expected = {
        "layer": ["adalayernorm_backward"],
        "ada": ["adalayernorm_backward"],
        "instance": ["instancenorm_backward"],
    }
    if name == "rms":  # the sums of its scale for each example by themselves
        assert methods(backward).count("rmsnorm_backward") == 1
        assert "reduction" in methods(backward)
    else:
        assert methods(backward) == expected[name]
    found = primitives(jax.make_jaxpr(function)(*avals))
    assert not {"scan", "while"} & {*found}


def test_axes_are_moved_outside_of_the_graph():
    (spec,) = graphs_of(CASES["layer, middle"].y, *CASES["layer, middle"].avals())
    assert methods(spec) == ["layernorm"]
    assert shapes_of(spec, "layernorm")["input"] == (2, 3, 4, 6)


def test_the_scale_from_zero_is_in_the_graph():
    forward, backward = graphs_of(
        jax.grad(total(CASES["layer, 1 + scale"]), (0, 1, 2)), *CASES["layer, 1 + scale"].avals()
    )
    assert methods(forward) == ["add", "layernorm"]
    assert methods(backward) == ["add", "layernorm_backward"]


def test_the_graphs_name_is_the_functions():
    for name, case in KINDS.items():
        jaxpr = jax.make_jaxpr(case.y)(*case.avals())
        (equation,) = (e for e in jaxpr.jaxpr.eqns if e.primitive.name == "cudnn")
        assert equation.params["name"] == case.function.__name__, name
        assert len(graphs(jaxpr)) == 1


# -- errors ----------------------------------------------------------------------------------------

X = jnp.zeros((4, 6, 8))
WRONG = {
    "scale": (
        lambda: layer(X, jnp.ones(6)),
        jc.GraphError,
        ["scale does not fit", "shape (8,)", "shape (6,)", "normalized axes"],
    ),
    "bias": (
        lambda: layer(X, bias=jnp.ones((1, 8))),
        jc.GraphError,
        ["bias does not fit", "shape (8,)", "shape (1, 8)"],
    ),
    "scale of two axes": (
        lambda: rms(X, jnp.ones(8), axis=(1, 2)),
        jc.GraphError,
        ["shape (6, 8)", "shape (8,)"],
    ),
    "integers": (
        lambda: layer(jnp.zeros((4, 6), jnp.int32)),
        jc.GraphTypeError,
        ["x has a dtype", "float32, bfloat16, float16", "int32[4, 6]", "x.astype(jnp.float32)"],
    ),
    "complex scale": (
        lambda: layer(X, jnp.ones(8, jnp.complex64)),
        jc.GraphTypeError,
        ["scale has a dtype", "complex64[8]", "scale.astype"],
    ),
    "axis": (lambda: rms(X, axis=3), jc.GraphError, ["axis is not valid", "rank 3", "axis=3"]),
    "axis below": (lambda: rms(X, axis=-4), jc.GraphError, ["axis=-4"]),
    "axis twice": (lambda: rms(X, axis=(1, -2)), jc.GraphError, ["different axes", "(1, -2)"]),
    "no axis": (lambda: rms(X, axis=()), jc.GraphError, ["one or more", "axis=()"]),
    "axis of a kind": (lambda: rms(X, axis=1.0), jc.GraphError, ["axis=1.0"]),
    "a number": (lambda: rms(1.0), jc.GraphError, ["rank 0"]),
    "groups": (
        lambda: group(X, num_groups=3),
        jc.GraphError,
        ["num_groups does not divide", "a divisor of 8", "num_groups=3"],
    ),
    "no groups": (lambda: group(X, num_groups=0), jc.GraphError, ["num_groups=0"]),
    "channels first": (
        lambda: instance(X, axis=0),
        jc.GraphError,
        ["(batch, *spatial, channels)", "axis=0", "(4, 6, 8)"],
    ),
    "no spatial axis": (
        lambda: instance(X[0]),
        jc.GraphError,
        ["(batch, *spatial, channels)", "(6, 8)"],
    ),
    "axes of channels": (lambda: instance(X, axis=(1, 2)), jc.GraphError, ["axis=(1, 2)"]),
    "no batch": (lambda: ada(X[0, 0], jnp.ones(8)), jc.GraphError, ["(batch, ..., features)"]),
    "scale of an example": (
        lambda: ada(X, jnp.ones(8)),
        jc.GraphError,
        ["scale does not fit", "shape (4, 8)", "shape (8,)"],
    ),
    "no scale": (lambda: ada(X, None), jc.GraphError, ["scale is missing", "(4, 8)"]),
    "epsilons": (
        lambda: rms(X, epsilon=jnp.ones(2)),
        jc.GraphError,
        ["epsilon is no number", "a real scalar", "float32[2]"],
    ),
    "a complex epsilon": (lambda: rms(X, epsilon=1j), jc.GraphError, ["a real scalar"]),
    "epsilon of a kind": (
        lambda: rms(X, epsilon="a"),
        jc.GraphTypeError,
        ["epsilon is no array", "a number", "str: 'a'"],
    ),
    "no epsilon": (
        lambda: layer(X, epsilon=None),
        jc.GraphTypeError,
        ["epsilon is no array", "NoneType: None"],
    ),
    "nothing": (lambda: layer(None), jc.GraphTypeError, ["x is no array", "NoneType: None"]),
    "groups of a kind": (lambda: group(X, num_groups=2.0), jc.GraphError, ["num_groups=2.0"]),
    "implementation": (lambda: rms(X, implementation="cuda"), jc.GraphError, ["cuda", "split"]),
}


def test_axes_may_be_an_array():
    np.testing.assert_array_equal(layer(X, axis=np.array([1, 2])), layer(X, axis=(1, 2)))


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_no_examples(groups):
    norm = functools.partial(group, num_groups=groups)
    x = jnp.ones((0, 6, 8))
    assert norm(x, jnp.ones(8)).shape == x.shape
    gradient = jax.grad(lambda s: norm(x, s).sum())(jnp.ones(8))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, kind, parts = WRONG[what]
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for part in parts:
        assert part in text, text


# -- over several devices --------------------------------------------------------------------------

needs_devices = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


@needs_devices
@each_kind
def test_the_batch_may_be_sharded(name):
    """Under jit with sharded operands, and in shard_map; gradients of parameters are summed."""
    case = dataclasses.replace(KINDS[name], x=(8, *KINDS[name].x[1:]))
    operands = case.operands()
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    specs = [P("data") if case.function is ada or i == 0 else P() for i in range(len(operands))]
    moving = tuple(range(len(operands)))

    def both(f):
        def function(*operands):
            y = f(*operands)
            return y, jax.grad(lambda *o: jnp.sum(jnp.sin(f(*o))), moving)(*operands)

        return function

    want = jax.jit(both(lambda *o: case.plain(*o)[0]))(*operands)
    sharded = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    mapped = jax.shard_map(case.y, mesh=mesh, in_specs=tuple(specs), out_specs=P("data"))
    for f in (case.y, mapped):
        got = jax.jit(both(f))(*sharded)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


# -- plans without a GPU ---------------------------------------------------------------------------

# Sizes at which cuDNN has engines for all of them, and dtypes.
PLANNED = {
    "rms": dataclasses.replace(KINDS["rms"], x=(64, 256)),
    "rms, 1 + scale": dataclasses.replace(CASES["rms, 1 + scale"], x=(4, 6, 8, 128)),
    "layer": dataclasses.replace(KINDS["layer"], x=(64, 256)),
    "layer, 1 + scale": dataclasses.replace(CASES["layer, 1 + scale"], x=(4, 32, 128)),
    "layer, two last": dataclasses.replace(CASES["layer, two last"], x=(6, 8, 32)),
    "layer, all": dataclasses.replace(CASES["layer, all"], x=(2, 8, 32)),
    "layer, rank 6": dataclasses.replace(CASES["layer, rank 6"], x=(2, 1, 3, 1, 4, 64)),
    "ada": dataclasses.replace(KINDS["ada"], x=(4, 32, 128)),
    "instance": dataclasses.replace(KINDS["instance"], x=(1, 8, 10, 32)),
    "group, one": dataclasses.replace(CASES["group, one"], x=(4, 10, 32)),
    "group, of each channel": dataclasses.replace(
        CASES["group, of each channel"], x=(1, 30, 16), keywords={"num_groups": 16}, groups=16
    ),
}


def planned(function, *avals):
    with jc.target("H200"):
        return jc.plans(function, *avals)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", PLANNED)
def test_forward_and_backward_are_a_plan_each(name):
    case = PLANNED[name]
    moving = tuple(range(len(case.shapes)))
    step = jax.grad(total(case, implementation="cudnn"), moving)
    found = planned(step, *case.avals())
    title = "instance_norm" if "of each channel" in name else case.function.__name__
    assert [*found] == [title, f"{title} (backward)"]
    for plan in found.values():
        assert [segment.engine != "XLA" for segment in plan.segments] == [True]


@pytest.mark.deviceless
@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_any_rank_is_a_matrix_to_cudnn(rank):
    """By equal engines: the plan is that of the matrix."""
    shape = ((2, 3, 4, 5)[: rank - 2] or (1,)) if rank > 2 else ()
    shape = (*shape, *(1,) * (rank - 2 - len(shape)), 24, 256)
    rows = int(np.prod(shape[:-1]))
    as_given, as_matrix = (
        next(iter(planned(lambda x: layer(x, implementation="cudnn"), S(s, "bfloat16")).values()))
        for s in (shape, (rows, 256))
    )
    assert as_given.engine == as_matrix.engine
    assert as_given.workspace_bytes == as_matrix.workspace_bytes


@pytest.mark.deviceless
def test_axes_that_are_moved_are_planned():
    x, s = S((4, 64, 6, 10), "bfloat16"), S((64,), "bfloat16")
    step = jax.grad(
        lambda x, s: jnp.sum(layer(x, s, axis=1, implementation="cudnn").astype(jnp.float32) ** 2),
        (0, 1),
    )
    for plan in planned(step, x, s).values():
        assert len(plan.execution_plans) == len(plan.segments) == 1


FIVE_ROWS, ONE_EACH = S((5, 64), "bfloat16"), S((64, 1), "bfloat16")
REFUSED = {
    # what -> call, operands, what the reason says
    "epsilon as an array": (
        lambda x, e, **k: layer(x, epsilon=e, **k),
        [FIVE_ROWS, S((), "float32")],
        ["epsilon is computed on the device", "give a Python number"],
    ),
    "rows of one element": (lambda x, **k: layer(x, **k), [ONE_EACH], ["one element"]),
    "groups": (
        lambda x, **k: group(x, num_groups=4, **k),
        [S((4, 8, 8, 32), "bfloat16")],
        ["not the last in memory"],
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", REFUSED)
def test_what_cudnn_does_not_run(what, monkeypatch):
    """In words under "cudnn"; by default it is XLA's, and the plan says why."""
    monkeypatch.setattr(losses, "table", dict)  # which may name another reason
    call, avals, parts = REFUSED[what]
    with pytest.raises(jc.UnsupportedGraphError) as caught:
        planned(functools.partial(call, implementation="cudnn"), *avals)
    (plan,) = planned(call, *avals).values()
    assert [s.engine for s in plan.segments] == ["XLA"]
    explained = " ".join(str(plan.explain()).split())
    for part in parts:
        assert part in str(caught.value)
        assert part in explained


# -- on the GPU ------------------------------------------------------------------------------------

ON_GPU = {
    **PLANNED,
    "layer, first": dataclasses.replace(
        KINDS["layer"], x=(64, 48), axes=(0,), own=(0,), keywords={"axis": 0}
    ),
    "layer, middle": dataclasses.replace(CASES["layer, middle"], x=(4, 64, 6, 10)),
    "layer, neither": dataclasses.replace(CASES["layer, neither"], x=(6, 7, 96)),
    "instance, channels second": dataclasses.replace(
        CASES["instance, channels second"], x=(1, 32, 8, 10)
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ON_GPU)
def test_values_and_gradients_on_the_gpu(name, dtype):
    """In cuDNN's plans: XLA runs none of them."""
    case = ON_GPU[name]
    operands = case.operands(dtype)
    y = functools.partial(case.y, implementation="cudnn")
    (cotangent,) = cotangents_of([jax.eval_shape(y, *operands)])
    got = outcome(y, operands, cotangent)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        on_host = jax.device_get([operands, cotangent])
        want = exactly(lambda *o: case.plain(*o)[0], *on_host)
    # The gradient of one group's scale is summed over pixels after its rounding.
    assert_close(got, want, slack=3 if name == "group, one" else 1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("length", LENGTHS[1:])  # rows of one element are XLA's
def test_rows_of_any_length_and_mean_on_the_gpu(length, dtype, kind):
    operands = rows_of(length, dtype)
    run = jax.jit(functools.partial(row_norms(kind), ours_rows(kind, implementation="cudnn")))
    got = run(*operands)
    got, operands = jax.device_get([got, operands])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        assert_rows(kind, got, *operands, on_gpu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_float16s_largest_numbers_on_the_gpu(kind):
    random = np.random.default_rng(0)
    x = np.clip(random.standard_normal((8, 256)) / 2, -1, 1) * 65504
    x[:, 0] = 65504
    x = jnp.asarray(x, jnp.float16)
    case = dataclasses.replace(KINDS[kind], x=x.shape, scale=False, bias=False)
    got = jax.jit(functools.partial(case, implementation="cudnn"))(x)
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.enable_x64(True):
        want = case.plain(np.asarray(x, np.float64))
    assert_close(got, [np.asarray(w) for w in want], slack=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms", "layer", "ada", "instance"])
def test_not_finite_rows_stay_apart_on_the_gpu(name):
    case = dataclasses.replace(PLANNED[name], x=(4, *PLANNED[name].x[1:]))
    x, *parameters = case.operands("bfloat16")
    run = jax.jit(functools.partial(case.y, implementation="cudnn"))
    clean = np.asarray(run(x, *parameters), np.float32)
    for bad in (np.nan, np.inf):
        got = np.asarray(run(x.at[1].set(bad), *parameters), np.float32)
        assert not np.isfinite(got[1]).any()
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))


def test_group_norm_with_a_scale_by_channel_keeps_x_and_statistics_alone():
    x = jnp.ones((2, 4, 4, 16), jnp.bfloat16)
    scale = bias = jnp.ones(16, jnp.bfloat16)
    _, pull = jax.eval_shape(
        lambda *o: jax.vjp(functools.partial(group, num_groups=4), *o), x, scale, bias
    )
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert {str(leaf.dtype) for leaf in kept} == {"bfloat16"}
    assert len(kept) <= 2, "x, and a view of it"
