"""Attention over keys and values in pages, and the tokens that are written there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_reference

S = jax.ShapeDtypeStruct
ours, write = jc.ops.paged_dot_product_attention, jc.ops.write_pages
RNG = np.random.default_rng(0)


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def cache(b=3, t=5, n=4, k=2, h=8, e=None, page=4, per=6, dtype="float32"):
    """query, both kinds of pages, and a table of pages in any order; some belong to nobody."""
    count = b * per + 3
    table = jnp.asarray(RNG.permutation(count)[: b * per].reshape(b, per), "int32")
    return (
        normal((b, t, n, h), dtype),
        normal((count, page, k, h), dtype),
        normal((count, page, k, e or h), dtype),
        table,
    )


def exact(q, k, v, tables, lengths, dout, dlogs, queries=None, **band):
    """One example after the other, of the tokens that its pages hold: results, and gradients by
    q, and by the pages."""
    q, k, v, dout, dlogs = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlogs))
    out, logs, dq = np.zeros(dout.shape), np.full(dlogs.shape, -np.inf), np.zeros(q.shape)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    for i in range(len(q)):
        pages, keys = np.asarray(tables[i]), int(lengths[i])
        own = q.shape[1] if queries is None else int(queries[i])
        if own == 0 or keys == 0:
            continue
        token = np.arange(keys)
        at = pages[token // k.shape[1]], token % k.shape[1]
        sees = plain_attention.seen(own, keys, **band)
        part = slice(own)
        found = plain_attention.exact(q[i, part], k[at], v[at], sees, dout[i, part], dlogs[i, part])
        out[i, part], logs[i, part], dq[i, part] = found[:3]
        np.add.at(dk, at, found[3])
        np.add.at(dv, at, found[4])
    return out, logs, dq, dk, dv


@pytest.fixture(scope="module", params=[2**24, 60], ids=["whole", "blocks"])
def blocks(request):
    """The reference takes all examples at a time, or one, and of that a few rows."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_reference, "_SCORES", request.param)
        yield
    jax.clear_caches()


LENGTHS = jnp.array([24, 9, 5], "int32")
BANDS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, 0)},
    "from the first": {"causal": True, "bottom_right": False},
}


def call(table, lengths, band, **arguments):
    band = {"bottom_right": True, "causal": False, "window": None, **band}
    return functools.partial(
        ours, page_table=table, key_value_seq_lengths=lengths, is_causal=band["causal"],
        local_window_size=band["window"], bottom_right=band["bottom_right"],
        return_residual=True, **arguments,
    )  # fmt: skip


def agree(got, want, limit=2e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b[np.isfinite(b)]).max()))


# -- results and gradients -------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("band", BANDS)
def test_each_example_sees_the_tokens_of_its_pages(band, tokens):
    *operands, table = cache(t=tokens, e=6)
    dout, dlogs = normal((3, tokens, 4, 6)), normal((3, tokens, 4))
    own = {"bottom_right": True, **BANDS[band]}
    got = plain_attention.with_gradients(call(table, LENGTHS, own), operands, dout, dlogs)
    agree(got, exact(*operands, table, LENGTHS, dout, dlogs, **own))


def test_lengths_of_queries_and_examples_without_keys():
    *operands, table = cache()
    queries, keys = jnp.array([2, 5, 0], "int32"), jnp.array([24, 0, 7], "int32")
    function = call(table, keys, {"causal": True}, query_seq_lengths=queries)
    dout, dlogs = normal((3, 5, 4, 8)), normal((3, 5, 4))
    got = plain_attention.with_gradients(function, operands, dout, dlogs)
    band = {"causal": True, "bottom_right": True}
    agree(got, exact(*operands, table, keys, dout, dlogs, queries, **band))


def test_pages_with_heads_first_and_one_cache_of_both():
    q, k, v, table = cache()
    want = call(table, LENGTHS, {})(q, k, v)
    turned = call(table, LENGTHS, {}, heads_first=True)
    agree(turned(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)), map(np.asarray, want))
    both = jnp.stack([k, v], axis=1).reshape(-1, *k.shape[1:])
    function = call(2 * table, LENGTHS, {}, value_page_table=2 * table + 1)
    agree(function(q, both, both), map(np.asarray, want))


def test_nothing_is_read_behind_the_lengths():
    query, keys, values, table = cache(b=2)
    lengths = jnp.array([9, 17], "int32")
    missing = [  # from token 9 of the first example on, of four a page
        x.at[table[0, 2], 1:].set(jnp.nan).at[table[0, 3:]].set(jnp.nan) for x in (keys, values)
    ]
    run = jax.jit(lambda q, k, v: ours(q, k, v, table, key_value_seq_lengths=lengths))
    np.testing.assert_array_equal(run(query, *missing), run(query, keys, values))


