"""Attention: what jax.nn computes, its derivatives, batches and plans."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_reference

S = jax.ShapeDtypeStruct
ours, theirs = jc.ops.dot_product_attention, jax.nn.dot_product_attention
RNG = np.random.default_rng(0)


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(b=2, t=24, s=24, n=4, k=4, h=16, e=None, dtype="float32"):
    return (
        normal((b, t, n, h), dtype),
        normal((b, s, k, h), dtype),
        normal((b, s, k, e or h), dtype),
    )


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 2000)


def agree(f, g, operands, limit=3e-5):
    """Results and gradients of two functions."""
    along = normal(jax.eval_shape(g, *operands).shape)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, along, *operands):
        out, pull = jax.vjp(function, *operands)
        return out, pull(along)

    (got, gradients), (want, exact) = (both(each, along, *operands) for each in (f, g))
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=limit)
    for a, b in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=10 * limit)


def pairwise(*choices):
    """Half of the product, with each pair of choices in it."""
    indexed = itertools.product(*map(enumerate, choices))
    return [[x for _, x in one] for one in indexed if sum(i for i, _ in one) % 2]


# -- what jax.nn computes --------------------------------------------------------------------------

SHAPES = {
    "heads": {},
    "grouped heads": {"t": 17, "s": 33, "n": 6, "k": 2, "h": 8},
    "one head of keys": {"b": 1, "t": 32, "s": 16, "k": 1, "h": 8},
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "extra", "causal"),
    pairwise(SHAPES, ["", "bias", "bias of a row", "both"], [True, False]),
)
def test_results_and_gradients_are_those_of_jax_nn(name, extra, causal, request):
    if name != "heads":
        request.getfixturevalue("blocks")
    q, k, v = qkv(**SHAPES[name])
    (b, t, n, _), s = q.shape, k.shape[1]
    shapes = {"bias": (1, n, t, s), "bias of a row": (b, 1, 1, s), "both": (b, n, t, s)}
    bias = [normal(shapes[extra])] if extra in shapes else []
    mask = None
    if extra == "both":
        mask = jnp.asarray(RNG.random((b, 1, t, s)) < 0.8).at[..., 0].set(True)

    def function(attention):
        def call(q, k, v, bias=None):
            return attention(q, k, v, bias, mask, is_causal=causal)

        return call

    agree(function(ours), function(theirs), (q, k, v, *bias))


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("causal", "window", "of"),
    pairwise([False, True], [None, 5, (3, 2)], ["", "keys", "queries and keys"]),
)
def test_windows_and_lengths_are_those_of_jax_nn(causal, window, of):
    q, k, v = qkv(b=3, t=20, s=28)
    lengths = {}
    if "queries" in of:
        lengths["query_seq_lengths"] = jnp.array([20, 7, 1], "int32")
    if "keys" in of:
        lengths["key_value_seq_lengths"] = jnp.array([28, 21, 20], "int32")
    arguments = {"is_causal": causal, "local_window_size": window, **lengths}
    agree(functools.partial(ours, **arguments), functools.partial(theirs, **arguments), (q, k, v))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits(dtype):
    operands = qkv(dtype=dtype)
    got, want = (f(*operands, is_causal=True) for f in (ours, theirs))
    assert got.dtype == want.dtype
    assert relative_error(got.astype("float32"), want.astype("float32")) < 1e-2


def test_three_dimensions_scale_and_residual():
    q, k, v = (x[0] for x in qkv())
    for scale in (0.3, jnp.float32(0.3)):
        got = ours(q, k, v, scale=scale, return_residual=True)
        want = theirs(q, k, v, scale=0.3, return_residual=True)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, atol=1e-5)


# What a mask leaves to no query, to some queries alone, or only together with a band.
HIDDEN = {
    "rows": (jnp.ones((6, 6), bool).at[jnp.array([0, 3])].set(False), {}),
    "everything": (jnp.zeros((1, 1, 1, 1), bool), {}),
    "a padded example": (jnp.ones((2, 1, 1, 6), bool).at[0].set(False), {}),
    "padding on the left": (
        jnp.ones((2, 1, 1, 6), bool).at[1, ..., :2].set(False),
        {"is_causal": True},
    ),
    "a window": (jnp.ones((6, 6), bool).at[4, 3:].set(False), {"local_window_size": (1, 1)}),
    "of a head": (jnp.ones((1, 4, 6, 6), bool).at[:, 2, 5].set(False), {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [4, 2], ids=["", "grouped heads"])
@pytest.mark.parametrize("name", HIDDEN)
def test_where_a_mask_hides_all_keys_results_and_gradients_are_those_of_jax_nn(name, heads, dtype):
    """The mean of the values, which queries and keys do not move."""
    mask, more = HIDDEN[name]
    operands = [x.astype(dtype) for x in qkv(t=6, s=6, h=8, k=heads)]
    weights = normal((2, 6, 4, 8))
    rough = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]

    def loss(function, *operands):
        out = function(*operands, None, mask, **more)
        return (out.astype("float32") * weights).sum(), out

    def found(function, operands):
        (_, out), gradients = jax.value_and_grad(
            functools.partial(loss, function), (0, 1, 2), has_aux=True
        )(*operands)
        return [out, *gradients]

    exact = found(theirs, [x.astype("float32") for x in operands])
    for got, want in zip(jax.jit(found, static_argnums=0)(ours, operands), exact, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, "float32"), want, atol=rough * np.abs(want).max(), err_msg=name
        )


@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 1, 6), (2, 1, 6, 6), (1, 4, 6, 6)])
def test_what_is_added_is_not_larger_than_the_mask(shape):
    """Also where lengths and bands, which differ by example and query, hide its keys."""
    q, k, v = qkv(t=6, s=6, h=8)
    lengths = {"key_value_seq_lengths": jnp.array([3, 6], "int32"), "is_causal": True}
    mask = jnp.ones(shape, bool).at[..., :4].set(False)
    attend = functools.partial(ours, **lengths)
    (spec,) = graphs_of(lambda q, k, v: attend(q, k, v, None, mask), q, k, v)
    assert spec.tensor("bias").shape == (*(1,) * (4 - len(shape)), *shape)
    got, want = (attend(q, k, v, None, jnp.broadcast_to(mask, s)) for s in (shape, (2, 4, 6, 6)))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", HIDDEN)
def test_masks_promote_no_ranks(name):
    """Some run with jax_numpy_rank_promotion="raise", Flax's own tests among them."""
    mask, more = HIDDEN[name]
    q, k, v = qkv(t=6, s=6, h=8)
    want = ours(q, k, v, None, mask, **more)
    with jax.numpy_rank_promotion("raise"):
        got = ours(q, k, v, None, mask, **more)
    np.testing.assert_array_equal(got, want)


