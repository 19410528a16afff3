"""float64: computed in float64 by XLA, on a GPU too, with all derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning.limits import FLOAT64

ops, nn = jc.ops, jax.nn
SPATIAL = {"dimension_numbers": ("NHWC", "OHWI", "NHWC")}
HEADS, KEYS, ROWS, COLUMNS = (2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 6), (2, 6, 7)
IMAGE, WEIGHTS, TOKENS, PAGES = (2, 5, 6, 4), (8, 3, 3, 4), (8, 2, 8), (4, 2, 2, 8)
TABLE, ENDS = np.array([[2, 0], [1, 3]], np.int32), np.array([0, 3, 8], np.int32)
LENGTHS, FIRST = np.array([4, 4], np.int32), np.arange(8) < 3  # FIRST of two packed sequences


lax_conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), **SPATIAL)


@jc.graph
def graph(g, x, w, b):
    y = g.gelu(g.add(g.matmul(x, w), b) * 0.3)
    total = g.reduction(y, mode="ADD").set_dim([2, 5, 1])
    return total, g.tanh(g.sub(y, total)), g.binary_select(y, 0.1, g.cmp_gt(y, 0.7))


def plain(x, w, b):
    y = nn.gelu((x @ w + b) * 0.3, approximate=False)
    total = y.sum(-1, keepdims=True)
    return total, jnp.tanh(y - total), jnp.where(y > 0.7, y, 0.1)


def attention(q, k, v, seen=True, cap=None):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


CASES = {  # with jax_cudnn, in plain JAX, and the operands' shapes
    "conv": (lambda x, w, b: ops.conv(x, w, bias=b, activation="gelu", **SPATIAL),
        lambda x, w, b: nn.gelu(lax_conv(x, w, padding="SAME") + b), (IMAGE, WEIGHTS, (8,))),
    "matmul": (lambda a, b, c: ops.matmul(a, b, bias=c, scale=0.3, activation="silu"),
        lambda a, b, c: nn.silu(0.3 * (a @ b) + c), (ROWS, (6, 7), (7,))),
    "dot_general": (lambda a, b: ops.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
        jnp.matmul, (ROWS, COLUMNS)),
    "conv_general_dilated": (
        lambda x, w: ops.conv_general_dilated(x, w, (1, 1), "VALID", **SPATIAL),
        functools.partial(lax_conv, padding="VALID"), (IMAGE, WEIGHTS)),
    "conv_transpose": (lambda x, w: ops.conv_transpose(x, w, strides=2, **SPATIAL),
        lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME", **SPATIAL), (IMAGE, WEIGHTS)),
    "layer_norm": (ops.layer_norm,
        lambda x, g, b: nn.standardize(x, epsilon=1e-5) * g + b, (IMAGE, (4,), (4,))),
    "batch_norm": (lambda x, g: ops.batch_norm(x, g, None, *jnp.ones((2, 4)), training=True),
        lambda x, g: (nn.standardize(x, (0, 1, 2), epsilon=1e-5) * g,
            [0.9 + 0.1 * f(x, (0, 1, 2)) for f in (jnp.mean, jnp.var)]), (IMAGE, (4,))),
    "attention": (lambda q, k, v: ops.dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, np.tri(5) > 0), (HEADS, KEYS, KEYS)),
    "score_mod": (lambda *x: ops.dot_product_attention(*x, score_mod=ops.score_mods.softcap(5.1)),
        lambda *x: attention(*x, cap=5.1), (HEADS, KEYS, KEYS)),
    "qkv": (ops.dot_product_attention_qkv,
        lambda x: attention(*jnp.moveaxis(x, 2, 0)), ((2, 5, 3, 4, 8),)),
    "packed": (
        lambda *x: ops.packed_dot_product_attention(*x, query_offsets=ENDS, max_query_length=5),
        lambda *x: attention(*(x[None] for x in x), FIRST[:, None] == FIRST)[0], [TOKENS] * 3),
    "paged": (lambda *x: ops.paged_dot_product_attention(*x, TABLE, key_value_seq_lengths=LENGTHS),
        lambda q, *x: attention(q, *(x[TABLE].reshape(2, 4, 2, 8) for x in x)),
        ((2, 1, 4, 8), PAGES, PAGES)),
    "graph": (graph, plain, (ROWS, COLUMNS, (1, 1, 7))),
}  # fmt: skip


def checked(function):
    """Values, gradients, tangents, and gradients under vmap."""

    def total(*xs):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(*xs)))

    def run(*xs):
        gradient = jax.grad(total, tuple(range(len(xs))))
        twice = [jnp.stack([x, 2 * x]) for x in xs]
        tangents = jax.jvp(function, xs, xs)[1]
        return function(*xs), gradient(*xs), tangents, jax.vmap(gradient)(*twice)

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
            calls = [line for line in lowered.as_text().splitlines() if "custom_call" in line]
            assert "jax_cudnn" not in "".join(calls)
            with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError) as caught:
                jax.jit(ours).trace(*xs).lower(lowering_platforms=("cuda",))
    assert FLOAT64 in str(caught.value)


def test_a_wrapped_graph_and_a_stated_compute_type_are_float64_too():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(rng.normal(size=shape)) for shape in ((1, 6, 8), (1, 8, 5)))
        with jc.Graph(inputs=["mm::A", "mm::B"], outputs=["y"]) as wrapped:
            g = wrapped
            g.mul(g.matmul(a, b, name="mm"), 3.0).set_output(True).set_name("y")
        stated = jc.graph(lambda g, a, b: g.matmul(a, b) * 3.0, compute_data_type="float32")
        for got in (*jax.tree.leaves(wrapped(a, b)), stated(a, b)):
            assert got.dtype == "float64"
            np.testing.assert_allclose(got, 3.0 * (a @ b), rtol=1e-13)
