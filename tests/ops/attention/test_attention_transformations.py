"""Attention: dropout, higher-order derivatives, and vmap of each attention function, and the graphs
that they create."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import KEY, check_masks, ours, qkv
from helpers import placed, same, whole
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry
from jax_cudnn.ops.attention import reference as attention_reference
from jax_cudnn.ops.attention.base import Deterministic

S = jax.ShapeDtypeStruct


def test_forward_and_backward_drop_the_same_weights(monkeypatch):
    """However many rows are computed at a time."""
    masks = []
    for scores in (2000, 2**24):
        monkeypatch.setattr(attention_reference, "_SCORES", scores)
        jax.clear_caches()
        masks.append(check_masks())
    np.testing.assert_array_equal(*masks)


@pytest.mark.several_gpus
@pytest.mark.skipif(len(jax.devices()) not in (2, 4, 8), reason="needs 2, 4 or 8 devices")
def test_blocks_of_queries_are_summed_in_a_shard_map(normal, blocks):
    arrays = qkv(normal, b=8)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), (AxisType.Auto,))
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    sharded = [placed(x, NamedSharding(mesh, P("x"))) for x in arrays]
    with jc.implementation("xla"):
        got, want = (
            jax.jit(jax.grad(lambda *x, f=f: f(*x).sum(), (0, 1, 2)))(*given)
            for f, given in ((mapped, sharded), (ours, arrays))
        )
    tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-2  # in TF32
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(whole(x, y), y, tolerance, tolerance)


def test_keys_of_all_kinds_and_one_program_for_all(normal):
    arrays, calls = qkv(normal), []

    @jax.jit
    def function(key):
        calls.append(key)
        return ours(*arrays, dropout_rate=0.3, dropout_rng=key)

    typed, raw = function(jax.random.key(3)), function(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(typed, raw)
    assert (function(jax.random.key(4)) != typed).any()
    assert len(calls) == 2  # the key is not part of the program


def in_one(qkv, bias=None):
    return jc.ops.dot_product_attention_qkv(qkv, 4, bias, is_causal=True)


ENDS = np.array([[0, 7, 7, 20, 31], [0, 3, 10, 11, 25], [5, 9, 20, 30, 40]], "int32")


def packed(q, k, v, ends=ENDS[0], **given):
    """Over one array of heads, (T, N, H) each."""
    return jc.ops.packed_dot_product_attention(
        q, k, v, query_offsets=jnp.asarray(ends), max_query_length=16, is_causal=True, **given
    )


TABLES = np.array([[[3, 1]], [[0, 4]], [[2, 2]]], "int32")
LENGTHS = np.array([[7], [2], [0]], "int32")


def paged(q, k, v, table=TABLES[0], lengths=LENGTHS[0], **given):
    given |= {"page_table": jnp.asarray(table), "key_value_seq_lengths": jnp.asarray(lengths)}
    return jc.ops.paged_dot_product_attention(q, k, v, **given, is_causal=True)


def scaled(s, b, h, i, j, a):
    return 2 * jnp.tanh(s * a) - (j > i) * 3.0


def of_each(s, b, h, i, j, a):
    return s * a * (1 + b)


def modified(q, k, v, a, change=scaled):
    return ours(q, k, v, score_mod=change, score_mod_operands=(a,))


FEW = [(40, 2, 4), (40, 1, 4), (40, 1, 4)]
PAGES = [(1, 2, 2, 4), (5, 4, 1, 4), (5, 4, 1, 4)]


HEADS, SINGLE = [(1, 9, 4, 8), (1, 11, 2, 8), (1, 11, 2, 8)], [(1, 9, 4, 8)]
VMAPS = {  # a function; shapes, or values; axes; batch of the one call, or of each of three
    "dense": (ours, [*HEADS, (1, 4, 9, 11)], (0, 0, 0, 0), 3),
    "a sink": (lambda q, x: ours(q, q, q, sink=x), [*SINGLE, (4,)], (0, None), 3),
    "sinks": (lambda q, x: ours(q, q, q, sink=x), [*SINGLE, (4,)], (0, 0), 1),
    "dropout": (
        lambda q, x: ours(q, q, q, dropout_rate=0.3, dropout_rng=x.astype("uint32")),
        [*SINGLE, np.arange(6).reshape(3, 2)], (0, 0), 1,
    ),
    "qkv": (in_one, [(2, 9, 8, 8), (1, 4, 9, 9)], (0, None), 6),
    "offsets": (packed, [*FEW, ENDS], (0, 0, 0, 0), 40),
    "dropped packed": (
        lambda q, k, v, x: packed(
            q, k, v, dropout_rate=0.3, dropout_rng=x.astype("uint32"), sink=jnp.ones(2)),
        [*FEW, np.arange(6).reshape(3, 2)], (0, None, None, 0), 40,
    ),
    "pages": (paged, [*PAGES, TABLES, LENGTHS], (0, None, None, 0, 0), 3),
    "pages, bias, sink": (
        lambda *x: paged(*x[:3], bias=x[3], sink=jnp.ones(2)),
        [*PAGES, (1, 2, 2, 8)], (0, None, None, 0), 3,
    ),
    "score_mod": (modified, [*HEADS, (1, 4, 1, 1)], (0, 0, 0, None), 3),
    "score_mod, bias": (
        lambda q, k, v, x: ours(q, k, v, x, score_mod=lambda s, *_: jnp.tanh(s)),
        [(2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8), (1, 4, 1, 1)], (0, 0, 0, None), 6,
    ),
    "score_mod of examples": (
        functools.partial(modified, change=of_each), [*HEADS, (1, 1, 9, 1)], (1, 0, 0, 0), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_is_a_dimension_of_examples_or_a_loop(name, normal):
    f, shapes, axes, examples = VMAPS[name]
    operands = [
        jnp.asarray(x) if isinstance(x, np.ndarray) else normal(x if a is None else (3, *x))
        for x, a in zip(shapes, axes, strict=True)
    ]
    turned = [x if a != 1 else jnp.swapaxes(x, 0, 1) for x, a in zip(operands, axes, strict=True)]
    each = [f(*(x if a is None else x[i] for x, a in zip(operands, axes, strict=True)))
            for i in range(3)]  # fmt: skip
    same(jax.vmap(f, axes)(*turned), jnp.stack(each), 1e-4)
    (spec,) = graphs_of(jax.vmap(f, axes), *turned)
    assert spec.tensor(spec.calls[-1].inputs[0][1]).shape[0] == examples


dropped = functools.partial(ours, is_causal=True, dropout_rate=0.1, dropout_rng=KEY)
LONG = S((1, 8192, 4, 16), "float32")


def of_packed(q, ends):
    return jc.ops.packed_dot_product_attention(
        q, q, q, query_offsets=ends, max_query_length=8192, is_causal=True
    ).sum()


def of_pages(q, k, table, lengths):
    return jc.ops.paged_dot_product_attention(q, k, k, table, key_value_seq_lengths=lengths)


MEMORY = {  # bytes of temporary arrays, where all scores (or keys) would take more
    "dense": (2**29, jax.grad(lambda q: ours(q, q, q, is_causal=True).sum()), LONG),
    "dropout": (2**29, lambda q: jax.jvp(lambda q: dropped(q, q, q, alibi=True), (q,), (q,)), LONG),
    "packed": (2**29, jax.grad(of_packed), S((16384, 1, 16), "float32"), S((65,), "int32")),
    "pages": (
        2**29, of_pages, S((64, 1, 8, 128), "f4"), S((8200, 64, 8, 128), "f4"),
        S((64, 128), "int32"), S((64,), "int32"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_linear_in_the_number_of_tokens(name):
    most, function, *avals = MEMORY[name]
    compiled = jax.jit(function).lower(*avals).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < most


def test_a_gradient_is_one_forward_and_one_backward(normal, monkeypatch):
    operands = (*qkv(normal, dtype="bfloat16"), normal((4,)))

    def step(deterministic=False, **given):
        given |= {"options": jc.Options(deterministic=deterministic)}
        total = lambda *x: ours(*x[:3], sink=x[3], **given).astype("float32").sum()  # noqa: E731
        return jax.grad(total, (0, 1, 2, 3))

    random = step(dropout_rate=0.1, dropout_rng=KEY)
    assert primitives(jax.make_jaxpr(random)(*operands)).count("cudnn") == 2
    forward, backward = graphs_of(random, *operands)
    assert methods(forward) == ["sdpa"]
    assert methods(backward) == ["sdpa_backward", "sdpa_sink_gradient"]
    assert [t.dtype for t in forward.output_tensors] == ["bfloat16", "float32"]
    assert forward.is_paired
    assert backward.origin.family == forward.origin.family
    (plain,) = graphs_of(step(), *operands)[-1].calls  # without dropout, cuDNN's is right
    assert plain.node.results == ("dQ", "dK", "dV", "dSink_token")
    (alone,) = graphs_of(ours, *operands[:3])
    assert len(alone.outputs) == 1  # no statistic if nothing reads it
    # A deterministic one sums the gradient of sinks in XLA.
    ordered = graphs_of(step(True), *operands)[-1]
    assert sorted(methods(ordered)) == ["sdpa_backward", "sdpa_sink_gradient"]
    for flag in ("--xla_gpu_deterministic_ops=true", ""):
        monkeypatch.setenv("XLA_FLAGS", flag)
        calls = graphs_of(step(return_residual=False), *operands)[-1].calls
        (node,) = [c.node for c in calls if c.node.method == "sdpa_backward"]
        assert node.use_deterministic_algorithm is bool(flag)


def test_each_backward_of_the_registry_is_settled():
    nodes = registry()
    backwards = {nodes[name] for name in nodes if "sdpa" in name and name.endswith("backward")}
    assert backwards == {node for node in nodes.values() if issubclass(node, Deterministic)}
    for node in backwards:
        own = node.create(**node.examples[0].attributes)
        made = own.deterministic()
        assert made != own
        assert made.deterministic() == made
