"""Attention over keys and values in pages, and the tokens that are written there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, LAST, bounds, drawing, outcome, turned
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_reference

S = jax.ShapeDtypeStruct
ours, write = jc.ops.paged_dot_product_attention, jc.ops.write_pages


@pytest.fixture
def normal(key):
    return drawing(key)


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes one example at a time, and of that a few rows."""
    monkeypatch.setattr(attention_reference, "_SCORES", 60)


def cache(normal, b=3, t=5, n=4, k=2, h=8, e=None, page=4, per=6, dtype="float32"):
    """query, both kinds of pages, and a table of pages in any order; some belong to nobody."""
    count = b * per + 3
    table = np.random.default_rng(0).permutation(count)[: b * per].reshape(b, per)
    shapes = (b, t, n, h), (count, page, k, h), (count, page, k, e or h)
    return *(normal(shape, dtype) for shape in shapes), jnp.asarray(table, "int32")


def exact(q, k, v, table, lengths, dout, dlogs=None, queries=None, **bounds):
    """One example after the other, of the tokens that its pages hold."""
    dlogs = np.zeros(q.shape[:3]) if dlogs is None else dlogs
    rows, gradients = [], [np.zeros(x.shape) for x in (q, k, v)]
    for i in range(len(q)):
        token = np.arange(int(lengths[i]))
        at = np.asarray(table[i])[token // k.shape[1]], token % k.shape[1]
        own = None if queries is None else queries[i : i + 1]
        given = (turned(np.asarray(x)[None]) for x in (q[i], k[at], v[at]))
        found = oracle_attention.Attention(*given, queries=own, **bounds)
        back = found.gradients(turned(dout[i][None]), turned(dlogs[i][None, ..., None]))
        rows.append((turned(found.out)[0], turned(found.stats)[0, ..., 0]))
        gradients[0][i] = turned(back["q"])[0]
        np.add.at(gradients[1], at, turned(back["k"])[0])
        np.add.at(gradients[2], at, turned(back["v"])[0])
    return *map(np.stack, zip(*rows, strict=True)), *gradients


LENGTHS = jnp.array([24, 9, 5], "int32")


def call(table, lengths, **arguments):
    return functools.partial(
        ours, page_table=table, key_value_seq_lengths=lengths, return_residual=True, **arguments
    )


def agree(got, want, limit=2e-5):
    for a, b in zip(got, want, strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b[np.isfinite(b)]).max()))


CASES = {  # queries, what attention is told (positions are from the last by default), lengths
    "one": (1, CAUSAL, {}),
    "all": (5, {}, {}),
    "causal window": (5, {**CAUSAL, "local_window_size": (3, 0)}, {}),
    "from the first": (5, {**CAUSAL, "bottom_right": False}, {}),
    "lengths": (5, CAUSAL, {"queries": np.array([2, 5, 0]), "keys": [24, 0, 7]}),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_each_example_sees_the_tokens_of_its_pages(name, normal):
    tokens, band, ends = CASES[name]
    *operands, table = cache(normal, t=tokens, e=6)
    keys, queries = jnp.array(ends.get("keys", LENGTHS), "int32"), ends.get("queries")
    dout, dlogs = normal((3, tokens, 4, 6)), normal((3, tokens, 4))
    given = {} if queries is None else {"query_seq_lengths": jnp.array(queries, "int32")}
    got = outcome(call(table, keys, **band, **given), operands, dout, dlogs)
    band = bounds(**{"bottom_right": True, **band})
    agree(got, exact(*operands, table, keys, dout, dlogs, queries, **band))


def test_pages_with_heads_first_and_one_cache_of_both(normal):
    q, k, v, table = cache(normal)
    want = call(table, LENGTHS)(q, k, v)
    turned = call(table, LENGTHS, heads_first=True)
    agree(turned(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)), want)
    both = jnp.stack([k, v], axis=1).reshape(-1, *k.shape[1:])
    agree(call(2 * table, LENGTHS, value_page_table=2 * table + 1)(q, both, both), want)


