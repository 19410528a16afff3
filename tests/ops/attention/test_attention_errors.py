"""What functions and nodes of attention refuse: the kind of error, and a telling word or two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc

S = jax.ShapeDtypeStruct
KEY = jax.random.key(7)
E4M3, E5M2, SCALES = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
Q = jnp.ones((2, 8, 4, 16), "bfloat16")
QKV = jnp.ones((2, 8, 12, 16))
PACKED = jnp.ones((20, 4, 8), "bfloat16")
ONE, PAGES = jnp.ones((2, 1, 4, 8), "bfloat16"), jnp.ones((9, 4, 2, 8), "bfloat16")
TABLE, TWO = jnp.zeros((2, 3), "int32"), jnp.ones(2, "int32")
ours, of_one = jc.ops.dot_product_attention, jc.ops.dot_product_attention_qkv
fp8, state = jc.ops.dot_product_attention_fp8, jc.ops.DelayedScaling.create
packed = functools.partial(
    jc.ops.packed_dot_product_attention,
    query_offsets=jnp.array([0, 8, 20], "int32"),
    max_query_length=12,
)
paged = functools.partial(
    jc.ops.paged_dot_product_attention, page_table=TABLE, key_value_seq_lengths=TWO
)
write, quantized, restored = jc.ops.write_pages, jc.ops.quantize_mxfp8, jc.ops.dequantize_mxfp8


def ints(*values):
    return jnp.array(values, "int32")


FUNCTIONS = {  # a function, its arguments, keywords, words
    "heads": (ours, (Q, Q[:, :, :3], Q[:, :, :3]), {}, ["N a multiple"]),
    "dtypes": (ours, (Q, Q, Q.astype("float16")), {}, ["different dtypes", "float16"]),
    "rank": (ours, (Q, Q[0], Q), {}, ["wrong rank", "(B, T, N, H)"]),
    "bias": (ours, (Q, Q, Q, jnp.ones((3, 1, 1, 8))), {}, ["bias", "[2, 4, 8, 8]"]),
    "mask": (ours, (Q, Q, Q, None, jnp.ones((8, 8))), {}, ["not boolean", "as bias"]),
    "no elements": (ours, (Q[..., :0], Q[..., :0], Q), {}, ["no elements"]),
    "window": (ours, (Q, Q, Q), {"local_window_size": (1, -1)}, ["(1, -1)"]),
    "lengths": (ours, (Q, Q, Q), {"query_seq_lengths": jnp.ones(2)}, ["int32[2]", "float32[2]"]),
    "implementation": (ours, (Q, Q, Q), {"implementation": "flash"}, ["flash", "split"]),
    "rate": (ours, (Q, Q, Q), {"dropout_rate": 1.0, "dropout_rng": KEY}, ["below 1"]),
    "no key": (ours, (Q, Q, Q), {"dropout_rate": 0.1}, ["without dropout_rng"]),
    "keys": (
        ours,
        (Q, Q, Q),
        {"dropout_rate": 0.1, "dropout_rng": jax.random.split(KEY, 3)},
        ["no key", "uint32[2]"],
    ),
    "sink": (ours, (Q, Q, Q), {"sink": jnp.ones(3)}, ["sink", "float32[4]", "float32[3]"]),
    "alibi": (ours, (Q, Q, Q), {"alibi": True}, ["is_causal", "as bias"]),
    "tiles": (ours, (Q, Q, Q), {"block_mask": jnp.ones((1, 1, 8, 8), bool)}, ["bool[2, 4, 1, 1]"]),
    "qkv's heads": (of_one, (QKV, 5), {}, ["do not fit", "num_heads=5"]),
    "qkv's rank": (of_one, (QKV[..., 0], 4), {}, ["(B, T, 3, N, H)"]),
    "qkv's scale": (of_one, (QKV, 4), {"scale": jnp.float32(0.3)}, ["Python number"]),
    "packed rank": (packed, (PACKED[None], PACKED, PACKED), {}, ["(T, N, H)"]),
    "offsets": (
        packed,
        (PACKED,) * 3,
        {"query_offsets": jnp.array([0.0, 20.0])},
        ["int32[B + 1]", "cumulative_sum"],
    ),
    "length": (packed, (PACKED,) * 3, {"max_query_length": 0}, ["at least 1"]),
    "too many elements": (
        lambda x: jax.eval_shape(lambda x: packed(x, x, x), x),
        (S((2**16, 256, 128), "bfloat16"),),
        {},
        ["too many elements"],
    ),
    "paged rank": (paged, (ONE[0], PAGES, PAGES), {}, ["(P, U, K, H)"]),
    "table": (paged, (ONE, PAGES, PAGES), {"page_table": TABLE * 1.0}, ["int32[2, n]"]),
    "paged lengths": (
        paged, (ONE, PAGES, PAGES), {"key_value_seq_lengths": ints(1, 1, 1)}, ["int32[3]"],
    ),
    "no pages": (paged, (ONE, PAGES[:0], PAGES[:0]), {}, ["at least one page"]),
    "what is written": (write, (PAGES, ONE, TABLE, TWO), {}, ["[2, 8]", "[2, 1, 4, 8]"]),
    "fp8's dtype": (fp8, [Q.astype(E4M3)] * 3, {}, ["query has a dtype", "astype"]),
    "scaling": (fp8, (Q, Q, Q, "current"), {}, ["DelayedScaling"]),
    "history": (state, (0,), {}, ["amax_history_length", "at least 1"]),
    "gradients' dtype": (state, (), {"grad_dtype": "bfloat16"}, [E5M2, "bfloat16"]),
    "rank of blocks": (quantized, (Q[0],), {}, ["[8, 4, 16]"]),
    "axis of scales": (
        lambda: restored(*quantized(Q), -2), (), {}, ["[2, 8, 4, 128]", "[2, 8, 128, 4]"],
    ),
}  # fmt: skip
for _name in ("is_causal", "bottom_right", "alibi", "return_residual"):
    _traced = functools.partial(lambda name, x: ours(Q, Q, Q, **{name: x}), _name)
    FUNCTIONS[f"traced {_name}"] = jax.jit(_traced), (True,), {}, [_name, "static_argnames"]


@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions(what):
    function, arguments, named, words = FUNCTIONS[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        function(*arguments, **named)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def of_one_dtype(g, q, one, k=None, **more):
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    k = q if k is None else k
    return g.sdpa_fp8(q, k, k, **{**dict.fromkeys(names, one), **more})


X, FP8, FACTOR = S((2, 4, 8, 16), "bfloat16"), S((2, 4, 8, 16), E4M3), S((1,) * 4, "f4")
WORDS, LENGTHS = S((1, 1, 1, 2), "uint32"), S((2, 1, 1, 1), "int32")
drop = functools.partial(dict, dropout_probability=0.5)
sdpa = lambda **more: lambda g, q: g.sdpa(q, q, q, **more)  # noqa: E731
OTHERS = []
jc.graph(lambda g, n: OTHERS.append(n) or g.abs(n)).trace(S((2, 1, 1, 1), "float32"))
NODES = {  # words, and what is traced with which operands
    "unknown diagonal_alignment": (sdpa(diagonal_alignment="LEFT"), X),
    "diagonal_band_left_bound": (sdpa(diagonal_band_left_bound=0), X),
    "diagonal_band_right_bound": (sdpa(diagonal_band_right_bound=-1), X),
    "attributes are static": (sdpa(attn_scale="1"), X),
    "compute_data_type": (sdpa(compute_data_type="float16"), X),
    "without causal attention": (sdpa(use_alibi_mask=True), X),
    "rng_dump without dropout": (sdpa(rng_dump=True), X),
    "one of the lengths": (lambda g, q, n: g.sdpa(q, q, q, seq_len_q=n), X, LENGTHS),
    "'bias' does not fit": (lambda g, q, b: g.sdpa(q, q, q, bias=b), X, S((2, 4, 8), "bfloat16")),
    "numbers of heads": (lambda g, q, k: g.sdpa(q, k, k), X, S((2, 3, 8, 16), "bfloat16")),
    "dSink_token without sink_token": (
        lambda g, q, n: g.sdpa_backward(*[q] * 5, n, dSink_token=True), X, S((2, 4, 8, 1), "f4"),
    ),
    "'stats' has the wrong shape": (
        lambda g, q, n: g.sdpa_backward(q, q, q, q, q, n), X, S((2, 4, 8, 2), "f4"),
    ),
    "dropout is not complete": (lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w), X, WORDS),
    "'seed' has the wrong": (
        lambda g, q, w: g.sdpa(q, q, q, seed=w, offset=w, **drop()), X, S((1,) * 4, "int32"),
    ),
    "float32[1, 4, 1, 1]": (lambda g, q, w: g.sdpa(q, q, q, sink_token=w), X, S((4,), "f4")),
    "uint8[2, 4, 1, 1]": (
        lambda g, q, w: g.sdpa(q, q, q, block_mask=w), X, S((2, 4, 1, 1), "int8"),
    ),
    "without a score_mod": (lambda g, q: g.sdpa(q, q, q, score_mod_operands=[q]), X),
    "does not fit the scores": (
        lambda g, q: g.sdpa(q, q, q, score_mod=lambda s, *x: s, score_mod_operands=[q]), X,
    ),
    "belongs to another graph": (
        lambda g, q, n: g.sdpa(
            q, q, q, score_mod=lambda s, *x: s + x[-1], score_mod_operands=[OTHERS[0]]
        ),
        X, LENGTHS,
    ),
    "'q' has the wrong dtype": (of_one_dtype, X, FACTOR),
    "expected: [1, 1, 1, 1]": (of_one_dtype, FP8, S((2, 1, 1, 1), "f4")),
    "q has 4 heads, k 3": (of_one_dtype, FP8, FACTOR, S((2, 3, 8, 16), E4M3)),
    "[2, 4, 128, 4]": (lambda g, q, n: g.sdpa_mxfp8(q, q, q, n, n, n), FP8, S(X.shape, SCALES)),
}  # fmt: skip


@pytest.mark.parametrize("word", NODES)
def test_nodes(word):
    function, *operands = NODES[word]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        jc.graph(function).trace(*operands)
    assert word in str(caught.value), str(caught.value)


def test_numbers_of_numpy_are_taken():
    assert jax.eval_shape(lambda q: fp8(q, q, q, scale=np.float32(1)), Q).shape == Q.shape
    assert state(np.int64(4)).amax_history.shape == (4, 9)
