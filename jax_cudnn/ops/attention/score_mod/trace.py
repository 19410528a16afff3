"""Convert a score_mod written in jnp to a graph of pointwise operations.

``jax.make_jaxpr`` traces it, and each operation is translated: users write ``jnp.where``,
``jnp.tanh`` and operators, and cuDNN gets its own pointwise operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...._core.compat import PLACING, user_frames
from ...._core.errors import GraphError, GraphTypeError, JaxCudnnError, shown
from ...._core.graph.builder import GraphBuilder
from ...._core.graph.dims import Shape
from ...._core.graph.dtypes import is_floating
from ...._core.graph.source import defined_at
from ...._core.graph.spec import GraphSpec
from ...._core.graph.tensor import GraphTensor
from .primitives import PRIMITIVES, SHORT, TAKEN


class Traced(GraphBuilder):
    """Builds the graph of one function; ``arrays`` are captured arrays, as further operands, and
    ``truths`` the operands that are 1 and 0 in the graph and booleans in the function."""

    def __init__(
        self,
        scores: Shape,
        operands: Sequence[tuple[Shape, str]],
        numbers: bool = True,
        kind: str = "float32",
    ) -> None:
        super().__init__()
        self.scores, self.numbers, self.kind = scores, numbers, kind
        self.score = self.input("score", scores, kind)
        self.operands = [
            self._operand(shape, kind if dtype == "bool" else dtype) for shape, dtype in operands
        ]
        names = zip(self.operands, operands, strict=True)
        self.truths = {x.name for x, (_, dtype) in names if dtype == "bool"}
        self.arrays: list[Any] = []
        self.closes_over = False

    def _operand(self, shape: Shape, dtype: str) -> GraphTensor:
        name = f"operand{len(self._inputs) - 1}"
        return self.input(name, ones_in_front(shape), self.kind if is_floating(dtype) else dtype)

    def write(self, function: Callable[..., Any]) -> tuple[GraphSpec, tuple[int, ...]]:
        """The graph, and the indices of the operands, followed by ``arrays``, that it reads after
        the scores."""
        shaped = jax.ShapeDtypeStruct
        given = [shaped(self.scores, self.kind)]
        for axis, size in enumerate(self.scores):
            given.append(shaped(tuple(size if i == axis else 1 for i in range(4)), "int32"))
        given += [shaped(x.shape, self._taken(x)[0]) for x in self.operands]
        # A new lambda: JAX caches the trace of a function, with the arrays that it captured.
        closed = jax.make_jaxpr(lambda *arguments: function(*arguments), return_shape=True)
        try:
            jaxpr, result = closed(*given)
        except (ValueError, jax.errors.TracerBoolConversionError) as error:
            scalar = isinstance(error, jax.errors.TracerBoolConversionError)
            if isinstance(error, JaxCudnnError) or not (scalar or "truth value" in f"{error}"):
                raise
            raise GraphTypeError(
                "score_mod has a Python condition on an array",
                why="it is traced once, for all scores: if, and, or and not need one bool",
                fix="jnp.where(condition, score, -jnp.inf), and & | ~ between conditions",
                where=defined_at(function),
            ) from error
        self._check(function, result)
        indices = [functools.partial(self._index, axis) for axis in range(4)]
        values = [self.score, *indices, *(self._taken(x)[1] for x in self.operands)]
        (out,) = self._run(jaxpr.jaxpr, jaxpr.consts, values)
        out = self._full(out)
        if out.name in self._inputs:
            out = self.made("identity", out)
        spec = self.finish([out])
        ours = [x.name for x in self.operands]
        return spec, tuple(ours.index(name) for name in spec.inputs if name != self.score.name)

    def _taken(self, x: GraphTensor) -> tuple[Any, Any]:
        """The dtype of an operand in the function, and its value."""
        if x.name in self.truths:
            return "bool", functools.partial(self.made, "cmp_neq", x, 0.0)
        return x.dtype, x

    def _check(self, function: Callable[..., Any], result: Any) -> None:
        where = defined_at(function)
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise GraphTypeError(
                "score_mod did not return an array",
                expected="the modified score",
                got=shown(result),
                where=where,
            )
        if tuple(result.shape) != self.scores:
            raise GraphError(
                "score_mod changes the shape of the score",
                expected=str(list(self.scores)),
                got=str(list(result.shape)),
                why="it gets all scores, (B, N, T, S), and indices that broadcast with them",
                where=where,
            )
        if str(result.dtype) not in ("float32", "float64"):
            raise GraphTypeError(
                "score_mod did not return float32",
                expected="float32, the dtype of the score",
                got=str(result.dtype),
                fix="apply a mask to the score: jnp.where(seen, score, -jnp.inf)",
                where=where,
            )

    def _closed_over(self, value: Any) -> Any:
        """A captured value: a constant if it is known now, else a further operand."""
        self.closes_over = True
        if isinstance(value, Tracer) or (isinstance(value, jax.Array) and not self.numbers):
            return self._further(value)
        return np.asarray(value)

    def _further(self, x: Any) -> GraphTensor:
        self.arrays.append(x.reshape(ones_in_front(x.shape)))
        self.operands.append(self._operand(x.shape, str(x.dtype)))
        return self.operands[-1]

    @functools.cache  # noqa: B019 (a builder lives as long as one trace)
    def _index(self, axis: int) -> GraphTensor:
        return self.gen_index(self.score, axis=axis)

    # -- from jaxpr to nodes ---------------------------------------------------------------------

    def _run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        known = [self._closed_over(x) for x in consts]
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*known, *arguments), strict=True))

        def read(x: Any) -> Any:
            value = np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]
            if isinstance(value, functools.partial):
                values[x] = value = value()
            return value

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            results = self._equation(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name, inner = eqn.primitive.name, _inner(eqn)
        if inner is not None:
            short = SHORT.get(eqn.params.get("name", ""))
            whole = all(not is_floating(str(x.aval.dtype)) for x in eqn.invars)
            if short is not None and whole and _is_graph(operands):
                return [short(self, *operands)]
            closed = getattr(inner, "jaxpr", inner)
            return self._run(closed, getattr(inner, "consts", ()), operands)
        if name in PLACING:
            return operands
        if name == "broadcast_in_dim":
            return [_stretched(operands[0], eqn)]
        if not _is_graph(operands):
            return _folded(eqn, operands)
        write = PRIMITIVES.get(name)
        try:
            if write is None:
                raise GraphError(f"{name} is not supported", expected=TAKEN)
            return [write(self, eqn, *operands)]
        except JaxCudnnError as error:
            error.summary = f"score_mod: {error.summary}"
            error.why = error.why or ("cuDNN applies score_mod to tiles of the scores, elementwise")
            error.fix = error.fix or (
                "compute it before the call, and pass the array in score_mod_operands"
            )
            error.where = _line(eqn) or error.where
            raise

    # -- values ----------------------------------------------------------------------------------

    def made(self, method: str, *operands: Any) -> GraphTensor:
        """An operation's result in float32; booleans are 1 and 0."""
        first, *others = operands
        if len(operands) > 1 and not any(self._is_full(x) for x in operands):
            at = next(i for i, x in enumerate(operands) if isinstance(x, GraphTensor))
            operands = (*operands[:at], self._full(operands[at]), *operands[at + 1 :])
        elif not others:
            operands = (self._full(first),)
        made = self._apply(method, *(self._plain(x) for x in operands))
        return made.set_data_type(self.kind)

    def _is_full(self, x: Any) -> bool:
        return isinstance(x, GraphTensor) and x.shape == self.scores

    def _plain(self, x: Any) -> Any:
        if isinstance(x, GraphTensor):
            return x
        if np.ndim(x) == 0 or np.size(x) == 1:
            return float(np.asarray(x).reshape(()))
        return self._array(np.asarray(x))

    def _array(self, x: np.ndarray) -> GraphTensor:
        """An array computed while tracing, as an operand."""
        whole = np.issubdtype(x.dtype, np.integer)
        return self._further(x.astype("int32" if whole else self.kind))

    def _full(self, x: Any) -> GraphTensor:
        """A value in the scores' shape: cuDNN computes nothing smaller to broadcast later."""
        if self._is_full(x):
            return x
        nothing = self.mul(self._index(3), 0.0).set_data_type(self.kind)
        return self.add(nothing, self._plain(x)).set_data_type(self.kind)


