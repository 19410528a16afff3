"""Why cuDNN does not run a graph: values of a kind, by which they are ranked and advised on."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a reason is about, from the most telling kind to the least."""

    RULE = enum.auto()  # of this package; cuDNN was not asked
    BROADCAST = enum.auto()  # a rule, too
    REQUIREMENT = enum.auto()  # of a node for some of its operands
    WORKSPACE = enum.auto()
    OPTIONS = enum.auto()
    ENGINE = enum.auto()  # wrong, or of the Python frontend
    COMPILATION = enum.auto()
    ANCHORS = enum.auto()
    FACTORS = enum.auto()
    CHANNEL = enum.auto()
    NUMBER = enum.auto()
    TENSOR_CORES = enum.auto()
    LAYOUT = enum.auto()
    DTYPE = enum.auto()
    REDUCED = enum.auto()
    REDUCTION = enum.auto()
    PATTERN = enum.auto()
    SHAPE = enum.auto()
    OTHER = enum.auto()
    ARCHITECTURE = enum.auto()  # engines of other GPUs


@dataclass(frozen=True)
class Reason:
    """Why cuDNN, or one of its engines, does not run a graph."""

    text: str
    kind: Kind = Kind.RULE

    def __str__(self) -> str:
        return self.text


Reasons = dict[str, Reason]
"""By engine, operation or step of planning."""