def test_nothing_is_read_behind_the_lengths_and_out_of_range(normal):
    """cuDNN would read foreign memory; so do entries that nobody set."""
    q, k, v, table = cache(normal)
    want = call(table, LENGTHS)(q, k, v)
    wild = table.at[1, 3:].set(-1).at[2, 2:].set(2**31 - 1)
    agree(call(wild, LENGTHS)(q, k, v), want)
    behind = [x.at[table[1, 2], 1:].set(jnp.nan).at[table[1, 3:]].set(jnp.nan) for x in (k, v)]
    agree(call(table, LENGTHS)(q, *behind), want)
    cut, beyond = (jnp.array(x, "int32") for x in ([24, 9, 0], [999, 9, -5]))
    agree(call(table, beyond)(q, k, v), call(table, cut)(q, k, v))
    # Entries within the lengths lead to the nearest page that there is.
    last, far = (call(jnp.full_like(table, x), LENGTHS)(q, k, v) for x in (len(k) - 1, 2**31 - 1))
    agree(far, last)
    assert np.isfinite(far[0]).all()


@pytest.mark.parametrize(("b", "t"), [(0, 1), (2, 0)])
def test_without_examples_or_queries(b, t, normal):
    _, k, v, _ = cache(normal)
    table, lengths = jnp.zeros((b, 6), "int32"), jnp.zeros(b, "int32")
    out, logs = call(table, lengths)(jnp.ones((b, t, 4, 8)), k, v)
    assert (out.shape, logs.shape) == ((b, t, 4, 8), (b, t, 4))
    assert write(k, jnp.ones((b, t, 2, 8)), table, lengths).shape == k.shape


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True])
def test_tokens_go_to_their_places(heads_first, normal):
    _, pages, _, table = cache(normal)
    new, at, lengths = normal((3, 5, 2, 8)), [2, 18, 22], [5, 3, 5]
    want = np.array(pages)
    for i in range(3):
        for t in range(lengths[i]):
            if at[i] + t < 24:
                want[int(table[i, (at[i] + t) // 4]), (at[i] + t) % 4] = new[i, t]
    turned = (lambda x: jnp.swapaxes(x, 1, 2)) if heads_first else (lambda x: x)
    at, lengths = jnp.array(at, "int32"), jnp.array(lengths, "int32")
    got = write(turned(pages), new, table, at, seq_lengths=lengths, heads_first=heads_first)
    np.testing.assert_array_equal(turned(got), want)


def test_tokens_without_a_place_are_left_out_and_donated_pages_are_written_where_they_lie():
    pages, new = jnp.zeros((4, 2, 1, 8), "bfloat16"), jnp.ones((4, 1, 1, 8))
    table, at = jnp.array([[-1], [4], [1], [2]], "int32"), jnp.array([0, 0, -1, 2], "int32")
    got = write(pages, new, table, at)
    assert got.dtype == pages.dtype
    assert not got.any()
    compiled = jax.jit(write, donate_argnums=0).lower(pages, new, table, at).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pages.nbytes


def decoded(q, keys, values, table, page, prompt, **given):
    """A prompt is written and attended to at once, then one token after the other."""
    pages = jnp.zeros((table.size + 1, page, *keys.shape[2:]), q.dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, new):
        key_pages, value_pages, length = carry
        q, k, v = new
        key_pages = write(key_pages, k, table, length)
        value_pages = write(value_pages, v, table, length)
        length = length + q.shape[1]
        lengths = {"key_value_seq_lengths": length, "is_causal": True}
        out = ours(q, key_pages, value_pages, table, **lengths, **given)
        return (key_pages, value_pages, length), out

    carry = pages, pages.copy(), jnp.zeros(len(q), jnp.int32)
    carry, first = step(carry, [x[:, :prompt] for x in (q, keys, values)])
    rest = [jnp.moveaxis(x[:, prompt:, None], 1, 0) for x in (q, keys, values)]
    _, each = jax.lax.scan(step, carry, rest)
    return jnp.concatenate([first, jnp.moveaxis(each[:, :, 0], 0, 1)], axis=1)


def test_a_loop_that_decodes(normal):
    arrays = normal((2, 11, 4, 8)), normal((2, 11, 2, 8)), normal((2, 11, 2, 8))
    got = decoded(*arrays, jnp.array([[5, 0, 3], [1, 6, 2]], "int32"), 4, 5)
    want = jc.ops.dot_product_attention(*arrays, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


# -- transformations -------------------------------------------------------------------------------


def test_vmap_is_further_examples_of_the_same_pages(normal):
    q, k, v, table = cache(normal, b=2, t=1)
    many, tables = normal((3, *q.shape)), jnp.stack([table, table[::-1], table + 1])
    lengths = jnp.array([[24, 3], [7, 9], [1, 0]], "int32")
    attend = lambda q, k, v, *x: ours(q, k, v, x[0], key_value_seq_lengths=x[1])  # noqa: E731
    axes = (0, None, None, 0, 0)
    operands = (many, k, v, tables, lengths)
    want = jnp.stack([attend(many[i], k, v, tables[i], lengths[i]) for i in range(3)])
    np.testing.assert_allclose(jax.vmap(attend, axes)(*operands), want, atol=1e-5)
    (spec,) = graphs_of(jax.vmap(attend, axes), *operands)
    assert spec.tensor(spec.calls[-1].inputs[0][1]).shape[0] == 6
    pages = jnp.stack([k, k + 1, k + 2])
    got = jax.vmap(attend, (None, 0, None, None, None))(q, pages, v, table, lengths[0])
    want = jnp.stack([attend(q, x, v, table, lengths[0]) for x in pages])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_forward_mode_and_second_derivatives(normal):
    *operands, table = cache(normal, b=1, t=2, n=2, k=1, h=4, per=2)
    along = [normal(x.shape) for x in operands]
    attend = lambda *x: call(table, jnp.array([7], "int32"), **LAST)(*x)[0]  # noqa: E731

    def plain(q, k, v):
        k, v = (x[table[0]].reshape(1, 8, *x.shape[2:])[:, :7] for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, mask=jnp.tri(2, 7, 5, bool))

    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2))  # noqa: E731
    for wrapped in (lambda f: f, cubes):
        got, want = (
            jax.jit(lambda *x, f=f, wrapped=wrapped: jax.jvp(wrapped(f), *x)[1])(operands, along)
            for f in (attend, plain)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-3)


def test_heads_may_be_sharded(normal):
    *operands, table = cache(normal, n=8, k=4)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))
    by_heads = P(None, None, "heads")
    attend = lambda *x: call(table, LENGTHS)(*x)[0]  # noqa: E731
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(by_heads,) * 3, out_specs=by_heads)
    np.testing.assert_allclose(jax.jit(mapped)(*operands), attend(*operands), atol=1e-5)


