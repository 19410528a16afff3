"""Plan: how one graph runs on one GPU, and what can be done with that."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import candidates, cuda_graphs, execution
from ..candidates import Candidates
from ..compat import Device
from ..errors import TargetError
from ..graph.boundary import boundary
from ..graph.spec import Tensor
from ..planning.build import Candidate
from ..planning.cost import cost, roofline
from ..planning.deviceless import profiles
from ..planning.planned_graph import PlannedGraph, PlannedSegment
from ..planning.planner import Site
from ..planning.split import whole
from ..text import size, wrapped
from . import record


@dataclass(frozen=True, repr=False)
class Plan(PlannedGraph):
    """How a graph runs on a GPU.

    Attributes:
        name: the graph function's name.
        gpu: the GPU's name.
        implementation: "auto", "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        spec: the graph.
        segments: its parts, in execution order.
        site: the GPU that it was planned for, a profile or a GPU of this process; None if the
            plan was read from bytes, or made while lowering a graph that always runs in XLA.
        measured: under "auto" the ways to run it that were measured, each with ``what`` runs,
            ``seconds``, a ``note`` and whether it is ``taken``; empty where no measurement decided.
    """

    @classmethod
    def of(cls, planned: PlannedGraph) -> Plan:
        return cls(**vars(planned))

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
        return candidates.candidates(self)

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
        return candidates.select(self, which)

    @property
    def parts(self) -> tuple[Plan, ...]:
        """A separate plan for each cuDNN segment, with its own candidates.

        ``select``, ``execute`` and ``time`` work on each part. ``pinned`` of a part does not fit
        the options of the function that was cut: there, an engine applies to the whole graph.
        """
        if len(self.segments) == 1:
            return (self,) if self.execution_plans else ()
        found = []
        for segment in self.segments:
            if segment.plan is not None:
                (alone,) = whole(segment.spec, segment.plan, segment.reason)
                name = f"{self.name}: {', '.join(call.name for call in segment.spec.calls)}"
                found.append(replace(self, name=name, spec=segment.spec, segments=(alone,)))
        return tuple(found)

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
        return candidates.time(self, arrays, device)

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
        return candidates.time_candidates(self, arrays, device, limit)

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
        rows = candidates.time_candidates(self, arrays, device, limit)
        times = {row: row.seconds for row in rows if row.seconds is not None}
        return self.select(min(times, key=times.__getitem__)) if times else self

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
        cuda_graphs.record(self, cuda_graph, operands, results, workspace, update=True)

    def to_json(self) -> dict[str, Any]:
        """The graph, its segments and the cuDNN plans as data for ``json.dumps``. Infinities and
        NaN, which JSON lacks, are ``["float", "inf"]``, ``"-inf"`` or ``"nan"``."""
        return record.data(self)

    def serialize(self) -> bytes:
        """The plan as bytes with a checksum, for :meth:`deserialize` in another process, which
        executes it without planning. 3 to 120 KB per cuDNN plan; GraphError above 32 MiB."""
        return record.dumped(self)

    @classmethod
    def deserialize(cls, content: bytes) -> Plan:
        """The plan that :meth:`serialize` wrote.

        It runs only with the cuDNN version and on the GPU model that it was planned for, and
        raises an error elsewhere. Reading creates graphs and plans only, but running the plan runs
        the kernel in it: read only bytes that you trust.

        Raises:
            GraphError: not a serialized plan, a damaged one, or one of an incompatible version.
        """
        return record.loaded(content, cls)

    def explain(self) -> Explanation:
        """Which parts run where, and why; prints as text, ``.to_json()`` gives data."""
        return _explained(self)


@dataclass(frozen=True)
class Explanation:
    """The explanation of a :class:`Plan`: prints as text; ``to_json`` gives data."""

    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """``{"name", "role", "residuals", "gpu", "implementation", "graph", "cut_bytes",
        "segments": [{"runs_on", "operations", "engine", "workspace_bytes", "candidates",
        "reads_bytes", "writes_bytes", "flops", "roofline_seconds", "reason", "advice"}]}``;
        a new dictionary each time."""
        return json.loads(json.dumps(self.data))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        data = self.data
        segments = data["segments"]
        count = "one segment" if len(segments) == 1 else f"{len(segments)} segments"
        yield (
            f"{data['name']} on {data['gpu']}, implementation {data['implementation']!r}: {count}"
        )
        if engine := data["engine_of_another_graph"]:
            whose = "belongs to the graph from which vmap or autodiff derived this one"
            yield wrapped(f"note: {engine} {whose}", "  ")
        for number, segment in enumerate(segments, 1):
            yield f"  {number}. {segment['runs_on']}: {', '.join(segment['operations'])}"
            if segment["runs_on"] == "cuDNN":
                yield (
                    f"     engine {segment['engine']} of {segment['candidates']} candidates, "
                    f"{size(segment['workspace_bytes'])} of workspace"
                )
            reads, writes = size(segment["reads_bytes"]), size(segment["writes_bytes"])
            seconds = segment["roofline_seconds"]
            least = "" if seconds is None else f"; at least {seconds * 1e6:,.1f} us"
            yield f"     reads {reads}, writes {writes}, {segment['flops']:,} operations{least}"
            for advice in segment["advice"]:
                yield wrapped(f"note: {advice}", "     ")
            if segment["reason"] and segment["runs_on"] == "XLA":
                yield wrapped(f"because {segment['reason']}", "     ")
        for kept in data["residuals"]:
            yield f"  keeps {kept['tensor']} for the derivative, {size(kept['bytes'])}"
        if len(segments) > 1:
            yield f"  {size(data['cut_bytes'])} cross the cuts"
            reasons = dict.fromkeys(s["reason"] for s in segments if s["runs_on"] == "cuDNN")
            for reason in filter(None, reasons):
                yield wrapped(f"not one plan because {reason}", "  ")


def _explained(plan: PlannedGraph) -> Explanation:
    """The explanation of a plan."""
    site = plan.site
    with contextlib.suppress(TargetError):  # a plan that was read from bytes knows the name alone
        site = site or profiles.get(plan.gpu)
    made = {name: s for s in plan.segments for name in s.spec.outputs}
    crossing = sum(
        plan.spec.tensor(name).nbytes
        for segment in plan.segments
        for name in segment.spec.inputs
        if name in made
    )
    return Explanation(
        {
            "name": plan.name,
            "role": plan.spec.origin.role,
            "engine_of_another_graph": plan.spec.origin.engine,
            "residuals": [
                {"tensor": str(tensor), "bytes": tensor.nbytes}
                for tensor in map(plan.spec.tensor, plan.spec.origin.residuals)
            ],
            "gpu": plan.gpu,
            "implementation": plan.implementation,
            "graph": str(plan.spec),
            "cut_bytes": crossing,
            "segments": [_segment(segment, site) for segment in plan.segments],
        }
    )


def _segment(segment: PlannedSegment, site: Site | None) -> dict[str, Any]:
    spec, plan = segment.spec, segment.plan
    return {
        "runs_on": "XLA" if plan is None else "cuDNN",
        "operations": [call.name for call in spec.calls],
        "engine": None if plan is None else plan.engine,
        "workspace_bytes": 0 if plan is None else plan.workspace_bytes,
        "candidates": 0 if plan is None else plan.candidates,
        "reads_bytes": sum(tensor.nbytes for tensor in spec.input_tensors),
        "writes_bytes": sum(tensor.nbytes for tensor in spec.output_tensors),
        "flops": cost(spec).flops,
        "roofline_seconds": roofline(spec, site),
        "reason": segment.reason,
        "advice": [
            f"{call.name}: {found}"
            for call, edge in zip(spec.calls, boundary(spec).edges, strict=True)
            if (found := edge.advice())
        ],
    }
