"""The inputs and outputs of a Graph, in the order of positional calls."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .checks import distinct, listed, names
from .declaring import Declaring
from .tensors import NamedTensor


class Ordering(Declaring):
    """The part of a Graph that handles the arguments and results of calls."""

    _io: tuple[Sequence[Any] | None, Sequence[Any] | None] = None, None

    def set_io_tuples(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Set the order in which positional calls take inputs and return outputs.

        Args:
            inputs: references to all inputs. If an array was passed twice while building, two
                references may refer to one input; calls then pass the same array for both.
            outputs: references to results, which become the outputs; they must include all results
                that ``set_output`` marked.

        Raises:
            GraphError: a reference is unknown; an output is listed twice; an input or output is
                missing; or the graph was already called with another order, which compiled code
                uses. The order of ``graph.with_options()``, a copy, may be set.
        """
        inputs, outputs = listed("inputs", inputs), listed("outputs", outputs)
        if self._built.spec is None:
            self._io = inputs, outputs
            return
        results = self._marked(outputs)
        order = self._ordered(inputs, self._built.needed(results))
        self._check_uncalled(order, results)
        self._conclude(results)
        self._order = order

    def _check_uncalled(
        self, order: tuple[NamedTensor, ...], outputs: tuple[NamedTensor, ...]
    ) -> None:
        """Raises GraphError if another order would make compiled calls stale."""
        same = {t.name for t in self._outputs} == {t.name for t in outputs}
        if self._order is not None:  # else it was called by name
            had, has = (*self._order, *self._outputs), (*order, *outputs)
            same = [t.name for t in had] == [t.name for t in has]
        if self._was_called and not same:
            raise GraphError(
                f"set_io_tuples of {self.name} after the graph was called",
                expected=f"inputs {names(self._order or self._inputs)}, "
                f"outputs {names(self._outputs)}",
                got=f"inputs {names(order)}, outputs {names(outputs)}",
                why="jax.jit keeps programs that were compiled for the previous order",
                fix="other = graph.with_options(); other.set_io_tuples(...)",
                where=user_line(),
            )

    def _end(self) -> None:
        """Completes the graph: sets its outputs, and the order of calls if given."""
        inputs, outputs = self._io
        self._conclude(self._marked(outputs))
        if inputs or outputs:
            self._order = self._ordered(inputs, self._inputs)

    def _so_far(self) -> Self:
        """The graph; inside its ``with``, a copy that is complete at this point."""
        if self._built.spec is not None:
            return self
        made = copy.copy(self)
        made._take(self._built.copied())
        made._end()
        return made

    def _marked(self, references: Sequence[Any] | None) -> tuple[NamedTensor, ...]:
        """The outputs, in the order of their references. Raises GraphError if there are none, or
        if a marked output is not listed."""
        recorder = self._built
        marked = [tensor for tensor in recorder.handles.values() if tensor.is_output]
        outputs = marked
        if references:
            outputs = distinct("outputs", [recorder.references.find(ref) for ref in references])
            for tensor in outputs:
                recorder.check_result(tensor, "outputs=")
        known = {tensor.name for tensor in outputs}
        if not known or any(tensor.name not in known for tensor in marked):
            problem = "outputs that are not listed" if known else "no output"
            raise GraphError(
                f"{self.name} has {problem}",
                expected=names(marked) or "at least one result of an operation",
                got=names(outputs) or "none",
                fix="mark results by y.set_output(True), or list all of them in outputs=[...]",
                where=user_line(),
            )
        return tuple(outputs)

    def _ordered(
        self, references: Sequence[Any] | None, needed: tuple[NamedTensor, ...]
    ) -> tuple[NamedTensor, ...]:
        """The inputs in the order of positional calls; raises GraphError if one is missing."""
        if references is None:
            return needed
        recorder = self._built
        inputs = [recorder.references.find(ref) for ref in references]
        known = {tensor.name for tensor in inputs}
        results = [tensor for tensor in inputs if recorder.is_result(tensor)]
        missing = [tensor for tensor in needed if tensor.name not in known]
        if results or missing:
            raise GraphError(
                f"{self.name}: wrong list of inputs",
                expected=names(needed),
                got=names(inputs) or "none",
                why=f"the graph computes {names(results)}" if results else None,
                fix=f"add {names(missing)}" if missing else f"leave out {names(results)}",
                where=user_line(),
            )
        return tuple(inputs)
