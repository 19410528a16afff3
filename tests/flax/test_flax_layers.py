"""Layers in the place of Flax's: constructors, parameters, dtypes, results and gradients."""

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


# -- constructors and parameters -------------------------------------------------------------------


@pytest.mark.parametrize("ours", SWAPPED.values())
def test_arguments_are_flaxs_and_ours(ours):
    class Derived(ours):
        def __init__(self, size, *, rngs):
            super().__init__(size, size, rngs=rngs)

    assert ours in {case.ours for case in CASES.values()}
    assert [*inspect.signature(Derived).parameters] == ["size", "rngs"]
    taken = list(inspect.signature(ours).parameters)
    assert taken == [*list(inspect.signature(ours.flaxs().__init__).parameters)[1:], *ours.own]


@named
def test_parameters_are_flaxs_and_of_shares_them(case: Case):
    ours, theirs = case.both()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))
    state = jax.tree.map(lambda v: v + 1, nnx.state(theirs))
    nnx.update(ours, state)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), state)

    case = dataclasses.replace(case, activation=None)
    theirs = case.made(case.ours.flaxs())
    before = nnx.graphdef(theirs)
    ours = case.ours.of(theirs)
    assert nnx.graphdef(theirs) == before
    one, other = (
        {path: id(v) for path, v in nnx.iter_graph(layer) if isinstance(v, nnx.Variable)}
        for layer in (ours, theirs)
    )
    assert one == other != {}

    own = {"activation": "relu", "is_causal": True, "local_window_size": 3, "page_size": 4}
    given = {name: own[name] for name in case.ours.own}
    made = case.ours.of(case.made(case.ours, **given))
    assert {name: getattr(made, name) for name in given} == given
    derived = type("Derived", (case.ours.flaxs(),), {})  # it may compute something else
    with pytest.raises(jc.GraphError, match=r"Derived"):
        case.ours.of(case.made(derived))


@named
@pytest.mark.parametrize("dtypes", [("float16", None), (None, "bfloat16")])
def test_dtypes_are_flaxs(case: Case, dtypes):
    """Of the result for inputs of float32 and bfloat16, and of the parameters."""

    def made(cls):
        return case.made(cls, dtype=dtype, param_dtype=param_dtype or jnp.float32)

    dtype, param_dtype = (None if d is None else jnp.dtype(d) for d in dtypes)
    for given in ("float32", "bfloat16"):
        x = jax.ShapeDtypeStruct(case.shape, given)
        ours, theirs = (
            nnx.eval_shape(lambda x, cls=cls: (layer := made(cls), layer(x)), x)
            for cls in (case.ours, case.ours.flaxs())
        )
        assert ours[1] == theirs[1]
        assert [*map(str, jax.tree.leaves(ours[0]))] == [*map(str, jax.tree.leaves(theirs[0]))]


# -- results and gradients -------------------------------------------------------------------------


