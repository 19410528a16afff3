"""from_pygraph: a graph that was built with cuDNN's frontend, as a JAX function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.errors import GraphError, GraphTypeError, JaxCudnnError
from .._core.graph.dtypes import INTEGERS, WORDS
from .._core.graph.node import REGISTRY
from .._core.graph.source import user_line
from .checks import listed, refuse_reordered
from .recorder import Recorder
from .spellings import ASKED_FOR
from .templates import SHAPE_OF_WORDS
from .tensors import NamedTensor
from .wrapper import Graph


def from_pygraph(
    graph: Any,
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[Any] | None = None,
    *,
    name: str | None = None,
    **options: Any,
) -> Graph:
    """Make a JAX function of a ``cudnn.pygraph``, by its nodes; it need not be built or planned.

    Tensors keep their names and uids, nodes their names, so that all references of
    :class:`jax_cudnn.Graph` work, pygraph's own tensors among them. A tensor that is passed by
    value and has a value is a constant; one without is an input, which a Python number or NumPy
    array makes a constant of the plan. A seed or offset of dropout, one INT64 in cuDNN, is two
    uint32 here, (1, 1, 1, 2): the low and the high word; calls take one integer, too.

    Args:
        graph: a ``cudnn.pygraph`` of nvidia-cudnn-frontend 1.28 or newer.
        inputs: references in the order of positional calls; in the order of use if left out.
        outputs: references in the order of results; all non-virtual results if left out.
        name: of the graph, in profiles and errors; the pygraph's own if left out.
        **options: fields of :class:`jax_cudnn.Options`.

    Returns: a :class:`jax_cudnn.Graph`: callable with arrays or with a dictionary, with all
    transformations.

    Raises:
        GraphTypeError: it is no pygraph that keeps its nodes in Python.
        GraphError: an operation or attribute has no counterpart here; the node is named.

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
        raise GraphTypeError(
            "from_pygraph got a jax_cudnn.Graph",
            expected="a cudnn.pygraph",
            got=repr(graph),
            why="it is a JAX function already",
            fix="call it; graph.with_options(...) is the same graph with other options",
            where=user_line(),
        )
    nodes = getattr(graph, "nodes", None)
    if not isinstance(nodes, list) or not hasattr(graph, "context"):
        raise GraphTypeError(
            "from_pygraph got no pygraph that keeps its nodes",
            expected="a cudnn.pygraph of nvidia-cudnn-frontend 1.28 or newer",
            got=f"{type(graph).__name__}",
            fix="upgrade the frontend; a deserialised graph has plans, but no nodes",
            where=user_line(),
        )
    if said := [option for option in _OF_CONTEXT if option in options]:
        raise GraphError(
            f"from_pygraph of another {said[0]}",
            got=f"{said[0]}={options[said[0]]!r}",
            why="the pygraph says it",
            fix=f"cudnn.pygraph({said[0]}=...)",
            where=user_line(),
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
        marked = tuple(tensor for tensor in made._built.handles.values() if tensor.is_output)
        made._io = inputs, outputs or marked
    return made


class _Copy:
    """Carries nodes over, and knows what became of each tensor."""

    def __init__(self, graph: Graph, intermediate: Any) -> None:
        self._graph, self._intermediate = graph, intermediate
        self._made: dict[int, Any] = {}
        self._numbers: dict[str, NamedTensor] = {}  # for truths

    @property
    def _recorder(self) -> Recorder:
        return self._graph._built

    def add(self, node: Any) -> None:
        """Adds a node; GraphError that names it where there is no counterpart."""
        method = _method(node)
        try:
            arguments = self._arguments(method, node)
            name = None if node.name in self._recorder.nodes else node.name  # it need be no other's
            getattr(self._graph, method)(**arguments, name=name)
        except JaxCudnnError as error:
            error.summary = f"from_pygraph: node {node.name!r}: {error.summary}"
            raise
        call = [*self._recorder.nodes.values()][-1]
        made = {port: self._recorder.handles[result] for port, result in call.outputs}
        for port, tensor in dict(node.outputs).items():
            if len(made) == 1:  # which may have another name there
                (port,) = made
            result = made[ASKED_FOR.get(port, port)]
            self._describe(result, tensor)
            self._place(result, tensor, method)

    def _arguments(self, method: str, node: Any) -> dict[str, Any]:
        """The keywords of pygraph's method, from a node's ports and parameters."""
        if method not in REGISTRY:
            raise GraphError(
                "no operation here is its counterpart", expected=", ".join(REGISTRY), got=method
            )
        cls, params = REGISTRY[method], dict(node.params)
        operands = {
            port: self._operand(tensor, method, port) for port, tensor in node.inputs.items()
        }
        if params.get("mode") == method:  # an operation on each element: its ports are numbered
            del params["mode"]
            operands = dict(zip(cls.ports.input_names, operands.values(), strict=True))
        if "bool" not in cls.dtypes or method == "binary_select":
            operands = {
                port: x if (method, port) == _MASK else self._as_number(x)
                for port, x in operands.items()
            }
        given = {**operands, **params}
        given |= {port: True for port in node.outputs if port in ASKED_FOR}
        for count in [key for key in given if key.startswith("_n_")]:
            port = count.removeprefix("_n_")
            given[port] = [given.pop(f"{port}_{i}") for i in range(given.pop(count))]
        if parts := given.pop("_dropout_n", None):
            given["dropout"] = tuple(given.pop(f"dropout_{i}") for i in range(parts))
        functions = [name for name, value in given.items() if callable(value)]
        if functions:
            raise GraphError(
                f"{functions[0]} is a function of cuDNN's graphs",
                why="it adds to a graph of the frontend's, which JAX does not see",
                fix="jax_cudnn.ops.dot_product_attention(score_mod=...) takes a function of arrays",
            )
        compute = _known(node.compute_data_type)
        if compute is not None and cls.product and not method.startswith("sdpa"):
            given["compute_data_type"] = compute
        return given

    def _operand(self, tensor: Any, method: str, port: str) -> Any:
        if tensor.uid in self._made:
            return self._made[tensor.uid]
        if "mxfp8" not in method:  # which orders its scales itself
            refuse_reordered(tensor.reordering_type)
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
        if tensor.stride_assigned and not words:
            made.set_stride(tensor.stride)
        self._became(tensor, made)
        self._place(made, tensor, method)
        return made

    def _place(self, made: NamedTensor, tensor: Any, method: str) -> None:
        """Says where a tensor's examples lie, if they lie behind each other."""
        if tensor.ragged_offset is not None:
            made.set_ragged_offset(self._operand(tensor.ragged_offset, method, "ragged_offset"))
            made.set_ragged_offset_multiplier(getattr(tensor, "ragged_offset_multiplier", 1))

    def _as_number(self, value: Any) -> Any:
        """cuDNN's comparisons are numbers, 1 or 0, to what computes with them."""
        if not isinstance(value, NamedTensor) or value._state.dtype != "bool":
            return value
        if value.name not in self._numbers:
            name = f"{value.name}::number"
            self._numbers[value.name] = self._graph.binary_select(1.0, 0.0, value, name=name)
        return self._numbers[value.name]

    def _became(self, tensor: Any, made: NamedTensor) -> None:
        self._made[tensor.uid] = made
        self._recorder.references.remember(tensor, made)

    def _describe(self, result: NamedTensor, tensor: Any) -> None:
        """What was said of a result."""
        self._became(tensor, result)
        result.set_name(tensor.name).set_uid(tensor.uid)
        if tensor.dim and (tensor.dim_assigned or self._recorder.is_open_in_shape(result)):
            result.set_dim(tensor.dim)
        if tensor.stride_assigned and tensor.stride:
            result.set_stride(tensor.stride)
        data_type = _known(tensor.get_data_type())
        if not tensor.is_virtual:
            result.set_output(True)
        elif data_type in (None, self._intermediate):
            # What floats have anyway; here integers would keep their own, and truths are truths.
            data_type = self._intermediate if result._state.dtype in INTEGERS else None
        if data_type is not None:
            result.set_data_type(data_type)


_MASK = "binary_select", "mask"
_OF_CONTEXT = "io_data_type", "intermediate_data_type"


def _method(node: Any) -> str:
    """pygraph's method by which a node was made."""
    kind: str = node.node_type.name
    return node.params["mode"] if kind == "POINTWISE" else _METHODS.get(kind, kind.lower())


# Where the kind of a node is not its method's name.
_METHODS: dict[str, str] = {
    f"{method.removesuffix('_backward').upper()}_BWD": method
    for method in REGISTRY
    if method.endswith("_backward")
}


def _known(data_type: Any) -> Any:
    return None if getattr(data_type, "name", None) == "NOT_SET" else data_type
