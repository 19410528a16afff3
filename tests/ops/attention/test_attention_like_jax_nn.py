"""The cases that JAX tests its own dot_product_attention with, on ours: their masks, vmaps,
gradients and tolerances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

ours, theirs = jc.ops.dot_product_attention, jax.nn.dot_product_attention
B, T, S, N, H = 2, 128, 128, 4, 32

on_cpu_and_gpu = pytest.mark.parametrize(
    "implementation", [None, pytest.param("cudnn", marks=pytest.mark.gpu)]
)


def normal(position, shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.split(jax.random.PRNGKey(0), 5)[position], shape, dtype)


def close(got, want, limit):
    assert got.dtype == want.dtype
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=limit, rtol=limit)


MODES = ["custom, padding", "bias, causal", "causal, padding", "causal, sliding_window"]


@on_cpu_and_gpu
@pytest.mark.parametrize("mode", MODES)
def test_masks(mode, implementation):
    parts = mode.split(", ")
    q, k, v, grad = (normal(i, (B, T, N, H)) for i in range(4))
    causal = "causal" in parts
    bias = normal(4, (1, N, T, S)) if "bias" in parts else None
    mask = jnp.tril(jnp.ones((T, S), jnp.bool_))[None, None] if "custom" in parts else None
    lengths = [None, None]
    if "padding" in parts:
        lengths = [jnp.array(x, "int32") for x in ([T // 2, T // 4], [S // 4, S // 2])]
    window = (3, 2) if "sliding_window" in parts else None

    def of(attention, **keywords):
        def function(q, k, v, bias, mask, queries, keys):
            return attention(
                q, k, v, bias, mask, is_causal=causal, query_seq_lengths=queries,
                key_value_seq_lengths=keys, local_window_size=window, **keywords,
            )  # fmt: skip

        return function

    operands = (q, k, v, bias, mask, *lengths)
    want, pull_theirs = jax.vjp(of(theirs), *operands)
    got, pull = jax.vjp(of(ours, implementation=implementation), *operands)
    close(got, want, 0.01)
    for a, b in zip(pull(grad)[:4], pull_theirs(grad)[:4], strict=True):
        if a is None or b is None:
            assert a is b
        else:
            close(a, b, 0.02)


@on_cpu_and_gpu
def test_gradients_of_a_bias_of_several_examples(implementation):
    """JAX's cuDNN refuses it."""
    x = normal(0, (4, S, N, H))
    bias, pairs = normal(1, (4, N, S, S)), []
    for attention in (functools.partial(ours, implementation=implementation), theirs):
        function = lambda x, b, f=attention: f(x, x, x, b, jnp.ones((1, 1, S), bool))  # noqa: E731
        out, pull = jax.vjp(jax.jit(function), x, bias)
        pairs.append((out, *pull(x)))
    for got, want, limit in zip(*pairs, (0.01, 0.1, 0.1), strict=True):
        close(got, want, limit)
