"""Candidate: a plan that cuDNN's heuristics propose for a graph, with its properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
