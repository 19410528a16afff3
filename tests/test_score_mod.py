"""Functions of attention's scores: what they mean, their derivatives, batches and plans."""

import functools
import gc
import math
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.graph.wire import wire
from jax_cudnn.ops import attention_reference, score_mod_emission, score_mod_written, score_mods

S = jax.ShapeDtypeStruct
ours = jc.ops.dot_product_attention
RNG = np.random.default_rng(0)
B, T, K, N = 2, 20, 24, 4  # examples, queries, keys, heads
CAUSAL = {"is_causal": True}


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(b=B, t=T, s=K, n=N, k=2, h=8, dtype="float32"):
    return normal((b, t, n, h), dtype), normal((b, s, k, h), dtype), normal((b, s, k, h), dtype)


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 1500)


def plain(q, k, v, *operands, change, scale=None, seen=True, bias=0.0):
    """Attention in jnp with a function of the scores; a query that sees no key gives 0."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    at = [jnp.arange(size).reshape([-1 if i == j else 1 for j in range(4)])
          for i, size in enumerate(scores.shape)]  # fmt: skip
    scores = jnp.where(seen, change(scores, *at, *operands) + bias, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    each = jnp.exp(scores - jnp.where(jnp.isneginf(largest), 0, largest))
    total = each.sum(-1, keepdims=True)
    weights = each / jnp.where(total > 0, total, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


def agree(f, g, operands, limit=3e-5):
    """Results, and gradients by all operands of floats."""
    floats = tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    along = normal(jax.eval_shape(g, *operands).shape)
    for transform in (lambda f: f, lambda f: jax.grad(lambda *x: jnp.vdot(f(*x), along), floats)):
        got, want = (jax.jit(transform(h))(*operands) for h in (f, g))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=10 * limit, rtol=1e-4)


# -- what users write, beside the same written another way -----------------------------------------


def causal(score, b, h, q, kv):
    return jnp.where(q >= kv, score, -jnp.inf)


def alibi(score, b, h, q, kv):
    return score - 2.0 ** (-8 * (h + 1) / N) * (q - kv)


def biased(score, b, h, q, kv, table):
    return score + table


def scaled(score, b, h, q, kv, scale):
    return score * jnp.exp(scale)


_LOWER = np.tril(np.ones((T, K), bool))
_DISTANCE = np.arange(T)[:, None] - np.arange(K)[None, :]
_SLOPES = (2.0 ** (-8 * np.arange(1, N + 1) / N)).reshape(N, 1, 1)

USERS = {
    "softcap": (score_mods.softcap(2.0), lambda s, *_: 2 * jnp.tanh(s / 2), ()),
    "causal": (causal, lambda s, *_: jnp.where(_LOWER, s, -jnp.inf), ()),
    "alibi": (alibi, lambda s, *_: s - _SLOPES * _DISTANCE, ()),
    "relative bias": (biased, lambda s, *x: s + x[-1], ((1, N, T, K),)),
    "bias of a row": (biased, lambda s, *x: s + x[-1], ((B, 1, 1, K),)),
    "scale of a head": (scaled, lambda s, *x: s * jnp.exp(x[-1]), ((N, 1, 1),)),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", USERS)
def test_results_and_gradients(name, request):
    function, change, shapes = USERS[name]
    if name != "softcap":
        request.getfixturevalue("blocks")
    operands = [normal(shape) for shape in shapes]

    def call(q, k, v, *x):
        return ours(q, k, v, score_mod=function, score_mod_operands=x)

    agree(call, functools.partial(plain, change=change), (*qkv(), *operands))


@pytest.mark.usefixtures("blocks")
def test_documents():
    number = jnp.asarray(RNG.integers(0, 3, (B, T)), "int32")
    operands = number.reshape(B, 1, T, 1), number.reshape(B, 1, 1, T)
    inputs = qkv(s=T)
    seen = operands[0] == operands[1]

    def call(*x):
        return ours(*x, score_mod=score_mods.documents, score_mod_operands=operands)

    agree(call, functools.partial(plain, change=lambda s, *_: jnp.where(seen, s, -jnp.inf)), inputs)


def test_prefix():
    seen = _LOWER | (np.arange(K) < 5)
    agree(
        functools.partial(ours, score_mod=score_mods.prefix(5)),
        functools.partial(plain, change=lambda s, *_: jnp.where(seen, s, -jnp.inf)),
        qkv(),
    )


HIDING = {
    "causal": ({"is_causal": True}, lambda i, j: j <= i),
    "window": ({"local_window_size": (4, 2)}, lambda i, j: (j >= i - 4) & (j <= i + 2)),
    "bottom right": (
        {"is_causal": True, "bottom_right": True, "local_window_size": (6, 0)},
        lambda i, j: (j <= i + K - T) & (j >= i + K - T - 6),
    ),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", HIDING)
def test_beside_structure_and_bias(name):
    options, seen = HIDING[name]
    bias = normal((1, N, T, K))
    seen = seen(np.arange(T)[:, None], np.arange(K)[None, :])

    def call(q, k, v, bias):
        return ours(q, k, v, bias, score_mod=score_mods.softcap(2.0), **options)

    def want(q, k, v, bias):
        change = lambda s, *_: 2 * jnp.tanh(s / 2)  # noqa: E731
        return plain(q, k, v, change=change, seen=seen, bias=bias)

    agree(call, want, (*qkv(), bias))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("options", [{}, CAUSAL, {**CAUSAL, "bottom_right": True}])
def test_beside_lengths(options):
    queries, keys = jnp.array([20, 7], "int32"), jnp.array([24, 9], "int32")
    i, j = np.arange(T)[:, None], np.arange(K)[None, :]
    n, m = (np.asarray(x).reshape(B, 1, 1, 1) for x in (queries, keys))
    seen = (i < n) & (j < m)
    if options:
        seen &= j <= i + ((m - n) if "bottom_right" in options else 0)
    given = {"query_seq_lengths": queries, "key_value_seq_lengths": keys, **options}
    agree(
        functools.partial(ours, score_mod=alibi, **given),
        functools.partial(plain, change=alibi, seen=seen),
        qkv(),
    )


WHOLE = {
    "blocks": lambda q, kv: q // 4 >= kv // 4,
    "negative quotients": lambda q, kv: (q - kv) // 3 >= -2,
    "remainders": lambda q, kv: (kv % 3 == 0) | ((q - kv) % 5 < 3),
    "not and xor": lambda q, kv: ~((q < kv) ^ (kv % 2 == 1)) | (kv == 0),
    "not equal": lambda q, kv: (kv != q) & (abs(kv - q) < 7),
    "sign": lambda q, kv: jnp.sign(q - kv) >= 0,
    "a number as truth": lambda q, kv: (kv % 4).astype(bool),
    "a truth as number": lambda q, kv: (q > kv).astype("int32") + (kv > 3) >= 1,
    "towards zero": lambda q, kv: ((q - kv) / 4).astype("int32") > -2,
    "lax": lambda q, kv: jax.lax.rem(q - kv, 4) + jax.lax.div(q - kv, 3) >= -1,
}


@pytest.mark.wide
@pytest.mark.parametrize("name", WHOLE)
def test_integers_and_truths(name):
    change = lambda s, b, h, q, kv: jnp.where(WHOLE[name](q, kv), s, -jnp.inf)  # noqa: E731
    agree(functools.partial(ours, score_mod=change), functools.partial(plain, change=change), qkv())


ELEMENTWISE = {
    "arithmetic": lambda s: 1 - s + 2 * s / 3 - (-s),
    "quotient": lambda s: 1 / (2 + s * s),
    "powers": lambda s: s**3 - s**2 + (1 + s * s) ** -2 + (2 + jnp.abs(s)) ** 1.5 + 1.5**s,
    "no power": lambda s: s**0 + s,
    "exponentials": lambda s: jnp.exp(s) + jnp.exp2(s) + jnp.expm1(s),
    "logarithms": lambda s: jnp.log(2 + s * s) + jnp.log1p(s * s),
    "roots": lambda s: jnp.sqrt(1 + s * s) + jax.lax.rsqrt(1 + s * s),
    "waves": lambda s: jnp.sin(s) + jnp.cos(s) + jnp.tan(0.1 * s),
    "activations": lambda s: jax.nn.gelu(s) + jax.nn.silu(s) + jax.nn.softplus(s),
    "exact gelu": lambda s: jax.nn.gelu(s, approximate=False),
    "relu": jax.nn.relu,
    "sigmoid": lambda s: s * jax.nn.sigmoid(s) + jnp.tanh(s),
    "bounds": lambda s: jnp.clip(s, -0.5, 0.7) + jnp.minimum(s, 0.3) + jnp.maximum(0.1, s),
    "cases": lambda s: jnp.where(s > 0.2, jnp.where(s < 1, s, 2 * s), -s / 2),
    "steps": lambda s: s + jnp.floor(s) + jnp.ceil(s) + jnp.sign(s),
    "finite": lambda s: jnp.where(jnp.isfinite(s), 2 * s, 0.0),
    "folded": lambda s: s * jnp.sqrt(2.0) + jnp.arange(float(N)).reshape(N, 1, 1) * jnp.cumsum(
        jnp.ones(3)
    ).max(),
    "jitted": jax.jit(lambda s: 2 * jnp.tanh(s)),
}  # fmt: skip


def of_score(f):
    return lambda score, *_: f(score)


@pytest.mark.wide
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_each_element(name):
    change = of_score(ELEMENTWISE[name])
    agree(functools.partial(ours, score_mod=change), functools.partial(plain, change=change), qkv())


def test_booleans_and_other_integers_as_operands():
    mask = jnp.asarray(RNG.random((T, K)) < 0.7).at[:, 0].set(True)
    small = jnp.asarray(RNG.integers(0, 5, (K,)), "uint8")
    change = lambda s, b, h, q, kv, m, n: jnp.where(m & (n != 4), s + n, -1e4)  # noqa: E731
    call = functools.partial(ours, score_mod=change, score_mod_operands=(mask, small))
    agree(call, lambda *x: plain(*x, mask, small, change=change), qkv())


def test_arrays_that_it_closes_over_have_gradients():
    table, slope = normal((N, T, K)), jnp.float32(0.3)

    def attention(f):
        def call(q, k, v, table, slope):
            return f(q, k, v, lambda s, b, h, i, j: s + table * slope)

        return call

    call = attention(lambda q, k, v, change: ours(q, k, v, score_mod=change))
    want = attention(lambda q, k, v, change: plain(q, k, v, change=change))
    agree(jax.jit(call), want, (*qkv(), table, slope))


def test_queries_of_which_it_hides_all_keys():
    change = lambda s, b, h, q, kv: jnp.where(q == 3, -jnp.inf, s)  # noqa: E731
    inputs = qkv()
    call = functools.partial(ours, score_mod=change, return_residual=True)
    out, residual = call(*inputs)
    np.testing.assert_array_equal(out[:, 3], 0)
    assert np.isneginf(residual[:, 3]).all()
    for gradient in jax.grad(lambda *x: (call(*x)[0] ** 2).sum(), (0, 1, 2))(*inputs):
        assert np.isfinite(gradient).all()


def test_what_is_no_number_has_no_gradient():
    """Its statistic is not taken for that of a query which sees no key."""
    q, k, v = qkv(b=1)
    bias = jnp.zeros((1, N, T, K)).at[0, 1, 3, 2].set(jnp.nan)
    cap, lengths = score_mods.softcap(5.0), jnp.array([18], "int32")

    def loss(q, v):
        return (ours(q, k, v, bias, score_mod=cap, query_seq_lengths=lengths) ** 2).sum()

    of_q, of_v = jax.jit(jax.grad(loss, (0, 1)))(q, v)
    assert np.argwhere(np.isnan(of_q).any(-1)).tolist() == [[0, 3, 1]]
    assert np.isnan(of_v[:, :, 0]).all()  # the head of values that this query reads


def test_three_dimensions():
    inputs = [x[0] for x in qkv()]
    change = of_score(jnp.tanh)
    want = plain(*(x[None] for x in inputs), change=change)[0]
    np.testing.assert_allclose(ours(*inputs, score_mod=change), want, atol=1e-5)


def test_at_the_level_of_the_graph():
    """Other tensors of the graph as operands, and structure by cuDNN's attributes."""

    @jc.graph
    def attention(g, q, k, v, slopes):
        return g.sdpa(
            q, k, v,
            attn_scale=0.3,
            diagonal_band_right_bound=0,
            score_mod=lambda s, b, h, i, j, a: s + (j - i) * a,
            score_mod_operands=[g.exp(slopes)],
        )[0]  # fmt: skip

    q, k, v = qkv()
    slopes = normal((1, N, 1, 1))
    change = lambda s, b, h, i, j: s + (j - i) * jnp.exp(slopes)  # noqa: E731
    want = plain(q, k, v, change=change, scale=0.3, seen=_LOWER)
    got = attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), slopes)
    np.testing.assert_allclose(jnp.swapaxes(got, 1, 2), want, atol=1e-5)


