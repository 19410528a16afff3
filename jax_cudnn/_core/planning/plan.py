"""Plan: how one graph runs on one GPU, segment by segment, with the reason for each cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...deviceless.profiles import Profile
from ..cuda import CudaDevice
from ..errors import GraphError
from ..graph.spec import GraphSpec, Tensor
from .execution_plan import ExecutionPlan
from .explanation import Explanation, explain

if TYPE_CHECKING:
    from .candidates import Candidate, Candidates

XLA = "XLA"
"""What stands for an engine where nothing is cuDNN's."""


@dataclass(frozen=True)
class PlannedSegment:
    """A part of a graph and what runs it.

    Attributes:
        spec: the part; its inputs and outputs are tensors of the whole graph, by name.
        calls: which operations of the whole graph it holds, by position.
        plan: cuDNN's plan; None where XLA runs the part's reference.
        reason: why XLA runs it; of cuDNN's, why it is not one plan with the rest.
    """

    spec: GraphSpec
    calls: tuple[int, ...]
    plan: ExecutionPlan | None
    reason: str = ""

    @property
    def engine(self) -> str:
        return XLA if self.plan is None else self.plan.engine


@dataclass(frozen=True)
class Plan:
    """How a graph runs on a GPU.

    Attributes:
        name: the graph function's name.
        gpu: the GPU's name.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        spec: the graph.
        segments: its parts, in the order in which they run.
        site: the GPU that it was planned for, a profile or one of this process; None where nothing
            is cuDNN's, or where the plan was read from bytes.
    """

    name: str
    gpu: str
    implementation: str
    spec: GraphSpec
    segments: tuple[PlannedSegment, ...]
    site: Profile | CudaDevice | None = field(default=None, compare=False)

    @property
    def execution_plans(self) -> tuple[ExecutionPlan, ...]:
        """cuDNN's plans, in the order in which they run."""
        return tuple(segment.plan for segment in self.segments if segment.plan is not None)

    @property
    def engine(self) -> str:
        """cuDNN's name of the engine with its knobs; of several segments, one after the other."""
        return " + ".join(segment.engine for segment in self.segments)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that is needed while it runs: the largest of its plans'."""
        return max((plan.workspace_bytes for plan in self.execution_plans), default=0)

    @property
    def candidate_count(self) -> int:
        """How many plans cuDNN's heuristics proposed for all segments while these were planned."""
        return sum(plan.candidates for plan in self.execution_plans)

    @property
    def candidates(self) -> Candidates:
        """What cuDNN's heuristics propose for the graph in their modes A, B and FALLBACK.

        Nothing is built for it: a list takes 0.1 to 0.7 s once, and is then kept in memory.
        ``candidates.built()`` says of each whether it can be built.

        Raises:
            GraphError: the graph is cut, or XLA's: take ``plan.parts``.

        Example:
            >>> import jax, jax_cudnn as jc
            >>> relu = jc.graph(lambda g, x: g.relu(x))
            >>> x = jax.ShapeDtypeStruct((64, 128), "bfloat16")
            >>> with jc.target("H200"):
            ...     print(jc.plan(relu, x).candidates)                        # doctest: +SKIP
        """
        from . import selection

        return selection.candidates(self)

    def select(self, which: int | Candidate) -> Plan:
        """The plan of another candidate: of this engine with these knobs.

        ``fn.with_options(**plan.select(i).pinned)`` makes the same choice for a graph function or a
        :class:`jax_cudnn.Graph`, with jit, grad and vmap.

        Args:
            which: a :class:`jax_cudnn.Candidate` of ``plan.candidates``, or its index.

        Raises:
            UnsupportedGraphError: cuDNN cannot build it, or the graph's options leave it out.
            GraphError: there is no such candidate, or the graph is cut.
        """
        from . import selection

        return selection.select(self, which)

    @property
    def parts(self) -> tuple[Plan, ...]:
        """A plan for each of cuDNN's segments, which has candidates of its own."""
        from . import selection

        return selection.parts(self)

    @property
    def residuals(self) -> tuple[Tensor, ...]:
        """The results of a forward that only its derivatives need."""
        return tuple(self.spec.tensor(name) for name in self.spec.origin.residuals)

    @property
    def pinned(self) -> dict[str, Any]:
        """The options that name this engine with its knobs, of a graph that is one plan."""
        return self.only.pinned

    @property
    def text(self) -> str:
        """The backend's plan (JSON), of a graph that is one plan."""
        return self.only.text

    @property
    def only(self) -> ExecutionPlan:
        """cuDNN's plan, of a graph that is one plan; GraphError for others."""
        plans = self.execution_plans
        if len(self.segments) > 1 or not plans:
            raise GraphError(
                f"{self.name} is not one cuDNN plan",
                got=f"{len(self.segments)} segments: {self.engine}",
                fix="take its parts: plan.parts; plan.explain() says why it is cut",
            )
        return plans[0]

    def explain(self) -> Explanation:
        """What runs where and why; prints as text, ``.to_json()`` gives data."""
        return explain(self)

    def __str__(self) -> str:
        return f"{self.engine} for {self.gpu}, {self.workspace_bytes} bytes of workspace"

    def __repr__(self) -> str:
        return f"<Plan {self}>"  # texts are up to 100 KB each
