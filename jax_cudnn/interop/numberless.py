"""A plan of a Graph whose numbers in the host's memory are not all known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .._core.planning.plan import Plan


@dataclass(frozen=True)
class NumberlessPlan(Plan):
    """A plan that says how a graph runs, and does not run: it lacks numbers.

    cuDNN's engines, candidates and workspace do not depend on them; what is computed does.

    Attributes:
        lacking: the inputs that are numbers and were given none, by name.
    """

    lacking: tuple[str, ...] = ()

    def execute(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("execute")

    def populate_cuda_graph(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("populate_cuda_graph")

    def update_cuda_graph(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("update_cuda_graph")

    def serialize(self) -> NoReturn:
        self._refuse("serialize")

    def to_json(self) -> NoReturn:
        self._refuse("to_json")

    def _refuse(self, what: str) -> NoReturn:
        raise GraphError(
            f"{self.name}: {what} of a plan without its numbers",
            expected=f"numbers for {', '.join(self.lacking)}",
            got="none",
            why="a number in the host's memory is a constant of cuDNN's plan",
            fix=f"graph.plan(numbers={{{self.lacking[0]!r}: ...}})",
            where=user_line(),
        )
