"""Attention: its dropout, its derivatives of higher order, batches, and the graphs it makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import KEY, check_masks, drawing, kept, ours, qkv
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn.ops import attention_reference
from jax_cudnn.ops.ordered import Ordered

S = jax.ShapeDtypeStruct


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 2000)


@pytest.fixture
def normal(key):
    return drawing(key)


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks")
def test_forward_and_backward_drop_the_same_weights(monkeypatch):
    check_masks(monkeypatch)


def test_keys_of_all_kinds_and_one_program_for_all(normal):
    q, k, v = qkv(normal)
    calls = []

    @jax.jit
    def function(key):
        calls.append(key)
        return ours(q, k, v, dropout_rate=0.3, dropout_rng=key)

    typed, raw = function(jax.random.key(3)), function(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(typed, raw)
    assert (function(jax.random.key(4)) != typed).any()
    assert len(calls) == 2  # the key is no part of the program
    wide = ours(q, k, v, dropout_rate=0.3, dropout_rng=jax.random.key(3, impl="rbg"))
    assert np.isfinite(wide).all()
    np.testing.assert_array_equal(ours(q, k, v, dropout_rate=0.0), ours(q, k, v))


def plain(q, k, v, sink, keep):
    """In jnp, causal and with ALiBi, with a mask that is given."""
    n, s = q.shape[2], k.shape[1]
    distance = jnp.arange(s) - jnp.arange(s)[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    scores += jnp.array(oracle_attention.slopes(n)).reshape(n, 1, 1) * distance
    scores = jnp.where(distance <= 0, scores, -jnp.inf)
    beside = jnp.broadcast_to(sink.reshape(1, n, 1, 1), (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, beside], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights * keep, v)


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("rate", [0.0, pytest.param(0.4, marks=pytest.mark.long)])
def test_forward_mode_and_second_derivatives(rate, normal):
    sizes = {"b": 1, "t": 10, "s": 10, "n": 2, "k": 2, "h": 8}
    operands, along = ((*qkv(normal, **sizes), normal((2,))) for _ in range(2))
    keep = kept(*operands[:2], rate) / (1 - rate) if rate else 1.0

    def function(q, k, v, sink):
        dropout = {"dropout_rate": rate, "dropout_rng": KEY} if rate else {}
        return ours(q, k, v, sink=sink, is_causal=True, alibi=True, **dropout)

    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2, 3))  # noqa: E731

    @functools.partial(jax.jit, static_argnums=0)
    def found(f):
        along_gradient = lambda *x: sum(map(jnp.vdot, cubes(f)(*x), along))  # noqa: E731
        return (
            jax.jvp(f, operands, along)[1],
            jax.jvp(cubes(f), operands, along)[1],
            jax.grad(along_gradient, (0, 1, 2, 3))(*operands),
        )

    want = found(lambda *x: plain(*x, keep))
    for a, b in zip(jax.tree.leaves(found(function)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3)


VMAPS = {  # a function of what is mapped beside q, its axes, and examples of the folded call
    "all": (lambda q, bias: ours(q, q, q, bias), (1, 4, 9, 9), (0, 0), 3),
    "queries": (lambda q, bias: ours(q, q, q, bias), (1, 4, 9, 9), (0, None), 3),
    "a sink": (lambda q, sink: ours(q, q, q, sink=sink), (4,), (0, None), 3),
    "sinks": (lambda q, sink: ours(q, q, q, sink=sink), (4,), (0, 0), 1),
    "numbers of dropout": (
        lambda q, x: ours(q, q, q, dropout_rate=0.3, dropout_rng=x.view("uint32")), (2,), (0, 0), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_is_a_dimension_of_examples_or_a_loop(name, normal):
    f, shape, axes, examples = VMAPS[name]
    q, x = normal((3, 1, 9, 4, 8)), normal((3, *shape))
    x = x if axes[1] == 0 else x[0]
    for g in (f, jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0,) if "drop" in name else (0, 1))):
        each = [g(q[i], x[i] if axes[1] == 0 else x) for i in range(3)]
        want = jax.tree.map(lambda *x: jnp.stack(x), *each)
        got = jax.vmap(g, axes)(q, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    (spec,) = graphs_of(jax.vmap(f, axes), q, x)
    assert spec.tensor(dict(spec.calls[-1].inputs)["q"]).shape[0] == examples


def test_the_batch_may_be_sharded(normal):
    operands, sink = qkv(normal, b=8, t=8, s=8), normal((4,))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))

    def local(q, k, v, sink, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return ours(q, k, v, sink=sink, dropout_rate=0.3, dropout_rng=key)

    specs = *[P("data")] * 3, P(), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got = jax.jit(mapped)(*operands, sink, KEY)
    for i in range(8):
        given = {"dropout_rate": 0.3, "dropout_rng": jax.random.fold_in(KEY, i)}
        want = ours(*(x[i : i + 1] for x in operands), sink=sink, **given)
        np.testing.assert_allclose(got[i : i + 1], want, atol=1e-5)


def attend(deterministic=False, **given):
    options = jc.Options(deterministic=deterministic)
    total = lambda *x: ours(*x[:3], sink=x[3], options=options, **given)  # noqa: E731
    return jax.grad(lambda *x: total(*x).astype("float32").sum(), (0, 1, 2, 3))


def test_a_gradient_is_one_forward_and_one_backward(normal, monkeypatch):
    operands = (*qkv(normal, dtype="bfloat16"), normal((4,)))
    step = attend(dropout_rate=0.1, dropout_rng=KEY)
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    forward, backward = graphs_of(step, *operands)
    assert (methods(forward), methods(backward)) == (["sdpa"], ["sdpa_backward"])
    assert [t.dtype for t in forward.output_tensors] == ["bfloat16", "float32"]
    assert forward.is_paired
    assert backward.origin.family == forward.origin.family
    assert backward.calls[0].node.results == ("dQ", "dK", "dV", "dSink_token")
    (alone,) = graphs_of(ours, *operands[:3])
    assert len(alone.outputs) == 1  # no statistic, where nothing reads it
    # A deterministic one adds up the gradient of sinks in XLA.
    ordered = graphs_of(attend(True), *operands)[-1]
    assert sorted(methods(ordered)) == ["sdpa_backward", "sdpa_sink_gradient"]
    for a, b in zip(attend(True)(*operands), attend()(*operands), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), atol=1e-2)
    for flag in ("--xla_gpu_deterministic_ops=true", ""):
        monkeypatch.setenv("XLA_FLAGS", flag)
        calls = graphs_of(attend(return_residual=False), *operands)[-1].calls
        (node,) = [c.node for c in calls if c.node.method == "sdpa_backward"]
        assert node.use_deterministic_algorithm is bool(flag)


def test_each_backward_of_the_registry_is_settled():
    backwards = {n for name, n in REGISTRY.items() if "sdpa" in name and name.endswith("backward")}
    assert backwards == {node for node in REGISTRY.values() if issubclass(node, Ordered)}
    for node in backwards:
        own = node.create(**node.examples[0].attributes)
        assert (own.deterministic, own.settled().deterministic) == (False, True)


LONG = S((1, 8192, 4, 16), "float32")
ROWS = S((1, 32, 1, 4096), "float32")
MEMORY = {  # bytes of temporary arrays, where all scores would take more
    "gradient": (2**29, jax.grad(lambda q: ours(q, q, q, is_causal=True).sum()), LONG),
    "tangent of dropout": (
        2**29,
        lambda q: jax.jvp(lambda q: ours(q, q, q, dropout_rate=0.1, dropout_rng=KEY), (q,), (q,)),
        LONG,
    ),
    "bias of all queries": (
        2**28,
        jax.grad(lambda q, x: ours(q, q, q, x).sum(), (0, 1)),
        S((1, 4096, 32, 8), "float32"),
        ROWS,
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_linear_in_the_number_of_queries(name):
    most, function, *avals = MEMORY[name]
    compiled = jax.jit(function).lower(*avals).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < most
