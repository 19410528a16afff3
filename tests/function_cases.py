"""Calls of every function, with letters for the sizes that may change."""

import re
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from fuzz import attentions, functions
from jax import lax

import jax_cudnn as jc
from jax_cudnn import ops

NHWC = ("NHWC", "HWIO", "NHWC")
PART = r"([\w +]+?)(?: (int32|int8|bool|bfloat16)(?:<(.+))?)?"
SIZES = {"b": 2, "t": 3, "s": 5, "h": 5, "k": 8, "m": 3, "n": 4, "c": 2, "p": 6}


class Case(NamedTuple):
    operands: str
    """Names and sizes, which are letters; a dtype may follow, otherwise float32. After int32,
    ``<n`` says below what its values are."""
    ours: Any
    theirs: Any = None
    """The same of the same names; by default ours with these sizes."""
    options: Any = types.MappingProxyType({})
    never: str = ""
    """Letters of sizes that are not 0."""


def alone(x, w, **options):
    """Of an image without a batch."""
    return functions._conv(x[None], w, **options)[0]


def tiled(query, key, value):
    tiles = (-(-x.shape[1] // 128) for x in (query, key))
    tiles = jnp.ones((1, 1, *tiles), bool)
    return ops.dot_product_attention(query, key, value, block_mask=tiles)


def cross_entropy(hidden, weight, labels, bias=0, reduction="mean"):
    logits = hidden @ weight + bias
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses if reduction == "none" else losses.sum() / max(losses.size, 1)


def rotary(x, positions, rotary_dim, **options):
    """As products of complex numbers."""
    i = jnp.arange(rotary_dim // 2)
    turns = jnp.exp(1j * positions[..., None, None] * 10000.0 ** (-2 * i / rotary_dim))
    turned = (x[..., 2 * i] + 1j * x[..., 2 * i + 1]) * turns
    return x.at[..., 2 * i].set(turned.real).at[..., 2 * i + 1].set(turned.imag)


def quantized(x, kernel, scale, bias=0):
    groups = scale.reshape(scale.shape[-2] if scale.ndim == 2 else 1, scale.shape[-1])
    return x @ (kernel * jnp.repeat(groups, kernel.shape[0] // groups.shape[0], 0)) + bias


def grouped(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, jnp.clip(group_sizes, 0))


def gated(lhs, rhs, group_sizes, bias, gate, activation):
    ends = jnp.cumsum(jnp.clip(group_sizes, 0))
    group = (jnp.arange(lhs.shape[0])[:, None] >= ends).sum(1)
    up = grouped(lhs, rhs, group_sizes) + bias[jnp.clip(group, 0, 3)]
    return jnp.where(group[:, None] < 4, getattr(jax.nn, activation)(gate) * up, 0)


def packed(**operands):
    how = {"max_query_length": 4, "max_key_value_length": 6, "value": operands["key"]}
    return ops.packed_dot_product_attention(**how, **operands)


attend, plain, window = ops.dot_product_attention, attentions.attention, {"strides": (2, 2)}
rows, conv = functions._of_rows(centred=True), functions._conv
CAUSAL = {"is_causal": True}
TRAINING = {"running_mean": jnp.zeros(8), "running_var": jnp.ones(8), "training": True}
TRAINING |= {"momentum": 0.0, "epsilon": 1e-5}
NORM = TRAINING | {"axis": -1}
SPATIAL = {"strides": (1, 1), "padding": "SAME", "dilation": (1, 1), "dimension_numbers": NHWC}
TRANSPOSED = SPATIAL | {"transpose_kernel": False}
GENERAL = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
PRODUCT = {"dimension_numbers": (((2, 3), (2, 0)), ((0,), (1,)))}
QKV = "query b t 4 8, key b s 2 8, value b s 2 8"
SELF = "query b t 4 8, key b t 2 8, value b t 2 8"
IMAGE, IMAGES = "x b h 6 8, w 3 3 8 16", "x b h h 8, scale 8, bias 8"
NO_BATCH = "x h 6 8, w 3 3 8 16"
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
TRIANGLE = {"score_mod": lambda x, b, h, i, j: jnp.where(i >= j, x, -1e9)}
STANDARD = {"axis": -1, "epsilon": 1e-5}
CASES = {
    "matmul": Case("a b t k, b k n, bias n, residual b t n", ops.matmul, functions._matmul,
        {"activation": "gelu"}),
    "matmul, vector": Case("a k, b b k n", ops.matmul, functions._matmul),
    "matmul, batch": Case("a b 1 m k, b 4 k n", ops.matmul, functions._matmul),
    "matmul, turned": Case("a b k m, b n k", ops.matmul, functions._matmul,
        {"transpose_a": True, "transpose_b": True}),
    "dot_general": Case("lhs b m k 4, rhs 4 b k n", ops.dot_general, lax.dot_general, PRODUCT),
    "cross-entropy": Case("hidden b t k, weight k n, labels b t int32<n, bias n",
        ops.linear_cross_entropy, cross_entropy, never="n"),
    "cross-entropy, each token": Case("hidden t k, weight k n, labels t int32<n",
        ops.linear_cross_entropy, cross_entropy, {"reduction": "none"}, "n"),
    "ragged_dot": Case("lhs t k, rhs 4 k n, group_sizes 4 int32<2",
        ops.ragged_dot, grouped),
    "float8_matmul": Case("x b t k, w k n", ops.float8_matmul),
    "quantized": Case("x b t k, kernel k n int8, scale n, bias n", ops.quantized_matmul, quantized),
    "quantized, groups": Case("x t 8, kernel 8 n int8, scale 2 n", ops.quantized_matmul, quantized),
    "quantize_weights": Case("kernel k n", ops.quantize_weights),
    "ragged_dot, gated": Case("lhs t k, rhs 4 k n, group_sizes 4 int32<2, bias 4 n, gate t n",
        ops.ragged_dot, gated, {"activation": "silu"}),
    "conv": Case("x b h h k, w 3 3 k n, bias n, residual b h h n", ops.conv, conv,
        SPATIAL | {"activation": "relu"}),
    "conv, strides": Case(IMAGE, ops.conv, conv, SPATIAL | window),
    "conv, no batch": Case(NO_BATCH, ops.conv, alone, SPATIAL),
    "conv, patches": Case("x b h 9 3, w 4 4 3 16", ops.conv, conv,
        SPATIAL | {"strides": (4, 4), "padding": "VALID"}),
    "conv_general_dilated": Case("lhs b h 6 8, rhs 3 3 8 16", ops.conv_general_dilated,
        lax.conv_general_dilated, GENERAL),
    "conv_transpose": Case("x b h 6 k, w 3 3 k n, bias n", ops.conv_transpose,
        functions._conv_transpose, TRANSPOSED | window | {"padding": "VALID"}),
    "conv_transpose, strides of 1": Case(IMAGE, ops.conv_transpose, functions._conv_transpose,
        TRANSPOSED),
    "batch_norm": Case("x b t 8, scale 8, bias 8", ops.batch_norm, functions._batch_norm, NORM),
    "batch_norm, relu": Case(IMAGES, ops.batch_norm, functions._batch_norm,
        NORM | {"activation": "relu"}),
    "batch_norm, inference": Case("x b h 8, scale 8, bias 8", ops.batch_norm,
        functions._batch_norm, NORM | {"training": False}),
    "conv_batch_norm": Case("x b h 6 8, w 3 3 8 8, scale 8, bias 8", ops.conv_batch_norm,
        functions._conv_batch_norm, TRAINING | SPATIAL | {"groups": 1}),
    "layer_norm": Case("x b t k, scale k, bias k", ops.layer_norm, rows, {"epsilon": 1e-5}),
    "rms_norm": Case("x b t 8, scale 8", ops.rms_norm),
    "ada_layer_norm": Case("x b 8, scale b 8, bias b 8", ops.ada_layer_norm, functions._ada,
        {"epsilon": 1e-5}),
    "group_norm": Case("x b t 8, scale 8, bias 8", ops.group_norm, functions._grouped,
        STANDARD | {"num_groups": 2}),
    "group_norm, no scale": Case("x b t 8", ops.group_norm, functions._grouped,
        STANDARD | {"num_groups": 2}),
    "instance_norm": Case(IMAGES, ops.instance_norm, functions._grouped, STANDARD),
    "attention": Case(QKV, attend, plain),
    "attention, bias": Case(f"{QKV}, bias 1 4 t s", attend, plain),
    "attention, mask": Case(f"{QKV}, mask b 1 t s bool", attend, plain),
    "attention, window": Case(SELF, attend, plain, {**CAUSAL, "local_window_size": (1, 0)}),
    "attention, lengths": Case(f"{QKV}, key_value_seq_lengths b int32<s+1", attend, plain),
    "attention, heads first": Case("query b 4 t 8, key b 2 s 8, value b 2 s 8", attend, plain,
        {"heads_first": True}),
    "attention, ALiBi and sink": Case(f"{SELF}, sink 4", attend, plain, {**CAUSAL, "alibi": True}),
    "attention, dropout": Case(QKV, attend, None, DROPOUT),
    "attention, tiles": Case(QKV, tiled, plain),
    "attention, score_mod": Case(SELF, attend, plain, TRIANGLE),
    "attention_fn": Case("query b t 4 8, key b s 4 8, value b s 4 8", ops.attention_fn,
        nnx.dot_product_attention),
    "fp8": Case("query b t 4 16, key b t 2 16, value b t 2 16", ops.dot_product_attention_fp8),
    "qkv": Case("qkv b t 8 8, bias b 1 t t", ops.dot_product_attention_qkv, attentions._joint,
        {"num_heads": 4}),
    "packed": Case("query t 4 8, key s 2 8, bias 4 4 6, query_offsets c+1 int32<t+1, "
        "key_value_offsets c+1 int32<s+1", packed),
    "paged": Case("query b t 4 8, key_pages p 4 2 8, value_pages p 4 2 8, page_table b 2 int32<p, "
        "key_value_seq_lengths b int32<9", ops.paged_dot_product_attention, never="p"),
    "write_pages": Case("0 p 4 2 8, 1 b t 2 8, 2 b 2 int32, 3 b int32",
        lambda **x: ops.write_pages(*x.values())),
    "rotary": Case("x b t n 8, positions b t int32<50", ops.rotary_embedding, rotary,
        {"rotary_dim": 6, "interleaved": True}),
    "rotary, no positions": Case("x t n 8", ops.rotary_embedding),
    "pooling": Case("x b c 6 6",
        lambda x: jc.graph(lambda g, x: g.resample(x, resample_mode="MAXPOOL", window=[3, 2]))(x),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 2), (1,) * 4, "VALID")),
    "mxfp8": Case("x b 2 t 32", lambda x: ops.dequantize_mxfp8(*ops.quantize_mxfp8(x))),
}  # fmt: skip

WIDE = "query b 64 4 64 bfloat16, key b 64 2 64 bfloat16, value b 64 2 64 bfloat16"
PACKED_WIDE = "query 256 4 64 bfloat16, key 256 2 64 bfloat16, query_offsets 5 int32<257, "
PACKED_WIDE += "key_value_offsets 5 int32<257"
PAGED_WIDE = "query b t 4 64 bfloat16, key_pages p 64 2 64 bfloat16, value_pages p 64 2 64 bfloat16"
IN_16_BITS = {
    "attention, bfloat16": Case(WIDE, attend, None, CAUSAL),
    "attention, dropout, bfloat16": Case(WIDE, attend, None, DROPOUT),
    "attention, lengths, bfloat16": Case(f"{WIDE}, key_value_seq_lengths b int32<65", attend),
    "qkv, bfloat16": Case("qkv b 64 3 4 64 bfloat16", ops.dot_product_attention_qkv),
    "packed, bfloat16": Case(PACKED_WIDE,
        lambda **x: ops.packed_dot_product_attention(
            **x, value=x["key"], max_query_length=64, max_key_value_length=64, is_causal=True)),
    "paged, bfloat16": Case(f"{PAGED_WIDE}, page_table b 2 int32<p, "
        "key_value_seq_lengths b int32<129", ops.paged_dot_product_attention),
    "matmul, bfloat16": Case("a b 64 128 bfloat16, b 128 128 bfloat16, bias 128 bfloat16",
        ops.matmul, None, {"activation": "gelu"}),
    "conv, groups, bfloat16": Case("x b 16 16 64 bfloat16, w 3 3 32 64 bfloat16", ops.conv, None,
        SPATIAL | {"groups": 2}),
    "rms_norm, bfloat16": Case("x b 2048 512 bfloat16, scale 512 bfloat16", ops.rms_norm),
    "layer_norm, bfloat16": Case("x b 2048 512 bfloat16, scale 512 bfloat16, bias 512 bfloat16",
        ops.layer_norm),
    "batch_norm, bfloat16": Case("x b 16 16 64 bfloat16, scale 64, bias 64",
        lambda **x: ops.batch_norm(*x.values(), running_mean=jnp.zeros(64),
            running_var=jnp.ones(64), training=True, activation="relu")),
}  # fmt: skip
"""Of sizes of which cuDNN runs many, also of a part of them."""
STATIC = {
    "pad_to_bucket": Case("x b t 8, lengths b int32<t", ops.pad_to_bucket, options={"least": 8}),
}
"""Of no symbolic sizes."""


def given(case, which):
    """Ours or theirs as a function of arrays."""
    names = [part.split()[0] for part in case.operands.split(",")]
    function = case.theirs if which and case.theirs else case.ours
    return lambda *x: function(**dict(zip(names, x, strict=True)), **case.options)


def parts(case, sizes):
    """Shape and dtype of each operand."""
    for part in case.operands.split(","):
        words, dtype, _ = re.fullmatch(PART, part).groups()
        yield tuple(eval(word, {}, sizes) for word in words.split()[1:]), dtype or "float32"


def letters(case):
    sizes = " ".join(part.split(maxsplit=1)[1] for part in case.operands.split(","))
    return {*re.findall(r"\b[a-z]\b", sizes)}


def operands(case, sizes=SIZES):
    random = np.random.default_rng(0)
    for part, (shape, dtype) in zip(case.operands.split(","), parts(case, sizes), strict=True):
        below = re.fullmatch(PART, part)[3]
        if "float" in dtype:
            x = random.standard_normal(shape)
        elif not below:
            x = np.sort(random.integers(dtype == "int32", 3, shape))
        elif "offsets" in part:  # from the first token to the last
            x = np.linspace(0, eval(below, {}, sizes) - 1, *shape)
        else:  # no key at all is another matter
            least = "lengths" in part and eval(below, {}, sizes) > 1
            x = random.integers(least, eval(below, {}, sizes), shape)
        yield jnp.asarray(x, dtype)


def differentiated(case, which=0):
    """The results, and gradients by all floats, of ours or theirs."""
    f = given(case, which)
    floats = tuple(i for i, (_, dtype) in enumerate(parts(case, SIZES)) if dtype == "float32")

    def total(*arrays):
        results = f(*arrays)
        return sum(jnp.sin(x.astype("float32")).sum() for x in jax.tree.leaves(results)), results

    return jax.jit(jax.grad(total, floats, has_aux=True))
