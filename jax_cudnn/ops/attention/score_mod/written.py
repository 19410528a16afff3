"""Combine a score_mod with band and lengths into one value, cached while the function lives."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...._core.errors import GraphError, GraphTypeError
from ...._core.graph.dims import Shape
from ...._core.graph.dtypes import FLOATS, wide_dtype
from ...._core.graph.source import defined_at
from ...._core.graph.spec import GraphSpec
from ...._core.graph.tensor import GraphTensor
from ..reference import Band
from .emission import before_causal_mask
from .trace import Traced
from .value import PORT, ScoreMod, check_function, is_number, listed

_ALL = Band()
_MANY = 256  # cached shapes per function

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
    kind: str = "float32",
) -> tuple[ScoreMod, list[Any]]:
    """A user's function followed by the band and the lengths, as one value, and the operands that
    it reads, given or captured. It gets operands at ``truths``, which are 1 and 0, as booleans.

    Equal functions and shapes are traced once, while such a function lives; functions that capture
    arrays are traced at each call, as these may change. With ``numbers``, known arrays of one
    element become constants of the graph, otherwise operands.
    """
    everything = [*operands, *lengths]
    avals = tuple(
        (tuple(x.shape), "bool" if i in truths else str(x.dtype)) for i, x in enumerate(everything)
    )
    known, key = _known_of(function), (scores, avals, len(lengths), band, kind)
    found = known.get(key)
    if found is None:
        _check_parameters(function, len(operands))
        mod, read, traced = _written(function, avals, scores, band, len(operands), numbers, kind)
        found = mod, read
        everything += traced.arrays
        if len(known) >= _MANY:
            known.clear()
        if not (traced.closes_over or traced.arrays):
            known[key] = found
    mod, read = found
    return mod, [everything[i] for i in read]


def _known_of(function: Any) -> _Known:
    """The cache of a function; empty if it is not hashable or cannot be weakly referenced."""
    try:
        return _known.setdefault(function, {})
    except TypeError:
        return {}


def _check_parameters(function: Callable[..., Any], operands: int) -> None:
    """GraphTypeError if a function takes a different number of arguments."""
    try:
        inspect.signature(function).bind(*range(5 + operands))
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        raise GraphTypeError(
            f"score_mod does not accept its arguments: {error}",
            expected="f(score, b, h, q, kv, *score_mod_operands)",
            got=f"{operands} score_mod_operands",
            where=defined_at(function),
        ) from None


def _written(
    function: Callable[..., Any],
    avals: Sequence[tuple[Shape, str]],
    scores: Shape,
    band: Band,
    count: int,
    numbers: bool,
    kind: str,
) -> tuple[ScoreMod, tuple[int, ...], Traced]:
    """The function of ``count`` operands, followed by the lengths, and the indices of the operands,
    followed by captured arrays, that it reads."""
    lengths = len(avals) > count
    traced = Traced(scores, avals[:count], numbers, kind)
    spec, read = traced.write(function)
    hides = getattr(function, "hides_queries", None)
    if hides is None:
        hides = not _is_finite(spec)
    if lengths or band != Band(bottom_right=band.bottom_right):
        hides = hides or lengths or _hides(band, *scores[2:])
        traced = Traced(scores, avals, numbers, kind)
        spec, read = traced.write(_Seen(function, scores[2:], band, count))
    ports = tuple(f"{PORT}_{i}" for i in range(len(read)))
    spec = spec.canonical()
    inner = before_causal_mask(spec)
    first = inner is not None and is_number(ScoreMod(inner, (), hides), (1, 1, 1, 1), 0)
    return ScoreMod(spec, ports, hides, first), read, traced


# Operations whose results are finite for finite operands, apart from float32 overflow.
_FINITE = {
    *("add", "sub", "mul", "neg", "abs", "min", "max", "floor", "ceil", "sqrt", "identity"),
    *("tanh", "sigmoid", "erf", "sin", "cos", "gen_index"),
}


def _is_finite(spec: GraphSpec) -> bool:
    """Whether a function provably maps finite scores to finite ones, so that it hides no key."""
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


@dataclass(frozen=True)
class _Seen:
    """A score_mod followed by -inf outside of a band and of the lengths, which are the operands
    after the first ``count``."""

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
            del seen[1]  # the last query sees the last key, and none after it
        queries, keys = lengths if lengths else self.sizes
        at, position = q, kv
        if bottom_right and lengths:  # cuDNN broadcasts a length only with an index
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
    """Whether the band hides all keys of some query, for these numbers of queries and keys."""
    shift = keys - queries if band.bottom_right else 0
    before = band.right is not None and shift + band.right < 0
    return before or (band.left is not None and queries + shift - band.left > keys - 1)


def prepared(given: dict[str, Any], band: Callable[[dict[str, Any]], Band]) -> dict[str, Any]:
    """The arguments of ``g.sdpa`` with score_mod as a value that includes band and lengths, except
    with a sink."""
    function = given.get("score_mod")
    operands = listed(given.pop(PORT, None))
    if function is None:
        if operands:
            raise GraphError(f"{PORT} without score_mod", fix="pass score_mod, or omit them")
        return given
    if isinstance(function, ScoreMod):
        return {**given, PORT: operands} if operands else given
    check_function(function)
    q, k = (np.shape(given[name]) for name in ("q", "k"))
    if len(q) != 4 or len(k) != 4:
        raise GraphError("score_mod requires q and k of rank 4", got=f"{list(q)} and {list(k)}")
    query = given["q"] if isinstance(given["q"], GraphTensor) else jnp.asarray(given["q"])
    scores, kind = (*q[:3], k[2]), wide_dtype(query).name
    operands = [_checked(i, x, scores) for i, x in enumerate(operands)]
    limits: tuple[Band, list[Any]] = _ALL, []
    if not (given.get("use_alibi_mask") or "sink_token" in given):  # these run in XLA, with both
        lengths = [given.pop(name, None) for name in ("seq_len_q", "seq_len_kv")]
        limits = band(given), [x for x in lengths if x is not None]
        given = {name: value for name, value in given.items() if not name.startswith("diagonal_")}
    if len(limits[1]) == 1:
        raise GraphError(
            "one of the lengths is missing", expected="both seq_len_q and seq_len_kv, or neither"
        )
    mod, read = written(function, operands, scores, *limits, numbers=False, kind=kind)
    return {**given, "score_mod": mod, **({PORT: read} if read else {})}


def _checked(i: int, x: Any, scores: Shape) -> Any:
    if not isinstance(x, GraphTensor):
        x = jnp.asarray(x)
    if str(x.dtype) not in (*FLOATS, "int32"):
        raise GraphTypeError(
            f"{PORT}[{i}] has a dtype that score_mod does not support",
            expected=", ".join((*FLOATS, "int32")),
            got=f"{x.dtype}{list(x.shape)}",
            fix="cast it before the call; cast booleans to float32, and compare them with 0",
        )
    if len(x.shape) != 4 or any(a not in (1, b) for a, b in zip(x.shape, scores, strict=True)):
        raise GraphError(
            f"{PORT}[{i}] does not fit the scores",
            expected=f"{list(scores)}, or 1 in any dimension",
            got=str(list(x.shape)),
        )
    return x
