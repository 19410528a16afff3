"""Graphs over a mesh of 8 host devices: values of the unsharded program, collectives of jnp."""

import collections
import concurrent.futures
import functools
import gc
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python, whole
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core import partition
from jax_cudnn._core.planning import placement

COLLECTIVE = re.compile(
    r" = (.+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
)
pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def mlp(product):
    def run(x, w, b, v, c):
        return product(product(x, w, b, jax.nn.relu, 0), v, c, lambda y: y, x)

    return run


def fused(x, w, b, activation, residual):
    activation = "relu" if activation is jax.nn.relu else None
    residual = None if isinstance(residual, int) else residual
    return jc.ops.matmul(x, w, bias=b, activation=activation, residual=residual)


def conv(function, **options):
    dims = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: function(x, w, padding="SAME", dimension_numbers=dims, **options)


def plain_conv(x, w):
    return jax.nn.relu(conv(jax.lax.conv_general_dilated, window_strides=(1, 1))(x, w))


def attention(function):
    return lambda q, k, v: function(q, k, v, is_causal=True)


def softcapped(q, k, v):
    scores = 30 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]) / 30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


capped = functools.partial(jc.ops.dot_product_attention, score_mod=jc.ops.score_mods.softcap(30.0))
product = jc.graph(lambda g, x, w: g.matmul(x, w))
relu = jc.graph(lambda g, x, w: g.relu(g.matmul(x, w)))
total = jc.graph(lambda g, x, y: g.relu(g.add(x, y)))
X, W, IMAGE, Q = (8, 16, 32), (1, 32, 8), (8, 8, 8, 16), (4, 16, 8, 8)
FILTER, K, HEADS = (3, 3, 16, 8), (4, 16, 4, 8), P("data", None, "model")
MLP = X, (32, 64), (64,), (64, 32), (32,)
CASES = {  # ours, jnp, shapes, and how operands are sharded
    "matmul of a sharded batch": (product, jnp.matmul, (X, W), (P("data"), P())),
    "columns": (product, jnp.matmul, (X, W), (P("data"), P(None, None, "model"))),
    "rows": (relu, lambda x, w: jax.nn.relu(x @ w), (X, W), (HEADS, P(None, "model"))),
    "elementwise": (total, lambda x, y: jax.nn.relu(x + y), (X, X), (P("data", "model"),) * 2),
    "rms norm": (jc.ops.rms_norm, rms, (X, (32,)), (P("data"), P())),
    "mlp": (mlp(fused), mlp(lambda x, w, b, f, r: f(x @ w + b) + r), MLP,
            (P("data"), P(None, "model"), P("model"), P("model"), P())),
    "tokens": (mlp(fused), mlp(lambda x, w, b, f, r: f(x @ w + b) + r), MLP,
               (P("data", "model"), P(), P(), P(), P())),
    "attention": (attention(jc.ops.dot_product_attention),
                  attention(jax.nn.dot_product_attention), (Q, K, K), (HEADS,) * 3),
    "softcap": (capped, softcapped, (Q,) * 3, (HEADS,) * 3),
    "channels": (conv(jc.ops.conv, activation="relu"), plain_conv,
                 (IMAGE, FILTER), (P("data", None, None, "model"), P(None, None, "model"))),
}  # fmt: skip
AMBIGUOUS = {
    "rows",
    "mlp",
    "attention",
    "softcap",
    "channels",
    "tokens",
}  # for jnp, on explicit axes


def step(function, count):
    loss = lambda *xs: jnp.sum(jnp.sin(function(*xs)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, tuple(range(count))))


def moved(compiled):
    """The float32 numbers that each kind of collective makes."""
    found = collections.Counter()
    for made, kind in COLLECTIVE.findall(compiled.as_text()):
        shapes = re.findall(r"f32\[([\d,]*)\]", made)
        found[kind] += sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)
    return found


