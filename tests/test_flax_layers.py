"""Layers in the place of Flax's: constructor, parameters, results and gradients."""

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
from flax_cases import CASES, Case, assert_near, gradients

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn.flax.layer import SWAPPED

named = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_layer_has_a_case():
    assert {case.ours for case in CASES.values()} == {*SWAPPED.values()}


@named
def test_state_of_one_loads_into_the_other(case: Case):
    ours, theirs = case.both()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(theirs))
    for to, of in ((ours, theirs), (theirs, ours)):
        state = jax.tree.map(lambda v: v + 1, nnx.state(of))
        nnx.update(to, state)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(to), state)


@named
def test_variables_are_shared(case: Case):
    theirs = dataclasses.replace(case, activation=None).made(case.ours.flaxs())
    before = nnx.graphdef(theirs)
    ours = case.ours.of(theirs)
    assert nnx.graphdef(theirs) == before
    one, other = (
        {path: id(v) for path, v in nnx.iter_graph(layer) if isinstance(v, nnx.Variable)}
        for layer in (ours, theirs)
    )
    assert one == other != {}


@named
def test_results_and_gradients_are_flaxs(case: Case, key):
    x = jax.random.normal(key, case.shape)
    ours, theirs = (gradients(layer, x) for layer in case.both())
    assert_near(ours, theirs, 2e-5)


@named
@pytest.mark.parametrize("kind", ["numpy in Variables", "numpy", "jax"])
def test_arrays_of_the_host_and_without_variables(case: Case, kind, key):
    """What a restored checkpoint may hold, or a user may put in a layer."""
    array, raw = jnp.asarray if kind == "jax" else np.asarray, "Variables" not in kind
    x = jax.random.normal(key, case.shape)
    dtype = jnp.bfloat16 if case.ours is jnn.MultiHeadAttention else None
    asked = issubclass(case.ours, jnn.LayerNorm | jnn.RMSNorm | jnn.GroupNorm | jnn.InstanceNorm)
    found = []
    for layer in case.both(dtype=dtype):
        layer.eval()
        nnx.update(layer, jax.tree.map(array, nnx.state(layer)))
        for _, module in nnx.iter_graph(layer):
            if raw and isinstance(module, nnx.Module):
                held = {
                    n: v
                    for n, v in vars(module).items()
                    if isinstance(v, nnx.Param | nnx.BatchStat)
                }
                for name, variable in held.items():
                    setattr(module, name, nnx.data(variable[...]))
        if raw and asked and type(layer) is case.ours.flaxs():
            with pytest.raises(ValueError, match="ambiguous"):  # whether such a scale is true
                layer(x)
            layer = case.made(case.ours.flaxs())
        found.append(layer(x))
    assert_near(*found, 2e-5 if dtype is None else 2**-5)


@named
def test_bfloat16_rounds_no_worse_than_flaxs(case: Case, key):
    """Both against float32, by results and each gradient."""
    x = jax.random.normal(key, case.shape).astype(jnp.bfloat16)
    exact = gradients(case.made(case.ours.flaxs()), x.astype(jnp.float32))
    both = [gradients(layer, x) for layer in case.both(dtype=jnp.bfloat16)]
    for a, b, want in zip(*both, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        largest = np.max(np.abs(want))
        ours, flaxs = (np.max(np.abs(np.asarray(v, np.float32) - want)) for v in (a, b))
        assert ours <= 2 * flaxs + 2**-7 * largest


@named
@pytest.mark.parametrize("dtypes", [("float16", None), (None, "bfloat16"), ("float32", "float16")])
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


@named
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_other_dtypes_compute_as_in_flax(case: Case, dtype):
    with jax.enable_x64(True):

        def program(layer):
            graphdef, state = nnx.split(layer)
            run = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))
            return str(run(state, jax.ShapeDtypeStruct(case.shape, dtype)))

        ours, theirs = map(program, case.both(param_dtype=jnp.dtype(dtype)))
        assert ours == theirs
        assert dtype[0] in ours


@named
def test_of_nothing_comes_nothing(case: Case):
    ours, theirs = case.both()
    empty = jnp.ones((0, *case.shape[1:]))
    try:
        want = theirs(empty)
    except ZeroDivisionError as error:  # a reshape to -1
        with pytest.raises(type(error)):
            ours(empty)
    else:
        np.testing.assert_array_equal(ours(empty), want)


@pytest.mark.parametrize("ours", SWAPPED.values())
def test_arguments_are_flaxs_and_ours(ours):
    class Derived(ours):
        def __init__(self, size, *, rngs):
            super().__init__(size, size, rngs=rngs)

    assert [*inspect.signature(Derived).parameters] == ["size", "rngs"]
    taken = list(inspect.signature(ours).parameters)
    assert taken == [*list(inspect.signature(ours.flaxs().__init__).parameters)[1:], *ours.own]


