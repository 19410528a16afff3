"""Host time of a call inside a jitted program: a chain of tiny convolutions beside XLA's own.

Runs as a process of its own (``python -m jax_cudnn.bench.host``), because XLA's flags are read
once; prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from .._core import context, ffi
from .._core.graph.trace import graph
from .._core.planning import planner
from .timing import interleaved, summary

LENGTH = 200
SHAPE = (1, 14, 14, 32)  # NHWC; small enough that the host, not the GPU, is the limit


@graph
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


def chain() -> dict[str, dict[str, float]]:
    """Microseconds a convolution in the chain: ours and XLA's."""
    args = operands()
    compiled = {f.__name__: jax.jit(f).lower(*args).compile() for f in (ours, xla)}
    seconds = interleaved(compiled, args, rounds=11, calls=20)
    return {name: summary(values, 1e6 / LENGTH) for name, values in seconds.items()}


def overhead() -> dict[str, float]:
    """Nanoseconds a call: our stages, cudnnBackendExecute alone, and the difference."""
    x, w, b = operands()
    x, w, b = x.transpose(0, 3, 1, 2), w.transpose(0, 3, 1, 2), b.reshape(1, -1, 1, 1)
    _, trace = block.trace(x, w, b)
    plan = planner.plan(trace.spec, context.site(jax.local_devices(), "block"), "block")

    @jax.jit
    def timed(x, w, b):
        for _ in range(LENGTH):
            (x,) = ffi.call(plan, trace.spec, "block", x, w, b, target=ffi.TIMED_TARGET)
        return x

    for _ in range(5):
        jax.block_until_ready(timed(x, w, b))
    counts = (ctypes.c_int64 * 4)()
    ffi.library().JaxCudnnTimings(counts, 1)
    for _ in range(100):
        jax.block_until_ready(timed(x, w, b))
    ffi.library().JaxCudnnTimings(counts, 1)
    initialize, execute, backend, calls = counts
    return {
        "initialize": round(initialize / calls, 1),
        "execute": round(execute / calls, 1),
        "cudnnBackendExecute": round(backend / calls, 1),
        "added": round((initialize + execute - backend) / calls, 1),
        "calls": calls,
    }


def main() -> None:
    result: dict[str, Any] = {"chain_us_per_convolution": chain()}
    if "--overhead" in sys.argv:
        result["ns_per_call"] = overhead()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
