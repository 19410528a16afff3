"""Candidates: the plans that cuDNN's heuristics propose for a graph, with their properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ..graph.options import HEURISTICS

_SUPPORTED = {True: "yes", False: "no", None: "not tried"}


class Numbers(dict[str, int]):
    """Integers by name, which nothing changes: it can be hashed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Candidate:
    """One of the plans that cuDNN proposes for a graph.

    Attributes:
        index: its position among :class:`Candidates`.
        engine: the index of the engine in cuDNN.
        name: the engine with its knobs, as cuDNN writes them.
        knobs: the values of its knobs by name.
        modes: the modes of cuDNN's heuristics that propose it, with its rank in each (0 is first).
        numeric_notes, behavior_notes: cuDNN's notes on it: "TENSOR_CORE", "NONDETERMINISTIC",
            "RUNTIME_COMPILATION", "SUPPORTS_CUDA_GRAPH_NATIVE_API", ...
        workspace_bytes: device memory in use while it runs, as far as cuDNN reports it before
            building; else None.
        supported: whether it can be selected; None if not known before it is built.
        reason: why it cannot be selected.
        seconds: device time, if :meth:`jax_cudnn.Plan.time_candidates` measured it.
    """

    index: int
    engine: int
    name: str
    knobs: Mapping[str, int]
    modes: Mapping[str, int]
    numeric_notes: tuple[str, ...] = ()
    behavior_notes: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    supported: bool | None = None
    reason: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("knobs", "modes"):
            object.__setattr__(self, name, Numbers(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """All attributes as data for ``json.dumps``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Candidates(Sequence[Candidate]):
    """The plans that cuDNN proposes for a graph on a GPU, starting with those of the plan's own
    heuristics in the order in which they are tried; prints as a table.

    Attributes:
        rows: the candidates.
        gpu: the GPU's name.
        chosen: the index of the plan's own candidate; None if it is not among them.
    """

    rows: tuple[Candidate, ...]
    gpu: str
    chosen: int | None = None
    _try: Callable[[Candidate], Candidate] = field(
        default=lambda row: row, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self.rows[index]

    def built(self) -> Candidates:
        """The same candidates with ``supported`` True or False: builds those not tried before.

        Building takes about a millisecond for kernels that ship with cuDNN, and 0.2 to 1 s for
        those that are compiled (behaviour note RUNTIME_COMPILATION). Built plans stay in memory
        and in the plan cache: ``select`` and ``time_candidates`` do not build them again.
        """
        return self.replaced(map(self._try, self.rows))

    def replaced(self, rows: Iterator[Candidate]) -> Candidates:
        """A copy with other rows."""
        return dataclasses.replace(self, rows=tuple(rows))

    def to_json(self) -> list[dict[str, Any]]:
        """Everything as data for ``json.dumps``."""
        return [row.to_json() for row in self.rows]

    def __str__(self) -> str:
        timed = any(row.seconds is not None for row in self.rows)
        header = ("", "engine", *HEURISTICS, "workspace", "supported", *["us"] * timed, "notes")
        lines = [header, *(self._cells(row, timed) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        said = f"*: the plan's own; {', '.join(HEURISTICS)}: rank in each mode of the heuristics"
        return "\n".join([f"{len(self)} candidates on {self.gpu}", *table, said])

    def _cells(self, row: Candidate, timed: bool) -> tuple[str, ...]:
        notes = ", ".join((*row.numeric_notes, *row.behavior_notes))
        time = "" if row.seconds is None else f"{row.seconds * 1e6:.1f}"
        return (
            f"{row.index}{'*' if row.index == self.chosen else ''}",
            row.name,
            *(str(row.modes.get(mode, "")) for mode in HEURISTICS),
            "" if row.workspace_bytes is None else str(row.workspace_bytes),
            _SUPPORTED[row.supported],
            *[time] * timed,
            row.reason or notes,
        )