ACTIVATED = [n for n, c in CASES.items() if "activation" in c.ours.own and not c.activation]


@pytest.mark.parametrize("name", ACTIVATED)
@pytest.mark.parametrize("activation", ["relu", jax.nn.gelu, "gelu_exact"])
def test_an_activation_is_fused_and_kept(name, activation, key):
    case = CASES[name]
    ours, theirs = case.made(case.ours, activation=activation), case.made(case.ours.flaxs())
    x = jax.random.normal(key, case.shape)
    plain = {"relu": jax.nn.relu, "gelu_exact": lambda y: jax.nn.gelu(y, approximate=False)}
    want = plain.get(activation, activation)(theirs(x))
    assert_near(nnx.merge(*nnx.split(ours))(x), want, 2e-5)


@pytest.mark.parametrize("name", ACTIVATED)
def test_an_activation_is_checked_where_a_layer_is_made(name):
    case = CASES[name]
    with pytest.raises(jc.GraphError, match="unknown activation"):
        case.made(case.ours, activation="foo")
    for approximate, want in ((True, "gelu"), (False, "gelu_exact")):
        gelu = functools.partial(jax.nn.gelu, approximate=approximate)
        assert case.made(case.ours, activation=gelu).activation == want


@named
def test_of_one_of_ours_keeps_its_own_settings(case: Case):
    own = {"activation": "relu", "is_causal": True, "local_window_size": 3, "page_size": 4}
    given = {name: own[name] for name in case.ours.own}
    made = case.ours.of(dataclasses.replace(case, activation=None).made(case.ours, **given))
    assert {name: getattr(made, name) for name in given} == given


@named
def test_of_takes_no_derived_class(case: Case):
    """It may compute something else."""
    derived = type("Derived", (case.ours.flaxs(),), {})
    with pytest.raises(jc.GraphError, match=r"Derived"):
        case.ours.of(dataclasses.replace(case, activation=None).made(derived))


MODULES = [
    importlib.import_module(f"jax_cudnn.flax.{found.name}")
    for found in pkgutil.iter_modules(jnn.__path__)
]


def test_every_public_layer_has_an_example_that_runs():
    attempted = 0
    for module in MODULES:
        found = doctest.testmod(module)
        assert found.failed == 0
        attempted += found.attempted
    layers = [v for v in vars(jnn).values() if inspect.isclass(v)]
    assert all("Example:" in inspect.getdoc(layer) for layer in layers)
    assert attempted >= 3 * len(layers)


@pytest.mark.parametrize(
    "layer",
    [
        jnn.LayerNorm,
        jnn.RMSNorm,
        jnn.BatchNorm,
        jnn.InstanceNorm,
        functools.partial(jnn.GroupNorm, num_groups=1),
    ],
    ids=["LayerNorm", "RMSNorm", "BatchNorm", "InstanceNorm", "GroupNorm"],
)
def test_normalizations_take_lists(layer):
    given = [[[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]]
    made = layer(num_features=2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(made(given), made(jnp.array(given)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_where_ranks_may_not_be_promoted(case, key):
    """Some run with jax_numpy_rank_promotion="raise"."""
    layer, x = case.made(case.ours, jax.random.key(0)), jax.random.normal(key, case.shape)
    with jax.numpy_rank_promotion("raise"):
        nnx.grad(lambda layer, x: layer(x).sum(), argnums=(0, 1))(layer, x)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", ["Linear", "Conv"])
def test_a_bias_of_another_shape_is_flaxs(name, shape, key):
    x, found = jax.random.normal(key, (2, 6, 4)), []
    for of in (jnn, nnx):
        layer = getattr(of, name)(4, 8, *([(3,)] if name == "Conv" else []), rngs=nnx.Rngs(0))
        layer.bias = nnx.Param(jnp.full(shape, 0.5))
        found.append(layer(x))
    assert_near(*found, 1e-6)


@pytest.mark.parametrize("of", [jnn, nnx], ids=["ours", "theirs"])
def test_what_flax_refuses_is_refused_in_its_words(of):
    layer = of.Linear(4, 4, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.ones((4, 2, 2)))
    with pytest.raises(TypeError, match="incompatible shapes"):
        layer(jnp.ones((3, 4)))
    layer = of.Conv(4, 6, (3,), strides=0, rngs=nnx.Rngs(0))
    with pytest.raises((TypeError, ValueError), match="positive stride"):
        layer(jnp.ones((2, 7, 4)))
