"""Graph functions: arguments, results, operators on tensors, statics, closures, threads."""

import concurrent.futures
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, lowered, spec_of

import jax_cudnn as jc

X = (2, 3, 4)
scale = jc.graph(lambda g, x, k: x * k)


@pytest.fixture
def x(key):
    return jax.random.normal(key, X)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_pytrees_go_in_and_come_out(x):
    f = jc.graph(lambda g, p: jax.tree.map(lambda leaf: g.relu(leaf), p))
    for tree in ([x, -x], {"p": x, "q": (-x,)}, Pair(x, -x)):
        assert_same(jax.jit(f)(tree), jax.tree.map(jax.nn.relu, tree))
    spec = spec_of(lambda g, first, p, *more: g.add(g.add(first, p["w"]), more[0]), x, {"w": x}, x)
    assert spec.inputs == ("first", "p.w", "x2")  # named after the arguments


def test_results_come_back_in_their_places_and_only_they_are_computed(x):
    def function(g, x, y):
        total = g.add(x, y)
        return {"given": (x, y), "twice": [g.relu(total)] * 2, "inside": total, "none": None}

    want = {"given": (x, x), "twice": [jax.nn.relu(x + x)] * 2, "inside": x + x, "none": None}
    assert_same(jax.jit(jc.graph(function))(x, x), want)
    assert len(spec_of(function, x, x).outputs) == 2
    spec = spec_of(lambda g, x, y, z: (g.add(g.mul(x, z), 3.0), g.relu(y))[1], x, x, x)
    assert [call.node.method for call in spec.calls] == ["relu"]
    assert (spec.inputs, len(spec.tensors), len(spec.constants)) == (("y",), 2, 0)


def test_scalars_stand_beside_tensors_of_any_rank(x):
    for got in (
        scale(x, 2.0),
        scale(x, jnp.float32(2)),
        jax.vmap(scale, (None, 0))(x, jnp.full(1, 2.0))[0],
        jc.graph(lambda g, x: x * np.float64(2))(x),
    ):
        np.testing.assert_allclose(got, 2 * x, rtol=1e-6)
    assert scale(x.astype("bfloat16"), 2.0).dtype == jnp.bfloat16
    with pytest.raises(jc.GraphError, match="different ranks"):  # used as a scalar already
        jc.graph(lambda g, x, k: (g.relu(k), x * k))(x, jnp.float32(2))
    used_twice = jc.graph(lambda g, x, k: (x * k, x + k))(x, jnp.float32(2))
    np.testing.assert_allclose(used_twice[1], x + 2, rtol=1e-6)


def test_arguments_may_be_called_like_constants_and_results():
    def named(g, c0, c1, c2, c3):
        return (c0 * 2.0 + c1) * 3.0 + c2 * 5.0 + c3

    got = jc.graph(named)(*(jnp.full((1, 1), float(v)) for v in (1, 10, 100, 1000)))
    assert got.item() == (1 * 2 + 10) * 3 + 500 + 1000
    keys = {"relu.0::OUT_0": jnp.full((1, 1), 7.0), "captured0": jnp.full((1, 1), 11.0)}
    outer = jnp.full((1, 1), 13.0)
    function = jc.graph(lambda g, d: g.relu(d["relu.0::OUT_0"]) * d["captured0"] + outer)
    assert function(keys).item() == 7 * 11 + 13


def test_statics_that_are_equal_and_yet_different(x):
    y, traced = jnp.ones((1, 1)), []
    plus, minus = (jc.graph(lambda g, y, z=z: y * z)(y).item() for z in (0.0, -0.0))
    assert (np.signbit(plus), np.signbit(minus)) == (False, True)
    assert np.signbit(scale(y, -0.0).item()) > np.signbit(scale(y, 0.0).item())
    function = jc.graph(lambda g, x, *, s: g.relu(x) if isinstance(s, Pair) else g.sigmoid(x))
    np.testing.assert_allclose(function(x, s=Pair(1, 2)), jax.nn.relu(x))
    np.testing.assert_allclose(function(x, s=(1, 2)), jax.nn.sigmoid(x), rtol=1e-5)
    shifted = jc.graph(lambda g, y, by: (traced.append(by), y + by)[1])
    assert all(np.isnan(shifted(y, float("nan")).item()) for _ in "ab")
    assert len(traced) == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Param:
    """A box of one array that stands for it, as Flax has."""

    value: jax.Array

    def __jax_array__(self):
        return self.value


