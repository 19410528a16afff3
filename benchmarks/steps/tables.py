"""Training steps as README.md shows them between its ``steps`` marks."""

from __future__ import annotations

from typing import Any

from ..case import OURS
from ..measure import TIMED
from ..tables import listed, pair, spread, table, where
from .measure import EXACT, IN_XLA, PLAIN

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


def render(result: dict[str, Any]) -> str:
    """Each program of each step in a row; below them what the steps are, and what did not run."""
    rows, notes = [], []
    for name, entry in result["steps"].items():
        notes.append(f"{name}: {entry['what']}")
        if "reason" in entry:
            notes.append(f"{name}, {entry['status']}: {entry['reason']}")
        for program, found in entry["programs"].items():
            rows.append([name, program, *_cells(found)])
            if "reason" in found and found["status"] != TIMED:
                notes.append(f"{name}, {program}, {found['status']}: {found['reason']}")
            for side, reason in found.get("not_run", {}).items():
                if reason != found.get("reason"):
                    notes.append(f"{name}, {program}, {side} did not run: {reason}")
    text = (
        f"{where(result)}; median (smallest to largest) of rounds in which the programs take "
        "turns; bfloat16, random data. Ratios are medians of rounds. A step's graphs are cut in "
        "segments, and planned from nothing. Errors are relative to the same program in float32, "
        "over all its results."
    )
    return f"{text}\n\n{table(_TITLES, rows)}\n\n{listed(notes)}"


def _cells(found: dict[str, Any]) -> list[str]:
    graphs = f"{found['graphs']} ({found['different_graphs']})" if "graphs" in found else ""
    graphs += f", {found['loops']} in loops" if found.get("loops") else ""
    segments = found.get("segments")
    cut = [
        graphs,
        f"{segments['cuDNN']} + {segments['XLA']}" if segments else "",
        f"{found['cold_planning_s']:g}" if "cold_planning_s" in found else "",
        _errors(found),
    ]
    if found["status"] != TIMED:
        return [found["status"], "", "", "", "", *cut]
    ms, ratios = found["ms"], found["over_ours"]
    return [
        spread(ms[OURS]),
        spread(ms[PLAIN]) if PLAIN in ms else "",
        *(
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**ratios[side]) if side in ratios else ""
            for side in (PLAIN, IN_XLA)
        ),
        pair(found.get("over_forward", {}), (OURS, PLAIN), "{:.2f}"),
        *cut,
    ]


def _errors(found: dict[str, Any]) -> str:
    if found.get("errors_against") not in (EXACT, PLAIN):
        return ""
    figures = {side: each["relative"] for side, each in found["errors"].items()}
    note = "" if found["errors_against"] == EXACT else " (against XLA)"
    return pair(figures, (OURS, PLAIN), "{:.2g}") + note
