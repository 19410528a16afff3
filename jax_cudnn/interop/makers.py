"""Functions that make Graphs: graph_cache, and from_pygraph for graphs of cuDNN's frontend."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError, JaxCudnnError, shown
from .._core.graph.arguments import typed
from .._core.graph.dtypes import INTEGERS, WORDS
from .._core.graph.node import REGISTRY
from .._core.graph.source import defined_at
from .arrays import SHAPE_OF_WORDS, Template, is_array, is_unset, listed, refusal
from .attention import REQUESTED
from .score_mod import as_jnp
from .tensors import NamedTensor, refuse_reordered
from .wrapper import Graph


def graph_cache(
    fn: Callable[..., Any] | None = None,
    *,
    maxsize: int = 256,
    key_fn: Callable[..., Hashable] | None = None,
) -> Any:
    """Decorate a function that builds a graph, so that equal kinds of arguments share a graph.

    The key holds the shape, dtype and memory order of each array, in any pytree, and which
    arguments are the same array. It holds the value and type of all other arguments, including
    NumPy scalars. Defaults count as passed, and positional and keyword arguments are equivalent.
    The cache keeps the ``maxsize`` graphs used most recently. If threads request the same graph,
    one builds it and the rest wait. The cache keeps no array alive, but it does keep other
    arguments alive, such as the instance of a method.

    Args:
        fn: the function; omitted in ``@graph_cache(maxsize=...)``.
        maxsize: how many graphs to keep.
        key_fn: a function that returns the key for given arguments; keyword-only, unlike in
            ``cudnn.graph_cache``.

    Returns:
        The function, with ``cache_info()`` and ``cache_clear()``.

    Raises:
        GraphTypeError: an argument is neither an array nor hashable.

    Source: ``cudnn.graph_cache`` and "Using wrapper in larger codebases" in NVIDIA's
    cudnn-frontend.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> @jc.graph_cache
        ... def relu(x):
        ...     with jc.Graph(inputs=["relu::input"], outputs=["relu::OUT_0"]) as graph:
        ...         _ = graph.relu(input=x, name="relu").set_output(True)
        ...     return graph
        >>> x = jnp.array([-1.0, 2.0])
        >>> relu(x)(x).tolist(), relu(x) is relu(2 * x), relu.cache_info().currsize
        ([0.0, 2.0], True, 1)
    """
    if fn is None:
        return functools.partial(graph_cache, maxsize=maxsize, key_fn=key_fn)
    if not callable(fn):
        raise GraphTypeError(
            "graph_cache decorates functions",
            expected="a function that builds a graph",
            got=shown(fn),
            fix="@graph_cache, or @graph_cache(maxsize=..., key_fn=...)",
        )
    if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 1:
        raise GraphError("invalid maxsize", expected="an integer of at least 1", got=repr(maxsize))
    return _Factory(fn, maxsize, key_fn)


class _Entry:
    """A graph that is built, or that a thread is building."""

    def __init__(self, _: Hashable) -> None:
        self.lock = threading.RLock()
        self.graph: Any = None


class _Factory:
    """The decorated function."""

    def __init__(
        self, fn: Callable[..., Any], maxsize: int, key_fn: Callable[..., Hashable] | None
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._key_fn, self._signature = fn, key_fn, None
        with contextlib.suppress(TypeError, ValueError):  # a few built-in functions have none
            self._signature = inspect.signature(fn)
        self._lock = threading.Lock()
        self._entry = functools.lru_cache(maxsize)(_Entry)
        self.cache_info, self.cache_clear = self._entry.cache_info, self._entry.cache_clear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._key_fn(*args, **kwargs) if self._key_fn else self._kind(args, kwargs)
        try:
            with self._lock:
                entry = self._entry(key)
        except TypeError as error:
            what, expected, fix = "a key of key_fn", "a hashable value, for example a tuple", None
            if self._key_fn is None:
                what, fix = "an argument", "pass key_fn to graph_cache"
                expected = "arrays, or hashable values such as numbers, strings and tuples"
            raise self._refusal(f"{what} is not hashable", expected, str(error), fix) from None
        with entry.lock:
            if entry.graph is None:  # also if it raised in the thread that this one waited for
                entry.graph = self._fn(*args, **kwargs)
                for leaf in jax.tree.leaves(entry.graph):
                    if isinstance(leaf, Graph):  # it serves all numbers in host memory
                        leaf._forget_numbers()
            return entry.graph

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The key of arguments that share a graph."""
        if self._signature is not None:
            with contextlib.suppress(TypeError):  # the function will raise it
                bound = self._signature.bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
        try:
            leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
        except ValueError as error:  # JAX sorts the keys of dictionaries
            raise self._refusal(
                "an argument is not a pytree",
                "dictionaries whose keys can be sorted",
                str(error).splitlines()[0],
                "pass key_fn to graph_cache",
            ) from error
        first: dict[int, int] = {}
        kinds = (_of_leaf(leaf, first.setdefault(id(leaf), i)) for i, leaf in enumerate(leaves))
        return tree, tuple(kinds)

    def _refusal(self, what: str, expected: str, got: str, fix: str | None) -> GraphTypeError:
        where, name = defined_at(self._fn), getattr(self, "__name__", "the factory")
        return GraphTypeError(f"{name}: {what}", expected=expected, got=got, fix=fix, where=where)

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", "graph_cache")  # pickled as functions are

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument, and all instances share the cache."""
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.cache_info, bound.cache_clear = self.cache_info, self.cache_clear
        return bound


def _of_leaf(leaf: Any, place: int) -> Hashable:
    """A leaf's part of the key. ``place`` is the first place of the same object: one input."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return place, leaf.shape, leaf.dtype  # random keys
    if isinstance(leaf, np.generic):  # a graph holds its value
        return type(leaf), leaf.tobytes()
    return (place, Template.of(leaf)) if is_array(leaf) else typed(leaf)


# -- cuDNN's frontend ---------------------------------------------------------------------------


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
    strides are dropped, and lengths, offsets and pages of INT64 become int32.

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
        if method not in REGISTRY:
            raise GraphError(
                "jax_cudnn does not support this operation",
                expected=", ".join(REGISTRY),
                got=method,
                fix=_INSTEAD.get(method),
            )
        cls, params = REGISTRY[method], dict(node.params)
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
        tiled = "mxfp8" in method or (method, port) == ("block_scale_dequantize", "descale")
        if not tiled:  # these nodes read scales in tiles
            refuse_reordered(tensor.reordering_type)
        elif "mxfp8" not in method and getattr(tensor.reordering_type, "name", "NONE") == "NONE":
            raise GraphError(
                "the scales of blocks are not in tiles",
                expected="reordering_type=cudnn.tensor_reordering.F8_128x4 of descale",
                got="NONE",
                why="a product of blocks reads its scales in this order",
            )
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
    for method in REGISTRY
    if method.endswith("_backward")
}
