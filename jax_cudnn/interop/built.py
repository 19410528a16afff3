"""What a Graph holds, and how it is planned, under pygraph's names."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

from .._core.graph.options import Options, TraceContext, replaced
from .._core.graph.spec import GraphSpec
from .._core.planning.build import Candidate
from .._core.plans.plan import Plan
from .._core.plans.support import Support
from .arrays import listed, refusal
from .function import Function
from .recorder import Recorder
from .tensors import NamedTensor, as_json, labels


class GraphNode(NamedTuple):
    """An operation of a Graph: its name, pygraph's method, its tensors by port, its attributes."""

    name: str
    method: str
    inputs: dict[str, NamedTensor]
    outputs: dict[str, NamedTensor]
    params: dict[str, Any]


class Built:
    """The contents of a Graph, its options and its plans.

    The methods that plan may be called inside the graph's ``with``, like pygraph's sequence from
    ``validate`` to ``build_plans``: they plan the graph as built so far.
    """

    def __init__(self, name: str, io_data_type: str | None, options: Options, *io: Any) -> None:
        self.name = self.__name__ = name  # the latter names jitted programs
        self._io_data_type, self._options = io_data_type, options
        self._io: tuple[Any, ...] = io  # the inputs and outputs that the user listed
        self._recorder: Recorder | None = None
        self._made: Function | None = None  # the complete graph
        self._was_called = False

    @property
    def _built(self) -> Recorder:
        if self._recorder is None:
            fix = f"add operations: with jax_cudnn.Graph(...) as {self.name}: ..."
            raise refusal(f"{self.name} is not built", fix=fix)
        return self._recorder

    @property
    def _complete(self) -> Function:
        _ = self._built
        if self._made is None:
            fix = "do this after its `with`"
            raise refusal(f"{self.name} is still being built", fix=fix)
        return self._made

    def _open(self, what: str) -> Recorder:
        self._built.check_open(what)
        return self._built

    def _function(self) -> Function:
        return self._end(self._built.copied()) if self._made is None else self._made

    def _end(self, recorder: Recorder) -> Function:
        """Completes a graph with its outputs, and the order of calls if given."""
        io = self._io if any(self._io) else (None, None)
        made = Function.of(self.name, recorder, self._options, *io)
        recorder.conclude(made.outputs)
        return made

    def _forget_numbers(self) -> None:
        """Forgets the values of the scalars that the graph was built with."""
        for tensor in self._recorder.handles.values() if self._recorder else ():
            tensor.number = None

    # -- contents -----------------------------------------------------------------------------

    def find_tensor(self, reference: Any) -> NamedTensor:
        """The tensor of a reference; raises GraphError if there is none."""
        return self._built.references.find(reference)

    query_tensor_attributes_of_uid = find_tensor

    def get_inputs(self) -> list[NamedTensor]:
        """The inputs that the outputs depend on, in the order of declaration."""
        return [*self._complete.inputs]

    def get_outputs(self) -> list[NamedTensor]:
        """The outputs, in the order of results."""
        return [*self._complete.outputs]

    @property
    def spec(self) -> GraphSpec:
        """The graph as a value; prints as text."""
        return self._complete.spec(TraceContext.now())

    def to_json(self) -> str:
        """The graph's context, nodes and tensors as JSON, with the frontend's keys. Non-finite
        values are the strings "inf", "-inf" and "nan"."""
        context = {
            "name": self.name,
            "io_data_type": self._io_data_type,
            "intermediate_data_type": self._options.intermediate_data_type,
            "compute_data_type": self._options.compute_data_type or "float32",
        }
        return as_json(self._built.nodes, self._built.handles, context)

    def inspect(self) -> dict[str, Any]:
        """The same as a dictionary."""
        return json.loads(self.to_json())

    @property
    def tensors(self) -> dict[str, NamedTensor]:
        """The tensors by name; those without a name by node and port."""
        return labels(self._built.nodes, self._built.handles.values())

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """The operations, in the order in which they were added."""
        handles = self._built.handles
        return tuple(
            GraphNode(
                name,
                call.node.method,
                {port: handles[x] for port, x in call.inputs},
                {port: handles[x] for port, x in call.outputs},
                call.node.keywords(),
            )
            for name, call in self._built.nodes.items()
        )

    def get_node(self, name: str) -> GraphNode | None:
        """The operation of this name, or None."""
        return next((node for node in self.nodes if node.name == name), None)

    def __str__(self) -> str:
        return repr(self) if self._recorder is None else self.to_json()

    def __repr__(self) -> str:
        nodes = [] if self._recorder is None else self._recorder.nodes
        return f"<jax_cudnn.Graph {self.name}: {' '.join(nodes) or 'not built'}>"

    # -- plans --------------------------------------------------------------------------------

    def plan(self, *, gpus: Any = None, numbers: Mapping[Any, float] | None = None) -> Any:
        """Plan the graph for a GPU, like :func:`jax_cudnn.plan`.

        Args:
            gpus: names of GPUs, which may be absent. By default the GPU of ``jax_cudnn.target``, or
                else of this process.
            numbers: values of scalar inputs in host memory, by reference: ``{"ln::epsilon":
                1e-5}``. By default the values passed while building; graphs of
                :func:`jax_cudnn.graph_cache` have no default values.

        Returns:
            A :class:`jax_cudnn.Plan`, whose operands are the graph's inputs in the order of
            positional calls, without those scalars; with ``gpus``, a dictionary of plans. If a
            scalar has no value, the plan can be inspected, but not run or serialized.

        Raises:
            UnsupportedGraphError: cuDNN cannot run the graph, with ``implementation="cudnn"``.
            TargetError: there is no GPU.
            GraphError: ``numbers`` refers to an input that is not a scalar.

        Example:
            >>> import jax.numpy as jnp, jax_cudnn as jc
            >>> with jc.Graph(inputs=["mul::b", "mul::a"], outputs=["mul::OUT_0"]) as graph:
            ...     a, b = jnp.ones((4, 8)), jnp.ones((1, 8))
            ...     _ = graph.mul(a, b, name="mul").set_output(True)
            >>> with jc.target("H200"):
            ...     graph.plan().spec.inputs
            ('mul::b', 'mul::a')
        """
        return self._function().plan(gpus, numbers)

    def support(self, *, gpus: Any = None) -> Support:
        """On which GPUs the graph is one cuDNN plan, like :func:`jax_cudnn.support`."""
        return self._function().support(gpus)

    def validate(self) -> None:
        """Does nothing: operations are checked when they are added."""
        _ = self._built

    def build_operation_graph(self) -> None:
        """Does nothing, see :meth:`validate`."""
        _ = self._built

    def check_support(self) -> None:
        """Raises UnsupportedGraphError if the graph is not one cuDNN plan on the current GPU."""
        self._with(implementation="cudnn").plan()

    def build_plans(self) -> Plan:
        """Plan now, instead of at the first compilation of a call on this GPU."""
        return self.plan()

    def build(self, heuristics: Sequence[Any] | None = None) -> Plan:
        """Like :meth:`build_plans`, with other heuristics if given."""
        given = {} if heuristics is None else {"heuristics": listed("heuristics", heuristics)}
        return self._with(**given).plan()

    def _with(self, **options: Any) -> Function:
        return replace(self._function(), options=replaced(self._options, options))

    def get_workspace_size(self) -> int:
        """Bytes of device memory that the plans need while they run."""
        return self.plan().workspace_bytes

    def get_execution_plan_count(self) -> int:
        """The number of ``graph.plan().candidates``, to which an index refers; 1 if the options
        name an engine, for example after ``select_plan``."""
        return len(self._candidates(self.plan()))

    def get_plan_name_at_index(self, index: int) -> str:
        """A candidate's engine with its knobs, as cuDNN writes them."""
        return self._at(index)[1].name

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[str, int]]:
        """A candidate's engine id, and the values of its knobs by name."""
        _, candidate = self._at(index)
        return candidate.engine, dict(candidate.knobs)

    def get_behavior_notes_for_plan_at_index(self, index: int) -> tuple[str, ...]:
        """The behavior notes of a candidate, for example "RUNTIME_COMPILATION"."""
        return self._at(index)[1].behavior_notes

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of device memory that a candidate needs while it runs; builds its plan."""
        return self.build_plan_at_index(index).workspace_bytes

    def get_behavior_notes(self) -> tuple[str, ...]:
        """The behavior notes of the plan's engine."""
        return self.plan().only.behavior_notes

    def build_plan_at_index(self, index: int) -> Plan:
        """The plan of a candidate."""
        made, candidate = self._at(index)
        return made.select(candidate)

    def select_plan(self, index: int) -> Self:
        """The same graph with the engine and knobs of a candidate.

        ``graph.plan().candidates`` lists them; ``graph.plan().autotune(...)`` finds the fastest.
        """
        return self.with_options(**self.build_plan_at_index(index).pinned)

    def _candidates(self, made: Plan) -> Sequence[Candidate]:
        """The candidates for the graph's plan."""
        if self._options.engine is None:
            return made.candidates
        own = made.only
        knobs, notes = dict(own.knobs), own.behavior_notes
        return [Candidate(0, own.engine_id, own.engine, knobs, {}, behavior_notes=notes)]

    def _at(self, index: int) -> tuple[Plan, Candidate]:
        """The graph's plan, and the candidate at an index."""
        made = self.plan()
        candidates = self._candidates(made)
        try:
            at = operator.index(index)
        except TypeError:
            at = -1
        if not 0 <= at < len(candidates):
            raise refusal(
                "no such candidate",
                expected=f"an integer from 0 to {len(candidates) - 1}",
                got=repr(index),
                why=None if self._options.engine is None else "the graph's options name an engine",
            )
        return made, candidates[at]

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

    def _note(self, method: str, notes: Sequence[Any]) -> Self:
        """Adds notes to those of earlier calls."""
        before = getattr(self._options, method)
        return self._choose(method, **{method: (*before, *listed("notes", notes))})

    # -- options ------------------------------------------------------------------------------

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
        function, changed = self._complete, replaced(self._options, options)
        for name in ("intermediate_data_type", "compute_data_type"):
            had, has = getattr(self._options, name), getattr(changed, name)
            if had != has:
                raise refusal(
                    f"with_options cannot change {name}",
                    expected=f"{name}={had!r}",
                    got=f"{name}={has!r}",
                    why="the graph's operations were checked with it",
                    fix="pass it to jax_cudnn.Graph(...)",
                )
        made = copy.copy(self)
        made._options, made._made, made._was_called = changed, function.copied(changed), False
        made._recorder = made._made.recorder
        return made

    def _choose(self, method: str, **options: Any) -> Self:
        _ = self._built
        if self._was_called:
            raise refusal(
                f"{method} of {self.name} after the graph was called",
                why="jax.jit keeps programs that were compiled with the previous options",
                fix=f"other = graph.with_options({', '.join(f'{name}=...' for name in options)})",
            )
        self._options = replaced(self._options, options)
        if self._made is not None:
            self._made = replace(self._made, options=self._options)
        return self
