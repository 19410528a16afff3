"""``python -m benchmarks auto``: runs of all cases, each in a process; results after each case.

XLA remembers within a process what it tuned, so each run is a process. A run that was cut goes on
where it was; a case in which a process ends is noted, and the others go on.
"""

from __future__ import annotations

import fnmatch
import gc
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jax_cudnn._core.cuda import device_nodes
from jax_cudnn._core.errors import GraphError, TargetError

from .. import ROOT, queued
from ..case import Case
from ..cases import convs, matmuls, streams
from ..cases.case import named
from ..measure import FAILED, LIMIT, TINY, Entry, configured, environment, told, worst
from . import tables
from .bench import DEFAULT, EFFORT, XLA, Bench

_GROUP = 6  # cases that are compiled together
_RESTARTS = 12
# In later runs a side is left out that took so many times as long as the fastest in the first run;
# "xla" is what others are held against.
_FAR, _FAR_XLA = 1.5, 3.0
_ENDED = "the process ended while this case was compiled or run"
_MEDIANS = ("ratio", "xla_ratio", "oracle")


class Task(NamedTuple):
    family: str
    name: str
    make: Callable[[], Case]


def tasks(tiny: bool = False) -> Iterator[Task]:
    """All cases with their families, in the order of the tables."""
    for family, module in (
        ("convolutions", convs),
        ("products", matmuls),
        ("reductions and pointwise", streams),
    ):
        for make in module.cases():
            case = make(tiny)
            yield Task(family, case.name, lambda case=case: named(case))
    for family, suite in (("normalizations", "norms"), ("attention", "attention")):
        module = importlib.import_module(f"..{suite}.cases", __package__)
        for case in module.cases(tiny):
            yield Task(family, case.name, lambda case=case: case)


def chosen(only: str | None, tiny: bool, part: str = "1/1") -> list[Task]:
    """Those whose names hold ``only``; of n parts the i-th, every n-th case."""
    found = [t for t in tasks(tiny) if only is None or fnmatch.fnmatchcase(t.name, f"*{only}*")]
    if not found:
        raise GraphError("no case has such a name", got=repr(only))
    try:
        i, n = map(int, part.split("/"))
        if not 1 <= i <= n:
            raise ValueError
    except ValueError:
        raise GraphError("not a part of the cases", expected="1/2 or 2/2", got=part) from None
    return found[i - 1 :: n]