def test_gradients_of_hidden_queries_are_those_of_forward_mode():
    q, k, v = qkv(t=6, s=6, h=8)
    mask, more = HIDDEN["padding on the left"]

    def both(q, k, v):
        out, residual = ours(q, k, v, None, mask, return_residual=True, **more)
        return (jnp.sin(out).sum() + jnp.where(residual > -1e9, residual, 0).sum(), residual)

    steps = [normal(x.shape) for x in (q, k, v)]
    gradients, _ = jax.grad(both, (0, 1, 2), has_aux=True)(q, k, v)
    _, along, _ = jax.jvp(both, (q, k, v), tuple(steps), has_aux=True)
    pairs = zip(gradients, steps, strict=True)
    np.testing.assert_allclose(sum((g * s).sum() for g, s in pairs), along, rtol=1e-4)


@pytest.mark.parametrize("name", HIDDEN)
def test_the_residual_of_a_query_whose_keys_a_mask_hides_is_lower_than_any(name):
    """Whoever puts parts of the keys together by their residuals gives it no weight."""
    mask, more = HIDDEN[name]
    q, k, v = qkv(t=6, s=6, h=8)
    _, residual = ours(q, k, v, None, mask, return_residual=True, **more)
    sees = np.tri(6) if "is_causal" in more else np.ones((6, 6))
    if "local_window_size" in more:
        sees = np.abs(np.subtract.outer(np.arange(6), np.arange(6))) <= 1
    rows = ~(np.broadcast_to(mask, (2, 4, 6, 6)) & (sees > 0)).any(-1)
    assert rows.any()
    np.testing.assert_array_equal(np.asarray(residual).swapaxes(1, 2) < -1e38, rows)


def test_a_query_whose_keys_a_mask_hides_sees_its_sink():
    q, k, v = qkv(t=6, s=6, h=8)
    mask = jnp.ones((6, 6), bool).at[3].set(False)
    sink = jnp.zeros(4)

    def of(value):
        return ours(q, k, value, None, mask, sink=sink)

    assert not of(v)[:, 3].any()
    out, back = jax.vjp(of, v)
    (dv,) = back(jnp.zeros_like(out).at[:, 3].set(1.0))
    assert not dv.any()


def test_hidden_queries_beside_lengths_and_tiles():
    """The mean is of the values within the lengths; queries behind theirs stay 0."""
    q, k, v = qkv(t=6, s=6, h=8)
    mask = jnp.ones((6, 6), bool).at[jnp.array([1, 5])].set(False)
    queries, keys = jnp.array([6, 4], jnp.int32), jnp.array([3, 6], jnp.int32)
    v = v.at[0, 3:].set(1e4)
    got = ours(q, k, v, None, mask, query_seq_lengths=queries, key_value_seq_lengths=keys)
    np.testing.assert_allclose(got[0, 1], v[0, :3].mean(0), atol=1e-5)
    np.testing.assert_allclose(got[0, 5], v[0, :3].mean(0), atol=1e-5)
    np.testing.assert_allclose(got[1, 1], v[1].mean(0), atol=1e-5)
    np.testing.assert_array_equal(got[1, 5], 0)
    tiles = jnp.ones((1, 1, 1, 1), bool)
    got = ours(q, k, v, None, mask, block_mask=tiles)
    np.testing.assert_allclose(got[:, 1], v.mean(1), rtol=1e-5)
    assert not ours(q, k, v, None, mask, block_mask=~tiles).any()


def test_where_it_differs_from_jax_nn():
    """As documented: biases of -inf."""
    q, k, v = qkv(t=6, s=6, h=8)
    low = jnp.zeros((6, 6)).at[3].set(-jnp.inf)
    np.testing.assert_array_equal(ours(q, k, v, low)[:, 3], 0)


@pytest.mark.usefixtures("blocks")
def test_what_is_no_number_stays_none_as_in_jax_nn():
    """In results, statistics and gradients, of a query, a key, a value and a score."""
    operands = [*qkv(b=2, t=24, s=24, h=8), normal((2, 4, 24, 24))]

    @jax.jit
    def missing(*operands):
        def of(f):
            def loss(*x):
                out, residual = f(*x, return_residual=True)
                return jnp.sum(out**2), (out, residual)

            gradients, results = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*operands)
            return [jnp.isnan(x) for x in (*results, *gradients)]

        return of(ours), of(theirs)

    for at, x in enumerate(operands):
        got, want = missing(*operands[:at], x.at[0, 3, 2, 1].set(jnp.nan), *operands[at + 1 :])
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


