"""A function of attention's scores as a value: what it means in jnp, and how it is batched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FLOATS
from .._core.graph.reference import applied, rounded
from .._core.graph.spec import GraphSpec, intern
from .._core.graph.tensor import GraphTensor
from .attention_reference import OPERANDS, Band
from .folds import grown
from .logical import GenIndex

if TYPE_CHECKING:
    from .._core.graph.node import Tensors

PORT = OPERANDS
"""The list of a node's operands that its function of the scores reads."""

Function = Callable[..., Any]


def is_operand(port: str) -> bool:
    return port.startswith(PORT)


@dataclass(frozen=True, repr=False)
class ScoreMod:
    """The graph of a function of the scores.

    ``spec`` has the scores as its first operand, (B, H, Sq, Skv), behind them those at the node's
    ``ports``, and one result. All that it computes has the scores' shape. Numbers are float32 in
    it, and so are truths, 1 and 0. ``hides``: some query may see no key by it.
    """

    spec: GraphSpec
    ports: tuple[str, ...]
    hides: bool

    @property
    def named(self) -> dict[str, str]:
        """The node's port for each operand behind the scores, by its name in the graph."""
        return dict(zip(self.spec.inputs[1:], self.ports, strict=True))

    def __repr__(self) -> str:  # by which specs are told apart
        return f"ScoreMod({self.ports}, {self.hides}, {str(self.spec)!r})"

    def __str__(self) -> str:
        return f"<{' '.join(call.node.method for call in self.spec.calls)}>"

    def __call__(
        self, score: jax.Array, first: Any, operands: Mapping[str, jax.Array]
    ) -> jax.Array:
        """The changed scores, of float32 scores (B, H, S, T) whose first query is ``first``."""
        values: dict[str, Any] = {t.name: np.float32(t.value or 0) for t in self.spec.constants}
        values[self.spec.inputs[0]] = score
        for name, port in self.named.items():
            values[name] = operands[port].astype(self.spec.tensor(name).dtype)
        for call in self.spec.calls:
            ((_, name),) = call.outputs
            if isinstance(call.node, GenIndex):
                result = jax.lax.broadcasted_iota(jnp.int32, score.shape, call.node.axis)
                result = result + first if call.node.axis == 2 else result
            else:
                inputs = {port: jnp.asarray(values[n]) for port, n in call.inputs}
                (result,) = applied(call.node, inputs)
            values[name] = rounded(result, self.spec.tensor(name).dtype)
        return jnp.broadcast_to(values[self.spec.outputs[0]], score.shape)

    @property
    def counts_examples(self) -> bool:
        """Whether it reads the index of the example."""
        return any(isinstance(c.node, GenIndex) and c.node.axis == 0 for c in self.spec.calls)

    def folded(self, size: int, mapped: Iterable[str]) -> ScoreMod:
        """For ``size`` times as many examples, of which the operands ``mapped`` have as many."""
        named, mapped = self.named, {*mapped}
        tensors = tuple(
            t
            if t.value is not None or named.get(t.name, PORT) not in {PORT, *mapped}
            else dataclasses.replace(t, shape=grown(t.shape, 0, size))
            for t in self.spec.tensors
        )
        spec = intern(dataclasses.replace(self.spec, tensors=tensors, _cache={}))
        return dataclasses.replace(self, spec=spec)


def folds(
    mod: ScoreMod, batched: frozenset[str], tensors: Tensors, fixed: Iterable[str] = ()
) -> Iterable[dict[str, int]]:
    """Further examples: what is shared by all examples stays so, unless it is batched or one of
    those ``fixed``."""
    examples = tensors["q"].shape[0]
    shared = {
        port
        for port, tensor in tensors.items()
        if (port == "bias" or is_operand(port))
        and tensor.shape[0] == 1
        and (examples > 1 or port not in batched)
        and port not in fixed
    }
    whole = {port for port in tensors if port not in shared}
    if not (shared & batched or mod.counts_examples):
        yield dict.fromkeys(whole, 0)


