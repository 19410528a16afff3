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

    The interface is that of cuDNN's own ``cudnn.Graph``; what it builds is what
    :func:`jax_cudnn.graph` builds, so calls work in ``jit``, ``grad``, ``vmap``, ``jvp``,
    ``shard_map`` and ``jax.export``, on any device, and :func:`jax_cudnn.plan` explains them.

    Operations take arrays directly, of which they use shape, dtype and memory order alone (JAX's,
    tracers, ``jax.ShapeDtypeStruct``, NumPy's, CuPy's, torch's), or tensors made by :meth:`tensor`.
    Tensors are referred to as ``"node::port"`` (``"conv2d::image"``, ``"conv2d::Y"``; nodes without
    a name are ``"conv_fprop.0"``, positional arguments ``"conv2d::0"``), by the name or uid they
    were given, by themselves, or by the array they stand for.

    A NumPy array of one element, an epsilon say, is a number in the host's memory: where a call
    gives it as a Python number or NumPy array it is a constant of cuDNN's plan, as a number given
    to the operation is. A JAX array in its place is an operand, and XLA runs the operation where
    cuDNN wants a number. A seed or offset of dropout that is one integer, INT32 or INT64, becomes
    two uint32, (1, 1, 1, 2), the low and the high word; calls take either.

    Args:
        name: of the graph, in profiles and errors.
        io_data_type: the dtype of inputs for which none is named, and of outputs that are floats;
            integers and booleans keep theirs unless ``set_data_type`` says otherwise. Without it an
            output has the promoted dtype of its operands.
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
        try:
            self._end()
        except BaseException:
            self._recorder = None  # as if the `with` had raised itself
            raise
        self._io = None, None  # arrays that they name are not kept alive

    # -- calls ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, handle: Any = None, workspace: Any = None) -> Any:
        """Compute the outputs.

        Args:
            *args: arrays in the order of ``inputs``; or one dictionary of arrays by references.
                In it, an output says which shape and dtype its result is to have; its values are
                not read, and it is not written. What else is in it (of other graphs, or for
                intermediates) is handed on. As an argument or result of a jitted function a
                dictionary needs keys that JAX can sort: names alone, or uids alone, no tensors;
                inside the function any keys do.
            handle: accepted, not used: the package manages handles.
            workspace: likewise.

        Returns:
            The output, or a tuple of them in the order of ``outputs``. For a dictionary a new one:
            what it held, and the outputs, under the key they were given by, else ``"node::port"``,
            or their uids where all keys are uids.

        Raises: GraphError, GraphTypeError for arrays of other shapes or dtypes than the graph was
        built for, and for missing inputs.
        """
        self._check_complete()
        if len(args) == 1 and isinstance(args[0], Mapping):
            return self._call_by_name(args[0])
        if self._order is None:
            raise GraphError(
                f"{self.name} has no order of inputs and outputs",
                fix="give Graph(inputs=[...], outputs=[...]), call set_io_tuples(inputs, outputs), "
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
        """Note the value of an input; GraphError where it has another one already."""
        had = values.setdefault(tensor.name, value)
        if had is value or (type(had) is type(value) in (int, float) and had == value):
            return
        places = self._built.references.places(tensor)
        # An array's input is called after the place where it was given first.
        what = "array" if tensor.name in places else "tensor"
        given = f"the same {what} was given for {' and '.join(places)} when the graph was built"
        raise GraphError(
            f"{self.name} got different values for one input, {tensor.get_name()}",
            expected="one array; under jax.jit and other transformations each argument counts as "
            "an array of its own",
            got=f"{had!r} and {value!r}"[:200],
            why=given if len(places) > 1 else "both references mean it",
            fix="give the input once; or build the graph with graph.tensor_like(x), which declares "
            "an input of its own, for each of them",
            where=user_line(),
        )
