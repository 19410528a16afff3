"""Attention with dropout, sinks, ALiBi, masks of tiles, and its deterministic backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle_attention_extras import Attention, slopes
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.options import Options
from jax_cudnn.ops import attention_extras, attention_reference

S = jax.ShapeDtypeStruct
attention = jc.ops.dot_product_attention
RNG = np.random.default_rng(0)
KEY = jax.random.key(7)


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(b=2, t=24, s=24, n=4, k=4, h=16, e=None, dtype="float32"):
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, e or h)
    return [normal(shape, dtype) for shape in shapes]


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 3000)


# -- a case: sizes, and what it has ----------------------------------------------------------------

TILED = {"b": 2, "t": 140, "s": 300, "n": 4, "k": 2, "h": 8}
CASES = {
    "sink": ({}, {"sink": True}),
    "sink, causal, grouped heads": ({"k": 2}, {"sink": True, "causal": True}),
    "sink, values of another size": ({"e": 8, "k": 1}, {"sink": True}),
    "sink, window": ({}, {"sink": True, "causal": True, "window": (5, 0)}),
    "sink, lengths": ({}, {"sink": True, "lengths": True}),
    "sink, no key": ({"b": 3}, {"sink": True, "lengths": "none"}),
    "sink, bias": ({}, {"sink": True, "bias": (1, 4, 24, 24)}),
    "alibi": ({}, {"alibi": True, "causal": True}),
    "alibi, six heads in groups": ({"n": 6, "k": 2, "s": 33}, {"alibi": True, "causal": True}),
    "alibi, lengths": ({}, {"alibi": True, "causal": True, "lengths": True}),
    "alibi, sink, window": ({}, {"alibi": True, "sink": True, "causal": True, "window": (7, 0)}),
    "tiles": (TILED, {"tiles": (2, 4)}),
    "tiles of all": (TILED, {"tiles": (1, 1), "causal": True}),
    "tiles, sink, lengths": (TILED, {"tiles": (1, 4), "sink": True, "lengths": True}),
    "dropout": ({}, {"rate": 0.3}),
    "dropout, grouped heads, causal": ({"k": 2, "e": 8}, {"rate": 0.1, "causal": True}),
    "dropout, lengths, bias": ({}, {"rate": 0.5, "lengths": True, "bias": (2, 1, 24, 24)}),
    "dropout, sink, alibi": ({}, {"rate": 0.3, "sink": True, "alibi": True, "causal": True}),
}


def made(sizes, has, dtype="float32", implementation=None):
    """A function of arrays, these by name, and the oracle's arguments."""
    operands = dict(zip("qkv", qkv(**sizes, dtype=dtype), strict=True))
    (b, t, n, _), s = operands["q"].shape, operands["k"].shape[1]
    exact, given = {}, {"implementation": implementation}
    if has.get("sink"):
        operands["sink"] = exact["sink"] = 2 * normal((n,))
    if "bias" in has:
        operands["bias"] = exact["bias"] = normal(has["bias"], dtype)
    if has.get("lengths"):
        none = has["lengths"] == "none"
        exact["queries"] = [t, t // 2, t][:b]
        exact["keys"] = [0 if none else s - 3, s // 2 + 5, 0 if none else s][:b]
        given["query_seq_lengths"] = jnp.array(exact["queries"], "int32")
        given["key_value_seq_lengths"] = jnp.array(exact["keys"], "int32")
    if "tiles" in has:
        shape = (*has["tiles"], *attention_extras.tiles(t, s))
        tiles = RNG.random(shape) < 0.6
        tiles[:, :, 1, :] = False  # queries that see nothing
        exact["tiles"] = np.broadcast_to(tiles, (b, n, *shape[2:]))
        given["block_mask"] = jnp.asarray(tiles)
    for name, of in (("causal", "is_causal"), ("window", "local_window_size"), ("alibi", "alibi")):
        if name in has:
            exact[name] = given[of] = has[name]
    if "rate" in has:
        given |= {"dropout_rate": has["rate"], "dropout_rng": KEY}
        exact["rate"] = has["rate"]

    def function(q, k, v, **more):
        return attention(q, k, v, **given, **more)

    return function, operands, exact


def kept(q, k, rate, key=KEY, implementation=None):
    """The mask of the weights, as the forward writes it."""
    graph = jc.graph(
        lambda g, q, k, seed, offset: g.sdpa(
            q, k, k, seed=seed, offset=offset, dropout_probability=rate, rng_dump=True
        )[-1]
    )
    q, k = (jnp.swapaxes(x, 1, 2) for x in (q, k))
    seed = jax.random.key_data(key)[::-1].reshape(1, 1, 1, 2)
    run = graph.with_options(implementation=implementation) if implementation else graph
    return jax.jit(run)(q, k, seed, jnp.zeros_like(seed))


def check(function, operands, exact, limit, implementation=None):
    """Results and gradients beside the oracle."""
    if "rate" in exact:
        exact = exact | {
            "keep": kept(operands["q"], operands["k"], exact["rate"], KEY, implementation)
        }
    oracle = Attention(*(operands[x] for x in "qkv"), **exact)
    names = list(operands)

    def of(*arrays, residual=False):
        return function(**dict(zip(names, arrays, strict=True)), return_residual=residual)

    arrays = [*operands.values()]
    out, residual = jax.jit(functools.partial(of, residual=True))(*arrays)
    along = normal(out.shape, out.dtype)
    pull = jax.jit(lambda along, *arrays: jax.vjp(of, *arrays)[1](along))
    found = dict(zip(names, pull(along, *arrays), strict=True))
    want = oracle.gradients(along, exact["bias"].shape if "bias" in exact else None)
    for got, right in ((out, oracle.out), *((found[name], want[name]) for name in names)):
        got = np.asarray(got, np.float64)
        assert got.shape == right.shape
        assert np.isfinite(got).all()
        assert relative_error(got, right) < limit
    there = np.isfinite(oracle.residual)
    assert (np.isneginf(residual) == ~there).all()
    np.testing.assert_allclose(residual[there], oracle.residual[there], atol=limit, rtol=limit)


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    check(*made(*CASES[name]), 1e-5)


def test_slopes_are_those_of_alibis_authors():
    for heads in (1, 2, 3, 6, 8, 12, 16, 40):
        np.testing.assert_allclose(attention_extras.slopes(heads), slopes(heads), rtol=1e-6)


def test_a_row_that_sees_no_key_sees_its_sink():
    function, operands, _ = made({"b": 3}, {"sink": True, "lengths": "none"})
    out, residual = function(**operands, return_residual=True)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(residual[0], jnp.broadcast_to(operands["sink"], (24, 4)), rtol=1e-6)
    assert np.isneginf(residual[1, 12:]).all()  # padding
    total = lambda sink: function(**operands | {"sink": sink}, return_residual=True)[1][0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(total)(operands["sink"]), 24, rtol=1e-6)


def test_a_sink_beside_a_score_mod_is_none_of_queries_behind_the_lengths():
    q, k, v = qkv(b=2, t=6, s=6, h=8)
    sink, given = normal((4,)), {"query_seq_lengths": jnp.array([4, 6], "int32")}

    @jax.jit
    def run(q, sink):
        def of(score_mod):
            def total(q, sink):
                out, residual = attention(
                    q, k, v, sink=sink, score_mod=score_mod, is_causal=True, bottom_right=True,
                    key_value_seq_lengths=jnp.array([6, 0], "int32"), return_residual=True, **given,
                )  # fmt: skip
                finite = jnp.where(jnp.isfinite(residual), residual, 0)
                return jnp.sum(out**2) + jnp.sum(finite), residual

            gradients, residual = jax.grad(total, (0, 1), has_aux=True)(q, sink)
            return residual, gradients

        return of(lambda score, *_: score), of(None)

    (residual, gradients), (wanted, exact) = run(q, sink)
    assert np.isneginf(residual[0, 4:]).all()
    np.testing.assert_allclose(residual, wanted, atol=1e-5)
    for a, b in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


EMPTY = {
    "queries": (slice(None), 0, 8, {"dropout_rate": 0.1, "dropout_rng": KEY}),
    "examples": (slice(0), 8, 8, {"dropout_rate": 0.1, "dropout_rng": KEY}),
    "keys": (slice(None), 8, 0, {"dropout_rate": 0.1, "dropout_rng": KEY}),
    "tiles of keys": (slice(None), 8, 0, {"block_mask": jnp.ones((1, 1, 1, 0), bool)}),
    "tiles of queries": (slice(None), 0, 8, {"block_mask": jnp.ones((1, 1, 0, 1), bool)}),
}


@pytest.mark.parametrize("what", EMPTY)
def test_arrays_may_be_empty(what):
    examples, queries, keys, given = EMPTY[what]
    x = jnp.ones((2, 8, 4, 16))[examples]
    total = lambda q, k: attention(q[:, :queries], k, k, **given).sum()  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(x, x[:, :keys])
    for a in (value, *gradients):
        np.testing.assert_array_equal(a, 0)


def test_forward_mode_with_dropout_has_memory_linear_in_the_number_of_queries():
    """Where XLA runs the forward, too, the mask is drawn again, some rows at a time."""
    x = S((1, 8192, 4, 16), "float32")

    def along(q):
        return jax.jvp(lambda q: attention(q, q, q, dropout_rate=0.1, dropout_rng=KEY), (q,), (q,))

    compiled = jax.jit(along).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


def test_cotangents_of_the_residual_reach_sinks():
    q, k, v = qkv(k=2)
    sink = normal((4,))

    def plain(q, k, sink):
        scores = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, 2, axis=2)) / 4
        each = jnp.broadcast_to(sink[:, None], (*scores.shape[:3], 1))
        return jax.nn.logsumexp(jnp.concatenate([scores, each], -1), axis=-1)

    def ours(q, k, sink):
        return attention(q, k, v, sink=sink, return_residual=True)[1]

    got, want = (
        jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), (0, 1, 2))(q, k, sink) for f in (ours, plain)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


