"""Default against plain JAX, as docs/benchmarks.md shows it between its ``auto`` marks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..case import FORWARD, STEP
from ..measure import TIMED, Entry
from ..tables import listed, table
from ..tables import where as measured_where

LEAST, MOST = 0.97, 1.04
"""A ratio below is a loss; above, XLA's form of a graph is slower than plain JAX."""
GOALS = {"ratio": 1.15, "xla": 1.01}
_TITLES = (
    "case",
    "default, us",
    "best plain JAX, us",
    "plain / default (runs)",
    "xla / plain",
    "plain / fastest of all",
    "default runs on",
)


class Line(NamedTuple):
    """One program of a case that was timed; ``counts``, if it is no half of another."""

    name: str
    family: str
    program: Entry
    counts: bool

    @property
    def on_xla(self) -> bool:
        return all(run.get("runs_on") == "XLA" for run in self.program["runs"])


def lines(result: Mapping[str, Any]) -> Iterator[Line]:
    for name, case in result["cases"].items():
        for program, found in case["programs"].items():
            if "ratio" in found:
                called = f"{name}, {program}" if len(case["programs"]) > 1 else name
                counts = STEP not in case["programs"] or program in (FORWARD, STEP)
                yield Line(called, case["family"], found, counts)


def runs_on(run: Entry, plan: Entry) -> str:
    """Who runs the default: by the calls in the compiled program, or where there is none by its
    plans; "" where no GPU says."""
    if "cuDNN" not in plan:
        return ""
    if not run.get("cudnn_calls", plan["cuDNN"]):
        return "XLA"
    return "cuDNN + XLA" if plan["XLA"] else "cuDNN"


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means over programs, and those that miss what is wanted."""
    found = [line for line in lines(result) if line.counts]
    ratios = {line.name: line.program["ratio"] for line in found}
    forms = {line.name: line.program["xla_ratio"] for line in found if "xla_ratio" in line.program}
    on_xla = {line.name: forms[line.name] for line in found if line.on_xla and line.name in forms}
    families = dict.fromkeys(line.family for line in found)
    states = {
        name: case["status"]
        for name, case in result["cases"].items()
        if case.get("status", TIMED) != TIMED
    }
    return {
        "programs": len(found),
        "geomean": geomean(ratios.values()),
        "families": {
            f: geomean(x.program["ratio"] for x in found if x.family == f) for f in families
        },
        "oracle": geomean(line.program["oracle"] for line in found),
        "faster": sum(ratio > 1 / LEAST for ratio in ratios.values()),
        "slower": {name: ratio for name, ratio in ratios.items() if ratio < LEAST},
        "xla": _forms(forms),
        "xla_where_default": _forms(on_xla),
        "not_timed": states,
    }


def _forms(ratios: Mapping[str, float]) -> dict[str, Any]:
    return {
        "programs": len(ratios),
        "geomean": geomean(ratios.values()),
        "max": max(ratios.values(), default=None),
        "above": {name: ratio for name, ratio in ratios.items() if ratio > MOST},
    }


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return round(math.exp(statistics.fmean(logs)), 4) if logs else None


def line(name: str, case: Entry) -> str:
    """What is said of a case while it runs."""
    found = case["programs"].items()
    shown = [f"{program} {_figure(each.get('ratio'))}" for program, each in found]
    return f"{name}: {case.get('status')} {', '.join(shown)} {case.get('reason', '')}"


def render(result: dict[str, Any]) -> str:
    """The summary, a table of all programs, and what was not timed or is wrong."""
    found, said = [*lines(result)], summary(result)
    counts = {len(line.program["runs"]) for line in found} or {0}
    runs = " to ".join(map(str, sorted({min(counts), max(counts)})))
    anew = "the first" if result.get("one_plan_cache") else "each"
    text = (
        f"{measured_where(result)}. {runs} runs of a case, each in a new process that compiles all "
        f"anew; the default is measured anew in {anew}. GPU time, sides in turns, medians of "
        "rounds, then of runs. Default is the call "
        'without `implementation=`; xla is `implementation="xla"`; plain JAX is the fastest of '
        "several formulations, with `jax.nn`'s cuDNN attention among them. The fastest of all is "
        "that of these and of the other implementations, in each run. Forward and backward is the "
        "sum of the halves by one side: what a forward does not keep, its backward computes again, "
        "so the halves are shown and do not count. Ratios above 1: jax_cudnn is faster."
    )
    parts = [text, listed(_said(said)), "<details markdown><summary>All programs</summary>"]
    for family in said["families"]:
        rows = [_row(line) for line in found if line.family == family]
        parts += [f"{family.capitalize()}:", table(_TITLES, rows)]
    notes = [*_notes(result)]
    return "\n\n".join([*parts, *([listed(notes)] if notes else []), "</details>"])


def _said(s: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"geometric mean of plain / default over {s['programs']} programs: {_figure(s['geomean'])} "
        f"(goal {GOALS['ratio']}); with the fastest of all sides: {_figure(s['oracle'])}"
    )
    yield "by family: " + ", ".join(f"{f} {_figure(x)}" for f, x in s["families"].items())
    slower = ", ".join(f"{name} {_figure(ratio)}" for name, ratio in s["slower"].items())
    ties = s["programs"] - s["faster"] - len(s["slower"])
    yield (
        f"{s['faster']} faster, {ties} equal within 3 %, {len(s['slower'])} below {LEAST}"
        + (f": {slower}" if slower else "")
    )
    for key, which in (("xla_where_default", "where the default runs on XLA"), ("xla", "all")):
        forms = s[key]
        above = ", ".join(f"{n} {_figure(x)}" for n, x in forms["above"].items())
        yield (
            f"xla / plain, {which} ({forms['programs']} programs): geometric mean "
            f"{_figure(forms['geomean'])} (goal {GOALS['xla']}), largest {_figure(forms['max'])}"
            + (f"; above {MOST}: {above}" if above and key == "xla_where_default" else "")
        )


def _row(line: Line) -> list[str]:
    program, runs = line.program, line.program["runs"]
    ratios = [run["ratio"] for run in runs if "ratio" in run]
    last = runs[-1]
    best = last.get("best_plain", "")
    on = dict.fromkeys(run.get("runs_on", "") for run in runs)
    return [
        line.name + ("" if program["status"] == TIMED else f" ({program['status']})"),
        _us(runs, "default"),
        f"{_us(runs, best)} {best}",
        f"{program['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        _figure(program.get("xla_ratio")),
        _figure(program.get("oracle")),
        " / ".join(filter(None, on)),
    ]


def _us(runs: Iterable[Entry], side: str) -> str:
    times = [run["us"][side] for run in runs if side in run.get("us", {})]
    return f"{statistics.median(times):.4g}" if times else ""


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What failed, and what was wrong and was not timed."""
    for name, case in result["cases"].items():
        if "reason" in case:
            yield f"{name}, {case['status']}: {case['reason']}"
        for program, found in case["programs"].items():
            wrong = {
                side: reason
                for run in found["runs"]
                for side, reason in run["not_run"].items()
                if reason.startswith("WRONG") or side == "default"
            }
            for side, reason in wrong.items():
                yield f"{name}, {program}: {side} was not timed: {reason[:200]}"
