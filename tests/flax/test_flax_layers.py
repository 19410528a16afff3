"""Layers that replace Flax's: constructors, parameters, dtypes, results and gradients."""

import dataclasses
import doctest
import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import CASES, Case, assert_near, gradients, outcome
from helpers import python

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn._core.errors import LibraryImportError
from jax_cudnn.flax import requirement
from jax_cudnn.flax.layer import SWAPPED

named = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize("ours", SWAPPED.values())
def test_arguments_are_flaxs_and_ours(ours):
    assert ours in {case.ours for case in CASES.values()}
    taken = list(inspect.signature(ours).parameters)
    assert taken == [*list(inspect.signature(ours.flaxs().__init__).parameters)[1:], *ours.own]


@named
def test_parameters_are_flaxs_and_of_shares_them(case: Case):
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, case.both()))
    case = dataclasses.replace(case, activation=None)
    theirs = case.made(case.ours.flaxs())
    before = nnx.graphdef(theirs)
    one, other = (
        {path: id(v) for path, v in nnx.iter_graph(layer) if isinstance(v, nnx.Variable)}
        for layer in (case.ours.of(theirs), theirs)
    )
    assert one == other != {}
    assert nnx.graphdef(theirs) == before
    own = {"activation": "relu", "is_causal": True, "local_window_size": 3, "page_size": 4}
    own |= {"rope": jc.ops.rotary_embedding, "float8": "current"}
    given = {name: own[name] for name in case.ours.own}
    made = case.ours.of(case.made(case.ours, **given))
    assert {name: getattr(made, name) for name in given} == given
    derived = type("Derived", (case.ours.flaxs(),), {})  # it may compute something else
    with pytest.raises(jc.GraphError, match="Derived"):
        case.ours.of(case.made(derived))


@named
def test_results_and_gradients_are_flaxs(case: Case, key):
    """Without rank promotion; dtypes in bfloat16; arrays of the host, as a checkpoint may have."""
    x = jax.random.normal(key, case.shape)
    ours, theirs = case.both()
    exact = gradients(theirs, x)
    with jax.numpy_rank_promotion("raise"):
        assert_near(gradients(ours, x), exact, 2e-5)
    for layer in (ours, theirs):
        layer.eval()
    nnx.update(ours, jax.tree.map(np.asarray, nnx.state(ours)))
    assert_near(ours(x), theirs(x), 2e-5)
    x = x.astype(jnp.bfloat16)
    ours, theirs = (layer(x).dtype for layer in case.both(dtype=jnp.bfloat16))
    assert ours == theirs


@named
def test_other_dtypes_and_empty_arrays_compute_as_in_flax(case: Case):
    def program(layer):
        graphdef, state = nnx.split(layer)
        run = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))
        return str(run(state, jax.ShapeDtypeStruct(case.shape, "float64")))

    with jax.enable_x64(True):
        ours, theirs = map(program, case.both(param_dtype=jnp.float64))
        if case.ours is jnn.MultiHeadAttention:  # its own program, of the same precision
            assert ("f64" in ours, "f32" in ours) == (True, False)
        else:
            assert "f64" in ours == theirs
        for dtype, asked in ((jnp.float8_e4m3fn, "float8_e4m3fn"), ("float64", "float64")):
            assert f"do not support {asked}" in case.made(case.ours, dtype=dtype).kept
    empty = jnp.ones((0, *case.shape[1:]))
    ours, theirs = (outcome(layer, empty) for layer in case.both())  # a reshape to -1 is an error
    assert ours == theirs if isinstance(theirs, tuple) else np.array_equal(ours, theirs)


ACTIVATED = [n for n, c in CASES.items() if "activation" in c.ours.own and not c.activation]


@pytest.mark.parametrize("name", ACTIVATED)
def test_an_activation_is_fused_kept_and_checked(name, key):
    case = CASES[name]
    x = jax.random.normal(key, case.shape)
    y = case.made(case.ours.flaxs())(x)
    exact = functools.partial(jax.nn.gelu, approximate=False)
    ours = case.made(case.ours, activation=exact)
    assert_near(nnx.merge(*nnx.split(ours))(x), exact(y), 2e-5)
    with pytest.raises(jc.GraphError, match="unknown activation"):
        case.made(case.ours, activation="foo")


@pytest.mark.long
def test_every_public_layer_has_an_example_that_runs():
    modules = [f"jax_cudnn.flax.{found.name}" for found in pkgutil.iter_modules(jnn.__path__)]
    results = [doctest.testmod(importlib.import_module(module)) for module in modules]
    layers = [v for v in map(vars(jnn).get, jnn.__all__) if inspect.isclass(v)]
    assert all("Example:" in inspect.getdoc(layer) for layer in layers)
    assert sum(result.attempted for result in results) >= 3 * len(layers)
    assert not any(result.failed for result in results)


def test_without_flax_or_with_an_old_one_there_is_an_error_that_says_so():
    python("""
        import inspect, sys

        sys.modules["flax"] = None
        import jax_cudnn as jc
        assert not hasattr(jc, "flax") and "flax" in dir(jc)
        inspect.getmembers(jc)
        try:
            import jax_cudnn.flax
        except ImportError as error:
            assert 'pip install "flax>=' in str(error)
        else:
            raise AssertionError
    """)
    for version in ("0.12.7", "0.9"):
        with pytest.raises(LibraryImportError, match="too old"):
            requirement.check(version)
    for version in ("0.12.12", "1.0.0.dev1"):
        requirement.check(version)