# -- dropout ---------------------------------------------------------------------------------------


def weights_of(rate, key, implementation=None, dtype="float32", t=64, causal=False):
    """(B, N, T, S) by the forward, and by the backward.

    The values are an identity, so that the result is the weights; so is the cotangent, so that the
    gradient by the values is the weights, too."""
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.standard_normal((2, t, 4, 64)), dtype) for _ in range(2))
    v = jnp.broadcast_to(jnp.eye(t, dtype=dtype)[:, None], (2, t, 4, t))

    @jax.jit
    def both(key):
        function = functools.partial(
            attention, q, k, dropout_rate=rate, dropout_rng=key if rate else None,
            implementation=implementation, is_causal=causal,
        )  # fmt: skip
        out, pull = jax.vjp(function, v)
        return jnp.moveaxis(out, 2, 1), jnp.moveaxis(pull(v)[0], 1, 3)

    return [np.asarray(x, np.float64) for x in both(key)]


def check_masks(implementation=None, dtype="float32", t=64, causal=False):
    limit = 1e-5 if dtype == "float32" else 2e-2
    of = functools.partial(
        weights_of, implementation=implementation, dtype=dtype, t=t, causal=causal
    )
    seen = np.tril(np.ones((t, t), bool)) if causal else np.ones((t, t), bool)
    whole, _ = of(0.0, KEY)

    def kept(rate, key):
        forward, backward = of(rate, key)
        np.testing.assert_array_equal(forward != 0, backward != 0)
        assert relative_error(backward, forward) < limit
        mask = forward != 0
        assert not mask[..., ~seen].any()
        assert relative_error(forward, whole * mask / (1 - rate)) < limit
        share = mask[..., seen].mean()
        assert abs(share - (1 - rate)) < 5 * (rate * (1 - rate) / mask[..., seen].size) ** 0.5
        return mask

    mask = kept(0.3, KEY)
    np.testing.assert_array_equal(kept(0.3, KEY), mask)
    kept(0.9, KEY)
    others = {
        "a key": kept(0.3, jax.random.key(8)),
        "a key that differs in its first word": kept(0.3, jnp.array([1, 7], "uint32")),
        "another example": mask[::-1],
        "another head": mask[:, ::-1],
        "another query": np.roll(mask, 1, axis=2) if not causal else mask[::-1],
    }
    for name, other in others.items():
        differing = (mask != other)[..., seen].mean()
        assert abs(differing - 2 * 0.3 * 0.7) < 0.03, name