@named
def test_results_and_gradients_are_flaxs(case: Case, key):
    """Also where ranks may not be promoted; in bfloat16 no worse than Flax's against float32."""
    x = jax.random.normal(key, case.shape)
    ours, theirs = case.both()
    exact = gradients(theirs, x)
    with jax.numpy_rank_promotion("raise"):
        assert_near(gradients(ours, x), exact, 2e-5)
    x = x.astype(jnp.bfloat16)
    exact = gradients(case.made(case.ours.flaxs()), x.astype(jnp.float32))
    both = [gradients(layer, x) for layer in case.both(dtype=jnp.bfloat16)]
    for a, b, want in zip(*both, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        largest = np.max(np.abs(want))
        ours, flaxs = (np.max(np.abs(np.asarray(v, np.float32) - want)) for v in (a, b))
        assert ours <= 2 * flaxs + 2**-7 * largest


@named
def test_arrays_of_the_host_and_without_variables(case: Case, key):
    """What a restored checkpoint may hold, or a user may put in a layer."""
    x = jax.random.normal(key, case.shape)
    dtype = jnp.bfloat16 if case.ours is jnn.MultiHeadAttention else None
    asked = issubclass(case.ours, jnn.LayerNorm | jnn.RMSNorm | jnn.GroupNorm | jnn.InstanceNorm)
    found = []
    for layer in case.both(dtype=dtype):
        layer.eval()
        nnx.update(layer, jax.tree.map(np.asarray, nnx.state(layer)))
        modules = [m for _, m in nnx.iter_graph(layer) if isinstance(m, nnx.Module)]
        for module in modules:
            for name, variable in [*vars(module).items()]:
                if isinstance(variable, nnx.Param | nnx.BatchStat):
                    setattr(module, name, nnx.data(variable[...]))
        if asked and type(layer) is case.ours.flaxs():
            with pytest.raises(ValueError, match="ambiguous"):  # whether such a scale is true
                layer(x)
            layer = case.made(case.ours.flaxs())
        found.append(layer(x))
    assert_near(*found, 2e-5 if dtype is None else 2**-5)


@named
def test_float64_and_empty_arrays_compute_as_in_flax(case: Case):
    def program(layer):
        graphdef, state = nnx.split(layer)
        run = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))
        return str(run(state, jax.ShapeDtypeStruct(case.shape, "float64")))

    with jax.enable_x64(True):
        ours, theirs = map(program, case.both(param_dtype=jnp.float64))
        assert ours == theirs
        assert "f64" in ours
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
    for given, plain in (("relu", jax.nn.relu), (jax.nn.gelu, jax.nn.gelu), (exact, exact)):
        ours = case.made(case.ours, activation=given)
        assert_near(nnx.merge(*nnx.split(ours))(x), plain(y), 2e-5)
    with pytest.raises(jc.GraphError, match="unknown activation"):
        case.made(case.ours, activation="foo")


@pytest.mark.parametrize(
    "case",
    [
        *(Case(cls, (2,), ()) for cls in (jnn.LayerNorm, jnn.RMSNorm, jnn.InstanceNorm)),
        Case(jnn.BatchNorm, (2,), (), activation="relu"),
        Case(jnn.GroupNorm, (2, 1), ()),
        Case(jnn.Linear, (2, 3), ()),
        Case(jnn.Einsum, ("bta,ac->btc", (2, 3), (3,)), ()),
    ],
    ids=lambda case: case.ours.__name__,
)
def test_lists_are_taken(case: Case):
    given = [[[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]]
    ours, theirs = case.both()
    assert_near(ours(given), theirs(jnp.array(given)))


# -- the package -----------------------------------------------------------------------------------


def test_every_public_layer_has_an_example_that_runs():
    attempted = 0
    for found in pkgutil.iter_modules(jnn.__path__):
        result = doctest.testmod(importlib.import_module(f"jax_cudnn.flax.{found.name}"))
        assert result.failed == 0
        attempted += result.attempted
    layers = [v for v in vars(jnn).values() if inspect.isclass(v)]
    assert all("Example:" in inspect.getdoc(layer) for layer in layers)
    assert attempted >= 3 * len(layers)


def test_without_flax_the_folder_is_not_there_and_says_why():
    python("""
        import importlib, inspect, sys

        sys.modules["flax"] = None
        import jax_cudnn as jc
        assert not hasattr(jc, "flax") and "flax" in dir(jc)
        inspect.getmembers(jc)
        for attempt in (lambda: importlib.import_module("jax_cudnn.flax"), lambda: jc.flax):
            try:
                attempt()
            except (ImportError, AttributeError) as error:
                assert 'pip install "flax>=' in str(error) and isinstance(error, jc.LibraryError)
            else:
                raise AssertionError
    """)


def test_an_old_flax_is_refused_and_a_new_one_taken():
    for version in ("0.10.0", "0.12.7", "0.9"):
        with pytest.raises(LibraryImportError, match=rf"too old.*\n.*>= 0.12.8\n.*{version}"):
            requirement.check(version)
    for version in ("0.12.8", "0.12.12", "0.13", "1.0.0.dev1"):
        requirement.check(version)