def runs(
    path: Path, only: str | None, count: int, tiny: bool, part: str, plans: Path | None
) -> dict[str, Any]:
    """So many runs, with what an earlier call wrote into the file taken as done. Each has an empty
    plan cache, so that the default is measured anew; or all share ``plans``."""
    if not tiny and not device_nodes():
        raise TargetError(
            "measurements need an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix="run it on a machine with a GPU; --tiny runs the same with small shapes anywhere",
        )
    todo = chosen(only, tiny, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        with tempfile.TemporaryDirectory() as empty:
            folder = plans or Path(empty)
            if tiny:
                jax.clear_caches()
                one_run(path, todo, number, True, folder)
            else:
                _process(path, only, number, part, folder)
    result = json.loads(path.read_text()) | {"one_plan_cache": plans is not None}
    _write(path, result)
    return result


def _process(path: Path, only: str | None, number: int, part: str, folder: Path) -> None:
    """A run in a process, and in others where one ends in a case."""
    command = [sys.executable, "-m", "benchmarks", "auto", "--out", str(path.absolute())]
    command += ["--part", part, "--plans", str(folder), "--run", str(number)]
    command += ["--only", only] if only else []
    variables = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    for attempt in range(_RESTARTS):
        crashed = ["--crashed"] if attempt else []
        code = subprocess.run([*command, *crashed], cwd=ROOT, env=variables, check=False).returncode
        if code in (0, 1, 2):  # all were measured, or an error says what is wrong
            break
        print(f"the process of run {number + 1} ended with {code}", flush=True)
    if code:
        raise SystemExit(code)


def one_run(
    path: Path,
    todo: Sequence[Task],
    number: int,
    tiny: bool,
    plans: Path | None = None,
    crashed: bool = False,
    parts: int = 1,
) -> None:
    """One run in this process: groups of cases are lowered while nothing else runs, compiled by
    threads (``parts`` such processes share the machine), and measured when all are."""
    configured(tuning_seconds=LIMIT, **({} if plans is None else {"plan_cache": plans}))
    result = _begun(path)
    cases = result["cases"]
    todo = [t for t in todo if len(cases.get(t.name, {"seconds": ()})["seconds"]) <= number]
    suspects = [t for t in todo if crashed and t.name in result.get("under_way", ())]
    if len(suspects) == 1:
        _failed(cases, suspects[0], number, _ENDED)
        _write(path, result)
    alone = suspects if len(suspects) > 1 else []
    others = [t for t in todo if t not in suspects]
    groups = [[t] for t in alone]
    groups += [others[at : at + _GROUP] for at in range(0, len(others), _GROUP)]
    fillers = queued.Fillers.made()
    effort = TINY if tiny else EFFORT
    for group in groups:
        benches = _compiled(group, cases, effort, number, max(1, (os.cpu_count() or 1) // parts))
        result["under_way"] = [task.name for task in group]
        _write(path, result)
        for task in group:
            began, bench = time.perf_counter(), benches.pop(task.name)
            try:
                if isinstance(bench, Exception):
                    raise bench
                found = dict(bench.measured(fillers))
            except Exception as error:
                _failed(cases, task, number, told(error))
            else:
                _noted(cases, task, number, found, bench.case.what, time.perf_counter() - began)
            bench = None
            gc.collect()
            result["under_way"].remove(task.name)
            _write(path, result)
            print(f"run {number + 1}: {tables.line(task.name, cases[task.name])}", flush=True)


def _compiled(
    group: Sequence[Task], cases: Mapping[str, Entry], effort: Any, number: int, threads: int
) -> dict[str, Bench | Exception]:
    benches: dict[str, Bench | Exception] = {}
    for task in group:
        try:
            benches[task.name] = Bench(task.make(), effort, _skipped(cases.get(task.name), number))
        except Exception as error:
            benches[task.name] = error
    with ThreadPoolExecutor(threads) as pool:
        futures = [
            (name, bench, key, pool.submit(lowered.compile, options))
            for name, bench in benches.items()
            if isinstance(bench, Bench)
            for key, (lowered, options) in bench.lowered.items()
        ]
        for name, bench, key, future in futures:
            try:
                bench.compiled(key, future.result)
            except Exception as error:
                benches[name] = error
    return benches


def _skipped(entry: Entry | None, number: int) -> set[str]:
    """The sides that were far from the fastest in all programs of the first run, or did not run."""
    if not number or entry is None:
        return set()
    first = [program["runs"][0] for program in entry["programs"].values()]
    near = {DEFAULT}
    for run in first:
        us = run.get("us", {})
        fastest = min(us.values(), default=0.0)
        near |= {s for s, t in us.items() if t <= (_FAR_XLA if s == XLA else _FAR) * fastest}
    known = {side for run in first for side in (*run.get("us", ()), *run.get("not_run", ()))}
    return known - near


def _entry(cases: dict[str, Entry], task: Task) -> Entry:
    empty = {"family": task.family, "programs": {}, "seconds": []}
    return cases.setdefault(task.name, empty)


def _failed(cases: dict[str, Entry], task: Task, number: int, reason: str) -> None:
    """A case of which nothing was measured in this run."""
    entry = _entry(cases, task)
    entry["seconds"] += [0.0] * (number + 1 - len(entry["seconds"]))
    entry |= {"status": FAILED, "reason": reason}


def _noted(
    cases: dict[str, Entry],
    task: Task,
    number: int,
    found: Mapping[str, Entry],
    what: str,
    seconds: float,
) -> None:
    """Adds what a run found, and the medians over runs; plans are those of the last run."""
    entry = _entry(cases, task)
    entry["what"] = what
    entry["seconds"] += [0.0] * (number - len(entry["seconds"])) + [round(seconds, 1)]
    for name, run in found.items():
        program = entry["programs"].setdefault(name, {"runs": []})
        new = run.pop("plans")
        program["plans"] = {**program.get("plans", {}), **new}
        run["runs_on"] = tables.runs_on(run, new.get(DEFAULT, {}))
        program["runs"].append(run)
        program["status"] = worst({str(at): each for at, each in enumerate(program["runs"])})
        for figure in _MEDIANS:
            values = [each[figure] for each in program["runs"] if figure in each]
            if values:
                program[figure] = round(statistics.median(values), 4)
    entry["status"] = FAILED if entry.get("reason") else worst(entry["programs"])


def _begun(path: Path) -> dict[str, Any]:
    """What the file holds, of the same GPU and versions; or a new result."""
    where = environment()
    if not path.exists():
        return {"environment": where, "cases": {}}
    return _same(json.loads(path.read_text()), where, path)


def _same(result: dict[str, Any], where: Mapping[str, Any], path: Path) -> dict[str, Any]:
    theirs, ours = ({**r, "date": ""} for r in (result["environment"], where))
    if theirs != ours:
        raise GraphError(
            f"{path} is a result of another GPU or of other versions",
            expected=str(ours),
            got=str(theirs),
            fix="write into another file",
        )
    return result


def joined(files: Sequence[Path], path: Path) -> dict[str, Any]:
    """The cases of several parts in one result, in the order of all cases."""
    results = [json.loads(file.read_text()) for file in files]
    for file, result in zip(files, results, strict=True):
        _same(result, results[0]["environment"], file)
    found = {name: case for result in results for name, case in result["cases"].items()}
    order = [task.name for task in (*tasks(), *tasks(tiny=True)) if task.name in found]
    result = {**results[0], "cases": {name: found[name] for name in dict.fromkeys(order)}}
    _write(path, result)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    """In one step, so that a run that is cut leaves a whole file; figures by side in one line."""
    result["summary"] = tables.summary(result)
    held = {key: value for key, value in result.items() if key != "under_way" or value}
    text = json.dumps(held, indent=1)
    text = re.sub(r"\{[^{}\[\]]*\}|\[[^{}\[\]]*\]", lambda found: " ".join(found[0].split()), text)
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)