@pytest.mark.wide
def test_forward_and_backward_drop_the_same_weights():
    check_masks()


def test_a_mask_does_not_depend_on_the_rows_computed_at_a_time(request):
    whole, _ = weights_of(0.3, KEY)
    request.getfixturevalue("blocks")
    np.testing.assert_array_equal(weights_of(0.3, KEY)[0] != 0, whole != 0)


def test_keys_of_all_kinds_and_one_program_for_all():
    q, k, v = qkv()
    calls = []

    @jax.jit
    def function(key):
        calls.append(key)
        return attention(q, k, v, dropout_rate=0.3, dropout_rng=key)

    typed, raw = function(jax.random.key(3)), function(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(typed, raw)
    assert len(calls) == 2
    assert (function(jax.random.key(4)) != typed).any()
    assert len(calls) == 2  # the key is no part of the program
    wide = attention(q, k, v, dropout_rate=0.3, dropout_rng=jax.random.key(3, impl="rbg"))
    assert np.isfinite(wide).all()
    np.testing.assert_array_equal(attention(q, k, v, dropout_rate=0.0), attention(q, k, v))


def plain(q, k, v, sink, keep, rate):
    """In jnp, with a mask that is given."""
    n, s = q.shape[2], k.shape[1]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    scores += jnp.array(slopes(n)).reshape(n, 1, 1) * (jnp.arange(s) - jnp.arange(s)[:, None])
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -jnp.inf)
    beside = jnp.broadcast_to(sink.reshape(1, n, 1, 1), (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, beside], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights * keep / (1 - rate), v)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_forward_mode_and_second_derivatives(rate):
    q, k, v = qkv(b=1, t=10, s=10, n=2, k=2, h=8)
    operands, along = (q, k, v, normal((2,))), (*qkv(b=1, t=10, s=10, n=2, k=2, h=8), normal((2,)))
    keep = kept(q, k, rate) if rate else 1.0

    def ours(q, k, v, sink):
        dropout = {"dropout_rate": rate, "dropout_rng": KEY} if rate else {}
        return attention(q, k, v, sink=sink, is_causal=True, alibi=True, **dropout)

    def theirs(*operands):
        return plain(*operands, keep, rate)

    cubes = lambda f: lambda *x: jnp.sum(f(*x) ** 3)  # noqa: E731
    every = (0, 1, 2, 3)
    for transformed in (
        lambda f: jax.jvp(f, operands, along)[1],
        lambda f: jax.jvp(jax.grad(cubes(f), every), operands, along)[1],
        lambda f: jax.grad(lambda *x: sum(
            jnp.vdot(a, b) for a, b in zip(jax.grad(cubes(f), every)(*x), along, strict=True)
        ), every)(*operands),
    ):  # fmt: skip
        got, want = map(jax.tree.leaves, map(transformed, (ours, theirs)))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-3)