def test_numbers_out_of_range_are_brought_into_it():
    """cuDNN would read foreign memory; so do entries that nobody set."""
    q, k, v, table = cache()
    wild = table.at[1, 3:].set(-1).at[2, 2:].set(2**31 - 1)
    agree(call(wild, LENGTHS, {})(q, k, v), map(np.asarray, call(table, LENGTHS, {})(q, k, v)))
    got = call(table, jnp.array([999, 9, -5], "int32"), {})(q, k, v)
    want = call(table, jnp.array([24, 9, 0], "int32"), {})(q, k, v)
    agree(got, map(np.asarray, want))


@pytest.mark.parametrize(("b", "t"), [(0, 1), (2, 0)])
def test_without_examples_or_queries(b, t):
    _, k, v, _ = cache()
    table, lengths = jnp.zeros((b, 6), "int32"), jnp.zeros(b, "int32")
    out, logs = call(table, lengths, {})(jnp.ones((b, t, 4, 8)), k, v)
    assert (out.shape, logs.shape) == ((b, t, 4, 8), (b, t, 4))
    assert write(k, jnp.ones((b, t, 2, 8)), table, lengths).shape == k.shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits(dtype):
    *operands, table = cache(dtype=dtype)
    got = call(table, LENGTHS, {"causal": True})(*operands)
    zeros = np.zeros((3, 5, 4, 8)), np.zeros((3, 5, 4))
    band = {"causal": True, "bottom_right": True}
    want = exact(*operands, table, LENGTHS, *zeros, **band)
    assert got[0].dtype == jnp.dtype(dtype)
    for a, b in zip(got, want[:2], strict=True):
        assert relative_error(np.asarray(a, np.float64), b) < 1e-2


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
def test_tokens_go_to_their_places(heads_first):
    _, pages, _, table = cache()
    new, at = normal((3, 5, 2, 8)), jnp.array([2, 18, 22], "int32")
    lengths = jnp.array([5, 3, 5], "int32")
    want = np.array(pages)
    for i in range(3):
        for t in range(int(lengths[i])):
            position = int(at[i]) + t
            if position < 24:
                want[int(table[i, position // 4]), position % 4] = new[i, t]
    turned = (lambda x: jnp.swapaxes(x, 1, 2)) if heads_first else (lambda x: x)
    got = write(turned(pages), new, table, at, seq_lengths=lengths, heads_first=heads_first)
    np.testing.assert_array_equal(turned(got), want)


def test_tokens_without_a_place_are_left_out():
    pages, new = jnp.zeros((4, 2, 1, 8), "bfloat16"), jnp.ones((4, 1, 1, 8))
    table = jnp.array([[-1], [4], [1], [2]], "int32")
    got = write(pages, new, table, jnp.array([0, 0, -1, 2], "int32"))
    assert got.dtype == pages.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), 0)


def test_donated_pages_are_written_where_they_lie():
    _, pages, _, table = cache()
    new, at = normal((3, 1, 2, 8)), jnp.zeros(3, jnp.int32)
    step = jax.jit(write, donate_argnums=0)
    compiled = step.lower(pages, new, table, at).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pages.nbytes


def test_a_loop_that_decodes():
    """A prompt is written and attended to at once, then one token after the other."""
    b, n, k, h, prompt, total = 2, 4, 2, 8, 5, 11
    q, keys, values = normal((b, total, n, h)), normal((b, total, k, h)), normal((b, total, k, h))
    pages = jnp.zeros((7, 4, k, h))
    table = jnp.array([[5, 0, 3], [1, 6, 2]], "int32")

    def step(carry, new, is_causal=True):
        key_pages, value_pages, length = carry
        q, k, v = new
        key_pages = write(key_pages, k, table, length)
        value_pages = write(value_pages, v, table, length)
        length = length + q.shape[1]
        out = ours(
            q, key_pages, value_pages, table, key_value_seq_lengths=length, is_causal=is_causal
        )
        return (key_pages, value_pages, length), out

    carry = pages, pages, jnp.zeros(b, jnp.int32)
    carry, first = step(carry, (q[:, :prompt], keys[:, :prompt], values[:, :prompt]))
    rest = [jnp.moveaxis(x[:, prompt:, None], 1, 0) for x in (q, keys, values)]
    _, each = jax.jit(lambda c, x: jax.lax.scan(step, c, x))(carry, rest)
    got = jnp.concatenate([first, jnp.moveaxis(each[:, :, 0], 0, 1)], axis=1)
    want = jc.ops.dot_product_attention(q, keys, values, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


# -- transformations -------------------------------------------------------------------------------


def test_vmap_is_further_examples_of_the_same_pages():
    q, k, v, table = cache(b=2, t=1)
    many, tables = normal((3, *q.shape)), jnp.stack([table, table[::-1], table + 1])
    lengths = jnp.array([[24, 3], [7, 9], [1, 0]], "int32")

    def attend(q, k, v, table, lengths):
        return ours(q, k, v, table, key_value_seq_lengths=lengths)

    axes = (0, None, None, 0, 0)
    operands = (many, k, v, tables, lengths)
    got = jax.vmap(attend, axes)(*operands)
    want = jnp.stack([attend(many[i], k, v, tables[i], lengths[i]) for i in range(3)])
    np.testing.assert_allclose(got, want, atol=1e-5)
    (spec,) = graphs_of(jax.vmap(attend, axes), *operands)
    ((_, first), *_) = spec.calls[-1].inputs
    assert spec.tensor(first).shape[0] == 6
    pages = jnp.stack([k, k + 1, k + 2])
    got = jax.vmap(attend, (None, 0, None, None, None))(q, pages, v, table, lengths[0])
    want = jnp.stack([attend(q, x, v, table, lengths[0]) for x in pages])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.wide
def test_forward_mode_and_second_derivatives():
    *operands, table = cache(b=2, t=2, n=2, k=1, h=4, per=2)
    lengths = jnp.array([8, 5], "int32")
    along = [normal(x.shape) for x in operands]
    attend = lambda *x: call(table, lengths, {"causal": True})(*x)[0]  # noqa: E731

    def plain(q, k, v):
        out = []
        for i, keys in enumerate((8, 5)):
            pages = [x[table[i]].reshape(8, *x.shape[2:])[:keys] for x in (k, v)]
            sees = plain_attention.seen(2, keys, causal=True, bottom_right=True)
            out.append(plain_attention.attention(q[i], *pages, sees))
        return jnp.stack(out)

    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2))  # noqa: E731
    for wrapped in (lambda f: f, cubes):
        got, want = (
            jax.jit(lambda *x, f=f, wrapped=wrapped: jax.jvp(wrapped(f), *x)[1])(operands, along)
            for f in (attend, plain)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3)


