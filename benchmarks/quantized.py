"""Products of weights in int8: formulations in plain JAX, and jc.ops.quantized_matmul.

python -m benchmarks.quantized --into benchmarks/results/quantized_h200.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn as jc
from jax_cudnn.commands import timing

from .measure import balanced, by_sizes
from .tables import table, where

SIZES = {"decode, 64 x 8192 x 28672": (64, 8192, 28672), "prefill, 4096^3": (4096, 4096, 4096)}
TINY = {"4 x 256 x 64": (4, 256, 64)}
GROUP = 128
WIDE, OURS, GROUPS = "bfloat16 weights", "`quantized_matmul`", f"groups of {GROUP}"
PLAIN, TURNED = "plain JAX, (K, N)", "plain JAX, (N, K)"


def plain(x: Any, kernel: Any, scale: Any) -> Any:
    return (jnp.matmul(x, kernel.astype(x.dtype)) * scale).astype(x.dtype)


def turned(x: Any, kernel: Any, scale: Any) -> Any:
    return plain(x, kernel.T, scale)


def dequantized(x: Any, kernel: Any, scale: Any) -> Any:
    return jnp.matmul(x, kernel.astype(x.dtype) * scale.astype(x.dtype))


def by_groups(x: Any, kernel: Any, scale: Any) -> Any:
    parts = kernel.reshape(len(scale), -1, kernel.shape[1]).astype(x.dtype)
    return jnp.matmul(x, (parts * scale[:, None]).reshape(kernel.shape))


def measure(rows: int, features: int, out: int, seconds: float) -> dict[str, Any]:
    """The microseconds of each side, with x in bfloat16."""
    a, b = jax.random.split(jax.random.key(0))
    x = jax.random.normal(a, (rows, features), "bfloat16")
    w = jax.random.normal(b, (features, out), "bfloat16")
    kernel, scale = jc.ops.quantize_weights(w.astype("float32"))
    of_groups = jc.ops.quantize_weights(w, GROUP)
    sides: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        WIDE: (jnp.matmul, (x, w)),
        PLAIN: (plain, (x, kernel, scale)),
        TURNED: (turned, (x, jnp.array(kernel.T), scale)),
        "plain JAX, scaled weights": (dequantized, (x, kernel, scale)),
        OURS: (jc.ops.quantized_matmul, (x, kernel, scale)),
        f"plain JAX, {GROUPS}": (by_groups, (x, *of_groups)),
        f"{OURS}, {GROUPS}": (jc.ops.quantized_matmul, (x, *of_groups)),
    }
    calls = {}
    for side, (function, operands) in sides.items():
        compiled = jax.jit(function).lower(*operands).compile()
        calls[side] = lambda compiled=compiled, operands=operands: compiled(*operands)
    times = timing.interleaved(
        calls, (), rounds=15, calls=5, seconds=seconds, order=balanced, warm=1
    )
    return {side: timing.summary(times[side], 1e6) for side in sides}


def render(result: dict[str, Any]) -> str:
    """A row for each side, with its median for each size."""
    cases = result["cases"]
    rows = [
        [side, *(f"{cases[name][side]['median']:.1f}" for name in cases)]
        for side in next(iter(cases.values()))
    ]
    return f"{where(result)}. Microseconds.\n\n{table(['', *cases], rows)}"


if __name__ == "__main__":
    by_sizes(__doc__ or "", SIZES, TINY, measure, seconds=2.0)
