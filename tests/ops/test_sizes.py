"""Every function with symbolic sizes, for ``jax.export``, and with sizes of 0."""

import functools
import re
from typing import Any, NamedTuple

import flax_cases
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax, nn

import jax_cudnn as jc
from jax_cudnn import ops

NHWC = ("NHWC", "HWIO", "NHWC")
ALLOW = [jax.export.DisabledSafetyCheck.custom_call("jax_cudnn")]
SIZES = {"b": 2, "t": 3, "s": 5, "h": 5, "k": 8, "m": 3, "n": 4, "c": 2, "p": 6}
OF_XLA = ("batch_norm, inference", "pooling", "write_pages", "mxfp8")
EIGHT, KEY = jnp.ones(8), jax.random.key(0)


class Case(NamedTuple):
    shapes: str
    """Of the operands: letters are sizes; int32 or bool may follow, otherwise float32."""
    ours: Any
    theirs: Any = None
    """The oracle; by default ours with these sizes."""
    never: str = ""
    """Letters of sizes that are not 0."""


def conv(x, w, c=None, residual=None, strides=1, padding="SAME", f=lambda y: y):
    y = lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=NHWC)
    return f(y + (0 if c is None else c) + (0 if residual is None else residual))


def ours(**how):
    def call(x, w, c=None, residual=None):
        return ops.conv(x, w, bias=c, residual=residual, dimension_numbers=NHWC, **how)

    return call


def turned(f, **how):
    return lambda x, w, c=0.0: f(x, w, (2, 2), "VALID", **how) + c


def normal(*axes):
    def norm(x, scale=1, bias=0):
        x = x - x.mean(axes, keepdims=True)
        return x / jnp.sqrt(jnp.square(x).mean(axes, keepdims=True) + 1e-5) * scale + bias

    return norm


def grouped(x, *terms):
    halves = x.reshape(x.shape[0], x.shape[1], 2, 4)
    y = normal(1, 3)(halves).reshape(x.shape)
    return y * terms[0] + terms[1] if terms else y


def trained(f=lambda y: y):
    def norm(x, scale, bias):
        axes = tuple(range(x.ndim - 1))
        return f(normal(*axes)(x, scale, bias)), (x.mean(axes), x.var(axes))

    return norm


def training(*given, f=ops.batch_norm, **how):
    running = jnp.zeros(8), jnp.ones(8)
    return f(*given, *running, training=True, momentum=0.0, **how)


attend = functools.partial(functools.partial, ops.dot_product_attention)
plain = functools.partial(functools.partial, nn.dot_product_attention)


def masked(f):
    return lambda q, k, v, mask: f(q, k, v, mask=mask)


