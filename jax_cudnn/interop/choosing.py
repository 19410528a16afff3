"""How a Graph is planned: options under the names of pygraph's methods, and its plans."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import jax

from .._core.errors import GraphAttributeError, GraphError
from .._core.graph.options import replaced
from .._core.graph.source import user_line
from .._core.planning.candidates import Candidate
from .._core.planning.plan import Plan
from .._core.planning.support_value import Support
from .checks import listed
from .declaring import Declaring

# pygraph's methods that act on a device, or on one of its plans.
_OF_PLANS = (
    "backend_plan_entries",
    "deselect_engines",
    "deserialize",
    "execute",
    "execute_plan_at_index",
    "get_cuda_graph_retention",
    "get_engine_count",
    "get_knobs_for_engine",
    "is_cuda_graph_replay_expected",
    "key",
    "plans",
    "populate_cuda_graph",
    "selected_engine",
    "serialize",
    "update_cuda_graph",
)


class Choosing(Declaring):
    """The part of a Graph that concerns plans."""

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_PLANS:
            return super().__getattr__(name)
        raise GraphAttributeError(
            f"a Graph has no {name}",
            why="JAX runs it, and it is planned for the GPU that the program is compiled for",
            fix="graph.plan() gives its jax_cudnn.Plan, with candidates, select, execute, "
            "autotune and serialize; graph.with_options(**plan.pinned) takes one over",
            where=user_line(),
        )

    def create_execution_plans(self, heuristics: Sequence[Any]) -> Self:
        """Choose among what these modes of heuristics propose: "A", "B", "FALLBACK"."""
        return self._choose("create_execution_plans", heuristics=listed("heuristics", heuristics))

    def create_execution_plan(self, engine_id: int, knobs: Any = None) -> Self:
        """Take this engine, with these knobs."""
        return self._choose("create_execution_plan", engine=engine_id, knobs=knobs or {})

    def select_numeric_notes(self, notes: Sequence[Any]) -> Self:
        """Take an engine that carries one of these notes."""
        return self._note("select_numeric_notes", notes)

    def deselect_numeric_notes(self, notes: Sequence[Any]) -> Self:
        """Take no engine that carries one of these notes."""
        return self._note("deselect_numeric_notes", notes)

    def select_behavior_notes(self, notes: Sequence[Any]) -> Self:
        """Take an engine that carries one of these notes."""
        return self._note("select_behavior_notes", notes)

    def deselect_behavior_notes(self, notes: Sequence[Any]) -> Self:
        """Take no engine that carries one of these notes."""
        return self._note("deselect_behavior_notes", notes)

    def deselect_workspace_greater_than(self, workspace: int) -> Self:
        """Take no plan that needs more bytes of workspace."""
        return self._choose("deselect_workspace_greater_than", max_workspace=workspace)

    def with_options(self, **options: Any) -> Self:
        """The same graph with other plan options, see :class:`jax_cudnn.Options`; with none, a
        graph whose order ``set_io_tuples`` may set.

        ``graph.with_options(**plan.pinned)`` is the graph with the very engine and knobs of a
        :class:`jax_cudnn.Plan`.

        Raises: GraphError for ``intermediate_data_type`` and ``compute_data_type``, which are part
        of the graph, and inside the graph's ``with``.
        """
        self._check_complete()
        made = copy.copy(self)
        made._recorder, made._was_called = self._built.copied(), False
        made._options = replaced(self._options, options)
        for name in ("intermediate_data_type", "compute_data_type"):
            had, has = getattr(self._options, name), getattr(made._options, name)
            if had != has:
                raise GraphError(
                    f"with_options of another {name}",
                    expected=f"{name}={had!r}",
                    got=f"{name}={has!r}",
                    why="the graph's operations were checked with it",
                    fix="give it to jax_cudnn.Graph(...)",
                    where=user_line(),
                )
        made._keep_specs()
        return made

    def plan(self, *, gpus: Any = None) -> Any:
        """How the graph runs on a GPU, as :func:`jax_cudnn.plan` says it.

        Args:
            gpus: names of GPUs that need not be here. None: ``jax_cudnn.target``, else the GPU of
                this process.

        Returns: a :class:`jax_cudnn.Plan`; with ``gpus`` a dictionary of them.

        Raises: UnsupportedGraphError under ``implementation="cudnn"``; TargetError without a GPU.
        """
        from .._core.planning.support import plan

        function, avals = self._of_operands()
        return plan(function, *avals, gpus=gpus)

    def support(self, *, gpus: Any = None) -> Support:
        """On which GPUs the graph is one cuDNN plan, as :func:`jax_cudnn.support` says it."""
        from .._core.planning.support import support

        function, avals = self._of_operands()
        return support(function, *avals, gpus=gpus)

    def validate(self) -> None:
        """Nothing is left to check: operations are checked where they are written."""
        assert self._built

    def build_operation_graph(self) -> None:
        """Nothing is left to do, see :meth:`validate`."""
        assert self._built

    def check_support(self) -> None:
        """UnsupportedGraphError where the graph is not one cuDNN plan on the GPU at hand."""
        self.with_options(implementation="cudnn").plan()

    def build_plans(self) -> Plan:
        """Plan now what the first compilation of a call on this GPU would plan."""
        return self.plan()

    def build(self, heuristics: Sequence[Any] | None = None) -> Plan:
        """The same, with other heuristics if these are given."""
        graph = self.with_options(heuristics=tuple(heuristics)) if heuristics else self
        return graph.plan()

    def get_workspace_size(self) -> int:
        """Bytes of device memory that its plans need while they run."""
        return self.plan().workspace_bytes

    def get_execution_plan_count(self) -> int:
        """How many plans cuDNN's heuristics propose."""
        return self.plan().candidate_count

    def get_plan_name_at_index(self, index: int) -> str:
        """A candidate's engine with its knobs, as cuDNN writes them."""
        return self._candidate(index).name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[str, int]]:
        """A candidate's engine by its number, and the values of its knobs by name."""
        candidate = self._candidate(index)
        return candidate.engine, dict(candidate.knobs)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> tuple[str, ...]:
        """What cuDNN says of a candidate: "RUNTIME_COMPILATION", for example."""
        return self._candidate(index).behavior_notes

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of device memory that a candidate needs while it runs; it is built for that."""
        return self.plan().select(index).workspace_bytes

    def get_behavior_notes(self) -> tuple[str, ...]:
        """What cuDNN says of the plan's engine."""
        return self.plan().only.behavior_notes

    def build_plan_at_index(self, index: int) -> Plan:
        """The plan of a candidate."""
        return self.plan().select(index)

    def select_plan(self, index: int) -> Self:
        """The same graph with the engine and the knobs of a candidate.

        ``graph.plan().candidates`` lists them, ``graph.plan().autotune(...)`` finds the fastest.
        """
        return self.with_options(**self.plan().select(index).pinned)

    def _candidate(self, index: int) -> Candidate:
        candidates = self.plan().candidates
        if not 0 <= index < len(candidates):
            raise GraphError(
                "no such candidate",
                expected=f"0 to {len(candidates) - 1}",
                got=str(index),
                where=user_line(),
            )
        return candidates[index]

    def _choose(self, method: str, **options: Any) -> Self:
        self._building(method)
        self._options = replaced(self._options, options)
        return self

    def _note(self, method: str, notes: Sequence[Any]) -> Self:
        """Notes of the kind of a method, beside those that were given before."""
        before = getattr(self._options, method)
        return self._choose(method, **{method: (*before, *listed("notes", notes))})

    def _of_operands(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """A function of the arrays among the inputs, and their shapes: numbers in the host's memory
        are constants, whatever their value."""
        self._check_complete()
        arrays = [tensor for tensor in self._inputs if not tensor.by_value]
        arrays = arrays or [*self._inputs[:1]]  # as calls have it
        numbers = {tensor.name: 1.0 for tensor in self._inputs if tensor.by_value}

        def function(*operands: Any) -> list[jax.Array]:
            given = {tensor.name: x for tensor, x in zip(arrays, operands, strict=True)}
            return self._run({**numbers, **given})

        function.__name__ = self.name
        return function, [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in arrays]
