"""The table of what cuDNN and XLA take for graphs: ``python -m benchmarks losses``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.user_context import CUDNN, XLA

Row = tuple[str, int, int, float, str]


def rows(result: dict[str, Any]) -> Iterator[Row]:
    """Of each program that "cudnn" runs as one plan: its pattern, flops and bytes, XLA's time over
    cuDNN's (the median over runs), and its name. None where the host may be in cuDNN's time, or
    only an engine supports it that is known to be slow: there XLA runs it, whatever its size."""
    for name, case in result["cases"].items():
        for program, found in case["programs"].items():
            plan = found["plans"].get(CUDNN, {})
            segments = plan.get("segments", ())
            ratios = [
                run["us"][XLA] / run["us"][CUDNN]
                for run in found["runs"]
                if {XLA, CUDNN} <= run.get("us", {}).keys() and CUDNN not in run["host"]
            ]
            alone = len(segments) == 1 and not plan.get("XLA") and ratios
            if alone and not _is_slow(segments[0][0], plan.get("engines", [""])[0]):
                called = f"{name}, {program}" if len(case["programs"]) > 1 else name
                yield (*segments[0], round(statistics.median(ratios), 4), called)


def _is_slow(pattern: str, engine: str) -> bool:
    node = registry().get(pattern.split()[0])
    slow = () if node is None else node.anchor.slow
    return engine.partition("_")[0] in [f"eng{n}" for n in slow]


def merged(results: Sequence[dict[str, Any]], file: Path) -> str:
    """The text of a table with what results of ``auto`` give in it, beside other architectures'
    parts; GraphError where two results are of one architecture."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    seen: dict[str, str] = {}
    for result in results:
        environment = result["environment"]
        number = str(environment["sm_version"])
        if number in seen:
            raise GraphError(
                f"two results are of architecture {number}",
                expected="one result for each",
                got=f"{seen[number]} and {environment['device']}",
                fix="name the one that counts: python -m benchmarks losses FILE",
            )
        seen[number] = environment["device"]
        patterns: dict[str, list[Any]] = {}
        for pattern, *figures in sorted(rows(result)):
            patterns.setdefault(pattern, []).append(figures)
        where = {key: environment[key] for key in ("device", "date", "cudnn", "jax")}
        table[number] = {**where, "patterns": patterns}
    return _json(dict(sorted(table.items(), key=lambda part: int(part[0]))))


def _json(table: dict[str, Any]) -> str:
    """With a row a line, so that a difference is read."""
    parts = []
    for number, part in table.items():
        head = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items() if k != "patterns"]
        of = [
            f"   {json.dumps(pattern)}: [\n"
            + ",\n".join(f"    {json.dumps(row)}" for row in found)
            + "\n   ]"
            for pattern, found in part["patterns"].items()
        ]
        held = '  "patterns": {\n' + ",\n".join(of) + "\n  }"
        parts.append(f" {json.dumps(number)}: {{\n" + ",\n".join([*head, held]) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
