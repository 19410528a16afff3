"""from_pygraph: a graph of cuDNN's frontend as a Graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.errors import GraphError, GraphTypeError, JaxCudnnError
from .._core.graph.dtypes import INTEGERS, WORDS
from .._core.graph.node import registry
from .arrays import SHAPE_OF_WORDS, is_unset, listed, refusal
from .attention import REQUESTED
from .score_mod import as_jnp
from .tensors import NamedTensor, refuse_reordered
from .wrapper import Graph


def from_pygraph(
    graph: Any,
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[Any] | None = None,
    *,
    name: str | None = None,
    **options: Any,
) -> Graph:
    """Convert a ``cudnn.pygraph`` to a JAX function, node by node; it need not be built or planned.

    Tensors keep their names and uids, and nodes their names, so that all references of
    :class:`jax_cudnn.Graph` work, including pygraph's own tensors. A tensor that is passed by value
    is a constant if it has a value; otherwise it is an input, for which a Python number or NumPy
    array becomes a constant of the plan. A seed or offset of dropout, one INT64 in cuDNN, is two
    uint32 here, (1, 1, 1, 2): the low and the high word. Calls accept one integer, too. Gaps of
    strides are dropped, while ragged offsets stay those that cuDNN would get, see
    :meth:`NamedTensor.set_ragged_offset`. Lengths, offsets and pages of INT64 become int32.

    Args:
        graph: a ``cudnn.pygraph`` of nvidia-cudnn-frontend 1.28 or newer.
        inputs: references in the order of positional calls; by default in the order of use.
        outputs: references in the order of results; by default all non-virtual results.
        name: name of the graph in profiles and errors; by default the pygraph's.
        **options: fields of :class:`jax_cudnn.Options`.

    Returns:
        A :class:`jax_cudnn.Graph`, which is called with arrays or a dictionary and supports all
        transformations.

    Raises:
        GraphTypeError: the graph is not a pygraph that keeps its nodes in Python.
        GraphError: an operation or attribute is not supported; the message names the node.

    Example:
        >>> import cudnn, jax, jax.numpy as jnp, jax_cudnn as jc
        >>> g = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
        >>> x = g.tensor(name="x", dim=[4, 8, 16])
        >>> y = g.relu(input=x, name="relu").set_output(True)
        >>> relu = jc.from_pygraph(g, inputs=[x], outputs=[y])
        >>> jax.grad(lambda x: relu(x).sum())(jnp.ones((4, 8, 16))).shape
        (4, 8, 16)
    """
    inputs = None if inputs is None else listed("inputs", inputs)
    outputs = None if outputs is None else listed("outputs", outputs)
    if isinstance(graph, Graph):
        raise refusal(
            "from_pygraph takes a pygraph, not a jax_cudnn.Graph",
            GraphTypeError,
            expected="a cudnn.pygraph",
            got=repr(graph),
            why="it already is a JAX function",
            fix="call it; graph.with_options(...) is the same graph with other options",
        )
    nodes = getattr(graph, "nodes", None)
    if not isinstance(nodes, list) or not hasattr(graph, "context"):
        raise refusal(
            "not a pygraph that keeps its nodes",
            GraphTypeError,
            expected="a cudnn.pygraph of nvidia-cudnn-frontend 1.28 or newer",
            got=type(graph).__name__,
            fix="upgrade the frontend; a deserialized graph has plans, but no nodes",
        )
    for option in ("io_data_type", "intermediate_data_type"):
        if option in options:
            raise refusal(
                f"from_pygraph cannot change {option}",
                got=f"{option}={options[option]!r}",
                why="the pygraph defines it",
                fix=f"cudnn.pygraph({option}=...)",
            )
    context = graph.context
    made = Graph(
        name=name or getattr(graph, "_cpp_graph_kwargs", {}).get("name", "pygraph"),
        io_data_type=context.io_data_type,
        intermediate_data_type=context.intermediate_data_type,
        **options,
    )
    with made:
        copied = _Copy(made, context.intermediate_data_type or "float32")
        for node in nodes:
            copied.add(node)
        results = made._built.handles.values()
        made._io = inputs, outputs or tuple(tensor for tensor in results if tensor.is_output)
    return made


class _Copy:
    """Copies nodes, and maps each tensor to its copy."""

    def __init__(self, graph: Graph, intermediate: Any) -> None:
        self._graph, self._recorder = graph, graph._built
        self._intermediate = intermediate
        self._made: dict[int, Any] = {}
        self._numbers: dict[str, NamedTensor] = {}  # for booleans

    def add(self, node: Any) -> None:
        """Adds a node; raises GraphError that names it if it is not supported."""
        kind: str = node.node_type.name
        method = node.params["mode"] if kind == "POINTWISE" else _METHODS.get(kind, kind.lower())
        try:
            arguments = self._arguments(method, node)
            name = None if node.name in self._recorder.nodes else node.name  # unless taken
            getattr(self._graph, method)(**arguments, name=name)
        except JaxCudnnError as error:
            error.summary = f"from_pygraph: node {node.name!r}: {error.summary}"
            raise
        call = [*self._recorder.nodes.values()][-1]
        made = {port: self._recorder.handles[result] for port, result in call.outputs}
        for port, tensor in dict(node.outputs).items():
            if len(node.outputs) == len(made) == 1:  # it may have another name there
                (result,) = made.values()
            else:
                result = made[REQUESTED[port] if port in REQUESTED else port]
            self._describe(result, tensor, has_open_shape=hasattr(call.node, "out_dims"))
            self._place(result, tensor, method)

    def _arguments(self, method: str, node: Any) -> dict[str, Any]:
        """The keyword arguments of pygraph's method, from a node's ports and parameters."""
        if method not in registry():
            raise GraphError(
                "jax_cudnn does not support this operation",
                expected=", ".join(registry()),
                got=method,
                fix=_INSTEAD.get(method),
            )
        cls, params = registry()[method], dict(node.params)
        operands = {
            port: self._operand(tensor, method, port) for port, tensor in node.inputs.items()
        }
        if params.get("mode") == method:  # pointwise: its ports are numbered
            del params["mode"]
            operands = dict(zip(cls.ports.input_names, operands.values(), strict=True))
        if "bool" not in cls.dtypes or method == "binary_select":
            is_mask = ("binary_select", "mask")
            operands = {
                port: x if (method, port) == is_mask else self._as_number(x)
                for port, x in operands.items()
            }
        given = {**operands, **params}
        given |= {port: True for port in node.outputs if port in REQUESTED}
        for count in [key for key in given if key.startswith("_n_")]:
            port = count.removeprefix("_n_")
            given[port] = [given.pop(f"{port}_{i}") for i in range(given.pop(count))]
        if parts := given.pop("_dropout_n", None):
            given["dropout"] = tuple(given.pop(f"dropout_{i}") for i in range(parts))
        if functions := {name: given.pop(name) for name in [*given] if callable(given[name])}:
            scores = (*given["q"].shape[:3], given["k"].shape[2])
            given |= as_jnp(functions, scores, lambda x: self._read(x, method))
        compute = node.compute_data_type
        if not is_unset(compute) and cls.anchor.product and not method.startswith("sdpa"):
            given["compute_data_type"] = compute
        return given

    def _operand(self, tensor: Any, method: str, port: str) -> Any:
        if tensor.uid in self._made:
            return self._made[tensor.uid]
        tiled = (method, port) == ("block_scale_dequantize", "descale")
        if not tiled and "mxfp8" not in method:  # it reorders scales itself
            refuse_reordered(tensor.reordering_type)
        if tiled and getattr(tensor.reordering_type, "name", "NONE") == "NONE":
            expected = "reordering_type=cudnn.tensor_reordering.F8_128x4 of descale"
            raise GraphError("the scales of blocks are not in tiles", expected=expected, got="NONE")
        if tensor.pass_by_value is not None:
            return tensor.pass_by_value
        words = port in ("dropout_1", "dropout_2")
        made = self._graph.tensor(
            dim=SHAPE_OF_WORDS if words else tensor.dim,
            data_type=WORDS if words else tensor.get_data_type(),
            is_pass_by_value=tensor.is_pass_by_value and not words,
            name=tensor.name,
            uid=tensor.uid,
        )
        if tensor.stride_assigned and not (words or tiled):  # tiles are in a row
            made.set_stride(tensor.stride)
        self._became(tensor, made)
        self._place(made, tensor, method)
        return made

    def _read(self, tensor: Any, method: str) -> Any:
        """What a score_mod reads besides the scores: a number, or an operand in GPU memory."""
        found = self._operand(tensor, method, "score_mod_operands")
        if isinstance(found, NamedTensor):
            found.by_value = False
        return found

    def _place(self, made: NamedTensor, tensor: Any, method: str) -> None:
        """Copies a tensor's ragged offset, if it has one."""
        if tensor.ragged_offset is not None:
            made.set_ragged_offset(self._operand(tensor.ragged_offset, method, "ragged_offset"))
            made.set_ragged_offset_multiplier(getattr(tensor, "ragged_offset_multiplier", 1))

    def _as_number(self, value: Any) -> Any:
        """Converts a boolean to a number: cuDNN's comparisons return 1 or 0."""
        if not isinstance(value, NamedTensor) or value._state.dtype != "bool":
            return value
        if value.name not in self._numbers:
            name = f"{value.name}::number"
            self._numbers[value.name] = self._graph.binary_select(1.0, 0.0, value, name=name)
        return self._numbers[value.name]

    def _became(self, tensor: Any, made: NamedTensor) -> None:
        self._made[tensor.uid] = made
        self._recorder.references.remember(tensor, made)

    def _describe(self, result: NamedTensor, tensor: Any, has_open_shape: bool) -> None:
        """Copies the stated properties of a result."""
        self._became(tensor, result)
        result.set_name(tensor.name).set_uid(tensor.uid)
        if tensor.dim and (tensor.dim_assigned or has_open_shape):
            result.set_dim(tensor.dim)
        if tensor.stride_assigned and tensor.stride:
            result.set_stride(tensor.stride)
        data_type = tensor.get_data_type()
        if not tensor.is_virtual:
            result.set_output(True)
        elif is_unset(data_type) or data_type == self._intermediate:
            # The default for floats; integers would keep their dtype, and booleans stay booleans.
            data_type = self._intermediate if result._state.dtype in INTEGERS else None
        if not is_unset(data_type):
            result.set_data_type(data_type)


_INSTEAD: dict[str, str] = dict.fromkeys(
    ("rope", "rope_bwd"), "jax_cudnn.ops.rotary_embedding on the arrays, before or after the graph"
)

# Kinds of nodes that are not named like their method.
_METHODS: dict[str, str] = {
    f"{method.removesuffix('_backward').upper()}_BWD": method
    for method in registry()
    if method.endswith("_backward")
}
