"""Cases of real models and the host's times as docs/benchmarks.md shows them."""

from __future__ import annotations

from typing import Any

from ..measure import TIMED
from ..tables import listed, spread, table, where


def render_host(result: dict[str, Any]) -> str:
    """Host time, tracing and planning."""
    rows = [
        (
            f"chain of 200 tiny convolutions, {mode.replace('_', ' ')}, us each",
            *(spread(run["chain_us_per_convolution"][side]) for side in ("ours", "xla")),
        )
        for mode, runs in result["host"].items()
        for run in runs
    ]
    for run in result["host"]["no_command_buffers"]:
        ns = run["ns_per_call"]
        what = f"initialize {ns['initialize']:.0f} + execute {ns['execute']:.0f}"
        within = f"of which cudnnBackendExecute {ns['cudnnBackendExecute']:.0f}"
        rows.append((f"host ns a call: {what}, {within}", f"{ns['added']:.0f} added", ""))
    cold = result["cold_plan_ms"]
    figures = {
        "first trace of a graph of 10 nodes, ms": spread(result["first_trace_of_10_nodes_ms"]),
        f"plan of a fusion, cold, ms (median of {len(cold)}; largest)": (
            f"{result['cold_plan_ms_median']}; {max(cold.values())}"
        ),
        "plan from the plan cache on disk, ms": spread(result["from_disk_ms"]),
        "plan from memory, ms": spread(result["from_memory_ms"]),
    }
    rows += [(what, figure, "") for what, figure in figures.items()]
    text = f"{where(result)}. Median (minimum to maximum); one row for each of three processes."
    return text + "\n\n" + table(("what", "jax_cudnn", "XLA"), rows)


def render(result: dict[str, Any]) -> str:
    """The cases against XLA, and what could not be timed."""
    notes: list[str] = []
    titles = ["case", "jax_cudnn, us", "XLA's best, us", "XLA / jax_cudnn"]
    titles += ["reference in XLA / jax_cudnn", "TFLOP/s", "GB/s"]
    rows = []
    for name, entry in result["cases"].items():
        if entry["status"] != TIMED:
            rows.append([name, entry["status"], *[""] * (len(titles) - 2)])
            notes.append(f"{name}, {entry['status']}: {' '.join(entry['reason'].split())}")
            continue
        best = entry["best_xla"]
        rows.append(
            [
                name,
                spread(entry["us"]["jax_cudnn"]),
                f"{spread(entry['us'][best])} {best}",
                *(_ratio(entry, key) for key in ("ratio", "ratio_reference")),
                *(f"{entry[kind]['jax_cudnn']:g}" for kind in ("tflops", "gbytes_s")),
            ]
        )
    text = (
        f"{where(result)}. Median (minimum to maximum) of rounds of asynchronous calls, with "
        '`implementation="cudnn"`; XLA\'s best is the fastest of several formulations in plain '
        "JAX. FLOPs and bytes are those of the graph. The reference is the graph's meaning in "
        "jnp, which XLA runs when a graph falls back to it."
    )
    parts = [text, table(titles, rows)]
    return "\n\n".join([*parts, listed(notes)] if notes else parts)


def _ratio(entry: dict[str, Any], key: str) -> str:
    if key not in entry:
        return ""
    return f"{entry[key]:.2f} ({entry[f'{key}_min']:.2f} to {entry[f'{key}_max']:.2f})"
