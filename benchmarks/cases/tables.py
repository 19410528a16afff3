"""Cases of real models and the host's times as docs/benchmarks.md and BUILD.md show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..measure import TIMED
from ..tables import listed, spread, table, where

_SURVEY = Path(__file__).parents[1] / "results" / "survey.json"
_AGREE = 0.15  # ratios of two runs that differ by more are worth a word


def survey() -> dict[str, Any]:
    """The earlier survey's ratios: ``source`` and ``cases``, name -> ratio [least, largest]."""
    return json.loads(_SURVEY.read_text())


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
    text = f"{where(result)}; median (smallest to largest); one row for each of three processes."
    return text + "\n\n" + table(("what", "jax_cudnn", "XLA's own"), rows)


def render(result: dict[str, Any]) -> str:
    """The cases against XLA, what could not be timed, and how all this fits the survey."""
    known = survey()
    notes: list[str] = []
    titles = ["case", "jax_cudnn, us", "XLA's best, us", "XLA / jax_cudnn"]
    titles += ["reference in XLA / jax_cudnn", "TFLOP/s", "GB/s", "survey"]
    rows = []
    for name, entry in result["cases"].items():
        earlier = known["cases"].get(name)
        shown = "" if earlier is None else _range(earlier["ratio"])
        if entry["status"] != TIMED:
            rows.append([name, entry["status"], *[""] * (len(titles) - 3), shown])
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
                shown,
            ]
        )
        if earlier is not None:
            notes.extend(_disagreement(name, entry, earlier))
    text = (
        f"{where(result)}; median (smallest to largest) of rounds of asynchronous calls; XLA's "
        "best formulation by name; FLOPs and bytes are those of the graph. The reference is the "
        "graph's own meaning in jnp, which XLA runs where it is left to it."
        + (f" Survey: {known['source']}." if known["cases"].keys() & result["cases"] else "")
    )
    parts = [text, table(titles, rows)]
    return "\n\n".join([*parts, listed(notes)] if notes else parts)


def off_survey(ratio: float, earlier: dict[str, Any]) -> float | None:
    """How far a ratio is outside of the survey's range, as a fraction; None within 15 %."""
    low, high = earlier["ratio"]
    off = ratio / high - 1 if ratio > high else ratio / low - 1 if ratio < low else 0.0
    return off if abs(off) > _AGREE else None


def _disagreement(name: str, entry: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """What to say where a ratio is not the survey's: its remarks, and the ratio against another
    formulation where the survey may have had no better one."""
    off = off_survey(entry["ratio"], earlier)
    if off is None:
        return []
    said = [earlier[key] for key in ("remark", "explanation") if key in earlier]
    if earlier.get("against") in entry["us"]:
        other = entry["us"][earlier["against"]]["median"] / entry["us"]["jax_cudnn"]["median"]
        said.append(f"{other:.2f} against XLA's {earlier['against']!r}")
    text = f"{name}: {off:+.0%} against the survey's {_range(earlier['ratio'])}"
    return [text + (f" ({'; '.join(said)})" if said else "")]


def _ratio(entry: dict[str, Any], key: str) -> str:
    if key not in entry:
        return ""
    return f"{entry[key]:.2f} ({entry[f'{key}_min']:.2f} to {entry[f'{key}_max']:.2f})"


def _range(ratio: list[float]) -> str:
    low, high = ratio
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