def test_vmap_is_a_loop_over_calls():
    q, k, v = qkv(b=3 * 2)
    q, k, v = (x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v))
    keys = jax.random.split(KEY, 3)
    sinks, tiles = normal((3, 4)), jnp.ones((3, 2, 4, 1, 1), bool).at[1, 1, 2].set(False)
    cases = {
        "keys": (lambda q, key: attention(q, k[0], v[0], dropout_rate=0.3, dropout_rng=key),
                 (q, keys), (0, 0)),
        "one key": (lambda q, key: attention(q, k[0], v[0], dropout_rate=0.3, dropout_rng=key),
                    (q, KEY), (0, None)),
        "sinks": (lambda q, sink: attention(q, k[0], v[0], sink=sink), (q, sinks), (0, 0)),
        "a sink": (lambda q, sink: attention(q, k[0], v[0], sink=sink), (q, sinks[0]), (0, None)),
        "tiles": (lambda q, m: attention(q, k[0], v[0], block_mask=m), (q, tiles), (0, 0)),
    }  # fmt: skip
    for name, (function, operands, axes) in cases.items():
        floats = 1 + ("sink" in name)
        gradient = jax.grad(lambda *x, f=function: (f(*x) ** 2).sum(), tuple(range(floats)))
        for transformed in (function, gradient):
            got = jax.vmap(transformed, axes)(*operands)
            each = [
                transformed(
                    *(x if a is None else x[i] for x, a in zip(operands, axes, strict=True))
                )
                for i in range(3)
            ]
            want = jax.tree.map(lambda *x: jnp.stack(x), *each)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
    (spec,) = graphs_of(jax.vmap(cases["a sink"][0], (0, None)), q, sinks[0])
    assert spec.tensor(dict(spec.calls[-1].inputs)["q"]).shape[0] == 6  # one call for all


