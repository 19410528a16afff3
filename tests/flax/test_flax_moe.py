"""MoE against a loop over tokens and experts in NumPy."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn


def looped(moe, x):
    """The result and the loss, in float64."""
    gate, up, down, router = (
        np.asarray(p[...]).astype("float64")
        for p in (moe.gate, moe.up, moe.down, moe.router.kernel)
    )
    tokens = np.asarray(x).astype("float64").reshape(-1, x.shape[-1])
    y, counts = np.zeros_like(tokens), np.zeros(moe.num_experts)
    logits = tokens @ router
    for i, token in enumerate(tokens):
        best = np.argsort(-logits[i])[: moe.top_k]
        weights = np.exp(logits[i, best])
        for expert, weight in zip(best, weights / weights.sum(), strict=True):
            gated = token @ gate[expert]
            y[i] += weight * (gated / (1 + np.exp(-gated)) * (token @ up[expert])) @ down[expert]
            counts[expert] += 1
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return y.reshape(x.shape), moe.num_experts * (counts / counts.sum() * shares.mean(0)).sum()


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_layer_is_a_loop(top_k, key):
    moe = jnn.MoE(8, 12, 4, top_k, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (2, 5, 8))
    y, loss = nnx.jit(lambda m, x: m(x, return_loss=True))(moe, x)
    want, balance = looped(moe, x)
    assert np.allclose(y, want, atol=1e-5)
    assert np.allclose(loss, balance, rtol=1e-5)
    assert np.array_equal(moe(x), y)
    assert moe(jnp.ones(8)).shape == (8,)


def test_dtypes(key):
    moe = jnn.MoE(8, 12, 4, 2, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (10, 8), "bfloat16")
    assert moe(x).dtype == "bfloat16"
    assert moe.gate[...].dtype == "float32"
    assert np.allclose(moe(x).astype("float32"), looped(moe, x)[0], atol=0.05)


def test_gradients_are_differences(key):
    moe = jnn.MoE(8, 12, 4, 2, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (10, 8))
    graph, state = nnx.split(moe)

    def loss(state, x):
        y, balance = nnx.merge(graph, state)(x, return_loss=True)
        return (y**2).sum() + balance

    jax.test_util.check_grads(loss, (state, x), 1, ["rev"], atol=0.05, rtol=0.05, eps=1e-3)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(jax.grad(loss)(state, x)))


def test_more_experts_for_a_token_than_there_are():
    with pytest.raises(jc.GraphError, match="at most num_experts=2"):
        jnn.MoE(8, 12, 2, 3, rngs=nnx.Rngs(0))
