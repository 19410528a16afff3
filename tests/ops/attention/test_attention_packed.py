"""Packed attention: examples of different lengths one behind the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, LAST, bounds, outcome, turned
from transformations import graphs_of

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
ours = jc.ops.packed_dot_product_attention
SCORES_AT_A_TIME = 200


def qkv(normal, t=40, s=40, n=4, k=2, h=8, e=None, dtype="float32"):
    return [normal(shape, dtype) for shape in ((t, n, h), (s, k, h), (s, k, e or h))]


def offsets(*ends):
    return np.array(ends, "int32")


def exact(q, k, v, queries, keys, dout, dlogs=None, bias=None, **bounds):
    """One example after the other: the result, the statistic, and the gradients."""
    dlogs = np.zeros(q.shape[:2]) if dlogs is None else dlogs
    out, logs = np.zeros(dout.shape), np.full(dlogs.shape, -np.inf)
    gradients = [np.zeros(x.shape) for x in (q, k, v)]
    longest = [int(np.diff(ends).max()) for ends in (queries, keys)]
    scores = np.zeros((len(queries) - 1, q.shape[1], *longest))
    whole = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), scores.shape)
    for i in range(len(queries) - 1):
        own, others = (slice(int(ends[i]), int(ends[i + 1])) for ends in (queries, keys))
        t, s = (max(x.stop - x.start, 0) for x in (own, others))
        if t == 0 or s == 0:
            continue
        given = (turned(x[part][None]) for x, part in ((q, own), (k, others), (v, others)))
        found = oracle_attention.Attention(*given, bias=whole[i, :, :t, :s], **bounds)
        back = found.gradients(turned(dout[own][None]), turned(dlogs[own][None, ..., None]))
        out[own], logs[own] = turned(found.out)[0], turned(found.stats)[0, ..., 0]
        for gradient, part, name in zip(gradients, (own, others, others), "qkv", strict=True):
            gradient[part] = turned(back[name])[0]
        scores[i, :, :t, :s] = back["scores"][0]
    if bias is not None:
        axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        gradients.append(scores.sum(axes, keepdims=True))
    return out, logs, *gradients


def packed(queries, keys=None, **arguments):
    both = (queries, queries if keys is None else keys)
    lengths = [int(np.diff(ends).max()) for ends in both]
    return functools.partial(
        ours, query_offsets=queries, key_value_offsets=keys, max_query_length=lengths[0],
        max_key_value_length=lengths[1], return_residual=True, **arguments,
    )  # fmt: skip


EMPTY, OTHER = offsets(0, 0, 12, 12, 40, 40), offsets(0, 9, 9, 20, 33)
KEYS = offsets(2, 10, 15, 15, 38)
CASES = {
    "causal": (offsets(0, 17, 30, 40), None, CAUSAL, None),
    "window, empty examples": (EMPTY, None, {"local_window_size": (3, 2)}, None),
    "from the last, other keys": (OTHER, KEYS, {**LAST, "local_window_size": (4, 0)}, None),
    "tokens of no example": (offsets(3, 17, 30), None, LAST, None),
    "one token each": (np.arange(41, dtype="int32"), None, {}, None),
    "bias": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (1, 4, 13, 13)),
    "bias of queries": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (4, 1, 13, 1)),
    "bias of keys": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (4, 4, 1, 13)),
}
OTHERS = ("one token each", "tokens of no example", "bias of queries")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in OTHERS)) for n in CASES]
)
def test_results_and_gradients_are_those_of_each_example_by_itself(name, normal):
    queries, keys, band, shape = CASES[name]
    operands = qkv(normal, e=6)
    bias = [normal(shape)] if shape else []
    dout, dlogs = normal((40, 4, 6)), normal((40, 4))
    got = outcome(packed(queries, keys, **band), [*operands, *bias], dout, dlogs)
    keys = queries if keys is None else keys
    want = exact(*operands, queries, keys, dout, dlogs, *bias, **bounds(**band))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b[np.isfinite(b)]).max()))


def test_what_is_longer_than_said_is_left_out(normal):
    """Never read: offsets beyond the arrays and lengths beyond the limits are cut; and the longest
    keys are as long as the longest queries by default."""
    q, k, v = qkv(normal, t=20, s=20)
    short = jax.jit(functools.partial(ours, max_query_length=6))
    got = short(q, k, v, query_offsets=offsets(0, 12, 90))
    assert got.shape == q.shape
    for part in (slice(0, 6), slice(12, 18)):
        want = exact(q[part], k[part], v[part], [0, 6], [0, 6], q[part])[0]
        np.testing.assert_allclose(got[part], want, atol=1e-5)
    assert not got[6:12].any()
    assert not got[18:].any()
    assert not short(q, k, v, query_offsets=offsets(15, 3, -4)).any()
    wide = packed(offsets(0, 7, 20), scale=jnp.float32(0.2))(q, k, v)[0]
    np.testing.assert_allclose(wide, packed(offsets(0, 7, 20), scale=0.2)(q, k, v)[0], atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 8), (20, 4, 8)])
def test_without_tokens_or_without_examples(shape):
    q, k = jnp.ones(shape), jnp.ones((shape[0], 2, 8))
    ends = offsets(0) if shape[0] else offsets(0, 0)
    out, logs = ours(q, k, k, query_offsets=ends, max_query_length=4, return_residual=True)
    assert out.shape == shape
    assert not out.any()
    assert np.isneginf(logs).all()


@pytest.mark.usefixtures("blocks")
def test_what_is_no_number_stays_in_its_example(normal):
    operands = qkv(normal, t=24, s=24)

    @jax.jit
    def missing(*operands):
        run = packed(offsets(0, 9, 24))
        squares = lambda *x: (lambda found: (jnp.sum(found[0] ** 2), found))(run(*x))  # noqa: E731
        gradients, results = jax.grad(squares, (0, 1, 2), has_aux=True)(*operands)
        return [jnp.isnan(x).reshape(24, -1).any(1) for x in (*results, *gradients)]

    for at in range(3):
        given = [*operands]
        given[at] = given[at].at[5, 1, 0].set(jnp.nan)
        for x in missing(*given)[: None if at < 2 else 1]:
            assert x[:9].any()
            assert not x[9:].any()


@pytest.mark.deviceless
def test_other_operations_are_no_part_of_the_plan():
    """They would see the packed array otherwise than attention does."""
    q = S((300, 8, 64), "bfloat16")
    (spec,) = graphs_of(lambda q: packed(offsets(0, 100, 300))(q, q, q), q)

    @jc.graph
    def scaled(g, *operands):
        names = spec.inputs
        ports = {port: operands[names.index(name)]._state for port, name in spec.calls[0].inputs}
        out, _ = g._append(spec.calls[0].node, ports)
        return g.mul(out.set_data_type("bfloat16"), 2.0)

    avals = [S(t.shape, t.dtype) for t in spec.input_tensors]
    with jc.target("H200"):
        with pytest.raises(jc.UnsupportedGraphError, match="ranks 3, 4"):
            jc.plan(scaled.with_options(implementation="cudnn"), *avals)
        first, second = jc.plan(scaled, *avals).segments
    assert (first.plan is None, second.plan is None) == (False, True)