def tiled(q, k, v):
    tiles = (-(-x.shape[1] // 128) for x in (q, k))
    return ops.dot_product_attention(q, k, v, block_mask=jnp.ones((1, 1, *tiles), bool))


def first(f):
    return lambda *x: jnp.swapaxes(f(*(jnp.swapaxes(y, 1, 2) for y in x)), 1, 2)


def packed(q, k, bias, ends, of_keys):
    how = {"query_offsets": ends, "max_query_length": 4, "key_value_offsets": of_keys}
    return ops.packed_dot_product_attention(q, k, k, bias, max_key_value_length=6, **how)


def paged(q, k, v, table, lengths):
    return ops.paged_dot_product_attention(q, k, v, table, key_value_seq_lengths=lengths)


def parted(x, *bias):
    return nn.dot_product_attention(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], *bias)


PRODUCT = (((2, 3), (2, 0)), ((0,), (1,)))
QKV, SELF = "b t 4 8, b s 2 8, b s 2 8", "b t 4 8, b t 2 8, b t 2 8"
CAUSAL = {"is_causal": True}
IMAGE, NORM = "b h 6 8, 3 3 8 16", "b h h 8, 8, 8"
CASES = {
    "matmul": Case(
        "b t k, k n, n, b t n",
        lambda a, w, c, r: ops.matmul(a, w, bias=c, residual=r, activation="gelu"),
        lambda a, w, c, r: nn.gelu(a @ w + c + r),
    ),
    "matmul, vector": Case("k, b k n", ops.matmul, jnp.matmul),
    "matmul, batch": Case("b 1 m k, 3 k n", ops.matmul, jnp.matmul),
    "matmul, turned": Case(
        "b k m, n k",
        lambda a, w: ops.matmul(a, w, transpose_a=True, transpose_b=True),
        lambda a, w: jnp.swapaxes(a, -1, -2) @ w.T,
    ),
    "dot_general": Case(
        "b m k 4, 4 b k n",
        lambda a, w: ops.dot_general(a, w, PRODUCT),
        lambda a, w: lax.dot_general(a, w, PRODUCT),
    ),
    "conv": Case(
        "b h h k, 3 3 k n, n, b h h n",
        ours(activation="relu"),
        lambda *x: conv(*x, f=nn.relu),
    ),
    "conv, strides": Case(IMAGE, ours(strides=2), lambda x, w: conv(x, w, strides=2)),
    "conv, no batch": Case("h 6 8, 3 3 8 16", ours(), lambda x, w: conv(x[None], w)[0]),
    "conv, patches": Case(
        "b h 9 3, 4 4 3 16",
        ours(strides=4, padding="VALID"),
        lambda x, w: conv(x, w, strides=4, padding="VALID"),
    ),
    "conv_general_dilated": Case(
        IMAGE,
        lambda x, w: ops.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC),
        conv,
    ),
    "conv_transpose": Case(
        "b h 6 k, 3 3 k n, n",
        lambda x, w, c: ops.conv_transpose(x, w, bias=c, strides=2, padding="VALID"),
        turned(lax.conv_transpose),
    ),
    "conv_transpose, strides of 1": Case(
        IMAGE, ops.conv_transpose, lambda x, w: lax.conv_transpose(x, w, (1, 1), "SAME")
    ),
    "batch_norm": Case("b t 8, 8, 8", training, trained()),
    "batch_norm, relu": Case(NORM, lambda *x: training(*x, activation="relu"), trained(nn.relu)),
    "batch_norm, inference": Case(
        "b h 8, 8, 8",
        lambda x, w, c: ops.batch_norm(x, w, c, EIGHT, EIGHT, training=False)[0],
        lambda x, w, c: (x - 1) * (1 + 1e-5) ** -0.5 * w + c,
    ),
    "conv_batch_norm": Case(
        "b h 6 8, 3 3 8 8, 8, 8",
        lambda *x: training(*x, f=ops.conv_batch_norm, dimension_numbers=NHWC),
        lambda x, k, *terms: trained()(conv(x, k), *terms),
    ),
    "layer_norm": Case("b t k, k, k", ops.layer_norm, normal(-1)),
    "rms_norm": Case("b t 8, 8", ops.rms_norm),
    "ada_layer_norm": Case("b 8, b 8, b 8", ops.ada_layer_norm, normal(-1)),
    "group_norm": Case("b t 8, 8, 8", lambda x, *w: ops.group_norm(x, 2, *w), grouped),
    "group_norm, no scale": Case("b t 8", lambda x: ops.group_norm(x, 2), grouped),
    "instance_norm": Case(NORM, ops.instance_norm, normal(1, 2)),
    "attention": Case(QKV, attend(), plain()),
    "attention, bias": Case(f"{QKV}, 4 t s", attend(), plain()),
    "attention, mask": Case(f"{QKV}, b 1 t s bool", masked(attend()), masked(plain())),
    "attention, window": Case(
        SELF, attend(**CAUSAL, local_window_size=1), plain(**CAUSAL, local_window_size=1)
    ),
    "attention, lengths": Case(
        f"{QKV}, b int32",
        lambda q, k, v, n: attend(key_value_seq_lengths=n)(q, k, v),
        lambda q, k, v, n: plain(key_value_seq_lengths=n)(q, k, v),
    ),
    "attention, heads first": Case(
        "b 4 t 8, b 2 s 8, b 2 s 8", attend(heads_first=True), first(plain())
    ),
    "attention, ALiBi and sink": Case(
        f"{SELF}, 4", lambda q, k, v, s: attend(**CAUSAL, alibi=True, sink=s)(q, k, v)
    ),
    "attention, dropout": Case(QKV, attend(dropout_rate=0.5, dropout_rng=KEY)),
    "attention, tiles": Case(QKV, tiled, plain()),
    "attention, score_mod": Case(
        SELF,
        attend(score_mod=lambda x, b, h, i, j: jnp.where(i >= j, x, -1e9)),
        plain(**CAUSAL),
    ),
    "attention_fn": Case("b t 4 8, b s 4 8, b s 4 8", ops.attention_fn, nnx.dot_product_attention),
    "fp8": Case("b t 4 16, b t 2 16, b t 2 16", ops.dot_product_attention_fp8),
    "qkv": Case("b t 8 8, b 1 t t", lambda x, c: ops.dot_product_attention_qkv(x, 4, c), parted),
    "packed": Case("t 4 8, s 2 8, 4 4 6, c+1 int32, c+1 int32", packed),
    "paged": Case("b t 4 8, p 4 2 8, p 4 2 8, b 2 int32, b int32", paged, never="p"),
    "write_pages": Case("p 4 2 8, b t 2 8, b 2 int32, b int32", ops.write_pages),
    "pooling": Case(
        "b c 5 6",
        jc.graph(lambda g, x: g.resample(x, resample_mode="MAXPOOL", window=[3, 2])),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 2), (1,) * 4, "VALID"),
    ),
    "mxfp8": Case("b 2 t 32", lambda x: ops.dequantize_mxfp8(*ops.quantize_mxfp8(x))),
}