# -- transformations -------------------------------------------------------------------------------


def test_a_function_is_traced_once_and_equal_ones_make_equal_graphs():
    traced = []

    def change(score, b, h, q, kv):
        traced.append(score)
        return jnp.tanh(score)

    inputs = qkv()
    for _ in range(3):
        ours(*inputs, score_mod=change)
    assert len(traced) == 1
    both = [lambda s, *_: jnp.tanh(s) * 2, lambda s, *_: jnp.tanh(s) * 2]
    (one,), (other,) = (graphs_of(functools.partial(ours, score_mod=f), *inputs) for f in both)
    assert one is other
    for first, second in ((2.0, 2.0), (2.0, 3.0)):
        caps = [functools.partial(ours, score_mod=score_mods.softcap(c)) for c in (first, second)]
        (one,), (other,) = (graphs_of(f, *inputs) for f in caps)
        assert (one == other) == (first == second)


def test_a_gradient_is_one_forward_and_one_backward():
    inputs = qkv(dtype="bfloat16")
    attention = functools.partial(ours, is_causal=True, score_mod=score_mods.softcap(5.0))
    step = jax.grad(lambda *x: attention(*x).astype("float32").sum(), (0, 1, 2))
    assert primitives(jax.make_jaxpr(step)(*inputs)).count("cudnn") == 2
    forward, backward = graphs_of(step, *inputs)
    assert methods(forward) == ["sdpa"]
    assert methods(backward) == ["sdpa_backward"]
    assert forward.calls[0].node.score_mod == backward.calls[0].node.score_mod