@pytest.fixture
def kind(request):
    """How arrays are sharded; GSPMD is what partitioned before Shardy."""
    jax.config.update("jax_use_shardy_partitioner", request.param != "GSPMD")
    yield request.param
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize("kind", ["auto", "explicit", "partly manual", "GSPMD"], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_collectives_and_values(name, kind):
    ours, plain, shapes, shardings = CASES[name]
    axes = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axes)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    values = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    want = step(plain, len(shapes))(*values)
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(values, shardings, strict=True)
    ]
    found = []
    for function in (ours, plain):
        if kind == "partly manual":
            specs = tuple(P("data") if "data" in spec else P() for spec in shardings)
            function = jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=P("data"), axis_names={"data"}
            )
        elif kind == "explicit" and name in AMBIGUOUS and function is plain:
            continue  # jnp asks how the result is sharded
        compiled = step(function, len(shapes)).lower(*arrays).compile()
        found.append(moved(compiled))
        for got, wanted in zip(*map(jax.tree.leaves, (compiled(*arrays), want)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-3)
    assert found[0] <= found[-1]  # of tokens over two axes it sums weights once, jnp twice
    assert found[0]["all-gather"] == 0


def test_an_offset_with_other_readers_is_not_advanced():
    """Each device draws for all examples then."""

    @jc.graph
    def crossed(g, q, a, b):
        one = g.sdpa(q, q, q, dropout_probability=0.3, seed=a, offset=b)[0]
        return g.add(one, g.sdpa(q, q, q, dropout_probability=0.3, seed=b, offset=a)[0])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    words = [jnp.array(n, jnp.uint32).reshape(1, 1, 1, 2) for n in ([3, 5], [9, 1])]
    q = jax.random.normal(jax.random.key(0), (8, 2, 16, 8))
    got = jax.jit(crossed)(jax.device_put(q, NamedSharding(mesh, P("data"))), *words)
    np.testing.assert_allclose(got, crossed(q, *words), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "part"), [("float16", "float32"), ("bfloat16", "bfloat16")])
def test_parts_of_sums_are_rounded_in_bfloat16_alone(dtype, part, caplog):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = jnp.full((8, 4096), 8, dtype), jnp.full((4096, 8), 3.05, dtype)
    bias = jnp.full((8,), -60000, dtype)  # the sum is beyond the range of float16
    run = jax.jit(lambda *xs: jc.ops.matmul(*xs[:2], bias=xs[2], activation="relu"))
    placed = [jax.device_put(x, NamedSharding(mesh, s))
              for x, s in ((x, P(None, "data")), (w, P("data")), (bias, P()))]  # fmt: skip
    with caplog.at_level("DEBUG", "jax_cudnn"):
        got = run(*placed)
    assert f"matmul.0::C: {part}[8,8]" in caplog.text
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, run(x, w, bias))), 0.02)