def parts(case, sizes):
    """Shape and dtype of each operand."""
    for part in case.shapes.split(","):
        dtype = re.findall("int32|bool", part) or ["float32"]
        words = part.replace(dtype[0], "").split()
        yield tuple(eval(word, {}, sizes) for word in words), dtype[0]


def letters(case):
    return {*re.findall(r"\b[a-z]\b", case.shapes)}


def operands(case, sizes=SIZES):
    random = np.random.default_rng(0)
    for shape, dtype in parts(case, sizes):
        integers = np.sort(random.integers(dtype == "int32", 3, shape))
        x = random.standard_normal(shape) if dtype == "float32" else integers
        yield jnp.asarray(x, dtype)


def differentiated(f, case):
    """The results, and gradients by all floats."""
    floats = tuple(i for i, (_, dtype) in enumerate(parts(case, SIZES)) if dtype == "float32")

    def total(*given):
        results = f(*given)
        return sum(jnp.sin(x.astype("float32")).sum() for x in jax.tree.leaves(results)), results

    return jax.jit(jax.grad(total, floats, has_aux=True))


def symbolic(case):
    names = sorted(letters(case))
    scope = dict(zip(names, jax.export.symbolic_shape(", ".join(names)), strict=True))
    return [jax.ShapeDtypeStruct(*part) for part in parts(case, scope)]


@pytest.mark.parametrize("name", CASES)
def test_functions_and_gradients_are_exported_with_symbolic_sizes(name):
    """For the CPU; for CUDA they say what to do, or run in XLA."""
    case, given = CASES[name], [*operands(CASES[name])]
    function = differentiated(case.ours, case)
    exported = jax.export.export(function, platforms=("cpu",))(*symbolic(case))
    want = differentiated(case.theirs or case.ours, case)(*given)
    helpers.same(exported.call(*given), want, 1e-3)
    cuda = {"platforms": ("cuda",), "disabled_checks": ALLOW}
    with jc.implementation("xla"):
        jax.export.export(function, **cuda)(*symbolic(case))
    if name not in OF_XLA:
        with pytest.raises(jc.GraphError, match="cannot be planned for CUDA") as caught:
            jax.export.export(function, **cuda)(*symbolic(case))
        error = caught.value
        assert all((error.expected, error.got, error.why, error.fix))


EMPTY = [(n, s) for n, case in CASES.items() for s in sorted(letters(case) - {*case.never})]


@pytest.mark.parametrize(("name", "letter"), EMPTY)
def test_sizes_may_be_0(name, letter):
    case = CASES[name]
    given = [*operands(case, {**SIZES, letter: 0})]
    got = differentiated(case.ours, case)(*given)
    if case.theirs:
        helpers.same(got, differentiated(case.theirs, case)(*given), 1e-3)
    else:
        assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("name", flax_cases.CASES)
def test_layers_are_exported_with_symbolic_sizes(name):
    case = flax_cases.CASES[name]
    free = 1 if name == "linear_general" else len(case.shape) - 1
    sizes = jax.export.symbolic_shape(", ".join("abc"[:free]))
    graph, state = nnx.split(case.made(case.ours))

    def total(state, x):
        return jnp.sin(nnx.merge(graph, state)(x)).sum()

    function = jax.jit(lambda *given: jax.grad(total, (0, 1), allow_int=True)(*given)[1])
    x = flax_cases.inputs(*case.shape)
    aval = jax.ShapeDtypeStruct((*sizes, *case.shape[free:]), x.dtype)
    got = jax.export.export(function, platforms=("cpu",))(state, aval).call(state, x)
    helpers.same(got, function(state, x), 1e-3)
