"""Plan: how one graph runs on one GPU, segment by segment, with the reason for each cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...deviceless.profiles import Profile
from ..compat import Device
from ..cuda import CudaDevice
from ..errors import GraphError
from ..graph.spec import GraphSpec, Tensor
from ..implementation import CUDNN
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
        """How many plans cuDNN proposed for all segments while these were planned: in the modes
        that the options name, and 1 for each segment whose engine they name. ``candidates`` are of
        all modes, whatever the options name."""
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
        :class:`jax_cudnn.Graph`, also under jit. An engine with its knobs is one of a whole graph:
        a forward that is to be differentiated keeps it, as long as it has the same graph. The
        graphs of its backward, and the larger graph of a vmap, are others, for which cuDNN chooses.
        ``jc.plans(fn, *args)`` says what runs each.

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
        """A plan for each of cuDNN's segments, which has candidates of its own.

        It is one of a graph of its own: ``select``, ``execute`` and ``time`` go with it, but an
        engine names one plan of a whole graph, so that what ``pinned`` says of a part is not for
        the options of the function that was cut.
        """
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
            raise GraphError(f"{self.name} is not one cuDNN plan", **self._instead())
        return plans[0]

    def _instead(self) -> dict[str, str | None]:
        """What there is in the place of one cuDNN plan, and what to do."""
        if self.execution_plans:
            return {
                "got": f"{len(self.segments)} segments: {self.engine}",
                "fix": "take its parts: plan.parts; plan.explain() says why it is cut",
            }
        asks = "implementation='cudnn' asks cuDNN for it, and says why where it has no plan"
        return {
            "got": f"{self.engine}: nothing of it is cuDNN's",
            "why": "; ".join(dict.fromkeys(s.reason for s in self.segments)),
            "fix": None if self.implementation == CUDNN else asks,
        }

    def execute(
        self,
        *arrays: Any,
        device: Device | None = None,
        in_place: Mapping[str | int, str | int] | None = None,
    ) -> Any:
        """Run this very plan, eagerly.

        It is the same call as in a jitted function, compiled once for a plan and not planned anew.

        Args:
            *arrays: one for each of ``plan.spec.inputs``, with these shapes and dtypes. Offsets,
                lengths and numbers of pages are brought into the bounds of what they speak of.
            device: the GPU to run on, to which arrays are brought. None: the GPU of the arrays,
                else the one that was planned for, else the first.
            in_place: results by name or position that take an operand's memory, as
                ``{"y": "x"}`` or ``{0: 0}``; these operands are donated, and gone afterwards. For
                graphs of a single operation on each element that lie row-major in cuDNN's plan, as
                arrays of rank 3 and less do. Images, of rank 4 and 5, lie channels-last there: XLA
                would copy them, so these are refused.

        Returns:
            The result on that GPU, or a tuple of several, in the order of ``plan.spec.outputs``.

        Raises:
            TargetError: there is no GPU, or it is of another model than the plan.
            GraphError: the arrays do not fit, or the graph cannot run in place.
            jax.errors.JaxRuntimeError: cuDNN is of another version than the plan.

        Example:
            >>> import jax.numpy as jnp, jax_cudnn as jc
            >>> relu = jc.graph(lambda g, x: g.relu(x))
            >>> x = jnp.ones((64, 128), "bfloat16")
            >>> y = jc.plan(relu, x).execute(x)                                # doctest: +SKIP
        """
        from .. import execution

        return execution.execute(self, arrays, device, in_place)

    def time(self, *arrays: Any, device: Device | None = None) -> float:
        """Seconds of the device for one execution: the median of some rounds, after warming up.

        Executions are measured in a row within one program, so that Python has no part in it;
        below some 4 us it is the time that a launch takes. All of them read the same operands: what
        fits into the GPU's L2 cache is read from there, and such times are of warm data.

        Args:
            *arrays, device: as for :meth:`execute`; without arrays, random floats.

        Raises: as :meth:`execute`; GraphError for a cut graph, and for whole numbers that would
            have to be drawn.
        """
        from .. import measuring

        return measuring.time(self, arrays, device)

    def time_candidates(
        self,
        *arrays: Any,
        device: Device | None = None,
        limit: int | None = 12,
    ) -> Candidates:
        """The candidates with ``seconds``, of the first ``limit`` that can be built (None: of all).

        Each is built, which may compile it, and compiled into programs of its own: 1 to 2 s each.

        Args and Raises: as :meth:`time`.
        """
        from .. import measuring

        return measuring.time_candidates(self, arrays, device, limit)

    def autotune(
        self,
        *arrays: Any,
        device: Device | None = None,
        limit: int | None = 12,
    ) -> Plan:
        """The plan of the candidate that :meth:`time_candidates` measures to be the fastest.

        Args and Raises: as :meth:`time_candidates`.

        Example:
            >>> import jax.numpy as jnp, jax_cudnn as jc
            >>> matmul = jc.graph(lambda g, a, b: g.matmul(a, b))
            >>> a = jnp.ones((1, 512, 512), "bfloat16")
            >>> best = jc.plan(matmul, a, a).autotune(a, a)                    # doctest: +SKIP
            >>> fast = jax.jit(matmul.with_options(**best.pinned))             # doctest: +SKIP
        """
        from .. import measuring

        return measuring.autotune(self, arrays, device, limit)

    def populate_cuda_graph(
        self,
        cuda_graph: Any,
        operands: Sequence[Any],
        results: Sequence[Any],
        workspace: Any = None,
    ) -> None:
        """Put this plan into a CUDA graph of yours (``cudnnBackendPopulateCudaGraph``).

        For those who drive CUDA graphs themselves: XLA's programs hold command buffers of their
        own, which capture the calls of jitted functions. The graph launches kernels of the plan,
        which stay loaded for the life of the process.

        Args:
            cuda_graph: an empty ``cudaGraph_t``, as an integer.
            operands: for each of ``plan.spec.inputs`` a JAX array on the plan's GPU that lies in
                memory as the plan reads it, or a device pointer as an integer. Keep them alive,
                and call ``jax.block_until_ready`` on them before a launch: JAX gives out arrays
                that are still being computed, and a launch of yours does not wait for its streams.
            results: the same for each of ``plan.spec.outputs``: their memory is written at each
                launch. JAX takes its arrays for constant, so share them with nothing else.
            workspace: an array or a pointer of ``plan.workspace_bytes`` bytes; None for none.

        Raises:
            UnsupportedGraphError: the engine has no such graph (behaviour note
                SUPPORTS_CUDA_GRAPH_NATIVE_API), or the plan needs more than its kernels.
            GraphError: the arrays do not fit or lie on another device, or the graph is cut.
            GraphTypeError: ``cuda_graph`` is no integer.
            TargetError: there is no GPU of the plan's model.
            LibraryError: cuDNN or the driver refuses, in their words.
        """
        from .. import cuda_graphs

        cuda_graphs.record(self, cuda_graph, operands, results, workspace, update=False)

    def update_cuda_graph(
        self,
        cuda_graph: Any,
        operands: Sequence[Any],
        results: Sequence[Any],
        workspace: Any = None,
    ) -> None:
        """Give a CUDA graph that :meth:`populate_cuda_graph` has filled other pointers
        (``cudnnBackendUpdateCudaGraph``); ``cudaGraphExecUpdate`` then takes them over into what
        was instantiated of it.

        Args and Raises: as :meth:`populate_cuda_graph`.
        """
        from .. import cuda_graphs

        cuda_graphs.record(self, cuda_graph, operands, results, workspace, update=True)

    def to_json(self) -> dict[str, Any]:
        """What runs, as data for ``json.dumps``: the graph, its segments, cuDNN's plans. A float
        that JSON has no number for is ``["float", "inf"]``, ``"-inf"`` or ``"nan"``."""
        from . import plan_record

        return plan_record.data(self)

    def serialize(self) -> bytes:
        """The plan as bytes, for a file: :meth:`deserialize` reads them in another process, where
        it executes without being planned anew. 3 to 120 KB for each of cuDNN's plans."""
        from . import plan_record

        return plan_record.dumped(self)

    @classmethod
    def deserialize(cls, content: bytes) -> Plan:
        """The plan that :meth:`serialize` wrote.

        It runs with the version of cuDNN and on the GPU model that it was planned for, and says so
        elsewhere. Reading makes no objects but graphs and plans; what runs is the kernel in it, so
        read bytes that you trust.

        Raises:
            GraphError: the bytes are no plan, or one of a version of this package that is too
                different.
        """
        from . import plan_record

        return plan_record.loaded(content)

    def explain(self) -> Explanation:
        """What runs where and why; prints as text, ``.to_json()`` gives data."""
        return explain(self)

    def __str__(self) -> str:
        return f"{self.engine} for {self.gpu}, {self.workspace_bytes} bytes of workspace"

    def __repr__(self) -> str:
        return f"<Plan {self}>"  # texts are up to 100 KB each
