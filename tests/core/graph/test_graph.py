"""Tracing: statics, the cache, closures, and the graph function itself."""

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

X = (2, 3, 4)


def spec_of(function, *arrays, **static):
    return jc.graph(function).trace(*arrays, **static)[1].spec


@pytest.fixture
def x(key):
    return jax.random.normal(key, X)


# -- statics and the cache ----------------------------------------------------------------------


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


def test_statics_arrive_as_they_are(x):
    seen = []
    function = jc.graph(lambda g, x, *rest, s: (seen.append((*rest, s)), g.relu(x))[1])
    for s in (None, "relu", 1, 1.0, True, (1, "a")):  # 1, 1.0 and True are three
        function(x, 1, "a", s=s)
        assert seen[-1] == (1, "a", s)
        assert type(seen[-1][-1]) is type(s)


def test_numpy_and_jax_scalars_are_arrays_not_statics(x):
    shapes = []
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


# -- closures -------------------------------------------------------------------------------------


def test_closed_over_array_is_an_operand_with_its_value_at_each_call(x):
    box = []
    f = jc.graph(lambda g, x: g.mul(x, box[-1]))
    for value, make in ((2.0, np.full), (3.0, np.full), (4.0, jnp.full)):
        box.append(make((1, 1, 4), value, np.float32))
        np.testing.assert_allclose(f(x), value * x, rtol=1e-6)
    assert len(spec_of(lambda g, y: g.add(g.mul(y, x), x), x).inputs) == 2  # once


CLOSING = {
    "jit_grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap": lambda f: jax.vmap(lambda x: f(x[None])),
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
}


@pytest.mark.parametrize("transform", CLOSING)
def test_closure_over_a_tracer_is_right_and_does_not_leak(transform, x):
    def ours(x):
        w = jnp.sin(x[:1, :1])
        return jc.graph(lambda g, y: g.relu(g.mul(y, w)))(x)

    with jax.checking_leaks():
        got = CLOSING[transform](ours)(x)
    want = CLOSING[transform](lambda x: jax.nn.relu(x * jnp.sin(x[:1, :1])))(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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


# -- the function itself --------------------------------------------------------------------------


def test_threads_trace_their_own_graphs(x):
    f = jc.graph(lambda g, x, k: functools.reduce(lambda y, _: g.relu(y) + k, range(20), x))
    numbers = [[float(n % 3 + i) for n in range(12)] for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda ks: [f.trace(x, k)[1].spec for k in ks], numbers))
    assert got == [[spec_of(f.fn, x, k) for k in ks] for ks in numbers]
