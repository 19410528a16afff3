"""from_pygraph: a graph that was built with cuDNN's frontend, as a JAX function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import order_of_strides
from .._core.graph.node import REGISTRY
from .._core.graph.source import user_line
from .recorder import Recorder
from .tensors import NamedTensor
from .wrapper import Graph


def from_pygraph(
    graph: Any,
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[Any] | None = None,
    **options: Any,
) -> Graph:
    """Make a JAX function of a ``cudnn.pygraph``, by its nodes; it need not be built or planned.

    Tensors keep their names and uids, nodes their names, so that all references of
    :class:`jax_cudnn.Graph` work, pygraph's own tensors among them. A tensor that is passed by
    value and has a value is a constant; one without is an input, which a Python number or NumPy
    array makes a constant of the plan. A seed or offset of dropout, one INT64 in cuDNN, is two
    uint32 here, (1, 1, 1, 2): the low and the high word.

    Args:
        graph: a ``cudnn.pygraph`` of nvidia-cudnn-frontend 1.28 or newer.
        inputs: references in the order of positional calls; in the order of use if left out.
        outputs: references in the order of results; all non-virtual results if left out.
        **options: fields of :class:`jax_cudnn.Options`.

    Returns: a :class:`jax_cudnn.Graph`: callable with arrays or with a dictionary, with all
    transformations.

    Raises:
        GraphTypeError: it is no pygraph that keeps its nodes in Python.
        GraphError: an operation or attribute has no counterpart here; the node is named.

    Example:
        >>> import cudnn, jax, jax.numpy as jnp, jax_cudnn as jc              # doctest: +SKIP
        >>> g = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
        >>> x = g.tensor(name="x", dim=[4, 8, 16])
        >>> y = g.relu(input=x, name="relu").set_output(True)
        >>> relu = jc.from_pygraph(g, inputs=[x], outputs=[y])
        >>> jax.grad(lambda x: relu(x).sum())(jnp.ones((4, 8, 16))).shape
        (4, 8, 16)
    """
    nodes = getattr(graph, "nodes", None)
    if not isinstance(nodes, list) or not hasattr(graph, "context"):
        raise GraphTypeError(
            "from_pygraph got no pygraph that keeps its nodes",
            expected="a cudnn.pygraph of nvidia-cudnn-frontend 1.28 or newer",
            got=f"{type(graph).__name__}",
            fix="upgrade the frontend; a deserialised graph has plans, but no nodes",
            where=user_line(),
        )
    context = graph.context
    made = Graph(
        name=graph._cpp_graph_kwargs.get("name", "pygraph"),
        io_data_type=context.io_data_type,
        intermediate_data_type=_known(context.intermediate_data_type),
        **options,
    )
    with made:
        copied = _Copy(made)
        for node in nodes:
            copied.add(node)
        made._io = copied.references(inputs), copied.references(outputs)
    return made


class _Copy:
    """Carries nodes over, and knows what became of each tensor."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[int, Any] = {}

    @property
    def _recorder(self) -> Recorder:
        return self._graph._built

    def references(self, given: Sequence[Any] | None) -> tuple[Any, ...] | None:
        """References with pygraph's tensors replaced by those that they became."""
        if given is None:
            return None
        return tuple(
            self._made.get(ref.uid, ref) if hasattr(ref, "get_uid") else ref for ref in given
        )

    def add(self, node: Any) -> None:
        """Adds a node; GraphError that names it where there is no counterpart."""
        method = _method(node)
        if method not in REGISTRY:
            raise GraphError(
                f"from_pygraph: node {node.name!r} has no counterpart",
                expected=", ".join(REGISTRY),
                got=method,
                where=user_line(),
            )
        operands = {port: self._operand(tensor) for port, tensor in node.inputs.items()}
        arguments = _arguments(method, operands, dict(node.params))
        compute = _known(node.compute_data_type)
        if compute is not None and REGISTRY[method].product and not method.startswith("sdpa"):
            arguments["compute_data_type"] = compute
        results = getattr(self._graph, method)(**arguments, name=node.name)
        if not isinstance(results, list):
            results = [results]
        present = [r for r in results if r is not None]
        for (port, tensor), result in zip(node.outputs.items(), present, strict=True):
            self._describe(result, tensor)

    def _operand(self, tensor: Any) -> Any:
        if tensor.uid in self._made:
            return self._made[tensor.uid]
        if tensor.pass_by_value is not None:
            return tensor.pass_by_value
        made = self._graph.tensor(
            dim=tensor.dim,
            data_type=tensor.get_data_type(),
            is_pass_by_value=tensor.is_pass_by_value,
            ragged_offset=tensor.ragged_offset,
            name=tensor.name,
            uid=tensor.uid,
        )
        if tensor.stride_assigned:
            made.set_stride(tensor.stride)
        self._made[tensor.uid] = made
        return made

    def _describe(self, result: NamedTensor, tensor: Any) -> None:
        """What was said of a result."""
        self._made[tensor.uid] = result
        result.set_name(tensor.name).set_uid(tensor.uid)
        if tensor.dim:
            result.set_dim(tensor.dim)
        if tensor.stride_assigned and tensor.stride:
            result.set_stride(tensor.stride)
        if _known(tensor.data_type) is not None:
            result.set_data_type(tensor.get_data_type())
        if not tensor.is_virtual:
            result.set_output(True)


def _method(node: Any) -> str:
    """pygraph's method by which a node was made."""
    kind = node.node_type.name
    return node.params["mode"] if kind == "POINTWISE" else _METHODS.get(kind, kind.lower())


# Where the kind of a node is not its method's name.
_METHODS = {
    f"{name.upper()}_BWD": f"{name}_backward"
    for name in (
        "rmsnorm",
        "layernorm",
        "adalayernorm",
        "instancenorm",
        "batchnorm",
        "sdpa",
        "sdpa_fp8",
        "sdpa_mxfp8",
    )
}


def _arguments(method: str, operands: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The keywords of pygraph's method, from a node's ports and parameters."""
    if REGISTRY[method].ports.is_elementwise:
        params.pop("mode", None)
        operands = dict(zip(REGISTRY[method].ports.input_names, operands.values(), strict=True))
    for count in [key for key in params if key.startswith("_n_")]:
        port = count.removeprefix("_n_")
        operands[port] = [operands.pop(f"{port}_{i}") for i in range(params.pop(count))]
    if size := params.pop("_dropout_n", None):
        both = {**operands, **params}
        params["dropout"] = tuple(both[f"dropout_{i}"] for i in range(size))
        for i in range(size):
            operands.pop(f"dropout_{i}", None)
            params.pop(f"dropout_{i}", None)
    return {**operands, **params}


def _known(data_type: Any) -> Any:
    return None if getattr(data_type, "name", None) == "NOT_SET" else data_type
