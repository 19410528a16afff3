"""The table of docs/operations.md: each operation's examples, planned for each GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from cases import Case, node_cases  # tests/cases.py

from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning.support import shipped, survey
from jax_cudnn._core.planning.support_value import PUBLIC, Support, SupportRow

_WORKERS = 4  # at most: a worker takes some 400 MB


def render(cases: Iterable[Case] | None = None) -> str:
    """The table as Markdown, planned now for all profiles. Deterministic for given versions."""
    cases = tuple(node_cases() if cases is None else cases)
    planned = [c for c in cases if c.planned and not _in_xla(_method(c.name))]
    graphs = {c.name: c.function.trace(*c.avals)[1].spec for c in planned}
    others = {_method(c.name) for c in cases} - {_method(name) for name in graphs}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return table(survey(graphs, shipped(), workers=min(cpus, _WORKERS)), others)


def table(support: Support, others: Iterable[str] = ()) -> str:
    """One line an operation, one column a GPU: how many of its examples have a plan, and why
    the rest have none. ``others`` have no engine by themselves: cuDNN runs them beside others, if
    at all, or XLA does."""
    public = [gpu for gpu in support.gpus if support[gpu].rows[0].basis == PUBLIC]
    lines = [*_lines(support), *(_other(method, len(support.gpus)) for method in others)]
    head = ("operation", *support.gpus, "where not, why")
    text = (
        "How many of an operation's examples have a plan, each planned without a GPU by cuDNN "
        f"{support.cudnn}, nvidia-cudnn-frontend {support.frontend}."
    )
    if public:
        text += f" The profiles of {', '.join(public)} are from public specifications, not read "
        text += "on a device."
    rows = [head, ("---",) * len(head), *sorted(lines, key=lambda line: line[0].strip("`"))]
    return "\n".join([text, "", *(f"| {' | '.join(row)} |" for row in rows)])


def _other(method: str, gpus: int) -> tuple[str, ...]:
    where = "XLA" if _in_xla(method) else "not alone"
    return f"`{method}`", *(where,) * gpus, _words(REGISTRY[method].requires)


def _in_xla(method: str) -> bool:
    return method in REGISTRY and REGISTRY[method].leftover


def _lines(support: Support) -> Iterator[tuple[str, ...]]:
    rows: dict[str, dict[str, list[SupportRow]]] = {}
    for row in support:
        by_gpu = rows.setdefault(_method(row.graph), {gpu: [] for gpu in support.gpus})
        by_gpu[row.gpu].append(row)
    for method, by_gpu in rows.items():
        yield f"`{method}`", *map(_count, by_gpu.values()), _reasons(by_gpu)


def _method(case_name: str) -> str:
    """The operation that a case of ``node_cases`` shows: its name starts with the method's."""
    methods = (method for method in REGISTRY if case_name.startswith(f"{method}_"))
    return max(methods, key=len, default=case_name)


def _count(rows: list[SupportRow]) -> str:
    supported = sum(row.supported for row in rows)
    if supported == len(rows):
        return f"all {supported}"
    return f"{supported} of {len(rows)}" if supported else "none"


def _reasons(by_gpu: dict[str, list[SupportRow]]) -> str:
    """Each reason once with the GPUs it holds for, without cuDNN's own text in parentheses."""
    gpus: dict[str, list[str]] = {}
    for gpu, rows in by_gpu.items():
        for row in rows:
            listed = gpus.setdefault(_words(row.reason), [])
            if not row.supported and gpu not in listed:
                listed.append(gpu)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in gpus.items() if names)


def _words(reason: str) -> str:
    short = " ".join(reason.partition(" (")[0].split()).replace("|", "\\|")
    return short if len(short) <= 120 else short[:117] + "..."
