"""The reference of a graph and of its derivatives, and how far apart two right results may be.

Two computations of one graph round alike, but add in other orders, and cut float32 products to
TF32. Where the graph then compares, rounds to integers or takes a maximum, a difference in the
last place becomes one of order 1, for some elements. So the reference is run again and again with
every inexact value moved, at random, by more than another computation would differ there: what
these runs differ by is the tolerance.

Each operation is differentiated in float32, at the values that the graph gives it: rounding has the
derivative of the identity, also where it saturates. What moves beside the values: tangents and
cotangents, which a derived graph rounds wherever the graph has 16 bits; and the values at which it
differentiates, because it may keep those in 16 bits.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad
from transformations import in_float32

from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import part

from .comparison import Noise, root_mean_square
from .drawing import attends
from .interpreter import interpreted

# Relative moves: of results that functions like exp give on a GPU, of the terms of a sum, and of
# the operands of products that may be cut to TF32 or keep few bits between the steps.
RESULT, TERM, CUT = 2.0**-16, 2.0**-18, 2.0**-10
_LOST = 0.1  # of a row's spread, or of a weight, at most

Named = dict[str, np.ndarray]


@dataclass(frozen=True)
class Move:
    """Each float times a random number between ``1 - amount`` and ``1 + amount``; ``together``, all
    of them times another one, too. Those that are not 0 move by at most ``least`` besides, and by
    ``spread`` of the root mean square."""

    amount: float
    together: bool = False
    least: float = 0.0
    spread: float = 0.0

    def __call__(self, noise: Noise, x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        moves = noise.rng.uniform(1 - self.amount, 1 + self.amount, x.shape).astype(np.float32)
        if self.together:
            moves *= np.float32(noise.rng.choice((1 - self.amount, 1 + self.amount)))
        product, largest = x.astype(np.float32) * moves, float(jnp.finfo(x.dtype).max)
        if least := self.least + self.spread * root_mean_square(x):
            product += np.where(x == 0, 0, noise.rng.uniform(-least, least, x.shape))
        tame = np.clip(product, -largest, largest)
        return np.where(np.isfinite(product), tame, product).astype(x.dtype)


@dataclass(frozen=True)
class ResultMove:
    """Moves what another computation may round otherwise: not a whole number, nor one that is, but
    for its sign, one of the operands; and then as far as rounding to ``narrow`` could."""

    narrow: str

    def __call__(self, noise: Noise, x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        info = jnp.finfo(x.dtype)
        values = np.abs(x.astype(np.float32))
        exact = values == np.round(values)
        for operand in operands:
            exact |= values == np.abs(np.asarray(operand, np.float32))
        move = Move(max(RESULT, float(info.eps)), least=float(info.smallest_subnormal))
        x = np.where(exact, x, move(noise, x))
        if not self.narrow or x.dtype != np.float32:
            return x
        info, rounded = jnp.finfo(self.narrow), x.astype(jnp.dtype(self.narrow)).astype(np.float32)
        move = Move(float(info.eps), least=float(info.smallest_subnormal))
        near = rounded if noise.on_grid else move(noise, x)
        return np.where((rounded == x) | ~np.isfinite(rounded), x, near)


_disturb_p = Primitive("disturb")  # of x and operands: x, moved by the interpreter if it has noise
_disturb_p.def_abstract_eval(lambda x, *operands, move: x)


def _disturb(x: Any, move: Any, *operands: Any) -> Any:
    """Moves x, and its tangents and cotangents alike."""
    still = move is None or type(x) is ad.Zero or not is_floating(str(x.dtype))
    return x if still else _disturb_p.bind(x, *operands, move=move)


ad.primitive_jvps[_disturb_p] = lambda xs, tangents, move: (
    _disturb(xs[0], move, *xs[1:]),
    _disturb(tangents[0], move),
)
ad.primitive_transposes[_disturb_p] = lambda cotangent, x, move: [_disturb(cotangent, move)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _along(x: Any, moves: Sequence[Move | None]) -> Any:
    """Moves only the tangents and cotangents of x."""
    return x


@_along.defjvp
def _(moves: Any, primals: Any, tangents: Any) -> Any:
    return primals[0], functools.reduce(_disturb, moves, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(names: Sequence[str], slopes: Any, values: Any) -> Any:
    """Values that have the derivatives of ``slopes``. Of attention, whose O and statistic are
    named, rounding O moves each row's product of it and its cotangent, which the backward
    subtracts: it reaches as much as the statistic's cotangent."""
    return values


