"""A plan of a Graph that lacks the values of some scalars in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .._core.plans.plan import Plan


@dataclass(frozen=True)
class NumberlessPlan(Plan):
    """A plan that can be inspected but not run, because some scalars have no value.

    cuDNN's engines, candidates and workspace do not depend on the values; results do.

    Attributes:
        lacking: names of the scalar inputs without a value.
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
            f"{self.name}: cannot {what} a plan without the values of its scalars",
            expected=f"values for {', '.join(self.lacking)}",
            got="none",
            why="a scalar in host memory is a constant of cuDNN's plan",
            fix=f"graph.plan(numbers={{{self.lacking[0]!r}: ...}})",
            where=user_line(),
        )