def test_boxes_foreign_dtypes_and_empty_arrays(x):
    np.testing.assert_allclose(scale(x, Param(x)), x * x, rtol=1e-6)
    closed = Param(x)
    np.testing.assert_allclose(jc.graph(lambda g, y: y * closed)(x), x * x, rtol=1e-6)
    others = (jax.random.key(0), jnp.ones(2, complex))  # pass through
    _, got = jc.graph(lambda g, x, *others: (g.relu(x), others))(x, *others)
    assert [a.dtype for a in got] == [a.dtype for a in others]
    function, empty = jax.jit(jc.graph(lambda g, x: g.relu(x))), jnp.ones((2, 0, 4))
    assert function(empty).shape == empty.shape
    assert "custom_call" not in lowered(function, empty)


A = jnp.asarray([[[0.5, 1.0, 2.0, 3.0]]])
B = jnp.asarray([[[2.0, 1.0, 0.5, 1.5]]])
METHODS = {name: name for name in ("add", "sub", "mul", "pow")} | {"truediv": "div"}
METHODS |= {name: f"cmp_{name}" for name in ("lt", "le", "gt", "ge")}
MIRRORED = {"cmp_lt": "cmp_gt", "cmp_gt": "cmp_lt", "cmp_le": "cmp_ge", "cmp_ge": "cmp_le"}


@pytest.mark.parametrize("name", METHODS)
def test_operator_is_the_method_beside_tensors_numbers_and_arrays(name):
    op, method = getattr(operator, name), METHODS[name]
    between = jc.graph(lambda g, x, y: op(x, y))
    np.testing.assert_allclose(jax.jit(between)(A, B), op(A, B), rtol=1e-6)
    for value in (2, 1.5, True, B, np.asarray(B), np.float32(1.5)):
        right = jc.graph(lambda g, x, value=value: op(x, value))
        left = jc.graph(lambda g, x, value=value: op(value, x))
        np.testing.assert_allclose(right(A), op(A, value), rtol=1e-6)
        np.testing.assert_allclose(left(A), op(value, A), rtol=1e-6)
        (call,) = spec_of(left.fn, A).calls
        # Python asks the tensor for the mirrored comparison.
        place = 1 if call.node.method == method else 0
        assert call.inputs[place][1] == "x"
        assert call.node.method in (method, MIRRORED.get(method))


def test_matrix_products_and_other_operators():
    x, w = (np.arange(n, dtype=np.float32).reshape(s) for n, s in ((8, (1, 2, 4)), (12, (1, 4, 3))))
    for got in (
        jc.graph(lambda g, x, w: x @ w)(x, w),
        jax.jit(jc.graph(lambda g, x: x @ w))(x),
        jc.graph(lambda g, w: jnp.asarray(x) @ w)(w),
        jc.graph(lambda g, w: x @ w)(w),
    ):
        np.testing.assert_array_equal(got, x @ w)

    def operators(g, x, y):
        return np.less_equal(abs(-(x * 2.0 - y) / (y**2 + 1)), y)

    def methods(g, x, y):
        top = g.neg(g.sub(g.mul(x, 2.0), y))
        return g.cmp_le(g.abs(g.div(top, g.add(g.pow(y, 2), 1))), y)

    assert spec_of(operators, A, B).canonical() == spec_of(methods, A, B).canonical()


def test_tensors_are_typed_before_they_are_used_and_of_one_graph(x):
    f = jc.graph(lambda g, x: (y := g.mul(x, 1.0).set_data_type("BFLOAT16"), g.mul(y, 1.0)))
    rounded, follower = f(x)
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(follower.astype(jnp.float32), rounded.astype(jnp.float32))
    leaked = []
    jc.graph(lambda g, x: (leaked.append(x), g.relu(x))[1])(x)
    with pytest.raises(jc.GraphError, match="another graph"):
        jc.graph(lambda g, y: g.add(y, leaked[0]))(x)
    with pytest.raises(jc.GraphError, match="after relu"):
        jc.graph(lambda g, x: (y := g.relu(x), g.relu(y), y.set_data_type("float16"))[1])(x)


