"""Test runs on GPUs, as data for docs/testing.md.

    pytest -m gpu --junitxml tests.xml
    python -m benchmarks.tested tests.xml --into benchmarks/results/tested_cuda12.json --commit HEAD

Runs of random cases (``python -m fuzz ... --json``) are committed as they are written.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .measure import environment
from .tables import table

RUNS = (
    "tested_four_gpus",
    "tested_two_gpus",
    "tested_in_a_job",
    "tested_steps_in_a_job",
    "tested_h100",
    "tested_cuda13",
    "tested_cuda12",
)
RANDOM = ("programs_h200", "graphs_h200", "calls_h200")
_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def counted(junit: Path) -> dict[str, dict[str, int]]:
    """Tests that passed, failed and were skipped, by module."""
    counts: dict[str, Counter[str]] = {}
    for test in ElementTree.parse(junit).getroot().iter("testcase"):
        outcome = next((_OUTCOMES[child.tag] for child in test if child.tag in _OUTCOMES), "passed")
        counts.setdefault(test.attrib["classname"], Counter())[outcome] += 1
    return {module: dict(count) for module, count in sorted(counts.items())}


def render(results: Path) -> str:
    """The tables of docs/testing.md: runs of tests, and of random cases."""
    runs, cases = (
        [json.loads((results / f"{name}.json").read_text()) for name in names]
        for names in (RUNS, RANDOM)
    )
    tests = table(["GPU, libraries", "when", "tests", "note"], map(_run, runs))
    titles = ["kind", "GPU, libraries", "seeds", "commits", "transformations", "right", "refused"]
    titles += ["wrong", "crashed", "fixed since"]
    return f"{tests}\n\n{table(titles, map(_random, cases))}"


def _run(run: dict[str, Any]) -> list[str]:
    where, total = run["environment"], sum(map(Counter, run["tests"].values()), Counter())
    cuda, driver = where["platform"].removeprefix("cuda ")[:2], where["driver"]
    return [
        f"{where['device']}, driver {driver}, CUDA {cuda}, cuDNN {where['cudnn']}, "
        f"jax {where['jax']}, nvidia-cudnn-frontend {where['nvidia-cudnn-frontend']}",
        f"{where['date']}, {run['commit']}",
        f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped",
        run["note"],
    ]


def _random(found: dict[str, Any]) -> list[str]:
    run, counts = found["runs"][-1], found["counts"]
    names = ("jax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
    versions = ", ".join(f"{n} {run['versions'][n]}" for n in names if n in run["versions"])
    commits = ", ".join(dict.fromkeys(run["commit"] for run in found["runs"]))
    numbers = [counts[kind] for kind in ("right", "refused", "wrong", "crashed")]
    more = found.get("transformations", ""), *numbers, len(found.get("fixed", []))
    seeds = {seed for run in found["runs"] for ends in run["seeds"] for seed in range(*ends)}
    which = f"{len(seeds)} from {min(seeds)} to {max(seeds)}"
    return [found["what"], f"{run['gpu']}, {versions}", which, commits, *map(str, more)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tested", description=__doc__)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--note", default="", help="what was left out, and why")
    given = parser.parse_args()
    run = {"environment": environment(), "commit": given.commit, "note": given.note}
    text = json.dumps(run | {"tests": counted(given.junit)}, indent=1) + "\n"
    given.into.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
