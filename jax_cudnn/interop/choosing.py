"""Plan options of a Graph, under the names of pygraph's methods."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from .._core.errors import GraphAttributeError, GraphError
from .._core.graph.options import replaced
from .._core.graph.source import user_line
from .checks import listed
from .ordering import Ordering

_XLAS = "leave it out: XLA's command buffers capture the calls of jitted functions"
_CANDIDATES = "graph.plan().candidates lists engines, knobs and notes"
# pygraph's methods that act on a device or on one of its plans, and their equivalents here.
_ELSEWHERE = {
    "backend_plan_entries": _CANDIDATES,
    "deselect_engines": "graph.select_plan(i) selects one of graph.plan().candidates; "
    "graph.deselect_behavior_notes(...) and graph.deselect_numeric_notes(...) exclude engines",
    "deserialize": "jax_cudnn.Plan.deserialize(content) reads the result of plan.serialize()",
    "execute": "call the graph; graph.plan().execute(*arrays) runs exactly that plan",
    "execute_plan_at_index": "graph.build_plan_at_index(i).execute(*arrays)",
    "get_cuda_graph_retention": _XLAS,
    "get_engine_count": _CANDIDATES,
    "get_knobs_for_engine": _CANDIDATES,
    "is_cuda_graph_replay_expected": _XLAS,
    "key": "graph.spec is the graph as a hashable value",
    "plans": _CANDIDATES,
    "populate_cuda_graph": "graph.plan().populate_cuda_graph(cuda_graph, operands, results)",
    "selected_engine": "graph.plan().pinned holds the engine and its knobs",
    "serialize": "graph.plan().serialize() writes the plan, pickle.dumps(graph) the graph",
    "update_cuda_graph": "graph.plan().update_cuda_graph(cuda_graph, operands, results)",
}


class Choosing(Ordering):
    """The part of a Graph that handles options."""

    def __getattr__(self, name: str) -> Any:
        if name not in _ELSEWHERE:
            return super().__getattr__(name)
        raise GraphAttributeError(
            f"a Graph has no {name}",
            why="JAX runs the graph, and compiles it for a GPU of its choice",
            fix=_ELSEWHERE[name],
            where=user_line(),
        )

    def create_execution_plans(self, heuristics: Sequence[Any]) -> Self:
        """Choose among the candidates of these heuristic modes: "A", "B", "FALLBACK"."""
        return self._choose("create_execution_plans", heuristics=listed("heuristics", heuristics))

    def create_execution_plan(self, engine_id: int, knobs: Any = None) -> Self:
        """Use this engine with these knobs."""
        return self._choose("create_execution_plan", engine=engine_id, knobs=knobs or {})

    def select_numeric_notes(self, notes: Sequence[Any]) -> Self:
        """Use only engines that have one of these notes."""
        return self._note("select_numeric_notes", notes)

    def deselect_numeric_notes(self, notes: Sequence[Any]) -> Self:
        """Exclude engines that have one of these notes."""
        return self._note("deselect_numeric_notes", notes)

    def select_behavior_notes(self, notes: Sequence[Any]) -> Self:
        """Use only engines that have one of these notes."""
        return self._note("select_behavior_notes", notes)

    def deselect_behavior_notes(self, notes: Sequence[Any]) -> Self:
        """Exclude engines that have one of these notes."""
        return self._note("deselect_behavior_notes", notes)

    def deselect_workspace_greater_than(self, workspace: int) -> Self:
        """Exclude plans that need more bytes of workspace."""
        return self._choose("deselect_workspace_greater_than", max_workspace=workspace)

    def with_options(self, **options: Any) -> Self:
        """The same graph with other plan options; without arguments, a copy whose order
        ``set_io_tuples`` may set.

        ``graph.with_options(**plan.pinned)`` is the graph with exactly the engine and knobs of a
        :class:`jax_cudnn.Plan`.

        Args:
            **options: fields of :class:`jax_cudnn.Options`.

        Raises:
            GraphError: inside the graph's ``with``, or for another ``intermediate_data_type`` or
                ``compute_data_type``, which are part of the graph.
        """
        self._check_complete()
        made = copy.copy(self)
        made._was_called = False
        made._take(self._built.copied())
        made._options = replaced(self._options, options)
        for name in ("intermediate_data_type", "compute_data_type"):
            had, has = getattr(self._options, name), getattr(made._options, name)
            if had != has:
                raise GraphError(
                    f"with_options cannot change {name}",
                    expected=f"{name}={had!r}",
                    got=f"{name}={has!r}",
                    why="the graph's operations were checked with it",
                    fix="pass it to jax_cudnn.Graph(...)",
                    where=user_line(),
                )
        return made

    def _choose(self, method: str, **options: Any) -> Self:
        _ = self._built
        if self._was_called:
            raise GraphError(
                f"{method} of {self.name} after the graph was called",
                why="jax.jit keeps programs that were compiled with the previous options",
                fix=f"other = graph.with_options({', '.join(f'{name}=...' for name in options)})",
                where=user_line(),
            )
        self._options = replaced(self._options, options)
        self._spec.cache_clear()
        return self

    def _note(self, method: str, notes: Sequence[Any]) -> Self:
        """Adds notes to those of earlier calls."""
        before = getattr(self._options, method)
        return self._choose(method, **{method: (*before, *listed("notes", notes))})