# -- beyond jax.nn ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks")
def test_values_of_another_size():
    q, k, v = qkv(h=16, e=24)
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 4)
    np.testing.assert_allclose(ours(q, k, v), jnp.einsum("bnts,bsne->btne", weights, v), atol=1e-5)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("lengths", [False, True])
def test_the_last_query_and_key_at_the_same_position(lengths):
    """As where the keys of earlier tokens are cached."""
    q, k, v = qkv(b=2, t=5, s=21)
    given, ends = {}, [(5, 21), (5, 21)]
    if lengths:
        ends = [(5, 21), (3, 12)]
        given["query_seq_lengths"] = jnp.array([5, 3], "int32")
        given["key_value_seq_lengths"] = jnp.array([21, 12], "int32")
    got = ours(q, k, v, is_causal=True, bottom_right=True, local_window_size=(6, 0), **given)
    for at, (queries, keys) in enumerate(ends):
        for i in range(queries):
            last = i + keys - queries
            seen = slice(max(last - 6, 0), last + 1)
            one = theirs(q[at, i : i + 1], k[at, seen], v[at, seen])
            np.testing.assert_allclose(got[at, i], one[0], atol=1e-5)
        np.testing.assert_array_equal(got[at, queries:], 0)


@pytest.mark.usefixtures("blocks")
def test_queries_that_see_no_key():
    q, k, v = qkv(b=2, t=6, s=6)
    lengths = jnp.array([0, 6], "int32")
    masked = functools.partial(ours, key_value_seq_lengths=lengths, return_residual=True)
    out, residual = masked(q, k, v)
    np.testing.assert_array_equal(out[0], 0)
    assert np.isneginf(residual[0]).all()
    gradients = jax.grad(lambda *x: (masked(*x)[0] ** 2).sum(), (0, 1, 2))(q, k, v)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient[0], 0)
        assert np.isfinite(gradient).all()


@pytest.mark.usefixtures("blocks")
def test_lengths_are_brought_into_range_and_nothing_is_read_behind_them():
    q, k, v = qkv(b=2, t=5, s=3, h=8)
    nan = [x.at[1, 2:].set(jnp.nan) for x in (q, k, v)]

    @jax.jit
    def run(operands, lengths):
        queries, keys = lengths

        def loss(*x):
            lengths = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
            out = ours(*x, is_causal=True, bottom_right=True, **lengths)
            return jnp.sum(out**2), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*operands)

    def same(a, b):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)

    beyond, within, short = (
        jnp.array(x, "int32") for x in ([[9, -2], [5, 3]], [[5, 0], [3, 3]], [[5, 2], [3, 2]])
    )
    same(run((q, k, v), beyond), run((q, k, v), within))
    same(run(nan, short), run((q, k, v), short))


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("which", ["both", "residual"])
def test_cotangents_of_the_residual(which):
    q, k, v = qkv(n=4, k=2)
    bias = normal((1, 4, 24, 24))

    def plain(q, k, v, bias):
        wide = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", q, wide[0]) / 4 + bias
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), wide[1])
        return out, jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 1, 2)

    def total(f):
        def loss(*operands):
            out, residual = f(*operands)
            return jnp.sum(jnp.sin(residual)) + (jnp.sum(out**2) if which == "both" else 0)

        return loss

    got = jax.grad(total(functools.partial(ours, return_residual=True)), (0, 1, 2, 3))(
        q, k, v, bias
    )
    want = jax.grad(total(plain), (0, 1, 2, 3))(q, k, v, bias)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("rank", [3, 4])
def test_heads_may_stand_before_tokens(rank):
    operands = qkv(b=1, t=9, s=11, n=4, k=2, e=6)
    more = {"sink": normal((4,)), "key_value_seq_lengths": jnp.array([7], "int32")}
    more |= {"query_seq_lengths": jnp.array([8], "int32"), "return_residual": True}
    if rank == 3:
        operands, more = [x[0] for x in operands], {"is_causal": True, "return_residual": True}

    @functools.partial(jax.jit, static_argnums=0)
    def run(heads_first, *x):
        turn = lambda y: jnp.swapaxes(y, rank - 3, rank - 2) if heads_first else y  # noqa: E731
        both = lambda *x: jax.tree.map(  # noqa: E731
            turn, ours(*map(turn, x), heads_first=heads_first, **more)
        )
        (out, logs), pull = jax.vjp(both, *x)
        return out, logs, pull((jnp.sin(out), jnp.zeros_like(logs)))

    got, want = (jax.tree.leaves(run(first, *operands)) for first in (True, False))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(jc.GraphError, match=r"\(B, N, T, H\)"):
        ours(operands[0], operands[1][None], operands[2], heads_first=True)


# -- transformations -------------------------------------------------------------------------------


def test_a_gradient_is_one_forward_and_one_backward():
    operands = qkv(dtype="bfloat16")
    loss = lambda *x: ours(*x, is_causal=True).astype("float32").sum()  # noqa: E731
    step = jax.grad(loss, (0, 1, 2))
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    forward, backward = graphs_of(step, *operands)
    assert methods(forward) == ["sdpa"]
    assert methods(backward) == ["sdpa_backward"]
    assert [t.dtype for t in forward.output_tensors] == ["bfloat16", "float32"]
    (alone,) = graphs_of(ours, *operands)
    assert len(alone.outputs) == 1  # no statistic, where nothing reads it