DROPPED = P("data"), P(("data", "model")), P("data", None, "model")


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", DROPPED)
def test_dropout_is_that_of_the_unsharded_program(spec, types):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(types,) * 2)
    q, k, key = (8, 16, 8, 8), (8, 16, 4, 8), jax.random.key(5)
    run = step(
        functools.partial(jc.ops.dot_product_attention, dropout_rate=0.4, dropout_rng=key), 3
    )
    values = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((q, k, k))]
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in values]
    compiled = run.lower(*arrays).compile()
    for got, want in zip(*map(jax.tree.leaves, (compiled(*arrays), run(*values))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert ("model" in spec) == bool(moved(compiled)["all-gather"])  # of the heads


@pytest.mark.parametrize("drops", [False, True])
def test_heads_of_packed_attention_stay_sharded(drops):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    offsets = jnp.array([0, 10, 32], "int32")  # in tokens; a graph's count elements of all heads
    dropout = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1)}
    more = dropout if drops else {"sink": jnp.ones(8)}
    run = step(lambda *xs: jc.ops.packed_dot_product_attention(
        *xs, query_offsets=offsets, max_query_length=32, is_causal=True, **more), 3)  # fmt: skip
    values = [jax.random.normal(jax.random.key(i), (32, n, 8)) for i, n in enumerate((8, 4, 4))]
    arrays = [jax.device_put(x, NamedSharding(mesh, P(None, "model"))) for x in values]
    compiled = run.lower(*arrays).compile()
    for got, want in zip(*map(jax.tree.leaves, (compiled(*arrays), run(*values))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert bool(moved(compiled)["all-gather"]) == drops  # a mask is one of all heads


def test_weights_are_gathered_once_for_a_step():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    arrays = [over(mesh, shape, "data") for shape in (X, (32, 64), (64,))]
    ours, plain = (
        moved(step(function, 3).lower(*arrays).compile())
        for function in (lambda x, w, b: jc.ops.matmul(x, w, bias=b), lambda x, w, b: x @ w + b)
    )
    assert ours["all-gather"] == plain["all-gather"] == 32 * 64 + 64


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_a_batch_comes_before_the_shards_of_a_larger_weight(spec, types):
    """Else a large result would be a sum of parts, and types would depend on sizes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    values = jnp.sin(jnp.arange(16.0 * 64)).reshape(16, 64), jnp.eye(64) + 0.5
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(values, (P("data"), spec), strict=True)
    ]
    twice = lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: x + jc.ops.matmul(x, w), x)  # noqa: E731
    run = step(twice, 2)
    compiled = run.lower(*arrays).compile()
    for got, want in zip(*map(jax.tree.leaves, (compiled(*arrays), run(*values))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert jax.jit(twice)(*arrays).sharding.spec[0] == "data"
    assert moved(compiled)["all-gather"] % (64 * 64) == moved(compiled)["all-to-all"] == 0


MAPPED = {  # function, shape and sharding of what is mapped, and of what is not
    "product": (jc.ops.matmul, X, P("data"), (32, 64), P(None, "model")),
    "conv": (
        conv(jc.ops.conv),
        (4, 2, *IMAGE[1:]),
        P("data"),
        FILTER,
        P(None, None, None, "model"),
    ),
    "an inner dimension": (jc.ops.matmul, (3, *X), P(None, "data"), (32, 64), P(None, "model")),
    "attention": (
        *(lambda q, scale: jc.ops.dot_product_attention(q, q, q * scale), (2, *Q)),
        *(P("data", None, None, "model"), (8,), P()),
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_on_explicit_axes_gathers_nothing(name):
    function, *given = MAPPED[name]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    values = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(given[::2])]
    run = step(jax.vmap(function, (0, None)), 2)
    want = run(*values)
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(values, given[1::2], strict=True)
    ]
    compiled = run.lower(*arrays).compile()
    for got, wanted in zip(*map(jax.tree.leaves, (compiled(*arrays), want)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-3)
    assert moved(compiled)["all-gather"] == 0
    out = jax.typeof(jax.jit(jax.vmap(function, (0, None)))(*arrays)).sharding.spec
    assert (out[given[1].index("data")], "model" in out) == ("data", True)


def test_a_call_says_all_that_determines_it_and_is_forgotten_with_its_program():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("data")))

    def call(build):
        lowered = jax.jit(jc.graph(build)).lower(x)
        return lowered, re.search(r'backend_config = "([^"]*)"', lowered.as_text())[1]

    (first, text), (second, same), (_, other) = map(
        call, (lambda g, x: g.relu(x), lambda g, x: g.relu(x), lambda g, x: g.abs(x))
    )
    assert text == same != other
    assert text.encode() in partition._known
    del second
    gc.collect()
    first.compile()
    del first, _
    jax.clear_caches()
    gc.collect()
    assert text.encode() not in partition._known


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_large_gather_is_told_once(kind, caplog):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, P("data", "model"))  # of the tokens
    q = jax.ShapeDtypeStruct((2, 2048, 2, 128 + len(kind.name)), "float32", sharding=sharding)
    attend = jax.jit(lambda q: jc.ops.dot_product_attention(q, q, q))
    with caplog.at_level("WARNING", "jax_cudnn"), jax.set_mesh(mesh):
        for _ in range(2):
            attend.lower(q).compile()
            jax.clear_caches()
    (record,) = caplog.records
    assert "along dimension 2, which model shards" in record.message
    assert "the operation needs all of it" in record.message
    assert "what to do: shard another dimension\n" in record.message  # not shard_map: wrong there
    assert "test_partition.py" in record.message


@pytest.mark.parametrize("spec", [P("b"), P("a"), P(("a", "b")), P("b", "a")])
def test_dropout_next_to_a_manual_axis_is_that_of_one_device(spec):
    """XLA may name the axes of a sharding otherwise there, so no device knows its place."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    q = jax.random.normal(jax.random.key(0), (4, 8, 2, 8))

    def attend(q):
        key = jax.random.key(1)
        return jc.ops.dot_product_attention(q, q, q, dropout_rate=0.5, dropout_rng=key)

    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"c"}, check_vma=False
    )
    got, want = jax.jit(mapped)(jax.device_put(q, NamedSharding(mesh, spec))), attend(q)
    np.testing.assert_allclose(whole(got, want), want, 1e-5, 1e-5)


