"""GraphBuilder: the methods of cudnn.pygraph for symbolic tensors, from the node registry."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import jax
import numpy as np

from ..errors import GraphAttributeError, GraphError, GraphTypeError, JaxCudnnError, nearest, shown
from .arguments import ports_of, signature
from .dims import Dims, Shape, integers
from .dtypes import float32_range, int32_range, promotes_to_integer, wide_dtype
from .node import REGISTRY, Node, registry
from .options import DEFAULTS, NO_CONTEXT, Options, TraceContext
from .promotion import compute_type, computed, inferred, intermediate_dtypes
from .source import user_line
from .spec import Call, GraphSpec, Tensor, intern
from .tensor import GraphTensor


class GraphBuilder:
    """Collects operations; its methods have the names and keywords of ``cudnn.pygraph``.

    Every method also takes ``name=`` and ``compute_data_type=``.
    """

    def __init__(self, options: Options = DEFAULTS, context: TraceContext = NO_CONTEXT) -> None:
        registry()
        self._options, self._context = options, context
        self._tensors: dict[str, Tensor] = {}
        self._calls: list[Call] = []
        self._counts: Counter[str] = Counter()
        self._inputs: list[str] = []
        self._typed: set[str] = set()  # tensors whose dtype the user chose
        self._captured: dict[Any, tuple[Any, jax.Array, GraphTensor]] = {}

    @property
    def captured(self) -> list[jax.Array]:
        """Arrays that the user's function closed over, in the order of their inputs."""
        return [array for _, array, _ in self._captured.values()]

    def input(self, name: str, shape: Shape, dtype: str) -> GraphTensor:
        """Declare an operand of the graph; its dtype is checked where it is used."""
        tensor = self._add(Tensor(name, tuple(shape), dtype))
        self._inputs.append(tensor._state.name)
        return tensor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        same = (name for name, node in REGISTRY.items() if method in node.about.jax_names)
        found = next(same, "")
        raise GraphAttributeError(
            f"g has no operation {method!r}",
            expected="an operation of the support table, such as conv_fprop, matmul or relu",
            fix=f"use g.{found}"
            if found
            else nearest(f"g.{method}", (f"g.{name}" for name in REGISTRY)),
            where=user_line(),
        )

    def finish(
        self,
        outputs: Sequence[GraphTensor],
        options: Options | None = None,
        context: TraceContext | None = None,
    ) -> GraphSpec:
        """The spec that computes ``outputs``; operations and inputs they don't need are left out.

        The dtype an intermediate was given by inference is that of an output; inside the graph
        floats have the options' intermediate type (float32), but for what enters a product
        (:func:`intermediate_dtypes`), integers and booleans their own.
        ``options`` and ``context`` replace those of the builder: a graph may be finished several
        times.
        """
        names = tuple(dict.fromkeys(tensor._state.name for tensor in outputs))
        needed, calls = set(names), []
        for call in reversed(self._calls):
            if needed & {name for _, name in call.outputs}:
                calls.insert(0, call)
                needed |= {name for _, name in (*call.inputs, *call.outputs)}
        said = {tensor.name: tensor.dtype for tensor in self._tensors.values()}
        fixed = self._typed | {*names, *self._inputs}
        inside = intermediate_dtypes(calls, said, fixed, self._options.intermediate_data_type)
        tensors = tuple(
            replace(t, dtype=inside[t.name]) for t in self._tensors.values() if t.name in needed
        )
        inputs = tuple(name for name in self._inputs if name in needed)
        spec = GraphSpec(tensors, tuple(calls), inputs, names)
        given, context = options or self._options, context or self._context
        options = given.resolved(context, spec.has_float32_product)
        if options.deterministic:
            calls = [replace(call, node=call.node.deterministic() or call.node) for call in calls]
        return intern(replace(spec, calls=tuple(calls), options=options))

    # -- what the generated methods do ---------------------------------------------------------

    def _apply(self, method: str, *args: Any, **kwargs: Any) -> Any:
        cls = REGISTRY[method]
        try:
            bound = signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise GraphTypeError(
                f"g.{method}: {error}",
                expected=f"g.{method}{signature(cls)}",
                where=user_line(),
            ) from None
        given = bound.arguments
        try:
            compute = given.pop("compute_data_type", None)
            given.pop("name", None)
            given = cls.prepared(dict(given))
            ports = dict(ports_of(cls, given))
            node = cls.create(**given)
            hash(node)  # an attribute that is not static raises
            return self._call(node, ports, compute)
        except JaxCudnnError as error:
            error.summary = f"g.{method}: {error.summary}"
            error.where = error.where or user_line()
            raise

    def _call(self, node: Node, ports: dict[str, Any], compute: str | None) -> Any:
        """Adds an operation for what was written at its ports, with the compute type if stated."""
        if compute is None and node.anchor.product:
            compute = self._options.compute_data_type
        if all(isinstance(value, numbers.Number) for value in ports.values()):
            raise GraphTypeError("no operand is a tensor", got=str(list(ports.values())))
        others = [x._state if isinstance(x, GraphTensor) else x for x in ports.values()]
        inputs = {port: self._lift(value, port, others) for port, value in ports.items()}
        return self._append(computed(node, compute, inputs), inputs)

    def _append(self, node: Node, inputs: dict[str, Tensor]) -> Any:
        outputs = inferred(node, inputs)
        compute = compute_type(node.compute_data_type, inputs)
        if compute != node.compute_data_type:
            node = replace(node, compute_data_type=compute)
        name = f"{node.method}.{self._counts[node.method]}"
        self._counts[node.method] += 1
        made = [
            self._add(Tensor(f"{name}::{port}", shape, dtype))
            for port, (shape, dtype) in outputs.items()
        ]
        self._calls.append(
            Call(
                node,
                name,
                tuple((port, tensor.name) for port, tensor in inputs.items()),
                tuple((port, t._state.name) for port, t in zip(outputs, made, strict=True)),
            )
        )
        return made[0] if len(made) == 1 else tuple(made)

    def _add(self, state: Tensor) -> GraphTensor:
        while state.name in self._tensors:  # an argument may be called like a constant
            state = replace(state, name=state.name + "_")
        self._tensors[state.name] = state
        return GraphTensor(self, state)

    def _lift(self, value: Any, port: str, others: Sequence[Any]) -> Tensor:
        """The spec's tensor for an argument: a graph tensor, a number, or a closed-over array;
        ``others`` are the tensors, arrays and numbers of the call."""
        rank = max(len(getattr(x, "shape", ())) for x in others)
        if isinstance(value, GraphTensor):
            if value._builder is not self:
                raise GraphError(
                    f"{port!r} belongs to another graph",
                    got=repr(value),
                    fix="a graph tensor is valid in only one call of a @jax_cudnn.graph function; "
                    "pass values between graphs as outputs and arguments",
                )
            own = value._state
            if own.name in self._inputs and not own.shape and rank and not self.is_used(value):
                # The caller reshapes a scalar operand to the rank of the other operands.
                value._state = self._tensors[own.name] = replace(own, shape=(1,) * rank)
            return value._state
        if isinstance(value, numbers.Real):
            integral = promotes_to_integer(str(x.dtype) for x in others if hasattr(x, "dtype"))
            if integral and isinstance(value, numbers.Integral):
                int32_range(port, value)
            if not isinstance(value, np.generic) or isinstance(value, float):
                arrays = (x for x in others if isinstance(x, (Tensor, jax.Array)))
                kind = wide_dtype(*arrays).name
                number = float(value) if kind == "float64" else float32_range(port, value)
                dtype = "int32" if integral and isinstance(value, int) else kind
                constant = Tensor(f"c{len(self._tensors)}", (1,) * rank, dtype, number.hex())
                return self._add(constant)._state
        if isinstance(value, (jax.Array, np.ndarray, np.generic)):
            # An array without dimensions combines with tensors like a scalar.
            shape = np.shape(value) or (1,) * rank
            key = (id(value), shape)
            if key not in self._captured:
                array = jax.numpy.asarray(value).reshape(shape)
                tensor = self.input(f"captured{len(self._captured)}", shape, str(array.dtype))
                # The user's object is kept alive so that its id stays taken.
                self._captured[key] = (value, array, tensor)
            return self._captured[key][-1]._state
        raise GraphTypeError(
            f"{port!r} is not a tensor",
            expected="a graph tensor, a JAX or NumPy array, or a Python number",
            got=shown(value),
        )

    # -- what the user may change after an operation was added ----------------------------------

    def _set_dtype(self, tensor: GraphTensor, dtype: str) -> GraphTensor:
        if tensor.name in self._inputs and dtype != tensor._state.dtype:
            raise GraphError(
                f"set_data_type of the input {tensor.name}",
                expected=tensor._state.dtype,
                got=dtype,
                why="an input has the dtype of its array",
                fix="cast the array before the call with .astype",
                where=user_line(),
            )
        self._unused(tensor, "set_data_type")
        self._say(tensor, out_data_type=dtype)
        self._typed.add(tensor.name)
        self._change(tensor, dtype=dtype)
        return tensor

    def _set_order(self, tensor: GraphTensor, order: tuple[int, ...]) -> GraphTensor:
        self._unused(tensor, "set_stride")
        self._change(tensor, order=order)
        return tensor

    def _set_dim(self, tensor: GraphTensor, dim: Any) -> GraphTensor:
        try:
            dim = integers("set_dim", dim)
        except JaxCudnnError as error:
            error.where = user_line()
            raise
        if dim == tensor.shape:
            return tensor
        self._unused(tensor, "set_dim")
        if not self._say(tensor, out_dims=dim):
            raise GraphError(
                f"the shape of {tensor.name} follows from its inputs",
                expected=str(list(tensor.shape)),
                got=f"set_dim({list(dim)})",
                where=user_line(),
            )
        self._change(tensor, shape=dim)
        return tensor

    def _say(self, tensor: GraphTensor, **attribute: Any) -> bool:
        """Whether the node of this result has an attribute that says something of it; sets it."""
        for i, call in enumerate(self._calls):
            own = call.outputs[0][1] == tensor.name
            if own and {field.name for field in fields(call.node)} >= {*attribute}:
                node = replace(call.node, **attribute)
                try:
                    node.infer({port: self._tensors[name] for port, name in call.inputs})
                except JaxCudnnError as error:
                    error.where = error.where or user_line()
                    raise
                self._calls[i] = replace(call, node=node)
                return True
        return False

    def _change(self, tensor: GraphTensor, **changes: Any) -> None:
        name = tensor.name
        tensor._state = self._tensors[name] = replace(self._tensors[name], **changes)

    def is_used(self, tensor: GraphTensor) -> bool:
        """Whether an operation reads a tensor."""
        return any(tensor.name in dict(call.inputs).values() for call in self._calls)

    def _unused(self, tensor: GraphTensor, method: str) -> None:
        if self.is_used(tensor):
            raise GraphError(
                f"{method} after {tensor.name} was used",
                fix=f"call it on the result right away: g.operation(...).{method}(...)",
                where=user_line(),
            )