def test_arrays_that_it_closes_over_are_those_of_the_call():
    inputs = qkv()
    holds = {}

    def change(score, b, h, q, kv):
        return score * holds["table"] * holds["number"]

    def call(table, number):
        holds.update(table=table, number=number)
        return ours(*inputs, score_mod=change)

    for number in (1.0, 2.0):
        got = call(jnp.ones((1, N, 1, 1)), jnp.float32(number))
        want = plain(*inputs, change=lambda s, *_: s * number)  # noqa: B023
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert jnp.all(jax.grad(lambda x: (call(x, 1.0) ** 2).sum())(jnp.ones((1, N, 1, 1))) != 0)


def test_functions_are_let_go_and_need_no_hash():
    class Doubling:
        __hash__ = None

        def __call__(self, score, b, h, q, kv):
            return 2 * score

    inputs, doubling = qkv(), Doubling()
    ours(*inputs, score_mod=doubling)
    change = lambda s, *_: 2 * s  # noqa: E731
    ours(*inputs, score_mod=change)
    held = weakref.ref(change), weakref.ref(doubling)
    del change, doubling
    gc.collect()
    assert [x() for x in held] == [None, None]


@pytest.mark.parametrize(
    ("function", "hides"),
    [
        (score_mods.softcap(2.0), False),
        (lambda s, b, h, q, kv: jnp.tanh(s / 3) + (kv <= q), False),
        (causal, True),
        (lambda s, b, h, q, kv: s + jnp.log((kv <= q).astype("float32")), True),
        (lambda s, b, h, q, kv: s - jnp.exp(1e3 * (kv > q)), True),
        (score_mods.prefix(np.int64(3)), False),
    ],
)
def test_whether_it_may_hide_all_keys(function, hides):
    mod, _ = score_mod_written.written(function, [], (B, N, T, K))
    assert mod.hides == hides


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_within_a_mesh(kind):
    """jnp.where and what it selects beside indices: JAX puts operations of the mesh between."""
    q, slope = normal((1, 2, 1, 8)), jnp.full((1, 1, 1, 1), 0.5)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))

    def call(q, slope):
        change = lambda s, b, h, i, j: jnp.where(j <= i, slope * s, -jnp.inf)  # noqa: E731
        capped = ours(q, q, q, is_causal=True, score_mod=score_mods.softcap(2.0))
        return capped + ours(q, q, q, score_mod=change)

    want = call(q, slope)
    spec = P("d") if kind == AxisType.Auto else P()
    mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(q, slope), want, atol=1e-6)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(call)(q, slope), want, atol=1e-6)


def test_beside_alibi():
    """XLA runs it, with distances by the band's own corner."""
    i, j = np.arange(T)[:, None], np.arange(K)[None, :]
    given = {"is_causal": True, "bottom_right": True}
    agree(
        functools.partial(ours, alibi=True, score_mod=score_mods.softcap(2.0), **given),
        functools.partial(
            plain,
            change=lambda s, *_: 2 * jnp.tanh(s / 2) - _SLOPES * (i + K - T - j),
            seen=j <= i + K - T,
        ),
        qkv(),
    )


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_digits_near_zero(name):
    function = {"expm1": jnp.expm1, "log1p": jnp.log1p}[name]
    x = jnp.asarray(
        [*(s * 10.0**-n for n in range(1, 9) for s in (1, -1)), 0, 0.6, 3, 20], "float32"
    )
    scores = jnp.broadcast_to(x, (1, 1, 1, len(x)))
    mod, _ = score_mod_written.written(of_score(function), [], scores.shape)
    assert mod.refused_backward((1, 1, 128, 128)) is None
    of = lambda s: mod(s, 0, {})  # noqa: E731
    got, slope = jax.jit(lambda s: jax.jvp(of, (s,), (jnp.ones_like(s),)))(scores)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(got[0, 0, 0], getattr(np, name)(wide), rtol=1e-6)
    want = np.exp(wide) if name == "expm1" else 1 / (1 + wide)
    np.testing.assert_allclose(slope[0, 0, 0], want, rtol=1e-5)


