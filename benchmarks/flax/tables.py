"""Steps of Flax's models as docs/benchmarks.md shows them between its ``flax`` marks.

Without Flax a result can be read, too, so nothing here needs it.
"""

from __future__ import annotations

from typing import Any

from ..measure import TIMED
from ..tables import listed, spread, table, where

OURS, PLAIN, CUDNN = "accelerate", "Flax", "Flax, jax.nn's cuDNN attention"
WHOLE = "Flax, its forward in jc.accelerate"
LOSS = "Flax, its loss in jc.accelerate"
STEP = "Flax, its step in jc.accelerate"
_TITLES = (
    "model",
    "layers",
    "ms a step",
    "a second",
    "MFU",
    "memory, GB",
    "Flax / accelerate",
)


def render(result: dict[str, Any]) -> str:
    """A row for each model and implementation; below them what was swapped, what did not run, and
    what takes the time."""
    limit, entries = result["limit"], result["flax"]
    text = (
        f"{where(result, 'flax')}. Median (minimum to maximum) of rounds in which the "
        "implementations take turns; bfloat16 with parameters in float32, random data, one "
        "jitted program of loss, gradients and optax update with donated state. MFU counts three "
        "times the forward's FLOPs, half for causal attention, at "
        f"{limit['tflops']['bfloat16']:g} TFLOP/s ({limit['of']}). Memory is what XLA assigns to "
        "the step: arguments, results and temporaries."
    )
    rows = [_cells(name, entry, side) for name, entry in entries.items() for side in entry["sides"]]
    notes = [note for name, entry in entries.items() for note in _notes(name, entry)]
    return f"{text}\n\n{table(_TITLES, rows)}\n\n{listed(notes)}"


def _cells(name: str, entry: dict[str, Any], side: str) -> list[str]:
    found = entry["sides"][side]
    ours = entry["sides"].get(OURS)
    ratio = found["ms"]["median"] / ours["ms"]["median"] if ours else None
    return [
        name,
        side if entry["status"] == TIMED or side != OURS else f"{side} ({entry['status']})",
        spread(found["ms"]),
        f"{found['per_s']:g} {entry['unit']}",
        f"{found['mfu']:.1%}",
        f"{found['memory_gb']:g}",
        f"{ratio:.2f}" if ratio and side != OURS else "",
    ]


def _notes(name: str, entry: dict[str, Any]) -> list[str]:
    said = []
    if "parameters" in entry:
        size, tflop = entry["parameters"] / 1e6, entry["flops"] / 1e12
        said.append(f"{name}: {size:.3g}M parameters, {tflop:.3g} TFLOP a step; " + entry["what"])
    if "swapped" in entry:
        swapped = ", ".join(f"{n} {kind}" for kind, n in entry["swapped"]["ours"].items())
        calls = entry["sides"][OURS]["custom_calls"] if OURS in entry["sides"] else 0
        kept = "; ".join(f"{n} {why}" for why, n in entry["swapped"]["kept"].items())
        said.append(
            f"{name}: {swapped or 'no layer'} swapped, {calls} custom calls"
            + (f"; not swapped: {kept}" if kept else "")
        )
    if "reason" in entry:
        said.append(f"{name}, {entry['status']}: {entry['reason']}")
    for side, reason in entry.get("not_run", {}).items():
        if reason != entry.get("reason"):
            said.append(f"{name}, {side} did not run: {reason.partition(' [')[0]}")
    profile = entry["sides"].get(OURS, {}).get("profile", {})
    if "kinds_ms" in profile:
        kinds = ", ".join(f"{kind} {ms:.3g}" for kind, ms in profile["kinds_ms"].items())
        said.append(f"{name}: {profile['busy_ms']:.3g} ms of kernels, of which {kinds}")
    return said


def _kernels(entry: dict[str, Any], side: str) -> float | None:
    """Milliseconds of a step's kernels; other work of the host does not disturb it."""
    return entry["sides"].get(side, {}).get("profile", {}).get("busy_ms")


def render_one_line(result: dict[str, Any]) -> str:
    """The table of docs/accelerate.md: the kernels of a step with ``jc.accelerate`` and without."""
    head = ["model", "plain Flax, ms", "its forward in `jc.accelerate`", "its loss"]
    head += ["its whole step", "by hand, `jax.nn`'s cuDNN attention"]
    rows = []
    for name, entry in result["flax"].items():
        sides = (PLAIN, WHOLE, LOSS, STEP, CUDNN)
        plain, ours, *_, by_hand = found = [_kernels(entry, side) for side in sides]
        if ours is None:
            continue
        memory = [entry["sides"].get(side, {}).get("memory_gb") for side in (PLAIN, WHOLE)]
        shown = [f"{ms:.1f}" if ms else "" for ms in found]
        ratios = [f"{ours / ms:.2f}" if ms else "" for ms in (plain, by_hand)]
        rows.append([name, *shown, *ratios, " / ".join(f"{gb:g}" if gb else "-" for gb in memory)])
    head += ["forward / plain", "/ by hand", "memory, GB, plain / `jc.accelerate`"]
    return f"{where(result, 'flax')}; milliseconds of kernels of a training step.\n\n" + table(
        head, rows
    )


def render_sentence(result: dict[str, Any]) -> str:
    """README's sentence on steps with ``jc.accelerate``."""
    found = {}
    for name, entry in result["flax"].items():
        plain, ours = _kernels(entry, PLAIN), _kernels(entry, WHOLE)
        if plain and ours:
            found[name] = f"{ours / plain:.2f}"
    steps = ", ".join(f"{name} {ratio}" for name, ratio in found.items())
    return (
        "Training steps of plain Flax models with one line of `jc.accelerate`, as a part of their "
        f"time: {steps} (an H200; [all](docs/accelerate.md#measured))."
    )
