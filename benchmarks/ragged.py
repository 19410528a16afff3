"""Grouped products of experts and their gradients: `lax.ragged_dot`, `jc.ops.ragged_dot`, one plain
product a group, with sizes that the program knows, and Tokamax's and torch's, where installed.

    python -m benchmarks.ragged --into benchmarks/results/ragged_h200.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc
from jax_cudnn.commands import timing

from . import torch_graphs
from .case import BACKWARD, FORWARD
from .measure import balanced, by_sizes, optional
from .tables import table, where

SIZES = {
    "8 experts, 16384 x 4096 x 14336": (8, 16384, 4096, 14336),
    "64 experts, 16384 x 2048 x 1408": (64, 16384, 2048, 1408),
}
TINY = {"2 experts, 256 x 64 x 128": (2, 256, 64, 128)}
PLAIN, OURS, STATIC = "`lax.ragged_dot`", "`jc.ops.ragged_dot`", "one product a group"
TOKAMAX, TORCH = "Tokamax", "torch `_grouped_mm`"
SIDES = (PLAIN, OURS, STATIC, TOKAMAX, TORCH)


def static(sizes: Any) -> Callable[..., Any]:
    """The product with sizes that are known at tracing."""
    ends = np.cumsum(sizes).tolist()

    def run(lhs: Any, rhs: Any, _: Any) -> Any:
        starts = [0, *ends[:-1]]
        groups = [lhs[a:b] @ w for a, b, w in zip(starts, ends, rhs, strict=True)]
        return jnp.concatenate(groups)

    return run


def programs(product: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The product and each of its gradients."""

    def of_lhs(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x: product(x, rhs, sizes), lhs)[1](cotangent)

    def of_rhs(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
        return jax.vjp(lambda x: product(lhs, x, sizes), rhs)[1](cotangent)

    def forward(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
        return product(lhs, rhs, sizes)

    return {"forward": forward, "gradient of lhs": of_lhs, "gradient of rhs": of_rhs}


def of_torch(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> dict[str, Callable[..., Any]]:
    """Its programs, by the names of those of :func:`programs`."""
    torch = optional("torch")
    if torch is None:
        return {}

    def product(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return torch._grouped_mm(lhs, rhs, offs=sizes.cumsum(0, dtype=torch.int32))

    sets = [({"lhs": lhs, "rhs": rhs, "sizes": sizes}, cotangent)]
    made = {"forward": torch_graphs.program(product, FORWARD, [], sets)}
    for name in ("lhs", "rhs"):
        made[f"gradient of {name}"] = torch_graphs.program(product, BACKWARD, [name], sets)
    return made


def measure(experts: int, rows: int, k: int, n: int, seconds: float) -> dict[str, Any]:
    """The microseconds of each program and side, in bfloat16, with groups of unequal sizes."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, k), (experts, k, n), (rows, n)
    arrays = [jax.random.normal(a, s, "bfloat16") for a, s in zip(keys, shapes, strict=True)]
    ends = np.sort(np.random.default_rng(0).integers(0, rows, experts - 1))
    sizes = np.diff(ends, prepend=0, append=rows)
    operands = *arrays, jnp.asarray(sizes, "int32")
    sides = {
        PLAIN: jax.lax.ragged_dot,
        OURS: jc.ops.ragged_dot,
        STATIC: static(sizes),
    }
    if (tokamax := optional("tokamax")) is not None:
        sides[TOKAMAX] = tokamax.ragged_dot
    made = {side: programs(product) for side, product in sides.items()}
    torch = of_torch(*operands)
    found: dict[str, Any] = {}
    for name in made[OURS]:
        compiled: dict[str, Callable[..., Any]] = {}
        for side, each in made.items():
            program = jax.jit(each[name]).lower(*operands).compile()
            compiled[side] = partial(program, *operands)
        compiled |= {TORCH: torch[name]} if torch else {}
        times = timing.interleaved(
            compiled, (), rounds=9, calls=3, seconds=seconds, order=balanced, warm=1
        )
        found[name] = {side: timing.summary(times[side], 1e6) for side in compiled}
    return found


def render(result: dict[str, Any]) -> str:
    """A row for each program, with the median of each side."""
    rows = [
        [sizes, name, *(f"{of[side]['median']:.0f}" for side in SIDES if side in of)]
        for sizes, found in result["cases"].items()
        for name, of in found.items()
    ]
    (measured, *_) = result["cases"].values()
    head = ["", "", *(f"{side}, us" for side in SIDES if side in measured["forward"])]
    return f"{where(result)}.\n\n{table(head, rows)}"


if __name__ == "__main__":
    by_sizes(__doc__ or "", SIZES, TINY, measure, seconds=2.0)