def ones_in_front(shape: Shape) -> Shape:
    """The shape with leading ones, of rank 4."""
    if len(shape) > 4:
        raise GraphError(
            "score_mod has an operand of rank above 4",
            expected="a shape that broadcasts to the scores, (B, N, T, S)",
            got=f"shape {list(shape)}",
        )
    return (*(1,) * (4 - len(shape)), *shape)


def _inner(eqn: Any) -> Any:
    """The jaxpr of a called function (jit, custom derivatives), or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    return None


def _is_graph(operands: Sequence[Any]) -> bool:
    return any(isinstance(x, GraphTensor) for x in operands)


def _line(eqn: Any) -> str:
    """The user's source line of an operation."""
    for file, line, function in user_frames(eqn):
        return f"{file}:{line}, in {function}"
    return ""


def _stretched(x: Any, eqn: Any) -> Any:
    """A broadcast operand, kept at its size, with rank 4."""
    if isinstance(x, GraphTensor):
        axes = eqn.params["broadcast_dimensions"]
        if axes != tuple(range(4 - len(axes), 4)):
            raise GraphError(
                "score_mod: transposing the dimensions of an operand is not supported",
                expected="operands that broadcast to the scores, (B, N, T, S), as they are",
                fix="transpose it before the call",
            )
        return x
    x = np.asarray(x)
    shape = [1] * len(eqn.params["shape"])
    for size, axis in zip(x.shape, eqn.params["broadcast_dimensions"], strict=True):
        shape[axis] = size
    return x.reshape(shape) if x.ndim else x


def _folded(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """An operation on values known while tracing."""
    arrays = [np.asarray(x) for x in operands]
    if eqn.primitive.name in PRIMITIVES:  # small arrays stay so
        arrays = np.broadcast_arrays(*arrays)
    else:
        arrays = [np.broadcast_to(x, v.aval.shape) for x, v in zip(arrays, eqn.invars, strict=True)]
    if not all(isinstance(v.aval.dtype, np.dtype) for v in eqn.outvars):  # random keys
        raise GraphError(f"score_mod: {eqn.primitive.name} is not supported", expected=TAKEN)
    with jax.ensure_compile_time_eval():
        given = [jnp.asarray(x, y.aval.dtype) for x, y in zip(arrays, eqn.invars, strict=True)]
        made = eqn.primitive.bind(*given, **eqn.params)
    results = made if eqn.primitive.multiple_results else [made]
    return [np.asarray(x) for x in results]
