"""The table of docs/operations.md: each operation's examples, planned for each GPU."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cases import Case, node_cases  # tests/cases.py

from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.plans.support import PUBLIC, Support, SupportRow, shipped, survey

Line = tuple[str, ...]

_WORKERS = 4  # at most: a worker takes some 400 MB


def render(cases: Iterable[Case] | None = None) -> str:
    """The table as Markdown, planned now for all profiles. Deterministic for given versions."""
    cases = tuple(node_cases() if cases is None else cases)
    planned = [c for c in cases if c.planned and not _in_xla(_method(c.name))]
    graphs = {c.name: c.function.trace(*c.avals)[1].spec for c in planned}
    others = {_method(c.name) for c in cases} - {_method(name) for name in graphs}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return table(
        survey(dict.fromkeys(shipped(), graphs), shipped(), workers=min(cpus, _WORKERS)), others
    )


_FAMILIES = {
    "convolution": "convolutions and their gradients",
    "matmul": "matrix products",
    "block_scaling": "block scaling",
    "attention.nodes": "attention",
    "attention.fp8": "attention in float8",
    "attention.mxfp8": "attention in MXFP8",
    "normalization": "normalizations",
    "reduction": "reductions",
    "genstats": "batch statistics",
    "movement": "data movement",
    "slicing": "data movement",
    "pooling": "pooling",
}
"""By an operation, its module in ``jax_cudnn.ops`` or its folder; all others are pointwise."""
_ALONE = "in some graphs"


def table(support: Support, others: Iterable[str] = ()) -> str:
    """A line for each family, and folded one for each operation: how many of its examples have a
    plan on each GPU, and why the rest have none. ``others`` have no engine alone: cuDNN runs them
    together with other operations, if at all, or XLA does."""
    public = [gpu for gpu in support.gpus if support[gpu].rows[0].basis == PUBLIC]
    lines = {line[0].strip("`"): line for line in _lines(support)}
    lines |= {method: _other(method, support.gpus) for method in others}
    head = ("operation", *support.gpus, "where not, why")
    text = (
        f"Planned without a GPU by cuDNN {support.cudnn}, nvidia-cudnn-frontend {support.frontend}."
    )
    if public:
        text += f" The profiles of {', '.join(public)} come from public specifications, not from a "
        text += "device."
    text += ' "8 of 9": of nine example graphs, eight have a plan. "all 2": both have one.'
    return "\n".join(
        [
            text,
            "",
            *_rows(("family", *support.gpus, "exceptions"), _families(lines, support.gpus)),
            "",
            "<details markdown><summary>Each operation: how many of its examples have a plan, and "
            "why the others do not</summary>",
            "",
            *_rows(head, (lines[method] for method in sorted(lines))),
            "",
            "</details>",
        ]
    )


def _rows(head: Line, rows: Iterable[Line]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def _families(lines: dict[str, Line], gpus: Sequence[str]) -> Iterator[Line]:
    """For each family and GPU what most of its operations say; the others are exceptions."""
    members: dict[str, list[str]] = {family: [] for family in (*_FAMILIES.values(), "pointwise")}
    for method in sorted(lines):
        module = registry()[method].__module__.removeprefix("jax_cudnn.ops.")
        known = (_FAMILIES.get(x) for x in (method, module, module.partition(".")[0]))
        members[next(filter(None, known), "pointwise")].append(method)
    for family, methods in members.items():
        if not methods:
            continue
        columns = zip(*([_short(cell) for cell in lines[m][1:-1]] for m in methods), strict=True)
        usual = [Counter(column).most_common(1)[0][0] for column in columns]
        yield family, *usual, "; ".join(_exceptions(methods, usual, lines, gpus))


def _exceptions(
    methods: Sequence[str], usual: Sequence[str], lines: dict[str, Line], gpus: Sequence[str]
) -> Iterator[str]:
    named: dict[str, list[str]] = {}
    for method in methods:
        cells = [_short(cell) for cell in lines[method][1:-1]]
        other = {g: c for g, c, of_most in zip(gpus, cells, usual, strict=True) if c != of_most}
        for cell in dict.fromkeys(other.values()):
            where = [gpu for gpu in other if other[gpu] == cell]
            on = f" on {', '.join(where)}" if len(where) < len(gpus) else ""
            named.setdefault(f"{on}: {cell}", []).append(f"`{method}`")
    for how, which in named.items():
        yield f"{', '.join(which)}{how}"


def _short(cell: str) -> str:
    return {"all": "yes", "none": "no"}.get(cell.split()[0], cell)


def _other(method: str, gpus: Sequence[str]) -> Line:
    requires = registry()[method].about.requires
    newest = re.search(r"\bSM (\d+)", requires)
    cells = [
        "XLA"
        if _in_xla(method)
        else "no"
        if newest and profiles.get(gpu).sm_version < int(newest[1])
        else _ALONE
        for gpu in gpus
    ]
    return f"`{method}`", *cells, _words(requires)


def _in_xla(method: str) -> bool:
    return method in registry() and bool(registry()[method].xla_only)


def _lines(support: Support) -> Iterator[Line]:
    rows: dict[str, dict[str, list[SupportRow]]] = {}
    for row in support:
        by_gpu = rows.setdefault(_method(row.graph), {gpu: [] for gpu in support.gpus})
        by_gpu[row.gpu].append(row)
    for method, by_gpu in rows.items():
        yield f"`{method}`", *map(_count, by_gpu.values()), _reasons(by_gpu)


def _method(case_name: str) -> str:
    """The operation that a case of ``node_cases`` shows: its name starts with the method's."""
    methods = (method for method in registry() if case_name.startswith(f"{method}_"))
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