def test_the_batch_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    q, k, v = qkv(b=8, t=8, s=8)
    sink = normal((4,))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))

    def local(q, k, v, sink, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        return attention(q, k, v, sink=sink, dropout_rate=0.3, dropout_rng=key)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(*[P("data")] * 3, P(), P()), out_specs=P("data")
    )
    got = jax.jit(mapped)(q, k, v, sink, KEY)
    want = [
        attention(*(x[i : i + 1] for x in (q, k, v)), sink=sink, dropout_rate=0.3,
                  dropout_rng=jax.random.fold_in(KEY, i))
        for i in range(8)
    ]  # fmt: skip
    np.testing.assert_allclose(got, jnp.concatenate(want), atol=1e-5)


# -- graphs ----------------------------------------------------------------------------------------


def loss(q, k, v, sink, **arguments):
    return attention(q, k, v, sink=sink, **arguments).astype("float32").sum()


def test_a_gradient_is_one_forward_and_one_backward():
    operands = (*qkv(dtype="bfloat16"), normal((4,)))
    step = jax.grad(functools.partial(loss, dropout_rate=0.1, dropout_rng=KEY), (0, 1, 2, 3))
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    forward, backward = graphs_of(step, *operands)
    assert (methods(forward), methods(backward)) == (["sdpa"], ["sdpa_backward"])
    seeds = [dict(s.calls[0].inputs)["seed"] for s in (forward, backward)]
    assert [s.tensor(x).dtype for s, x in zip((forward, backward), seeds, strict=True)] == [
        "uint32", "uint32",
    ]  # fmt: skip
    assert forward.is_paired
    assert backward.origin.family == forward.origin.family
    assert backward.calls[0].node.results == ("dQ", "dK", "dV", "dSink_token")


def test_a_deterministic_gradient_adds_up_sinks_in_xla():
    operands = (*qkv(dtype="bfloat16"), normal((4,)))
    step = jax.grad(functools.partial(loss, options=Options(deterministic=True)), (0, 1, 2, 3))
    backward = graphs_of(step, *operands)[-1]
    assert sorted(methods(backward)) == ["sdpa_backward", "sdpa_sink_gradient"]
    node = next(c.node for c in backward.calls if c.node.method == "sdpa_backward")
    assert node.use_deterministic_algorithm
    assert node.results == ("dQ", "dK", "dV")
    for a, b in zip(step(*operands), jax.grad(loss, (0, 1, 2, 3))(*operands), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), atol=1e-2)


@pytest.mark.parametrize("flag", ["--xla_gpu_deterministic_ops=true", ""])
def test_xlas_flag_asks_for_it_too(flag, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flag)
    operands = (*qkv(t=9, dtype="bfloat16"), normal((4,)))
    (node,) = [
        call.node
        for spec in graphs_of(jax.grad(loss), *operands)
        for call in spec.calls
        if call.node.method == "sdpa_backward"
    ]
    assert node.use_deterministic_algorithm is bool(flag)


# -- errors ----------------------------------------------------------------------------------------

