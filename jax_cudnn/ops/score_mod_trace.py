"""A function of attention's scores in jnp, as the graph of operations on each element that it is.

It is traced by ``jax.make_jaxpr`` and written down anew, operation by operation: so users write
``jnp.where``, ``jnp.tanh`` and operators, and cuDNN gets its own pointwise operations.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._core.compat import PLACING, user_frames
from .._core.errors import GraphError, GraphTypeError, JaxCudnnError
from .._core.graph.builder import GraphBuilder
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FLOATS, is_floating
from .._core.graph.source import defined_at
from .._core.graph.spec import GraphSpec
from .._core.graph.tensor import GraphTensor
from .attention_reference import Band
from .score_mod import PORT, ScoreMod
from .score_mod_emission import before_causal_mask
from .score_mod_primitives import PRIMITIVES, SHORT, TAKEN

_ALL = Band()
_MANY = 256  # shapes of one function

_Known = dict[Any, tuple[ScoreMod, tuple[int, ...]]]
_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def written(
    function: Callable[..., Any],
    operands: Sequence[Any],
    scores: Shape,
    band: Band = _ALL,
    lengths: Sequence[Any] = (),
    truths: tuple[int, ...] = (),
    numbers: bool = True,
) -> tuple[ScoreMod, list[Any]]:
    """A user's function, and then the band and the lengths, as one; with the operands that it
    reads, of those given and those closed over. Operands at ``truths`` come to it as booleans.

    It is traced once for equal functions and shapes, while such a function lives; at each call
    where it closes over arrays, which may be others by then. With ``numbers`` those of one element
    that are known are numbers of the graph, else operands.
    """
    everything = [*operands, *lengths]
    avals = tuple((tuple(x.shape), str(x.dtype)) for x in everything)
    known, key = _known_of(function), (scores, avals, len(lengths), band, truths)
    found = known.get(key)
    if found is None:
        _check_parameters(function, len(operands))
        user = _Truths(function, truths) if truths else function
        mod, read, traced = _written(user, avals, scores, band, len(operands), numbers)
        found = mod, read
        everything += traced.arrays
        if len(known) >= _MANY:
            known.clear()
        if not (traced.closes_over or traced.arrays):
            known[key] = found
    mod, read = found
    return mod, [everything[i] for i in read]


def _known_of(function: Any) -> _Known:
    """What is known of a function; nothing where it is not hashable or has no weak references."""
    try:
        return _known.setdefault(function, {})
    except TypeError:
        return {}


def _written(
    function: Callable[..., Any],
    avals: Sequence[tuple[Shape, str]],
    scores: Shape,
    band: Band,
    count: int,
    numbers: bool,
) -> tuple[ScoreMod, tuple[int, ...], Traced]:
    """The function of ``count`` operands, behind which the lengths stand; which of its operands,
    followed by the arrays closed over, it reads."""
    lengths = len(avals) > count
    traced = Traced(scores, avals[:count], numbers)
    spec, read = traced.write(function)
    hides = getattr(function, "hides_queries", None)
    if hides is None:
        hides = not _is_finite(spec)
    if lengths or band != Band(bottom_right=band.bottom_right):
        hides = hides or lengths or _hides(band, *scores[2:])
        traced = Traced(scores, avals, numbers)
        spec, read = traced.write(_Seen(function, scores[2:], band, count))
    ports = tuple(f"{PORT}_{i}" for i in range(len(read)))
    spec = spec.canonical()
    inner = before_causal_mask(spec)
    first = inner is not None and _takes_infinity(ScoreMod(inner, (), hides))
    return ScoreMod(spec, ports, hides, first), read, traced


# Operations whose results are finite for finite operands, but for numbers beyond float32's range.
_FINITE = {
    *("add", "sub", "mul", "neg", "abs", "min", "max", "floor", "ceil", "sqrt", "identity"),
    *("tanh", "sigmoid", "erf", "sin", "cos", "gen_index"),
}


def _is_finite(spec: GraphSpec) -> bool:
    """Whether a function certainly leaves finite scores finite, so that it hides no key."""
    score, *others = spec.inputs
    finite = {t.name for t in spec.constants if math.isfinite(t.value or 0)}
    finite |= {score, *(name for name in others if spec.tensor(name).dtype not in FLOATS)}
    for call in spec.calls:
        method, operands = call.node.method, [n for p, n in call.inputs if p != "mask"]
        known = method in _FINITE or method == "binary_select"
        if method == "div":
            known = bool(spec.tensor(operands[1]).value)
        if method.startswith("cmp_") or (known and finite >= {*operands}):
            finite |= {name for _, name in call.outputs}
    return finite >= {*spec.outputs}


def _takes_infinity(mod: ScoreMod) -> bool:
    """Whether a function of the score gives of -inf neither NaN nor infinity, and has a finite
    derivative there."""
    with jax.ensure_compile_time_eval():
        hidden = jnp.full((1, 1, 1, 1), -jnp.inf, jnp.float32)
        value, slope = jax.jvp(lambda x: mod(x, 0, {}), (hidden,), (jnp.ones_like(hidden),))
        return bool(jnp.all(value < jnp.inf) & jnp.all(jnp.isfinite(slope)))


@dataclass(frozen=True)
class _Seen:
    """A function of the scores, and -inf outside of a band and of the lengths, which are the
    operands behind the first ``count``."""

    function: Callable[..., Any]
    sizes: tuple[int, ...]
    band: Band
    count: int

    @property
    def __code__(self) -> Any:  # errors name the user's function
        return getattr(self.function, "__code__", None)

    def __call__(self, score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
        lengths = operands[self.count :]
        left, right, bottom_right = self.band.left, self.band.right, self.band.bottom_right
        seen = [position < n for position, n in zip((q, kv), lengths, strict=False)]
        if lengths and bottom_right and right == 0:
            del seen[1]  # the last query sees the last key, and none behind it
        queries, keys = lengths if lengths else self.sizes
        at, position = q, kv
        if bottom_right and lengths:  # cuDNN broadcasts a length beside an index, and no other
            at, position = q + keys, kv + queries
        elif bottom_right and keys != queries:
            at = q + (keys - queries)
        if right is not None:
            seen.append(position <= (at + right if right else at))
        if left is not None:
            seen.append(position + left > at)
        changed = self.function(score, b, h, q, kv, *operands[: self.count])
        for one in seen[1:]:
            seen[0] = seen[0] & one
        return jnp.where(seen[0], changed, -jnp.inf) if seen else changed


def _hides(band: Band, queries: int, keys: int) -> bool:
    """Whether some query sees no key, where there are so many."""
    shift = keys - queries if band.bottom_right else 0
    before = band.right is not None and shift + band.right < 0
    return before or (band.left is not None and queries + shift - band.left > keys - 1)


@dataclass(frozen=True)
class _Truths:
    """A function of the scores with booleans among its operands, which graphs hold as 1 and 0."""

    function: Callable[..., Any]
    places: tuple[int, ...]

    @property
    def hides_queries(self) -> bool | None:
        return getattr(self.function, "hides_queries", None)

    @property
    def __code__(self) -> Any:  # errors name the user's function
        return getattr(self.function, "__code__", None)

    def __call__(self, *arguments: Any) -> Any:
        given, operands = arguments[:5], arguments[5:]
        return self.function(
            *given, *(x != 0 if i in self.places else x for i, x in enumerate(operands))
        )


class Traced(GraphBuilder):
    """Writes down one function; ``arrays`` are those that it closes over, as further operands."""

    def __init__(
        self, scores: Shape, operands: Sequence[tuple[Shape, str]], numbers: bool = True
    ) -> None:
        super().__init__()
        self.scores, self.numbers = scores, numbers
        self.score = self.input("score", scores, "float32")
        self.operands = [self._operand(shape, dtype) for shape, dtype in operands]
        self.arrays: list[Any] = []
        self.closes_over = False

    def _operand(self, shape: Shape, dtype: str) -> GraphTensor:
        name = f"operand{len(self._inputs) - 1}"
        return self.input(name, ones_in_front(shape), "float32" if is_floating(dtype) else dtype)

    def write(self, function: Callable[..., Any]) -> tuple[GraphSpec, tuple[int, ...]]:
        """The graph, and which of the operands, followed by ``arrays``, are its own behind the
        scores, which it always has."""
        shaped = jax.ShapeDtypeStruct
        given = [shaped(self.scores, "float32")]
        for axis, size in enumerate(self.scores):
            given.append(shaped(tuple(size if i == axis else 1 for i in range(4)), "int32"))
        given += [shaped(x.shape, x.dtype) for x in self.operands]
        # JAX remembers what it has traced of a function, with the arrays that it closed over.
        closed = jax.make_jaxpr(lambda *arguments: function(*arguments), return_shape=True)
        jaxpr, result = closed(*given)
        self._check(function, result)
        indices = [functools.partial(self._index, axis) for axis in range(4)]
        values = [self.score, *indices, *self.operands]
        (out,) = self._run(jaxpr.jaxpr, jaxpr.consts, values)
        out = self._full(out)
        if out.name in self._inputs:
            out = self.made("identity", out)
        spec = self.finish([out])
        ours = [x.name for x in self.operands]
        return spec, tuple(ours.index(name) for name in spec.inputs if name != self.score.name)

    def _check(self, function: Callable[..., Any], result: Any) -> None:
        where = defined_at(function)
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise GraphTypeError(
                "score_mod returned something that is no array",
                expected="the changed score",
                got=repr(result)[:200],
                where=where,
            )
        if tuple(result.shape) != self.scores:
            raise GraphError(
                "score_mod changes the shape of the score",
                expected=str(list(self.scores)),
                got=str(list(result.shape)),
                why="it is given all scores, (B, N, T, S), and indices that broadcast with them",
                where=where,
            )
        if str(result.dtype) not in ("float32", "float64"):
            raise GraphTypeError(
                "score_mod returned no floats of 32 bits",
                expected="float32, which the score is",
                got=str(result.dtype),
                why="a mask is put into the score: jnp.where(seen, score, -jnp.inf)",
                where=where,
            )

    def _closed_over(self, value: Any) -> Any:
        """A number or an array that is known now, else a further operand."""
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
                raise GraphError(f"it uses {name}", expected=TAKEN)
            return [write(self, eqn, *operands)]
        except JaxCudnnError as error:
            error.summary = f"score_mod: {error.summary}"
            error.why = error.why or (
                "cuDNN computes it on tiles of the scores, which no operation can look beyond"
            )
            error.fix = error.fix or (
                "compute it before the call, and give it as an array of score_mod_operands"
            )
            error.where = _line(eqn) or error.where
            raise

    # -- values ----------------------------------------------------------------------------------

    def made(self, method: str, *operands: Any) -> GraphTensor:
        """An operation's result: numbers are float32, and so are truths, 1 and 0."""
        first, *others = operands
        if len(operands) > 1 and not any(self._is_full(x) for x in operands):
            at = next(i for i, x in enumerate(operands) if isinstance(x, GraphTensor))
            operands = (*operands[:at], self._full(operands[at]), *operands[at + 1 :])
        elif not others:
            operands = (self._full(first),)
        made = self._apply(method, *(self._plain(x) for x in operands))
        return made.set_data_type("float32")

    def _is_full(self, x: Any) -> bool:
        return isinstance(x, GraphTensor) and x.shape == self.scores

    def _plain(self, x: Any) -> Any:
        if isinstance(x, GraphTensor):
            return x
        if np.ndim(x) == 0 or np.size(x) == 1:
            return float(np.asarray(x).reshape(()))
        return self._array(np.asarray(x))

    def _array(self, x: np.ndarray) -> GraphTensor:
        """An array that the function has made, as an operand."""
        whole = np.issubdtype(x.dtype, np.integer)
        return self._further(x.astype("int32" if whole else "float32"))

    def _full(self, x: Any) -> GraphTensor:
        """A value at every score: cuDNN computes nothing smaller, to be broadcast later."""
        if self._is_full(x):
            return x
        nothing = self.mul(self._index(3), 0.0).set_data_type("float32")
        return self.add(nothing, self._plain(x)).set_data_type("float32")