class Method:
    """A method of g, on its class. The function is made on first use: the signatures of all nodes
    would take a tenth of the package's import time."""

    def __init__(self, cls: type[Node]) -> None:
        self.cls = cls

    def __get__(self, g: Any, owner: type) -> Any:
        return self.function.__get__(g, owner)

    @functools.cached_property
    def function(self) -> Any:
        name = self.cls.method

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._apply(name, *args, **kwargs)

        method.__name__, method.__qualname__ = name, f"GraphBuilder.{name}"
        method.__doc__ = self.cls.__doc__
        self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [self_parameter, *signature(self.cls).parameters.values()]
        )
        return method


N = TypeVar("N", bound=type[Node])


def register(cls: N) -> N:
    """Class decorator: checks a node's contract, and adds it to the registry and to g."""
    check_contract(cls)
    REGISTRY[cls.method] = cls
    setattr(GraphBuilder, cls.method, Method(cls))
    return cls


def check_contract(cls: type[Node]) -> None:
    """TypeError if a node class violates the contract."""

    def check(condition: object, problem: str) -> None:
        if not condition:
            raise TypeError(f"node {cls.__name__}: {problem}")

    check(isinstance(getattr(cls, "method", None), str), "method must name pygraph's method")
    check(cls.method not in REGISTRY, f"{cls.method!r} is registered twice")
    check(isinstance(getattr(cls, "ports", None), Dims), "ports must be Dims.parse(...)")
    check(is_dataclass(cls) and cls.__hash__, "must be a frozen dataclass")
    check(cls.reference is not Node.reference, "reference is missing")
    own = (cls.__dict__.get("__doc__") or "").strip()
    generated = f"{cls.__name__}("  # what dataclass writes where there is none
    stripped = sys.flags.optimize > 1  # python -OO removes docstrings
    check(stripped or (own and not own.startswith(generated)), "docstring is missing")
    check(cls.examples, "at least one example is needed")
    clips = cls.boundary is not Node.boundary
    check(clips or not cls.indices.positions, "boundary must clip the integers of indices")
    for example in cls.examples:
        required = {port.name for port in cls.ports.inputs if not port.optional}
        fits = required <= {*example.inputs} <= {*cls.ports.input_names}
        check(fits, "an example's ports are wrong")
