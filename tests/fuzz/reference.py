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

from __future__ import annotations

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

from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import part

from .drawing import attends
from .interpreter import interpreted

_RUNS, _MORE_RUNS, _EDGES = 6, 48, 500
# Relative moves: of results that functions like exp give on a GPU, of the terms of a sum, and of
# the operands of products that may be cut to TF32 or keep few bits between the steps.
RESULT, TERM, CUT = 2.0**-16, 2.0**-18, 2.0**-10
_LOST = 0.1  # of a row's spread, or of a weight, at most

Named = dict[str, np.ndarray]


class Noise:
    """Where moves come from; in every other run what may be narrower is rounded so."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.on_grid = self.rng.random() < 0.5


@dataclass(frozen=True)
class Move:
    """Each float times a random number between ``1 - amount`` and ``1 + amount``; ``together``, all
    of them times another one, too. Those that are not 0 move by at most ``least`` besides, and by
    ``spread`` of the root mean square. A ``result`` moves where another computation may round it
    otherwise: not a whole number, nor one that is, but for its sign, one of the operands; and then
    as far as rounding to ``narrow`` could."""

    amount: float
    together: bool = False
    least: float = 0.0
    spread: float = 0.0
    result: bool = False
    narrow: str = ""

    def __call__(self, noise: Noise, x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        near = self._near(noise.rng, x)
        if not self.result:
            return near
        values = np.abs(x.astype(np.float32))
        exact = values == np.round(values)
        for operand in operands:
            exact |= values == np.abs(np.asarray(operand, np.float32))
        x = np.where(exact, x, near)
        if not self.narrow or x.dtype != np.float32:
            return x
        info = jnp.finfo(self.narrow)
        rounded = x.astype(jnp.dtype(self.narrow)).astype(np.float32)
        narrow = Move(float(info.eps), least=float(info.smallest_subnormal))
        near = rounded if noise.on_grid else narrow._near(noise.rng, x)
        return np.where((rounded == x) | ~np.isfinite(rounded), x, near)

    def _near(self, rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        moves = rng.uniform(1 - self.amount, 1 + self.amount, x.shape).astype(np.float32)
        if self.together:
            moves *= np.float32(rng.choice((1 - self.amount, 1 + self.amount)))
        product, largest = x.astype(np.float32) * moves, float(jnp.finfo(x.dtype).max)
        if least := self.least + self.spread * root_mean_square(x):
            product += np.where(x == 0, 0, rng.uniform(-least, least, x.shape))
        tame = np.clip(product, -largest, largest)
        return np.where(np.isfinite(product), tame, product).astype(x.dtype)


_disturb_p = Primitive("disturb")  # of x and operands: x, moved by the interpreter if it has noise
_disturb_p.def_abstract_eval(lambda x, *operands, move: x)


def _disturb(x: Any, move: Move | None, *operands: Any) -> Any:
    """Moves x, and its tangents and cotangents alike."""
    if move is None or type(x) is ad.Zero or not is_floating(str(x.dtype)):
        return x
    return _disturb_p.bind(x, *operands, move=move)


ad.primitive_jvps[_disturb_p] = lambda primals, tangents, move: (
    _disturb(primals[0], move, *primals[1:]),
    _disturb(tangents[0], move),
)
ad.primitive_transposes[_disturb_p] = lambda cotangent, x, move: [_disturb(cotangent, move)]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _along(x: Any, moves: tuple[Move | None, ...]) -> Any:
    """Moves only the tangents and cotangents of x."""
    return x


@_along.defjvp
def _(moves: Any, primals: Any, tangents: Any) -> Any:
    return primals[0], functools.reduce(_disturb, moves, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _result(names: tuple[str, str] | None, slopes: Any, values: Any) -> Any:
    """Values that have the derivatives of ``slopes``. Of attention, whose O and statistic are
    named, rounding O moves each row's product of it and its cotangent, which the backward
    subtracts: it reaches as much as the statistic's cotangent."""
    return values


