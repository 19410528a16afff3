"""The cases that JAX tests its own dot_product_attention with, on ours: shapes, dtypes, masks,
vmaps, gradients and tolerances. Where JAX's cuDNN refuses (a bias' gradient of several examples),
ours computes."""

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


def normal(position, shape, dtype):
    return jax.random.normal(jax.random.split(jax.random.PRNGKey(0), 5)[position], shape, dtype)


def close(got, want, limit):
    assert got.dtype == want.dtype
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=limit, rtol=limit)


@pytest.mark.wide
@on_cpu_and_gpu
@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_and_vmap(dtype, group, use_vmap, implementation):
    q, grad = normal(0, (B, T, N, H), dtype), normal(3, (B, T, N, H), dtype)
    k, v = (normal(i, (B, S, N // group, H), dtype) for i in (1, 2))
    whole = [jnp.repeat(x, group, axis=2) for x in (k, v)]
    attention = functools.partial(ours, implementation=implementation)
    if use_vmap:
        attention = jax.vmap(attention, in_axes=(0, 0, 0, None, None))
    want, pull_theirs = jax.vjp(theirs, q, *whole, None, None)
    got, pull = jax.vjp(attention, q, k, v, None, None)
    dq, *others = pull_theirs(grad)[:3]
    others = [x.reshape(B, S, N // group, group, H).sum(axis=3) for x in others]
    close(got, want, 0.01)
    for a, b in zip(pull(grad)[:3], (dq, *others), strict=True):
        close(a, b, 0.01 if implementation is None else 0.02)


MODES = [
    "bias", "causal", "padding", "custom", "causal, padding", "custom, padding", "bias, causal",
    "causal, sliding_window",
]  # fmt: skip


@on_cpu_and_gpu
@pytest.mark.parametrize("mode", MODES)
def test_masks(mode, implementation):
    parts, dtype = mode.split(", "), "bfloat16"
    q, k, v, grad = (normal(i, (B, T, N, H), dtype) for i in range(4))
    causal = "causal" in parts
    bias = normal(4, (1, N, T, S), dtype) if "bias" in parts else None
    mask = jnp.tril(jnp.ones((T, S), jnp.bool_))[None, None] if "custom" in parts else None
    lengths = [None, None]
    if "padding" in parts:
        lengths = [jnp.array(x, "int32") for x in ([T // 2, T // 4], [S // 4, S // 2])]
    window = ((3, 2) if causal else (3, 0)) if "sliding_window" in parts else None

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
@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_gradients_of_a_bias(batch, use_vmap, implementation):
    x = normal(0, (batch, S, N, H), "bfloat16")
    bias, mask = normal(1, (batch, N, S, S), "bfloat16"), jnp.ones((1, 1, S), jnp.bool_)

    def of(attention, **keywords):
        def function(x, bias, mask):
            return attention(x, x, x, bias, mask, is_causal=False, **keywords)

        return function

    mine = of(ours, implementation=implementation)
    batched = [jax.vmap(f, in_axes=(0, 0, None)) if use_vmap else f for f in (mine, of(theirs))]
    close(jax.jit(batched[0])(x, bias, mask), jax.jit(batched[1])(x, bias, mask), 0.01)

    def pulled(f):
        return jax.jit(lambda *o: jax.vjp(f, *o)[1](x)[:2])(x, bias, mask)

    for got, want in zip(pulled(mine), pulled(of(theirs)), strict=True):
        close(got, want, 0.1)