Q = jnp.ones((2, 8, 4, 16), "bfloat16")
WRONG = {
    "rate": ({"dropout_rate": 1.0, "dropout_rng": KEY}, ["dropout_rate", "below 1", "1.0"]),
    "a rate as array": ({"dropout_rate": jnp.ones(())}, ["dropout_rate", "static_argnames"]),
    "no key": ({"dropout_rate": 0.1}, ["without dropout_rng", "jax.random.key(0)"]),
    "keys": (
        {"dropout_rate": 0.1, "dropout_rng": jax.random.split(KEY, 3)},
        ["dropout_rng is no key", "uint32[2]"],
    ),
    "numbers": (
        {"dropout_rate": 0.1, "dropout_rng": jnp.ones(2)},
        ["dropout_rng is no key", "float32[2]"],
    ),
    "sink": ({"sink": jnp.ones(3)}, ["sink is not valid", "float32[4]", "float32[3]"]),
    "integers": ({"sink": jnp.ones(4, int)}, ["sink is not valid", "int32[4]"]),
    "alibi": ({"alibi": True}, ["alibi without is_causal", "as bias"]),
    "tiles": (
        {"block_mask": jnp.ones((1, 1, 8, 8), bool)},
        ["block_mask is not valid", "bool[2, 4, 1, 1]", "128 queries"],
    ),
    "tiles of numbers": ({"block_mask": jnp.ones((1, 1, 1, 1))}, ["bool[2, 4, 1, 1]", "float32"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    arguments, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        attention(Q, Q, Q, **arguments)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


X, WORDS = S((2, 4, 8, 16), "bfloat16"), S((1, 1, 1, 2), "uint32")
STATS = S((2, 4, 8, 1), "float32")
NODES = {
    "dropout is not complete": (lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w), X, WORDS),
    "expected: dropout_probability, seed and offset": (
        lambda g, q, w: g.sdpa(q, q, q, seed=w, dropout_probability=0.5), X, WORDS,
    ),
    "got: dropout_probability=0.5": (
        lambda g, q: g.sdpa(q, q, q, dropout_probability=0.5), X,
    ),
    "between 0 and 1": (
        lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w, dropout_probability=1), X, WORDS,
    ),
    "'seed' has the wrong shape or dtype": (
        lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w, dropout_probability=0.5),
        X, S((1, 1, 1, 1), "int32"),
    ),
    "expected: float32[1, 4, 1, 1]": (
        lambda g, q, w: g.sdpa(q, q, q, sink_token=w), X, S((4,), "float32"),
    ),
    "expected: uint8[2, 4, 1, 1]": (
        lambda g, q, w: g.sdpa(q, q, q, block_mask=w), X, S((2, 4, 1, 1), "int8"),
    ),
    "use_alibi_mask without causal attention": (
        lambda g, q: g.sdpa(q, q, q, use_alibi_mask=True), X,
    ),
    "rng_dump without dropout": (lambda g, q: g.sdpa(q, q, q, rng_dump=True), X),
    "dSink_token without sink_token": (
        lambda g, q, s: g.sdpa_backward(q, q, q, q, q, s, dSink_token=True), X, STATS,
    ),
    "does not take uint32": (lambda g, w: g.relu(w), WORDS),
}  # fmt: skip


@pytest.mark.parametrize("text", NODES)
def test_errors_of_the_nodes(text):
    function, *operands = NODES[text]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        jc.graph(function).trace(*operands)
    assert text in str(caught.value), str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

PLANNED = {
    "sink": ({}, {"sink": True}),
    "sink, grouped": ({"k": 2}, {"sink": True, "causal": True}),
    "sink, lengths": ({}, {"sink": True, "lengths": True}),
    "alibi, six heads": ({"n": 6, "k": 2}, {"alibi": True, "causal": True}),
    "dropout": ({}, {"rate": 0.1}),
    "dropout, all": (
        {"k": 2},
        {"rate": 0.1, "sink": True, "alibi": True, "causal": True, "lengths": True},
    ),
    "dropout, bias": ({}, {"rate": 0.1, "bias": (1, 4, 256, 256)}),
}
LARGE = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 4, "h": 64}


def plans_of(sizes, has, gpu, dtype="bfloat16", **arguments):
    function, operands, _ = made({**LARGE, **sizes}, has, dtype)
    names, arrays = [*operands], [*operands.values()]

    def total(*arrays):
        named = dict(zip(names, arrays, strict=True))
        return (function(**named, **arguments).astype("float32") ** 2).sum()

    with jc.target(gpu):
        return jc.plans(jax.grad(total, tuple(range(len(arrays)))), *arrays)


def engines(plans):
    """cuDNN's, of all graphs in order; None where XLA runs a part."""
    return [segment.plan and segment.plan.engine for p in plans.values() for segment in p.segments]


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"),
    [*((name, "H200") for name in PLANNED), ("dropout, all", "A100"), ("sink", "A100")],
)
def test_forward_and_backward_are_planned(name, gpu):
    found = engines(plans_of(*PLANNED[name], gpu))
    # With lengths XLA adds up the gradient of sinks.
    assert found.count(None) == ("lengths" in PLANNED[name][1])
    assert len(found) - found.count(None) == 2