def cubes(f):
    return lambda *x: jnp.sum(f(*x) ** 3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_gradients_of_a_result_in_float8_do_not_go_on_from_it(dtype):
    """The result is rounded, its derivative is not."""

    def attention(g, q, k, v):
        return g.sdpa(q, k, v, attn_scale=0.25)[0].set_data_type(dtype)

    def exact(q, k, v):
        return jax.nn.softmax(0.25 * q @ jnp.swapaxes(k, 2, 3)) @ v

    q, k, v, along = np.random.default_rng(0).standard_normal((4, 2, 2, 24, 16), np.float32)
    along = along.astype(dtype)
    got = jax.vjp(jc.graph(attention), q, k, v)[1](along)
    want = jax.vjp(exact, q, k, v)[1](along.astype(np.float32))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
def test_forward_mode_and_second_derivatives():
    q, k, v = qkv(b=1, t=6, s=7, n=2, k=1, h=4)
    along = tuple(map(normal, ((1, 6, 2, 4), (1, 7, 1, 4), (1, 7, 1, 4))))
    for attention in (functools.partial(ours, is_causal=True), ours):
        plain = functools.partial(theirs, is_causal=attention is not ours)
        got, want = (jax.jvp(f, (q, k, v), along)[1] for f in (attention, plain))
        np.testing.assert_allclose(got, want, atol=1e-5)
        got, want = (
            jax.jvp(jax.grad(cubes(f), (0, 1, 2)), (q, k, v), along)[1] for f in (attention, plain)
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
        got, want = (
            jax.grad(lambda q, f=f: jnp.sum(jax.grad(cubes(f))(q, k, v) ** 2))(q)
            for f in (attention, plain)
        )
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


BATCHES = {"all": (0, 0, 0, 0), "queries": (0, None, None, None), "bias": (None, None, None, 0)}


@pytest.mark.wide
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_vmap_is_a_dimension_of_examples(name, examples):
    axes = BATCHES[name]
    shapes = [(examples, 9, 4, 8), (examples, 11, 2, 8), (examples, 11, 2, 8), (1, 4, 9, 11)]
    operands = [
        normal(shape if a is None else (3, *shape)) for shape, a in zip(shapes, axes, strict=True)
    ]
    gradient = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2, 3))  # noqa: E731
    for transformed in (lambda f: f, gradient):
        got, want = (jax.vmap(transformed(f), axes)(*operands) for f in (ours, theirs))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)
    (spec,) = graphs_of(jax.vmap(ours, axes), *operands)
    ((_, q), *_) = spec.calls[-1].inputs
    if axes[3] is None:  # nor is the bias repeated
        assert spec.tensor(dict(spec.calls[-1].inputs)["bias"]).shape == shapes[3]
    assert spec.tensor(q).shape[0] == (
        3 * examples if examples == 1 or axes[3] is None else examples
    )


def test_the_batch_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    operands = qkv(b=8)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(mapped)(*operands), theirs(*operands), atol=1e-5)


def test_memory_is_linear_in_the_number_of_queries():
    """Scores of 16k x 16k in float32 would be a gigabyte a head."""
    x = S((1, 16384, 1, 16), "float32")
    loss = lambda q, k, v: ours(q, k, v, is_causal=True).sum()  # noqa: E731
    for function in (loss, jax.grad(loss, (0, 1, 2))):
        assert used(function, x, x, x) < 2**29


def used(function, *avals):
    """Bytes of a program's temporary arrays."""
    return jax.jit(function).lower(*avals).compile().memory_analysis().temp_size_in_bytes


def test_a_bias_of_all_queries_is_there_once():
    """One for each block of queries would be half a gigabyte."""
    x, bias = S((1, 8192, 32, 8), "float32"), S((1, 32, 1, 8192), "float32")
    assert used(lambda q, bias: ours(q, q, q, bias), x, bias) < 2**28


# -- errors ----------------------------------------------------------------------------------------

