"""Products of arrays that a mesh shards along dimensions that a graph merges into one."""

import collections
import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_cases import assert_near, followed
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transformations import equations

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn._core import compat

TOKENS = (4, 6, 8)
NUMBERS = (((2,), (0,)), ((), ()))
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")
pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 (host) devices")


# What is ours, and what stands for it: layers, or functions of x and a matrix.
LAYERS = {
    "linear": (jnn.Linear, nnx.Linear, (8, 8)),
    "linear relu": (
        functools.partial(jnn.Linear, activation="relu"),
        followed(nnx.Linear, "relu"),
        (8, 8),
    ),
    "linear general": (jnn.LinearGeneral, nnx.LinearGeneral, (8, (4, 2))),
}
FUNCTIONS = {
    "matmul": (jc.ops.matmul, jnp.matmul),
    "dot_general": (
        lambda x, w: jc.ops.dot_general(x, w, NUMBERS),
        lambda x, w: jax.lax.dot_general(x, w, NUMBERS),
    ),
}
FUSED = ("linear relu",)  # merges dimensions on axes that are the compiler's


def random(*shape, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def pair(name):
    """Two functions of x and parameters, ours and what stands for it, and the parameters."""
    if name in FUNCTIONS:
        return FUNCTIONS[name], random(8, 8)
    *classes, arguments = LAYERS[name]
    parts = [nnx.split(cls(*arguments, rngs=nnx.Rngs(0))) for cls in classes]
    functions = [lambda x, state, graph=graph: nnx.merge(graph, state)(x) for graph, _ in parts]
    return functions, parts[0][1]


def mesh(kind):
    return jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2))


def step(function, *arrays):
    """A result and the gradients of a sum of it, and how often devices exchange what for them."""

    def loss(*arrays):
        y = function(*arrays)
        return jnp.sum(jnp.sin(y.astype("float32"))), y

    made = jax.jit(jax.grad(loss, (*range(len(arrays)),), has_aux=True)).lower(*arrays).compile()
    return made(*arrays), collections.Counter(COLLECTIVE.findall(made.as_text()))


def assert_placed_alike(got, want):
    """Types do not say where arrays of the compiler's axes lie; arrays do."""
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)


def graphs(function, *arrays):
    """How many graphs of ours a program holds."""
    return str(jax.make_jaxpr(function)(*arrays)).count("cudnn[")


@pytest.mark.parametrize("spec", [P(None, "data"), P("data", "model")], ids=str)
@KINDS
@pytest.mark.parametrize("name", [*LAYERS, *FUNCTIONS])
def test_tokens_are_sharded_as_for_lax(name, kind, spec):
    functions, parameters = pair(name)
    with mesh(kind):
        x = jax.device_put(random(*TOKENS), spec)
        (got, ours), (want, theirs) = (step(f, x, parameters) for f in functions)
    assert_near(got, want)
    if kind is AxisType.Explicit or name not in FUSED:  # or else XLA gathers, on a CPU, too
        assert_placed_alike(got, want)
        assert ours == theirs


# Where x, the weights and the result lie.
SHARDED = {
    "columns": (P("data"), P(None, "model"), P("data", None, "model")),
    "columns beside tokens": (P(None, "data"), P(None, "model"), P(None, "data", "model")),
    "tokens over both axes": (P(None, ("data", "model")), P(), P(None, ("data", "model"), None)),
}


@pytest.mark.parametrize("name", SHARDED)
@KINDS
def test_an_epilogue_beside_sharded_weights(kind, name):
    dtype = "bfloat16" if kind is AxisType.Auto else "float32"
    x, w = random(4, 8, 16, dtype=dtype), random(16, 8, dtype=dtype, seed=2) / 4
    scale, bias = random(8, seed=3), random(8, dtype=dtype, seed=4)
    residual = random(4, 8, 8, dtype=dtype, seed=5)

    def ours(x, w, scale, bias, residual):
        terms = {"scale": scale, "bias": bias, "residual": residual}
        return jc.ops.matmul(x, w, activation="gelu", **terms)

    def plain(*arrays):
        x, w, scale, bias, residual = (a.astype("float32") for a in arrays)
        return jax.nn.gelu(x @ w * scale + bias + residual)

    of_x, of_w, of_y = SHARDED[name]
    of_features = P(of_y[-1])
    arrays, places = (x, w, scale, bias, residual), (of_x, of_w, of_features, of_features, of_y)
    want, _ = step(plain, *arrays)
    with mesh(kind):
        got, _ = step(ours, *map(jax.device_put, arrays, places))
    assert_near(got, want, 1e-5 if dtype == "float32" else 2e-2)
    if kind is AxisType.Explicit:
        assert jax.typeof(got[1]).sharding.spec == of_y