@pytest.mark.deviceless
def test_a_blackwell_gpu_too():
    assert None not in engines(plans_of(*PLANNED["dropout"], "B200"))
    # There is no backward with dropout and dBias, so all of it is XLA's: one stream of numbers.
    plans = plans_of(*PLANNED["dropout, bias"], "B200")
    assert engines(plans) == [None, None]
    assert "of its family" in plans["dot_product_attention"].segments[0].reason


@pytest.mark.deviceless
def test_dropout_where_cudnn_has_no_backward_is_all_xlas():
    plans = plans_of({}, {"rate": 0.1, "causal": True}, "H200", bottom_right=True)
    assert engines(plans) == [None, None]
    assert "Bottom right causal mask" in plans["dot_product_attention"].segments[0].reason


@pytest.mark.deviceless
def test_a_tangent_reads_the_mask_that_the_forward_draws():
    q = S((2, 256, 4, 64), "bfloat16")
    dropped = functools.partial(attention, dropout_rate=0.1, dropout_rng=KEY)
    with jc.target("H200"):
        plans = jc.plans(lambda *x: jax.jvp(dropped, x[:3], x[3:])[1], *[q] * 6)
    (forward,) = plans["dot_product_attention"].segments
    drawn, tangent = plans["dot_product_attention (tangent)"].segments
    assert forward.plan.engine == drawn.plan.engine
    assert tangent.plan is None
    assert drawn.spec.tensor(drawn.spec.outputs[0]).shape == (2, 4, 256, 256)


@pytest.mark.deviceless
def test_block_masks_are_xlas_with_a_reason():
    for gpu in ("H200", "A100"):
        plans = plans_of({}, {"tiles": (1, 1)}, gpu)
        assert engines(plans) == [None, None]
        (forward,), (backward,) = (p.segments for p in plans.values())
        assert "a block mask needs a Blackwell GPU and cuDNN 9.26" in forward.reason
        assert "backward of attention takes no block mask" in backward.reason
    plans = plans_of({}, {"tiles": (1, 1)}, "B200")
    (forward,) = plans["dot_product_attention"].segments
    assert (forward.plan is None) == ("cuDNN 9.26" in forward.reason)


@pytest.mark.deviceless
def test_slopes_of_alibi_are_an_operand_of_the_plan():
    plans = plans_of({"n": 6, "k": 2}, {"alibi": True, "causal": True}, "H200")
    for plan in plans.values():
        (segment,) = plan.segments
        (table,) = segment.plan.tables
        np.testing.assert_allclose(table, slopes(6), rtol=1e-6)
        assert not segment.plan.fills


@pytest.mark.deviceless
def test_the_deterministic_backward_states_its_workspace():
    q = S((1, 2048, 4, 64), "bfloat16")

    def planned(gpu="H200", **options):
        chosen = jc.Options(deterministic=True, **options)
        step = jax.grad(lambda *x: attention(*x, options=chosen).astype("float32").sum(), (0, 1, 2))
        with jc.target(gpu):
            return jc.plans(step, q, q, q)["dot_product_attention (backward)"]

    least = 2 * 4 * 2048 * 2048
    (whole,) = planned().segments
    assert whole.plan.workspace_bytes >= least
    (limited,) = planned(max_workspace=least).segments
    if limited.plan is None:
        assert "max_workspace" in limited.reason
        assert f"{whole.plan.workspace_bytes:,} bytes of workspace" in limited.reason
    else:  # from cuDNN 9.25 on
        assert limited.plan.workspace_bytes < least
        assert limited.plan.engine != whole.plan.engine
    (older,) = planned("A100", max_workspace=least).segments
    assert "compute fewer or shorter examples at a time" in older.reason
    with pytest.raises(jc.UnsupportedGraphError, match="bytes of workspace, more than the"):
        planned("A100", max_workspace=least, implementation="cudnn")