def test_heads_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    *operands, table = cache(n=8, k=4)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))
    by_heads = P(None, None, "heads")
    attend = lambda *x: call(table, LENGTHS, {})(*x)[0]  # noqa: E731
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(by_heads,) * 3, out_specs=by_heads)
    np.testing.assert_allclose(jax.jit(mapped)(*operands), attend(*operands), atol=1e-5)


def test_only_some_examples_keys_are_brought_together():
    """Of 64 examples of 8k tokens: all of them in float32 would be 2 GiB."""
    q, pages = S((64, 1, 8, 128), "float32"), S((8200, 64, 8, 128), "float32")
    table, lengths = S((64, 128), "int32"), S((64,), "int32")
    attend = lambda q, k, t, n: ours(q, k, k, t, key_value_seq_lengths=n)  # noqa: E731
    compiled = jax.jit(attend).lower(q, pages, table, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


# -- errors ----------------------------------------------------------------------------------------

Q, PAGES = jnp.ones((2, 1, 4, 8), "bfloat16"), jnp.ones((9, 4, 2, 8), "bfloat16")
TABLE, TWO = jnp.zeros((2, 3), "int32"), jnp.ones(2, "int32")
given = functools.partial(ours, page_table=TABLE, key_value_seq_lengths=TWO)
WRONG = {
    "rank": (lambda: given(Q[0], PAGES, PAGES), ["query has the wrong rank", "(P, U, K, H)"]),
    "heads": (
        lambda: given(Q, jnp.swapaxes(PAGES, 1, 2)[:, :, :3], PAGES),
        ["do not fit together", "heads_first"],
    ),
    "dtypes": (
        lambda: given(Q, PAGES, PAGES.astype("float16")),
        ["different dtypes", "float16"],
    ),
    "table": (
        lambda: given(Q, PAGES, PAGES, page_table=TABLE.astype("uint32")),
        ["page_table is not valid", "int32[2, n]", "uint32[2, 3]"],
    ),
    "tables": (
        lambda: given(Q, PAGES, PAGES, value_page_table=TABLE[:, :2]),
        ["different shapes", "2 and 3"],
    ),
    "lengths": (
        lambda: given(Q, PAGES, PAGES, key_value_seq_lengths=jnp.ones(3, "int32")),
        ["key_value_seq_lengths is not valid", "int32[2]", "int32[3]"],
    ),
    "lengths of queries": (
        lambda: given(Q, PAGES, PAGES, query_seq_lengths=jnp.ones(2)),
        ["query_seq_lengths is not valid", "float32[2]"],
    ),
    "no pages": (lambda: given(Q, PAGES[:0], PAGES[:0]), ["at least one page", "[0, 4, 2, 8]"]),
    "what is written": (
        lambda: write(PAGES, Q, TABLE, TWO),
        ["new does not fit the pages", "[2, 8]", "[2, 1, 4, 8]"],
    ),
    "positions": (
        lambda: write(PAGES, Q[:, :, :2], TABLE, jnp.ones(2)),
        ["positions is not valid", "float32[2]"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    wrong, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        wrong()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

PLANNED = {
    "decode": ({"t": 1}, {"causal": True}),
    "decode in a window": ({"t": 1}, {"causal": True, "window": (100, 0)}),
    "prefill": ({"t": 96}, {"causal": True}),
    "prefill in a window": ({"t": 96}, {"causal": True, "window": (64, 0)}),
    "speculation": ({"t": 4}, {"causal": True}),
    "one head of keys": ({"t": 1, "k": 1}, {}),
    "small pages": ({"t": 1, "page": 16, "per": 20}, {}),
}
SIZES = {"b": 4, "n": 8, "k": 2, "h": 64, "page": 64, "per": 5}


def prepared(name, heads_first=False, dtype="bfloat16"):
    """A function of query and pages, those, and what it was made of."""
    sizes, band = PLANNED[name]
    *operands, table = cache(**{**SIZES, **sizes}, dtype=dtype)
    lengths = jnp.array([320, 1, 100, 0], "int32")
    function = call(table, lengths, band, implementation="cudnn", heads_first=heads_first)
    if heads_first:
        operands[1:] = (jnp.swapaxes(x, 1, 2) for x in operands[1:])
    return function, operands, table, lengths, band


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["H200", "A100", "B200"])
@pytest.mark.parametrize("name", PLANNED)
def test_one_plan(name, gpu):
    for heads_first in (False, True):
        function, operands, *_ = prepared(name, heads_first)
        with jc.target(gpu):
            (segment,) = jc.plan(function, *operands).segments
        assert segment.plan is not None


@pytest.mark.deviceless
@pytest.mark.parametrize("heads_first", [False, True])
def test_pages_are_read_where_they_lie(heads_first):
    function, operands, *_ = prepared("decode", heads_first)
    with jc.target("H200"):
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    (line,) = (line for line in text.splitlines() if "@jax_cudnn" in line)
    assert "dense<[3, 1, 2, 0]>" not in line.partition("operand_layouts = ")[2]
    assert "stablehlo.transpose" not in text.partition("@jax_cudnn")[0]


@pytest.mark.deviceless
def test_derivatives_are_xlas_with_a_reason():
    q, pages, table = S((4, 1, 8, 64), "bfloat16"), S((30, 64, 2, 64), "bfloat16"), TABLE[:1]

    def loss(q, k, v, implementation=None):
        lengths, tables = jnp.full(4, 100, jnp.int32), jnp.broadcast_to(table, (4, 3))
        out = ours(q, k, v, tables, key_value_seq_lengths=lengths, implementation=implementation)
        return (out.astype("float32") ** 2).sum()

    with jc.target("H200"):
        *_, backward = jc.plans(jax.grad(loss, (0, 1, 2)), q, pages, pages).values()
        (segment,) = backward.segments
        assert segment.plan is None
        assert "reference" in segment.reason
        strict = functools.partial(loss, implementation="cudnn")
        forward, *_ = jc.plans(jax.grad(strict, (0, 1, 2)), q, pages, pages).values()
    assert forward.segments[0].plan is not None


def test_decoding_has_no_mask():
    """The last query sees all keys anyway, and cuDNN splits them among its blocks without one."""
    *operands, table = cache(t=1)
    (spec,) = graphs_of(call(table, LENGTHS, {"causal": True}), *operands)
    assert methods(spec) == ["paged_sdpa"]
    assert spec.calls[0].node.base.diagonal_band_right_bound is None


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "heads_first"),
    [
        *((name, dtype, False) for name in PLANNED for dtype in ("bfloat16", "float16")),
        *((name, "bfloat16", True) for name in ("decode", "prefill")),
    ],
)
def test_results_on_the_gpu(name, dtype, heads_first):
    """Of four examples one has no keys, and one a single one."""
    function, operands, table, lengths, band = prepared(name, heads_first, dtype)
    got = [np.asarray(x, np.float64) for x in jax.jit(function)(*operands)]
    q, *pages = operands
    if heads_first:
        pages = [jnp.swapaxes(x, 1, 2) for x in pages]
    zeros = np.zeros(q.shape), np.zeros(q.shape[:3])
    want = exact(q, *pages, table, lengths, *zeros, **{"bottom_right": True, **band})
    assert np.isfinite(got[0]).all()
    assert relative_error(got[0], want[0]) < 2e-2
    np.testing.assert_array_equal(got[0][np.isneginf(want[1])], 0)
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    np.testing.assert_allclose(got[1][finite], want[1][finite], atol=2e-2)


@pytest.mark.gpu
def test_64_examples_of_8192_tokens_on_the_gpu():
    b, tokens, page = 64, 8192, 64
    per = tokens // page
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (b, 1, 32, 128), "bfloat16")
    k, v = (jax.random.normal(x, (b * per, page, 8, 128), "bfloat16") for x in keys[1:])
    table = jnp.asarray(RNG.permutation(b * per).reshape(b, per), "int32")
    lengths = jnp.asarray(RNG.integers(1, tokens + 1, b), "int32").at[0].set(tokens)
    attend = functools.partial(
        ours, q, page_table=table, key_value_seq_lengths=lengths, is_causal=True
    )
    got = jax.jit(functools.partial(attend, implementation="cudnn"))(k, v)
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    for i in (0, 17, 63):  # a few of them in float64
        zeros = np.zeros((1, 1, 32, 128)), np.zeros((1, 1, 32))
        own = [x[table[i]] for x in (k, v)]
        places = np.arange(per)[None]
        want = exact(q[i : i + 1], *own, places, lengths[i : i + 1], *zeros)[0]
        assert relative_error(got[i : i + 1], want) < 2e-2