def test_only_some_examples_keys_are_brought_together():
    """Of 64 examples of 8k tokens: all of them in float32 would be 2 GiB."""
    q, pages = S((64, 1, 8, 128), "float32"), S((8200, 64, 8, 128), "float32")
    table, lengths = S((64, 128), "int32"), S((64,), "int32")
    attend = lambda q, k, t, n: ours(q, k, k, t, key_value_seq_lengths=n)  # noqa: E731
    compiled = jax.jit(attend).lower(q, pages, table, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


# -- plans, and the GPU ----------------------------------------------------------------------------

PLANNED = {
    "decode": ({"t": 1}, CAUSAL),
    "decode in a window": ({"t": 1}, {**CAUSAL, "local_window_size": (100, 0)}),
    "prefill": ({"t": 96}, {**CAUSAL, "local_window_size": (64, 0)}),
    "small pages": ({"t": 4, "page": 16, "per": 20, "k": 1}, CAUSAL),
}
SIZES = {"b": 4, "n": 8, "k": 2, "h": 64, "page": 64, "per": 5}


def prepared(normal, name, heads_first=False, dtype="bfloat16"):
    """A function of query and pages, those, and what it was made of."""
    sizes, band = PLANNED[name]
    *operands, table = cache(normal, **{**SIZES, **sizes}, dtype=dtype)
    lengths = jnp.array([320, 1, 100, 0], "int32")
    function = call(table, lengths, implementation="cudnn", heads_first=heads_first, **band)
    if heads_first:
        operands[1:] = (jnp.swapaxes(x, 1, 2) for x in operands[1:])
    return function, operands, table, lengths, band


@pytest.mark.deviceless
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("name", "gpu"), [("decode", "H200"), ("small pages", "A100"), ("prefill", "B200")]
)
def test_it_is_one_plan_that_reads_pages_where_they_lie(name, gpu, heads_first, normal):
    function, operands, *_ = prepared(normal, name, heads_first)
    with jc.target(gpu):
        (segment,) = jc.plan(function, *operands).segments
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert segment.plan is not None
    (line,) = (line for line in text.splitlines() if "@jax_cudnn" in line)
    assert "dense<[3, 1, 2, 0]>" not in line.partition("operand_layouts = ")[2]
    assert "stablehlo.transpose" not in text.partition("@jax_cudnn")[0]
    # The one last query sees all keys anyway, and cuDNN splits them among its blocks.
    (spec,) = graphs_of(function, *operands)
    assert methods(spec) == ["paged_sdpa"]
    right = spec.calls[0].node.base.diagonal_band_right_bound
    assert (right is None) == (operands[0].shape[1] == 1)


