"""Plan: how one graph runs on one GPU, by segments, with the reason for each cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .deviceless.profiles import Profile
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


@dataclass(frozen=True)
class Plan:
    """How a graph runs on a GPU.

    Attributes:
        name: the graph function's name.
        gpu: the GPU's name.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        spec: the graph.
        segments: its parts, in execution order.
        site: the GPU that it was planned for, a profile or a GPU of this process; None if the
            plan was read from bytes, or made while lowering a graph that always runs in XLA.
    """

    name: str
    gpu: str
    implementation: str
    spec: GraphSpec
    segments: tuple[PlannedSegment, ...]
    site: Profile | CudaDevice | None = field(default=None, compare=False)

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
    def candidates(self) -> Candidates:
        """The plans that cuDNN's heuristics propose for the graph in modes A, B and FALLBACK.

        Nothing is built: the first access takes 0.1 to 0.7 s, later ones read memory.
        ``candidates.built()`` finds which of them can be built.

        Raises:
            GraphError: the graph is cut or runs in XLA: use ``plan.parts``.

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
        """The plan of another candidate, with its engine and knobs.

        ``fn.with_options(**plan.select(i).pinned)`` makes the same choice for a graph function or a
        :class:`jax_cudnn.Graph`, also under jit. The choice applies to one whole graph: the
        forward keeps it under differentiation if its graph stays the same, but for the graphs of
        the backward, and for the larger graph of a vmap, cuDNN chooses anew.
        ``jc.plans(fn, *args)`` shows the engine of each.

        Args:
            which: a :class:`jax_cudnn.Candidate` of ``plan.candidates``, or its index.

        Raises:
            UnsupportedGraphError: cuDNN cannot build it, or the graph's options exclude it.
            GraphError: there is no such candidate, or the graph is cut.
        """
        from . import selection

        return selection.select(self, which)

    @property
    def parts(self) -> tuple[Plan, ...]:
        """A separate plan for each cuDNN segment, with its own candidates.

        ``select``, ``execute`` and ``time`` work on each part. ``pinned`` of a part does not fit
        the options of the function that was cut: there, an engine applies to the whole graph.
        """
        from . import selection

        return selection.parts(self)

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

    def execute(
        self,
        *arrays: Any,
        device: Device | None = None,
        in_place: Mapping[str | int, str | int] | None = None,
    ) -> Any:
        """Run exactly this plan, eagerly.

        It makes the same call as a jitted function; it is compiled once per plan.

        Args:
            *arrays: one for each of ``plan.spec.inputs``, with these shapes and dtypes. Offsets,
                lengths and page indices are clipped to the bounds of the arrays they refer to.
            device: the GPU to run on; arrays are moved there. None: the GPU of the arrays, else
                the GPU that was planned for, else the first one.
            in_place: results, by name or position, that reuse the memory of an operand, as
                ``{"y": "x"}`` or ``{0: 0}``; these operands are donated and deleted. Only for
                graphs of a single elementwise operation whose tensors are row-major in the cuDNN
                plan, which holds up to rank 3. Images (rank 4 and 5) are channels-last there: XLA
                would copy them, so they raise an error.

        Returns:
            The result on that GPU, or a tuple of several, in the order of ``plan.spec.outputs``.

        Raises:
            TargetError: there is no GPU, or its model differs from that of the plan.
            GraphError: the arrays do not fit, or the graph cannot run in place.
            jax.errors.JaxRuntimeError: the version of cuDNN differs from that of the plan.

        Example:
            >>> import jax.numpy as jnp, jax_cudnn as jc
            >>> relu = jc.graph(lambda g, x: g.relu(x))
            >>> x = jnp.ones((64, 128), "bfloat16")
            >>> y = jc.plan(relu, x).execute(x)                                # doctest: +SKIP
        """
        from .. import execution

        return execution.execute(self, arrays, device, in_place)

    def time(self, *arrays: Any, device: Device | None = None) -> float:
        """Device time of one execution in seconds: the median of several rounds after a warm-up.

        One program runs many executions in sequence, so Python adds nothing; below about 4 us the
        result is the time of a kernel launch. All executions read the same operands: data that
        fits into the L2 cache of the GPU is read from there.

        Args:
            *arrays, device: as for :meth:`execute`; without arrays, random floats.

        Raises:
            GraphError: the graph is cut, or an integer operand would have to be random.
            TargetError: as for :meth:`execute`.
        """
        from .. import measuring

        return measuring.time(self, arrays, device)

    def time_candidates(
        self,
        *arrays: Any,
        device: Device | None = None,
        limit: int | None = 12,
    ) -> Candidates:
        """The candidates with ``seconds`` for the first ``limit`` that can be built (None: all).

        Building and compiling takes 1 to 2 s for each candidate.

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
        """The plan of the fastest candidate, as measured by :meth:`time_candidates`.

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
        """Put this plan into your own CUDA graph (``cudnnBackendPopulateCudaGraph``).

        Only for code that builds CUDA graphs itself: XLA programs have their own command buffers,
        which capture the calls of jitted functions. The graph launches kernels of the plan, which
        stay loaded until the process ends.

        Args:
            cuda_graph: an empty ``cudaGraph_t``, as an integer.
            operands: for each of ``plan.spec.inputs`` a JAX array on the plan's GPU in the memory
                layout of the plan, or a device pointer as an integer. Keep them alive, and call
                ``jax.block_until_ready`` on them before a launch: JAX returns arrays that are
                still being computed, and your launch does not wait for its streams.
            results: the same for each of ``plan.spec.outputs``; each launch overwrites their
                memory. JAX assumes that arrays never change, so share them with nothing else.
            workspace: an array or pointer of ``plan.workspace_bytes`` bytes; None for no bytes.

        Raises:
            UnsupportedGraphError: the engine has no such graph (behaviour note
                SUPPORTS_CUDA_GRAPH_NATIVE_API), or the plan needs more than its kernels.
            GraphError: the arrays do not fit or are on another device, or the graph is cut.
            GraphTypeError: ``cuda_graph`` is not an integer.
            TargetError: there is no GPU of the plan's model.
            LibraryError: cuDNN or the driver reports an error.
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
        """Change the pointers in a CUDA graph that :meth:`populate_cuda_graph` filled
        (``cudnnBackendUpdateCudaGraph``); ``cudaGraphExecUpdate`` then applies them to its
        instances.

        Args and Raises: as :meth:`populate_cuda_graph`.
        """
        from .. import cuda_graphs

        cuda_graphs.record(self, cuda_graph, operands, results, workspace, update=True)

    def to_json(self) -> dict[str, Any]:
        """The graph, its segments and the cuDNN plans as data for ``json.dumps``. Infinities and
        NaN, which JSON lacks, are ``["float", "inf"]``, ``"-inf"`` or ``"nan"``."""
        from . import plan_record

        return plan_record.data(self)

    def serialize(self) -> bytes:
        """The plan as bytes with a checksum, for :meth:`deserialize` in another process, which
        executes it without planning. 3 to 120 KB per cuDNN plan; GraphError above 32 MiB."""
        from . import plan_record

        return plan_record.dumped(self)

    @classmethod
    def deserialize(cls, content: bytes) -> Plan:
        """The plan that :meth:`serialize` wrote.

        It runs only with the cuDNN version and on the GPU model that it was planned for, and
        raises an error elsewhere. Reading creates graphs and plans only, but running the plan runs
        the kernel in it: read only bytes that you trust.

        Raises:
            GraphError: not a serialized plan, a damaged one, or one of an incompatible version.
        """
        from . import plan_record

        return plan_record.loaded(content)

    def explain(self) -> Explanation:
        """Which parts run where, and why; prints as text, ``.to_json()`` gives data."""
        return explain(self)

    def __str__(self) -> str:
        return f"{self.engine} for {self.gpu}, {self.workspace_bytes} bytes of workspace"

    def __repr__(self) -> str:
        return f"<Plan {self}>"  # texts are up to 100 KB each
