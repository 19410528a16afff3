"""A result of ``bench`` as the Markdown that README.md and BUILD.md show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jax_cudnn.commands.figures import TIMED

RESULTS = Path(__file__).parent / "results"
_AGREE = 0.15  # ratios of two runs that differ by more are worth a word


def survey() -> dict[str, Any]:
    """The earlier survey's ratios: ``source`` and ``cases``, name -> ratio [least, largest]."""
    return json.loads((RESULTS / "survey.json").read_text())


def render(result: dict[str, Any]) -> str:
    """Host time, tracing and planning."""
    if "host" not in result:
        return "This result holds no host times: a run with `--only` measures named cases alone."
    rows = ["| what | jax_cudnn | XLA's own |", "|---|---|---|"]
    for mode, runs in result["host"].items():
        for run in runs:
            chain = run["chain_us_per_convolution"]
            rows.append(
                f"| chain of 200 tiny convolutions, {mode.replace('_', ' ')}, us each "
                f"| {spread(chain['ours'])} | {spread(chain['xla'])} |"
            )
    for run in result["host"]["no_command_buffers"]:
        ns = run["ns_per_call"]
        rows.append(
            f"| host ns a call: initialize {ns['initialize']:.0f} + execute {ns['execute']:.0f}, "
            f"of which cudnnBackendExecute {ns['cudnnBackendExecute']:.0f} "
            f"| {ns['added']:.0f} added | |"
        )
    trace = spread(result["first_trace_of_10_nodes_ms"])
    rows.append(f"| first trace of a graph of 10 nodes, ms | {trace} | |")
    rows.append(
        f"| plan of a fusion, cold, ms (median of {len(result['cold_plan_ms'])}; largest) "
        f"| {result['cold_plan_ms_median']}; {max(result['cold_plan_ms'].values())} | |"
    )
    if "from_disk_ms" in result:
        disk = spread(result["from_disk_ms"])
        rows.append(f"| plan from the plan cache on disk, ms | {disk} | |")
    rows.append(f"| plan from memory, ms | {spread(result['from_memory_ms'])} | |")
    return (
        f"{where(result)}; median (smallest to largest); one row for each of three processes.\n\n"
        + "\n".join(rows)
    )


def render_cases(result: dict[str, Any]) -> str:
    """The cases against XLA, what could not be timed, and how all this fits the survey."""
    if not result.get("cases"):
        return "This result holds no cases: `python -m benchmarks run cases` measures them."
    known = survey()
    notes: list[str] = []
    referenced = any("ratio_reference" in entry for entry in result["cases"].values())
    titles = ["case", "jax_cudnn, us", "XLA's best, us", "XLA / jax_cudnn"]
    titles += [*["reference in XLA / jax_cudnn"] * referenced, "TFLOP/s", "GB/s", "survey"]
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, entry in result["cases"].items():
        earlier = known["cases"].get(name)
        shown = "" if earlier is None else _range(earlier["ratio"])
        if entry["status"] != TIMED:
            rows.append(f"| {name} | {entry['status']} {'| ' * (len(titles) - 3)}| {shown} |")
            notes.append(f"{name}, {entry['status']}: {' '.join(entry['reason'].split())}")
            continue
        best = entry["best_xla"]
        rows.append(
            f"| {name} | {spread(entry['us']['jax_cudnn'])} | {spread(entry['us'][best])} {best} "
            f"| {_ratio(entry, 'ratio')} "
            + f"| {_ratio(entry, 'ratio_reference')} " * referenced
            + f"| {entry['tflops']['jax_cudnn']:g} | {entry['gbytes_s']['jax_cudnn']:g} | {shown} |"
        )
        if earlier is not None:
            notes.extend(_disagreement(name, entry, earlier))
    text = (
        f"{where(result)}; median (smallest to largest) of rounds of asynchronous calls; XLA's "
        "best formulation by name; FLOPs and bytes are those of the graph."
        + " The reference is the graph's own meaning in jnp, which XLA runs where it is left to it."
        * referenced
        + (f" Survey: {known['source']}." if known["cases"].keys() & result["cases"] else "")
        + "\n\n"
        + "\n".join(rows)
    )
    if notes:
        text += "\n\n" + "\n".join(f"- {note}" for note in notes)
    return text


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
    return [
        f"{name}: {off:+.0%} against the survey's {_range(earlier['ratio'])}"
        + (f" ({'; '.join(said)})" if said else "")
    ]


def where(result: dict[str, Any]) -> str:
    e = result["environment"]
    alone = "No GPU: both sides are XLA on the CPU, and the ratio says nothing about cuDNN. "
    note = alone if e["device"].lower().startswith("cpu") else ""
    return (
        f"{note}{e['device']}, {e['date']}, cuDNN {e['cudnn']}, jax {e['jax']}, "
        f"nvidia-cudnn-frontend {e['nvidia-cudnn-frontend']}"
    )


def _ratio(entry: dict[str, Any], key: str) -> str:
    if key not in entry:
        return ""
    return f"{entry[key]:.2f} ({entry[f'{key}_min']:.2f} to {entry[f'{key}_max']:.2f})"


def _range(ratio: list[float]) -> str:
    low, high = ratio
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def spread(values: dict[str, float]) -> str:
    return f"{values['median']:g} ({values['min']:g} to {values['max']:g})"
