"""How one graph runs on one GPU, as a value: by segments, with the reason for each cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..cuda import CudaDevice
from ..errors import GraphError
from ..graph.spec import GraphSpec, Tensor
from ..implementation import CUDNN
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan

XLA = "XLA"
"""The engine name of a segment that runs in XLA."""


@dataclass(frozen=True)
class PlannedSegment:
    """A part of a graph, run by cuDNN or XLA.

    Attributes:
        spec: the part; its inputs and outputs are tensors of the whole graph, by name.
        calls: the positions of its operations in the whole graph.
        plan: the cuDNN plan; None if XLA runs the reference of the part.
        reason: why XLA runs it; for a cuDNN segment, why it is not one plan with the rest.
    """

    spec: GraphSpec
    calls: tuple[int, ...]
    plan: ExecutionPlan | None
    reason: str = ""

    @property
    def engine(self) -> str:
        return XLA if self.plan is None else self.plan.engine


Segments = tuple[PlannedSegment, ...]


@dataclass(frozen=True)
class Measured:
    """One way to run a graph, as measured where it was first lowered.

    Attributes:
        what: the engines of its segments, and what XLA runs of it.
        seconds: the device time of one execution; None if it was not measured.
        note: why it was not measured, or that its results were wrong.
        taken: whether the graph runs this way.
    """

    what: str
    seconds: float | None = None
    note: str = ""
    taken: bool = False


@dataclass(frozen=True)
class PlannedGraph:
    """How a graph runs on a GPU; its attributes are those of :class:`jax_cudnn.Plan`."""

    name: str
    gpu: str
    implementation: str
    spec: GraphSpec
    segments: Segments
    site: Profile | CudaDevice | None = field(default=None, compare=False)
    measured: tuple[Measured, ...] = field(default=(), compare=False)

    @property
    def execution_plans(self) -> tuple[ExecutionPlan, ...]:
        """The cuDNN plans, in execution order."""
        return tuple(segment.plan for segment in self.segments if segment.plan is not None)

    @property
    def engine(self) -> str:
        """The engine with its knobs, as cuDNN names it; several segments are joined by " + "."""
        return " + ".join(segment.engine for segment in self.segments)

    @property
    def workspace_bytes(self) -> int:
        """Device memory in use while it runs: the largest workspace of its plans."""
        return max((plan.workspace_bytes for plan in self.execution_plans), default=0)

    @property
    def candidate_count(self) -> int:
        """How many plans cuDNN proposed during planning, summed over the segments: in the modes of
        the options, and 1 for a segment whose engine the options fix. ``candidates`` covers all
        modes, whatever the options are."""
        return sum(plan.candidates for plan in self.execution_plans)

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """The results of a forward graph that only its derivatives need."""
        return tuple(self.spec.tensor(name) for name in self.spec.origin.residuals)

    @property
    def pinned(self) -> dict[str, Any]:
        """The options that fix this engine with its knobs, for a graph that is one plan."""
        return self.only.pinned

    @property
    def text(self) -> str:
        """The backend's plan (JSON), for a graph that is one plan."""
        return self.only.text

    @property
    def only(self) -> ExecutionPlan:
        """The cuDNN plan of a graph that is one plan; otherwise raises GraphError."""
        plans = self.execution_plans
        if len(self.segments) > 1 or not plans:
            raise GraphError(f"{self.name} is not one cuDNN plan", **self._instead())
        return plans[0]

    def _instead(self) -> dict[str, str | None]:
        """What the graph runs as instead of one cuDNN plan, and what to do."""
        if self.execution_plans:
            return {
                "got": f"{len(self.segments)} segments: {self.engine}",
                "fix": "use its parts, plan.parts; plan.explain() says why it is cut",
            }
        insist = "implementation='cudnn' requires a cuDNN plan, or says why there is none"
        return {
            "got": f"{self.engine}: all of it runs in XLA",
            "why": "; ".join(dict.fromkeys(s.reason for s in self.segments)),
            "fix": None if self.implementation == CUDNN else insist,
        }

    def __str__(self) -> str:
        return f"{self.engine} for {self.gpu}, {self.workspace_bytes} bytes of workspace"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"  # texts are up to 100 KB each
