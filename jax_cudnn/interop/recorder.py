"""Recorder: the graph builder of a Graph, with names for nodes and tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._core.errors import JaxCudnnError
from .._core.graph.arguments import signature
from .._core.graph.builder import GraphBuilder
from .._core.graph.dims import integers
from .._core.graph.dtypes import INTEGERS, WORDS, is_floating
from .._core.graph.layout import layout, packed_strides
from .._core.graph.node import Node, registry
from .._core.graph.options import Options, TraceContext
from .._core.graph.promotion import result_dtype
from .._core.graph.source import user_line
from .._core.graph.spec import Call, GraphSpec, Tensor
from .._core.graph.tensor import GraphTensor
from .arrays import SHAPE_OF_WORDS, Template, compute_name, is_array, number, offsets_of, refusal
from .attention import IN_MEMORY, PAGES, always_returned, check_given, packed, paged_node, spelled
from .tensors import NamedTensor, References, one_element, result_name

_IN_DROPOUT = {"seed": 1, "offset": 2}
"""Their positions in the frontend's argument ``dropout``."""
_INDICES = (*IN_MEMORY, *PAGES, "ragged_offset")


class Recorder(GraphBuilder):
    """Records pygraph's calls, with arrays as inputs and names for nodes and tensors.

    Each operation is checked when it is called. All are added again, with what was stated of their
    results in the meantime, for the complete graph, and to read a tensor after a used one changed.
    """

    def __init__(self, options: Options, io_data_type: str | None) -> None:
        super().__init__(options)
        self.handles: dict[str, NamedTensor] = {}
        self.spec: GraphSpec | None = None  # of the complete graph
        self.references = References(self.handles)
        self._io_data_type = io_data_type
        self._nodes: dict[str, int] = {}  # their calls by position
        self._returned: set[str] = set()
        self._is_stale = False  # a tensor has changed after its use
        # What was written at the ports of each call, tensors by name, and the stated compute type.
        self._written: list[tuple[dict[str, Any], str | None]] = []
        self.family = object()  # shared by a graph and its copies

    @property
    def nodes(self) -> dict[str, Call]:
        """The operations by the names of their nodes."""
        return {name: self._calls[at] for name, at in self._nodes.items()}

    def copied(self) -> Recorder:
        """A recorder with the same operations, whose outputs may change."""
        self.follow()
        made = copy.copy(self)
        for name, held in vars(self).items():
            if isinstance(held, (dict, list, set)):
                setattr(made, name, copy.copy(held))
        made.handles = {name: copy.copy(tensor) for name, tensor in self.handles.items()}
        for tensor in made.handles.values():
            tensor._builder = made
        made.references = self.references.copied(made.handles)
        return made

    def check_open(self, what: str) -> None:
        """Raises GraphError if the graph is complete."""
        if self.spec is not None:
            raise refusal(
                f"{what} after the graph was built",
                why="a graph is fixed when its `with` ends",
                fix="do this inside the `with`, or build another graph",
            )

    # -- tensors --------------------------------------------------------------------------------

    def declare(self, name: str, template: Template, value: float | None = None) -> NamedTensor:
        """Adds an input of the graph; ``value`` is that of a scalar."""
        tensor = self.handles[self.input(name, template.shape, template.dtype).name]
        tensor.by_value, tensor.number, tensor.window = template.by_value, value, template.window
        if template.order is not None:
            self._set_order(tensor, template.order)
        return tensor

    def _add(self, state: Tensor) -> NamedTensor:
        state = super()._add(state)._state
        if state.name not in self.handles:
            taken = {tensor.uid for tensor in self.handles.values()}
            uid = next(uid for uid in itertools.count(1) if uid not in taken)
            self.handles[state.name] = NamedTensor(self, state, uid)
        self._put(state)
        return self.handles[state.name]

    def _put(self, state: Tensor) -> None:
        self._tensors[state.name] = self.handles[state.name]._state = state

    def _unused(self, tensor: GraphTensor, method: str) -> None:
        """Accepts changes of tensors after their use: the operations will be added again."""
        self._is_stale |= method != "set_stride" and self.is_used(tensor)

    def _set_dtype(self, tensor: GraphTensor, dtype: str) -> GraphTensor:
        handle = self.handles[tensor.name]
        if not handle.is_declared:
            return super()._set_dtype(tensor, dtype)
        self._change_input(tensor, "set_data_type", dtype=dtype)
        handle.is_untyped = False
        return tensor

    def _set_dim(self, tensor: GraphTensor, dim: Any) -> GraphTensor:
        handle = self.handles[tensor.name]
        if not handle.is_declared:
            return super()._set_dim(tensor, dim)
        try:
            shape = integers("set_dim", dim)
        except JaxCudnnError as error:
            error.where = user_line()
            raise
        if shape != tensor.shape:
            if handle.by_value:
                one_element(handle.get_name(), shape)
            self._change_input(tensor, "set_dim", shape=shape, order=None)
            handle.window = None
        return tensor

    def _change_input(self, tensor: GraphTensor, method: str, **changes: Any) -> None:
        state = replace(tensor._state, **changes)
        if state != tensor._state and self.is_used(tensor):
            raise refusal(
                f"{method} of the input {tensor.name} after it was used",
                why="operations were checked with its previous value",
                fix=f"call graph.tensor(...).{method}(...) before an operation uses the tensor",
            )
        self._put(state)

    def is_result(self, tensor: GraphTensor) -> bool:
        """Whether an operation computes the tensor."""
        return any(tensor.name in dict(call.outputs).values() for call in self._calls)

    def is_virtual(self, tensor: NamedTensor) -> bool:
        """Whether the tensor stays inside the graph."""
        returned = tensor.is_output or tensor.name in self._returned
        return not returned and self.is_result(tensor)

    def check_result(self, tensor: GraphTensor, method: str) -> None:
        """Raises GraphError for an input or a constant."""
        if not self.is_result(tensor):
            raise refusal(
                f"{method} of the input {tensor.name}",
                expected="a result of an operation",
                fix="return g.identity(x) instead",
            )

    def give_ragged_offset(self, tensor: NamedTensor, offset: Any) -> None:
        """Sets the ragged offset of a tensor: where each sequence begins, a tensor or an array."""
        if offset is not None:
            offset = self._operand(offset, tensor.name, "ragged_offset", 0).name
        tensor.offset = offset

    def give_uid(self, tensor: NamedTensor, uid: int) -> None:
        """Sets the tensor's uid; a tensor with this uid by default gets another one."""
        if not -(2**63) <= uid < 2**63:
            summary, expected = f"set_uid({uid}): out of range", "a 64-bit integer, as in cuDNN"
            raise refusal(summary, expected=expected)
        for holder in self.handles.values():
            if holder.uid == uid and holder is not tensor:
                if holder.is_own_uid:
                    raise refusal(
                        f"set_uid({uid}): two tensors would have this uid",
                        got=f"{holder.name} and {tensor.name}",
                        fix="set another uid for one of them, or none",
                    )
                holder.uid = tensor.uid
        tensor.uid, tensor.is_own_uid = uid, True

    def strides(self, tensor: NamedTensor) -> list[int]:
        """A tensor's strides: as cuDNN sees them once the graph is complete, else as stated."""
        order = tensor._state.order
        if self.spec is not None and tensor.name in {t.name for t in self.spec.tensors}:
            order = layout(self.spec).orders[tensor.name]
        return packed_strides(tensor.shape, order or tuple(range(tensor.ndim)))

    # -- operations -----------------------------------------------------------------------------

    def _apply(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.check_open(f"g.{method}")
        self.follow()
        node = kwargs.pop("name", None) or f"{method}.{self._counts[method]}"
        if node in self._nodes:
            fix = "give one of them another name, or none"
            raise refusal(f"two nodes are called {node!r}", fix=fix)
        paged = {*PAGES} & {*kwargs} if method in ("sdpa", "sdpa_fp8") else ()
        tables = {PAGES[name]: kwargs.pop(name) for name in paged}
        most = kwargs.get("paged_attention_max_seq_len_kv")
        kwargs = spelled(method, kwargs)
        compute = kwargs.get("compute_data_type")
        if compute is not None:
            compute = kwargs["compute_data_type"] = compute_name(compute)
        try:
            bound = _signature(method).bind(*args, **kwargs)
        except TypeError:
            super()._apply(method, *args, **kwargs)  # it raises a better error
            raise
        given, ports = bound.arguments, {port.name for port in registry()[method].ports.inputs}
        for position, name in enumerate(_signature(method).parameters):
            if name in ports and name in given:
                given[name] = self._operand(given[name], node, name, position)
        if any(table is not None for table in tables.values()):
            self._apply_to_pages(method, node, given, tables, most)
        else:
            super()._apply(method, *bound.args, **bound.kwargs)
        self._nodes[node] = len(self._calls) - 1
        return self._results(node, self._calls[-1])

    def _apply_to_pages(
        self, method: str, node: str, given: dict[str, Any], tables: dict[str, Any], most: Any
    ) -> None:
        """Adds attention with paged keys and values."""
        ports = registry()[method].ports.input_names
        attributes = {name: x for name, x in given.items() if name not in ports}
        attributes.pop("compute_data_type", None)
        operands = {name: x for name, x in given.items() if name in ports and x is not None}
        for name, port in PAGES.items():
            if tables.get(port) is not None:
                operands[port] = self._operand(tables[port], node, name, len(given))
        try:
            self._call(paged_node(method, attributes, operands, most), operands, "float32")
        except JaxCudnnError as error:
            error.summary, error.where = f"g.{method}: {error.summary}", error.where or user_line()
            raise

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
                tensor.by_value &= port not in (*_INDICES, *_IN_DROPOUT)
                if port in _IN_DROPOUT:
                    self._take_words(tensor)
                self.references.remember(value, tensor)
            value = tensor
        if isinstance(value, NamedTensor):
            if value.is_untyped:
                raise refusal(
                    f"the tensor {value.get_name()} has no data type",
                    fix="graph.tensor(..., data_type=...), .set_data_type(...), or "
                    "Graph(io_data_type=...)",
                )
            if port in _INDICES and value._state.dtype == "int64" and not self.is_used(value):
                value.is_long = True
                self._put(replace(value._state, dtype="int32"))
            aliases = [f"{node}::{position}"]
            if port in _IN_DROPOUT:
                aliases.append(f"{node}::dropout::{_IN_DROPOUT[port]}")
                if value.is_declared:
                    self._take_words(value)
            self.references.add(value.name, f"{node}::{port}", *aliases)
        return value

    def _take_words(self, tensor: NamedTensor) -> None:
        """Converts an input that is one integer to the two words that represent cuDNN's INT64."""
        state = tensor._state
        if state.dtype in INTEGERS and math.prod(state.shape) == 1 and not self.is_used(tensor):
            tensor.by_value = False
            self._put(replace(state, shape=SHAPE_OF_WORDS, dtype=WORDS, order=None))

    def _call(self, node: Node, ports: dict[str, Any], compute: str | None) -> Any:
        made = super()._call(node, ports, compute)
        by_name = {p: x.name if isinstance(x, GraphTensor) else x for p, x in ports.items()}
        self._written.append((by_name, compute))
        return made

    def _results(self, node: str, call: Call) -> Any:
        """The return value of the frontend's method: a tensor, or a list with None for results that
        a node with these attributes does not have."""
        made = {port: self.handles[name] for port, name in call.outputs}
        for port, tensor in made.items():
            name = f"{node}::{result_name(call.node.method, port)}"
            self.references.add(tensor.name, name, name, f"{node}::{port}")
        ports = call.node.ports.output_names
        if len(ports) == 1:
            return made[ports[0]]
        return [made.get(port) for port in ports if port in made or always_returned(port)]

    # -- adding all operations again --------------------------------------------------------------

    def follow(self) -> None:
        """Lets the operations follow changes of tensors that they use. Until :meth:`conclude`,
        further changes may resolve a mismatch."""
        if self._is_stale:
            with contextlib.suppress(JaxCudnnError), self._again(self._returned):
                pass

    @contextlib.contextmanager
    def _again(self, returned: Iterable[str]) -> Iterator[None]:
        """Adds all operations again, for these outputs. If this or the ``with`` raises, nothing
        changes."""
        self._is_stale = False
        before = self._returned, self._tensors, self._calls, self._counts
        _, tensors, calls, _ = before
        self._returned, self._tensors, self._calls = {*returned}, {}, []
        self._counts = Counter()
        made_by = {call.outputs[0][1]: i for i, call in enumerate(calls)}
        try:
            for name, state in tensors.items():
                if name in made_by:
                    i = made_by[name]
                    self._repeat(calls[i], *self._written[i], tensors)
                elif name in self._inputs:
                    self._add(state)
            yield
        except BaseException:
            self._returned, self._tensors, self._calls, self._counts = before
            for state in tensors.values():
                self._put(state)
            raise

    def _repeat(
        self,
        call: Call,
        written: Mapping[str, Any],
        compute: str | None,
        before: Mapping[str, Tensor],
    ) -> None:
        """Adds a call again; its results keep the dtypes and orders that the user stated."""
        ports = {p: self.handles[x] if isinstance(x, str) else x for p, x in written.items()}
        try:
            super()._call(call.node, ports, compute)
        except JaxCudnnError as error:
            error.summary = f"{call.name}, after a change of tensors: {error.summary}"
            raise
        inputs = {port: self._tensors[name] for port, name in self._calls[-1].inputs}
        for port, name in call.outputs:
            state = self._tensors[name]
            dtype = state.dtype
            if name in self._typed:
                dtype = before[name].dtype
            elif name in self._returned and self._io_data_type and is_floating(dtype):
                dtype = dtype if _fixes(call.node, port, inputs) else self._io_data_type
            self._put(replace(state, dtype=dtype, order=before[name].order))

    # -- the graph ------------------------------------------------------------------------------

    def conclude(self, outputs: Sequence[NamedTensor]) -> GraphSpec:
        """Completes a graph with these outputs; all shapes and dtypes become final.

        A floating output without a stated dtype gets the graph's ``io_data_type``, unless the
        operation fixes it (statistics of a normalization are float32). If this raises, nothing
        changes.
        """
        with self._again(tensor.name for tensor in outputs):
            spec = self.finish(outputs, self._options, TraceContext.now())
            check_given(spec)
        self.spec = spec
        return spec

    def finish(
        self,
        outputs: Sequence[GraphTensor],
        options: Options | None = None,
        context: TraceContext | None = None,
    ) -> GraphSpec:
        spec = super().finish(outputs, options, context)
        offsets = offsets_of(self.handles)
        return packed(spec, offsets, self._tensors, self._inputs) if offsets else spec


@functools.cache
def _signature(method: str) -> inspect.Signature:
    return signature(registry()[method])


def _fixes(node: Node, port: str, inputs: dict[str, Tensor]) -> bool:
    """Whether the operation fixes the dtype of a result for any operands: statistics of a
    normalization are float32."""
    if node.ports.output_names == (port,):
        return False
    narrow = {
        p: replace(t, dtype="bfloat16") if is_floating(t.dtype) and math.prod(t.shape) > 1 else t
        for p, t in inputs.items()
    }
    try:
        return node.infer(narrow)[port][1] == "float32"
    except JaxCudnnError:  # it does not support such operands
        return node.infer(inputs)[port][1] != result_dtype(inputs)
