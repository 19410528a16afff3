"""Functions of attention's scores: what they mean, their derivatives, batches and errors."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import qkv
from attention_table import documents, of_score, prefix, softcap
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn.ops import score_mod_written

S = jax.ShapeDtypeStruct
ours = jc.ops.dot_product_attention
SCORES_AT_A_TIME = 1500
B, T, K, N = 2, 20, 24, 4  # examples, queries, keys, heads


def plain(q, k, v, *operands, change, seen=True, bias=0.0):
    """Attention with a function of the scores; a query that sees no key gives 0."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = q.shape[-1] ** -0.5 * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    changed = change(scores, *places(scores.shape), *operands)
    scores = jnp.where(seen, changed + bias, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    each = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))
    total = each.sum(-1, keepdims=True)
    weights = each / jnp.where(total > 0, total, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


def places(shape):
    return [jnp.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(shape)]  # fmt: skip


def causal(score, b, h, q, kv):
    return jnp.where(q >= kv, score, -jnp.inf)


def alibi(score, b, h, q, kv):
    return score - 2.0 ** (-8 * (h + 1) / N) * (q - kv)


def biased(score, b, h, q, kv, table):
    return score + table


def scaled(score, b, h, q, kv, scale):
    return score * jnp.exp(scale)


def inputs(normal, dtype="float32", b=B):
    return tuple(qkv(normal, b, T, K, N, 2, 8, dtype=dtype))


def agree(normal, f, g, operands, limit=3e-4):
    """Results, and gradients by all operands of floats."""
    along = normal(jax.eval_shape(g, *operands).shape)

    @functools.partial(jax.jit, static_argnums=0)
    def found(f, *operands):
        loss = lambda *x: (lambda out: (jnp.vdot(out, along), out))(f(*x))  # noqa: E731
        return jax.value_and_grad(loss, range(len(operands)), has_aux=True)(*operands)

    want = jax.tree.leaves(found(g, *operands))
    for a, b in zip(jax.tree.leaves(found(f, *operands)), want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=limit, rtol=1e-4)


AT, J = np.arange(T)[:, None], np.arange(K)[None, :]
SLOPES = (2.0 ** (-8 * np.arange(1, N + 1) / N)).reshape(N, 1, 1)
NUMBERS = np.sort(np.random.default_rng(0).integers(0, 3, K))
DOCUMENTS = tuple(jnp.asarray(NUMBERS[:n], "int32").reshape(s)
                  for n, s in ((T, (1, 1, T, 1)), (K, (1, 1, 1, K))))  # fmt: skip
BELOW = {"is_causal": True, "bottom_right": True}
ENDS = np.array([[20, 7], [24, 9]]).reshape(2, B, 1, 1, 1)
CASES = {  # a function, the same in other words, operands' shapes, options, what a query sees
    "softcap, window": (
        softcap(2.0), lambda s, *_: 2 * jnp.tanh(s / 2), (), {"local_window_size": (4, 2)},
        (J >= AT - 4) & (J <= AT + 2),
    ),
    "causal": (causal, lambda s, *_: s, (), {}, J <= AT),
    "alibi, lengths": (
        alibi, lambda s, *_: s - SLOPES * (AT - J), (), {**BELOW, "lengths": True},
        (AT < ENDS[0]) & (J < ENDS[1]) & (J <= AT + ENDS[1] - ENDS[0]),
    ),
    "relative bias": (biased, lambda s, *x: s + x[-1], ((1, N, T, K),), BELOW, J <= AT + K - T),
    "scale of a head": (scaled, lambda s, *x: s * jnp.exp(x[-1]), ((N, 1, 1),), {}, True),
    "documents": (
        documents, lambda s, *_: s, DOCUMENTS, {}, NUMBERS[:T, None] == NUMBERS,
    ),
    "prefix": (prefix(5), lambda s, *_: s, (), {}, (J <= AT) | (J < 5)),
    "beside alibi": (  # XLA runs it, with distances by the band's own corner
        softcap(2.0), lambda s, *_: 2 * jnp.tanh(s / 2) - SLOPES * (AT + K - T - J), (),
        {**BELOW, "alibi": True}, J <= AT + K - T,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, normal):
    function, change, shapes, options, seen = CASES[name]
    fixed = name == "documents"
    operands = [*shapes] if fixed else [normal(shape) for shape in shapes]
    bias, options = normal((1, N, T, K)), dict(options)
    if options.pop("lengths", False):
        queries, keys = (jnp.array(x.ravel(), "int32") for x in ENDS)
        options |= {"query_seq_lengths": queries, "key_value_seq_lengths": keys}

    def call(q, k, v, bias, *x):
        x = operands if fixed else x
        return ours(q, k, v, bias, score_mod=function, score_mod_operands=x, **options)

    def want(q, k, v, bias, *x):
        return plain(q, k, v, *x, change=change, seen=seen, bias=bias)

    agree(normal, call, want, (*inputs(normal), bias, *([] if fixed else operands)))


def test_operands_of_any_kind_and_arrays_that_it_closes_over(normal):
    mask = (normal((T, K)) < 0.7).at[:, 0].set(True)
    small = jnp.arange(K, dtype="uint8") % 5

    def attention(f):
        def call(q, k, v, table, slope):
            def change(s, b, h, i, j, m, n):
                return jnp.where(m & (n != 4), s + n + table * slope, -1e4)

            return f(q, k, v, change)

        return call

    call = lambda *x: ours(*x[:3], score_mod=x[3], score_mod_operands=(mask, small))  # noqa: E731
    want = lambda *x: plain(*x[:3], mask, small, change=x[3])  # noqa: E731
    operands = (*inputs(normal), normal((N, T, K)), jnp.float32(0.3))
    agree(normal, jax.jit(attention(call)), attention(want), operands)


def test_queries_of_which_it_hides_all_keys_and_what_is_no_number(normal):
    q, k, v = inputs(normal, b=1)
    hide = lambda s, b, h, q, kv: jnp.where(q == 3, -jnp.inf, s)  # noqa: E731
    call = functools.partial(ours, score_mod=hide, return_residual=True)
    out, residual = call(q, k, v)
    assert not out[:, 3].any()
    assert np.isneginf(residual[:, 3]).all()
    for gradient in jax.grad(lambda *x: (call(*x)[0] ** 2).sum(), (0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
    # A statistic that is no number is not taken for that of a query which sees no key.
    bias = jnp.zeros((1, N, T, K)).at[0, 1, 3, 2].set(jnp.nan)
    given = {"score_mod": softcap(5.0), "query_seq_lengths": jnp.array([18], "int32")}
    loss = lambda q, v: (ours(q, k, v, bias, **given) ** 2).sum()  # noqa: E731
    of_q, of_v = jax.jit(jax.grad(loss, (0, 1)))(q, v)
    assert np.argwhere(np.isnan(of_q).any(-1)).tolist() == [[0, 3, 1]]
    assert np.isnan(of_v[:, :, 0]).all()  # the head of values that this query reads


def test_functions_are_traced_once_let_go_and_equal_ones_make_equal_graphs(normal):
    class Doubling:
        __hash__ = None

        def __call__(self, score, *_):
            return 2 * score

    traced = []

    def change(score, *_):
        traced.append(score)
        return 2 * score

    arrays, doubling = inputs(normal), Doubling()
    for function in (change, change, doubling):
        ours(*arrays, score_mod=function)
    assert len(traced) == 1
    traced.clear()
    held = weakref.ref(change), weakref.ref(doubling)
    del change, doubling, function
    gc.collect()
    assert [x() for x in held] == [None, None]
    for first, second in ((2.0, 2.0), (2.0, 3.0)):
        caps = [functools.partial(ours, score_mod=softcap(c)) for c in (first, second)]
        (one,), (other,) = (graphs_of(f, *arrays) for f in caps)
        assert (one is other) == (first == second)


def test_arrays_that_it_closes_over_are_those_of_the_call(normal):
    arrays, holds = inputs(normal), {}

    def change(score, b, h, q, kv):
        return score * holds["table"] * holds["number"]

    def call(table, number):
        holds.update(table=table, number=number)
        return ours(*arrays, score_mod=change)

    one = jnp.ones((1, N, 1, 1))
    for number in (1.0, 2.0):
        want = plain(*arrays, change=lambda s, *_, n=number: s * n)
        np.testing.assert_allclose(call(one, jnp.float32(number)), want, atol=1e-5)
    assert jnp.all(jax.grad(lambda x: (call(x, 1.0) ** 2).sum())(one) != 0)


def test_a_gradient_is_one_forward_and_one_backward_and_operands_are_the_references(normal):
    def step(of, change, *operands):
        call = lambda *x: ours(*x[:3], score_mod=change, score_mod_operands=x[3:])  # noqa: E731
        gradient = jax.grad(lambda *x: call(*x).astype("float32").sum(), of)
        arrays = (*inputs(normal, "bfloat16"), *operands)
        assert primitives(jax.make_jaxpr(gradient)(*arrays)).count("cudnn") == 2
        return graphs_of(gradient, *arrays)

    forward, backward = step((0, 1, 2), softcap(5.0))
    assert (methods(forward), methods(backward)) == (["sdpa"], ["sdpa_backward"])
    assert forward.calls[0].node.score_mod == backward.calls[0].node.score_mod
    for of in ((0, 1, 2, 3), 3):
        _, backward = step(of, scaled, normal((1, N, 1, 1)))
        assert ("sdpa_backward" in methods(backward)) == (of != 3)
        assert "transpose_jvp_sdpa" in methods(backward)


@pytest.mark.parametrize(
    ("function", "hides"),
    [
        (lambda s, b, h, q, kv: jnp.tanh(s / 3) + (kv <= q), False),
        (causal, True),
        (lambda s, b, h, q, kv: s + jnp.log((kv <= q).astype("float32")), True),
        (prefix(np.int64(3)), False),
    ],
    ids=["finite", "causal", "logarithm", "prefix"],
)
def test_whether_it_may_hide_all_keys(function, hides):
    mod, _ = score_mod_written.written(function, [], (B, N, T, K))
    assert mod.hides == hides


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_within_a_mesh(kind, normal):
    """jnp.where and what it selects beside indices: JAX puts operations of the mesh between."""
    q, slope = normal((1, 2, 1, 8)), jnp.full((1, 1, 1, 1), 0.5)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))

    def call(q, slope):
        change = lambda s, b, h, i, j: jnp.where(j <= i, slope * s, -jnp.inf)  # noqa: E731
        capped = ours(q, q, q, is_causal=True, score_mod=softcap(2.0))
        return capped + ours(q, q, q, score_mod=change)

    spec = P("d") if kind == AxisType.Auto else P()
    mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(q, slope), call(q, slope), atol=1e-6)
    with jax.set_mesh(mesh):
        got = jax.jit(call)(q, slope)
    np.testing.assert_allclose(got, call(q, slope), atol=1e-6)


Q = jnp.ones((2, 8, 4, 16), "bfloat16")
WRONG = {  # words, and a function with its operands
    "is no function": (3, ()),
    "dot_general": (of_score(lambda s: s @ s), ()),
    "rev": (of_score(lambda s: s + s[..., ::-1]), ()),
    "1, 4, 8, 8": (of_score(lambda s: s[:1]), ()),
    "test_score_mod.py": (lambda s, b, h, q, kv: (q - kv) * 1.0, ()),
    "jnp.where": (lambda s, b, h, q, kv: s > 0, ()),
    "leave the cast out": (of_score(lambda s: s.astype("bfloat16") * 2.0 + s), ()),
    "random": (of_score(lambda s: s + jax.random.normal(jax.random.key(0), s.shape)), ()),
    "does not fit": (lambda *x: x[0], (jnp.ones((3, 1, 1, 8)),)),
    "'table'": (biased, ()),
}


@pytest.mark.parametrize("word", WRONG)
def test_errors_of_functions(word):
    change, operands = WRONG[word]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        ours(Q, Q, Q, score_mod=change, score_mod_operands=operands)
    assert word in str(caught.value), str(caught.value)


def test_errors_of_numbers():
    for function, value in ((softcap, jnp.ones(3)), (softcap, 0.0), (prefix, -1)):
        with pytest.raises((jc.GraphError, jc.GraphTypeError), match=r"cap is not|length is not"):
            function(value)