@pytest.mark.deviceless
def test_derivatives_are_xlas_with_a_reason(normal):
    function, operands, *_ = prepared(normal, "decode")
    loss = lambda *x: (function(*x)[0].astype("float32") ** 2).sum()  # noqa: E731
    with jc.target("H200"):
        forward, backward = jc.plans(jax.grad(loss, (0, 1, 2)), *operands).values()
    assert forward.segments[0].plan is not None
    (segment,) = backward.segments
    assert segment.plan is None
    assert "reference" in segment.reason


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads_first"), [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("name", PLANNED)
def test_results_on_the_gpu(name, dtype, heads_first, normal):
    """Of four examples one has no keys, and one a single one."""
    function, operands, table, lengths, band = prepared(normal, name, heads_first, dtype)
    got = [np.asarray(x, np.float64) for x in jax.jit(function)(*operands)]
    q, *pages = operands
    if heads_first:
        pages = [jnp.swapaxes(x, 1, 2) for x in pages]
    own = bounds(**{"bottom_right": True, **band})
    want = exact(q, *pages, table, lengths, np.zeros(q.shape), **own)
    assert relative_error(got[0], want[0]) < 2e-2
    assert not got[0][np.isneginf(want[1])].any()
    np.testing.assert_allclose(got[1], want[1], atol=2e-2)


@pytest.mark.gpu
def test_64_examples_of_8192_tokens_on_the_gpu(normal):
    b, tokens, page = 64, 8192, 64
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (b, 1, 32, 128), "bfloat16")
    k, v = (jax.random.normal(x, (b * tokens // page, page, 8, 128), "bfloat16") for x in keys[1:])
    random = np.random.default_rng(0)
    table = jnp.asarray(random.permutation(len(k)).reshape(b, -1), "int32")
    lengths = jnp.asarray(random.integers(1, tokens + 1, b), "int32").at[0].set(tokens)
    got = jax.jit(call(table, lengths, implementation="cudnn", **CAUSAL))(q, k, v)[0]
    for i in (0, 17, 63):  # a few of them in float64
        own = [np.asarray(x[table[i]]) for x in (k, v)]
        places, part = np.arange(tokens // page)[None], slice(i, i + 1)
        want = exact(q[part], *own, places, lengths[part], np.zeros((1, 1, 32, 128)))[0]
        assert relative_error(np.asarray(got[part], np.float64), want) < 2e-2


@pytest.mark.gpu
def test_a_loop_that_decodes_and_gradients_on_the_gpu(normal):
    """These by XLA, also where cuDNN runs the forward."""
    arrays = [normal((2, 100, heads, 64), "bfloat16") for heads in (8, 2, 2)]
    table = jnp.array([[3, 0], [1, 2]], "int32")
    got = decoded(*arrays, table, 64, 90, implementation="cudnn")
    want = oracle_attention.Attention(*map(turned, arrays), right=0)
    assert relative_error(turned(got), want.out) < 2e-2
    *operands, table = cache(normal, b=2, t=8, h=64, page=16, dtype="bfloat16")
    lengths, dout = jnp.array([96, 33], "int32"), normal((2, 8, 4, 64), "bfloat16")
    got = outcome(call(table, lengths, **CAUSAL), operands, dout)
    want = exact(*operands, table, lengths, np.asarray(dout), **bounds(**LAST))
    for a, b in zip(got, want, strict=True):
        assert relative_error(np.asarray(a, np.float64), b) < 2e-2
