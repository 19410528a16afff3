"""How one graph runs on one GPU, as a value: by segments, with the reason for each cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cuda import CudaDevice
from ..errors import GraphError
from ..graph.spec import GraphSpec
from ..user_context import CUDNN
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
        strict: whether XLA runs the reference as it stands, and not its faster form.
    """

    spec: GraphSpec
    calls: tuple[int, ...]
    plan: ExecutionPlan | None
    reason: str = ""
    strict: bool = False

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


Rows = tuple[tuple[tuple[int, ...], bool, str], ...]
"""Segments: the calls of each by position, whether XLA runs it, and why, as they are stored of a
graph's cut and of each way in which it was measured."""


@dataclass(frozen=True)
class Way:
    """A way to run a graph, as it is stored.

    Attributes:
        what, seconds, note: as those of :class:`Measured`.
        segments: those of the graph.
        pinned: the positions of segments of which the way sets the engine, with engine and knobs.
    """

    what: str
    seconds: float | None
    note: str
    segments: Rows
    pinned: tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...]

    @property
    def in_xla(self) -> bool:
        return all(in_xla for _, in_xla, _ in self.segments)


@dataclass(frozen=True)
class Outcome:
    """What was measured of a graph, as it is stored.

    Attributes:
        level: of tuning, when it was measured.
        ways: those that were measured; none where only XLA can run the graph.
        taken: the position of the fastest right way; None where no way is right.
        step: whether ``taken`` was the fastest in a whole step (:func:`jax_cudnn.tune`).
    """

    level: str
    ways: tuple[Way, ...] = ()
    taken: int | None = None
    step: bool = False


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
    def only(self) -> ExecutionPlan:
        """The cuDNN plan of a graph that is one plan; otherwise raises GraphError."""
        plans, why, fix = self.execution_plans, None, None
        if plans and len(self.segments) == 1:
            return plans[0]
        if plans:
            got = f"{len(self.segments)} segments: {self.engine}"
            fix = "use its parts, plan.parts; plan.explain() says why it is cut"
        else:
            got = f"{self.engine}: all of it runs in XLA"
            why = "; ".join(dict.fromkeys(segment.reason for segment in self.segments))
            if self.implementation != CUDNN:
                fix = "implementation='cudnn' requires a cuDNN plan, or says why there is none"
        raise GraphError(f"{self.name} is not one cuDNN plan", got=got, why=why, fix=fix)

    def __str__(self) -> str:
        return f"{self.engine} for {self.gpu}, {self.workspace_bytes} bytes of workspace"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"  # texts are up to 100 KB each
