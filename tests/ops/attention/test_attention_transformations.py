"""Attention: its dropout, derivatives of higher order and batches of each of its functions, and
the graphs that they make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import KEY, check_masks, kept, ours, qkv
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn.ops.ordered import Ordered

S = jax.ShapeDtypeStruct
theirs = jax.nn.dot_product_attention


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


# -- each of the functions -------------------------------------------------------------------------


def with_dropout(rate):
    """ALiBi, a sink and dropout, and the same in jnp with a mask that is given."""
    dropout = {"dropout_rate": rate, "dropout_rng": KEY} if rate else {}

    def function(q, k, v, sink):
        return ours(q, k, v, sink=sink, is_causal=True, alibi=True, **dropout)

    def plain(q, k, v, sink):
        n, s = q.shape[2], k.shape[1]
        distance = jnp.arange(s) - jnp.arange(s)[:, None]
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
        scores += jnp.array(oracle_attention.slopes(n)).reshape(n, 1, 1) * distance
        scores = jnp.where(distance <= 0, scores, -jnp.inf)
        beside = jnp.broadcast_to(sink.reshape(1, n, 1, 1), (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, beside], -1))[..., :-1]
        keep = kept(jnp.zeros(q.shape), jnp.zeros(k.shape), rate) if rate else 1.0
        return jnp.einsum("bnts,bsnh->btnh", weights * keep / (1 - rate), v)

    return function, plain, [(1, 10, 2, 8)] * 3 + [(2,)]


def in_one(qkv, bias=None):
    return jc.ops.dot_product_attention_qkv(qkv, 4, bias, is_causal=True)


ENDS = np.array([[0, 7, 7, 20, 31], [0, 3, 10, 11, 25], [5, 9, 20, 30, 40]], "int32")


def packed(q, k, v, ends=ENDS[0]):
    """Of one array of heads, (T, N, H) each."""
    return jc.ops.packed_dot_product_attention(
        q, k, v, query_offsets=jnp.asarray(ends), max_query_length=16, is_causal=True
    )


def plain_packed(*operands):
    parts = [slice(*ends) for ends in ((0, 7), (7, 20), (20, 31))]
    each = [theirs(*(x[part] for x in operands), is_causal=True) for part in parts]
    return jnp.concatenate([*each, jnp.zeros((9, *operands[0].shape[1:]))])


TABLES = np.array([[[3, 1]], [[0, 4]], [[2, 2]]], "int32")
LENGTHS = np.array([[7], [2], [0]], "int32")


def paged(q, k, v, table=TABLES[0], lengths=LENGTHS[0]):
    given = {"page_table": jnp.asarray(table), "key_value_seq_lengths": jnp.asarray(lengths)}
    return jc.ops.paged_dot_product_attention(q, k, v, **given, is_causal=True)


def plain_paged(q, k, v):
    k, v = (x[TABLES[0, 0]].reshape(1, 8, *x.shape[2:])[:, :7] for x in (k, v))
    return theirs(q, k, v, mask=jnp.tri(2, 7, 5, bool))


def scaled(s, b, h, i, j, a):
    return 2 * jnp.tanh(s * a) - (j > i) * 3.0


def of_each(s, b, h, i, j, a):
    return s * a * (1 + b)


def modified(q, k, v, a, change=scaled):
    return ours(q, k, v, score_mod=change, score_mod_operands=(a,))


def plain_modified(q, k, v, a):
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, 2, 2)) / q.shape[-1] ** 0.5
    scores = scaled(scores, 0, 0, jnp.arange(6)[:, None], jnp.arange(7), a)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), jnp.repeat(v, 2, 2))


FEW = [(40, 2, 4), (40, 1, 4), (40, 1, 4)]
PAGES = [(1, 2, 2, 4), (5, 4, 1, 4), (5, 4, 1, 4)]
DERIVATIVES = {
    "dense": with_dropout(0.0),
    "dropout": with_dropout(0.4),
    "qkv": (in_one, lambda x: theirs(*jnp.split(x, [4, 6], 2), is_causal=True), [(1, 6, 8, 4)]),
    "packed": (packed, plain_packed, FEW),
    "pages": (paged, plain_paged, PAGES),
    "score_mod": (
        modified, plain_modified, [(1, 6, 2, 4), (1, 7, 1, 4), (1, 7, 1, 4), (1, 2, 1, 1)],
    ),
    "fp8": (
        functools.partial(jc.ops.dot_product_attention_fp8, is_causal=True),
        functools.partial(theirs, is_causal=True),
        [(1, 12, 2, 16), (1, 12, 1, 16), (1, 12, 1, 16)],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "dropout")) for n in DERIVATIVES]
)
def test_forward_mode_and_second_derivatives(name, normal):
    function, plain, shapes = DERIVATIVES[name]
    operands, along = (tuple(map(normal, shapes)) for _ in range(2))

    @functools.partial(jax.jit, static_argnums=0)
    def found(f):
        cubes = jax.grad(lambda *x: jnp.sum(f(*x) ** 3), tuple(range(len(shapes))))
        first, second = (jax.jvp(g, operands, along)[1] for g in (f, cubes))
        if name == "fp8":
            return first, second
        products = lambda *x: sum(map(jnp.vdot, cubes(*x), along))  # noqa: E731
        return first, second, jax.grad(products, tuple(range(len(shapes))))(*operands)

    want = jax.tree.leaves(found(plain))
    for a, b in zip(jax.tree.leaves(found(function)), want, strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) < (0.3 if name == "fp8" else 1e-4)


HEADS, SINGLE = [(1, 9, 4, 8), (1, 11, 2, 8), (1, 11, 2, 8)], [(1, 9, 4, 8)]
VMAPS = {  # a function; shapes, or values; axes; examples of the one call, or of each of three
    "dense": (ours, [*HEADS, (1, 4, 9, 11)], (0, 0, 0, 0), 3),
    "a bias": (ours, [*HEADS, (1, 4, 9, 11)], (0, None, None, None), 3),
    "a sink": (lambda q, x: ours(q, q, q, sink=x), [*SINGLE, (4,)], (0, None), 3),
    "sinks": (lambda q, x: ours(q, q, q, sink=x), [*SINGLE, (4,)], (0, 0), 1),
    "dropout": (
        lambda q, x: ours(q, q, q, dropout_rate=0.3, dropout_rng=x.astype("uint32")),
        [*SINGLE, np.arange(6).reshape(3, 2)], (0, 0), 1,
    ),
    "qkv": (in_one, [(2, 9, 8, 8), (1, 4, 9, 9)], (0, None), 6),
    "packed": (packed, FEW, (0, None, None), 40),
    "offsets": (packed, [*FEW, ENDS], (0, 0, 0, 0), 40),
    "pages": (paged, [*PAGES, TABLES, LENGTHS], (0, None, None, 0, 0), 3),
    "other pages": (paged, PAGES, (None, 0, None), 1),
    "score_mod of heads": (
        modified, [(2, *x[1:]) for x in HEADS] + [(1, 4, 1, 1)], (0, 0, 0, 0), 2,
    ),
    "score_mod": (modified, [*HEADS, (1, 4, 1, 1)], (0, 0, 0, None), 3),
    "score_mod of examples": (
        functools.partial(modified, change=of_each), [*HEADS, (1, 1, 9, 1)], (1, 0, 0, 0), 1,
    ),
}  # fmt: skip


RARE = ("other pages", "sinks", "packed", "score_mod of heads", "a bias")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in RARE)) for n in VMAPS]
)
def test_vmap_is_a_dimension_of_examples_or_a_loop(name, normal):
    f, shapes, axes, examples = VMAPS[name]
    operands = [
        jnp.asarray(x) if isinstance(x, np.ndarray) else normal(x if a is None else (3, *x))
        for x, a in zip(shapes, axes, strict=True)
    ]
    turned = [x if a != 1 else jnp.swapaxes(x, 0, 1) for x, a in zip(operands, axes, strict=True)]
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
    total = lambda *x: (lambda out: (jnp.sum(out**2), out))(f(*x))  # noqa: E731
    found = jax.jit(jax.value_and_grad(total, floats, has_aux=True))
    each = [found(*(x if a is None else x[i] for x, a in zip(operands, axes, strict=True)))
            for i in range(3)]  # fmt: skip
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    got = jax.vmap(found, axes)(*turned)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    (spec,) = graphs_of(jax.vmap(f, axes), *turned)
    assert spec.tensor(spec.calls[-1].inputs[0][1]).shape[0] == examples


LONG = S((1, 8192, 4, 16), "float32")


def tangent_of_dropout(q):
    return jax.jvp(lambda q: ours(q, q, q, dropout_rate=0.1, dropout_rng=KEY), (q,), (q,))


def of_packed(q, ends):
    run = jc.ops.packed_dot_product_attention
    return run(q, q, q, query_offsets=ends, max_query_length=8192, is_causal=True).sum()


def of_pages(q, k, table, lengths):
    return jc.ops.paged_dot_product_attention(q, k, k, table, key_value_seq_lengths=lengths)


MEMORY = {  # bytes of temporary arrays, where all scores (or keys) would take more
    "dense": (2**29, jax.grad(lambda q: ours(q, q, q, is_causal=True).sum()), LONG),
    "dropout": (2**29, tangent_of_dropout, LONG),
    "a bias of all queries": (
        2**28, jax.grad(lambda q, x: ours(q, q, q, x).sum(), (0, 1)),
        S((1, 4096, 32, 8), "float32"), S((1, 32, 1, 4096), "float32"),
    ),
    "score_mod": (
        2**29, jax.grad(lambda q, a: modified(q, q, q, a).sum()), LONG, S((1, 1, 8192, 1), "f4"),
    ),
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


# -- graphs ----------------------------------------------------------------------------------------


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
