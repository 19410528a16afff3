"""Recorder: the graph builder of a Graph, with names for nodes and tensors."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from .._core.errors import GraphError, JaxCudnnError
from .._core.graph.calls import signature
from .._core.graph.dims import integers
from .._core.graph.dtypes import INTEGERS, WORDS
from .._core.graph.layout import layout, packed_strides
from .._core.graph.node import REGISTRY
from .._core.graph.options import Options, Surroundings
from .._core.graph.source import user_line
from .._core.graph.spec import Call, GraphSpec, Tensor
from .._core.graph.tensor import GraphTensor
from .canonical import inputs_first, with_constants, with_usual_orders
from .inferring import Inferring
from .references import References
from .spellings import always_returned, spelled
from .templates import SHAPE_OF_WORDS, Template, compute_name, is_array, number
from .tensors import NamedTensor, one_element
from .tokens import IN_MEMORY, PAGES, check_given, packed, paged_node

Constants = tuple[tuple[str, str], ...]
"""Scalar inputs, each with ``float.hex`` of its value."""


class Recorder(Inferring):
    """Collects operations from pygraph's calls, like ``g`` of a graph function.

    Arrays become inputs. Nodes have names. If the user changes a shape or dtype after a tensor was
    used, all are inferred again when the graph is concluded.
    """

    def __init__(self, options: Options, io_data_type: str | None) -> None:
        super().__init__(options, io_data_type)
        self._positions: dict[str, int] = {}
        self.references = References(self.handles)
        self.spec: GraphSpec | None = None
        self._uids: dict[int, NamedTensor] = {}
        self._chosen_uids: set[int] = set()
        self._declared: set[str] = set()  # inputs that were not passed as arrays
        self._untyped: set[str] = set()  # those of them that have no dtype yet
        self._ragged: dict[str, str] = {}  # tensors and their ragged offsets
        self.family = object()  # shared by a graph and its copies

    @property
    def nodes(self) -> dict[str, Call]:
        """The operations by the names of their nodes."""
        return {name: self._calls[at] for name, at in self._positions.items()}

    # -- tensors --------------------------------------------------------------------------------

    def declare(self, name: str, template: Template, value: float | None = None) -> NamedTensor:
        """Adds an input of the graph; ``value`` is that of a scalar."""
        tensor = self.handles[self.input(name, template.shape, template.dtype).name]
        tensor.by_value, tensor.number = template.by_value, value
        if template.order is not None:
            self._set_order(tensor, template.order)
        return tensor

    def leave_open(self, tensor: NamedTensor, *, without_dtype: bool) -> None:
        """Allows setters to change an input until an operation uses it."""
        self._declared.add(tensor.name)
        if without_dtype:
            self._untyped.add(tensor.name)

    def is_untyped(self, tensor: Any) -> bool:
        """Whether it is a declared tensor without a dtype."""
        return isinstance(tensor, NamedTensor) and tensor.name in self._untyped

    def _set_dtype(self, tensor: GraphTensor, dtype: str) -> GraphTensor:
        if tensor.name not in self._declared:
            super()._set_dtype(tensor, dtype)
            self._infer_again()
            return tensor
        if dtype != tensor._state.dtype:
            self._check_unused(tensor, "set_data_type")
        self._untyped.discard(tensor.name)
        self._put(replace(tensor._state, dtype=dtype))
        return tensor

    def _set_dim(self, tensor: GraphTensor, dim: Any) -> GraphTensor:
        if tensor.name not in self._declared:
            super()._set_dim(tensor, dim)
            self._infer_again()
            return tensor
        try:
            shape = integers("set_dim", dim)
        except JaxCudnnError as error:
            error.where = user_line()
            raise
        if shape != tensor.shape:
            self._check_unused(tensor, "set_dim")
            if self.handles[tensor.name].by_value:
                one_element(self.handles[tensor.name].get_name(), shape)
            self._put(replace(tensor._state, shape=shape, order=None))
        return tensor

    def _check_unused(self, tensor: GraphTensor, method: str) -> None:
        if self.is_used(tensor):
            raise GraphError(
                f"{method} of the input {tensor.name} after it was used",
                why="operations were checked with its previous value",
                fix=f"call graph.tensor(...).{method}(...) before an operation uses the tensor",
                where=user_line(),
            )

    def _add(self, state: Tensor) -> NamedTensor:
        name = super()._add(state).name
        uid = next(uid for uid in itertools.count(1) if uid not in self._uids)
        self.handles[name] = self._uids[uid] = NamedTensor(self, self._tensors[name], uid)
        return self.handles[name]

    def is_result(self, tensor: GraphTensor) -> bool:
        """Whether an operation computes the tensor."""
        return any(tensor.name in dict(call.outputs).values() for call in self._calls)

    def dtype(self, tensor: NamedTensor) -> str:
        """The tensor's dtype in this graph, which depends on whether it is an output."""
        return self._tensors[tensor.name].dtype

    def is_virtual(self, tensor: NamedTensor) -> bool:
        """Whether the tensor stays inside the graph."""
        returned = tensor.is_output or tensor.name in self._returned
        return not returned and self.is_result(tensor)

    def is_open_in_shape(self, tensor: GraphTensor) -> bool:
        """Whether the operation that computes the tensor leaves its shape to the user."""
        makers = (c for c in self._calls if tensor.name in dict(c.outputs).values())
        return any(field.name == "out_dims" for c in makers for field in fields(c.node))

    def check_result(self, tensor: GraphTensor, method: str) -> None:
        """Raises GraphError for an input or a constant."""
        if not self.is_result(tensor):
            raise GraphError(
                f"{method} of the input {tensor.name}",
                expected="a result of an operation",
                fix="return g.identity(x) instead",
                where=user_line(),
            )

    def give_ragged_offset(self, tensor: NamedTensor, offset: Any) -> None:
        """Sets the ragged offset of a tensor: where each sequence begins, a tensor or an array."""
        if offset is None:
            self._ragged.pop(tensor.name, None)
            return
        self._ragged[tensor.name] = self._operand(offset, tensor.name, "ragged_offset", 0).name

    def ragged_offset(self, tensor: NamedTensor) -> NamedTensor | None:
        """The ragged offset of a tensor, or None."""
        return self.handles.get(self._ragged.get(tensor.name, ""))

    def give_uid(self, tensor: NamedTensor, uid: int) -> None:
        """Sets the tensor's uid; a tensor with this uid by default gets another one."""
        if not -(2**63) <= uid < 2**63:
            raise GraphError(
                f"set_uid({uid}): out of range",
                expected="a 64-bit integer, as in cuDNN",
                where=user_line(),
            )
        holder = self._uids.get(uid)
        if holder is not tensor:
            if holder is not None and uid in self._chosen_uids:
                raise GraphError(
                    f"set_uid({uid}): two tensors would have this uid",
                    got=f"{holder.name} and {tensor.name}",
                    fix="set another uid for one of them, or none",
                    where=user_line(),
                )
            del self._uids[tensor.uid]
            self._chosen_uids.discard(tensor.uid)
            if holder is not None:
                holder.uid = tensor.uid
                self._uids[holder.uid] = holder
            tensor.uid = uid
            self._uids[uid] = tensor
        self._chosen_uids.add(uid)

    def strides(self, tensor: NamedTensor) -> list[int]:
        """A tensor's strides: as cuDNN sees them once the graph is complete, else as stated."""
        order = tensor._state.order
        if self.spec is not None and tensor.name in {t.name for t in self.spec.tensors}:
            order = layout(self.spec).orders[tensor.name]
        return packed_strides(tensor.shape, order or tuple(range(tensor.ndim)))

    # -- operations -----------------------------------------------------------------------------

    def check_open(self, what: str) -> None:
        """Raises GraphError if the graph is complete."""
        if self.spec is not None:
            raise GraphError(
                f"{what} after the graph was built",
                why="a graph is fixed when its `with` ends",
                fix="do this inside the `with`, or build another graph",
                where=user_line(),
            )

    def _apply(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.check_open(f"g.{method}")
        node = self._node_name(method, kwargs.pop("name", None))
        paged = {*PAGES} & {*kwargs} if method == "sdpa" else ()
        tables = {PAGES[name]: kwargs.pop(name) for name in paged}
        kwargs = spelled(method, kwargs)
        if kwargs.get("compute_data_type") is not None:
            kwargs["compute_data_type"] = compute_name(kwargs["compute_data_type"])
        try:
            bound = _signature(method).bind(*args, **kwargs)
        except TypeError:
            super()._apply(method, *args, **kwargs)  # it raises a better error
            raise
        ports = {port.name for port in REGISTRY[method].ports.inputs}
        for position, name in enumerate(_signature(method).parameters):
            if name in ports and name in bound.arguments:
                value = bound.arguments[name]
                bound.arguments[name] = self._operand(value, node, name, position)
        if any(table is not None for table in tables.values()):
            self._apply_to_pages(node, bound.arguments, tables)
        else:
            super()._apply(method, *bound.args, **bound.kwargs)
        if kwargs.get("compute_data_type") is not None:
            self._computes[self._calls[-1].name] = kwargs["compute_data_type"]
        return self._results(node, self._calls[-1])

    def _apply_to_pages(self, node: str, arguments: dict[str, Any], tables: dict[str, Any]) -> None:
        """Adds attention with paged keys and values."""
        ports = {port.name for port in REGISTRY["sdpa"].ports.inputs}
        given = {name: x for name, x in arguments.items() if name in ports and x is not None}
        for name, port in PAGES.items():
            given[port] = self._operand(tables.get(port), node, name, len(arguments))
        attributes = {name: x for name, x in arguments.items() if name not in ports}
        attributes.pop("compute_data_type", None)
        try:
            made = paged_node(attributes, [port for port, x in given.items() if x is not None])
            beside = [x._state for x in given.values() if isinstance(x, GraphTensor)]
            self._append(made, {port: self._lift(x, port, beside) for port, x in given.items()})
        except JaxCudnnError as error:
            error.summary, error.where = f"g.sdpa: {error.summary}", error.where or user_line()
            raise

    def _node_name(self, method: str, name: str | None) -> str:
        name = name or f"{method}.{self._counts[method]}"
        if name in self._positions:
            raise GraphError(
                f"two nodes are called {name!r}",
                fix="give one of them another name, or none",
                where=user_line(),
            )
        return name

    def _operand(self, value: Any, node: str, port: str, position: int) -> Any:
        """The operand of a port, with arrays as inputs of the graph; records references to it."""
        if isinstance(value, (list, tuple)):
            return [self._operand(x, f"{node}::{port}", str(i), i) for i, x in enumerate(value)]
        if isinstance(value, np.generic):
            return value.item()
        if is_array(value):
            tensor = self.references.recall(value)
            if tensor is None:
                tensor = self.declare(f"{node}::{port}", Template.of(value), number(value))
                if port in (*IN_MEMORY, *PAGES, *_IN_DROPOUT):
                    tensor.by_value = False
                if port in _IN_DROPOUT:
                    self._take_words(tensor)
                self.references.remember(value, tensor)
            value = tensor
        if isinstance(value, NamedTensor):
            self._check_typed(value)
            if port in _IN_DROPOUT and value.name in self._declared:
                self._take_words(value)
            self.references.name(f"{node}::{port}", value)
            self.references.alias(f"{node}::{position}", value)
            if port in _IN_DROPOUT:
                self.references.alias(f"{node}::dropout::{_IN_DROPOUT[port]}", value)
        return value

    def _take_words(self, tensor: NamedTensor) -> None:
        """Converts an input that is one integer to the two words that represent cuDNN's INT64."""
        state = tensor._state
        if state.dtype in INTEGERS and math.prod(state.shape) == 1 and not self.is_used(tensor):
            tensor.by_value = False
            self._put(replace(state, shape=SHAPE_OF_WORDS, dtype=WORDS, order=None))

    def _check_typed(self, tensor: NamedTensor) -> None:
        if self.is_untyped(tensor):
            raise GraphError(
                f"the tensor {tensor.get_name()} has no data type",
                fix="graph.tensor(..., data_type=...), .set_data_type(...), or "
                "Graph(io_data_type=...)",
                where=user_line(),
            )

    def _results(self, node: str, call: Call) -> Any:
        """The return value of the frontend's method: a tensor, or a list with None for results that
        a node with these attributes does not have."""
        self._positions[node] = len(self._calls) - 1
        made = {port: self.handles[name] for port, name in call.outputs}
        for port, tensor in made.items():
            self.references.result(node, call.node.method, port, tensor)
        ports = call.node.ports.output_names
        if len(ports) == 1:
            return made[ports[0]]
        return [made.get(port) for port in ports if port in made or always_returned(port)]

    def _unused(self, tensor: GraphTensor, method: str) -> None:
        """Accepts changes of tensors after their use: see :meth:`conclude`."""

    # -- the graph ------------------------------------------------------------------------------

    def finish(
        self,
        outputs: Sequence[GraphTensor],
        options: Options | None = None,
        around: Surroundings | None = None,
    ) -> GraphSpec:
        spec = super().finish(outputs, options, around)
        return packed(spec, self._ragged, self._tensors, self._inputs) if self._ragged else spec

    def copied(self) -> Recorder:
        """A recorder with the same operations, whose outputs may change."""
        made = copy.copy(self)
        for name, held in vars(self).items():
            if isinstance(held, (dict, list, set)):
                setattr(made, name, copy.copy(held))
        made.handles = {name: tensor.of(made) for name, tensor in self.handles.items()}
        made._uids = {tensor.uid: tensor for tensor in made.handles.values()}
        made.references = self.references.copied(made.handles)
        return made

    def needed(self, outputs: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
        """The inputs that the outputs depend on."""
        return tuple(self.handles[name] for name in self.finish(outputs).inputs)

    def conclude(self, outputs: Sequence[NamedTensor]) -> GraphSpec:
        """Completes a graph with these outputs; all shapes and dtypes become final.

        A floating output without a stated dtype gets the graph's ``io_data_type``, unless the
        operation fixes it (statistics of a normalization are float32). If this raises, nothing
        changes.
        """
        before = self._returned, [*self._calls], [*self._tensors.values()]
        try:
            self._returned = {tensor.name for tensor in outputs}
            self._infer_all()
            spec = self.finished(outputs, self._options, Surroundings.now())
            check_given(spec)
        except BaseException:
            self._returned, self._calls, tensors = before
            for state in tensors:
                self._put(state)
            raise
        self.spec = spec
        return spec

    def finished(
        self,
        outputs: Sequence[NamedTensor],
        options: Options,
        around: Surroundings,
        constants: Constants = (),
        order: Sequence[NamedTensor] = (),
    ) -> GraphSpec:
        """The spec for these outputs, with inputs in this order and ``constants`` in place of
        scalar inputs."""
        spec = with_constants(self.finish(outputs, options, around), dict(constants))
        names = [tensor.name for tensor in order] or self._inputs
        return with_usual_orders(inputs_first(spec, names))


_IN_DROPOUT = {"seed": 1, "offset": 2}
"""Their positions in the frontend's argument ``dropout``."""


@functools.cache
def _signature(method: str) -> inspect.Signature:
    return signature(REGISTRY[method])