OPERANDS = {
    "int8": ("int8", "int8", {}),
    "float8": ("float8_e4m3fn", "float8_e5m2", {}),
    "mixed": ("bfloat16", "int8", {"preferred_element_type": "float32"}),
    "transposed": ("float32", "float32", {"transpose_a": True, "transpose_b": True}),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_all_kinds_compute_as_without_a_mesh(name):
    *dtypes, settings = OPERANDS[name]
    run = functools.partial(jc.ops.matmul, **settings)
    arrays = [(3 * random(2, 3, 8, 8, seed=i)).astype(d) for i, d in enumerate(dtypes)]
    want = run(*arrays)
    with mesh(AxisType.Auto):
        assert graphs(run, *arrays) == 0
        got = run(*arrays)
    assert got.dtype == want.dtype
    assert_near(got, want, 1e-6)


def test_who_computes_on_a_mesh(caplog):
    x, w = random(*TOKENS), random(8, 8)
    plain = functools.partial(jc.ops.matmul, bias=jnp.ones(8))
    fused = functools.partial(plain, activation="relu")
    assert graphs(plain, x, w) == graphs(fused, x, w) == 1
    with caplog.at_level(logging.DEBUG, logger="jax_cudnn"), mesh(AxisType.Auto):
        assert (graphs(plain, x, w), graphs(fused, x, w)) == (0, 1)
        assert "matmul: XLA runs it" in caplog.text
        assert graphs(plain, x[:, 0], w) == 1  # nothing is merged
        with jc.implementation("cudnn"):
            assert graphs(plain, x, w) == 1
        assert graphs(functools.partial(plain, implementation="cudnn"), x, w) == 1
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
        assert graphs(plain, x, w) == 1
    own = jax.NamedSharding(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), P("data"))
    assert graphs(jc.ops.matmul, jax.device_put(x, own), w) == 0  # arrays tell of their mesh
    with mesh(AxisType.Auto):
        local = jax.shard_map(
            plain, in_specs=(P("data", "model"), P()), out_specs=P("data", "model")
        )
        assert graphs(local, x, w) == 1


def test_gradients_of_16_bit_products_on_a_mesh_are_of_16_bits():
    x, w, b = (random(*s, dtype="bfloat16") for s in (TOKENS, (8, 8), (8,)))

    def loss(x, w):
        return jc.ops.matmul(x, w, bias=b).astype("float32").sum()

    with mesh(AxisType.Auto):
        found = equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    products = [e for e in found if e.primitive.name == "dot_general"]
    assert len(products) >= 2
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}


def test_products_on_a_mesh_promote_no_ranks():
    """Some run with jax_numpy_rank_promotion="raise"."""
    x, w, b = random(2, *TOKENS), random(8, 8), random(8)
    for kind, terms, activation in (
        (AxisType.Auto, {"bias": b}, None),
        (AxisType.Explicit, {"bias": b, "scale": -b}, "relu"),
    ):
        product = functools.partial(jc.ops.matmul, activation=activation, **terms)
        want = product(x, w)
        with mesh(kind), jax.numpy_rank_promotion("raise"):
            assert_near(product(jax.device_put(x, P(None, None, "model")), w), want)


def test_what_lax_refuses_is_refused_in_its_words():
    spec = P(None, "data", "model")
    functions, state = pair("linear")
    with mesh(AxisType.Explicit):
        x = jax.device_put(random(*TOKENS), spec)
        state = jax.tree.map(lambda leaf: jax.device_put(leaf, P("model")), state)
        for function in functions:
            with pytest.raises(compat.ShardingTypeError, match="Contracting dimensions"):
                function(x, state)
