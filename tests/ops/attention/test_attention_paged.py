"""Attention over keys and values in pages, and the tokens that are written there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, bounds, outcome, turned
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
ours, write = jc.ops.paged_dot_product_attention, jc.ops.write_pages
SCORES_AT_A_TIME = 60


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


@pytest.mark.gpu
def test_a_loop_that_decodes_on_the_gpu(normal):
    arrays = [normal((2, 100, heads, 64), "bfloat16") for heads in (8, 2, 2)]
    table = jnp.array([[3, 0], [1, 2]], "int32")
    got = decoded(*arrays, table, 64, 90, implementation="cudnn")
    want = oracle_attention.Attention(*map(turned, arrays), right=0)
    assert relative_error(turned(got), want.out) < 2e-2


def test_one_last_query_has_no_band(normal):
    """It sees all keys anyway, and cuDNN splits them among its blocks."""
    *operands, table = cache(normal, t=1)
    (spec,) = graphs_of(call(table, LENGTHS, **CAUSAL), *operands)
    assert methods(spec) == ["paged_sdpa"]
    assert spec.calls[0].node.base.diagonal_band_right_bound is None