@pytest.mark.deviceless
def test_no_workspace_is_larger_than_a_quarter_of_the_gpu_by_default():
    q = S((1, 32768, 64, 64), "bfloat16")
    chosen = jc.Options(deterministic=True)
    step = jax.grad(lambda *x: attention(*x, options=chosen).astype("float32").sum(), (0, 1, 2))
    with jc.target("A100"):
        (segment,) = jc.plans(step, q, q, q)["dot_product_attention (backward)"].segments
    assert segment.plan is None
    assert "a quarter of the GPU's memory" in segment.reason


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype):
    sizes, has = PLANNED[name]
    check(*made({**LARGE, **sizes}, has, dtype, "cudnn"), 2e-2, "cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_and_backward_drop_the_same_weights_on_the_gpu(dtype, causal):
    check_masks("cudnn", dtype, t=128, causal=causal)


@pytest.mark.gpu
def test_the_mask_that_is_written_is_the_one_that_is_used_on_the_gpu():
    """In a causal forward and in one without statistics, too: a derivative reads the former's."""
    q, k, _ = qkv(t=128, s=128, h=64, dtype="bfloat16")
    v = jnp.broadcast_to(jnp.eye(128, dtype="bfloat16")[:, None], (2, 128, 4, 128))
    written = np.asarray(kept(q, k, 0.3, implementation="cudnn")) != 0
    for causal in (False, True):
        used = jax.jit(functools.partial(attention, dropout_rate=0.3, is_causal=causal))(
            q, k, v, dropout_rng=KEY
        )
        used = np.moveaxis(np.asarray(used, np.float32) != 0, 2, 1)
        seen = np.tril(np.ones((128, 128), bool)) if causal else np.ones((128, 128), bool)
        np.testing.assert_array_equal(used[..., seen], written[..., seen])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [False, True])
def test_a_deterministic_backward_repeats_on_the_gpu(lengths):
    operands = (*qkv(b=2, t=1024, s=1024, n=8, k=2, h=128, dtype="bfloat16"), normal((8,)))
    given = {"key_value_seq_lengths": jnp.array([700, 1024], "int32")} if lengths else {}
    found = []
    for chosen in (Options(deterministic=True, implementation="cudnn"), Options()):
        step = jax.jit(jax.grad(functools.partial(
            loss, is_causal=True, options=chosen, **given), (0, 1, 2, 3)))  # fmt: skip
        found.append([np.asarray(x, np.float32) for x in step(*operands)])
        for _ in range(5 if chosen.deterministic else 0):
            for a, b in zip(step(*operands), found[-1], strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    for a, b in zip(*found, strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, b) < 1e-2


@pytest.mark.gpu
def test_a_deterministic_backward_in_little_workspace_repeats_on_the_gpu():
    """Where cuDNN has it, from 9.25 on; else XLA computes the same."""
    operands = (*qkv(b=1, t=2048, s=2048, n=8, k=8, h=128, dtype="bfloat16"), normal((8,)))
    small = Options(deterministic=True, max_workspace=2**25)
    step, usual = (
        jax.jit(jax.grad(functools.partial(loss, is_causal=True, options=o), (0, 1, 2)))
        for o in (small, Options())
    )
    first = [np.asarray(x, np.float32) for x in step(*operands)]
    for _ in range(5):
        for a, b in zip(step(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    for a, b in zip(first, usual(*operands), strict=True):
        assert relative_error(a, np.asarray(b, np.float32)) < 1e-2


UNSEEING = {
    "lengths": {"lengths": "none"},
    "window": {"lengths": True, "causal": True, "window": (1, 0)},  # the last queries of the first
}


@pytest.mark.deviceless
@pytest.mark.parametrize("name", UNSEEING)
def test_rows_without_keys_beside_sinks_are_planned(name):
    has = {"sink": True, **UNSEEING[name]}
    forward, *_ = plans_of({"b": 3 if name == "lengths" else 2}, has, "H200").values()
    assert forward.segments[0].plan is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNSEEING)
def test_padding_and_rows_without_keys_beside_sinks_on_the_gpu(name):
    sizes = {"b": 3 if name == "lengths" else 2, "t": 64, "s": 64, "h": 64}
    function, operands, exact = made(sizes, {"sink": True, **UNSEEING[name]}, "bfloat16")
    check(function, operands, exact, 2e-2)
