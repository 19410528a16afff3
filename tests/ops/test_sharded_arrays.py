"""Products, normalizations and attention of arrays that a mesh shards: as lax's and Flax's."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import assert_near, followed, inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import graphs

import jax_cudnn as jc
import jax_cudnn.flax as jnn

TOKENS = (4, 6, 8)
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")
pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 (host) devices")


def of_layers(ours, theirs, *arguments):
    """Two functions of x and parameters, and the parameters."""
    parts = [nnx.split(cls(*arguments, rngs=nnx.Rngs(0))) for cls in (ours, theirs)]
    functions = [lambda x, state, graph=graph: nnx.merge(graph, state)(x) for graph, _ in parts]
    return functions, parts[0][1]


def of_functions():
    numbers = (((2,), (0,)), ((), ()))
    return [
        lambda x, w, f=f: f(x, w, numbers) for f in (jc.ops.dot_general, jax.lax.dot_general)
    ], inputs(8, 8)


PRODUCTS = {
    "dot_general": of_functions,
    "linear": lambda: of_layers(jnn.Linear, nnx.Linear, 8, 8),
    "linear general": lambda: of_layers(jnn.LinearGeneral, nnx.LinearGeneral, 8, (4, 2)),
    "linear relu": lambda: of_layers(
        functools.partial(jnn.Linear, activation="relu"), followed(nnx.Linear, "relu"), 8, 8
    ),
}
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def mesh(kind):
    return jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2))


def step(function, *arrays):
    """A result and the gradients of a sum of it, and how often devices exchange what for them."""

    def loss(*arrays):
        y = function(*arrays)
        return jnp.sum(jnp.sin(y.astype("float32"))), y

    made = jax.jit(jax.grad(loss, (*range(len(arrays)),), has_aux=True)).lower(*arrays).compile()
    return made(*arrays), collections.Counter(COLLECTIVE.findall(made.as_text()))


@KINDS
@pytest.mark.parametrize("name", PRODUCTS)
def test_tokens_are_sharded_as_for_lax(name, kind):
    functions, parameters = PRODUCTS[name]()
    for spec in (P(None, "data"), P("data", "model")):
        with mesh(kind):
            x = jax.device_put(inputs(*TOKENS), spec)
            (got, ours), (want, theirs) = (step(f, x, parameters) for f in functions)
        assert_near(got, want)
        assert ours <= theirs  # lax sums a weight's gradient over one axis after the other
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


@KINDS
def test_an_epilogue_beside_sharded_weights(kind):
    dtype = "bfloat16" if kind is AxisType.Auto else "float32"
    x, w = inputs(4, 8, 16, dtype=dtype), inputs(16, 8, dtype=dtype, seed=2) / 4
    scale, bias = inputs(8, seed=3), inputs(8, dtype=dtype, seed=4)
    residual = inputs(4, 8, 8, dtype=dtype, seed=5)

    def ours(x, w, scale, bias, residual):
        terms = {"scale": scale, "bias": bias, "residual": residual}
        return jc.ops.matmul(x, w, activation="gelu", **terms)

    def plain(*arrays):
        x, w, scale, bias, residual = (a.astype("float32") for a in arrays)
        return jax.nn.gelu(x @ w * scale + bias + residual)

    arrays = x, w, scale, bias, residual
    want, _ = step(plain, *arrays)
    for of_x, of_w, of_y in (
        (P("data"), P(None, "model"), P("data", None, "model")),
        (P(None, ("data", "model")), P(), P(None, ("data", "model"), None)),
    ):
        places = of_x, of_w, P(of_y[-1]), P(of_y[-1]), of_y
        with mesh(kind), jax.numpy_rank_promotion("raise"):
            got, _ = step(ours, *map(jax.device_put, arrays, places))
        assert_near(got, want, 1e-5 if dtype == "float32" else 2e-2)
        if kind is AxisType.Explicit:
            assert jax.typeof(got[1]).sharding.spec == of_y


@KINDS
def test_a_mesh_changes_no_graph(kind):
    x, w = inputs(*TOKENS), inputs(8, 8)
    plain = functools.partial(jc.ops.matmul, bias=jnp.ones(8))
    with mesh(kind):
        (graph,) = graphs(jax.make_jaxpr(plain)(x, w))
        sharded = jax.device_put(x, P(None, "model"))
        assert graphs(jax.make_jaxpr(plain)(sharded, w)) == [graph]
    assert [t.shape for t in graph.input_tensors] == [TOKENS, (8, 8), (1, 1, 8)]


def assert_alike(ours, theirs, *arrays):
    (got, _), (want, _) = step(ours, *arrays), step(theirs, *arrays)
    assert_near(got, want, 1e-5)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert jax.typeof(x).sharding == jax.typeof(y).sharding


NORMS = {name: {} for name in ("InstanceNorm", "LayerNorm", "RMSNorm", "BatchNorm")}
NORMS["GroupNorm"] = {"num_groups": 4}


@pytest.mark.parametrize("name", NORMS)
def test_normalizations_of_sharded_images(name):
    def run(of):
        return lambda x: getattr(of, name)(8, **NORMS[name], rngs=nnx.Rngs(0))(x)

    with mesh(AxisType.Explicit):
        for spec in (P(None, None, "data"), P("data", "model")):
            assert_alike(run(jnn), run(nnx), jax.device_put(inputs(4, 8, 8, 8), spec))


def test_the_batch_of_a_batch_norm_stays_where_its_scale_is_sharded_over_the_same_axis():
    x, scale = inputs(4, 6, 8), 1.5 + jnp.arange(8.0)

    def run(x, scale):
        known = jnp.zeros(8), jnp.ones(8)
        return jc.ops.batch_norm(x, scale, scale, *known, training=True)[0]

    want = step(run, x, scale)[0]
    with mesh(AxisType.Explicit):
        arrays = jax.device_put((x, scale), P("data"))
        got, moved = step(run, *arrays)
    assert_near(got, want)
    (dx, _), y = got
    assert dx.sharding.spec == y.sharding.spec == P("data", None, None)
    assert "all-to-all" not in moved


@pytest.mark.parametrize("where", ["outside of jit", "partly manual"])
def test_gradients_cross_programs_with_explicit_types(where):
    def gradients(f, x, w):
        run = jax.jit(lambda x, w: jnp.sin(f(x, w)))
        if where == "partly manual":
            how = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
            run = jax.shard_map(f, **how)
        grad = jax.grad(lambda x, w: run(x, w).sum(), (0, 1))
        return grad(x, w) if where == "outside of jit" else jax.jit(grad)(x, w)

    with mesh(AxisType.Explicit):
        x, w = jax.device_put((inputs(*TOKENS), inputs(8, 8)), (P("data"), P(None, "model")))
        got, want = (gradients(f, x, w) for f in (jc.ops.matmul, jnp.matmul))
    assert_near(got, want)
    for a, b in zip(got, want, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_what_explicit_axes_have_no_rule_for_is_an_error_with_a_fix():
    with mesh(AxisType.Explicit):
        x, w = jax.device_put((inputs(4, 8), inputs(8, 8)), (P("data"), P(reduced={"data"})))
        with pytest.raises(
            jc.GraphError, match=r"reduced or unreduced(?s:.*)jax\.sharding\.reshard"
        ):
            jax.jit(jc.ops.matmul)(x, w)
        x = jax.device_put(inputs(4, 8, 4, 32), P(reduced={"data"}))
        for function in (
            jc.ops.rotary_embedding,
            jc.ops.quantize_mxfp8,
            lambda x: jc.ops.ragged_dot(x[0, 0], x[0], jnp.zeros(8, int), transpose_rhs=True),
            lambda x: jc.ops.write_pages(x, x[:2], jnp.zeros((2, 1), int), jnp.zeros(2, int)),
            lambda x: jc.ops.conv(x[:, :2], x[:, :2, :, :4], strides=4),
        ):
            with pytest.raises(jc.GraphError, match="reduced or unreduced"):
                jax.jit(function)(x)
    x = jax.device_put(inputs(4, 8), jax.NamedSharding(w.sharding.mesh, P("data")))
    other = jax.make_mesh((4,), ("other",), axis_types=(AxisType.Explicit,))
    w = jax.device_put(inputs(8, 8), jax.sharding.NamedSharding(other, P("other")))
    with pytest.raises(jc.GraphError, match="on several meshes"):
        jax.jit(jc.ops.matmul)(x, w)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_under_a_mask_where_heads_are_sharded(heads):
    mask = (inputs(4, 1, 8, 8, seed=4) > 0).at[:, :, 3].set(heads == 2)  # or else a hidden row
    with mesh(AxisType.Explicit):
        operands = (
            jax.device_put(inputs(4, 8, n, 16, seed=i), P("data", None, "model"))
            for i, n in enumerate((4, heads, heads))
        )
        mask = jax.device_put(mask, P("data"))
        both = jc.ops.dot_product_attention, jax.nn.dot_product_attention
        assert_alike(*(functools.partial(f, mask=mask) for f in both), *operands)


def attention(*operands, **how):
    return jc.ops.dot_product_attention(*operands, **how)


KINDS_OF_TWO = AxisType.Explicit, AxisType.Auto
norm, KEY, ALL = jc.ops.rms_norm, jax.random.key(1), ("data", "model")
MASK = jnp.ones((4, 1, 8, 8), bool).at[:, :, 3].set(False)
TABLE, PLACES = jnp.arange(8, dtype="int32").reshape(4, 2), jnp.array([0, 1, 2, 5], "int32")
BESIDE_A_GRAPH = {  # functions, and the shapes of their arrays, with how they are sharded
    "rotary": (lambda x: norm(jc.ops.rotary_embedding(x)), {(4, 6, 2, 8): P("data")}),
    "loss": (
        lambda x, w: jc.ops.linear_cross_entropy(norm(x), w, jnp.zeros((4, 6), int)),
        {(4, 6, 8): P("data"), (8, 16): P(None, "model")},
    ),
    "int8, bias": (
        lambda x, b: jc.ops.quantized_matmul(norm(x), jnp.ones((8, 16), "int8"), b, bias=b),
        {(4, 8): P("data"), (16,): P("data")},
    ),
    "mxfp8": (  # three blocks on two devices
        lambda x: norm(jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x))),
        {(4, 2, 8, 96): P("data", None, None, "model")},
    ),
    "mxfp8, along tokens": (
        lambda x: norm(jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x, -2), -2)),
        {(4, 2, 40, 8): P("data", None, "model")},
    ),
    "pages": (
        lambda x, new: norm(jc.ops.write_pages(x, new, TABLE, PLACES)),
        {(8, 4, 2, 8): P("data", None, "model"), (4, 3, 2, 8): P("data")},
    ),
    "patches": (  # three of a column on four devices
        lambda x, w: jc.ops.conv(x, w, strides=4, padding="VALID"),
        {(2, 3, 12, 8): P(None, None, ALL), (8, 3, 4, 4): P(None, None, "data")},
    ),
    "transposed, bias": (
        lambda x, w, b: jc.ops.conv_transpose(x, w, bias=b, strides=2),
        {(4, 4, 4, 8): P("data"), (3, 3, 8, 16): P(), (16,): P("data")},
    ),
    "group_norm": (
        lambda x, s: jc.ops.group_norm(x, 4, s, s),
        {(4, 4, 8): P("data"), (8,): P("data")},
    ),
    "hidden rows": (
        lambda q, v: attention(q, q, v, mask=MASK),
        {(4, 8, 2, 16): P("data"), (4, 8, 2, 8): P(None, None, None, "data")},
    ),
    "ragged": (
        lambda x, w: jc.ops.ragged_dot(x, w, jnp.array([3, 5])),
        {(8, 8): P("data", "model"), (2, 8, 4): None},
    ),
    "ragged, in turn": (
        jax.vmap(lambda x, w: norm(jc.ops.ragged_dot(x, w, jnp.array([3, 5]))), (0, None)),
        {(4, 8, 8): P("data"), (2, 8, 4): P()},
    ),
    "sink, in turn": (
        jax.vmap(lambda x, s: attention(x, x, x, sink=s)),
        {(4, 2, 8, 2, 8): P("data"), (4, 2): P("data")},
    ),
    "dropout, in turn": (
        jax.vmap(lambda x: attention(x, x, x, dropout_rate=0.5, dropout_rng=KEY)),
        {(4, 2, 8, 2, 8): P("data")},
    ),
}


@pytest.mark.parametrize("name", BESIDE_A_GRAPH)
def test_functions_beside_a_graph_on_explicit_axes(name):
    function, shapes = BESIDE_A_GRAPH[name]
    arrays, indices = [inputs(*s, seed=i) for i, s in enumerate(shapes)], range(len(shapes))

    def loss(*arrays):
        y = function(*arrays)
        return jnp.sum(jnp.sin(y)), y

    def both(*arrays):
        of_program = jax.grad(jax.jit(loss), (*indices,), has_aux=True)(*arrays)
        return of_program, jax.jit(jax.grad(loss, (*indices,), has_aux=True))(*arrays)

    want = both(*arrays)
    with mesh(AxisType.Explicit):
        pairs = [*zip(arrays, shapes.values(), strict=True)]
        given = [x if spec is None else jax.device_put(x, spec) for x, spec in pairs]
        got = both(*given)
        for gradients, _ in got:
            for x, spec, gradient in zip(given, shapes.values(), gradients, strict=True):
                assert spec is None or gradient.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert_near(got, want)


@pytest.mark.parametrize("kinds", [KINDS_OF_TWO, KINDS_OF_TWO[::-1]], ids=["first", "second"])
def test_a_batch_norm_where_one_mesh_axis_is_explicit(kinds):
    x, s = inputs(4, 6, 8), inputs(8, seed=1)
    run = lambda x, s: jc.ops.batch_norm(x, s, s, s * 0, s * 0 + 1, training=True)[0]  # noqa: E731
    want, _ = step(run, x, s)
    axis = "data" if kinds[0] is AxisType.Explicit else "model"
    with jax.set_mesh(jax.make_mesh((2, 2), ALL, axis_types=kinds)):
        got, _ = step(run, *jax.device_put((x, s), P(axis)))
    assert_near(got, want)


MAPPED = {
    "matmul": (lambda x, w: jc.ops.matmul(x, w, activation="tanh"), (8, 16)),
    "vmap": (jax.vmap(lambda x, w: jc.ops.matmul(x, w, activation="tanh"), (0, None)), (8, 16)),
    "rotary": (lambda x, w: jc.ops.rotary_embedding(x[:, :, None] * w), (8,)),
    "loss": (
        lambda x, w: jc.ops.linear_cross_entropy(
            x, w, jnp.zeros(x.shape[:2], int), reduction="none"
        ),
        (8, 16),
    ),
    "int8": (lambda x, w: jc.ops.quantized_matmul(x, jnp.ones((8, 16), "int8"), w), (16,)),
    "attention": (
        lambda x, w: jc.ops.dot_product_attention(*[x[:, :, None] * y for y in w]),
        (3, 1, 8),
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_in_a_shard_map_of_one_axis_the_other_stays_explicit(name):
    function, shape = MAPPED[name]
    x, w = inputs(*TOKENS), inputs(*shape)

    def both(x, w):
        loss = lambda *given: jnp.sin(function(*given)).sum()  # noqa: E731
        return function(x, w), jax.grad(loss)(x, w), jax.grad(loss, 1)(x, w)

    want = both(x, w)
    with mesh(AxisType.Explicit):
        given = jax.device_put(x, P("data", "model")), jax.device_put(w, P())
        results = P("data"), P("data"), P()
        mapped = jax.shard_map(
            both, in_specs=(P("data"), P()), out_specs=results, axis_names={"data"}
        )
        got = jax.jit(mapped)(*given)
    assert_near(got, want)
    for y in got[:2]:
        assert y.sharding.spec[:2] == ("data", "model")


@KINDS
@pytest.mark.parametrize("shape", [(4, 1), (1, 1), (2, 2)])
def test_in_a_shard_map_of_one_axis_the_other_may_have_one_device(shape, kind):
    """For XLA there is nothing left to partition: it aborted."""
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    grid = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)
    given = inputs(8, 16), inputs(16, 16)

    def function(x, w):
        return jc.ops.matmul(jc.ops.rms_norm(x), w, activation="gelu")

    specs = P("data"), P()
    mapped = jax.shard_map(
        function, mesh=grid, in_specs=specs, out_specs=specs[0], axis_names={"data"}
    )
    placed = [jax.device_put(x, NamedSharding(grid, s)) for x, s in zip(given, specs, strict=True)]
    assert_near(step(mapped, *placed)[0], step(function, *given)[0])


OF_TYPES = {
    "rms_norm": lambda x, scale, w: jc.ops.rms_norm(x, scale),
    "layer_norm": lambda x, scale, w: jc.ops.layer_norm(x, scale, scale),
    "matmul": lambda x, scale, w: jc.ops.matmul(x, w, bias=scale, activation="gelu"),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", OF_TYPES)
def test_what_explicit_axes_take_on_two_devices_they_take_on_one(name, count):
    function, given = OF_TYPES[name], (inputs(8, 16), inputs(16), inputs(16, 16))
    want, _ = step(function, *given)
    grid = jax.make_mesh((count,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:count])
    with jax.set_mesh(grid):
        got, _ = step(function, *(jax.device_put(x, P("data")) for x in given))
    assert_near(got, want)
