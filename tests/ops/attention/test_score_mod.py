"""score_mod: results, derivatives, batching and errors."""

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
from jax_cudnn.ops.attention.score_mod import written as score_mod_written

ours = jc.ops.dot_product_attention
SCORES_AT_A_TIME = 1500
B, T, K, N = 2, 20, 24, 4  # batch elements, queries, keys, heads


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


def agree(normal, f, g, operands):
    """Results, and gradients of all float operands."""
    along = normal(jax.eval_shape(g, *operands).shape)

    @functools.partial(jax.jit, static_argnums=0)
    def found(f, *operands):
        loss = lambda *x: (lambda out: (jnp.vdot(out, along), out))(f(*x))  # noqa: E731
        return jax.value_and_grad(loss, range(len(operands)), has_aux=True)(*operands)

    want = jax.tree.leaves(found(g, *operands))
    for a, b in zip(jax.tree.leaves(found(f, *operands)), want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=3e-4, rtol=1e-4)


NUMBERS = jnp.sort(jax.random.randint(jax.random.key(0), (K,), 0, 3))
DOCUMENTS = NUMBERS[:T].reshape(1, 1, T, 1), NUMBERS.reshape(1, 1, 1, K)
CASES = {  # a function, its operands, equivalent and shared options
    "documents": (documents, DOCUMENTS, {"mask": DOCUMENTS[0] == DOCUMENTS[1]}, {}),
    "prefix": (prefix(5), (), {"mask": jnp.tri(T, K, dtype=bool).at[:, :5].set(True)}, {}),
    "with alibi": (  # runs in XLA, with distances by the band's own alignment
        lambda s, *_: 2 * s, (), {"scale": 2 * 8**-0.5},
        {"is_causal": True, "bottom_right": True, "alibi": True},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, normal):
    function, operands, same, given = CASES[name]
    mod = {"score_mod": function, "score_mod_operands": operands}
    call, want = (functools.partial(ours, **given, **more) for more in (mod, same))
    agree(normal, call, want, (*inputs(normal), normal((1, N, T, K))))


def test_operands_of_any_kind_and_arrays_that_it_closes_over(normal):
    mask = (normal((T, K)) < 0.7).at[:, 0].set(True)
    small = jnp.arange(K, dtype="uint8") % 5

    def call(q, k, v, table, slope):
        def change(s, b, h, i, j, m, n):
            return jnp.where(m & (n != 4), s + n + table * slope, -jnp.inf)

        return ours(q, k, v, score_mod=change, score_mod_operands=(mask, small))

    def want(q, k, v, table, slope):
        return ours(q, k, v, small + table[None] * slope, mask & (small != 4))

    agree(normal, jax.jit(call), want, (*inputs(normal), normal((N, T, K)), jnp.float32(0.3)))


def test_queries_of_which_it_hides_all_keys_and_what_is_no_number(normal):
    q, k, v = inputs(normal, b=1)
    hide = lambda s, b, h, q, kv: jnp.where(q == 3, -jnp.inf, s)  # noqa: E731
    call = functools.partial(ours, score_mod=hide, return_residual=True)
    out, residual = call(q, k, v)
    assert not out[:, 3].any()
    assert np.isneginf(residual[:, 3]).all()
    for gradient in jax.grad(lambda *x: (call(*x)[0] ** 2).sum(), (0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
    # A NaN statistic is not mistaken for that of a query that sees no key.
    bias = jnp.zeros((1, N, T, K)).at[0, 1, 3, 2].set(jnp.nan)
    given = {"score_mod": softcap(5.0), "query_seq_lengths": jnp.array([18], "int32")}
    loss = lambda q, v: (ours(q, k, v, bias, **given) ** 2).sum()  # noqa: E731
    of_q, of_v = jax.jit(jax.grad(loss, (0, 1)))(q, v)
    assert np.argwhere(np.isnan(of_q).any(-1)).tolist() == [[0, 3, 1]]
    assert np.isnan(of_v[:, :, 0]).all()  # the value head that this query reads


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
        want = ours(number * arrays[0], *arrays[1:])
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


def test_within_a_mesh(normal):
    """jnp.where with indices: JAX inserts operations of the mesh."""
    q, slope = normal((1, 2, 1, 8)), jnp.full((1, 1, 1, 1), 0.5)
    change = lambda s, b, h, i, j: jnp.where(j <= i, slope * s, -jnp.inf)  # noqa: E731
    call = lambda q: ours(q, q, q, score_mod=change)  # noqa: E731
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P())
    np.testing.assert_allclose(jax.jit(mapped)(q), call(q), atol=1e-6)
    with jax.set_mesh(mesh):
        got = jax.jit(call)(q)
    np.testing.assert_allclose(got, call(q), atol=1e-6)


Q = jnp.ones((2, 8, 4, 16), "bfloat16")
WRONG = {  # words, and a function with its operands
    "dot_general": (of_score(lambda s: s @ s), ()),
    "1, 4, 8, 8": (of_score(lambda s: s[:1]), ()),
    "test_score_mod.py": (lambda s, b, h, q, kv: (q - kv) * 1.0, ()),
    "jnp.where": (lambda s, b, h, q, kv: s > 0, ()),
    "remove the cast": (of_score(lambda s: s.astype("bfloat16") * 2.0 + s), ()),
    "condition on an array": (of_score(lambda s: s if s > 0 else -s), ()),
    "has a Python condition": (of_score(lambda s: s if s.sum() > 0 else -s), ()),
    "random": (of_score(lambda s: s + jax.random.normal(jax.random.key(0), s.shape)), ()),
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
