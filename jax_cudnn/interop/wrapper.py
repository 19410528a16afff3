"""Graph: the interface of cuDNN's ``cudnn.Graph``, for JAX arrays and transformations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.options import DEFAULTS, replaced
from .._core.graph.source import user_line
from .checks import is_unset, like, listed, names, refuse_devices
from .json_text import canonical_name
from .planning import Planning
from .recorder import Recorder
from .references import is_uid
from .templates import compute_name, dtype_name
from .tensors import NamedTensor


class Graph(Planning):
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
        refuse_devices(sm_count=sm_count, sm_version=sm_version, device_property=device_property)
        if not is_unset(intermediate_data_type):
            options["intermediate_data_type"] = dtype_name(intermediate_data_type)
        if not is_unset(compute_data_type):
            options["compute_data_type"] = compute_name(compute_data_type)
        if heuristics is not None:
            options["heuristics"] = listed("heuristics", heuristics)
        io_data_type = None if is_unset(io_data_type) else dtype_name(io_data_type)
        super().__init__(name, io_data_type, replaced(DEFAULTS, options))
        self._io = (
            None if inputs is None else listed("inputs", inputs),
            None if outputs is None else listed("outputs", outputs),
        )

    # -- building -------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._recorder is not None:
            raise GraphError(
                f"{self.name} is already built",
                fix="build each graph in a separate `with`",
                where=user_line(),
            )
        self._recorder = Recorder(self._options, self._io_data_type)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._recorder = None
            return
        try:
            self._end()
        except BaseException:
            self._recorder = None  # as if the `with` block had raised
            raise
        self._io = None, None  # do not keep arrays in them alive

    # -- calls ----------------------------------------------------------------------------------

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
        self._check_complete()
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self._call_by_name(args[0])
        if self._order is None:
            raise GraphError(
                f"positional call of {self.name}, which has no order of inputs and outputs",
                fix="pass Graph(inputs=[...], outputs=[...]), call set_io_tuples(inputs, outputs), "
                "or call the graph with a dictionary",
                where=user_line(),
            )
        if len(args) != len(self._order):
            raise GraphTypeError(
                f"{self.name} got {len(args)} arrays",
                expected=f"{len(self._order)}: {names(self._order)}",
                where=user_line(),
            )
        values: dict[str, Any] = {}
        for tensor, value in zip(self._order, args, strict=True):
            self._give(values, tensor, value)
        results = self._run(values)
        self._was_called = True
        return results[0] if len(results) == 1 else tuple(results)

    def _call_by_name(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        values: dict[str, Any] = {}
        supplied: dict[str, list[Any]] = {}
        outputs = {tensor.name for tensor in self._outputs}
        unknown: list[Any] = []
        for key, value in given.items():
            tensor = self._built.references.lookup(key)
            if tensor is None:
                unknown.append(key)
            elif tensor.name in outputs:
                supplied.setdefault(tensor.name, []).append(key)
            elif not self._built.is_result(tensor):
                self._give(values, tensor, value)
        self._check_given(values, unknown)
        result, by_uid = dict(given), all(map(is_uid, given))
        for tensor, array in zip(self._outputs, self._run(values), strict=True):
            keys = supplied.get(tensor.name, ())
            result |= {key: like(given[key], array, key) for key in keys}
            if not keys:
                result[tensor.uid if by_uid else canonical_name(self._built, tensor)] = array
        self._was_called = True
        return result

    def _give(self, values: dict[str, Any], tensor: NamedTensor, value: Any) -> None:
        """Records the value of an input; raises GraphError if it already has another one."""
        had = values.setdefault(tensor.name, value)
        if had is value or (type(had) is type(value) in (int, float) and had == value):
            return
        places = self._built.references.places(tensor)
        # The input of an array has the name of the place where it was first passed.
        what = "array" if tensor.name in places else "tensor"
        given = f"the same {what} was passed for {' and '.join(places)} when the graph was built"
        raise GraphError(
            f"{self.name} got different values for one input, {tensor.get_name()}",
            expected="one array; under jax.jit and other transformations each argument is a "
            "separate array",
            got=f"{had!r} and {value!r}"[:200],
            why=given if len(places) > 1 else "both references refer to it",
            fix="pass the input once; or build the graph with a separate graph.tensor_like(x) for "
            "each of them",
            where=user_line(),
        )
