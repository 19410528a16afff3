"""A chain of tiny convolutions in one program, by graphs and by XLA: the host is its limit."""

import functools

import jax
import jax.numpy as jnp

from jax_cudnn._core.graph.trace import graph

LENGTH = 200
SHAPE = (1, 14, 14, 32)  # NHWC; small enough that the host, not the GPU, is the limit


@functools.partial(graph, implementation="cudnn")  # by default such small ones may run in XLA
def block(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b))


def ours(x, w, b):
    """A chain on NHWC arrays; the transposes around each graph are bitcasts."""
    w, b = w.transpose(0, 3, 1, 2), b.reshape(1, -1, 1, 1)
    for _ in range(LENGTH):
        x = block(x.transpose(0, 3, 1, 2), w, b).transpose(0, 2, 3, 1)
    return x


def xla(x, w, b):
    """The same chain as XLA compiles it (its own cuDNN calls)."""
    dims = ("NHWC", "OHWI", "NHWC")
    for _ in range(LENGTH):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims) + b
        )
    return x


def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    c = SHAPE[-1]
    x = jax.random.normal(keys[0], SHAPE, jnp.bfloat16)
    w = jax.random.normal(keys[1], (c, 3, 3, c), jnp.bfloat16) / (9 * c) ** 0.5
    return x, w, jax.random.normal(keys[2], (c,), jnp.bfloat16) / 10
