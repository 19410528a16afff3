"""The tensors and operations of a Graph."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.errors import GraphAttributeError, GraphError, rebuild
from .._core.graph.bounds import bounded
from .._core.graph.node import REGISTRY
from .._core.graph.options import DEFAULTS, Options, Surroundings
from .._core.graph.source import user_line
from .._core.graph.spec import GraphSpec, Tensor
from .._core.primitive import bind
from .checks import is_unset, names, refuse_reordered, refuse_virtual, text
from .json_text import as_json, label
from .recorder import Constants, Recorder
from .templates import Template, constant, dtype_name, number, operand
from .tensors import NamedTensor


class GraphNode(NamedTuple):
    """An operation of a Graph: its name, pygraph's method, its tensors by port, its attributes."""

    name: str
    method: str
    inputs: dict[str, NamedTensor]
    outputs: dict[str, NamedTensor]
    params: dict[str, Any]


class Declaring:
    """The part of a Graph that handles tensors and operations."""

    def __init__(self, name: str, io_data_type: str | None, options: Options) -> None:
        self.name = self.__name__ = text("name", name)  # the latter names jitted programs
        self._io_data_type, self._options = io_data_type, options
        self._recorder: Recorder | None = None
        self._inputs: tuple[NamedTensor, ...] = ()  # those that the outputs need
        self._outputs: tuple[NamedTensor, ...] = ()
        self._order: tuple[NamedTensor, ...] | None = None  # of positional calls
        self._was_called = False
        self._keep_specs()

    def _keep_specs(self) -> None:
        self._spec = functools.lru_cache(maxsize=64)(self._finished)

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Any = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
    ) -> NamedTensor:
        """Declare an input by its shape.

        Args:
            dim: its shape.
            stride: packed element strides, which give its memory order; by default the order that
                the operations prefer.
            data_type: its dtype; by default the graph's ``io_data_type``, or that of
                ``set_data_type``, called before an operation uses the tensor.
            is_virtual: must be False: operations create the intermediates.
            is_pass_by_value: whether it is one scalar in host memory. A call may then pass a Python
                number or NumPy array, which becomes a constant of the plan, or a JAX array, which
                is an operand.
            ragged_offset: where each sequence begins, see :meth:`NamedTensor.set_ragged_offset`.
            reordering_type: must be None.
            name: a name to refer to it.
            uid: an integer to refer to it.

        Raises:
            GraphError: the strides have gaps or overlaps; or, when an operation uses the tensor, it
                has no dtype.
        """
        recorder = self._building("tensor")
        refuse_virtual(is_virtual)
        refuse_reordered(reordering_type)
        dtype = self._io_data_type if is_unset(data_type) else dtype_name(data_type)
        made = recorder.declare(
            name or f"tensor_{len(recorder.handles)}", Template(tuple(dim), dtype or "float32")
        )
        recorder.leave_open(made, without_dtype=dtype is None)
        made.set_is_pass_by_value(is_pass_by_value)
        if stride:
            made.set_stride(stride)
        if uid not in (None, -1):
            made.set_uid(uid)
        made.set_ragged_offset(ragged_offset)
        return self._called(made, name)

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> NamedTensor:
        """Declare an input with the shape, dtype and memory order of an array or a tensor."""
        recorder = self._building("tensor_like")
        refuse_virtual(is_virtual)
        if isinstance(template, NamedTensor):
            like = template._state
            known = Template(like.shape, like.dtype, like.order, template.by_value)
            value = template.number
        else:
            known, value = Template.of(template), number(template)
        made = recorder.declare(name or f"tensor_{len(recorder.handles)}", known, value)
        recorder.leave_open(made, without_dtype=recorder.is_untyped(template))
        if not isinstance(template, NamedTensor):
            recorder.references.remember(template, made)
        return self._called(made, name)

    def find_tensor(self, reference: Any) -> NamedTensor:
        """The tensor of a reference; raises GraphError if there is none."""
        return self._built.references.find(reference)

    query_tensor_attributes_of_uid = find_tensor

    def get_inputs(self) -> list[NamedTensor]:
        """The inputs that the outputs depend on, in the order of declaration."""
        self._check_complete()
        return [*self._inputs]

    def get_outputs(self) -> list[NamedTensor]:
        """The outputs, in the order of results."""
        self._check_complete()
        return [*self._outputs]

    def _called(self, tensor: NamedTensor, name: str) -> NamedTensor:
        """Makes a declared tensor known by the given name, or else by its own."""
        if not name:
            self._built.references.name(tensor.name, tensor)
        return tensor.set_name(name)

    def tensor_scalar(self, value: float, scalar_type: Any = None, name: str = "") -> float:
        """Returns the value: any operation takes a Python number as a constant."""
        self._building("tensor_scalar")
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in REGISTRY:
            try:
                return getattr(self._building(name), name)
            except GraphError as error:  # hasattr and inspect expect an AttributeError
                raise rebuild(GraphAttributeError, vars(error)) from None
        return (self._recorder or Recorder(DEFAULTS, None)).__getattr__(name)  # raises

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *REGISTRY})

    def _conclude(self, outputs: tuple[NamedTensor, ...]) -> None:
        spec = self._built.conclude(outputs)
        self._inputs = tuple(self._built.handles[name] for name in spec.inputs)
        self._outputs = outputs
        self._spec.cache_clear()

    def _take(self, recorder: Recorder) -> None:
        """Replaces the graph's recorder by a copy."""
        self._recorder = recorder

        def own(tensors: Sequence[NamedTensor]) -> tuple[NamedTensor, ...]:
            return tuple(recorder.handles[tensor.name] for tensor in tensors)

        self._inputs, self._outputs = own(self._inputs), own(self._outputs)
        self._order = None if self._order is None else own(self._order)

    def _forget_numbers(self) -> None:
        """Forgets the values of the scalars that the graph was built with."""
        for tensor in self._recorder.handles.values() if self._recorder else ():
            tensor.number = None

    def _run(self, values: Mapping[str, Any]) -> list[jax.Array]:
        """The outputs, for inputs by tensor name."""
        self._check_given(values)
        constants = {
            tensor.name: value
            for tensor in self._inputs
            if tensor.by_value
            and (value := constant(tensor, values[tensor.name], self._input(tensor))) is not None
        }
        if constants and len(constants) == len(self._inputs):  # a plan needs an operand
            first = self._inputs[0]
            values = {**values, first.name: jnp.asarray(constants.pop(first.name), first.dtype)}
        literals = tuple((name, value.hex()) for name, value in constants.items())
        spec = self._spec(Surroundings.now(), literals)
        operands = [
            operand(tensor, values[tensor.name], self._input(tensor))
            for tensor in spec.input_tensors
        ]
        return bind(spec, self.name, *bounded(spec, operands))

    def _check_given(self, values: Mapping[str, Any], unknown: Sequence[Any] = ()) -> None:
        """Raises GraphError for missing inputs; ``unknown`` are keys that refer to no tensor."""
        missing = [tensor for tensor in self._inputs if tensor.name not in values]
        if missing:
            raise GraphError(
                f"{self.name}: inputs are missing",
                expected=names(self._inputs),
                got=f"none for {names(missing)}",
                why=f"the graph has no tensor {', '.join(map(repr, unknown))}" if unknown else None,
                where=user_line(),
            )

    def _input(self, tensor: NamedTensor | Tensor) -> str:
        return f"{self.name}: input {tensor.name!r}"

    def _finished(self, around: Surroundings, constants: Constants) -> GraphSpec:
        order = self._in_order()
        return self._built.finished(self._outputs, self._options, around, constants, order)

    def _in_order(self) -> list[NamedTensor]:
        """The inputs that the outputs depend on, in the order of positional calls if set."""
        if self._order is None:
            return [*self._inputs]
        places = [tensor.name for tensor in self._order]
        return sorted(self._inputs, key=lambda tensor: places.index(tensor.name))

    # -- contents -----------------------------------------------------------------------------

    @property
    def spec(self) -> GraphSpec:
        """The graph as a value; prints as text."""
        self._check_complete()
        return self._spec(Surroundings.now(), ())

    def to_json(self) -> str:
        """The graph's context, nodes and tensors as JSON, with the frontend's keys. Non-finite
        values are the strings "inf", "-inf" and "nan"."""
        context = {
            "name": self.name,
            "io_data_type": self._io_data_type,
            "intermediate_data_type": self._options.intermediate_data_type,
            "compute_data_type": self._options.compute_data_type or "float32",
        }
        return as_json(self._built, context)

    def inspect(self) -> dict[str, Any]:
        """The same as a dictionary."""
        return json.loads(self.to_json())

    @property
    def tensors(self) -> dict[str, NamedTensor]:
        """The tensors by name; those without a name by node and port."""
        recorder = self._built
        tensors = [t for t in recorder.handles.values() if t._state.value is None]
        return {label(recorder, tensor): tensor for tensor in tensors}

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """The operations, in the order in which they were added."""
        return tuple(
            GraphNode(
                name,
                call.node.method,
                {port: self._built.handles[x] for port, x in call.inputs},
                {port: self._built.handles[x] for port, x in call.outputs},
                call.node.keywords(),
            )
            for name, call in self._built.nodes.items()
        )

    def get_node(self, name: str) -> GraphNode | None:
        """The operation of this name, or None."""
        return next((node for node in self.nodes if node.name == name), None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_spec"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep_specs()

    def __str__(self) -> str:
        return repr(self) if self._recorder is None else self.to_json()

    def __repr__(self) -> str:
        nodes = [] if self._recorder is None else self._recorder.nodes
        return f"<jax_cudnn.Graph {self.name}: {' '.join(nodes) or 'not built'}>"

    @property
    def _built(self) -> Recorder:
        if self._recorder is None:
            raise GraphError(
                f"{self.name} is not built",
                fix=f"add operations: with jax_cudnn.Graph(...) as {self.name}: ...",
                where=user_line(),
            )
        return self._recorder

    def _check_complete(self) -> None:
        if self._built.spec is None:
            raise GraphError(
                f"{self.name} is still being built",
                fix="do this after its `with`",
                where=user_line(),
            )

    def _building(self, what: str) -> Recorder:
        self._built.check_open(what)
        return self._built