@pytest.mark.parametrize("of", ["all", "operand"])
def test_gradients_of_operands_are_of_the_reference(of):
    inputs = (*qkv(), normal((1, N, 1, 1)))
    call = lambda *x: ours(*x[:3], score_mod=scaled, score_mod_operands=x[3:])  # noqa: E731
    step = jax.grad(lambda *x: call(*x).sum(), (0, 1, 2, 3) if of == "all" else 3)
    _, backward = graphs_of(step, *inputs)
    assert ("sdpa_backward" in methods(backward)) == (of == "all")
    assert "transpose_jvp_sdpa" in methods(backward)


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
def test_forward_mode_and_second_derivatives():
    inputs = (*qkv(b=1, t=6, s=7, n=2, k=1, h=4), normal((1, 2, 1, 1)))
    along = tuple(normal(x.shape) for x in inputs)

    def change(score, b, h, q, kv, a):
        return 2 * jnp.tanh(score * a) - (kv > q) * 3.0

    f = lambda *x: ours(*x[:3], score_mod=change, score_mod_operands=x[3:])  # noqa: E731
    g = lambda *x: plain(*x, change=change)  # noqa: E731
    cubes = lambda f: lambda *x: jnp.sum(f(*x) ** 3)  # noqa: E731
    every = (0, 1, 2, 3)
    gradient = lambda f: jax.grad(cubes(f), every)  # noqa: E731
    squares = lambda f: lambda *x: sum((y**2).sum() for y in gradient(f)(*x))  # noqa: E731
    transforms = [
        lambda f: lambda: jax.jvp(f, inputs, along)[1],
        lambda f: lambda: jax.jvp(gradient(f), inputs, along)[1],
        lambda f: lambda: jax.grad(squares(f), every)(*inputs),
    ]
    for transform in transforms:
        for a, b in zip(*(jax.tree.leaves(jax.jit(transform(h))()) for h in (f, g)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-3)


BATCHES = {
    "all": (0, 0, 0, 0),
    "tokens": (0, 0, 0, None),
    "operand": (None, None, None, 0),
    "queries": (1, None, None, None),
}


@pytest.mark.wide
@pytest.mark.parametrize("shape", [(1, N, 1, 1), (B, 1, T, 1)], ids=["heads", "examples"])
@pytest.mark.parametrize("name", BATCHES)
def test_vmap(name, shape):
    axes = BATCHES[name]
    inputs = [
        x if a is None else jnp.stack([x, 2 * x, -x], a)
        for x, a in zip((*qkv(), 0.2 * normal(shape)), axes, strict=True)
    ]
    f = lambda *x: ours(*x[:3], score_mod=scaled, score_mod_operands=x[3:])  # noqa: E731
    g = functools.partial(plain, change=scaled)
    gradient = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2, 3))  # noqa: E731
    for transform in (lambda f: f, gradient):
        got, want = (jax.jit(jax.vmap(transform(h), axes))(*inputs) for h in (f, g))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    (spec,) = graphs_of(jax.vmap(f, axes), *inputs)
    in_turn = shape[0] == 1 and axes[3] == 0  # what the examples share is not theirs any more
    (q,) = (name for port, name in spec.calls[-1].inputs if port == "q")
    assert spec.tensor(q).shape[0] == (B if in_turn else 3 * B)


def test_vmap_keeps_the_index_of_the_example():
    change = lambda s, b, h, q, kv: s * (1 + b)  # noqa: E731
    inputs = [jnp.stack([x, 2 * x]) for x in qkv()]
    got = jax.vmap(functools.partial(ours, score_mod=change))(*inputs)
    want = jax.vmap(functools.partial(plain, change=change))(*inputs)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_batch_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    inputs = (*qkv(b=8), normal((8, 1, T, 1)))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    f = lambda *x: ours(*x[:3], score_mod=scaled, score_mod_operands=x[3:])  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    agree(jax.jit(mapped), functools.partial(plain, change=scaled), inputs)


def test_remat_scan_and_jit():
    inputs = qkv(s=T)
    f = functools.partial(ours, score_mod=score_mods.softcap(2.0))

    def looped(q, k, v):
        step = jax.checkpoint(lambda x, _: (f(x, k, v), None))
        return jax.lax.scan(step, q, None, 2)[0]

    g = functools.partial(plain, change=lambda s, *_: 2 * jnp.tanh(s / 2))
    agree(jax.jit(looped), lambda q, k, v: g(g(q, k, v), k, v), inputs)


@pytest.mark.parametrize("row", [(1, 1, 16384, 1), (1, 1, 1, 16384)], ids=["queries", "keys"])
def test_memory_is_linear_in_the_number_of_queries(row):
    x = S((1, 16384, 1, 16), "float32")
    f = lambda q, k, v, a: ours(q, k, v, score_mod=scaled, score_mod_operands=(a,)).sum()  # noqa: E731
    step = jax.jit(jax.grad(f, (0, 1, 2)))
    memory = step.lower(x, x, x, S(row, "float32")).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**29


# -- errors ----------------------------------------------------------------------------------------

Q = jnp.ones((2, 8, 4, 16), "bfloat16")


def modified(change, *operands):
    return lambda: ours(Q, Q, Q, score_mod=change, score_mod_operands=operands)


def modified_by(change, operands):
    return lambda: ours(Q, Q, Q, score_mod=change, score_mod_operands=operands)


