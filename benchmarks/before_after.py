"""Two commits measured on one machine in one go: puts their results together.

    python -m benchmarks.before_after BEFORE AFTER --into FILE

Each folder is named by its commit. It holds what ``python -m benchmarks run`` wrote, and
``host.jsonl``: a line of ``python -m benchmarks.host`` for each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tables import table


def medians(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """What was timed: our median and that of plain JAX, in the same unit."""
    lines = [json.loads(line) for line in (folder / "host.jsonl").read_text().splitlines()]
    chains = [line["chain_us_per_convolution"] for line in lines]
    sides = ("ours", "xla")
    yield (
        "a convolution in a chain, us",
        [statistics.median(chain[side]["median"] for chain in chains) for side in sides],
    )
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        for name, step in result.get("steps", {}).items():
            us = step["programs"]["forward and backward"]["us"]
            yield f"{name}, ms", [us[side]["median"] / 1e3 for side in ("jax_cudnn", "XLA")]
        for name, model in result.get("flax", {}).items():
            ms = [model["sides"][side]["ms"]["median"] for side in ("accelerate", "Flax")]
            yield f"{name}, ms", ms


def render(result: dict[str, Any]) -> str:
    """Our times, with those of plain JAX over ours in the same run."""
    commits = list(result["medians"])
    rows = [
        [what, *(f"{ours:.3g} ({plain / ours:.2f})" for ours, plain in found)]
        for what, found in zip(
            result["medians"][commits[0]],
            zip(*(result["medians"][commit].values() for commit in commits), strict=True),
            strict=True,
        )
    ]
    return table(
        ["", *(f"{when} ({c})" for when, c in zip(("before", "after"), commits, strict=True))], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    first = next(given.before.glob("*.json"))
    result = {
        "environment": json.loads(first.read_text())["environment"],
        "medians": {folder.name: dict(medians(folder)) for folder in (given.before, given.after)},
    }
    given.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