def _check_parameters(function: Callable[..., Any], operands: int) -> None:
    """GraphTypeError where a function takes another number of arguments."""
    try:
        inspect.signature(function).bind(*range(5 + operands))
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        raise GraphTypeError(
            f"score_mod takes other arguments: {error}",
            expected="f(score, b, h, q, kv, *score_mod_operands)",
            got=f"{operands} operands",
            where=defined_at(function),
        ) from None


def ones_in_front(shape: Shape) -> Shape:
    """With rank 4, as jnp broadcasts."""
    if len(shape) > 4:
        raise GraphError(
            "score_mod has an operand of too high a rank",
            expected="what broadcasts to the scores, (B, N, T, S)",
            got=f"shape {list(shape)}",
        )
    return (*(1,) * (4 - len(shape)), *shape)


def _inner(eqn: Any) -> Any:
    """The jaxpr of a function that is called (jit, custom derivatives), or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    return None


def _is_graph(operands: Sequence[Any]) -> bool:
    return any(isinstance(x, GraphTensor) for x in operands)


def _line(eqn: Any) -> str:
    """Where the user wrote an operation."""
    for file, line, function in user_frames(eqn):
        return f"{file}:{line}, in {function}"
    return ""


def _stretched(x: Any, eqn: Any) -> Any:
    """What is broadcast stays as small as it is, with rank 4."""
    if isinstance(x, GraphTensor):
        axes = eqn.params["broadcast_dimensions"]
        if axes != tuple(range(4 - len(axes), 4)):
            raise GraphError("score_mod: it moves the dimensions of an operand")
        return x
    x = np.asarray(x)
    shape = [1] * len(eqn.params["shape"])
    for size, axis in zip(x.shape, eqn.params["broadcast_dimensions"], strict=True):
        shape[axis] = size
    return x.reshape(shape) if x.ndim else x


def _folded(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """An operation on what is known while tracing."""
    arrays = [np.asarray(x) for x in operands]
    if eqn.primitive.name in PRIMITIVES:  # small arrays stay so
        arrays = np.broadcast_arrays(*arrays)
    else:
        arrays = [np.broadcast_to(x, v.aval.shape) for x, v in zip(arrays, eqn.invars, strict=True)]
    if not all(isinstance(v.aval.dtype, np.dtype) for v in eqn.outvars):  # keys of random numbers
        raise GraphError(f"score_mod: it uses {eqn.primitive.name}", expected=TAKEN)
    with jax.ensure_compile_time_eval():
        given = [jnp.asarray(x, y.aval.dtype) for x, y in zip(arrays, eqn.invars, strict=True)]
        made = eqn.primitive.bind(*given, **eqn.params)
    results = made if eqn.primitive.multiple_results else [made]
    return [np.asarray(x) for x in results]
