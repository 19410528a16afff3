"""Attention: all options compared with float64, special cases, and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, LAST, check, lengths, made, ours, outcome, qkv
from helpers import same
from transformations import graphs_of

import jax_cudnn as jc

theirs = jax.nn.dot_product_attention


pytestmark = pytest.mark.usefixtures("blocks")


TILED = {"t": 140, "s": 300, "k": 2, "h": 8}
GROUPS = {"t": 17, "s": 33, "n": 6, "k": 2, "h": 8, "e": 12}
LENGTHS = lengths([24, 12, 24], [0, 17, 21])
LENGTHS_OF_TWO = lengths([20, 24], [9, 24])
CASES = {  # sizes, and what it has
    "grouped heads, causal": (GROUPS, {**CAUSAL, "bias": (1, 6, 17, 33)}),
    "window": ({"k": 1, "e": 8}, {"local_window_size": (3, 2), "bias": (2, 1, 24, 24)}),
    "fewer heads of values": ({"n": 6, "k": 3, "v": 2, "e": 8}, CAUSAL),
    "more heads of values": (
        {"k": 2, "v": 4}, {**LENGTHS_OF_TWO, "bias": (2, 4, 24, 24), "sink": True, "rate": 0.3},
    ),
    "no bound": ({}, {"local_window_size": (2**31 - 1, 2**31 - 3), "bottom_right": True}),
    "from the last": ({"t": 5, "s": 21}, {**LAST, "local_window_size": (6, 0)}),
    "lengths": ({"b": 3, "k": 2}, {**LENGTHS, "bias": (1, 1, 24, 1)}),
    "lengths out of range": ({"b": 3}, {**LAST, **lengths([99, -2, 7], [20, 5, 99])}),
    "sink, no key": ({"b": 3}, {**LENGTHS, "sink": True, "bias": (1, 4, 24, 24)}),
    "sink, score_mod": (  # which has a separate reference
        {"b": 3},
        {**LENGTHS, **LAST, "sink": True, "score_mod": lambda score, *_: score},
    ),
    "alibi of six heads": (GROUPS, {**CAUSAL, "alibi": True, "sink": True}),
    "tiles": (TILED, {"tiles": (2, 4), "sink": True, **lengths([140, 70], [300, 150])}),
    "dropout": ({"k": 2, "e": 8}, {"rate": 0.3}),
    "dropout and all": (
        {"b": 3, "k": 2},
        {**LENGTHS, **CAUSAL, "rate": 0.5, "sink": True, "alibi": True, "bias": (3, 1, 24, 24)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, normal):
    check(normal, *made(normal, *CASES[name]))


def test_a_scale_may_be_an_array(normal):
    q = normal((1, 9, 4, 8))
    same(*(ours(q, q, q, scale=x) for x in (0.3, jnp.float32(0.3))))
    of_heads = jnp.array([[0.1], [0.2], [0.3], [0.4]])
    same(ours(q, q, q, scale=of_heads), ours(q * of_heads, q, q, scale=1.0))


def test_gradients_of_a_result_in_float8_do_not_go_on_from_it(normal):
    """The result is rounded, and its derivative is not."""
    dtype = "float8_e5m2"
    graph = jc.graph(lambda g, q, k, v: g.sdpa(q, k, v, attn_scale=0.25)[0].set_data_type(dtype))
    q, k, v, along = normal((4, 2, 2, 24, 16))
    along = along.astype(dtype)
    want = oracle_attention.Attention(q, k, v).gradients(along)
    for a, b in zip(jax.vjp(graph, q, k, v)[1](along), map(want.get, "qkv"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())


def test_what_is_no_number_stays_none_as_in_jax_nn_and_nothing_is_read_behind_the_lengths(normal):
    operands = [*qkv(normal, h=8), normal((2, 4, 24, 24))]

    @functools.partial(jax.jit, static_argnums=0)
    def missing(f, *operands):
        def loss(*x):
            out, residual = f(*x, return_residual=True)
            return jnp.sum(out**2), (out, residual)

        gradients, results = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*operands)
        return [jnp.isnan(x) for x in (*results, *gradients)]

    for at, x in enumerate(operands):
        given = *operands[:at], x.at[0, 3, 2, 1].set(jnp.nan), *operands[at + 1 :]
        for a, b in zip(missing(ours, *given), missing(theirs, *given), strict=True):
            np.testing.assert_array_equal(a, b)
    within = functools.partial(ours, **lengths([24, 9], [24, 9]))
    behind = [x.at[1, 9:].set(jnp.nan) for x in operands[:3]]
    assert not any(x.any() for x in missing(within, *behind, operands[3]))


HIDDEN = {
    "rows": (jnp.ones((6, 6), bool).at[jnp.array([0, 3])].set(False), {}),
    "padding on the left": (jnp.ones((2, 1, 1, 6), bool).at[1, ..., :2].set(False), CAUSAL),
    "a window": (jnp.ones((6, 6), bool).at[4, 3:].set(False), {"local_window_size": (1, 1)}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_where_a_mask_hides_all_keys_it_is_as_jax_nn(name, normal):
    """The mean of the values, independent of queries and keys, without rank promotion. The
    residual is below all others, so that combining parts by it gives this part no weight."""
    mask, more = HIDDEN[name]
    operands, dout = qkv(normal, t=6, s=6, h=8, k=2), normal((2, 6, 4, 8))
    plain = lambda *x: (theirs(*x, None, mask, **more), jnp.zeros((2, 6, 4)))  # noqa: E731
    function = functools.partial(ours, mask=mask, return_residual=True, **more)
    want = outcome(plain, operands, dout, jnp.zeros((2, 6, 4)))
    for dtype, rough in (("float32", 1e-5), ("bfloat16", 3e-2))[: 1 + (name == "rows")]:
        with jax.numpy_rank_promotion("raise"):
            given = [x.astype(dtype) for x in operands]
            out, logs, *got = outcome(function, given, dout, jnp.zeros((2, 6, 4)))
        for a, b in zip((out, *got), (want[0], *want[2:]), strict=True):
            np.testing.assert_allclose(a.astype("float32"), b, atol=rough * np.abs(b).max())
        sees = np.tri(6) if more is CAUSAL else np.ones((6, 6))
        if "local_window_size" in more:
            sees = np.abs(np.subtract.outer(np.arange(6), np.arange(6))) <= 1
        hidden = ~(np.broadcast_to(mask, (2, 4, 6, 6)) & (sees > 0)).any(-1)
        assert hidden.any()
        np.testing.assert_array_equal(np.swapaxes(logs, 1, 2) < -1e38, hidden)


def test_hidden_queries_beside_sinks_lengths_tiles_and_infinite_biases(normal):
    q, k, v = qkv(normal, t=6, s=6, h=8)
    mask = jnp.ones((6, 6), bool).at[jnp.array([1, 5])].set(False)
    queries, keys = jnp.array([6, 4], "int32"), jnp.array([3, 6], "int32")
    far = v.at[0, 3:].set(1e4)  # the mean is of the values within the lengths
    got = ours(q, k, far, None, mask, query_seq_lengths=queries, key_value_seq_lengths=keys)
    for a, b in ((got[0, 1], v[0, :3]), (got[0, 5], v[0, :3]), (got[1, 1], v[1])):
        np.testing.assert_allclose(a, b.mean(0), atol=1e-5)
    np.testing.assert_array_equal(got[1, 5], 0)
    tiles = jnp.ones((1, 1, 1, 1), bool)
    got = ours(q, k, v, None, mask, block_mask=tiles)
    np.testing.assert_allclose(got[:, 1], v.mean(1), rtol=1e-5)
    assert not ours(q, k, v, None, mask, block_mask=~tiles).any()
    of_sink = lambda v: ours(q, k, v, None, mask, sink=jnp.zeros(4))[:, 1]  # noqa: E731
    assert not of_sink(v).any()
    assert not jax.grad(lambda v: of_sink(v).sum())(v).any()
    low = jnp.zeros((6, 6)).at[3].set(-jnp.inf)  # jax.nn returns NaN here
    np.testing.assert_array_equal(ours(q, k, v, low)[:, 3], 0)


@pytest.mark.parametrize("shape", [(6, 6), (1, 1, 1, 6), (1, 4, 6, 6)])
def test_what_is_added_is_not_larger_than_the_mask(shape, normal):
    """Also with lengths and bands, which hide other keys for each batch element and query."""
    q, k, v = qkv(normal, t=6, s=6, h=8)
    attend = functools.partial(ours, key_value_seq_lengths=jnp.array([3, 6], "int32"), **CAUSAL)
    mask = jnp.ones(shape, bool).at[..., :4].set(False)
    (spec,) = graphs_of(lambda q, k, v: attend(q, k, v, None, mask), q, k, v)
    assert spec.tensor("bias").shape == (*(1,) * (4 - len(shape)), *shape)
    got, want = (attend(q, k, v, None, jnp.broadcast_to(mask, s)) for s in (shape, (2, 4, 6, 6)))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_lengths_are_of_any_integer_dtype_and_may_be_weakly_typed(normal):
    """What exceeds int32 saturates; the length is 6."""
    q, packed = normal((2, 6, 4, 8)), jc.ops.packed_dot_product_attention
    want = ours(q, q, q, key_value_seq_lengths=jnp.array([4, 6], "int32"))
    with jax.enable_x64(True):
        for lengths in (jnp.array([4, 2**40]), [4, 6], np.uint32([4, 2**32 - 1])):
            np.testing.assert_array_equal(ours(q, q, q, key_value_seq_lengths=lengths), want)
    ours(q, q, q, query_seq_lengths=jnp.full(2, 4))
    jc.graph(lambda g, q, n: g.sdpa(q, q, q, seq_len_q=n, seq_len_kv=n)[0])(
        q, jnp.full((2, 1, 1, 1), 4)
    )
    packed(*[q[0]] * 3, query_offsets=jnp.full(3, 6), max_query_length=6)
    pages = q[:, :2, :2], q[:, :2, :2], jnp.full((2, 3), 1)
    jc.ops.paged_dot_product_attention(q, *pages, key_value_seq_lengths=jnp.full(2, 5))