WRONG = {
    "no function": (modified(3), ["score_mod is no function", "int: 3"]),
    "operands alone": (modified(None, Q), ["score_mod is no function", "NoneType"]),
    "a reduction": (modified(of_score(lambda s: s - s.max(-1, keepdims=True))),
                    ["reduce_max", "operations on each element", "test_score_mod.py",
                     "score_mod_operands"]),
    "a product": (modified(of_score(lambda s: s @ s)), ["dot_general", "beyond"]),
    "indexing": (modified(of_score(lambda s: s + s[..., ::-1])), ["rev"]),
    "another shape": (modified(of_score(lambda s: s[:1])),
                      ["changes the shape", "[2, 4, 8, 8]", "[1, 4, 8, 8]", "test_score_mod.py"]),
    "indices alone": (modified(lambda s, b, h, q, kv: (q - kv) * 1.0),
                      ["changes the shape", "[1, 1, 8, 8]"]),
    "a mask": (modified(lambda s, b, h, q, kv: s > 0), ["no floats", "bool", "jnp.where"]),
    "no array": (modified(lambda *_: None), ["is no array", "None"]),
    "a rounding": (modified(of_score(lambda s: s.astype("bfloat16") * 2.0 + s)),
                   ["rounds to bfloat16", "leave the cast out"]),
    "bits": (modified(lambda s, b, h, q, kv: s + (q & 3)), ["bits of integers"]),
    "operand": (modified(lambda *x: x[0], jnp.ones((3, 1, 1, 8))),
                ["score_mod_operands[0] does not fit", "[2, 4, 8, 8]"]),
    "a random number": (
        modified(of_score(lambda s: s + jax.random.normal(jax.random.key(0), s.shape))),
        ["random"],
    ),
    "an array for the operands": (modified_by(biased, jnp.ones((8, 8))), ["no tuple", "(x,)"]),
    "too few operands": (modified(biased), ["other arguments", "'table'", "0 operands"]),
    "an array as cap": (lambda: score_mods.softcap(jnp.ones(3)), ["cap is not", "Python number"]),
    "a text as cap": (lambda: score_mods.softcap("3"), ["cap is not", "'3'"]),
    "cap": (lambda: score_mods.softcap(0.0), ["cap is not valid", "above 0"]),
    "length": (lambda: score_mods.prefix(-1), ["length is not valid", "-1"]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_errors_of_the_node():
    q, n = S((2, 4, 8, 16), "bfloat16"), S((2, 1, 1, 1), "int32")
    tanh = of_score(jnp.tanh)
    wrong = {
        "without a score_mod": lambda g, q, n: g.sdpa(q, q, q, score_mod_operands=[n]),
        "one of the lengths": lambda g, q, n: g.sdpa(q, q, q, score_mod=tanh, seq_len_q=n),
        "does not fit the scores": lambda g, q, n: g.sdpa(
            q, q, q, score_mod=lambda s, *_: s, score_mod_operands=[q]
        ),
        "belongs to another graph": lambda g, q, n: g.sdpa(
            q, q, q, score_mod=lambda s, *x: s + x[-1], score_mod_operands=[OTHER[0]]
        ),
    }
    OTHER = []
    jc.graph(lambda g, n: OTHER.append(n) or g.abs(n)).trace(S((2, 1, 1, 1), "float32"))
    for text, function in wrong.items():
        with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
            jc.graph(function).trace(q, n)
        assert text in str(caught.value), str(caught.value)


# -- what cuDNN is given ---------------------------------------------------------------------------


class Computed:
    """A tensor of a pygraph that computes at once."""

    def __init__(self, value, kind="", number=False):
        self.value, self.kind, self.number = value, kind, number

    def set_data_type(self, kind):
        self.kind = kind
        return self


class ComputingGraph:
    """A pygraph that computes at once, and refuses what cuDNN's engines for attention do."""

    def __init__(self):
        self.added = []

    def __getattr__(self, method):
        def add(*args, name="", compute_data_type="", axis=None, **named):
            self.added.append(method)
            cls = REGISTRY[method]
            given = dict(zip(cls.ports.input_names, args, strict=False)) | named
            assert list(given) == list(cls.ports.input_names)
            assert not next(iter(given.values())).number
            booleans = [port for port, x in given.items() if x.kind == "BOOLEAN"]
            assert booleans in ([], ["mask"])
            node = cls() if axis is None else cls(axis)
            assert compute_data_type == ("FLOAT" if axis is None else "INT32")
            values = {port: jnp.asarray(x.value, "float32") for port, x in given.items()}
            (value,) = node.reference(**values)
            return Computed(value)

        return add

    def tensor_scalar(self, value, kind):
        assert value == float(np.float32(value)) or np.isnan(value)
        return Computed(np.float32(value), number=True)


@pytest.fixture
def no_cudnn(monkeypatch):
    """In its place what ComputingGraph understands."""
    kinds = types.SimpleNamespace(FLOAT="FLOAT", INT32="INT32", BOOLEAN="BOOLEAN")
    scalars = types.SimpleNamespace(scalar_type=types.SimpleNamespace(RUNTIME_PARAM=""))
    fake = types.SimpleNamespace(data_type=kinds, _pybind_module=scalars)
    monkeypatch.setitem(sys.modules, "cudnn", fake)


@pytest.mark.usefixtures("no_cudnn")
def test_the_derivative_reads_what_the_forward_made():
    """Of 50 tanh(score / 50) what stands in tanh, which cuDNN would compute twice."""
    scores, gradient = normal((B, N, T, K)), normal((B, N, T, K))
    band = attention_reference.Band()
    mod, _ = score_mod_written.written(score_mods.softcap(50.0), [], scores.shape, band, [])
    emission = score_mod_emission.Emission.with_derivative(mod, {})
    graph = ComputingGraph()
    emission.forward(graph, Computed(scores))
    assert graph.added == ["mul", "tanh", "mul"]
    emission.backward(graph, Computed(gradient))
    assert graph.added[3:] == ["mul", "tanh_backward", "mul"]


@pytest.mark.wide
@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize("name", [*USERS, *WHOLE, *ELEMENTWISE])
def test_cudnn_is_given_the_function_and_its_derivative(name):
    operands = []
    if name in USERS:
        change, _, shapes = USERS[name]
        operands = [normal((*(1,) * (4 - len(shape)), *shape)) for shape in shapes]
    elif name in WHOLE:
        change = lambda s, b, h, q, kv: jnp.where(WHOLE[name](q, kv), s, -jnp.inf)  # noqa: E731
    else:
        change = of_score(ELEMENTWISE[name])
    scores, gradient = normal((B, N, T, K)), normal((B, N, T, K))
    band = attention_reference.Band()
    mod, read = score_mod_written.written(change, operands, scores.shape, band, [])
    given = dict(zip(mod.ports, read, strict=True))
    tensors = {port: Computed(x) for port, x in given.items()}
    emission = score_mod_emission.Emission.with_derivative(mod, tensors)
    graph = ComputingGraph()
    out = emission.forward(graph, Computed(scores)).value
    at = [jnp.arange(size).reshape([-1 if i == j else 1 for j in range(4)])
          for i, size in enumerate(scores.shape)]  # fmt: skip
    want, pull = jax.vjp(lambda s: change(s, *at, *operands), scores)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(mod(scores, 0, given), want, rtol=2e-5, atol=2e-5)
    back = emission.backward(graph, Computed(gradient)).value
    np.testing.assert_allclose(back, pull(gradient)[0], rtol=2e-4, atol=2e-4)


def test_the_derivative_of_what_does_not_read_the_scores_is_zero():
    change = lambda s, b, h, q, kv: jnp.where(s == s, q - kv, 0) * 1.0  # noqa: E731
    mod, _ = score_mod_written.written(change, [], (B, N, T, K), attention_reference.Band(), [])
    assert score_mod_emission.derivative(mod.spec).is_zero
    inputs = qkv()
    gradients = jax.grad(lambda *x: ours(*x, score_mod=change).sum(), (0, 1))(*inputs)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


# -- plans without a GPU ---------------------------------------------------------------------------

_PLAIN = {"t": 256, "s": 256, "n": 4, "k": 4, "h": 64}
_HEADS, _ROWS = ((1, 4, 1, 1), "float32"), ((2, 1, 256, 1), "int32")
PLANNED = {
    "softcap causal": (score_mods.softcap(5.0), {}, CAUSAL, ()),
    "softcap": (score_mods.softcap(5.0), {"n": 8, "k": 2, "h": 128}, {}, ()),
    "softcap, odd": (score_mods.softcap(5.0), {"t": 100, "s": 77, "k": 2}, CAUSAL, ()),
    "softcap, window": (score_mods.softcap(5.0), {}, {"local_window_size": (64, 32)}, ()),
    "softcap, bottom right": (
        score_mods.softcap(5.0), {"t": 128}, {**CAUSAL, "bottom_right": True}, (),
    ),
    "softcap, lengths": (score_mods.softcap(5.0), {}, {"lengths": True, **CAUSAL}, ()),
    "softcap, bias": (score_mods.softcap(5.0), {}, {"bias": (1, 4, 256, 256)}, ()),
    "causal": (causal, {}, {}, ()),
    "prefix": (score_mods.prefix(16), {}, {}, ()),
    "alibi": (alibi, {}, CAUSAL, ()),
    "of examples": (lambda s, b, h, q, kv: s * (1.0 + 0.5 * b + 0.1 * h), {}, {}, ()),
    "slopes": (lambda s, b, h, q, kv, a: s - jnp.exp(a) * (q - kv) / 16, {}, CAUSAL, (_HEADS,)),
    "scale of a head": (scaled, {}, {}, (_HEADS,)),
    "table": (biased, {}, {}, (((1, 4, 256, 256), "bfloat16"),)),
    "table of examples": (biased, {}, {}, (((2, 1, 256, 256), "float32"),)),
    "row": (biased, {}, {}, (((2, 1, 1, 256), "bfloat16"),)),
    "documents": (score_mods.documents, {}, CAUSAL, (_ROWS, ((2, 1, 1, 256), "int32"))),
    "mask": (
        lambda s, b, h, q, kv, m: jnp.where(m | (kv == 0), s, -jnp.inf),
        {}, {}, (((2, 1, 256, 256), "bool"),),
    ),
    "blocks": (lambda s, b, h, q, kv: jnp.where(q // 48 >= kv // 48, s, -jnp.inf), {}, {}, ()),
    "remainders": (
        lambda s, b, h, q, kv: jnp.where((q >= kv) & ((q - kv) % 3 < 2), s, -jnp.inf), {}, {}, (),
    ),
    "gelu": (of_score(jax.nn.gelu), {}, {}, ()),
    "cases": (of_score(ELEMENTWISE["cases"]), {}, {}, ()),
    "bounds": (of_score(ELEMENTWISE["bounds"]), {}, {}, ()),
    "logarithm": (lambda s, b, h, q, kv: s - jnp.log(1.0 + abs(q - kv)), {}, {}, ()),
    "waves": (lambda s, b, h, q, kv: s + jnp.cos((q - kv) * 0.1), {}, {}, ()),
}  # fmt: skip


BEGUN_WITH_NUMBERS = ("cases", "bounds")  # their derivatives


def drawn(aval):
    if aval.dtype == "bool":
        return jnp.asarray(RNG.random(aval.shape) < 0.8)
    if aval.dtype == "int32":
        return jnp.broadcast_to(jnp.sort(jnp.asarray(RNG.integers(0, 3, 256), "int32")).reshape(
            1, 1, *((-1, 1) if aval.shape[3] == 1 else (1, -1))), aval.shape)  # fmt: skip
    return normal(aval.shape, aval.dtype)


def prepared(name, implementation="cudnn", dtype="bfloat16"):
    """A function of arrays alone, and their avals."""
    function, sizes, options, extra = PLANNED[name]
    sizes, options = {**_PLAIN, **sizes}, dict(options)
    t, s, n, k, h = sizes.values()
    avals = [S((2, t, n, h), dtype), *[S((2, s, k, h), dtype)] * 2]
    bias = options.pop("bias", None)
    if options.pop("lengths", False):
        options["query_seq_lengths"] = jnp.array([t - 56, t], "int32")
        options["key_value_seq_lengths"] = jnp.array([s, s - 30], "int32")
    avals += [S(bias, dtype)] if bias else []
    avals += [S(shape, kind if kind != "bfloat16" else dtype) for shape, kind in extra]
    options |= {"score_mod": function, "implementation": implementation}

    def call(q, k, v, *others):
        if bias:
            return ours(q, k, v, *others, **options)
        return ours(q, k, v, score_mod_operands=others, **options)

    return call, avals


def gradients(function, places):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), places)


def plans_of(name, gpu):
    function, avals = prepared(name, None)
    with jc.target(gpu):
        return jc.plans(gradients(function, (0, 1, 2)), *avals)


@pytest.mark.deviceless
def test_causal_softcap_is_one_plan_forward_and_one_backward():
    plans = plans_of("softcap causal", "H200")
    assert [*plans] == ["dot_product_attention", "dot_product_attention (backward)"]
    for plan in plans.values():
        (segment,) = plan.segments
        assert segment.plan is not None


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *((n, "H200") for n in PLANNED if n not in ("softcap causal", *BEGUN_WITH_NUMBERS)),
        ("softcap causal", "B200"),
        ("documents", "B200"),
    ],
)
def test_cudnn_plans_it(name, gpu):
    """Where some query may see no key XLA makes its statistic finite before the backward."""
    forward, backward = plans_of(name, gpu).values()
    (segment,) = forward.segments
    assert segment.plan is not None
    *before, last = backward.segments
    assert last.plan is not None
    assert [s.spec.calls[-1].node.method for s in before] in ([], ["binary_select"])


