"""Packed attention: variable-length sequences concatenated along the token axis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import CAUSAL, KEY, LAST, S, kept, outcome
from attention_checks import ours as dense
from fuzz import attentions
from transformations import graphs_of

import jax_cudnn as jc

ours = jc.ops.packed_dot_product_attention
SCORES_AT_A_TIME = 200


def qkv(normal, t=40, s=40, n=4, k=2, h=8, e=None, dtype="float32"):
    return [normal(shape, dtype) for shape in ((t, n, h), (s, k, h), (s, k, e or h))]


def offsets(*ends):
    return np.array(ends, "int32")


def offered(queries, keys=None, **arguments):
    lengths = [int(np.diff(x).max()) for x in (queries, queries if keys is None else keys)]
    given = {"query_offsets": queries, "max_query_length": lengths[0], **arguments}
    return given | {"key_value_offsets": keys, "max_key_value_length": lengths[1]}


def packed(*arguments, **named):
    return functools.partial(ours, **offered(*arguments, **named), return_residual=True)


EMPTY, OTHER = offsets(0, 0, 12, 12, 40, 40), offsets(0, 9, 9, 20, 33)
KEYS = offsets(2, 10, 15, 15, 38)
CASES = {  # offsets of queries and keys, band, shape of a bias
    "causal": (offsets(0, 17, 30, 40), None, CAUSAL, None),
    "window, empty examples": (EMPTY, None, {"local_window_size": (3, 2)}, None),
    "from the last, other keys": (OTHER, KEYS, {**LAST, "local_window_size": (4, 0)}, None),
    "bias": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (1, 4, 13, 13)),
    "bias of keys": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (4, 4, 1, 13)),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_each_example_by_itself(name, normal):
    queries, keys, band, shape = CASES[name]
    operands = qkv(normal, e=6)
    bias = [normal(shape)] if shape else []
    dout, dlogs = normal((40, 4, 6)), normal((40, 4))
    got = outcome(packed(queries, keys, **band), [*operands, *bias], dout, dlogs)
    exact = functools.partial(attentions._packed, **offered(queries, keys, **band))
    want = outcome(exact, [*operands, *bias], dout, dlogs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


DROPS = {  # dropout, a sink, a bias
    "dropout": (True, False, None),
    "sink": (False, True, None),
    "all": (True, True, (4, 4, 13, 13)),
}


def dropped(name, normal):
    """Packed attention and its reference, and their operands. A sequence draws the mask that it
    draws as an example of a padded array."""
    drop, sink, shape = DROPS[name]
    queries, given, exact = offsets(0, 13, 13, 22, 31), dict(CAUSAL), dict(CAUSAL)
    operands = qkv(normal, e=6)
    others = ({"bias": normal(shape)} if shape else {}) | (
        {"sink": 2 * normal((4,))} if sink else {}
    )
    if drop:
        given |= {"dropout_rate": 0.4, "dropout_rng": KEY}
        padded = jnp.zeros((4, 13, 4, 8))
        exact["keep"] = np.asarray(kept(padded, padded, 0.4)) / 0.6

    def of(function):
        return lambda q, k, v, *more: function(q, k, v, **dict(zip(others, more, strict=True)))

    got, want = (
        of(packed(queries, **given)),
        of(functools.partial(attentions._packed, **offered(queries, **exact))),
    )
    return (got, want), [*operands, *others.values()]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", DROPS)
def test_dropout_and_sinks_are_those_of_dense_arrays(name, normal):
    functions, operands = dropped(name, normal)
    along = normal((40, 4, 6)), normal((40, 4))
    for a, b in zip(*(outcome(f, operands, *along) for f in functions), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.usefixtures("blocks")
def test_further_derivatives_are_by_the_mask_that_the_forward_pass_draws(normal):
    functions, operands = dropped("all", normal)
    total = [lambda *x, f=f: jnp.sum(f(*x)[0] ** 2) for f in functions]
    for further in (
        lambda f: jax.jvp(f, operands, operands)[1],
        lambda f: jax.jvp(jax.grad(f), operands, operands)[1],
        lambda f: jax.grad(lambda q: jax.grad(f)(q, *operands[1:]).sum())(operands[0]),
    ):
        a, b = (np.asarray(jax.jit(further, static_argnums=0)(f)) for f in total)
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1, np.abs(b).max()))


@pytest.mark.usefixtures("blocks")
def test_keys_and_values_of_different_heads(normal):
    queries = offsets(0, 13, 31)
    operands, along = [*qkv(normal)[:2], normal((40, 4, 6))], (normal((40, 4, 6)), normal((40, 4)))
    exact = functools.partial(attentions._packed, **offered(queries))
    results = (outcome(f, operands, *along) for f in (packed(queries), exact))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_sequence_without_keys_does_not_see_its_sink(normal):
    """cuDNN writes no results for it."""
    q, k, v = qkv(normal)
    out, logs = packed(offsets(0, 9, 40), offsets(0, 0, 40), sink=jnp.ones(4))(q, k, v)
    assert not out[:9].any()
    assert np.isneginf(logs[:9]).all()
    assert out[9:].all()


def test_what_is_longer_than_said_is_left_out(normal):
    """Never read: offsets are clipped to the arrays and lengths to the limits; by default the limit
    of keys is that of queries."""
    q, k, v = qkv(normal, t=20, s=20)
    short = jax.jit(functools.partial(ours, max_query_length=6))
    got = short(q, k, v, query_offsets=offsets(0, 12, 90))
    assert got.shape == q.shape
    for part in (slice(0, 6), slice(12, 18)):
        want = dense(q[part], k[part], v[part])
        np.testing.assert_allclose(got[part], want, atol=1e-5)
    assert not got[6:12].any()
    assert not got[18:].any()
    assert not short(q, k, v, query_offsets=offsets(15, 3, -4)).any()
    wide = packed(offsets(0, 7, 20), scale=jnp.float32(0.2))(q, k, v)[0]
    np.testing.assert_allclose(wide, packed(offsets(0, 7, 20), scale=0.2)(q, k, v)[0], atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 20])
def test_without_tokens_or_without_examples(tokens):
    q, k = jnp.ones((tokens, 4, 8)), jnp.ones((tokens, 2, 8))
    ends = offsets(0) if tokens else offsets(0, 0)
    out, logs = ours(q, k, k, query_offsets=ends, max_query_length=4, return_residual=True)
    assert out.shape == q.shape
    assert not out.any()
    assert np.isneginf(logs).all()


@pytest.mark.usefixtures("blocks")
def test_what_is_no_number_stays_in_its_example(normal):
    operands = qkv(normal, t=24, s=24)

    @jax.jit
    def missing(*operands):
        out, pull = jax.vjp(lambda *x: packed(offsets(0, 9, 24))(*x)[0], *operands)
        return [jnp.isnan(x).reshape(24, -1).any(1) for x in (out, *pull(out))]

    for at in range(3):
        given = [*operands]
        given[at] = given[at].at[5, 1, 0].set(jnp.nan)
        for x in missing(*given)[: None if at < 2 else 1]:
            assert x[:9].any()
            assert not x[9:].any()


@pytest.mark.deviceless
def test_other_operations_are_no_part_of_the_plan():
    """They would read the packed array in another layout than attention."""
    q = S((300, 8, 64), "bfloat16")
    (spec,) = graphs_of(lambda q: packed(offsets(0, 100, 300))(q, q, q), q)

    @jc.graph
    def scaled(g, *operands):
        names = spec.inputs
        ports = {port: operands[names.index(name)]._state for port, name in spec.calls[0].inputs}
        out, _ = g._append(spec.calls[0].node, ports)
        return g.mul(out.set_data_type("bfloat16"), 2.0)

    node = spec.calls[0].node
    other = dataclasses.replace(node.storage, max_total_seq_len_q=299)
    with pytest.raises(jc.GraphError, match="max_total_seq_len_q"):
        dataclasses.replace(node, storage=other).infer(dict(spec.at_ports[0][1]))
    avals = [S(t.shape, t.dtype) for t in spec.input_tensors]
    with jc.target("H200"):
        with pytest.raises(jc.UnsupportedGraphError, match="ranks 3, 4"):
            jc.plan(scaled.with_options(implementation="cudnn"), *avals)
        first, second = jc.plan(scaled, *avals).segments
    assert (first.plan is None, second.plan is None) == (False, True)
