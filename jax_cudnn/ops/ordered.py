"""What the backwards of attention have in common: an algorithm whose sums have one order."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._core.graph.node import Node, frozen


@frozen
class Ordered(Node):
    """A backward whose sums have one order where that is asked for. cuDNN's engines say nothing of
    it in their notes, so that options alone would leave none of them out."""

    use_deterministic_algorithm: bool = False

    @property
    def deterministic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.use_deterministic_algorithm

    def settled(self) -> Node:
        return dataclasses.replace(self, use_deterministic_algorithm=True)

    def keywords(self) -> dict[str, Any]:
        """Without flags that are not set, which older frontends do not all know."""
        attributes = super().keywords()
        return {name: value for name, value in attributes.items() if value is not False}