@pytest.mark.deviceless
@pytest.mark.parametrize("name", BEGUN_WITH_NUMBERS)
def test_backwards_that_begin_with_a_number_are_left_to_xla(name):
    forward, backward = plans_of(name, "H200").values()
    assert [segment.plan is not None for segment in forward.segments] == [True]
    assert not backward.execution_plans


@pytest.mark.deviceless
def test_what_cudnn_does_not_plan_is_left_to_xla_with_a_reason():
    _, avals = prepared("softcap, lengths", None)
    lengths = jnp.array([200, 256], "int32")
    call = lambda q, k, v: ours(  # noqa: E731
        q, k, v, is_causal=True, bottom_right=True, score_mod=score_mods.softcap(5.0),
        query_seq_lengths=lengths, key_value_seq_lengths=lengths,
    )  # fmt: skip
    with jc.target("H200"):
        plans = jc.plans(gradients(call, (0, 1, 2)), *avals)
        (segment,) = plans["dot_product_attention (backward)"].segments
        assert segment.plan is None
        assert "not supported" in segment.reason
        with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
            jc.plans(gradients(call, (0, 1, 2)), *avals)


@pytest.mark.deviceless
def test_what_cudnn_fails_to_plan_is_not_asked_of_it():
    """Two selections by comparisons with operands: cuDNN 9.19 ends the process."""

    def change(score, b, h, q, kv, a, c):
        return jnp.where(q < a, jnp.where(kv < c, score, -jnp.inf), -jnp.inf)

    x, n = S((2, 128, 4, 64), "bfloat16"), S((2, 1, 1, 1), "int32")
    call = lambda q, *of: ours(q, q, q, score_mod=change, score_mod_operands=of)  # noqa: E731
    with jc.target("H200"):
        (segment,) = jc.plan(call, x, n, n).segments
    assert segment.plan is None
    assert "combine the conditions with &" in segment.reason