def test_each_shape_dtype_and_static_is_traced_once(x):
    traces = []

    @jc.graph
    def f(g, x, k, slope=0.0):
        traces.append(k)
        return g.relu(x * k, negative_slope=slope)

    calls = [((x, 2.0), {}), ((x, 2.0), {"slope": 0.5}), ((x[:1], 2.0), {})]
    calls += [((x.astype(jnp.bfloat16), 2.0), {}), ((x, 3.0), {}), ((x, 2), {}), ((x, True), {})]
    for made, (args, static) in enumerate(calls, 1):
        for _ in range(2):
            f(*args, **static)
            f(args[0] + 1, *args[1:], **static)
            jax.jit(f, static_argnums=1, static_argnames="slope")(*args, **static)
        assert len(traces) == made


def test_statics_arrive_as_they_are_and_scalars_of_numpy_and_jax_as_arrays(x):
    seen, shapes = [], []
    function = jc.graph(lambda g, x, *rest, s: (seen.append((*rest, s)), g.relu(x))[1])
    for s in (None, "relu", 1, 1.0, True, (1, "a")):  # 1, 1.0 and True are three
        function(x, 1, "a", s=s)
        assert seen[-1] == (1, "a", s)
        assert type(seen[-1][-1]) is type(s)
    f = jc.graph(lambda g, x, s: (shapes.append((s.shape, s.dtype.name)), g.relu(x))[1])
    for scalar in (np.float32(2), np.array(2.0), np.float64(2), jnp.float32(2)):
        f(x, scalar)
    assert {*shapes} == {((), "float32")}
    for static, words in (([1, 2], "not hashable"), (jnp.ones(3), "by position")):
        with pytest.raises(jc.GraphTypeError, match=words):
            f(x, s=static)


def test_equal_functions_give_one_interned_spec(x):
    assert spec_of(lambda g, x: g.relu(x), x) is spec_of(lambda g, x: g.relu(x), x)
    renamed = spec_of(lambda g, renamed: g.relu(renamed), x)
    assert renamed != spec_of(lambda g, x: g.relu(x), x)
    assert renamed.canonical() is spec_of(lambda g, x: g.relu(x), x).canonical()


def test_closed_over_array_is_an_operand_with_its_value_at_each_call(x):
    box = []
    f = jc.graph(lambda g, x: g.mul(x, box[-1]))
    for value, make in ((2.0, np.full), (3.0, np.full), (4.0, jnp.full)):
        box.append(make((1, 1, 4), value, np.float32))
        np.testing.assert_allclose(f(x), value * x, rtol=1e-6)
    assert len(spec_of(lambda g, y: g.add(g.mul(y, x), x), x).inputs) == 2  # once


def test_closure_over_a_tracer_is_right_and_does_not_leak(x):
    def ours(x):
        w = jnp.sin(x[:1, :1])
        return jc.graph(lambda g, y: g.relu(g.mul(y, w)))(x)

    plain = lambda x: jax.nn.relu(x * jnp.sin(x[:1, :1]))  # noqa: E731
    for transform in (
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda f: jax.vmap(lambda x: f(x[None])),
    ):
        with jax.checking_leaks():
            got = transform(ours)(x)
        np.testing.assert_allclose(got, transform(plain)(x), rtol=1e-4, atol=1e-5)


def test_one_graph_over_a_new_tracer_at_each_trace(x):
    box = []
    f = jc.graph(lambda g, y: g.mul(y, box[-1]))

    def run(scale):
        box.append(scale.reshape(1, 1, 1))
        y = f(x)
        box.clear()  # the test's own reference to the tracer
        return y

    with jax.checking_leaks():
        for transform in (jax.jit, jax.vmap, lambda h: h):
            np.testing.assert_allclose(transform(run)(jnp.full(1, 2.0)).reshape(X), 2 * x)


def test_threads_trace_their_own_graphs(x):
    f = jc.graph(lambda g, x, k: functools.reduce(lambda y, _: g.relu(y) + k, range(20), x))
    numbers = [[float(n % 3 + i) for n in range(12)] for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda ks: [f.trace(x, k)[1].spec for k in ks], numbers))
    assert got == [[spec_of(f.fn, x, k) for k in ks] for ks in numbers]