@_result.defjvp
def _(names: Any, primals: Any, tangents: Any) -> Any:
    values, found = primals[1], dict(tangents[0])
    if names:
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
        return self._programs[1](self._operands, _in_float32(given), noise=noise)

    def gradients(self, given: Named, noise: Noise | None = None) -> Named:
        """Cotangents of all floats, for those of some results."""
        return self._programs[2](self._operands, _in_float32(given), noise=noise)

    @property
    def comparable(self) -> bool:
        """Whether derivatives are worth comparing: all values are finite, also their squares where
        float16 keeps what is between the steps (a statistic that attention alone reads may be
        -inf); no normalization is of rows whose spread is lost beside their mean, once that or they
        are rounded; and no weight of attention is lost, once queries and keys are."""
        spec = self.spec
        read = {name for call in spec.calls for port, name in call.inputs if port != "stats"}
        largest = math.inf
        if spec.options.intermediate_data_type == "float16":
            largest = math.sqrt(float(jnp.finfo("float16").max))
        tensors = _floats(spec, {*read, *spec.outputs} & self.exact.keys())
        wide = [self.exact[name].astype(np.float32) for name in tensors]
        finite = all(bool((np.abs(x) < largest).all()) for x in wide)
        return finite and all(map(self._keeps_spread, _steps(spec)))

    def _keeps_spread(self, one: GraphSpec) -> bool:
        node: Any = one.calls[0].node
        ports = {p: self.exact[n] for p, n in one.calls[0].inputs if n in self.exact}
        if attends(node) and ports["q"].dtype == ports["k"].dtype == np.float32:
            k = np.repeat(ports["k"], ports["q"].shape[1] // ports["k"].shape[1], axis=1)
            scores = node.attn_scale * (ports["q"] @ np.swapaxes(k, 2, 3))
            return bool(np.max(np.abs(scores)) * grain(self.spec) < 2 * _LOST)
        epsilon = any(port == "epsilon" for port, _ in one.calls[0].inputs)
        if not (epsilon and getattr(node, "extent", None) and node.extent.centred):
            return True
        x = ports["input"].astype(np.float64)
        axes = node.extent.reduced(x.shape, ports["scale"].shape)
        alone = math.prod(x.shape[axis] for axis in axes) == 1  # has no spread to lose
        lost = (grain(self.spec) or RESULT) * np.abs(x.mean(axes))
        return alone or not np.any(lost > _LOST * x.std(axes))


@functools.lru_cache(maxsize=64)
def _programs(spec: GraphSpec) -> tuple[Callable[..., Named], ...]:
    names = [tensor.name for tensor in spec.tensors]
    zeros = {n: np.zeros(spec.tensor(n).shape, np.float32) for n in _floats(spec, names)}

    def values(operands: Any) -> Any:
        return _values(spec, operands, None)

    def tangents(operands: Any, given: Any) -> Any:
        def of(some: Any) -> Any:
            found = _values(spec, operands, zeros | some)
            return {name: found[name] for name in _floats(spec, found)}

        return jax.jvp(of, ({name: zeros[name] for name in given},), (given,))[1]

    def gradients(operands: Any, given: Any) -> Any:
        def of(some: Any) -> Any:
            found = _values(spec, operands, some)
            return {name: found[name] for name in given}

        return jax.vjp(of, zeros)[1](given)[0]

    return interpreted(values), interpreted(tangents), interpreted(gradients)


def _values(spec: GraphSpec, operands: Sequence[Any], more: Any) -> dict[str, Any]:
    """All tensors of the graph by name. To differentiate, floats are float32, and ``more`` is added
    to each."""
    values = dict(zip(spec.inputs, operands, strict=True))
    if more is not None:
        for name in _floats(spec, values):
            values[name] = values[name].astype(jnp.float32) + more[name]
    for one in _steps(spec):
        given = {name: values[name] for name in one.inputs}
        actual = {n: jax.lax.stop_gradient(x).astype(one.tensor(n).dtype) for n, x in given.items()}
        exact, moves = _result_move(one, narrowest(spec) if more is not None else "")
        operands = [_disturb(x, _term_move(one, name)) for name, x in actual.items()]
        results = dict(zip(one.outputs, evaluate(one, *operands), strict=True))
        beside = [*actual.values()] if exact else []
        found = {n: _disturb(x, moves.get(n), *beside) for n, x in results.items()}
        if more is not None:
            floats = _floats(one, one.outputs)
            kept, through = _derivative_moves(spec, one)
            at = {n: _along(_disturb(x, through), (kept, _fp8(one, n))) for n, x in given.items()}
            slopes = dict(zip(one.outputs, evaluate(_wide(one), *at.values()), strict=True))
            slopes = {n: _along(slopes[n], (kept, through)) for n in floats}
            exact = {n: found[n].astype(jnp.float32) for n in floats}
            ports = dict(one.calls[0].outputs)
            named = ("O", "Stats") if attends(one.calls[0].node) else ("", "")
            both = tuple(ports[p] for p in named if p in ports)
            exact = _result(both if len(both) == 2 else None, slopes, exact)
            found |= {name: x + more[name] for name, x in exact.items()}
        values |= found
    return values


@functools.lru_cache(maxsize=512)
def _steps(spec: GraphSpec) -> tuple[GraphSpec, ...]:
    """The graph of each operation, with all of its results."""
    steps = [part(spec, (position,)) for position in range(len(spec.calls))]
    return tuple(
        replace(one, outputs=tuple(name for _, name in one.calls[0].outputs), _cache={})
        for one in steps
    )


def _wide(one: GraphSpec) -> GraphSpec:
    tensors = tuple(replace(t, dtype="float32") if is_floating(t.dtype) else t for t in one.tensors)
    options = replace(one.options, precision="highest")
    return replace(one, tensors=tensors, options=options, _cache={})


# -- moves -----------------------------------------------------------------------------------------


def _term_move(one: GraphSpec, name: str) -> Move | None:
    """Of an operand that is added up, as a product or another term: each element by itself, and all
    together, as bits that are cut off make all of them smaller."""
    node = one.calls[0].node
    if node.moves or _each_element(one):
        return None
    amount = CUT if node.product and _products_are_cut(one) else TERM
    if attends(node) and name in _multiplied(one):  # what they are multiplied by is rounded
        amount += max(_rounding(one.tensor(name).dtype) for name in _multiplied(one))
    return Move(amount, together=True)


def _multiplied(one: GraphSpec) -> list[str]:
    call, every = one.calls[0], not attends(one.calls[0].node)
    ports = ("q", "k", "v", "dO")
    return [name for port, name in call.inputs if every or port in ports]


def _rounding(dtype: str) -> float:
    """Half a unit of a float of 16 bits; nothing of float32."""
    return 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2


def _products_are_cut(one: GraphSpec) -> bool:
    """Whether a GPU may cut an operand of a product to fewer bits, or keep fewer of its sums."""
    coarse = FP8 if one.options.precision in ("high", "highest") else ("float32", *FP8)
    return any(one.tensor(name).dtype in coarse for name in _multiplied(one))


def _result_move(one: GraphSpec, narrow: str) -> tuple[bool, dict[str, Move]]:
    """Of each result, and whether results that are one of the operands are exact."""
    if one.calls[0].node.moves:
        return False, {}
    infos = {name: jnp.finfo(one.tensor(name).dtype) for name in _floats(one, one.outputs)}
    return _each_element(one), {
        name: Move(
            max(RESULT, float(info.eps)),
            least=float(info.smallest_subnormal),
            result=True,
            narrow=narrow,
        )
        for name, info in infos.items()
    }


def _each_element(one: GraphSpec) -> bool:
    """Whether each element of the result depends on those at its place alone."""
    shapes = [t.shape for t in one.input_tensors]
    broadcast = one.calls[0].node.ports.is_elementwise and np.broadcast_shapes(*shapes)
    return one.tensor(one.outputs[0]).shape == broadcast


def _derivative_moves(spec: GraphSpec, one: GraphSpec) -> tuple[Move | None, Move | None]:
    """Of tangents and cotangents that an operation gives, which may be computed from its result, as
    that was rounded; and of what enters its derivative."""
    node, coarse = one.calls[0].node, grain(spec)
    dtypes = {one.tensor(name).dtype for name in (*one.inputs, *one.outputs)}
    units = [float(jnp.finfo(one.tensor(name).dtype).eps) for name in _floats(one, one.outputs)]
    least = float(jnp.finfo("float16").smallest_subnormal) * (narrowest(spec) == "float16")
    inside = spec.options.intermediate_data_type != "float32"

    def move(amount: float, together: bool = False) -> Move:
        return Move(amount, together, least, amount * inside)

    kept = None if node.moves and len(dtypes) == 1 else move(max(coarse, RESULT, *units))
    if node.moves or node.ports.is_elementwise:
        return kept, None
    cut = CUT if _products_are_cut(one) else TERM
    return kept, move(max(coarse, cut) if node.product else TERM, together=True)


def _fp8(one: GraphSpec, name: str) -> Move | None:
    """Gradients of float8 are rounded before they are added up."""
    dtype = one.tensor(name).dtype
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


def _in_float32(arrays: Named) -> Named:
    return {name: np.asarray(x).astype(np.float32) for name, x in arrays.items()}


def _floats(spec: GraphSpec, names: Iterable[str]) -> list[str]:
    return [name for name in names if is_floating(spec.tensor(name).dtype)]


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A result beside the reference's: the largest error in units of its tolerance, without the
    outliers that are allowed, and how many there are; and the share of elements whose tolerance is
    as large as the values themselves.

    An element's tolerance is twice its largest move in the disturbed runs, more by the root mean
    square of all moves and by one unit in the last place. Beyond it may be, unless they are larger
    than all that the reference has, twice as many elements as a disturbed run has beyond that of
    the others, and one of 500, as no number of runs finds every element that lies on an edge."""

    ratio: float
    outliers: int = 0
    allowed: int = 0
    blunt: float = 0.0

    @property
    def right(self) -> bool:
        return self.outliers <= self.allowed

    @property
    def far_off(self) -> bool:
        """Whether more runs would not make it right."""
        return self.outliers > 10 * (self.allowed + 1) and self.ratio > 4


def compare(
    got: Sequence[Any],
    want: Sequence[np.ndarray],
    disturbed: Callable[[Noise], Sequence[np.ndarray]],
    step: float = 0.0,
) -> list[Comparison]:
    """Arrays beside those that are wanted; ``disturbed`` gives these as a run with noise does.

    Where one is not right, more runs have their say, unless one is far off. Nothing is measured
    where no float differs by more than ``step`` of itself and of the array's root mean square.
    """
    got = [np.asarray(x) for x in got]
    quick = [_within(a, b, step) for a, b in zip(got, want, strict=True)]
    found, runs = [c for c in quick if c], []
    for count in (_RUNS, _MORE_RUNS):
        if len(found) == len(quick) and all(c.right for c in found):
            break
        runs += [disturbed(Noise(seed)) for seed in range(len(runs), count)]
        found = [
            known or _compare(got[i], want[i], [run[i] for run in runs])
            for i, known in enumerate(quick)
        ]
        if any(c.far_off for c in found):
            break
    return found


def _compare(got: np.ndarray, want: np.ndarray, runs: Sequence[np.ndarray]) -> Comparison:
    place, errors = _places(want), _distance(got, want)
    moves = np.stack([_distance(run, want) for run in runs])

    def tolerance(moves: np.ndarray) -> np.ndarray:
        return 2 * moves.max(0) + root_mean_square(moves) + place

    beyond = [int(np.sum(moves[i] > tolerance(np.delete(moves, i, 0)))) for i in range(len(runs))]
    largest = float(np.max(np.abs(want, dtype=np.float64), initial=0, where=np.isfinite(want)))
    beyond_all = np.any(errors > np.maximum(tolerance(moves), 2 * largest))
    allowed = 0 if beyond_all else 2 * max(beyond) + errors.size // _EDGES
    ratios = _ratios(errors, tolerance(moves))
    inside = np.sort(ratios)[: max(ratios.size - allowed, 1)]
    blunt = float(np.mean(tolerance(moves) >= max(root_mean_square(want), 1e-30)))
    return Comparison(float(inside[-1]), int(np.sum(ratios > 1)), allowed, blunt)


def _within(got: np.ndarray, want: np.ndarray, step: float) -> Comparison | None:
    """The comparison, where all is within a step of itself and of the root mean square."""
    step = step if is_floating(str(want.dtype)) else 0.0
    tolerance = step * (np.abs(want.astype(np.float64)) + root_mean_square(want))
    ratio = float(np.max(_ratios(_distance(got, want), tolerance), initial=0))
    return Comparison(ratio) if ratio <= 1 else None


def _ratios(errors: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / tolerance).ravel()
    return np.where(np.isnan(ratios), np.inf, ratios)


def root_mean_square(x: np.ndarray) -> float:
    """Of the finite elements, in their number with the others."""
    wide = x.astype(np.float64)
    finite = np.where(np.isfinite(wide), wide, 0)
    return math.sqrt(float(np.mean(np.square(finite)))) if x.size else 0.0


def _distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Absolute differences; 0 between equal infinities and between NaN, infinite beside NaN."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.abs(a - b))
    return np.where(np.isnan(error), np.inf, error)


def _places(want: np.ndarray) -> np.ndarray | float:
    """What each element's last place is worth; 0 for integers and booleans."""
    if not is_floating(str(want.dtype)):
        return 0.0
    values, info = np.abs(want.astype(np.float64)), jnp.finfo(want.dtype)
    finite = np.where(np.isfinite(values), values * float(info.eps), 0)
    return finite + float(info.smallest_subnormal)
