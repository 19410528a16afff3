"""Matrix products of transformers' MLPs and of ConvNeXt's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.graph.trace import graph
from jax_cudnn.commands.timing import Formulation

from ..case import Array, Operand
from .case import Built, Made, matrix_case

F32, BF16, E4M3 = jnp.float32, jnp.bfloat16, "float8_e4m3fn"

_LAYERS = ((32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (8192, 4096, 4096))
"""Linear layers, rows x inputs x outputs: GPT-2's with 32 times 1024 tokens, and a wide one."""
_ACTIVATIONS = {
    "relu": ("relu", jax.nn.relu),
    "gelu": ("gelu_approx_tanh", partial(jax.nn.gelu, approximate=True)),
}


def _transposed(x: Array, w: Array, *rest: Array) -> tuple[Array, ...]:
    """The weight (K, N) as (N, K): a model can hold it so."""
    return x, w.T, *rest


def _rows(x: Array, w: Array, dtype: Any) -> Array:
    """``x @ w.T`` for a weight held as (N, K)."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def linear(m: int, k: int, n: int, activation: str | None) -> Built:
    """activation(x @ w + b) in bfloat16."""
    method, plain = _ACTIVATIONS[activation] if activation else ("identity", lambda y: y)

    @graph
    def matmul_bias_activation(g, x, w, b):
        y = g.bias(g.matmul(x, w), b)
        return getattr(g, method)(y) if activation else y

    def ours(x, w, b):
        return matmul_bias_activation(x[None], w[None], b[None, None])[0]

    def in_f32(x, w, b):
        return plain(jnp.dot(x, w, preferred_element_type=F32) + b).astype(x.dtype)

    def rows(x, w, b):
        return plain(_rows(x, w, BF16) + b)

    xla = {
        "epilogue in bf16": lambda x, w, b: plain(jnp.dot(x, w) + b),
        "epilogue in f32": in_f32,
        "weight as (N, K), epilogue in bf16": Formulation(rows, _transposed),
    }
    return ours, xla, (Operand((m, k)), Operand((k, n), scale=k**-0.5), Operand((n,)))


def fp8(m: int, k: int, n: int, activation: str | None) -> Built:
    """[gelu(] x @ w * scale [+ b)] of float8_e4m3fn arrays, to bfloat16.

    ``scale`` (1, 1) is an operand: the product of both arrays' scales. Hopper's tensor cores
    read 8-bit operands along K, so the graph's weight lies in memory as (N, K), too.
    """

    @graph
    def fp8_matmul(g, x, w, scale, *bias):
        y = g.mul(g.matmul(x, w.set_stride([k * n, 1, k])), scale)
        for b in bias:
            y = g.gelu_approx_tanh(g.bias(y, b))
        return y.set_data_type("bfloat16")

    def ours(x, w, scale, *bias):
        w = w.T[None]  # a bitcast for that memory order
        return fp8_matmul(x[None], w, scale[None], *(b[None, None] for b in bias))[0]

    def epilogue(y: Array, bias: tuple[Array, ...]) -> Array:
        for b in bias:
            y = jax.nn.gelu(y + b, approximate=True)
        return y.astype(BF16)

    def rows(x, w, scale, *bias):
        return epilogue(_rows(x, w, F32) * scale, bias)

    def columns(x, w, scale, *bias):
        return epilogue(jnp.dot(x, w, preferred_element_type=F32) * scale, bias)

    def dequantised(x, w, scale, *bias):
        # The pattern that XLA's rewriter for 8-bit products looks for.
        x, w = x.astype(BF16) * scale.astype(BF16), w.astype(BF16)
        return epilogue(_rows(x, w, BF16), bias)

    xla = {
        "weight as (N, K)": Formulation(rows, _transposed),
        "weight as (K, N)": columns,
        "dequantised operands, weight as (N, K)": Formulation(dequantised, _transposed),
    }
    operands = (Operand((m, k), E4M3), Operand((k, n), E4M3), Operand((1, 1), "float32", k**-0.5))
    bias = (Operand((n,)),) if activation else ()
    return Formulation(ours, _transposed), xla, (*operands, *bias)


def fp8_product(m: int, k: int, n: int) -> Built:
    """x @ w of float8_e4m3fn arrays and nothing else, to bfloat16; memory orders as in fp8."""

    @graph
    def fp8_product(g, x, w):
        return g.matmul(x, w.set_stride([k * n, 1, k])).set_data_type("bfloat16")

    xla = {
        "weight as (N, K)": Formulation(lambda x, w: _rows(x, w, BF16), _transposed),
        "weight as (K, N)": lambda x, w: jnp.dot(x, w, preferred_element_type=BF16),
    }
    ours = Formulation(lambda x, w: fp8_product(x[None], w.T[None])[0], _transposed)
    return ours, xla, (Operand((m, k), E4M3), Operand((k, n), E4M3))


def int8_weights(m: int, k: int, n: int) -> Built:
    """x @ w for bfloat16 x and int8 w, which is converted inside."""

    @graph
    def matmul_int8_weights(g, x, w):
        return g.matmul(x, g.identity(w).set_data_type("bfloat16")).set_data_type("bfloat16")

    def mixed(x, w):
        return jnp.dot(x, w, preferred_element_type=F32).astype(BF16)

    xla = {
        "weight as (K, N)": lambda x, w: jnp.dot(x, w.astype(BF16)),
        "weight as (N, K)": Formulation(lambda x, w: _rows(x, w.astype(BF16), BF16), _transposed),
        "mixed types in dot": mixed,
    }
    operands = Operand((m, k)), Operand((k, n), "int8")
    return lambda x, w: matmul_int8_weights(x[None], w[None])[0], xla, operands


def product(m: int, k: int, n: int, transposed: str) -> Built:
    """x @ w of bfloat16 arrays and nothing else, an operand held transposed: of a linear layer's
    gradients "w" is that of its input, "x" that of its weight."""

    @graph
    def matmul(g, x, w):
        x = x.set_stride([m * k, 1, m]) if transposed == "x" else x
        w = w.set_stride([k * n, 1, k]) if transposed == "w" else w
        return g.matmul(x, w)

    def arrays(x, w):
        return (x.T if transposed == "x" else x), (w.T if transposed == "w" else w)

    def ours(x, w):
        x, w = arrays(x, w)
        return matmul(x[None], w[None])[0]

    def contracted(x, w):
        along = (0 if transposed == "x" else 1,), (1 if transposed == "w" else 0,)
        return jax.lax.dot_general(x, w, (along, ((), ())), preferred_element_type=F32)

    shapes = ((k, m) if transposed == "x" else (m, k)), ((n, k) if transposed == "w" else (k, n))
    operands = tuple(Operand(shape) for shape in shapes)
    xla = {
        "dot": lambda x, w: jnp.dot(*arrays(x, w)),
        "dot_general in f32": lambda x, w: contracted(x, w).astype(BF16),
    }
    return ours, xla, operands


def cases() -> Iterator[Made]:
    for m, k, n in _LAYERS:
        name = f"linear/{m}x{k}x{n}"
        yield matrix_case(name, "bias", linear, m, k, n, None)
        yield matrix_case(name, "input gradient", product, m, n, k, "w")
        yield matrix_case(name, "weight gradient", product, k, m, n, "x")
    pixels, big, square = 64 * 56 * 56, (8192, 4096, 16384), (4096, 4096, 4096)
    for name, part, build, *arguments in (
        ("convnext/pointwise-96-384-at-56", "bias, gelu", linear, pixels, 96, 384, "gelu"),
        ("mlp/8192x4096x16384", "bias, relu", linear, *big, "relu"),
        ("mlp/8192x4096x16384", "bias, gelu", linear, *big, "gelu"),
        ("mlp/8192x4096x16384", "fp8", fp8, *big, None),
        ("mlp/4096x4096x4096", "fp8", fp8, *square, None),
        ("mlp/8192x4096x16384", "fp8 product", fp8_product, *big),
        ("mlp/4096x4096x4096", "fp8 product", fp8_product, *square),
        ("mlp/8192x4096x16384", "fp8, bias, gelu", fp8, *big, "gelu"),
        ("mlp/64x8192x28672", "int8 weights", int8_weights, 64, 8192, 28672),
        ("mlp/4096x4096x4096", "int8 weights", int8_weights, *square),
    ):
        yield matrix_case(name, part, build, *arguments)
