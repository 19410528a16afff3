"""Training steps as the Markdown that README.md shows between its ``steps`` marks."""

from __future__ import annotations

from typing import Any

from ..tables import spread, where
from .measure import EXACT, IN_XLA, OURS, PLAIN, TIMED

_TITLES = (
    "step",
    "program",
    "jax_cudnn, ms",
    "XLA's default, ms",
    "XLA / jax_cudnn",
    "its graphs in XLA / jax_cudnn",
    "over forward: jax_cudnn, XLA",
    "graphs (different)",
    "segments: cuDNN + XLA",
    "planning, s",
    "error: jax_cudnn, XLA",
)


def render_steps(result: dict[str, Any]) -> str:
    """Each program of each step in a row; below them what the steps are, and what did not run."""
    rows = [f"| {' | '.join(_TITLES)} |", "|" + "---|" * len(_TITLES)]
    notes = []
    for name, entry in result["steps"].items():
        notes.append(f"{name}: {entry['what']}")
        if "reason" in entry:
            notes.append(f"{name}, {entry['status']}: {entry['reason']}")
        for program, found in entry["programs"].items():
            rows.append(f"| {name} | {program} | {' | '.join(_cells(found))} |")
            if "reason" in found and found["status"] != "timed":
                notes.append(f"{name}, {program}, {found['status']}: {found['reason']}")
            for side, reason in found.get("not_run", {}).items():
                if reason != found.get("reason"):
                    notes.append(f"{name}, {program}, {side} did not run: {reason}")
    return (
        f"{where(result)}; median (smallest to largest) of rounds in which the programs take "
        "turns; bfloat16, random data. Ratios are medians of rounds. A step's graphs are cut in "
        "segments, and planned from nothing. Errors are relative to the same program in float32, "
        "over all its results.\n\n" + "\n".join(rows) + "\n\n" + "\n".join(f"- {n}" for n in notes)
    )


def _cells(found: dict[str, Any]) -> list[str]:
    graphs = f"{found['graphs']} ({found['different_graphs']})" if "graphs" in found else ""
    graphs += f", {found['loops']} in loops" if found.get("loops") else ""
    segments = found.get("segments")
    cut = [f"{segments['cuDNN']} + {segments['XLA']}" if segments else ""]
    cut.append(f"{found['cold_planning_s']:g}" if "cold_planning_s" in found else "")
    if found["status"] != TIMED:
        return [found["status"], "", "", "", "", graphs, *cut, _errors(found)]
    ms, ratios = found["ms"], found["over_ours"]
    return [
        spread(ms[OURS]),
        spread(ms[PLAIN]) if PLAIN in ms else "",
        *(_ratio(ratios[side]) if side in ratios else "" for side in (PLAIN, IN_XLA)),
        _pair(found.get("over_forward", {}), "{:.2f}"),
        graphs,
        *cut,
        _errors(found),
    ]


def _errors(found: dict[str, Any]) -> str:
    if found.get("errors_against") not in (EXACT, PLAIN):
        return ""
    figures = {side: each["relative"] for side, each in found["errors"].items()}
    note = "" if found["errors_against"] == EXACT else " (against XLA)"
    return _pair(figures, "{:.2g}") + note


def _pair(figures: dict[str, float | None], form: str) -> str:
    values = [figures.get(side) for side in (OURS, PLAIN) if side in figures]
    return ", ".join("no number" if value is None else form.format(value) for value in values)


def _ratio(figures: dict[str, float]) -> str:
    return "{median:.2f} ({min:.2f} to {max:.2f})".format(**figures)