Q = jnp.ones((2, 8, 4, 16), "bfloat16")
WRONG = {
    "heads": (lambda: ours(Q, Q[:, :, :3], Q[:, :, :3]), ["do not fit together", "N a multiple"]),
    "sizes": (lambda: ours(Q, Q[..., :8], Q), ["do not fit together", "[2, 8, 4, 8]"]),
    "dtypes": (lambda: ours(Q, Q, Q.astype("float16")), ["different dtypes", "float16"]),
    "integers": (lambda: ours(*[Q.astype("int32")] * 3), ["query has a dtype", "astype"]),
    "rank": (lambda: ours(Q, Q[0], Q), ["key has the wrong rank", "(B, T, N, H)", "[8, 4, 16]"]),
    "bias": (lambda: ours(Q, Q, Q, jnp.ones((3, 1, 1, 8))), ["bias does not fit", "[2, 4, 8, 8]"]),
    "mask": (lambda: ours(Q, Q, Q, None, jnp.ones((8, 8))), ["mask is not boolean", "as bias"]),
    "a mask as bias": (
        lambda: ours(Q, Q, Q, jnp.ones((8, 8), bool)),
        ["bias holds no real numbers", "bool[1, 1, 8, 8]", "mask="],
    ),
    "complex": (lambda: ours(Q, Q, Q, jnp.ones((8, 8), "complex64")), ["no real", "complex64"]),
    "no elements": (lambda: ours(Q[..., :0], Q[..., :0], Q), ["no elements", "[2, 8, 4, 0]"]),
    "window": (lambda: ours(Q, Q, Q, local_window_size=(1, -1)), ["local_window_size", "(1, -1)"]),
    "window of a kind": (
        lambda: ours(Q, Q, Q, local_window_size=1.5),
        ["local_window_size", "1.5"],
    ),
    "lengths": (
        lambda: ours(Q, Q, Q, query_seq_lengths=jnp.ones(2)),
        ["query_seq_lengths is not valid", "int32[2]", "float32[2]"],
    ),
    **{
        name: (
            lambda name=name: jax.jit(lambda x: ours(Q, Q, Q, **{name: x}))(True),
            [f"{name} is no Python bool", "static", f"static_argnames='{name}'"],
        )
        for name in ("is_causal", "bottom_right", "alibi", "return_residual")
    },
    "implementation": (lambda: ours(Q, Q, Q, implementation="flash"), ["flash", "split"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def lengths_of(batch):
    return S((batch, 1, 1, 1), "int32")


X = S((2, 4, 8, 16), "bfloat16")
NODES = {
    "alignment": ({"diagonal_alignment": "LEFT"}, ["unknown diagonal_alignment", "'TOP_LEFT'"]),
    "left": ({"diagonal_band_left_bound": 0}, ["diagonal_band_left_bound", "at least 1"]),
    "right": ({"diagonal_band_right_bound": -1}, ["diagonal_band_right_bound", "at least 0"]),
    "a flag": ({"diagonal_band_right_bound": True}, ["diagonal_band_right_bound", "True"]),
    "scale": (
        {"attn_scale": "1"},
        ["'attn_scale' is no number", "attributes are static", "str: '1'"],
    ),
    "accumulator": ({"compute_data_type": "float16"}, ["compute_data_type", "float32"]),
}


@pytest.mark.parametrize("what", NODES)
def test_errors_of_the_node(what):
    attributes, parts = NODES[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        jc.graph(lambda g, q: g.sdpa(q, q, q, **attributes)).trace(X)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_errors_of_the_nodes_operands():
    wrong = {
        "one of the lengths": (lambda g, q, n: g.sdpa(q, q, q, seq_len_q=n), X, lengths_of(2)),
        "expected: [2, 1, 1, 1]": (
            lambda g, q, n: g.sdpa(q, q, q, seq_len_q=n, seq_len_kv=n), X, lengths_of(3),
        ),
        "'bias' does not fit": (
            lambda g, q, b: g.sdpa(q, q, q, bias=b), X, S((2, 4, 8), "bfloat16"),
        ),
        "numbers of heads": (
            lambda g, q, k: g.sdpa(q, k, k), X, S((2, 3, 8, 16), "bfloat16"),
        ),
        "dBias without a bias": (
            lambda g, q, n: g.sdpa_backward(q, q, q, q, q, n, dBias=True),
            X, S((2, 4, 8, 1), "float32"),
        ),
        "'stats' has the wrong shape": (
            lambda g, q, n: g.sdpa_backward(q, q, q, q, q, n), X, S((2, 4, 8, 2), "float32"),
        ),
    }  # fmt: skip
    for text, (function, *operands) in wrong.items():
        with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
            jc.graph(function).trace(*operands)
        assert text in str(caught.value), str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

PLANNED = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "grouped": ({"n": 8, "k": 2}, {"is_causal": True}),
    "one head of keys": ({"n": 8, "k": 1}, {}),
    "float16": ({"dtype": "float16"}, {}),
    "lengths that differ": ({"t": 128, "s": 320}, {}),
    "odd lengths": ({"t": 100, "s": 77}, {}),
    "bottom right": ({"t": 128, "s": 256}, {"is_causal": True, "bottom_right": True}),
    "window": ({}, {"is_causal": True, "local_window_size": (64, 0)}),
    "small heads": ({"h": 32}, {}),
    "large heads": ({"h": 128}, {"is_causal": True}),
    "bias": ({}, {"bias": (1, 4, 256, 256)}),
    "bias of examples": ({}, {"bias": (2, 1, 256, 256)}),
    "lengths": ({}, {"lengths": True}),
    "causal with lengths": ({}, {"lengths": True, "is_causal": True}),
}


def prepared(sizes, options, implementation="cudnn"):
    """A function of arrays alone, and their avals."""
    sizes = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 4, "h": 64, "dtype": "bfloat16"} | sizes
    b, t, s, n, k, h, dtype = sizes.values()
    avals = [S((b, t, n, h), dtype), *[S((b, s, k, h), dtype)] * 2]
    options = dict(options)
    bias, lengths = options.pop("bias", None), options.pop("lengths", False)
    avals += [S(bias, dtype)] if bias else []

    def function(q, k, v, bias=None):
        given = {}
        if lengths:
            given["query_seq_lengths"] = jnp.full(b, t - 3, jnp.int32)
            given["key_value_seq_lengths"] = jnp.full(b, s - 5, jnp.int32)
        return ours(q, k, v, bias, implementation=implementation, **options, **given)

    return function, avals


def gradients(function, count):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), tuple(range(count)))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *((name, "H200") for name in PLANNED),
        *itertools.product(["grouped", "bias"], ["A100", "B200"]),
    ],
)
def test_forward_and_backward_are_a_plan_each(name, gpu):
    function, avals = prepared(*PLANNED[name])
    with jc.target(gpu):
        plans = jc.plans(gradients(function, len(avals)), *avals)
    assert [*plans] == ["dot_product_attention", "dot_product_attention (backward)"]
    for plan in plans.values():
        (segment,) = plan.segments
        assert segment.plan is not None


@pytest.mark.deviceless
def test_arrays_of_tokens_are_read_where_they_lie():
    """(B, T, N, H) in memory is cuDNN's (B, N, T, H) with other strides: nothing is copied."""
    function, avals = prepared({}, {"is_causal": True})
    with jc.target("H200"):
        lowered = jax.jit(gradients(function, 3)).trace(*avals).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "@jax_cudnn" in line]
    assert len(calls) == 2
    for call in calls:
        layouts = call.partition("operand_layouts = ")[2]
        assert "dense<[3, 1, 2, 0]> : tensor<4xindex>" in layouts
        assert "dense<[3, 1, 2, 0]> : tensor<4xindex>" in call.partition("result_layouts = ")[2]