@_results.defjvp
def _(names: Any, primals: Any, tangents: Any) -> Any:
    values, found = primals[1], dict(tangents[0])
    if len(names) == 2:
        o, amount = values[names[0]], 2 * float(jnp.finfo("bfloat16").eps)
        found[names[0]] += (_disturb(o, Move(amount)) - o) * found[names[1]]
    return values, found


class Reference:
    """A graph's tensors for operands, with tangents and gradients by all of its floats."""

    def __init__(self, spec: GraphSpec, operands: Sequence[Any]):
        self.spec, self._operands = spec, [np.asarray(x) for x in operands]
        self._programs = _programs(spec)
        self.exact = self.values()

    def values(self, noise: Noise | None = None) -> Named:
        return self._programs[0](self._operands, noise=noise)

    def tangents(self, given: Named, noise: Noise | None = None) -> Named:
        """Tangents of all floats, for those of some operands."""
        return self._programs[1](self._operands, _wide(given), noise=noise)

    def gradients(self, given: Named, noise: Noise | None = None) -> Named:
        """Cotangents of all floats, for those of some results."""
        return self._programs[2](self._operands, _wide(given), noise=noise)

    @property
    def comparable(self) -> bool:
        """Whether derivatives are worth comparing: all values are finite, also their squares where
        float16 keeps what is between the steps (a statistic that attention alone reads may be
        -inf); no normalization is of rows whose spread is lost beside their mean, once that or they
        are rounded; and no weight of attention is lost, once queries and keys are."""
        spec = self.spec
        read = {name for call in spec.calls for port, name in call.inputs if port != "stats"}
        narrow = spec.options.intermediate_data_type == "float16"
        largest = math.sqrt(float(jnp.finfo("float16").max)) if narrow else math.inf
        tensors = _floats(spec, {*read, *spec.outputs} & self.exact.keys())
        finite = (np.abs(self.exact[name].astype(np.float32)) < largest for name in tensors)
        return all(x.all() for x in finite) and all(map(self._keeps_spread, spec.calls))

    def _keeps_spread(self, call: Any) -> bool:
        node, exact = call.node, self.exact
        ports = {port: exact[name] for port, name in call.inputs if name in exact}
        if attends(node) and "float32" in (ports["q"].dtype, ports["k"].dtype):
            q, k = (ports[port].astype(np.float32) for port in "qk")
            k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
            scores = node.attn_scale * (q @ np.swapaxes(k, 2, 3))
            return bool(np.max(np.abs(scores)) * grain(self.spec) < 2 * _LOST)
        centred = "epsilon" in dict(call.inputs) and getattr(node, "extent", None)
        if not (centred and centred.centred):
            return True
        x = ports["input"].astype(np.float64)
        axes = centred.reduced(x.shape, ports["scale"].shape)
        lost = (grain(self.spec) or RESULT) * np.abs(x.mean(axes)) > _LOST * x.std(axes)
        return math.prod(x.shape[axis] for axis in axes) == 1 or not lost.any()


@functools.lru_cache(maxsize=64)
def _programs(spec: GraphSpec) -> tuple[Callable[..., Named], ...]:
    floats = _floats(spec, [tensor.name for tensor in spec.tensors])
    zeros = {name: np.zeros(spec.tensor(name).shape, np.float32) for name in floats}

    def of(operands: Any, names: Any, some: Any) -> Any:
        found = _values(spec, operands, zeros | some)
        return {name: found[name] for name in names or _floats(spec, found)}

    def tangents(operands: Any, given: Any) -> Any:
        at = {name: zeros[name] for name in given}
        return jax.jvp(functools.partial(of, operands, None), (at,), (given,))[1]

    def gradients(operands: Any, given: Any) -> Any:
        return jax.vjp(functools.partial(of, operands, given), zeros)[1](given)[0]

    values = functools.partial(_values, spec, more=None)
    return interpreted(values), interpreted(tangents), interpreted(gradients)


