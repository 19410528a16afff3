"""Attention of a Graph: packed tokens, pages, cuDNN's keywords of masks, dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import graphs_of

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.planning import frontend
from jax_cudnn.interop import function

B, H, N, S, D = 3, 4, 2, 16, 8
LENGTHS = jnp.array([5, 16, 0], jnp.int32)
BEGINS = jnp.cumulative_sum(LENGTHS, include_initial=True, dtype=jnp.int32)
KEY = jax.random.key(0)
OPTIONS = {"attn_scale": 0.3, "use_causal_mask": True, "use_padding_mask": True}


def strides(heads, size):
    return [S * heads * size, size, heads * size, 1]


def offsets(per_token, begins=BEGINS):
    return (begins * per_token).reshape(-1, 1, 1, 1)


def tokens(heads, size=D, seed=0, dtype="float32"):
    """(B S, heads, size), with room for all tokens."""
    return jax.random.normal(jax.random.fold_in(KEY, seed), (B * S, heads, size), dtype)


def as_cudnn(x):
    """(B S, heads, size) as (B, heads, S, size), with the same memory order."""
    return jnp.swapaxes(x.reshape(B, S, *x.shape[1:]), 1, 2)


def as_tokens(x):
    return jnp.swapaxes(x, 1, 2).reshape(B * S, x.shape[1], x.shape[3])


def integers(g, name, *dim, kind="int32"):
    dim = [*dim, 1, 1, 1][:4]
    return g.tensor(name=name, dim=dim, stride=[dim[2], dim[2], 1, 1], data_type=kind)


def declared(g, name, heads, kind="float32", of_integers="int32"):
    """An array of packed tokens, and where each sequence begins."""
    begins = integers(g, f"{name} begins", B + 1, kind=of_integers)
    array = g.tensor(name=name, dim=[B, heads, S, D], stride=strides(heads, D), data_type=kind)
    return array.set_ragged_offset(begins), begins


def drops(g, kind="float32", word="int64"):
    """Dropout and a sink."""
    words = [g.tensor(name=n, dim=[1] * 4, stride=[1] * 4, data_type=word) for n in WORDS]
    sink = g.tensor(name="sink", dim=[1, H, 1, 1], stride=[H, 1, 1, 1], data_type=kind)
    return {"dropout": (0.5, *words), "sink_token": sink}


WORDS = ("seed", "offset")
DROPPED = {"seed": 7, "offset": 0, "sink": jnp.linspace(-1, 1, H).reshape(1, H, 1, 1)}
DROPS = {"dropout_rate": 0.5, "dropout_rng": jnp.array([0, 7], "uint32")}


def write_packed(g, kind, of_integers, stats=False, word=None):
    """Attention of packed tokens, in a Graph or a pygraph; with a dtype of a ``word`` of dropout
    also that, a sink, and Stats without offsets."""
    kinds = kind, of_integers
    (q, begins), (k, _), (v, _) = (
        declared(g, name, n, *kinds) for name, n in (("q", H), ("k", N), ("v", N))
    )
    names = "seq_len_q", "seq_len_kv"
    lengths = {name: integers(g, name, B, kind=of_integers) for name in names}
    more = drops(g, kind, word) if word else {}
    o, total = g.sdpa(
        q=q, k=k, v=v, **OPTIONS, is_inference=not stats, **lengths, **more, name="sdpa"
    )
    o.set_output(True).set_name("o").set_dim([B, H, S, D]).set_stride(strides(H, D))
    o.set_data_type(kind).set_ragged_offset(begins)
    if stats:
        total.set_output(True).set_name("stats")
    if stats and not word:
        total.set_ragged_offset(integers(g, "stats begins", B + 1))


def forward(dtype="float32", stats=True):
    with jc.Graph() as g:
        write_packed(g, dtype, "int32", stats)
    return g


def carried_over(write, *options):
    """The same, as a pygraph."""
    cudnn = frontend.load()
    g = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    write(g, cudnn.data_type.FLOAT, cudnn.data_type.INT32, *options)
    return jc.from_pygraph(g)


def operands(dtype="float32", **changed):
    return {
        "q": as_cudnn(tokens(H, dtype=dtype)),
        "k": as_cudnn(tokens(N, seed=1, dtype=dtype)),
        "v": as_cudnn(tokens(N, seed=2, dtype=dtype)),
        "q begins": offsets(H * D),
        "k begins": offsets(N * D),
        "v begins": offsets(N * D),
        "stats begins": offsets(H),
        "seq_len_q": LENGTHS.reshape(-1, 1, 1, 1),
        "seq_len_kv": LENGTHS.reshape(-1, 1, 1, 1),
        **changed,
    }


def of(graph, given):
    """The operands that are inputs of the graph."""
    names = {tensor.get_name() for tensor in graph.get_inputs()}
    return {name: x for name, x in given.items() if name in names}


def plain(q, k, v, **options):
    return jc.ops.packed_dot_product_attention(
        q, k, v, query_offsets=BEGINS, max_query_length=S, scale=0.3, is_causal=True, **options
    )


@pytest.mark.deviceless
@pytest.mark.parametrize("make", ["forward", "pygraph"])
def test_packed_tokens_have_the_results_and_derivatives_of_ops(make):
    graph = forward() if make == "forward" else carried_over(write_packed)
    given = of(graph, operands())

    def loss(q, k, v):
        results = graph({**given, "q": q, "k": k, "v": v})
        return (results["sdpa::O"] ** 2).sum(), results

    packed = tokens(H), tokens(N, seed=1), tokens(N, seed=2)
    (_, results), got = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
        *map(as_cudnn, packed)
    )
    o, total = plain(*packed, return_residual=True)
    np.testing.assert_allclose(as_tokens(results["sdpa::O"]), o, rtol=1e-5, atol=1e-6)
    if make == "forward":
        np.testing.assert_allclose(as_tokens(results["sdpa::Stats"])[..., 0], total, rtol=1e-5)
    want = jax.jit(jax.grad(lambda *x: (plain(*x) ** 2).sum(), (0, 1, 2)))(*packed)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(as_tokens(ours), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.deviceless
def test_packed_tokens_with_dropout_sinks_and_statistics_without_offsets():
    with jc.Graph() as g:
        write_packed(g, "float32", "int32", True, "int64")
    made = carried_over(write_packed, True, frontend.load().data_type.INT64)
    packed = tokens(H), tokens(N, seed=1), tokens(N, seed=2)
    sink = DROPPED["sink"].reshape(H)
    o, total = plain(*packed, **DROPS, sink=sink, return_residual=True)
    for graph in (g, made):
        got = graph(of(graph, operands(**DROPPED)))
        np.testing.assert_allclose(as_tokens(got["sdpa::O"]), o, rtol=1e-5, atol=1e-6)
        for i, length in enumerate(LENGTHS):
            want = total[BEGINS[i] : BEGINS[i + 1]].T
            np.testing.assert_allclose(got["sdpa::Stats"][i, :, :length, 0], want, rtol=1e-5)
            assert np.isneginf(got["sdpa::Stats"][i, :, length:]).all()

    def loss(q, k, v, sink):
        return (
            g(of(g, operands(**{**DROPPED, "q": q, "k": k, "v": v, "sink": sink})))["sdpa::O"] ** 2
        ).sum()

    exact = lambda *x: (plain(*x[:3], **DROPS, sink=x[3].reshape(H)) ** 2).sum()  # noqa: E731
    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*map(as_cudnn, packed), DROPPED["sink"])
    want = jax.jit(jax.grad(exact, (0, 1, 2, 3)))(*packed, DROPPED["sink"])
    for ours, theirs in zip(got, want, strict=True):
        ours = as_tokens(ours) if ours.shape[0] == B else ours
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_of_packed_tokens_as_a_graph(drop):
    heads = {"q": H, "k": N, "v": N, "o": H, "dO": H}
    with jc.Graph() as g:
        both = {name: declared(g, name, n) for name, n in heads.items()}
        arrays = {name: array for name, (array, _) in both.items()}
        arrays["dO"].set_ragged_offset(both["o"][1])
        stats = g.tensor(name="stats", dim=[B, H, S, 1], stride=strides(H, 1), data_type="float32")
        more = drops(g) | {"dSink_token": True} if drop else {}
        if not drop:
            stats.set_ragged_offset(integers(g, "stats begins", B + 1))
        lengths = {name: integers(g, name, B) for name in ("seq_len_q", "seq_len_kv")}
        made = g.sdpa_backward(**arrays, stats=stats, **OPTIONS, **lengths, **more, name="back")
        for x, name in zip(made, "qkv", strict=False):
            x.set_output(True).set_ragged_offset(arrays[name].get_ragged_offset())
        for x in made[3:]:
            x.set_output(True)
    packed = [tokens(H), tokens(N, seed=1), tokens(N, seed=2)]
    more = DROPS if drop else {}
    packed += [DROPPED["sink"]] * drop
    (o, total), back = jax.vjp(
        lambda *x: plain(
            *x[:3], return_residual=True, **more, sink=x[3][0, :, 0, 0] if drop else None
        ),
        *packed,
    )
    cotangent = tokens(H, seed=3)
    results = {"o": as_cudnn(o), "dO": as_cudnn(cotangent), "stats": as_cudnn(total[..., None])}
    if drop:
        whole = jnp.full((B, S, H, 1), -jnp.inf)
        for i, n in enumerate(LENGTHS):
            whole = whole.at[i, :n].set(total[BEGINS[i] : BEGINS[i + 1], :, None])
        results["stats"] = jnp.swapaxes(whole, 1, 2)
    got = g(of(g, operands(**results, **DROPPED, **{"o begins": offsets(H * D)})))
    dq, dk, dv, *sinks = back((cotangent, jnp.zeros_like(total)))
    for want in sinks:
        np.testing.assert_allclose(got["back::dSink_token"], want, rtol=1e-4, atol=1e-5)
    for name, want in zip("QKV", (dq, dk, dv), strict=True):
        np.testing.assert_allclose(as_tokens(got[f"back::d{name}"]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"q begins": offsets(H * D) + 10**6, "stats begins": offsets(H) + 10**6},
        {"k begins": -offsets(N * D), "seq_len_q": jnp.full((B, 1, 1, 1), 99, jnp.int32)},
        {"seq_len_kv": jnp.full((B, 1, 1, 1), -3, jnp.int32)},
    ],
    ids=["beyond", "before", "negative lengths"],
)
def test_what_would_read_foreign_memory_is_brought_into_bounds(wrong, monkeypatch):
    seen = {}

    def bind(spec, name, *values):
        seen.update(zip(spec.inputs, boundary(spec).clipped(values), strict=True))
        return real(spec, name, *values)

    real = function.bind
    monkeypatch.setattr(function, "bind", bind)
    forward()(operands(**wrong))
    for lengths, ports in (("seq_len_q", {"q": H * D, "stats": H}), ("seq_len_kv", {"k": N * D})):
        for port, size in ports.items():
            begins = np.asarray(seen[f"{port} begins"]).ravel()
            assert (begins % size == 0).all()
            assert begins.min() >= 0
            ends = begins[:-1] + np.asarray(seen[lengths]).ravel() * size
            assert ends.max() <= B * S * size
        assert (np.asarray(seen[lengths]) >= 0).all()


P, U, PAGES = 12, 4, 4
TABLE = jax.random.permutation(KEY, P)[: B * PAGES].reshape(B, PAGES).astype(jnp.int32)
KEYS = jnp.array([7, 16, 1], jnp.int32)


def write_paged(g, kind, of_integers, queries, one_length=False):
    """Paged attention, in a Graph or a pygraph."""
    q = g.tensor(
        name="q", dim=[B, H, queries, D], stride=[H * queries * D, queries * D, D, 1],
        data_type=kind,
    )  # fmt: skip
    shape = {"dim": [P, N, U, D], "stride": [N * U * D, U * D, D, 1], "data_type": kind}
    k, v = (g.tensor(name=name, **shape) for name in "kv")
    tables = [integers(g, f"t{name}", B, 1, PAGES, kind=of_integers) for name in "kv"]
    lengths = [integers(g, f"l{name}", B, kind=of_integers) for name in "qk"]
    o, _ = g.sdpa(
        q=q, k=k, v=v, attn_scale=0.3, is_inference=True, use_padding_mask=True,
        seq_len_q=lengths[0], seq_len_kv=lengths[0 if one_length else 1],
        paged_attention_k_table=tables[0], paged_attention_v_table=tables[1],
        paged_attention_max_seq_len_kv=PAGES * U, name="decode",
    )  # fmt: skip
    o.set_output(True).set_data_type(kind)


def paged(queries, dtype="float32", **options):
    with jc.Graph() as g:
        write_paged(g, dtype, "int32", queries, **options)
    return g


def pages(queries, dtype="float32"):
    shapes = {"q": (B, H, queries, D), "k": (P, N, U, D), "v": (P, N, U, D)}
    arrays = {
        name: jax.random.normal(jax.random.fold_in(KEY, i), shape, dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    table = TABLE[:, None, :, None]
    lengths = jnp.full((B, 1, 1, 1), queries, jnp.int32)
    return {**arrays, "tk": table, "tv": table, "lq": lengths, "lk": KEYS.reshape(-1, 1, 1, 1)}


@pytest.mark.deviceless
def test_pages_are_those_of_ops():
    graphs = (paged(3), 3), (carried_over(write_paged, 1), 1)
    for graph, queries in graphs:
        given = pages(queries)
        want = jc.ops.paged_dot_product_attention(
            jnp.swapaxes(given["q"], 1, 2), given["k"], given["v"], TABLE,
            key_value_seq_lengths=KEYS, heads_first=True, scale=0.3,
        )  # fmt: skip
        got = jax.jit(graph)(given)["decode::O"]
        np.testing.assert_allclose(jnp.swapaxes(got, 1, 2), want, rtol=1e-5, atol=1e-6)
        beyond = graph({**given, "tk": given["tk"] + P, "tv": given["tv"] - P})["decode::O"]
        assert jnp.isfinite(beyond).all()


MORE = {  # the bias's keys, dropout and a sink, offsets of queries, an array of values
    "dropout and sinks": (None, True, False, False),
    "bias": (14, False, False, False),
    "queries with offsets": (None, False, True, False),
    "all": (14, True, True, False),
    "values without pages": (None, False, False, True),
}


def write_more(g, kind, of_integers, word, name):
    keys, drop, ragged, whole = MORE[name]
    q, begins = declared(g, "q", H, kind, of_integers)
    more = drops(g, kind, word) if drop else {}
    if not ragged:
        q.set_ragged_offset(None)
    shape = {"dim": [P, N, U, D], "stride": [N * U * D, U * D, D, 1], "data_type": kind}
    k = g.tensor(name="k", **shape)
    if whole:
        shape |= {"dim": [B, N, S, D], "stride": [N * S * D, S * D, D, 1]}
    v = g.tensor(name="v", **shape)
    tables = {"paged_attention_k_table": "tk"} | (
        {} if whole else {"paged_attention_v_table": "tv"}
    )
    more |= {port: integers(g, n, B, 1, PAGES, kind=of_integers) for port, n in tables.items()}
    if keys:
        dim, stride = [1, H, S, keys], [H * S * keys, S * keys, keys, 1]
        more["bias"] = g.tensor(name="bias", dim=dim, stride=stride, data_type=kind)
    o, _ = g.sdpa(
        q=q, k=k, v=v, attn_scale=0.3, is_inference=True, use_padding_mask=True,
        seq_len_q=integers(g, "lq", B, kind=of_integers),
        seq_len_kv=integers(g, "lk", B, kind=of_integers),
        paged_attention_max_seq_len_kv=keys or PAGES * U, **more, name="more",
    )  # fmt: skip
    o.set_output(True).set_data_type(kind).set_dim([B, H, S, D]).set_stride(strides(H, D))
    if ragged:
        o.set_ragged_offset(begins)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", MORE)
def test_further_operands_of_pages_are_those_of_arrays(name):
    keys, drop, ragged, whole = MORE[name]
    kinds = frontend.load().data_type
    x = pages(S)
    k, v = (jnp.moveaxis(x[n][TABLE], 2, 1).reshape(B, N, PAGES * U, D) for n in "kv")
    values = v if whole else x["v"]
    queries = LENGTHS.reshape(-1, 1, 1, 1)
    q = as_cudnn(tokens(H))
    given = {**x, **DROPPED, "q": q, "v": values, "lq": queries, "q begins": offsets(H * D)}
    given["bias"] = jax.random.normal(KEY, (1, H, S, keys or 1))
    exact = {"bias": given["bias"]} if keys else {}
    if drop:
        exact |= {**DROPS, "sink": DROPPED["sink"].reshape(H)}
    if ragged:
        at = jnp.minimum(BEGINS[:-1, None] + jnp.arange(S), B * S - 1)
        q = jnp.swapaxes(tokens(H)[at], 1, 2)
    most = keys or PAGES * U
    want = jc.ops.dot_product_attention(
        q, k[:, :, :most], v[:, :, :most], **exact, scale=0.3, heads_first=True,
        query_seq_lengths=LENGTHS, key_value_seq_lengths=jnp.minimum(KEYS, most),
    )  # fmt: skip
    with jc.Graph() as graph:
        write_more(graph, "float32", "int32", "int64", name)
    for g in (graph, carried_over(write_more, kinds.INT64, name)):
        got = g(of(g, given))["more::O"]
        if ragged:
            got = as_tokens(got)
            assert not got[BEGINS[-1] :].any()
            pairs = [(got[BEGINS[i] : BEGINS[i + 1]], want[i, :, :n].swapaxes(0, 1))
                     for i, n in enumerate(LENGTHS)]  # fmt: skip
        else:
            pairs = [(got, want)]
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_dropout_over_pages_reads_the_mask_of_the_forward():
    """XLA would draw another one than cuDNN."""
    with jc.Graph() as g:
        write_more(g, "float32", "int32", "int64", "dropout and sinks")
    given = of(g, {**pages(S), **DROPPED, "lq": LENGTHS.reshape(-1, 1, 1, 1)})
    *_, spec = graphs_of(jax.grad(lambda q: g({**given, "q": q})["more::O"].sum()), given["q"])
    drawn, back = spec.calls
    assert dict(back.inputs)["dropout_mask"] == dict(drawn.outputs)["RNG_DUMP"]


def test_one_tensor_of_both_lengths_keeps_the_bounds_of_both():
    graph, given = paged(3, one_length=True), pages(3)
    beyond, within = (jnp.full((B, 1, 1, 1), n, jnp.int32) for n in (9, 3))
    results = [graph(of(graph, {**given, "lq": n}))["decode::O"] for n in (beyond, within)]
    np.testing.assert_array_equal(*results)


def test_unsupported_uses_of_packed_tokens():
    for build, words in (
        (lambda g, q: g.sdpa(q, q, q)[0].set_output(True), "sdpa.0::O"),
        (lambda g, q: g.relu(q).set_output(True), "relu.0 does not support ragged offsets"),
    ):
        g = jc.Graph()
        with pytest.raises(jc.GraphError, match=words), g:
            build(g, declared(g, "q", H)[0])


Q, K = jnp.ones((1, 2, 4, 8)), jnp.cos(jnp.arange(128.0)).reshape(1, 2, 8, 8)


def attention(**words):
    with jc.Graph(inputs=["a::q", "a::k", "a::v"], outputs=["a::O"]) as graph:
        graph.sdpa(Q, K, jnp.sin(K), **words, name="a")
    return graph(Q, K, jnp.sin(K))


def test_keywords_of_masks_are_bounds():
    for words, bounds in (
        (
            {"use_causal_mask_bottom_right": True, "diagonal_alignment": "TOP_LEFT"},
            {"diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
        ),
        (
            {"use_causal_mask": True, "sliding_window_length": 3},
            {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0},
        ),
    ):
        np.testing.assert_array_equal(attention(**words), attention(**bounds))
    with pytest.raises(jc.GraphError, match="contradict each other"):
        attention(sliding_window_length=2, diagonal_band_left_bound=3)


def test_seed_and_offset_of_dropout_are_one_integer_or_two_words():
    q = jax.random.normal(KEY, (1, 2, 8, 16))
    with jc.Graph(inputs=["a::q", "seed", "offset"], outputs=["a::O"]) as graph:
        words = [graph.tensor([1, 1, 1, 1], data_type="INT64", name=n) for n in ("seed", "offset")]
        graph.sdpa(q, q, q, dropout=(0.5, *words), name="a")
    assert {(*t.shape, t.dtype.name) for t in words} == {(1, 1, 1, 2, "uint32")}

    def pair(number):
        low, high = number % 2**32, number % 2**64 // 2**32
        return jnp.array([low, high], "uint32").reshape(1, 1, 1, 2)

    for seed, offset in ((7, 9), (-3, 5)):
        want = graph(q, pair(seed), pair(offset))
        for kind in (int, np.int64, lambda x: np.full((1, 1, 1, 1), x)):
            assert np.array_equal(graph(q, kind(seed), kind(offset)), want)
        given = [jnp.full((1, 1, 1, 1), x, "int32") for x in (seed, offset)]
        assert np.array_equal(jax.jit(graph)(q, *given), want)
    large = 2**40 + 7
    assert np.array_equal(graph(q, np.int64(large), large), graph(q, pair(large), pair(large)))
