"""``score_max`` and ``score_sum_exp``: each query's largest score, and its sum of exponentials."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from helpers import has_cudnn, same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.ops.attention import reference

NAMES = ("score_max", "score_sum_exp")
B, H, N, T, S, D = 2, 4, 2, 12, 20, 8
CASES = {  # shapes of operands, options, the same for the oracle
    "all": ({}, {}, {}),
    "causal": ({}, {"diagonal_band_right_bound": 0}, {"right": 0}),
    "rows that see no key": (
        {},
        {"diagonal_band_right_bound": 0, "diagonal_band_left_bound": 3},
        {"right": 0, "left": 3, "keys": [5, 0], "queries": [12, 7]},
    ),
    "bias and sink": ({"bias": (1, H, T, S), "sink_token": (1, H, 1, 1)}, {}, {}),
}


def arrays(normal):
    return [2 * normal(shape) for shape in ((B, H, T, D), (B, N, S, D), (B, N, S, D))]


def extremes(q, k, v, operands, **options):
    @jc.graph
    def graph(g, q, k, v, operands):
        wanted = {"score_max": True, "score_sum_exp": True, "attn_scale": 0.4, **options}
        _, *found = g.sdpa(q, k, v, generate_stats=False, **operands, **wanted)
        return found

    return jax.jit(graph)(q, k, v, operands)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [2**24, 500])
def test_they_are_those_of_the_scores(name, block, normal, monkeypatch):
    monkeypatch.setattr(reference, "_SCORES", block)
    jax.clear_caches()
    shapes, options, exact = CASES[name]
    operands = {port: normal(shape) for port, shape in shapes.items()}
    if "keys" in exact:
        of = {"seq_len_q": exact["queries"], "seq_len_kv": exact["keys"]}
        operands = {port: jnp.array(n, "int32").reshape(B, 1, 1, 1) for port, n in of.items()}
    q, k, v = arrays(normal)
    got, total = extremes(q, k, v, operands, **options)
    shared = {"bias": operands.get("bias", 0.0), "sink": operands.get("sink_token")}
    want = oracle_attention.Attention(q, k, v, scale=0.4, **shared, **exact)
    largest = np.maximum(want.scores.max(-1, keepdims=True), want.sink)
    np.testing.assert_allclose(got, largest, rtol=1e-5, atol=1e-5)
    least = np.where(np.isneginf(largest), 0, largest)
    sums = np.exp(want.scores - least).sum(-1, keepdims=True) + np.exp(want.sink - least)
    np.testing.assert_allclose(total, sums, rtol=1e-5)
    assert (np.isneginf(largest).any() and not sums.all()) == (name == "rows that see no key")


def of_jnp(q, k, v):
    """The same as ``extremes`` without options, and O."""
    scores = 0.4 * jnp.einsum("bhsd,bhtd->bhst", q, jnp.repeat(k, H // N, axis=1))
    largest = scores.max(-1, keepdims=True)
    out = jax.nn.softmax(scores, axis=-1) @ jnp.repeat(v, H // N, axis=1)
    return out, largest, jnp.exp(scores - largest).sum(-1, keepdims=True)


@jc.graph
def everything(g, q, k, v):
    o, _, *found = g.sdpa(q, k, v, attn_scale=0.4, score_max=True, score_sum_exp=True)
    return o, *found


def test_derivatives_of_first_and_second_order_and_batches(normal):
    q, k, v = arrays(normal)
    weights = [normal(x.shape) for x in of_jnp(q, k, v)]

    def loss(function):
        return lambda *x: sum((w * y).sum() for w, y in zip(weights, function(*x), strict=True))

    slopes = [jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k, v) for f in (everything, of_jnp)]
    for ours, theirs in zip(*slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    along = normal(q.shape)
    curved = [
        jax.jit(jax.grad(lambda q, f=f: (jax.grad(loss(f))(q, k, v) * along).sum()))(q)
        for f in (everything, of_jnp)
    ]
    np.testing.assert_allclose(*curved, rtol=1e-3, atol=1e-3)
    many = jax.jit(jax.vmap(everything, (0, None, None)))(jnp.stack([q, -q]), k, v)
    for ours, *theirs in zip(many, of_jnp(q, k, v), of_jnp(-q, k, v), strict=True):
        same(ours, jnp.stack(theirs), 1e-4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_they_are_sharded_with_the_queries(normal):
    given = arrays(normal)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y"))
    of = [jax.device_put(x, jax.NamedSharding(mesh, P("x"))) for x in given]
    found = jax.jit(everything)(*of)
    assert all(x.sharding.spec[0] == "x" for x in found)
    for ours, theirs in zip(found, of_jnp(*given), strict=True):
        same(ours, theirs, 1e-4)


@pytest.mark.deviceless
@pytest.mark.parametrize("wanted", [NAMES[:1], NAMES[1:], NAMES])
def test_they_are_results_of_the_one_plan(wanted):
    if not has_cudnn(92800):
        pytest.skip("cuDNN 9.28 plans it")
    function = jc.graph(lambda g, *x: g.sdpa(*x, **dict.fromkeys(wanted, True)))
    x = jax.ShapeDtypeStruct((2, 4, 128, 64), "bfloat16")
    plan = jc.plan(function, x, x, x, gpus=["H200"])["H200"]
    (own,) = plan.execution_plans
    assert [port for port, _ in plan.spec.calls[0].outputs] == ["O", "Stats", *wanted]
    assert own.engine
    assert plan.spec.calls[0].node.without(["Stats", *wanted]).results == ("O",)