def written(
    function: Function, operands: list[Any], scores: Shape, band: Band, lengths: list[Any]
) -> tuple[ScoreMod, list[Any]]:
    """A user's function, and then the band and the lengths, as one; with the operands that it
    reads, of those given and those closed over."""
    from .score_mod_trace import Traced  # importing jax_cudnn does without

    def trace(function: Function, operands: list[Any]) -> tuple[GraphSpec, list[Any]]:
        traced = Traced(scores, [(tuple(x.shape), str(x.dtype)) for x in operands])
        spec, read = traced.write(function)
        everything = [*operands, *traced.arrays]
        return spec, [everything[i] for i in read]

    spec, read = trace(function, operands)
    hides = getattr(function, "hides_queries", None)
    if hides is None:
        floats = [x for x in read if str(x.dtype) in FLOATS]
        hides = bool(floats) or any(math.isinf(t.value or 0) for t in spec.constants)
    if lengths or band != Band(bottom_right=band.bottom_right):
        hides = hides or bool(lengths) or _hides(band, *scores[2:])
        whole = [*operands, *lengths]
        spec, read = trace(_Seen(function, scores[2:], band, len(operands)), whole)
    ports = tuple(f"{PORT}_{i}" for i in range(len(read)))
    return ScoreMod(spec.canonical(), ports, hides), read


@dataclass(frozen=True)
class _Seen:
    """A function of the scores, and -inf outside of a band and of the lengths, which are the
    operands behind the first ``count``."""

    function: Function
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


def prepared(given: dict[str, Any], band: Callable[[dict[str, Any]], Band]) -> dict[str, Any]:
    """The arguments of ``g.sdpa`` with the function as a value, into which band and lengths have
    gone."""
    function = given.get("score_mod")
    operands = given.pop(PORT, None)
    if function is None:
        if operands:
            raise GraphError(f"{PORT} without a score_mod", fix="give the function that reads them")
        return given
    if isinstance(function, ScoreMod):
        return {**given, PORT: operands} if operands else given
    if not callable(function):
        raise GraphTypeError(
            "score_mod is no function",
            expected="f(score, b, h, q, kv, *score_mod_operands)",
            got=f"{type(function).__name__}: {function!r}"[:200],
        )
    q, k = (
        np.shape(given[name]) if not hasattr(given[name], "shape") else given[name].shape
        for name in ("q", "k")
    )
    if len(q) != 4 or len(k) != 4:
        raise GraphError("score_mod needs q and k of rank 4", got=f"{list(q)} and {list(k)}")
    scores = (*q[:3], k[2])
    operands = [_checked(i, x, scores) for i, x in enumerate(operands or ())]
    lengths = [given.pop(name, None) for name in ("seq_len_q", "seq_len_kv")]
    lengths = [x for x in lengths if x is not None]
    if len(lengths) == 1:
        raise GraphError("one of the lengths is missing", expected="both, or neither")
    mod, read = written(function, operands, scores, band(given), lengths)
    left = {name: value for name, value in given.items() if not name.startswith("diagonal_")}
    return {**left, "score_mod": mod, **({PORT: read} if read else {})}


def _checked(i: int, x: Any, scores: Shape) -> Any:
    if not isinstance(x, GraphTensor):
        x = jnp.asarray(x)
    if str(x.dtype) not in (*FLOATS, "int32"):
        raise GraphTypeError(
            f"{PORT}[{i}] has a dtype that score_mod does not take",
            expected=", ".join((*FLOATS, "int32")),
            got=f"{x.dtype}{list(x.shape)}",
            fix="cast it before the call; of booleans to float32, and compare with 0",
        )
    if len(x.shape) != 4 or any(a not in (1, b) for a, b in zip(x.shape, scores, strict=True)):
        raise GraphError(
            f"{PORT}[{i}] does not fit the scores",
            expected=f"{list(scores)}, or 1 in any of these",
            got=str(list(x.shape)),
        )
    return x
