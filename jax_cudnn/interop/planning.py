"""Plans of a Graph, under the names of pygraph's methods."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .._core.planning.candidates import Candidate
from .._core.plans.plan import Plan
from .._core.plans.support_value import Support
from .checks import listed
from .choosing import Choosing
from .numberless import NumberlessPlan
from .templates import number
from .tensors import NamedTensor


class Planning(Choosing):
    """The part of a Graph that handles plans.

    Methods that plan may be called inside the graph's ``with``, like pygraph's sequence from
    ``validate`` to ``build_plans``: they plan the graph as built so far.
    """

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
        from .._core.plans.support import plan

        graph = self._so_far()
        values, lacking = graph._numbers(numbers or {})
        function, avals = graph._of_operands(values)
        made = plan(function, *avals, gpus=gpus)
        if not lacking:
            return made
        if gpus is None:
            return _numberless(made, lacking)
        return type(made)({gpu: _numberless(one, lacking) for gpu, one in made.items()})

    def support(self, *, gpus: Any = None) -> Support:
        """On which GPUs the graph is one cuDNN plan, like :func:`jax_cudnn.support`."""
        from .._core.plans.support import support

        graph = self._so_far()
        function, avals = graph._of_operands(graph._numbers({})[0])
        return support(function, *avals, gpus=gpus)

    def validate(self) -> None:
        """Does nothing: operations are checked when they are added."""
        _ = self._built

    def build_operation_graph(self) -> None:
        """Does nothing, see :meth:`validate`."""
        _ = self._built

    def check_support(self) -> None:
        """Raises UnsupportedGraphError if the graph is not one cuDNN plan on the current GPU."""
        self._so_far().with_options(implementation="cudnn").plan()

    def build_plans(self) -> Plan:
        """Plan now, instead of at the first compilation of a call on this GPU."""
        return self.plan()

    def build(self, heuristics: Sequence[Any] | None = None) -> Plan:
        """Like :meth:`build_plans`, with other heuristics if given."""
        if heuristics is None:
            return self.plan()
        return self._so_far().with_options(heuristics=listed("heuristics", heuristics)).plan()

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
            raise GraphError(
                "no such candidate",
                expected=f"an integer from 0 to {len(candidates) - 1}",
                got=repr(index),
                why=None if self._options.engine is None else "the graph's options name an engine",
                where=user_line(),
            )
        return made, candidates[at]

    def _numbers(self, given: Mapping[Any, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
        """The values of scalar inputs by tensor name, and the names of those without a value."""
        said: dict[str, float] = {}
        for reference, value in given.items():
            tensor = self.find_tensor(reference)
            if not tensor.by_value or number(value) is None:
                raise GraphError(
                    f"{self.name}: numbers={{{reference!r}: ...}}",
                    expected="a Python or NumPy number"
                    if tensor.by_value
                    else "a scalar input in host memory (is_pass_by_value)",
                    got=repr(value)[:200] if tensor.by_value else f"the tensor {tensor._state}",
                    where=user_line(),
                )
            said[tensor.name] = value
        values: dict[str, float] = {}
        lacking: list[str] = []
        for tensor in self._constants():
            value = said.get(tensor.name, tensor.number)
            if value is None:
                lacking.append(tensor.get_name())
                value = math.nan if jnp.issubdtype(tensor.dtype, jnp.floating) else 0
            values[tensor.name] = value
        return values, tuple(lacking)

    def _constants(self) -> list[NamedTensor]:
        """The inputs that are constants of the plan: scalars, except one if there is no other
        operand."""
        numbers = [tensor for tensor in self._inputs if tensor.by_value]
        return numbers[1:] if len(numbers) == len(self._inputs) else numbers

    def _of_operands(self, numbers: Mapping[str, float]) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """A function of the inputs that are not constants, in order, and their shapes."""
        arrays = [tensor for tensor in self._in_order() if tensor.name not in numbers]

        def function(*operands: Any) -> list[jax.Array]:
            given = {tensor.name: x for tensor, x in zip(arrays, operands, strict=True)}
            return self._run({**numbers, **given})

        function.__name__ = self.name
        return function, [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in arrays]


def _numberless(plan: Plan, lacking: tuple[str, ...]) -> NumberlessPlan:
    values = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    return NumberlessPlan(**values, lacking=lacking)
