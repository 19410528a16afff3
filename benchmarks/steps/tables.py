"""Training steps as docs/benchmarks.md shows them between its ``steps`` marks."""

from __future__ import annotations

from typing import Any

from ..case import OURS, REFERENCE
from ..measure import TIMED
from ..tables import listed, medians, pair, spread, table, where
from .cases import PLAIN

_TITLES = (
    "step",
    "program",
    "jax_cudnn, ms",
    "XLA's default, ms",
    "XLA / jax_cudnn",
    "the same graphs in XLA / jax_cudnn",
    "times the forward: jax_cudnn, XLA",
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
        first = medians(next(iter(entry["programs"].values()), {}))
        for program, found in entry["programs"].items():
            ms = medians(found)
            over = (
                {s: round(ms[s] / first[s], 3) for s in ms.keys() & first.keys()}
                if ms != first
                else {}
            )
            rows.append([name, program, *_cells(found, over)])
            if "reason" in found and found["status"] != TIMED:
                notes.append(f"{name}, {program}, {found['status']}: {found['reason']}")
            for side, reason in found.get("not_run", {}).items():
                if reason != found.get("reason"):
                    notes.append(f"{name}, {program}, {side} did not run: {reason}")
    text = (
        f"{where(result)}. Median (minimum to maximum) of rounds in which the programs take turns; "
        "bfloat16, random data. Ratios are medians over rounds. Planning starts with empty "
        "caches. Errors are relative to the same program in float32, over all its results."
    )
    return f"{text}\n\n{table(_TITLES, rows)}\n\n{listed(notes)}"


def _cells(found: dict[str, Any], over: dict[str, float]) -> list[str]:
    """``over``: how much longer than the forward a side takes."""
    plans = found.get("plans", {}).get(OURS, {})
    graphs = f"{plans['graphs']} ({found['different_graphs']})" if "graphs" in plans else ""
    graphs += f", {found['loops']} in loops" if found.get("loops") else ""
    errors = {side: each["relative"] for side, each in found.get("errors", {}).items()}
    cut = [
        graphs,
        f"{plans['cuDNN']} + {plans['XLA']}" if "cuDNN" in plans else "",
        f"{found['cold_planning_s']:g}" if "cold_planning_s" in found else "",
        pair(errors, (OURS, PLAIN), "{:.2g}"),
    ]
    if found["status"] != TIMED:
        return [found["status"], "", "", "", "", *cut]
    ratios = found["over_ours"]
    ms = {
        s: {k: round(v / 1e3, 3) for k, v in figures.items()} for s, figures in found["us"].items()
    }
    return [
        spread(ms[OURS]),
        spread(ms[PLAIN]) if PLAIN in ms else "",
        *(
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**ratios[side]) if side in ratios else ""
            for side in (PLAIN, REFERENCE)
        ),
        pair(over, (OURS, PLAIN), "{:.2f}"),
        *cut,
    ]