@pytest.mark.deviceless
def test_arrays_of_heads_are_read_where_they_lie():
    q, k = S((2, 4, 256, 64), "bfloat16"), S((2, 2, 256, 64), "bfloat16")
    attention = functools.partial(ours, heads_first=True, is_causal=True, implementation="cudnn")
    with jc.target("H200"):
        step = jax.jit(gradients(attention, 3)).trace(q, k, k)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@jax_cudnn" in line]
    assert len(calls) == 2
    for call in calls:
        layouts = call.partition("operand_layouts = ")[2]
        assert "dense<[3, 1, 2, 0]> : tensor<4xindex>" not in layouts
        assert "dense<[3, 2, 1, 0]> : tensor<4xindex>" in layouts
    assert "stablehlo.transpose" not in text


def only(plans):
    (plan,) = plans.values()
    return plan


@pytest.mark.deviceless
def test_explain_says_what_a_mask_costs_and_what_to_use_instead():
    with jc.target("H200"):
        x = S((2, 256, 4, 64), "bfloat16")
        mask = S((1, 1, 256, 256), "bool")
        plan, free = (
            only(jc.plans(functools.partial(ours, **keywords), x, x, x, None, *more))
            for keywords, more in (({}, [mask]), ({"is_causal": True}, []))
        )
    (segment,) = plan.explain().to_json()["segments"]
    (advice,) = segment["advice"]
    for words in (f"{2 * 256 * 256:,} bytes", "is_causal", "local_window_size", "lengths"):
        assert words in advice
        assert words in " ".join(str(plan.explain()).split())
    assert [s["advice"] for s in free.explain().to_json()["segments"]] == [[]]


@pytest.mark.deviceless
def test_heads_of_no_multiple_of_eight_are_refused_with_what_to_do():
    x = S((2, 128, 4, 60), "bfloat16")
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError) as caught:
        jc.plan(functools.partial(ours, implementation="cudnn"), x, x, x)
    assert "pad query, key and value with zeros to 64" in str(caught.value)


@pytest.mark.deviceless
def test_a_gradient_in_float32_is_left_to_xla_with_a_reason():
    q = S((2, 128, 4, 64), "float32")
    loss = lambda *x: ours(*x).sum()  # noqa: E731
    with jc.target("H200"):
        plans = jc.plans(jax.grad(loss, (0, 1, 2)), q, q, q)
        (segment,) = plans["dot_product_attention (backward)"].segments
        assert segment.plan is None
        assert segment.reason
        with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
            jc.plans(jax.grad(loss, (0, 1, 2)), q, q, q)


@pytest.mark.deviceless
def test_lengths_of_float32_are_xlas():
    """cuDNN writes results of queries behind them."""
    q = S((2, 64, 4, 64), "float32")
    run = functools.partial(ours, key_value_seq_lengths=jnp.array([64, 30], "int32"))
    with jc.target("H200"):
        (segment,) = jc.plan(run, q, q, q).segments
    assert segment.plan is None
    assert "of float32" in segment.reason
    assert "behind seq_len_q" in segment.reason


OF_SEVERAL_DTYPES = pytest.mark.parametrize(
    ("port", "dtype"), itertools.product(["v", "k", "o", "dO"], ["float32", "float16"])
)


def of_several_dtypes(port, dtype):
    """A graph of attention, and of its backward, with one operand in another dtype; and arrays."""

    def forward(g, q, k, v):
        return g.sdpa(q, k, v, attn_scale=0.125)[0]

    def backward(g, q, k, v, o, dO, stats):
        return g.sdpa_backward(q, k, v, o, dO, stats, attn_scale=0.125)

    shape = (2, 4, 64, 64)
    given = {name: normal(shape, "bfloat16") for name in ("q", "k", "v", "o", "dO")}
    given["stats"] = normal((2, 4, 64, 1)) + 4
    given[port] = given[port].astype(dtype)
    function = forward if port == "v" else backward
    return jc.graph(function), [*given.values()][: 3 if port == "v" else 6]


@pytest.mark.deviceless
@OF_SEVERAL_DTYPES
def test_operands_of_several_dtypes_are_xlas(port, dtype):
    """cuDNN plans them, and reads all in one dtype."""
    graph, operands = of_several_dtypes(port, dtype)
    with jc.target("H200"):
        (segment,) = jc.plan(graph, *operands).segments
    assert segment.plan is None
    assert f"{port} {dtype}" in segment.reason


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("given", ["", "lengths", "bias", "row", "mask", "window", "sink"])
def test_forward_of_float32_on_the_gpu(given, causal):
    q, k, v = qkv(b=2, t=96, s=160, n=4, k=2, h=64)
    more = {
        "lengths": {
            "query_seq_lengths": jnp.array([40, 96], "int32"),
            "key_value_seq_lengths": jnp.array([160, 90], "int32"),
        },
        "bias": {"bias": normal((1, 4, 96, 160))},
        "row": {"bias": normal((2, 1, 1, 160))},
        "mask": {"mask": jnp.asarray(RNG.random((2, 1, 1, 160)) < 0.8).at[..., 0].set(True)},
        "window": {"local_window_size": (20, 9)},
        "sink": {"sink": normal(4)},
    }.get(given, {})
    run = functools.partial(ours, is_causal=causal, return_residual=True, **more)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(run, implementation="xla"))(q, k, v)
    for a, b in zip(jax.jit(run)(q, k, v), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2)


