"""Graph: the interface of cuDNN's ``cudnn.Graph``, for JAX arrays and transformations."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.errors import GraphAttributeError, GraphError, GraphTypeError, rebuild, shown
from .._core.graph.builder import GraphBuilder
from .._core.graph.node import registry
from .._core.graph.options import DEFAULTS, replaced
from .arrays import Template, compute_name, dtype_name, is_unset, listed, number, refusal
from .built import Built
from .function import Function
from .recorder import Recorder
from .tensors import NamedTensor, names, refuse_reordered

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


class Graph(Built):
    """A cuDNN graph, built by calling ``cudnn.pygraph``'s methods, as a JAX function.

    The interface is that of cuDNN's ``cudnn.Graph``. It builds the same graphs as
    :func:`jax_cudnn.graph`, so calls work in ``jit``, ``grad``, ``vmap``, ``jvp``, ``shard_map``
    and ``jax.export``, on any device, and :func:`jax_cudnn.plan` explains them.

    Operations take arrays (of JAX, NumPy, CuPy or torch, tracers, ``jax.ShapeDtypeStruct``), of
    which they use only shape, dtype and memory order; or tensors made by :meth:`tensor`. Refer to a
    tensor as ``"node::port"`` (``"conv2d::image"``, ``"conv2d::Y"``; unnamed nodes are called
    ``"conv_fprop.0"``, positional arguments ``"conv2d::0"``), by its name or uid, by the tensor
    itself, or by the array that was passed for it.

    A NumPy array of one element, such as an epsilon, is a scalar in host memory. If a call passes a
    Python number or NumPy array for it, it is a constant of cuDNN's plan, like a Python number
    passed to the operation. A JAX array is an operand; XLA then runs operations for which cuDNN
    requires a constant. A seed or offset of dropout that is one integer, INT32 or INT64, becomes
    two uint32, (1, 1, 1, 2), the low and the high word; calls accept either form.

    Args:
        name: name of the graph in profiles and errors.
        io_data_type: dtype of inputs without a stated dtype, and of floating outputs. Integer and
            boolean outputs keep theirs unless ``set_data_type`` changes it. By default an output
            has the promoted dtype of its operands.
        intermediate_data_type: dtype of intermediates; by default float32.
        compute_data_type: dtype in which convolutions and matmuls accumulate; by default float32
            (int32 for integers).
        handle: accepted for compatibility, without effect: the package manages handles.
        inputs: references to the inputs, in the order of positional calls, see
            :meth:`set_io_tuples`.
        outputs: references to the outputs, in the order of results.
        heuristics: modes by which cuDNN proposes plans; by default "A", then "FALLBACK".
        workspace_alloc: accepted for compatibility, without effect: XLA allocates workspace.
        sm_count: must be None; :func:`jax_cudnn.target` selects another GPU to plan for.
        sm_version: must be None.
        kernel_cache: accepted for compatibility, without effect.
        device_property: must be None.
        is_dynamic_shape_enabled: accepted for compatibility, without effect: shapes are fixed.
        is_override_shape_enabled: accepted for compatibility, without effect.
        cuda_graph_retention: accepted for compatibility, without effect: XLA manages CUDA graphs.
        is_cuda_graph_replay_expected: accepted for compatibility, without effect.
        **options: other fields of :class:`jax_cudnn.Options`: ``implementation="cudnn"``,
            ``deterministic=True``, ``engine=...``.

    Raises:
        GraphError: an operation is wrong (the message names the line); or, at the end of the
            ``with``, outputs or references are wrong.
        GraphTypeError: an operation has an operand or dtype of the wrong kind.

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
        given = {"sm_count": sm_count, "sm_version": sm_version, "device_property": device_property}
        for device, value in given.items():
            if value is not None:
                raise refusal(
                    f"jax_cudnn.Graph does not support {device}",
                    got=f"{device}={value!r}"[:200],
                    why="a graph is planned for the GPU for which JAX compiles the program",
                    fix='leave it out; `with jax_cudnn.target("H200"):` plans for another GPU',
                )
        if not isinstance(name, str):
            expected, got = "a string", shown(name)
            raise refusal("name is not a string", GraphTypeError, expected=expected, got=got)
        if not is_unset(intermediate_data_type):
            options["intermediate_data_type"] = dtype_name(intermediate_data_type)
        if not is_unset(compute_data_type):
            options["compute_data_type"] = compute_name(compute_data_type)
        if heuristics is not None:
            options["heuristics"] = listed("heuristics", heuristics)
        super().__init__(
            name,
            None if is_unset(io_data_type) else dtype_name(io_data_type),
            replaced(DEFAULTS, options),
            None if inputs is None else listed("inputs", inputs),
            None if outputs is None else listed("outputs", outputs),
        )

    # -- building -------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._recorder is not None:
            fix = "build each graph in a separate `with`"
            raise refusal(f"{self.name} is already built", fix=fix)
        self._recorder = Recorder(self._options, self._io_data_type)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._recorder = None
            return
        try:
            self._made = self._end(self._built)
        except BaseException:
            self._recorder = None  # as if the `with` block had raised
            raise
        self._io = None, None  # do not keep arrays in them alive

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _ELSEWHERE:
            raise refusal(
                f"a Graph has no {name}",
                GraphAttributeError,
                why="JAX runs the graph, and compiles it for a GPU of its choice",
                fix=_ELSEWHERE[name],
            )
        if name not in registry():
            return GraphBuilder().__getattr__(name)  # raises
        try:
            return types.MethodType(getattr(GraphBuilder, name), self._open(name))
        except GraphError as error:  # hasattr and inspect expect an AttributeError
            raise rebuild(GraphAttributeError, vars(error)) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *registry()})

    # -- tensors --------------------------------------------------------------------------------

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
            stride: element strides, which give its memory order; by default the order that the
                operations prefer. Gaps are dropped, see :meth:`NamedTensor.set_stride`.
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
            GraphError: the strides overlap; or, when an operation uses the tensor, it has no dtype.
        """
        recorder = self._open("tensor")
        _refuse_virtual(is_virtual)
        refuse_reordered(reordering_type)
        dtype = self._io_data_type if is_unset(data_type) else dtype_name(data_type)
        made = self._declare(recorder, name, Template(tuple(dim), dtype or "float32"))
        made.is_untyped = dtype is None
        made.set_is_pass_by_value(is_pass_by_value)
        if stride:
            made.set_stride(stride)
        if uid not in (None, -1):
            made.set_uid(uid)
        return made.set_ragged_offset(ragged_offset)

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> NamedTensor:
        """Declare an input with the shape, dtype and memory order of an array or a tensor."""
        recorder = self._open("tensor_like")
        _refuse_virtual(is_virtual)
        if not isinstance(template, NamedTensor):
            made = self._declare(recorder, name, Template.of(template), number(template))
            recorder.references.remember(template, made)
            return made
        state = template._state
        known = Template(state.shape, state.dtype, state.order, template.by_value, template.window)
        made = self._declare(recorder, name, known, template.number)
        made.is_untyped = template.is_untyped
        return made

    def _declare(
        self, recorder: Recorder, name: str, template: Template, value: float | None = None
    ) -> NamedTensor:
        made = recorder.declare(name or f"tensor_{len(recorder.handles)}", template, value)
        made.is_declared = True
        if not name:
            recorder.references.add(made.name, made.name)
        return made.set_name(name)

    def tensor_scalar(self, value: float, scalar_type: Any = None, name: str = "") -> float:
        """Returns the value: any operation takes a Python number as a constant."""
        self._open("tensor_scalar")
        return value

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
        recorder, had = self._built, self._made
        if had is None:
            self._io = inputs, outputs
            return
        made = Function.of(self.name, recorder, self._options, inputs, outputs)
        same = {t.name for t in had.outputs} == {t.name for t in made.outputs}
        if had.order is not None:  # else it was called by name
            before, after = (*had.order, *had.outputs), (*(made.order or ()), *made.outputs)
            same = [t.name for t in before] == [t.name for t in after]
        if self._was_called and not same:
            raise refusal(
                f"set_io_tuples of {self.name} after the graph was called",
                expected=f"inputs {names(had.order or had.inputs)}, outputs {names(had.outputs)}",
                got=f"inputs {names(made.order or ())}, outputs {names(made.outputs)}",
                why="jax.jit keeps programs that were compiled for the previous order",
                fix="other = graph.with_options(); other.set_io_tuples(...)",
            )
        recorder.conclude(made.outputs)
        self._made = made

    # -- calls --------------------------------------------------------------------------------

    def __call__(self, *args: Any, handle: Any = None, workspace: Any = None) -> Any:
        """Compute the outputs.

        Args:
            *args: arrays in the order of ``inputs``; or one dictionary of arrays by reference.
                An array for an output only sets the shape and dtype of the result; it is neither
                read nor written. Other entries (of other graphs, or for intermediates) are passed
                through. As an argument or result of a jitted function, a dictionary needs keys that
                JAX can sort: only names, or only uids, and no tensors; inside the function any keys
                work.
            handle: accepted for compatibility, without effect.
            workspace: accepted for compatibility, without effect.

        Returns:
            The output, or a tuple of outputs in the order of ``outputs``. For a dictionary, a new
            one with its entries and the outputs: under the given key, else ``"node::port"``, or
            their uids if all keys are uids.

        Raises:
            GraphError: an input is missing, or an array has another shape than the graph's.
            GraphTypeError: an array has another dtype than the graph's.
        """
        made = self._complete
        if len(args) == 1 and isinstance(args[0], Mapping):
            result = made.by_name(args[0])
            self._was_called = True
            return result
        if made.order is None:
            raise refusal(
                f"positional call of {self.name}, which has no order of inputs and outputs",
                fix="pass Graph(inputs=[...], outputs=[...]), call set_io_tuples(inputs, outputs), "
                "or call the graph with a dictionary",
            )
        if len(args) != len(made.order):
            raise refusal(
                f"{self.name} got {len(args)} arrays",
                GraphTypeError,
                expected=f"{len(made.order)}: {names(made.order)}",
            )
        values: dict[str, Any] = {}
        for tensor, value in zip(made.order, args, strict=True):
            made.give(values, tensor, value)
        results = made.run(values)
        self._was_called = True
        return results[0] if len(results) == 1 else tuple(results)


def _refuse_virtual(is_virtual: bool) -> None:
    if is_virtual:
        raise refusal(
            "a virtual tensor cannot be declared",
            why="operations create the intermediates",
            fix="call the operation that computes it",
        )
