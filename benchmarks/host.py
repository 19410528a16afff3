"""Host time of a call inside a jitted program: a chain of tiny convolutions beside XLA's own.

Runs as a process of its own (``python -m benchmarks.host``), because XLA's flags are read
once; prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import jax
from chain import LENGTH, block, operands, ours, xla  # tests/chain.py

from jax_cudnn._core import context, ffi
from jax_cudnn._core.planning import planner
from jax_cudnn.commands.timing import interleaved, summary


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
            (x,) = ffi.call(plan, trace.spec, "block", x, w, b)
        return x

    for _ in range(5):
        jax.block_until_ready(timed(x, w, b))
    before, after = (ctypes.c_int64 * 9)(), (ctypes.c_int64 * 9)()
    ffi.library().JaxCudnnCounts(before, 1)  # counts nanoseconds from now on
    repeats = 100
    for _ in range(repeats):
        jax.block_until_ready(timed(x, w, b))
    ffi.library().JaxCudnnCounts(after, 0)
    initialize, execute, backend = (after[i] - before[i] for i in range(6, 9))
    calls = repeats * LENGTH
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