@pytest.mark.deviceless
def test_a_gather_in_an_accelerated_function_names_its_line(caplog):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "data"))
    q = jax.ShapeDtypeStruct((2, 2048, 3, 64), "bfloat16", sharding=sharding)

    def attend(q):
        return jax.nn.dot_product_attention(q, q, q)

    with caplog.at_level("WARNING", "jax_cudnn"), jc.target("H200"):
        jax.jit(jc.accelerate(attend)).lower(q).compile()
    assert f"test_partition.py:{attend.__code__.co_firstlineno + 1}" in caplog.text


@pytest.mark.deviceless
def test_what_follows_a_sum_has_another_note():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    a, b = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((8, 16, 32), P(None, None, "data")), ((32, 64), P("data")))
    )
    plans = jc.plans(lambda a, b: jc.ops.matmul(a, b, activation="gelu"), a, b, gpus=["H200"])
    notes = plans["H200"].notes
    assert notes["matmul"] == "data shards a[2], b[0]; devices sum matmul.0::C"
    assert notes["matmul 2"] == "each device, after that exchange"


@pytest.mark.deviceless
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_scale_is_gathered_for_a_norm_of_each_device(types):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    x, scale = (
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, P("data")))
        for shape in ((4096, 1024), (1024,))
    )
    plans = jc.plans(jc.ops.rms_norm, x, scale, gpus=["H200"])["H200"]
    assert plans["rms_norm"].spec.input_tensors[0].shape == (512, 1024)
    assert plans["rms_norm"].execution_plans
    assert "scale, bfloat16[1, 1024], is gathered" in plans.notes["rms_norm"]


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["auto", "explicit", "in_shardings", "manual"])
def test_plans_are_those_of_one_device(kind):
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    shapes, specs = ((8, 256, 128), (128, 512), (512,)), (P("data"), P(None, "model"), P())
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    f, given = lambda x, w, s: jc.ops.rms_norm(jc.ops.matmul(x, w), s), shardings
    if kind == "in_shardings":
        f, given = jax.jit(f, in_shardings=shardings), [None] * 3
    if kind == "manual":
        f = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))
    x = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=own)
        for shape, own in zip(shapes, given, strict=True)
    ]
    with jc.target("H200"):
        plans = jc.plans(f, *x)
    columns = 512 if kind == "manual" else 128
    assert [t.shape for t in plans["matmul"].spec.input_tensors] == [(4, 256, 128), (128, columns)]
    if kind != "manual":
        assert plans.notes["matmul"].startswith("data shards a[0], matmul.0::C[0]; model shards b")
    if kind == "explicit":
        assert "exchanges statistics" in plans.notes["rms_norm"]
        assert not plans["rms_norm"].execution_plans
        return
    assert plans["rms_norm"].spec.input_tensors[0].shape == (4, 256, 512)
    if kind == "manual":
        assert not plans.notes
        return
    assert "is gathered along dimension 2, which model shards" in plans.notes["rms_norm"]
    assert "1,048,576 bytes on each device: the operation needs all of it" in str(plans)
    assert "on the mesh: data shards" in str(plans.explain())


def test_without_a_mesh_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    found = jc.plans(lambda x: relu(x, x), jax.ShapeDtypeStruct((8, 8), "float32"), gpus=["H200"])
    assert not found["H200"].notes


CACHED = """
import collections
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_cudnn as jc

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.full((8, 4), -1.0), NamedSharding(mesh, P("data")))
graphs = jc.graph(lambda g, x: g.relu(x)), jc.graph(lambda g, x: g.abs(x))
for graph in graphs[:NUMBER]:
    lowered = jax.jit(lambda x: graph(x)).lower(x)
    seen.clear()
    compiled = lowered.compile()
    print(seen["cache_hits"], seen["cache_misses"], float(compiled(x).max()))
"""


def test_the_persistent_cache_serves_the_program_of_the_same_graph_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    first, second = (python(CACHED.replace("NUMBER", n)).stdout.splitlines() for n in "12")
    assert first == ["0 1 0.0"]
    assert second == ["1 0 0.0", "0 1 1.0"]


