"""``@jc.graph_cache``: a function that builds a graph is called once for each kind of arguments."""

import concurrent.futures
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc


def factory(**options):
    """A factory of elementwise graphs, with the arguments of each call that built one."""
    calls = []

    @jc.graph_cache(**options)
    def scaled(x, factor=1.0, *, name="scale"):
        calls.append((x.shape, factor))
        with jc.Graph(inputs=[x], outputs=["out::OUT_0"], name=name) as graph:
            graph.mul(x, factor, name="out").set_output(True)
        return graph

    return scaled, calls


def test_equal_kinds_give_the_same_graph_and_other_kinds_others():
    scaled, calls = factory()
    x = jnp.ones((2, 3))
    graph = scaled(x, 2.0)
    assert scaled(x + 1, 2.0) is graph
    assert scaled(jax.ShapeDtypeStruct((2, 3), "float32"), 2.0) is graph
    np.testing.assert_array_equal(jax.jit(lambda x: scaled(x, 2.0)(x))(x), 2 * x)
    assert len(calls) == 1
    assert scaled.cache_info() == (3, 1, 256, 1)
    scaled, calls = factory()
    columns = np.ones((3, 2), np.float32).T
    kinds = [(x,), (x.astype("bfloat16"),), (jnp.ones(6),), (columns,), (x, 2.0), (x, 2), (x, True)]
    assert len({id(scaled(*kind)) for kind in kinds}) == len(kinds) == len(calls)


def test_the_same_array_twice_is_another_kind():
    @jc.graph_cache
    def total(arrays):
        with jc.Graph(outputs=["sum::OUT_0"]) as graph:
            graph.add(*arrays, name="sum").set_output(True)
        return graph

    x, y = jnp.ones(3), jnp.full(3, 5.0)
    np.testing.assert_array_equal(total([x, x])(x), 2 * x)
    np.testing.assert_array_equal(total([x, y])(x, y), x + y)
    assert total([y, y]) is total([x, x]) is not total([x, y])


def test_threads_build_what_is_kept_once():
    """Those that wait for one that fails build it themselves; a failure is not kept."""
    building, others, calls = threading.Event(), threading.Event(), []

    @jc.graph_cache
    def slow(x):
        calls.append(building.set())
        if len(calls) == 1:
            assert others.wait(20)
            raise ValueError("not yet")
        return object()

    def ask():
        others.set()
        return slow(x)

    x = jnp.ones(3)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(slow, x)
        assert building.wait(20)
        found = [pool.submit(ask) for _ in range(3)]
    with pytest.raises(ValueError, match="not yet"):
        first.result()
    assert {id(each.result()) for each in found} == {id(slow(x))}
    assert (len(calls), slow.cache_info().currsize) == (2, 1)


def test_no_array_is_kept():
    scaled, _ = factory()
    x = jnp.ones(7)
    alive = weakref.ref(x)
    with jax.checking_leaks():
        jax.jit(lambda x: scaled(x, 3.0)(x))(x)
    scaled(x)
    del x
    gc.collect()
    assert alive() is None


def test_spellings_of_a_call_and_the_one_unused_for_longest():
    scaled, calls = factory(maxsize=2)
    x, y = jnp.ones(1), jnp.ones(2)
    first = scaled(x)
    assert first is scaled(x, 1.0) is scaled(factor=1.0, x=x, name="scale")
    scaled(y)
    assert scaled(x) is first
    scaled(jnp.ones(3))
    assert scaled(x) is first
    scaled(y)
    assert [shape for shape, _ in calls] == [(1,), (2,), (3,), (2,)]
    scaled.cache_clear()
    assert scaled(x) is not first


def test_keys_of_ones_own_methods_and_values():
    class Model:
        @jc.graph_cache(key_fn=lambda self, x: x.ndim)
        def graph(self, x):
            return object()

        @jc.graph_cache
        def other(self, x, k=1):
            return object()

    model, x = Model(), jnp.ones(2)
    assert model.other(x) is model.other(x, k=1) is not Model().other(x)
    assert model.graph(x) is model.graph(jnp.ones(3)) is not model.graph(jnp.ones((2, 2)))
    by_value = jc.graph_cache(lambda value: None)
    keys = [jax.random.key(0), jax.random.key(1), jax.random.split(jax.random.key(0), 3)]
    for value in (float("nan"), float("nan"), 1.0, (1, float("nan")), (1, float("nan")), *keys):
        by_value(value)
    assert by_value.cache_info().currsize == 5
    with pytest.raises(jc.JaxCudnnError, match="key_fn"):
        by_value(type("", (), {"__hash__": None})())
