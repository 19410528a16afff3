"""Support: the cuDNN plan or the reason for each graph and GPU; prints as a table."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The source of a GPU's description.
DEVICE, MEASURED, PUBLIC = "this machine's GPU", "measured profile", "public specifications"
_MARKS = {
    DEVICE: (" (here)", "(here): a GPU of this machine, planned with its own handle"),
    PUBLIC: ("*", "*: a profile from public specifications, not read on a device"),
}
_HEADER = ("graph", "GPU", "engine", "workspace", "candidates")


@dataclass(frozen=True)
class SupportRow:
    """Whether one graph has a plan on one GPU.

    Attributes:
        graph: the graph function's name.
        gpu: the GPU's name.
        basis: the source of the GPU's description: "this machine's GPU" (planned with its
            handle), "measured profile" or "public specifications".
        supported: whether there is a plan.
        engine, workspace_bytes, candidates: those of the plan, see :class:`ExecutionPlan`; None
            without a plan.
        reason: why there is no plan: the most specific of ``reasons``.
        reasons: pairs of an engine (or a step of planning) and its reason.
    """

    graph: str
    gpu: str
    basis: str
    supported: bool
    engine: str | None = None
    workspace_bytes: int | None = None
    candidates: int | None = None
    reason: str = ""
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Support:
    """The result of :func:`support`: true if every graph has a plan on every GPU.

    ``support["H200"]`` selects the rows of one GPU, ``support["H200", "conv_bias_relu"]`` one row;
    iteration yields the rows, graph by graph.

    Attributes:
        rows: one for each graph and GPU.
        cudnn, frontend: the versions that planned.
    """

    rows: tuple[SupportRow, ...]
    cudnn: str
    frontend: str

    def __bool__(self) -> bool:
        return all(row.supported for row in self.rows)

    def __iter__(self) -> Iterator[SupportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.gpu for row in self.rows))

    @property
    def graphs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.graph for row in self.rows))

    def __getitem__(self, key: str | tuple[str, str]) -> Any:
        gpu, graph = (key, None) if isinstance(key, str) else key
        rows = tuple(r for r in self.rows if r.gpu == gpu and graph in (None, r.graph))
        if not rows:
            raise KeyError(
                f"{key!r}: this table has the GPUs {', '.join(self.gpus)} "
                f"and the graphs {', '.join(self.graphs)}"
            )
        return dataclasses.replace(self, rows=rows) if graph is None else rows[0]

    def __str__(self) -> str:
        lines = [_HEADER, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, *self.notes()])

    def to_markdown(self) -> str:
        """The table in Markdown, with its notes as a list below."""
        lines = [_HEADER, ("---",) * len(_HEADER), *self._cells()]
        table = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([*table, "", *(f"- {note}" for note in self.notes())])

    def to_json(self) -> dict[str, Any]:
        """Everything as data for ``json.dumps``."""
        rows = [{**dataclasses.asdict(row), "reasons": dict(row.reasons)} for row in self.rows]
        return {"cudnn": self.cudnn, "nvidia-cudnn-frontend": self.frontend, "rows": rows}

    def notes(self) -> list[str]:
        """The meaning of the marks in the table, the reasons, and the library versions."""
        bases = {row.basis for row in self.rows}
        marks = [note for basis, (_, note) in _MARKS.items() if basis in bases]
        reasons = [f"[{i}]: {reason}" for i, reason in enumerate(self._reasons(), 1)]
        versions = f"planned by cuDNN {self.cudnn}, nvidia-cudnn-frontend {self.frontend}"
        return [*reasons, *marks, versions]

    def _reasons(self) -> list[str]:
        """The different reasons, in the order of the rows."""
        return list(dict.fromkeys(_one_line(row.reason) for row in self.rows if not row.supported))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        reasons = self._reasons()
        for row in self.rows:
            if row.supported:
                figures = str(row.engine), _bytes(row.workspace_bytes or 0), str(row.candidates)
            else:
                figures = f"none [{1 + reasons.index(_one_line(row.reason))}]", "", ""
            yield row.graph, marked(row), *figures


def marked(row: SupportRow) -> str:
    """The GPU's name with a mark for the source of its description."""
    return row.gpu + _MARKS.get(row.basis, ("",))[0]


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 240, placeholder=" ...")


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