REFUSED = {  # on an H200 these gave other numbers; the function, its operand, a word of the reason
    "a number first": (of_score(lambda s: 1 / (2 + s * s) - s), None, "first operand"),
    "a number selected": (
        lambda s, b, h, q, kv: jnp.where((q >= 30) & (q <= 40), -jnp.inf, s), None, "first operand",
    ),
    "dBias": (score_mods.softcap(5.0), "bias", "dBias"),
}  # fmt: skip


@pytest.mark.deviceless
@pytest.mark.parametrize("name", REFUSED)
def test_backwards_that_cudnn_computes_wrongly_are_left_to_xla(name):
    change, operand, words = REFUSED[name]
    bias = S((1, 4, 256, 256), "bfloat16")
    x = S((2, 256, 4, 64), "bfloat16")

    def loss(q, k, v, bias):
        given = bias if operand == "bias" else None
        return ours(q, k, v, given, score_mod=change).astype("float32").sum()

    places = (0, 3) if operand == "bias" else (0, 1, 2)
    with jc.target("H200"):
        forward, backward = jc.plans(jax.grad(loss, places), x, x, x, bias).values()
    assert len(forward.execution_plans) == 1
    assert not backward.execution_plans
    assert any(words in segment.reason for segment in backward.segments)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 1, 1, 1), (2, 1, 256, 1)),
        ((2, 4, 1, 1), (2, 4, 256, 1)),
        ((2, 1, 1, 256), (2, 1, 256, 256)),
        ((1, 4, 1, 1), (1, 4, 1, 1)),
        ((2, 1, 256, 1), (2, 1, 256, 1)),
        ((1, 1, 256, 256), (1, 1, 256, 256)),
    ],
)
def test_operands_reach_cudnn_in_shapes_that_it_reads_rightly(shape, wanted):
    x = S((2, 256, 4, 64), "bfloat16")
    call = lambda q, k, v, a: ours(q, k, v, score_mod=biased, score_mod_operands=(a,))  # noqa: E731
    with jc.target("H200"):
        (plan,) = jc.plans(call, x, x, x, S(shape, "float32")).values()
    (segment,) = plan.segments
    assert segment.plan is not None
    assert plan.spec.input_tensors[-1].shape == shape
    assert wire(plan.spec).input_tensors[-1].shape == wanted
    (advice,) = plan.explain().to_json()["segments"][0]["advice"] or [""]
    assert (f"to {list(wanted)}, {4 * math.prod(wanted):,} bytes" in advice) == (shape != wanted)


@pytest.mark.deviceless
def test_a_graph_computes_operands_that_cudnn_reads_wrongly_before():
    @jc.graph
    def attention(g, q, k, v, a):
        return g.sdpa(q, k, v, score_mod=biased, score_mod_operands=[g.exp(a)])[0]

    x = S((2, 4, 256, 64), "bfloat16")
    with jc.target("H200"):
        plan = jc.plan(attention, x, x, x, S((2, 1, 1, 256), "float32"))
    before, last = plan.segments
    assert before.plan is None
    assert last.plan is not None
    assert wire(last.spec).input_tensors[-1].shape == (2, 1, 256, 256)