def _values(spec: GraphSpec, operands: Sequence[Any], more: Any) -> dict[str, Any]:
    """All tensors of the graph by name. To differentiate, floats are float32, and ``more`` is added
    to each."""
    values = dict(zip(spec.inputs, operands, strict=True))
    if more is not None:
        for name in _floats(spec, values):
            values[name] = values[name].astype(jnp.float32) + more[name]
    narrow = narrowest(spec) if more is not None else ""
    for position, call in enumerate(spec.calls):
        names = tuple(name for _, name in call.outputs)
        one = replace(part(spec, (position,)), outputs=names, _cache={})
        given = {name: values[name] for name in one.inputs}
        actual = {n: jax.lax.stop_gradient(x).astype(one.tensor(n).dtype) for n, x in given.items()}
        found = evaluate(one, *(_disturb(x, _term_move(one, n)) for n, x in actual.items()))
        found = dict(zip(names, found, strict=True))
        if not call.node.moves:
            beside = actual.values() if _each_element(one) else ()
            found = {n: _disturb(x, ResultMove(narrow), *beside) for n, x in found.items()}
        if more is not None:
            kept, through = _derivative_moves(spec, one)
            at = [
                _along(_disturb(x, through), (kept, _fp8_move(one.tensor(n).dtype)))
                for n, x in given.items()
            ]
            slopes = dict(zip(names, evaluate(in_float32(one), *at), strict=True))
            floats = _floats(one, names)
            slopes = {name: _along(slopes[name], (kept, through)) for name in floats}
            exact = {name: found[name].astype(jnp.float32) for name in floats}
            both = [n for p, n in call.outputs if p in ("O", "Stats") and attends(call.node)]
            exact = _results(tuple(both), slopes, exact)
            found |= {name: x + more[name] for name, x in exact.items()}
        values |= found
    return values


def _term_move(one: GraphSpec, name: str) -> Move | None:
    """Of an operand that is added up, as a product or another term: each element by itself, and all
    together, as bits that are cut off make all of them smaller."""
    node = one.calls[0].node
    if node.moves or _each_element(one):
        return None
    amount = CUT if node.product and _products_are_cut(one) else TERM
    if attends(node) and name in _multiplied(one):  # what they are multiplied by is rounded
        halves = [one.tensor(n).dtype for n in _multiplied(one)]
        amount += max(0.0 if d == "float32" else float(jnp.finfo(d).eps) / 2 for d in halves)
    return Move(amount, together=True)


def _multiplied(one: GraphSpec) -> list[str]:
    every, ports = not attends(one.calls[0].node), ("q", "k", "v", "dO")
    return [name for port, name in one.calls[0].inputs if every or port in ports]


def _products_are_cut(one: GraphSpec) -> bool:
    """Whether a GPU may cut an operand of a product to fewer bits, or keep fewer of its sums."""
    coarse = FP8 if one.options.precision in ("high", "highest") else ("float32", *FP8)
    return any(one.tensor(name).dtype in coarse for name in _multiplied(one))


def _each_element(one: GraphSpec) -> bool:
    """Whether each element of the result depends on those at its place alone."""
    shapes = [t.shape for t in one.input_tensors]
    broadcast = one.calls[0].node.ports.is_elementwise and np.broadcast_shapes(*shapes)
    return one.tensor(one.outputs[0]).shape == broadcast


def _derivative_moves(spec: GraphSpec, one: GraphSpec) -> tuple[Move | None, Move | None]:
    """Of tangents and cotangents that an operation gives, which may be computed from its result, as
    that was rounded; and of what enters its derivative."""
    node, coarse = one.calls[0].node, grain(spec)
    units = [float(jnp.finfo(one.tensor(name).dtype).eps) for name in _floats(one, one.outputs)]
    least = float(jnp.finfo("float16").smallest_subnormal) * (narrowest(spec) == "float16")
    inside = spec.options.intermediate_data_type != "float32"

    def move(amount: float, together: bool = False) -> Move:
        return Move(amount, together, least, amount * inside)

    same = len({one.tensor(name).dtype for name in (*one.inputs, *one.outputs)}) == 1
    kept = None if node.moves and same else move(max(coarse, RESULT, *units))
    if node.moves or node.ports.is_elementwise:
        return kept, None
    cut = max(coarse, CUT if _products_are_cut(one) else TERM)
    return kept, move(cut if node.product else TERM, together=True)


def _fp8_move(dtype: str) -> Move | None:
    """Gradients of float8 are rounded before they are added up."""
    return Move(float(jnp.finfo(dtype).eps) / 2) if dtype in FP8 else None


def narrowest(spec: GraphSpec) -> str:
    """The coarsest float of 16 bits that a derivative of a graph may round to: float8 is multiplied
    as bfloat16. Graphs of float32 alone have none."""
    found = {spec.options.intermediate_data_type, *(tensor.dtype for tensor in spec.tensors)}
    if found & {"bfloat16", *FP8}:
        return "bfloat16"
    return "float16" if "float16" in found else ""


def grain(spec: GraphSpec) -> float:
    """How far that rounds, of a value; 0 for graphs of float32."""
    return float(jnp.finfo(narrowest(spec)).eps) if narrowest(spec) else 0.0


def _wide(arrays: Named) -> Named:
    return {name: np.asarray(x).astype(np.float32) for name, x in arrays.items()}


def _floats(spec: GraphSpec, names: Iterable[str]) -> list[str]:
    return [name for name in names if is_floating(spec.tensor(name).dtype)]
