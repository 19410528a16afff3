"""float64: computed in float64 by XLA, on a GPU too, with all derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning.limits import FLOAT64

SPATIAL = {"dimension_numbers": ("NHWC", "OHWI", "NHWC")}
PRODUCTS = (((2,), (1,)), ((0,), (0,)))
IMAGE, TABLE = (2, 5, 6, 4), np.array([[2, 0], [1, 3]], np.int32)


@jc.graph
def fused(g, x, w, b):
    return g.gelu(g.add(g.matmul(x, w), b) * 0.3)


@jc.graph
def reduced(g, x):
    y = g.reduction(x, mode="ADD").set_dim([2, 5, 1])
    return y, g.tanh(g.sub(x, y)), g.binary_select(x, 0.1, g.cmp_gt(x, 0.7))


def lax_conv(x, w, padding="SAME"):
    return jax.lax.conv_general_dilated(x, w, (1, 1), padding, **SPATIAL)


def normalized(x, axes, g=1.0, b=0.0, epsilon=1e-5):
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + epsilon) * g + b


def batch_normalized(x, g):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return normalized(x, (0, 1, 2), g), (0.9 + 0.1 * mean, 0.9 + 0.1 * variance)


def attention(q, k, v, changed=lambda s: s, seen=True):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = changed(jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def capped(s, *_):
    return 5.1 * jnp.tanh(s / 5.1)


def apart(q, k, v):
    each = [attention(*(x[None, i:j] for x in (q, k, v)))[0] for i, j in ((0, 3), (3, 8))]
    return jnp.concatenate(each)


def packed(q, k, v):
    ends = jnp.array([0, 3, 8], jnp.int32)
    return jc.ops.packed_dot_product_attention(q, k, v, query_offsets=ends, max_query_length=5)


def paged(q, k, v):
    lengths = jnp.array([4, 4], jnp.int32)
    return jc.ops.paged_dot_product_attention(q, k, v, TABLE, key_value_seq_lengths=lengths)


def gathered(q, k, v):
    return attention(q, *(x[TABLE].reshape(2, 4, 2, 8) for x in (k, v)))


OPS, HEADS, KEYS = jc.ops, (2, 5, 4, 8), (2, 5, 2, 8)
WEIGHTS, TOKENS, PAGES = (8, 3, 3, 4), (8, 2, 8), (4, 2, 2, 8)
CASES = {
    "conv": (
        lambda x, w, b: OPS.conv(x, w, bias=b, activation="gelu", **SPATIAL),
        lambda x, w, b: jax.nn.gelu(lax_conv(x, w) + b),
        (IMAGE, WEIGHTS, (8,)),
    ),
    "matmul": (
        lambda a, b, c: OPS.matmul(a, b, bias=c, scale=0.3, activation="silu"),
        lambda a, b, c: jax.nn.silu(0.3 * (a @ b) + c),
        ((2, 5, 6), (6, 7), (7,)),
    ),
    "dot_general": (
        lambda a, b: OPS.dot_general(a, b, PRODUCTS),
        lambda a, b: a @ b,
        ((2, 5, 6), (2, 6, 7)),
    ),
    "conv_general_dilated": (
        lambda x, w: OPS.conv_general_dilated(x, w, (1, 1), "VALID", **SPATIAL),
        lambda x, w: lax_conv(x, w, "VALID"),
        (IMAGE, WEIGHTS),
    ),
    "conv_transpose": (
        lambda x, w: OPS.conv_transpose(x, w, strides=2, **SPATIAL),
        lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME", **SPATIAL),
        (IMAGE, WEIGHTS),
    ),
    "layer_norm": (OPS.layer_norm, lambda x, g, b: normalized(x, -1, g, b), (IMAGE, (4,), (4,))),
    "batch_norm": (
        lambda x, g: OPS.batch_norm(x, g, None, *jnp.ones((2, 4)), training=True),
        batch_normalized,
        (IMAGE, (4,)),
    ),
    "attention": (
        lambda q, k, v: OPS.dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, seen=jnp.tril(jnp.ones((5, 5), bool))),
        (HEADS, KEYS, KEYS),
    ),
    "score_mod": (
        lambda q, k, v: OPS.dot_product_attention(q, k, v, score_mod=capped),
        lambda q, k, v: attention(q, k, v, capped),
        (HEADS, KEYS, KEYS),
    ),
    "qkv": (
        OPS.dot_product_attention_qkv,
        lambda x: attention(*jnp.moveaxis(x, 2, 0)),
        ((2, 5, 3, 4, 8),),
    ),
    "packed": (packed, apart, (TOKENS, TOKENS, TOKENS)),
    "paged": (paged, gathered, ((2, 1, 4, 8), PAGES, PAGES)),
    "graph": (
        fused,
        lambda x, w, b: jax.nn.gelu((x @ w + b) * 0.3, approximate=False),
        ((2, 5, 6), (2, 6, 7), (1, 1, 7)),
    ),
    "reduced": (
        reduced,
        lambda x: (y := x.sum(-1, keepdims=True), jnp.tanh(x - y), jnp.where(x > 0.7, x, 0.1)),
        ((2, 5, 6),),
    ),
}


def checked(function):
    """Values, gradients, tangents, and gradients under vmap."""

    def total(*xs):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*xs)))

    def run(*xs):
        gradient = jax.grad(total, tuple(range(len(xs))))
        twice = [jnp.stack([x, 2 * x]) for x in xs]
        return (
            function(*xs),
            gradient(*xs),
            jax.jvp(function, xs, xs)[1],
            jax.vmap(gradient)(*twice),
        )

    return run


@pytest.mark.parametrize("name", CASES)
def test_float64_is_computed_in_float64_and_runs_in_xla(name):
    ours, theirs, shapes = CASES[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        xs = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
        got, want = (jax.jit(checked(function))(*xs) for function in (ours, theirs))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == "float64"
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
        with jc.target("H200"):
            lowered = jax.jit(checked(ours)).trace(*xs).lower(lowering_platforms=("cuda",))
            assert "jax_cudnn" not in "".join(
                line for line in lowered.as_text().splitlines() if "custom_call" in line
            )
            with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError) as caught:
                jax.jit(lambda *xs: ours(*xs)).trace(*xs).lower(lowering_platforms=("cuda",))
    assert FLOAT64 in str(caught.value)
