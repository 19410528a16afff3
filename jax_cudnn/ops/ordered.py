"""A deterministic algorithm for the backwards of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._core.graph.node import Node, frozen


@frozen
class Ordered(Node):
    """A backward with a fixed order of summation if requested. The engines' notes do not report
    determinism here, so options alone cannot exclude the others."""

    use_deterministic_algorithm: bool = False

    @property
    def deterministic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.use_deterministic_algorithm

    def settled(self) -> Node:
        return dataclasses.replace(self, use_deterministic_algorithm=True)

    def keywords(self) -> dict[str, Any]:
        """Without unset flags, some of which older frontends do not know."""
        attributes = super().keywords()
        return {name: value for name, value in attributes.items() if value is not False}