# Of -inf, which cuDNN gives its backward where tiles are not full, these make infinity or NaN.
OF_INFINITY = {
    "negative": (of_score(jnp.negative), ()),
    "square": (of_score(jnp.square), ()),
    "silu": (of_score(jax.nn.silu), ()),
    "by place": (lambda s, b, h, q, kv: s * jnp.where(kv % 2 == 0, 1.0, -1.0), ()),
    "of late keys": (lambda s, b, h, q, kv: s * jnp.where(kv < 60, 1.0, -1.0), ()),
    "of some heads": (lambda s, b, h, q, kv: s * jnp.where(h < 2, 1.0, -1.0), ()),
    "of late queries": (lambda s, b, h, q, kv: s * jnp.where(q < 90, 1.0, -1.0), ()),
    "by distance": (lambda s, b, h, q, kv: s * jnp.cos(0.02 * (q - kv)), ()),
    "times an operand": (lambda s, b, h, q, kv, a: s * a, (_HEADS,)),
    "times an integer": (
        lambda s, b, h, q, kv, a: s * (a + 1).astype("float32"),
        (((1, 4, 1, 1), "int32"),),
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "watch",
    [(jax.debug_nans, True), (jax.debug_infs, True), (jax.transfer_guard, "disallow")],
    ids=["NaN", "infinity", "transfers"],
)
def test_functions_are_tried_on_infinity_whatever_is_watched_for(watch):
    context, value = watch
    q = S((2, 100, 4, 64), "bfloat16")
    for change in (jax.nn.silu, lambda s: 2.5 * s):
        run = functools.partial(ours, score_mod=of_score(change))
        with jc.target("H200"), context(value):
            assert len(jc.plans(gradients(run, (0, 1, 2)), q, q, q)) == 2


@pytest.mark.deviceless
@pytest.mark.parametrize("name", OF_INFINITY)
def test_a_backward_that_makes_no_number_of_what_tiles_hold_beyond_the_scores_is_xlas(name):
    change, operands = OF_INFINITY[name]
    avals = [S(shape, dtype) for shape, dtype in operands]

    def backward(t, s):
        q, k = S((2, t, 4, 64), "bfloat16"), S((2, s, 4, 64), "bfloat16")
        run = lambda q, k, v, *a: ours(q, k, v, score_mod=change, score_mod_operands=a)  # noqa: E731
        with jc.target("H200"):
            forward, backward = jc.plans(gradients(run, (0, 1, 2)), q, k, k, *avals).values()
        assert forward.segments[0].plan is not None
        return backward.segments[-1]

    assert backward(256, 384).plan is not None
    for t, s in ((256, 200), (100, 256)):
        segment = backward(t, s)
        assert segment.plan is None
        assert f"of {t} queries and {s} keys cuDNN's backward gives" in segment.reason
        assert "query_seq_lengths" in segment.reason


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("t", [96, 192, 256])
@pytest.mark.parametrize("name", OF_INFINITY)
def test_gradients_of_tiles_that_are_not_full_on_the_gpu(name, t):
    change, operands = OF_INFINITY[name]
    inputs = qkv(b=2, t=t, s=160, n=4, k=4, h=64, dtype="bfloat16")
    given = [drawn(S(shape, dtype)) for shape, dtype in operands]
    run = functools.partial(ours, score_mod=change, score_mod_operands=given)
    exact = functools.partial(run, implementation="xla")
    wide = [x.astype("float32") for x in inputs]
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, (0, 1, 2)))(*wide)
    got = jax.jit(run)(*inputs), *jax.jit(gradients(run, (0, 1, 2)))(*inputs)
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype):
    """Beside the reference in float32; gradients of operands of floats, too."""
    function, avals = prepared(name, None, dtype)
    exact, _ = prepared(name, "xla", "float32")
    operands = [drawn(a) for a in avals]
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in operands]
    places = tuple(i for i, is_float in enumerate(floats) if is_float)
    wide = [x.astype("float32") if f else x for x, f in zip(operands, floats, strict=True)]
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, places))(*wide)
    got = jax.jit(function)(*operands), *jax.jit(gradients(function, places))(*operands)
    for a, b in zip(got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all()
        assert relative_error(a, np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", ["by the function", "by a window"])
def test_queries_that_see_no_key_on_the_gpu(hidden):
    inputs = qkv(b=2, t=128, s=64, n=4, k=2, h=64, dtype="bfloat16")
    change, options, none = score_mods.softcap(5.0), {"local_window_size": (16, 0)}, slice(80, 128)
    if hidden == "by the function":
        none = slice(30, 41)
        change = lambda s, b, h, q, kv: jnp.where((q >= 30) & (q <= 40), -jnp.inf, s)  # noqa: E731
        options = {}
    attention = functools.partial(ours, score_mod=change, return_residual=True, **options)
    out, residual = jax.jit(attention)(*inputs)
    np.testing.assert_array_equal(np.asarray(out[:, none], np.float32), 0)
    assert np.isneginf(residual[:, none]).all()
    loss = lambda *x: (attention(*x)[0].astype("float32") ** 2).sum()  # noqa: E731
    exact = functools.partial(ours, score_mod=change, implementation="xla", **options)
    wide = [x.astype("float32") for x in inputs]
    want = jax.jit(gradients(exact, (0, 1, 2)))(*wide)
    for a, b in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs), want, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
def test_a_long_sequence_on_the_gpu():
    """Many tiles, grouped heads: indices are those of the whole, not of a tile."""
    inputs = qkv(b=1, t=2048, s=2048, n=8, k=2, h=128, dtype="bfloat16")
    change = lambda s, b, h, q, kv: 4 * jnp.tanh(s / 4) - (h + 1.0) * (q - kv) / 512  # noqa: E731
    call = functools.partial(ours, is_causal=True, score_mod=change, implementation="cudnn")
    exact = functools.partial(ours, is_causal=True, score_mod=change, implementation="xla")
    wide = [x.astype("float32") for x in inputs]
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, (0, 1, 2)))(*wide)
    got = jax.jit(call)(*inputs), *jax.jit(gradients(call, (0, 1, 2)))(*inputs)
    for a, b in zip(got, want, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2