@pytest.mark.gpu
def test_a_loop_that_decodes_on_the_gpu():
    """Written and read in one program, with the pages donated."""
    b, n, k, h, page = 2, 8, 2, 64, 64
    total = 100
    q = normal((b, total, n, h), "bfloat16")
    keys, values = normal((b, total, k, h), "bfloat16"), normal((b, total, k, h), "bfloat16")
    table = jnp.array([[3, 0], [1, 2]], "int32")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, q, k, v):
        key_pages, value_pages, length = carry
        key_pages = write(key_pages, k, table, length)
        value_pages = write(value_pages, v, table, length)
        length = length + q.shape[1]
        out = ours(
            q, key_pages, value_pages, table, key_value_seq_lengths=length, is_causal=True,
            implementation="cudnn",
        )  # fmt: skip
        return (key_pages, value_pages, length), out

    carry = (*(jnp.zeros((4, page, k, h), "bfloat16") for _ in "kv"), jnp.zeros(b, jnp.int32))
    got, at = [], 0
    for count in (90, *[1] * 10):
        part = slice(at, at + count)
        carry, out = step(carry, q[:, part], keys[:, part], values[:, part])
        got.append(out)
        at += count
    want = jc.ops.dot_product_attention(
        *(x.astype("float32") for x in (q, keys, values)), is_causal=True, implementation="xla"
    )
    got = np.asarray(jnp.concatenate(got, axis=1), np.float64)
    assert relative_error(got, np.asarray(want, np.float64)) < 2e-2


@pytest.mark.gpu
def test_gradients_on_the_gpu():
    """By XLA, also where cuDNN runs the forward."""
    *operands, table = cache(b=2, t=8, n=4, k=2, h=64, page=16, dtype="bfloat16")
    lengths = jnp.array([96, 33], "int32")
    dout, dlogs = normal((2, 8, 4, 64), "bfloat16"), jnp.zeros((2, 8, 4))
    function = call(table, lengths, {"causal": True})
    got = plain_attention.with_gradients(function, operands, dout, dlogs)
    band = {"causal": True, "bottom_right": True}
    want = exact(*operands, table, lengths, dout, dlogs, **band)
    for a, b in zip(got, want, strict=True):
        assert relative_error(np.asarray(a, np.float64), b) < 2e-2
