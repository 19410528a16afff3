"""``@graph`` turns a Python function of graph operations into a JAX function."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import registrations as registrations
from ..errors import GraphError, GraphTypeError, JaxCudnnError, shown
from ..primitive import bind
from .arguments import Aval, array, input_names, is_static, parameters, strongly_typed, typed
from .builder import GraphBuilder
from .options import DEFAULTS, Options, TraceContext, replaced
from .source import defined_at, raised_in, user_line
from .spec import GraphSpec
from .tensor import GraphTensor, refusal

_TRACE_CACHE_SIZE = 4096


class Trace(NamedTuple):
    """The result of tracing a user's function once.

    ``leaves`` gives the source of each leaf of the result: an output of the spec (by name) or an
    operand passed through (by position). ``operands`` gives the position of each input of the
    spec among the array arguments followed by the captured arrays.
    """

    spec: GraphSpec
    operands: tuple[int, ...]
    leaves: tuple[str | int, ...]
    structure: Any
    captured: tuple[Any, ...]


class GraphFunction:
    """A cuDNN graph as a JAX function; created by :func:`graph`."""

    def __init__(
        self, fn: Callable[..., Any], options: Options = DEFAULTS, name: str | None = None
    ):
        if not callable(fn):
            raise GraphTypeError(
                "jax_cudnn.graph decorates functions",
                expected="a function of g and arrays",
                got=shown(fn),
            )
        if isinstance(fn, GraphFunction) or hasattr(fn, "lower"):
            raise GraphTypeError(
                "jax_cudnn.graph decorates plain functions",
                got=shown(fn),
                fix="apply jax.jit to the result of jax_cudnn.graph, not before it",
            )
        signature = inspect.signature(fn)
        self._parameters = parameters(signature)
        if self._parameters[:1] == ["self"]:
            raise GraphTypeError(
                "@jax_cudnn.graph does not decorate methods",
                why="its first argument is g, and self would be traced as an array",
                fix="decorate a function and call it from the method",
                where=defined_at(fn),
            )
        functools.update_wrapper(self, fn)
        self.__signature__ = signature.replace(  # what callers see has no g
            parameters=[*signature.parameters.values()][1:]
        )
        self.fn = fn
        self.options = options
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self._base = self
        self._with = functools.lru_cache(maxsize=64)(self._variant)
        self._cached = functools.lru_cache(maxsize=_TRACE_CACHE_SIZE)(self._cacheable_trace)

    def __call__(self, *args: Any, **static: Any) -> Any:
        arrays, trace = self.trace(*args, **static)
        values = [*arrays, *trace.captured]
        operands = [
            # A scalar among tensors was traced with their rank.
            values[i] if values[i].ndim else values[i].reshape(tensor.shape)
            for i, tensor in zip(trace.operands, trace.spec.input_tensors, strict=True)
        ]
        outputs = bind(trace.spec, self.name, *operands)
        named = dict(zip(trace.spec.outputs, outputs, strict=True))
        leaves = [values[at] if isinstance(at, int) else named[at] for at in trace.leaves]
        return jax.tree.unflatten(trace.structure, leaves)

    def with_options(self, **options: Any) -> GraphFunction:
        """The same function with other plan options, see :class:`Options`.

        ``options=Options(...)`` replaces all options; other keywords change single ones.
        """
        return self._with(replaced(self.options, options))

    def _variant(self, options: Options) -> GraphFunction:
        made = GraphFunction(self.fn, options, self.name)
        made._base = self._base
        return made

    def __reduce__(self) -> Any:
        if self._base is not self:  # the decorated function is found by its name
            return _with_options, (self._base, self.options)
        module = sys.modules.get(self.fn.__module__)
        by_name = getattr(module, self.fn.__qualname__, None) is self  # like a function
        return (
            self.fn.__qualname__ if by_name else (GraphFunction, (self.fn, self.options, self.name))
        )

    def trace(self, *args: Any, **static: Any) -> tuple[list[Any], Trace]:
        """The array arguments in order, and the trace for their shapes and the statics."""
        leaves, structure = jax.tree.flatten(args, is_leaf=lambda leaf: leaf is None)
        given = [leaf for leaf in leaves if not is_static(leaf)]
        arrays = strongly_typed([array(self.name, leaf) for leaf in given])
        avals = iter([Aval(tuple(x.shape), str(x.dtype)) for x in arrays])
        slots = [leaf if is_static(leaf) else next(avals) for leaf in leaves]
        for key, value in static.items():
            if isinstance(value, (jax.Array, np.ndarray)):
                raise GraphTypeError(
                    f"{self.name}: keyword argument {key!r} is an array",
                    expected="arrays as positional arguments; keyword arguments are static",
                    fix=f"call {self.name}(..., {key}) by position; for a Python value that "
                    f"jax.jit has traced, jax.jit(..., static_argnames={key!r})",
                )
        key = (
            structure,
            tuple(map(typed, slots)),
            tuple((k, typed(v)) for k, v in static.items()),
            TraceContext.now(),
        )
        try:
            hash(key)
        except TypeError as error:
            raise GraphTypeError(
                f"{self.name}: a static argument is not hashable",
                expected="Python scalars, strings, tuples and other hashable values",
                got=str(error),
                fix="pass lists as tuples",
            ) from None
        try:
            return arrays, self._cached(key)
        except _Captures as captures:
            return arrays, captures.trace

    def _cacheable_trace(self, key: tuple) -> Trace:
        trace = self._trace(key)
        if trace.captured:
            # The next call may close over another array (or tracer): do not cache. lru_cache
            # keeps no result of a call that raises.
            raise _Captures(trace)
        return trace

    def _trace(self, key: tuple) -> Trace:
        structure, slots, static, context = key
        slots = [slot for _, slot in slots]
        static = {name: value for name, (_, value) in static}
        builder = GraphBuilder(self.options, context)
        names = iter(input_names(self._parameters[1:], structure))
        leaves = []
        for slot in slots:
            name = next(names)
            aval = isinstance(slot, Aval)
            leaves.append(builder.input(name, slot.shape, slot.dtype) if aval else slot)
        inputs = [leaf for leaf in leaves if isinstance(leaf, GraphTensor)]
        arguments = jax.tree.unflatten(structure, leaves)
        try:
            inspect.signature(self.fn).bind(builder, *arguments, **static)
        except TypeError as error:
            raise GraphTypeError(
                f"{self.name}: {error}",
                expected=f"{self.name}({', '.join(self._parameters[1:])}); callers leave out the "
                "first parameter of a graph function, which is g",
                where=user_line(),
            ) from None
        try:
            result = self.fn(builder, *arguments, **static)
        except (TypeError, ValueError) as error:
            ours = _original_error(error)
            if ours is None:
                raise
            raise ours from None
        outputs, out_structure = jax.tree.flatten(result)
        for output in outputs:
            if not isinstance(output, GraphTensor):
                raise GraphTypeError(
                    f"{self.name} returned something that is not a graph tensor",
                    expected="graph tensors, in any pytree",
                    got=shown(output),
                    where=defined_at(self.fn),
                )
        position = {name: i for i, name in enumerate(builder._inputs)}
        returned = [t._state.name for t in outputs]
        computed = [t for t in outputs if t._state.name not in position]
        if not computed:
            raise GraphError(
                f"{self.name} returned no result of a graph operation",
                fix="return at least one tensor that a method of g computed",
                where=defined_at(self.fn),
            )
        spec = builder.finish(computed)
        assert len(inputs) + len(builder.captured) == len(position)
        return Trace(
            spec,
            tuple(position[name] for name in spec.inputs),
            tuple(position[name] if name in position else name for name in returned),
            out_structure,
            tuple(builder.captured),
        )

    def __repr__(self) -> str:
        return f"<jax_cudnn.graph {self.name}>"


def graph(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turn a function that calls cuDNN graph operations into a JAX function.

    ``fn(g, *arrays, **static)`` receives ``g``, whose methods have the names and keywords of
    ``cudnn.pygraph``, and a symbolic tensor for each array; it returns tensors in any pytree.
    Arrays follow cuDNN's dims: NCHW images, OIHW weights, (1, C, 1, 1) biases, (B, M, K)
    matrices. Python scalars and keyword arguments are static; arrays that ``fn`` closes over
    become operands.

    Compiled for an NVIDIA GPU, the result runs as one cuDNN plan (or as several with XLA between
    them, see :func:`jax_cudnn.implementation`); elsewhere it runs as its jnp reference. Products
    accumulate in float32, intermediates are float32, and an output has the promoted dtype of its
    inputs (that of a reduction is float32) unless ``.set_data_type`` sets another.

    As under ``jax.jit``, Python values that ``fn`` closes over are read once, when it is traced.

    Args:
        fn: the function; omitted in ``@graph(option=...)``.
        **options: how to choose the plan, see :class:`Options`: ``implementation="cudnn"``,
            ``deterministic=True``, ``max_workspace=2**28``, ``precision="highest"``, ...; or all
            options at once, ``options=Options(...)``.

    Raises:
        GraphError, GraphTypeError: at trace time, with the line of ``fn``.
        UnsupportedGraphError: under ``implementation="cudnn"``, when compiled for a GPU on which
            cuDNN has no engine for the graph.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> @jc.graph
        ... def linear(g, x, w, b):
        ...     return g.relu(g.bias(g.matmul(x, w), b))
        >>> x, w, b = jnp.ones((1, 4, 8)), jnp.ones((1, 8, 2)), jnp.zeros((1, 1, 2))
        >>> jax.jit(linear)(x, w, b).shape
        (1, 4, 2)
    """
    chosen = replaced(DEFAULTS, options)
    if fn is None:
        return functools.partial(GraphFunction, options=chosen)
    return GraphFunction(fn, chosen)


def _with_options(function: GraphFunction, options: Options) -> GraphFunction:
    return function.with_options(options=options)


class _Captures(Exception):
    def __init__(self, trace: Trace):
        self.trace = trace


def _original_error(error: BaseException) -> JaxCudnnError | None:
    """Our error about a graph tensor in jnp, where JAX wrapped it or raised another instead."""
    if isinstance(error, JaxCudnnError):
        return error
    if repr(GraphTensor) not in str(error):
        return None
    cause: BaseException | None = error
    while cause := cause.__cause__ or cause.__context__:
        if isinstance(cause, JaxCudnnError):
            return cause
    line, function = raised_in(error)
    return refusal(function, line)
