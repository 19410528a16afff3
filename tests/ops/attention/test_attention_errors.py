"""Errors of attention functions and nodes: their class, and a few characteristic words."""

import functools

import jax
import jax.numpy as jnp
import pytest
from attention_checks import KEY, S, ours

import jax_cudnn as jc

Q = jnp.ones((2, 8, 4, 16), "bfloat16")
PACKED, PAGES = jnp.ones((20, 4, 8), "bfloat16"), jnp.ones((9, 4, 2, 8), "bfloat16")
ONE, TWO = jnp.ones((2, 1, 4, 8), "bfloat16"), jnp.ones(2, "int32")
TABLE = jnp.zeros((2, 3), "int32")
fp8 = jc.ops.dot_product_attention_fp8
packed = functools.partial(
    jc.ops.packed_dot_product_attention, query_offsets=TWO, max_query_length=12
)
paged = functools.partial(
    jc.ops.paged_dot_product_attention, page_table=TABLE, key_value_seq_lengths=TWO
)
write, of_pages = jc.ops.write_pages, (ONE, PAGES, PAGES)
quantized, restored = jc.ops.quantize_mxfp8, jc.ops.dequantize_mxfp8
huge = S((2**16, 256, 128), "bfloat16")
FUNCTIONS = {  # words, and a function, its arguments, keywords
    "different dtypes": (ours, (Q, Q, Q.astype("float16")), {}),
    "wrong rank": (ours, (Q, Q[0], Q), {}),
    "2, 4, 8, 8": (ours, (Q, Q, Q, jnp.ones((3, 1, 1, 8))), {}),
    "not boolean": (ours, (Q, Q, Q, None, jnp.ones((8, 8))), {}),
    "did you mean mask[:, None]?": (ours, (Q, Q, Q, None, jnp.ones((2, 8, 8), bool)), {}),
    "1, -1": (ours, (Q,) * 3, {"local_window_size": (1, -1)}),
    "float32": (ours, (Q,) * 3, {"query_seq_lengths": jnp.ones(2)}),
    "scale has a dtype": (ours, (Q,) * 3, {"scale": 1j}),
    "scale does not broadcast": (ours, (Q,) * 3, {"scale": jnp.ones(3)}),
    "got: nan": (ours, (Q,) * 3, {"scale": float("nan")}),
    "below 1": (ours, (Q,) * 3, {"dropout_rate": 1.0, "dropout_rng": KEY}),
    "without dropout_rng": (ours, (Q,) * 3, {"dropout_rate": 0.1}),
    "not a key": (ours, (Q,) * 3, {"dropout_rate": 0.1, "dropout_rng": jax.random.split(KEY, 3)}),
    "sink": (ours, (Q,) * 3, {"sink": jnp.ones(3)}),
    "is_causal": (ours, (Q,) * 3, {"alibi": True}),
    "2, 4, 1, 1": (ours, (Q,) * 3, {"block_mask": jnp.ones((1, 1, 8, 8), bool)}),
    "is_causal is not a Python bool": (ours, (Q,) * 3, {"is_causal": "no"}),
    "static_argnames": (jax.jit(lambda x: ours(Q, Q, Q, is_causal=x)), (True,), {}),
    "num_heads=5": (jc.ops.dot_product_attention_qkv, (Q, 5), {}),
    "B + 1": (packed, (PACKED,) * 3, {"query_offsets": jnp.array([0.0, 20.0])}),
    "dropout_rate without dropout_rng": (packed, (PACKED,) * 3, {"dropout_rate": 0.1}),
    "keys and values have different numbers of slots": (
        paged,
        (ONE, PAGES, jnp.concatenate([PAGES, PAGES], 1)),
        {},
    ),
    "query_offsets and query_seq_lengths": (
        paged,
        (ONE[0], PAGES, PAGES),
        {"query_offsets": TWO, "query_seq_lengths": TWO},
    ),
    "one logit per query head": (packed, (PACKED,) * 3, {"sink": jnp.ones(3)}),
    "1, 4, 32, 32": (packed, (*(PACKED,) * 3, jnp.ones((20, 20))), {"max_query_length": 32}),
    "too many elements": (lambda x: jax.eval_shape(lambda x: packed(x, x, x), x), (huge,), {}),
    "2, n": (paged, of_pages, {"page_table": TABLE * 1.0}),
    "int32": (paged, of_pages, {"key_value_seq_lengths": jnp.ones(3, "int32")}),
    "2, 1, 4, 8": (write, (PAGES, ONE, TABLE, TWO), {}),
    "query has a dtype": (fp8, [Q.astype("float8_e4m3fn")] * 3, {}),
    "DelayedScaling": (fp8, (Q, Q, Q, "current"), {}),
    "2, 8, 128, 4": (lambda: restored(*quantized(Q), -2), (), {}),
}


@pytest.mark.parametrize("words", FUNCTIONS)
def test_functions(words):
    function, arguments, named = FUNCTIONS[words]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        function(*arguments, **named)
    assert words in str(caught.value), str(caught.value)


def of_one_dtype(g, q, one, k=None):
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    k = q if k is None else k
    return g.sdpa_fp8(q, k, k, **dict.fromkeys(names, one))


X, FP8 = S((2, 4, 8, 16), "bfloat16"), S((2, 4, 8, 16), "float8_e4m3fn")
FACTOR, LENGTHS = S((1,) * 4, "f4"), S((2, 1, 1, 1), "int32")
OTHERS = []
jc.graph(lambda g, n: OTHERS.append(n) or g.abs(n)).trace(S((2, 1, 1, 1), "float32"))
NODES = {  # words, and what is traced with which operands
    "diagonal_band_left_bound": (lambda g, q: g.sdpa(q, q, q, diagonal_band_left_bound=0), X),
    "one of the lengths": (lambda g, q, n: g.sdpa(q, q, q, seq_len_q=n), X, LENGTHS),
    "numbers of heads": (lambda g, q, k: g.sdpa(q, k, k), X, S((2, 3, 8, 16), "bfloat16")),
    "'stats' has the wrong shape": (
        lambda g, q, n: g.sdpa_backward(q, q, q, q, q, n), X, S((2, 4, 8, 2), "f4"),
    ),
    "dropout is not complete": (
        lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w), X, S((1, 1, 1, 2), "uint32"),
    ),
    "belongs to another graph": (
        lambda g, q: g.sdpa(
            q, q, q, score_mod=lambda s, *x: s + x[-1], score_mod_operands=OTHERS
        ),
        X,
    ),
    "'q' has the wrong dtype": (of_one_dtype, X, FACTOR),
    "1, 1, 1, 1": (of_one_dtype, FP8, S((2, 1, 1, 1), "f4")),
    "2, 4, 128, 4": (
        lambda g, q, n: g.sdpa_mxfp8(q, q, q, n, n, n), FP8, S(X.shape, "float8_e8m0fnu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", NODES)
def test_nodes(words):
    function, *operands = NODES[words]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        jc.graph(function).trace(*operands)
    assert words in str(caught.value), str(caught.value)