@pytest.mark.gpu
@OF_SEVERAL_DTYPES
def test_operands_of_several_dtypes_on_the_gpu(port, dtype):
    graph, operands = of_several_dtypes(port, dtype)
    with jc.implementation("xla"):
        want = jax.tree.leaves(jax.jit(graph)(*(x.astype("float32") for x in operands)))
    for a, b in zip(jax.tree.leaves(jax.jit(graph)(*operands)), want, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype):
    """Beside the reference in float32."""
    sizes, options = PLANNED[name]
    function, avals = prepared({**sizes, "dtype": dtype}, options)
    operands = [normal(a.shape, a.dtype) for a in avals]
    wide = [x.astype("float32") for x in operands]
    exact, _ = prepared({**sizes, "dtype": "float32"}, options, "xla")
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, len(wide)))(*wide)
    got = jax.jit(function)(*operands), *jax.jit(gradients(function, len(operands)))(*operands)
    for a, b in zip(got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all()
        assert relative_error(a, np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
def test_heads_before_tokens_on_the_gpu():
    operands = [jnp.swapaxes(x, 1, 2) for x in qkv(t=192, s=256, k=2, h=64, dtype="bfloat16")]
    run = functools.partial(ours, heads_first=True, is_causal=True)
    exact = functools.partial(run, implementation="xla")
    wide = [x.astype("float32") for x in operands]
    got = jax.jit(run)(*operands), *jax.jit(gradients(run, 3))(*operands)
    want = jax.jit(exact)(*wide), *jax.jit(gradients(exact, 3))(*wide)
    for a, b in zip(got, want, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


# The scale is small: of equal queries and keys nearly all weight would be on the own key, and
# gradients would be nothing but rounding.
ONE_ARRAY = {
    "keys and values": lambda g, q, k, *bias: g.sdpa(q, k, k, *bias, attn_scale=0.03)[0],
    "queries and keys": lambda g, q, k, *bias: g.sdpa(q, q, k, *bias, attn_scale=0.03)[0],
    "all": lambda g, q, k, *bias: g.sdpa(k, k, k, *bias, attn_scale=0.03)[0],
}


def of_one_array(name, implementation):
    """Results and gradients as a function; the engines with and without a bias differ."""
    graph = jc.graph(ONE_ARRAY[name]).with_options(implementation=implementation)

    def run(along, *operands):
        out, pull = jax.vjp(graph, *operands)
        return out, *pull(along)

    return run


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ONE_ARRAY)
def test_one_array_at_several_ports_is_planned(name):
    """The frontend turns the dims of keys and values, which would be turned twice."""
    x = S((2, 4, 128, 64), "bfloat16")
    for bias in ((), (S((1, 4, 128, 128), "bfloat16"),)):
        with jc.target("H200"):
            plans = jc.plans(of_one_array(name, "cudnn"), x, x, x, *bias)
        assert len(plans) == 2
        for plan in plans.values():
            assert len(plan.execution_plans) == 1  # XLA adds up what has several gradients


@pytest.mark.deviceless
def test_results_in_other_dtypes_are_not_asked_for():
    """On an H200 cuDNN took them, and wrote 16 bits into 32, or missed a pointer."""
    x, stats = S((2, 4, 128, 64), "bfloat16"), S((2, 4, 128, 1), "float32")

    def gradients(g, q, k, v, o, dO, stats):
        dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
        return dq, dk.set_data_type("float32"), dv

    def forward(g, q, k, v):
        return g.sdpa(q, k, v)[0].set_data_type("float32")

    for function, avals, port in (
        (gradients, (x, x, x, x, x, stats), "dK in bfloat16 alone"),
        (forward, (x, x, x), "O in bfloat16 alone"),
    ):
        with jc.target("H200"):
            (segment,) = jc.plan(jc.graph(function), *avals).segments
        assert segment.plan is None
        assert port in segment.reason


@pytest.mark.deviceless
def test_what_reads_a_result_runs_behind_the_plan():
    """On an H200 a plan that added to dQ missed a pointer. Results stay in 16 bits for it."""
    x, stats = S((2, 4, 128, 64), "bfloat16"), S((2, 4, 128, 1), "float32")
    forward = lambda g, q, k, v: g.relu(g.sdpa(q, k, v)[0])  # noqa: E731

    def backward(g, q, k, v, o, dO, stats):
        dq, dk, dv = g.sdpa_backward(q, k, v, o, dO, stats)
        return g.add(dq, q), dk, dv

    for function, avals in ((forward, (x, x, x)), (backward, (x, x, x, x, x, stats))):
        with jc.target("H200"):
            plan = jc.plan(jc.graph(function), *avals)
        attention, behind = plan.segments
        assert "a plan by itself" in attention.reason or "a plan by itself" in behind.reason
        written = attention.spec.output_tensors
        assert {t.dtype for t in written if t.shape[-1] > 1} == {"bfloat16"}  # not of Stats
        assert attention.plan is not None
        assert "sdpa" not in str([call.node.method for call in behind.spec.calls])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_ARRAY)
def test_one_array_at_several_ports_on_the_gpu(name):
    operands = [normal((2, 4, 128, 64), "bfloat16") for _ in range(3)]
    for bias in ((), (normal((1, 4, 128, 128), "bfloat16"),)):
        got, want = (jax.jit(of_one_array(name, i))(*operands, *bias) for i in ("cudnn", "xla"))
        for a, b in zip(got, want, strict=True):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("band", ["none", "causal", "window", "bottom right"])
def test_statistics_on_the_gpu(band):
    """Natural logarithms of the sums of exponentials of scaled scores."""
    bounds = {
        "causal": {"diagonal_band_right_bound": 0},
        "window": {"diagonal_band_right_bound": 0, "diagonal_band_left_bound": 16},
        "bottom right": {"diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
    }.get(band, {})
    graph = jc.graph(lambda g, q, k, v: g.sdpa(q, k, v, attn_scale=0.125, **bounds))
    shapes = (2, 4, 64, 64), (2, 2, 96, 64), (2, 2, 96, 64)
    operands = [normal(shape, "bfloat16") for shape in shapes]
    got = jax.jit(graph.with_options(implementation="cudnn"))(*operands)
    oracle.check_outputs(graph.trace(*operands)[1].spec, operands, got, on_gpu=True)


# Queries that only a band hides all keys of: sizes, arguments, lengths of queries and of keys.
UNSEEING = {
    "window": ({"t": 256, "s": 128}, {"local_window_size": (16, 0)}, None, None),
    "window of all lengths": (
        {"t": 256, "s": 128}, {"local_window_size": (16, 0)}, [256, 256], [128, 128],
    ),
    "window and short keys": (
        {}, {"is_causal": True, "local_window_size": (16, 0)}, [256, 256], [40, 256],
    ),
    "more queries than keys": (
        {}, {"is_causal": True, "bottom_right": True}, [256, 200], [99, 200],
    ),
}  # fmt: skip


def unseeing(name, implementation, dtype):
    """Results, residual and gradients of q, k and v by both, as a function."""
    sizes, options, *lengths = UNSEEING[name]
    shapes = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 2, "h": 64} | sizes
    keywords = dict(options, implementation=implementation, return_residual=True)
    for port, given in zip(("query", "key_value"), lengths, strict=True):
        if given is not None:
            keywords[f"{port}_seq_lengths"] = jnp.array(given, "int32")

    def run(q, k, v):
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        (out, logs), pull = jax.vjp(functools.partial(ours, **keywords), q, k, v)
        return out, logs, *pull((jnp.cos(out), jnp.zeros_like(logs)))

    return run, qkv(**shapes, dtype="bfloat16")


@pytest.mark.deviceless
@pytest.mark.parametrize("name", UNSEEING)
def test_queries_that_a_band_hides_all_keys_of_are_planned(name):
    run, operands = unseeing(name, "split", "bfloat16")
    with jc.target("H200"):
        forward, *_ = jc.plans(run, *operands).values()
    (segment,) = forward.segments
    assert (segment.plan is not None) != (name == "window"), segment.reason


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNSEEING)
def test_queries_that_a_band_hides_all_keys_of_on_the_gpu(name):
    run, operands = unseeing(name, "split", "bfloat16")
    exact, _ = unseeing(name, "xla", "float32")
    got, want = ([np.asarray(x, np.float64) for x in jax.jit(f)(*operands)] for f in (run, exact))
    hidden = np.isneginf(want[1])
    assert hidden.any()
    np.testing.assert_array_equal(np.isneginf(got[1]), hidden)
    for x in (got[0], got[2]):  # O and dQ have a row for each statistic
        np.testing.assert_array_equal(x[hidden], 0)
    for a, b in zip(got, want, strict=True):
        seen = np.isfinite(b)
        assert np.isfinite(a[seen]).all()
        assert relative_error(a[seen], b[seen]) < 2e-2


