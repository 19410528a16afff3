"""Graph: the interface of cuDNN's ``cudnn.Graph``, for JAX arrays and transformations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._core.errors import GraphAttributeError, GraphError, GraphTypeError
from .._core.graph.node import REGISTRY
from .._core.graph.options import DEFAULTS, Surroundings, replaced
from .._core.graph.source import user_line
from .._core.graph.spec import GraphSpec
from .._core.planning.plan import Plan
from .._core.planning.support_value import Support
from .._core.primitive import bind
from .json_text import as_json, canonical_name
from .recorder import Constants, Recorder
from .templates import Template, compute_name, dtype_name, is_array, number, operand
from .tensors import NamedTensor

# pygraph's methods that act on a device, or on one of its plans.
_OF_PLANS = (
    "build_plan_at_index",
    "deselect_engines",
    "deserialize",
    "execute",
    "execute_plan_at_index",
    "get_behavior_notes",
    "get_behavior_notes_for_plan_at_index",
    "get_engine_and_knobs_at_index",
    "get_engine_count",
    "get_knobs_for_engine",
    "get_plan_name_at_index",
    "get_workspace_size_plan_at_index",
    "key",
    "populate_cuda_graph",
    "serialize",
    "update_cuda_graph",
)


@dataclass(frozen=True)
class _Signature:
    """What positional calls take and return, in order."""

    inputs: tuple[NamedTensor, ...]
    outputs: tuple[NamedTensor, ...]


class Graph:
    """A cuDNN graph, built by calling ``cudnn.pygraph``'s methods, as a JAX function.

    The interface is that of cuDNN's own ``cudnn.Graph``; what it builds is what
    :func:`jax_cudnn.graph` builds, so calls work in ``jit``, ``grad``, ``vmap``, ``jvp``,
    ``shard_map`` and ``jax.export``, on any device, and :func:`jax_cudnn.plan` explains them.

    Operations take arrays directly, of which they use shape, dtype and memory order alone (JAX's,
    tracers, ``jax.ShapeDtypeStruct``, NumPy's, CuPy's, torch's), or tensors made by :meth:`tensor`.
    Tensors are referred to as ``"node::port"`` (``"conv2d::image"``, ``"conv2d::Y"``; nodes without
    a name are ``"conv_fprop.0"``, positional arguments ``"conv2d::0"``), by the name or uid they
    were given, by themselves, or by the array they stand for.

    Args:
        name: of the graph, in profiles and errors.
        io_data_type: the dtype of tensors for which none is named and that are no intermediates;
            without it an output has the promoted dtype of its operands.
        intermediate_data_type: of values inside the graph; float32 if left out.
        compute_data_type: in which convolutions and matmuls accumulate; float32 if left out (int32
            for integers).
        inputs: references to the inputs, in the order of positional calls.
        outputs: references to the outputs, in the order of results. Both as :meth:`set_io_tuples`.
        heuristics: modes by which cuDNN chooses a plan; "A", then "FALLBACK".
        handle, workspace_alloc, kernel_cache, cuda_graph_retention,
        is_cuda_graph_replay_expected, is_dynamic_shape_enabled, is_override_shape_enabled:
            accepted for pygraph's sake, without effect: handles, workspace and kernels are managed
            by the package, CUDA graphs by XLA, and shapes are fixed.
        sm_count, sm_version, device_property: None; :func:`jax_cudnn.target` says for which GPU to
            plan.
        **options: other fields of :class:`jax_cudnn.Options`: ``implementation="cudnn"``,
            ``deterministic=True``, ``engine=...``.

    Raises:
        GraphError, GraphTypeError: where an operation is written, naming the line; or when the
            ``with`` ends, for outputs and references.

    Source: "Overview of the cuDNN Wrapper" in NVIDIA's cudnn-frontend.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((8, 64, 56, 56)), jnp.ones((32, 64, 3, 3))
        >>> with jc.Graph(inputs=["conv2d::image", "conv2d::weight"], outputs=["y"]) as graph:
        ...     y = graph.conv_fprop(
        ...         image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv2d"
        ...     )
        ...     _ = y.set_output(True).set_name("y")
        >>> jax.jit(graph)(x, w).shape
        (8, 32, 56, 56)
        >>> sorted(graph({"conv2d::image": x, "conv2d::weight": w}))
        ['conv2d::Y', 'conv2d::image', 'conv2d::weight']
    """

    def __init__(
        self,
        *,
        name: str = "graph",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Sequence[Any] | None = None,
        workspace_alloc: bool = True,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: Any = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: Any = None,
        is_cuda_graph_replay_expected: bool = False,
        **options: Any,
    ) -> None:
        _refuse_devices(sm_count=sm_count, sm_version=sm_version, device_property=device_property)
        if intermediate_data_type is not None:
            options["intermediate_data_type"] = dtype_name(intermediate_data_type)
        if compute_data_type is not None:
            options["compute_data_type"] = compute_name(compute_data_type)
        if heuristics:
            options["heuristics"] = _listed("heuristics", heuristics)
        self.name = self.__name__ = name
        self._io_data_type = None if io_data_type is None else dtype_name(io_data_type)
        self._options = replaced(DEFAULTS, options)
        self._recorder: Recorder | None = None
        self._signature: _Signature | None = None
        self._outputs: tuple[NamedTensor, ...] = ()
        self._io = inputs and _listed("inputs", inputs), outputs and _listed("outputs", outputs)
        self._spec = functools.lru_cache(maxsize=64)(self._finished)

    # -- building -------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._recorder is not None:
            raise GraphError(
                f"{self.name} was built already",
                fix="build each graph in a `with` of its own",
                where=user_line(),
            )
        self._recorder = Recorder(self._options, self._io_data_type)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._recorder = None
            return
        inputs, outputs = self._io
        self._io = None, None  # what they refer to is not kept alive
        self._outputs = self._marked(outputs)
        self._built.conclude(self._outputs)
        if inputs or outputs:
            self._signature = self._arranged(inputs)

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
            stride: packed element strides, in any order: its memory order. Left out, that is what
                the operations prefer.
            data_type: its dtype; the graph's ``io_data_type`` if left out.
            is_virtual: False: intermediates are made by operations.
            is_pass_by_value: whether it is one number in the host's memory. Given as a Python
                number or NumPy array, it then is a constant of the plan; given as a JAX array it
                is an operand.
            ragged_offset, reordering_type: None.
            name: by which it can be referred to.
            uid: a number for the same.

        Raises: GraphError without a dtype, or for strides with gaps or overlaps.
        """
        recorder = self._building("tensor")
        _refuse_tensors(is_virtual=is_virtual, ragged_offset=ragged_offset)
        dtype = self._io_data_type if _is_unset(data_type) else dtype_name(data_type)
        if dtype is None:
            raise GraphError(
                "tensor without a data type",
                fix="graph.tensor(..., data_type=...), or Graph(io_data_type=...)",
                where=user_line(),
            )
        made = recorder.declare(
            name or f"tensor_{len(recorder.handles)}", Template(tuple(dim), dtype)
        )
        made.by_value = is_pass_by_value
        if stride:
            made.set_stride(stride)
        if uid not in (None, -1):
            made.set_uid(uid)
        recorder.references.name(made.name, made)
        return made.set_name(name)

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> NamedTensor:
        """Declare an input with the shape, dtype and memory order of an array or a tensor."""
        recorder = self._building("tensor_like")
        _refuse_tensors(is_virtual=is_virtual)
        name = name or f"tensor_{len(recorder.handles)}"
        if isinstance(template, NamedTensor):
            like = template._state
            made = recorder.declare(
                name, Template(like.shape, like.dtype, like.order, template.by_value)
            )
        else:
            made = recorder.declare(name, Template.of(template))
            recorder.references.remember(template, made)
        recorder.references.name(made.name, made)
        return made.set_name(name)

    def tensor_scalar(self, value: float, scalar_type: Any = None, name: str = "") -> float:
        """A constant of the graph: a Python number is one wherever an operation takes a tensor."""
        self._building("tensor_scalar")
        return value

    def set_io_tuples(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Say in which order positional calls take inputs and return outputs.

        Args:
            inputs: references to all inputs.
            outputs: references to results; each that ``set_output`` marked must be among them, and
                each that is among them is an output.

        Raises: GraphError for unknown references, duplicates, and what is missing.
        """
        inputs, outputs = _listed("inputs", inputs), _listed("outputs", outputs)
        if self._built.spec is None:
            self._io = inputs, outputs
            return
        concluded, self._outputs = self._outputs, self._marked(outputs)
        if {t.name for t in concluded} != {t.name for t in self._outputs}:
            self._built.conclude(self._outputs)
            self._spec.cache_clear()
        self._signature = self._arranged(inputs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_PLANS:
            raise GraphAttributeError(
                f"a Graph has no {name}",
                why="it is run by JAX, and planned for the GPU that the program is compiled for",
                fix="graph.plan() gives its plan; graph.with_options(engine=..., knobs=...) chooses "
                "another one",
                where=user_line(),
            )
        recorder = self._recorder or Recorder(DEFAULTS, None)
        if name in REGISTRY:
            self._building(name)
        return getattr(recorder, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *REGISTRY})

    # -- choosing a plan ------------------------------------------------------------------------

    def create_execution_plans(self, heuristics: Sequence[Any]) -> None:
        """Choose among what these modes of heuristics propose: "A", "B", "FALLBACK"."""
        self._choose("create_execution_plans", heuristics=_listed("heuristics", heuristics))

    def create_execution_plan(self, engine_id: int, knobs: Any = None) -> None:
        """Take this engine, with these knobs."""
        self._choose("create_execution_plan", engine=engine_id, knobs=knobs or {})

    def select_numeric_notes(self, notes: Sequence[Any]) -> None:
        """Take an engine that carries one of these notes."""
        self._choose("select_numeric_notes", select_numeric_notes=tuple(notes))

    def deselect_numeric_notes(self, notes: Sequence[Any]) -> None:
        """Take no engine that carries one of these notes."""
        self._choose("deselect_numeric_notes", deselect_numeric_notes=tuple(notes))

    def select_behavior_notes(self, notes: Sequence[Any]) -> None:
        """Take an engine that carries one of these notes."""
        self._choose("select_behavior_notes", select_behavior_notes=tuple(notes))

    def deselect_behavior_notes(self, notes: Sequence[Any]) -> None:
        """Take no engine that carries one of these notes."""
        self._choose("deselect_behavior_notes", deselect_behavior_notes=tuple(notes))

    def deselect_workspace_greater_than(self, workspace: int) -> None:
        """Take no plan that needs more bytes of workspace."""
        self._choose("deselect_workspace_greater_than", max_workspace=workspace)

    def with_options(self, **options: Any) -> Graph:
        """The same graph with other plan options, see :class:`jax_cudnn.Options`.

        Raises: GraphError for ``intermediate_data_type`` and ``compute_data_type``, which are part
        of the graph.
        """
        changed = {"intermediate_data_type", "compute_data_type"} & {*options}
        if changed:
            raise GraphError(
                f"with_options({', '.join(sorted(changed))}) of a graph that is built",
                why="its operations were checked with these dtypes",
                fix="give them to jax_cudnn.Graph(...)",
                where=user_line(),
            )
        made = copy.copy(self)
        made._options = replaced(self._options, options)
        made._spec = functools.lru_cache(maxsize=64)(made._finished)
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
        return self.plan().candidates

    # -- calls ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, handle: Any = None, workspace: Any = None) -> Any:
        """Compute the outputs.

        Args:
            *args: arrays in the order of ``inputs``; or one dictionary of arrays by references.
                In it, an output says which shape and dtype its result is to have; its values are
                not read, and it is not written.
            handle: accepted, not used: the package manages handles.
            workspace: likewise.

        Returns:
            The output, or a tuple of them in the order of ``outputs``. For a dictionary a new one:
            what it held, and the outputs, under the key they were given by, else ``"node::port"``.

        Raises: GraphError, GraphTypeError for arrays of other shapes or dtypes than the graph was
        built for, and for missing inputs.
        """
        if self._built.spec is None:
            raise GraphError(
                f"{self.name} was called while it is being built",
                fix="call it after its `with`",
                where=user_line(),
            )
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self._call_by_name(args[0])
        if self._signature is None:
            raise GraphError(
                f"{self.name} has no order of inputs and outputs",
                fix="give Graph(inputs=[...], outputs=[...]), call set_io_tuples(inputs, outputs), "
                "or call the graph with a dictionary",
                where=user_line(),
            )
        if len(args) != len(self._signature.inputs):
            raise GraphTypeError(
                f"{self.name} got {len(args)} arrays",
                expected=f"{len(self._signature.inputs)}: {_names(self._signature.inputs)}",
                where=user_line(),
            )
        names = (tensor.name for tensor in self._signature.inputs)
        results = self._run(dict(zip(names, args, strict=True)), self._signature.outputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _call_by_name(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        values: dict[str, Any] = {}
        supplied: dict[str, Any] = {}
        outputs = {tensor.name for tensor in self._outputs}
        for key, value in given.items():
            tensor = self._built.references.find(key)
            if tensor.name in outputs:
                supplied[tensor.name] = key
            elif self._built.is_result(tensor):
                raise GraphError(
                    f"{key!r} is neither an input nor an output",
                    expected=f"inputs {_names(self._inputs)}, outputs {_names(self._outputs)}",
                    fix="mark it with .set_output(True) while building the graph",
                    where=user_line(),
                )
            else:
                values[tensor.name] = value
        result = dict(given)
        for tensor, array in zip(self._outputs, self._run(values, self._outputs), strict=True):
            key = supplied.get(tensor.name, canonical_name(self._built, tensor))
            result[key] = _shaped_like(given[key], array, key) if tensor.name in supplied else array
        return result

    def _run(self, values: Mapping[str, Any], outputs: Sequence[NamedTensor]) -> list[jax.Array]:
        missing = [tensor for tensor in self._inputs if tensor.name not in values]
        if missing:
            raise GraphError(
                f"{self.name}: inputs are missing",
                expected=_names(self._inputs),
                got=f"none for {_names(missing)}",
                where=user_line(),
            )
        constants = tuple(
            (tensor.name, value.hex())
            for tensor in self._inputs
            if tensor.by_value and (value := number(values[tensor.name])) is not None
        )
        spec = self._spec(outputs, Surroundings.now(), constants)
        operands = [
            operand(tensor, values[tensor.name], f"{self.name}: input {tensor.name!r}")
            for tensor in spec.input_tensors
        ]
        return bind(spec, self.name, *operands)

    def _finished(
        self, outputs: Sequence[NamedTensor], around: Surroundings, constants: Constants
    ) -> GraphSpec:
        return self._built.finished(outputs, self._options, around, constants)

    # -- what it holds --------------------------------------------------------------------------

    @property
    def spec(self) -> GraphSpec:
        """The graph as a value; prints as text."""
        return self._spec(self._outputs, Surroundings.now(), ())

    def to_json(self) -> str:
        """The graph's context, nodes and tensors as JSON, under the frontend's keys."""
        context = {
            "name": self.name,
            "io_data_type": self._io_data_type,
            "intermediate_data_type": self._options.intermediate_data_type,
            "compute_data_type": self._options.compute_data_type or "float32",
        }
        return as_json(self._built, context)

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
                fix=f"with jax_cudnn.Graph(...) as {self.name}: ... adds its operations",
                where=user_line(),
            )
        return self._recorder

    @property
    def _inputs(self) -> list[NamedTensor]:
        """The inputs that the outputs need, in the order in which they were declared."""
        assert self._built.spec is not None
        return [self._built.handles[name] for name in self._built.spec.inputs]

    def _building(self, what: str) -> Recorder:
        self._built.check_open(what)
        return self._built

    def _choose(self, method: str, **options: Any) -> None:
        self._building(method)
        self._options = replaced(self._options, options)

    def _marked(self, references: Sequence[Any] | None) -> tuple[NamedTensor, ...]:
        """The outputs, in the order of references to them; GraphError where there are none, or
        others are marked."""
        recorder = self._built
        marked = [t for t in recorder.handles.values() if t.is_output]
        if not references:
            outputs = marked
        else:
            outputs = _distinct("outputs", [recorder.references.find(ref) for ref in references])
            for tensor in outputs:
                recorder.check_result(tensor, "outputs=")
        listed = {tensor.name for tensor in outputs}
        if not listed or any(tensor.name not in listed for tensor in marked):
            raise GraphError(
                f"{self.name} has outputs that are not listed"
                if listed
                else f"{self.name} has no output",
                expected=_names(marked) or "at least one result of an operation",
                got=_names(outputs) or "none",
                fix="y.set_output(True) marks a result; outputs=[...] lists all of them",
                where=user_line(),
            )
        for tensor in outputs:
            tensor.is_output = True
        return tuple(outputs)

    def _arranged(self, references: Sequence[Any] | None) -> _Signature:
        """The order of positional calls; GraphError where inputs are missing."""
        recorder = self._built
        if references is None:
            return _Signature(tuple(self._inputs), self._outputs)
        inputs = _distinct("inputs", [recorder.references.find(ref) for ref in references])
        listed = {tensor.name for tensor in inputs}
        results = [tensor for tensor in inputs if recorder.is_result(tensor)]
        missing = [tensor for tensor in self._inputs if tensor.name not in listed]
        if results or missing:
            raise GraphError(
                f"{self.name}: these are not the inputs",
                expected=_names(self._inputs),
                got=_names(inputs),
                why=f"{_names(results)} is computed by the graph" if results else None,
                where=user_line(),
            )
        return _Signature(tuple(inputs), self._outputs)

    def _of_operands(self) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
        """A function of the arrays among the inputs, and their shapes: numbers in the host's memory
        are constants, whatever their value."""
        arrays = [tensor for tensor in self._inputs if not tensor.by_value]
        numbers = {tensor.name: 1.0 for tensor in self._inputs if tensor.by_value}

        def function(*operands: Any) -> list[jax.Array]:
            names = (tensor.name for tensor in arrays)
            return self._run({**numbers, **dict(zip(names, operands, strict=True))}, self._outputs)

        function.__name__ = self.name
        return function, [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in arrays]


def _names(tensors: Sequence[NamedTensor]) -> str:
    return ", ".join(tensor.get_name() for tensor in tensors)


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, (list, tuple)):
        return tuple(values)
    raise GraphTypeError(
        f"{name} is no list",
        expected="a list or tuple",
        got=f"{type(values).__name__}: {values!r}"[:200],
        where=user_line(),
    )


def _distinct(what: str, tensors: list[NamedTensor]) -> list[NamedTensor]:
    names = [tensor.name for tensor in tensors]
    twice = [tensor for tensor in tensors if names.count(tensor.name) > 1]
    if twice:
        raise GraphError(
            f"{what} name a tensor twice",
            got=_names(tensors),
            fix=f"name {twice[0].get_name()} once",
            where=user_line(),
        )
    return tensors


def _shaped_like(wanted: Any, array: jax.Array, key: Any) -> jax.Array:
    if not is_array(wanted):
        raise GraphTypeError(
            f"the output {key!r} was given no array",
            expected="an array or jax.ShapeDtypeStruct, for its shape and dtype; or leave it out",
            got=f"{type(wanted).__name__}: {wanted!r}"[:200],
            where=user_line(),
        )
    like = Template.of(wanted)
    if like.shape != array.shape:
        raise GraphError(
            f"the output {key!r} was given an array of another shape",
            expected=str(list(array.shape)),
            got=str(list(like.shape)),
            where=user_line(),
        )
    return array.astype(like.dtype)


def _is_unset(data_type: Any) -> bool:
    return data_type is None or getattr(data_type, "name", None) == "NOT_SET"


def _refuse_devices(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise GraphError(
                f"{name} is not for jax_cudnn.Graph",
                got=f"{name}={value!r}"[:200],
                why="a graph is planned for the GPU that the program is compiled for",
                fix='leave it out; `with jax_cudnn.target("H200"):` plans for a GPU that is not here',
                where=user_line(),
            )


def _refuse_tensors(is_virtual: bool = False, ragged_offset: Any = None) -> None:
    if is_virtual:
        raise GraphError(
            "a virtual tensor is declared",
            why="intermediates are results of operations",
            fix="call the operation that computes it",
            where=user_line(),
        )
    if ragged_offset is not None:
        raise GraphError(
            "ragged_offset is not for tensors of a Graph",
            why="XLA's arrays have no gaps",
            fix="packed tokens are jax_cudnn.ops.packed_dot_product_attention's",
            where=user_line(),
        )
