"""Attention over paged keys and values, and writing tokens to pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import CAUSAL, outcome
from fuzz import attentions
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary

ours, write = jc.ops.paged_dot_product_attention, jc.ops.write_pages
SCORES_AT_A_TIME = 60


def cache(normal, t=5, e=8, tokens=None):
    """query, key and value pages, and a page table in random order; some pages are unused. With
    ``tokens`` queries are packed."""
    table = np.random.default_rng(0).permutation(21)[:18].reshape(3, 6)
    shapes = (tokens, 4, 8) if tokens else (3, t, 4, 8), (21, 4, 2, 8), (21, 4, 2, e)
    return *(normal(shape) for shape in shapes), jnp.asarray(table, "int32")


LENGTHS = jnp.array([24, 9, 5], "int32")


def call(table, lengths, attend=ours, **arguments):
    given = {"page_table": table, "key_value_seq_lengths": lengths, "return_residual": True}
    return functools.partial(attend, **given, **arguments)


def agree(got, want, limit=2e-5):
    for a, b in zip(got, want, strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b[np.isfinite(b)]).max()))


CASES = {  # queries, options, lengths of keys
    "one": (1, CAUSAL, [24, 9, 5]),
    "causal window": (5, {**CAUSAL, "local_window_size": (3, 0)}, [24, 9, 5]),
    "from the first": (5, {**CAUSAL, "bottom_right": False}, [24, 9, 5]),
    "lengths": (5, {**CAUSAL, "query_seq_lengths": jnp.array([2, 5, 0], "int32")}, [24, 0, 7]),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_each_example_sees_the_tokens_of_its_pages(name, normal):
    tokens, given, lengths = CASES[name]
    *operands, table = cache(normal, t=tokens, e=6)
    along, lengths = (
        (normal((3, tokens, 4, 6)), normal((3, tokens, 4))),
        jnp.array(lengths, "int32"),
    )
    got = outcome(call(table, lengths, **given), operands, *along)
    agree(got, outcome(call(table, lengths, attentions._paged, **given), operands, *along))


RAGGED = {"query_offsets": np.array([0, 6, 6, 9], "int32"), "max_query_length": 6}
WIDE = jnp.array([[4, 0, 1], [7, 2, 2], [9, 3, 5]], "int32")  # pages of 8 values
FURTHER = {  # queries, further operands, options
    "one, sink": (1, ["sink"], CAUSAL),
    "sink": (5, ["sink"], CAUSAL),
    "bias": (5, ["bias"], {"query_seq_lengths": jnp.array([2, 5, 0], "int32")}),
    "ragged": (6, [], {**RAGGED, **CAUSAL}),
    "all": (6, ["bias", "sink"], {**RAGGED, "local_window_size": (7, 2), "value_page_table": WIDE}),
    "pages and heads of values": (5, [], {**CAUSAL, "value_page_table": WIDE}),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", FURTHER)
def test_biases_sinks_packed_queries_and_pages_of_another_size(name, normal):
    count, more, given = FURTHER[name]
    tokens = 11 if "query_offsets" in given else None
    *operands, table = cache(normal, t=count, e=6, tokens=tokens)
    if "value_page_table" in given:
        operands[2] = normal((10, 8, 4 if "heads" in name else 2, 6))
    shapes = {"bias": (3 if tokens else 1, 4, count, 24), "sink": (4,)}
    operands += [normal(shapes[name]) for name in more]
    lengths = jnp.array([24, 9, 0] if not tokens else [24, 9, 5], "int32")
    along = [normal((*operands[0].shape[:-1], 6)), normal(operands[0].shape[:-1])]

    def of(attend):
        def run(q, k, v, *others):
            named = dict(zip(more, others, strict=True))
            return call(table, lengths, attend, **given, **named)(q, k, v)

        return outcome(run, operands, *along)

    agree(of(ours), of(attentions._paged))


def test_packed_queries_are_read_and_written_in_bounds(normal):
    *operands, table = cache(normal, tokens=11)
    given = {"max_query_length": 4, "page_table": table, "key_value_seq_lengths": LENGTHS}
    got = ours(*operands, query_offsets=jnp.array([0, 6, 2, 99], "int32"), **given)
    assert not got[4:].any()  # longer than said, and between offsets that are not in order
    assert got[:2].any()
    (spec,) = graphs_of(call(table, LENGTHS, **RAGGED), *operands)
    wild = [jnp.full(t.shape, 2**30, t.dtype) for t in spec.input_tensors]
    found = dict(zip(spec.inputs, boundary(spec).clipped(wild), strict=True))
    for port, name in spec.calls[0].inputs:
        if port in ("ragged_offset_q", "ragged_offset_o", "ragged_offset_stats"):
            assert (found[name] <= 11 * 32).all()
    assert not found[dict(spec.calls[0].inputs)["seq_len_q"]].any()


def test_nothing_is_read_behind_the_lengths_and_out_of_range(normal):
    """cuDNN would read out of bounds; unused entries may be anything."""
    q, k, v, table = cache(normal)
    want = call(table, LENGTHS)(q, k, v)
    wild = table.at[1, 3:].set(-1).at[2, 2:].set(2**31 - 1)
    agree(call(wild, LENGTHS)(q, k, v), want)
    behind = [x.at[table[1, 2], 1:].set(jnp.nan).at[table[1, 3:]].set(jnp.nan) for x in (k, v)]
    agree(call(table, LENGTHS)(q, *behind), want)
    cut, beyond = (jnp.array(x, "int32") for x in ([24, 9, 0], [999, 9, -5]))
    agree(call(table, beyond)(q, k, v), call(table, cut)(q, k, v))
    # Entries within the lengths are clipped to existing pages.
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


def test_a_loop_that_decodes(normal):
    """A prompt is written and attended to in one call, then token by token."""
    arrays = normal((2, 11, 4, 8)), normal((2, 11, 2, 8)), normal((2, 11, 2, 8))
    table = jnp.array([[5, 0, 3], [1, 6, 2]], "int32")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, new):
        *pages, length = carry
        pages = [write(x, tokens, table, length) for x, tokens in zip(pages, new[1:], strict=True)]
        length = length + new[0].shape[1]
        return (*pages, length), ours(new[0], *pages, table, key_value_seq_lengths=length, **CAUSAL)

    carry = jnp.zeros((7, 4, 2, 8)), jnp.zeros((7, 4, 2, 8)), jnp.zeros(2, "int32")
    carry, first = step(carry, [x[:, :5] for x in arrays])
    _, each = jax.lax.scan(step, carry, [jnp.moveaxis(x[:, 5:, None], 1, 0) for x in arrays])
    got = jnp.concatenate([first, jnp.moveaxis(each[:, :, 0], 0, 1)], axis=1)
    want = jc.ops.dot_product_attention(*arrays, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_one_last_query_has_no_band(normal):
    """It sees all keys anyway, and cuDNN then splits them between its blocks."""
    *operands, table = cache(normal, t=1)
    (spec,) = graphs_of(call(table, LENGTHS, **CAUSAL), *operands)
    assert methods(spec) == ["paged_sdpa"]
    assert spec.calls[0].node.base.diagonal_band_right_bound is None