def masked_away(name):
    """The case of HIDDEN at 96 tokens, each mask's element as 16: result and gradients of q, k and
    v, of ours by cuDNN or of jax.nn in float32."""
    mask, more = HIDDEN[name]
    for axis in (2, 3) if mask.ndim == 4 else (0, 1):
        mask = mask if mask.shape[axis] == 1 else jnp.repeat(mask, 16, axis)
    if "local_window_size" in more:
        more = {"local_window_size": (16, 16)}
    q, k, v = qkv(t=96, s=96, k=2, h=64, dtype="bfloat16")

    def run(function, dtype, *operands):
        operands = [x.astype(dtype) for x in operands]
        out, pull = jax.vjp(functools.partial(function, mask=mask, **more), *operands)
        return out, *pull(jnp.cos(jnp.arange(64)).astype(dtype) * jnp.ones_like(out))

    return jax.jit(run, static_argnums=(0, 1)), (q, k, v)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", HIDDEN)
def test_attention_under_a_mask_that_hides_all_keys_is_planned(name):
    run, operands = masked_away(name)
    strict = functools.partial(ours, implementation="cudnn")
    with jc.target("H200"):
        plans = jc.plans(lambda *x: run(strict, "bfloat16", *x), *operands)
    assert [len(plan.execution_plans) for plan in plans.values()] == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", HIDDEN)
def test_attention_under_a_mask_that_hides_all_keys_on_the_gpu(name):
    run, operands = masked_away(name)
    got = run(functools.partial(ours, implementation="cudnn"), "bfloat16", *operands)
    for a, b in zip(got, run(theirs, "float32", *operands), strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
def test_queries_that_see_no_key_on_the_gpu():
    q, k, v = qkv(b=2, t=64, s=64, h=64, dtype="bfloat16")
    lengths = {"query_seq_lengths": jnp.array([40, 64], "int32")}
    lengths["key_value_seq_lengths"] = jnp.array([64, 0], "int32")
    attention = functools.partial(ours, implementation="cudnn", return_residual=True, **lengths)
    out, residual = jax.jit(attention)(q, k, v)
    np.testing.assert_array_equal(out[0, 40:], 0)
    np.testing.assert_array_equal(out[1], 0)
    assert np.isneginf(residual[1]).all()
    loss = lambda *x: (attention(*x)[0].astype("float32") ** 2).sum()  # noqa: E731
    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        np.testing.assert_array_equal(gradient[1], 0)
