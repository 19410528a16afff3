"""``python -m benchmarks tuning``: what tuning costs, by graph and at the start of a training.

Each figure is of a new process. The first finds an empty plan cache, the second what the first left
there. XLA's compilation cache is off.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from . import ROOT
from .measure import LIMIT, Entry, configured, environment, told
from .tables import listed, table, where

FAST, OFF = "fast", "off"
_MODELS = ("resnet50/batch-256", "gpt2-124m/32x1024")
_TINY = ("resnet/tiny", "gpt2/tiny")
_STARTS = ("first", "second")


def run(path: Path, only: str | None, tiny: bool) -> dict[str, Any]:
    """All figures, written after each process."""
    result: dict[str, Any] = {"environment": None, "graphs": {}, "starts": {}}

    def keep() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")

    for tuning in (FAST, OFF):
        for start, found in _processes("graphs", tuning, only or "*", tiny, keep):
            result["environment"] = found.pop("environment", None) or result["environment"]
            for name, seconds in found.get("seconds", {}).items():
                result["graphs"].setdefault(name, {}).setdefault(tuning, {})[start] = seconds
            if "reason" in found:
                result.setdefault("not_run", {})[f"graphs, {tuning}, {start}"] = found["reason"]
    for name in _TINY if tiny else _MODELS:
        if only is None or fnmatch.fnmatchcase(name, f"*{only}*"):
            for tuning in (FAST, OFF):
                for start, found in _processes("model", tuning, name, tiny, keep):
                    entry = result["starts"].setdefault(name, {}).setdefault(tuning, {})
                    entry[start] = found
    result["lowering"] = _process(["lowering"], {"JAX_PLATFORMS": "cpu"})
    keep()
    print(render(result))
    print(f"written to {path}")
    return result


def _processes(
    what: str, tuning: str, name: str, tiny: bool, keep: Any
) -> Iterator[tuple[str, Entry]]:
    """The first and the second start, on a plan cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        for start in _STARTS:
            more = ["--tiny"] if tiny else []
            variables = {"JAX_CUDNN_TUNING": tuning}
            yield start, _process([what, folder, tuning, name, *more], variables)
            keep()


def _process(arguments: list[str], variables: Mapping[str, str]) -> Entry:
    """What this module prints when it is called with these arguments, or why it prints nothing."""
    command = [sys.executable, "-m", "benchmarks.tuning", *arguments]
    told_to = {**os.environ, **variables, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=told_to, stdout=subprocess.PIPE, text=True, check=False
    )
    took = round(time.perf_counter() - began, 1)
    if done.returncode:
        return {"reason": f"the process ended with {done.returncode}", "process_s": took}
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": took}


# -- what the processes measure --------------------------------------------------------------------


def _graphs(pattern: str, tiny: bool) -> Entry:
    """Seconds to lower each graph of a real model by default: what is measured of it, plans."""
    from .cases.cases import cases

    seconds = {}
    for case in cases(tiny):
        if fnmatch.fnmatchcase(case.name, f"*{pattern}*"):
            function = getattr(case.ours, "function", case.ours)
            prepare = getattr(case.ours, "prepare", None)
            avals = jax.eval_shape(prepare, *case.avals) if prepare else case.avals
            began = time.perf_counter()
            jax.jit(function).lower(*avals)
            seconds[case.name] = round(time.perf_counter() - began, 3)
    return {"seconds": seconds, "environment": environment()}


def _model(name: str, tiny: bool) -> Entry:
    """Seconds from a model to the end of its first step: to lower it, compile it and run it."""
    from .flax.cases import cases
    from .flax.measure import started

    (case,) = (case for case in cases(tiny) if case.name == name)
    return started(case)


def _call(arguments: list[str]) -> Entry:
    what, *rest = arguments
    if what == "lowering":
        from . import planning

        return planning.lowering()
    folder, tuning, name, *more = rest
    known = configured(plan_cache=folder, tuning=tuning, tuning_seconds=LIMIT)
    try:
        found = (_graphs if what == "graphs" else _model)(name, bool(more))
    except Exception as error:
        return {"reason": told(error)}
    return {**found, "tuning": tuning if known else "not available"}


# -- shown -----------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    rows = []
    for tuning, start in itertools.product((FAST, OFF), _STARTS):
        values = [g[tuning][start] for g in result["graphs"].values() if _has(g, tuning, start)]
        if values:
            what = f"{len(values)} graphs, tuning {tuning}, {start} process"
            rows.append((what, *_of(values)))
    starts = [
        (f"{name}, tuning {tuning}, {start} start", *_start(found[tuning][start]))
        for name, found in result["starts"].items()
        for tuning, start in itertools.product((FAST, OFF), _STARTS)
        if _has(found, tuning, start)
    ]
    text = f"{where(result)}. Each line is a new process; XLA's compilation cache is off."
    parts = [
        text,
        table(("seconds to lower a graph", "mean", "median", "largest", "all"), rows),
        table(("training program", "lower, s", "compile, s", "first step, s", "all, s"), starts),
    ]
    notes = [f"{what}: {reason}" for what, reason in result.get("not_run", {}).items()]
    if "seconds" in result.get("lowering", {}):
        found = result["lowering"]
        notes.append(
            "lowering of a training step of a transformer of two layers without a GPU (for "
            f"{found['gpu']}, {found['cpus']} CPU cores): {found['seconds']:g} s with an empty "
            f"plan cache, {found['again']:g} s with the one that this left (goal 5 s)"
        )
    return "\n\n".join([*parts, listed(notes)] if notes else parts)


def _has(found: Mapping[str, Any], tuning: str, start: str) -> bool:
    return start in found.get(tuning, {})


def _of(values: list[float]) -> tuple[str, ...]:
    figures = statistics.fmean(values), statistics.median(values), max(values), sum(values)
    return tuple(f"{figure:.3g}" for figure in figures)


def _start(found: Entry) -> tuple[str, ...]:
    if "reason" in found:
        return found["reason"][:200], "", "", ""
    parts = [found[key] for key in ("lower_s", "compile_s", "step_s")]
    return tuple(f"{part:.1f}" for part in (*parts, sum(parts)))


if __name__ == "__main__":
    print(json.dumps(_call(sys.argv[1:])))