@pytest.mark.deviceless
def test_plans_leave_the_persistent_cache_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    planned = CACHED.replace("graphs[:NUMBER]", "graphs[:1]").replace(
        "for graph", 'jc.plans(graphs[0], x, gpus=["H200"])\nseen.clear()\nfor graph', 1
    )
    assert python(planned).stdout.splitlines() == ["0 1 0.0"]  # kept by the compilation alone
    assert python(planned).stdout.splitlines() == ["1 0 0.0"]


@pytest.mark.deviceless
def test_lowering_registers_what_a_program_from_the_cache_calls():
    lowered = python("""
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        import jax_cudnn as jc
        from jax_cudnn._core import ffi

        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        x = jax.ShapeDtypeStruct((8, 64, 64), "bfloat16", sharding=NamedSharding(mesh, P("data")))
        with jc.target("H200"):
            jax.jit(jc.ops.matmul).trace(x, x).lower(lowering_platforms=("cuda",))
        print(ffi.register.cache_info().currsize)
    """)
    assert lowered.stdout == "1\n"


def over(mesh, shape, *spec, dtype="float32"):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_settings_of_references_are_in_the_call():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, key = over(mesh, (8, 4, 2, 8), "data"), jax.random.wrap_key_data(jnp.array([1, 2], "uint32"))

    def lowered(setting):
        drop = lambda q: jc.ops.dot_product_attention(  # noqa: E731
            q, q, q, dropout_rate=0.5, dropout_rng=key
        )
        with jax.threefry_partitionable(setting):
            made = jax.jit(drop).lower(x)
        return made, made.compile()

    kept = lowered(False)
    drawn = jax.device_put(jax.random.normal(jax.random.key(0), x.shape), x.sharding)
    for setting, (_, compiled) in ((True, lowered(True)), (False, kept)):
        with jax.threefry_partitionable(setting):
            want = jax.jit(lambda q: jc.ops.dot_product_attention(
                q, q, q, dropout_rate=0.5, dropout_rng=key))(jax.device_get(drawn))  # fmt: skip
        np.testing.assert_allclose(compiled(drawn), want, rtol=1e-5, atol=1e-5)


@pytest.mark.deviceless
def test_plans_do_not_depend_on_what_was_compiled_before():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sizes = 24, 40, 56
    double = jc.graph(lambda g, x: g.add(x, x))

    def shapes(size):
        with jc.target("H200"):
            plans = jc.plans(double, over(mesh, (8, size), "data"))
        return [[t.shape for t in plan.spec.input_tensors] for plan in plans.values()]

    jax.jit(lambda x: double(x)).lower(over(mesh, (8, 24), "data")).compile()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert [*pool.map(shapes, sizes)] == [[[(1, size)]] for size in sizes]


@pytest.mark.deviceless
def test_warmup_plans_the_graphs_of_one_device(no_plans, monkeypatch):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    planned, decide = [], placement.decide

    def deciding(spec, *given):
        planned.append(spec)
        return decide(spec, *given)

    monkeypatch.setattr(placement, "decide", deciding)
    with jc.target("H200"):
        jc.warmup(relu, over(mesh, (64, 16, 72), "data"), over(mesh, (1, 72, 8)))
        jc.warmup(jnp.sin, over(mesh, (64, 16), "data"))  # without a graph
    assert {spec.input_tensors[0].shape for spec in planned} == {(8, 16, 72)}
    planned.clear()
    drop = functools.partial(
        jc.ops.dot_product_attention, dropout_rate=0.1, dropout_rng=jax.random.key(0)
    )
    with jc.target("H200"):  # also the related graphs, which must run where this one does
        jc.warmup(jax.grad(lambda q: drop(q, q, q).astype("float32").sum()),
                  over(mesh, (16, 128, 4, 64), "data", dtype="bfloat16"))  # fmt: skip
    shapes = {next(t.shape for t in spec.input_tensors if t.shape[-1] == 64) for spec in planned}
    assert shapes == {(2, 4, 128, 64)}


def test_groups_that_shards_do_not_divide_are_told(caplog):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = over(mesh, (8, 64, 64, 64), None, None, None, "data"), over(mesh, (3, 3, 16, 64))
    dims = ("NHWC", "HWIO", "NHWC")
    grouped = lambda x, w: jc.ops.conv(x, w, dimension_numbers=dims, groups=4)  # noqa: E731
    with caplog.at_level("WARNING", "jax_cudnn"):
        jax.jit(grouped).lower(x, w).compile()
    assert "8 shards do not divide its 4 parts" in caplog.text
