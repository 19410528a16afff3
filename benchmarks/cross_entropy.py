"""The loss of a language model and its gradients: optax on the logits, linear_cross_entropy, and
Tokamax's, where it is installed.

python -m benchmarks.cross_entropy --into benchmarks/results/cross_entropy_h200.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_cudnn as jc
from jax_cudnn.commands import timing

from .measure import balanced, by_sizes, optional, short
from .tables import table, where

SIZES = {"32768 x 768 x 50304": (32768, 768, 50304), "8192 x 4096 x 128256": (8192, 4096, 128256)}
TINY = {"256 x 16 x 512": (256, 16, 512)}
PLAIN, OURS, TOKAMAX = "optax", "`linear_cross_entropy`", 'Tokamax, `"chunked_xla"`'


def plain(hidden: Any, weight: Any, labels: Any, wide: bool) -> Any:
    logits = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32 if wide else None)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels)
    return losses.mean()


def ours(hidden: Any, weight: Any, labels: Any, wide: bool, reduction: Any = "mean") -> Any:
    options = {"reduction": reduction, "preferred_element_type": "float32" if wide else None}
    return jc.ops.linear_cross_entropy(hidden, weight, labels, **options).mean()


def tokamax(hidden: Any, weight: Any, labels: Any) -> Any:
    loss = optional("tokamax").linear_softmax_cross_entropy_loss
    return loss(hidden, labels, weight, reduction="mean", implementation="chunked_xla")


SIDES: dict[str, Callable[..., Any]] = {
    PLAIN: partial(plain, wide=False),
    OURS: partial(ours, wide=False),
    f'{OURS}, `"none"`': partial(ours, wide=False, reduction="none"),
    f"{PLAIN}, float32 logits": partial(plain, wide=True),
    f"{OURS}, float32 logits": partial(ours, wide=True),
}


def measure(tokens: int, features: int, vocabulary: int, seconds: float) -> dict[str, Any]:
    """Of each side the milliseconds of the loss and both gradients in bfloat16, the megabytes that
    the program takes besides operands and results, and the largest error of a gradient, relative to
    its norm, against the float32 one of optax."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), "bfloat16")
    weight = jax.random.normal(keys[1], (features, vocabulary), "bfloat16") * features**-0.5
    operands = hidden, weight, jax.random.randint(keys[2], (tokens,), 0, vocabulary)
    sides = SIDES | ({TOKAMAX: tokamax} if optional("tokamax") is not None else {})
    programs = {
        side: jax.jit(jax.value_and_grad(f, (0, 1))).lower(*operands).compile()
        for side, f in sides.items()
    }
    times = timing.interleaved(
        programs, operands, rounds=15, calls=3, seconds=seconds, order=balanced
    )
    exact = jax.tree.leaves(programs[f"{PLAIN}, float32 logits"](*operands))
    found = {}
    for side, program in programs.items():
        errors = [
            float(jnp.linalg.norm((a - b).astype("float32")) / jnp.linalg.norm(b.astype("float32")))
            for a, b in zip(jax.tree.leaves(program(*operands)), exact, strict=True)
        ]
        memory = program.memory_analysis()
        found[side] = {
            "ms": timing.summary(times[side], 1e3),
            "mb": short(memory.temp_size_in_bytes / 1e6) if memory else None,
            "error": short(max(errors), 2),
        }
    return found


def render(result: dict[str, Any]) -> str:
    """A row for each side, with its ratios to optax's."""
    rows = []
    for sizes, sides in result["cases"].items():
        for side, found in sides.items():
            base = sides[f"{PLAIN}, float32 logits" if "float32" in side else PLAIN]
            ms, mb = found["ms"]["median"], found["mb"]
            ratios = f"{ms / base['ms']['median']:.2f}", f"{mb / base['mb']:.3f}"
            shown = ("", "") if found is base else ratios
            rows.append([sizes, side, f"{ms:.1f}", shown[0], f"{mb:.0f}", shown[1]])
    head = ["tokens x features x classes", "", "ms", "over optax's", "MB", "over optax's"]
    return f"{where(result)}.\n\n{table(head, rows)}"


if __name__ == "__main__":
    by_sizes(__doc__ or "", SIZES, TINY, measure, seconds=8.0)
