"""What only passes over memory: reductions and pointwise operations of MLPs and convnets."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jax_cudnn._core.graph.trace import graph
from jax_cudnn.commands.timing import Formulation

from ..case import Array, Operand
from .case import Built, Made, matrix_case
from .matmuls import BF16, F32


def total(m: int, n: int, axis: int, dtype: str = "bfloat16") -> Built:
    """Sums of each row (axis 1) or of each column (axis 0), to float32."""
    out = [1, n] if axis == 0 else [m, 1]

    @graph
    def sums(g, x):
        return g.reduction(x, mode="ADD").set_dim(out)

    def by_product(x):
        one = jnp.ones((x.shape[axis],), x.dtype)
        return jnp.expand_dims(jnp.tensordot(x, one, (axis, 0), preferred_element_type=F32), axis)

    xla = {
        "sum": lambda x: jnp.sum(x, axis, dtype=F32, keepdims=True),
        "product with ones": by_product,
    }
    return sums, xla, (Operand((m, n), dtype),)


def dots(m: int, n: int) -> Built:
    """The dot product of each row with that of another matrix, to float32."""

    @graph
    def row_dots(g, x, y):
        return g.reduction(g.mul(x, y), mode="ADD").set_dim([m, 1])

    def by_product(x, y):
        return jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,))), preferred_element_type=F32)

    xla = {
        "sum of products": lambda x, y: jnp.sum(x.astype(F32) * y.astype(F32), 1, keepdims=True),
        "batched product": Formulation(by_product, finish=lambda z: z[:, None]),
    }
    return row_dots, xla, (Operand((m, n)), Operand((m, n)))


def squares(m: int, n: int, dtype: str) -> Built:
    """The sum of all squares, for the norm of a gradient, to float32."""

    @graph
    def sum_of_squares(g, x):
        return g.reduction(g.mul(x, x), mode="ADD")

    def in_two(x):
        return jnp.sum(jnp.sum(jnp.square(x.astype(F32)), 1), keepdims=True)[:, None]

    xla = {
        "sum of squares": lambda x: jnp.sum(jnp.square(x.astype(F32)), keepdims=True),
        "rows first": in_two,
    }
    return sum_of_squares, xla, (Operand((m, n), dtype),)


def largest(m: int, n: int, mode: str) -> Built:
    """The largest element, or with "AMAX" the largest absolute value, of each row, to float32."""

    @graph
    def maxima(g, x):
        return g.reduction(x, mode=mode).set_dim([m, 1])

    size = jnp.abs if mode == "AMAX" else lambda x: x

    def by_lax(x):
        y = jax.lax.reduce(size(x).astype(F32), -jnp.inf, jax.lax.max, (1,))
        return y[:, None]

    xla = {
        "max": lambda x: jnp.max(size(x), 1, keepdims=True).astype(F32),
        "lax.reduce in f32": by_lax,
    }
    return maxima, xla, (Operand((m, n)),)


def exponentials(m: int, n: int) -> Built:
    """The sum of the exponentials of each row, to float32."""

    @graph
    def sum_exp(g, x):
        return g.reduction(g.exp(x), mode="ADD").set_dim([m, 1])

    xla = {
        "in f32": lambda x: jnp.sum(jnp.exp(x.astype(F32)), 1, keepdims=True),
        "exp in bf16": lambda x: jnp.sum(jnp.exp(x), 1, dtype=F32, keepdims=True),
    }
    return sum_exp, xla, (Operand((m, n)),)


def softmax(m: int, n: int) -> Built:
    """A softmax of rows, written out of reductions."""

    @graph
    def written_out(g, x):
        e = g.exp(g.sub(x, g.reduction(x, mode="MAX").set_dim([m, 1])))
        y = g.div(e, g.reduction(e, mode="ADD").set_dim([m, 1]))
        return y.set_data_type("bfloat16")

    def by_hand(x):
        e = jnp.exp(x.astype(F32) - jnp.max(x, 1, keepdims=True).astype(F32))
        return (e / jnp.sum(e, 1, keepdims=True)).astype(x.dtype)

    xla = {
        "jax.nn.softmax": lambda x: jax.nn.softmax(x.astype(F32)).astype(x.dtype),
        "jax.nn.softmax in bf16": jax.nn.softmax,
        "by hand in f32": by_hand,
    }
    return written_out, xla, (Operand((m, n)),)


def gate(m: int, n: int) -> Built:
    """swish(a) * b, the gate of a SwiGLU MLP."""

    @graph
    def swish_mul(g, a, b):
        return g.mul(g.swish(a), b)

    def in_f32(a, b):
        return (jax.nn.silu(a.astype(F32)) * b.astype(F32)).astype(a.dtype)

    xla = {"in f32": in_f32, "in bf16": lambda a, b: jax.nn.silu(a) * b}
    return swish_mul, xla, (Operand((m, n)), Operand((m, n)))


def joined(m: int, n: int) -> Built:
    """gelu(a + b), two branches that join."""

    @graph
    def add_gelu(g, a, b):
        return g.gelu_approx_tanh(g.add(a, b))

    def plain(y: Array) -> Array:
        return jax.nn.gelu(y, approximate=True).astype(BF16)

    xla = {
        "in f32": lambda a, b: plain(a.astype(F32) + b.astype(F32)),
        "in bf16": lambda a, b: plain(a + b),
    }
    return add_gelu, xla, (Operand((m, n)), Operand((m, n)))


def channels(m: int, n: int) -> Built:
    """relu(x * scale + bias) of pixels (m, n) with a scale and bias for each channel, in float32:
    a batch normalization at inference."""

    @graph
    def scale_bias_relu(g, x, scale, bias):
        return g.relu(g.add(g.mul(x, scale), bias))

    xla = {
        "plain": lambda x, scale, bias: jax.nn.relu(x * scale + bias),
        "where": lambda x, scale, bias: (lambda y: jnp.where(y > 0, y, 0))(x * scale + bias),
    }
    vector = Operand((1, n), "float32")
    return scale_bias_relu, xla, (Operand((m, n), "float32"), vector, vector)


def cases() -> Iterator[Made]:
    pixels = 64 * 56 * 56
    for name, part, build, *arguments in (
        ("mlp/8192x8192", "sum of rows", total, 8192, 8192, 1),
        ("mlp/16384x4096", "dots of rows", dots, 16384, 4096),
        ("mlp/8192x8192", "sum of columns", total, 8192, 8192, 0),
        ("convnext/96-at-56", "sum of columns", total, pixels, 96, 0, "float32"),
        ("mlp/8192x8192", "sum of squares", squares, 8192, 8192, "bfloat16"),
        ("mlp/4096x4096", "sum of squares, float32", squares, 4096, 4096, "float32"),
        ("mlp/16384x8192", "maximum of rows", largest, 16384, 8192, "MAX"),
        ("mlp/16384x8192", "absolute maximum of rows", largest, 16384, 8192, "AMAX"),
        ("mlp/16384x8192", "sum of exponentials of rows", exponentials, 16384, 8192),
        ("mlp/16384x8192", "softmax of reductions", softmax, 16384, 8192),
        ("mlp/8192x14336", "swish gate", gate, 8192, 14336),
        ("convnext/384-at-56", "add, gelu", joined, pixels, 384),
        ("resnet50/128-at-28", "scale, bias, relu", channels, 256 * 28 * 28, 128),
    ):
        yield matrix_case(name, part, build, *arguments)
