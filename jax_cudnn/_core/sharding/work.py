"""What each device of a mesh does: calls on local shapes, and what moves between devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ..graph.node import advanced
from ..graph.spec import GraphSpec, Tensor
from ..primitive import cudnn_local_p
from ..user_context import CUDNN
from .axes import WHOLE, Factor, drawing, factors, with_offsets
from .operations import ADD, MAX, MIN
from .shards import localized, parts

Axes = tuple[str, ...]
Sharding = tuple[Axes, ...]
"""The mesh axes of each dimension."""


class Move(NamedTuple):
    """What happens to a tensor ahead of a call: shards are added (or the largest or smallest
    elements taken), scattered or gathered along a dimension, or one shard is cut out. For this call
    alone, the offset of random numbers (:class:`.Draws`) is ``step`` more for each shard before it,
    and offsets into arrays are divided by ``step`` shards."""

    name: str
    how: str
    axes: Axes
    dim: int = 0
    step: int = 0

    def run(self, x: Any) -> Any:
        axes, dim = self.axes, self.dim
        if self.how == "scatter":
            return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        if self.how == "gather":
            return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        if self.how == "cut":
            size = x.shape[dim] // jax.lax.axis_size(axes)
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)
        if self.how == "advance":
            return advanced(x, jax.lax.axis_index(axes).astype(x.dtype) * self.step)
        if self.how == "divide":
            return x // self.step
        return {ADD: jax.lax.psum, MAX: jax.lax.pmax, MIN: jax.lax.pmin}[self.how](x, axes)


@dataclass(frozen=True)
class Work:
    """The graph on local shapes, in stages: sums over devices are complete before later calls read
    them."""

    stages: tuple[tuple[tuple[Move, ...], GraphSpec], ...]
    last: tuple[Move, ...]
    operands: tuple[Sharding, ...]
    outputs: tuple[str, ...]
    results: tuple[Sharding, ...]

    def run(self, names: Sequence[str], title: str, *arrays: Any) -> list[Any]:
        values = dict(zip(names, arrays, strict=True))
        for moves, spec in self.stages:
            own = {}
            for move in moves:
                made = own if move.how in ("advance", "divide") else values
                made[move.name] = move.run(values[move.name])
            given = [own.get(name, values[name]) for name in spec.inputs]
            made = cudnn_local_p.bind(*given, spec=spec, name=title)
            values.update(zip(spec.outputs, made, strict=True))
        for move in self.last:
            values[move.name] = move.run(values[move.name])
        return [values[name] for name in self.outputs]


@functools.lru_cache(maxsize=4096)
def work(
    spec: GraphSpec,
    given: tuple[Sharding, ...],
    wanted: tuple[Sharding, ...],
    mesh: tuple[tuple[str, int], ...],
    sums: bool = True,
) -> Work:
    """What each device does for operands with these shardings, and results that should have those
    of ``wanted``, if any. Without ``sums``, what devices would add up is gathered; and all arrays
    are, where one would use its place along an axis, or what another one has."""
    sizes, goal = dict(mesh), dict(zip(spec.outputs, wanted, strict=False))
    at = _At(sizes, dict(zip(spec.inputs, given, strict=True)))
    stages: list[tuple[tuple[Move, ...], GraphSpec]] = []
    operands: tuple[Sharding, ...] = ()
    rest: GraphSpec | None = spec
    while rest is not None:
        chosen = _chosen(rest, at.have, goal, sizes, sums)
        first, rest = parts(rest, chosen)
        if not stages:  # XLA moves operands to these; those of later stages stay where they are
            at.have = {
                t.name: _sharding(chosen, t) if t.name in first.inputs else _even(own, t, sizes)
                for t, own in zip(spec.input_tensors, given, strict=True)
            }
            operands = tuple(at.have.values())
        local = localized(first, {f: size_of(axes, sizes) for f, axes in chosen.items()})
        for tensor in first.input_tensors:
            at.move(tensor, _sharding(chosen, tensor))
        stages.append(((*at.taken(), *_placed(first, chosen, sizes)), local))
        for tensor in first.output_tensors:
            at.have[tensor.name] = _sharding(chosen, tensor)
            ways = [
                (kind, axes)
                for factor, axes in chosen.items()
                for name, kind in factor.partial
                if name == tensor.name
            ]
            if ways:
                at.partial[tensor.name] = ways[0][0], tuple(a for _, axes in ways for a in axes)
    for tensor in spec.output_tensors:
        at.complete(tensor, goal.get(tensor.name, ()))
    results = tuple(at.have[name] for name in spec.outputs)
    last = at.taken()
    moves = [*(move for moves, _ in stages for move in moves), *last]
    if not sums and any(move.how != "divide" for move in moves):
        return work(spec, tuple(((),) * len(t.shape) for t in spec.input_tensors), (), mesh, sums)
    return Work(tuple(stages), last, operands, spec.outputs, results)


def _placed(
    spec: GraphSpec, chosen: Mapping[Factor, Axes], sizes: Mapping[str, int]
) -> tuple[Move, ...]:
    """The offsets of a shard: of random numbers, and into arrays."""
    made = {}
    for offsets, arrays in with_offsets(spec).items():
        _, *rest = _sharding(chosen, spec.tensor(min(arrays)))  # as of the others, see factors
        shards = size_of(tuple(axis for axes in rest for axis in axes), sizes)
        if shards > 1:
            made[offsets] = Move(offsets, "divide", (), step=shards)
    for i, draws in drawing(spec).items():
        at = dict(spec.calls[i].inputs)
        axes, *_ = _sharding(chosen, spec.tensor(at[draws.axes[0][0]]))
        if axes:
            batch, each, *_ = draws.shape({port: spec.tensor(n).shape for port, n in at.items()})
            name, shard = at[draws.offset], batch // size_of(axes, sizes)
            made[name] = Move(name, "advance", axes, step=draws.step * each * shard)
    return (*made.values(),)


class _At:
    """Where tensors are, and the moves so far."""

    def __init__(self, sizes: dict[str, int], have: dict[str, Sharding]) -> None:
        self.sizes, self.have = sizes, have
        self.partial: dict[str, tuple[str, Axes]] = {}
        self._moves: list[Move] = []

    def taken(self) -> tuple[Move, ...]:
        moves, self._moves = tuple(self._moves), []
        return moves

    def complete(self, tensor: Tensor, wanted: Sharding) -> None:
        """Adds up a partial tensor: scattered, where it is to be sharded over the same axes."""
        kind, over = self.partial.pop(tensor.name, (ADD, ()))
        for dim, axes in enumerate(wanted):
            free = kind == ADD and axes and {*axes} <= {*over} and not self.have[tensor.name][dim]
            if free and tensor.shape[dim] % size_of(axes, self.sizes) == 0:
                over = tuple(axis for axis in over if axis not in axes)
                self._place(tensor, "scatter", axes, dim, axes)
        if over:
            self._moves.append(Move(tensor.name, kind, over))

    def move(self, tensor: Tensor, wanted: Sharding) -> None:
        self.complete(tensor, wanted)
        for cut in (False, True):  # an axis may leave one dimension for another
            for dim, axes in enumerate(wanted):
                have = self.have[tensor.name][dim]
                if have != axes and not cut and have:
                    self._place(tensor, "gather", have, dim, ())
                elif have != axes and cut:
                    self._place(tensor, "cut", axes, dim, axes)

    def _place(self, tensor: Tensor, how: str, axes: Axes, dim: int, then: Axes) -> None:
        self._moves.append(Move(tensor.name, how, axes, dim))
        have = self.have[tensor.name]
        self.have[tensor.name] = (*have[:dim], then, *have[dim + 1 :])


def _chosen(
    spec: GraphSpec,
    have: Mapping[str, Sharding],
    goal: Mapping[str, Sharding],
    sizes: dict[str, int],
    sums: bool,
) -> dict[Factor, Axes]:
    """The mesh axes that shard each factor: those of operands before those of results; of operands,
    a product's come first, in their order, but last what is summed though another has all of it,
    as a weight's contracted dimension next to a batch. An axis shards one factor of each call."""
    of = {
        at: (factor, calls)
        for factor, calls in _calls(spec).items()
        if factor.role != WHOLE and (sums or not factor.partial)
        if not (factor.ahead and spec.is_paired)  # one place for the graphs of a family
        for at in factor.axes
    }
    anchored = {name for call in spec.anchors for _, name in call.inputs}
    known = {(name, dim): axes for name in spec.inputs for dim, axes in enumerate(have[name])}

    def rank(at: tuple[str, int]) -> tuple[bool, bool, int]:
        ways, size = {known.get(x, known[at]) for x in of[at][0].axes}, -spec.tensor(at[0]).nbytes
        alone = bool(of[at][0].partial) and len(ways) > 1
        return at[0] not in anchored, alone, 0 if at[0] in anchored else size

    sides = [(at, known[at]) for at in sorted((at for at in known if at in of), key=rank)]
    sides += [((name, dim), axes) for name, own in goal.items() for dim, axes in enumerate(own)]
    chosen: dict[Factor, Axes] = {}
    kinds: dict[str, str] = {}
    used: list[tuple[frozenset[int], Axes]] = []
    for at, axes in sides:
        factor, calls = of.get(at, (None, frozenset()))
        if factor is None or factor in chosen:
            continue
        taken = {axis for others, own in used if others & calls for axis in own}
        fits = [
            axes[:n]
            for n in range(len(axes), 0, -1)
            if factor.size % size_of(axes[:n], sizes) == 0 and not taken & {*axes[:n]}
        ]
        if fits and all(kinds.get(name, kind) == kind for name, kind in factor.partial):
            chosen[factor] = fits[0]
            used.append((calls, fits[0]))
            kinds.update(factor.partial)
    return chosen


@functools.lru_cache(maxsize=2048)
def _calls(spec: GraphSpec) -> dict[Factor, frozenset[int]]:
    """The calls that a factor concerns: those with its axes, and those after a sum over it."""
    made = {}
    for factor in factors(spec):
        names, after, found = {name for name, _ in factor.axes}, set(), set()
        for i, call in enumerate(spec.calls):
            read, written = ({n for _, n in side} for side in (call.inputs, call.outputs))
            if names & (read | written) or (factor.partial and after & read):
                found.add(i)
                after |= written
        made[factor] = frozenset(found)
    return made


def _sharding(chosen: Mapping[Factor, Axes], tensor: Tensor) -> Sharding:
    of = {at: axes for factor, axes in chosen.items() for at in factor.axes}
    return tuple(of.get((tensor.name, dim), ()) for dim in range(len(tensor.shape)))


def is_left_whole(spec: GraphSpec, types: Sequence[PartitionSpec] | None = None) -> bool:
    """Whether XLA runs a graph without a product: it exchanges statistics where cuDNN would need
    all that its largest operands of these types shard; without types, of one's first axis."""
    if spec.options.implementation == CUDNN or spec.options.engine is not None:
        return False
    if not spec.inputs or any(call.node.anchor.product for call in spec.calls):
        return False
    whole = {at for factor in factors(spec) if factor.role == WHOLE for at in factor.axes}
    largest = max(spec.input_tensors, key=lambda tensor: tensor.nbytes)
    if types is None:
        return (largest.name, 0) in whole
    return any(
        axes and (tensor.name, dim) in whole and tensor.nbytes == largest.nbytes
        for tensor, own in zip(spec.input_tensors, types, strict=True)
        for dim, axes in enumerate(padded(own, tensor))
    )


def _even(sharding: Sharding, tensor: Tensor, sizes: Mapping[str, int]) -> Sharding:
    """A sharding without the dimensions that it does not divide."""
    pairs = zip(sharding, tensor.shape, strict=True)
    return tuple(axes if size % size_of(axes, sizes) == 0 else () for axes, size in pairs)


def described(spec: GraphSpec, found: Work) -> str:
    """What each mesh axis shards."""
    shards: dict[str, list[str]] = {}
    sides = ((spec.inputs, found.operands), (found.outputs, found.results))
    for name, sharding in (pair for side in sides for pair in zip(*side, strict=True)):
        for dim, axes in enumerate(sharding):
            for axis in axes:
                shards.setdefault(axis, []).append(f"{name}[{dim}]")
    sums = [
        move.name
        for moves in (*(m for m, _ in found.stages), found.last)
        for move in moves
        if move.how in (ADD, MAX, MIN, "scatter")
    ]
    said = [f"{axis} shards {', '.join(names)}" for axis, names in shards.items()]
    said += [f"devices sum {', '.join(dict.fromkeys(sums))}"] if sums else []
    return "; ".join(said) or "each device computes all of it"


_ELSEWHERE = "shard another dimension"


class Gathered(NamedTuple):
    """A tensor that each device gets whole along a dimension, though it is sharded there."""

    tensor: Tensor
    dim: int
    axes: Axes
    nbytes: int
    why: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.tensor.name}, {self.tensor.dtype}{list(self.tensor.shape)}, is gathered along "
            f"dimension {self.dim}, which {' and '.join(self.axes)} shards, {self.nbytes:,} bytes "
            f"on each device: {self.why}"
        )


class Note(str):
    """How a mesh shards a graph, as text, and what is gathered for it."""

    gathered: Sequence[Gathered] = ()


def gathered(
    spec: GraphSpec,
    given: tuple[Sharding, ...],
    found: Work,
    sizes: Mapping[str, int],
    sums: bool,
) -> list[Gathered]:
    """What is gathered because a graph cannot be sharded along its axes. An operand that gives way
    to another one, as a weight under FSDP to the batch, is gathered for jnp, too."""
    of = {at: factor for factor in factors(spec) for at in factor.axes}
    taken = {axis for sharding in found.operands for axes in sharding for axis in axes}
    made = []
    for tensor, own, used in zip(spec.input_tensors, given, found.operands, strict=True):
        nbytes = tensor.nbytes // size_of(tuple(axis for axes in used for axis in axes), sizes)
        for dim, axes in enumerate(own):
            if not axes or used[dim]:
                continue
            factor, shards = of.get((tensor.name, dim)), size_of(axes, sizes)
            why, fix = "", _ELSEWHERE
            if factor is None or factor.role == WHOLE:
                why = "the operation needs all of it"
            elif factor.size % shards:
                why = f"{shards} shards do not divide its {factor.size} parts"
                fix = f"shard it over a number of devices that divides {factor.size}"
                if factor.size == tensor.shape[dim]:
                    fix += ", or pad it"
            elif not sums and (factor.partial or not taken):
                why = "devices exchange nothing over several axes next to manual ones"
            elif not {*axes} <= taken:
                why = "another tensor of the call is sharded in another way"
                fix = "shard it as that one, or along other mesh axes"
            if why:
                made.append(Gathered(tensor, dim, axes, nbytes, why, fix))
    for move in (*(move for moves, _ in found.stages for move in moves), *found.last):
        if move.how == "gather":
            tensor = spec.tensor(move.name)
            why = "a later operation needs all of it"
            made.append(Gathered(tensor, move.dim, move.axes, tensor.nbytes, why, _ELSEWHERE))
    return made


def sharding_types(
    spec: GraphSpec, operands: Sequence[PartitionSpec], mesh: Any
) -> list[PartitionSpec]:
    """How results are sharded for operands' types, on explicit axes."""
    given = tuple(padded(s, t) for s, t in zip(operands, spec.input_tensors, strict=True))
    return [*map(spec_of, work(spec, given, (), (*mesh.shape.items(),)).results)]


def first_stays(spec: GraphSpec, operands: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """Types without the mesh axes that shard an earlier operand: under FSDP the batch stays, and
    the weight is gathered."""
    used: set[str] = set()
    made = []
    for own, tensor in zip(operands, spec.input_tensors, strict=True):
        given = padded(own, tensor)
        made.append(spec_of(tuple(() if used.intersection(axes) else axes for axes in given)))
        used.update(*given)
    return made


def padded(spec: Iterable[Any], tensor: Tensor) -> Sharding:
    given = [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]
    return (*given, *[()] * (len(tensor.shape) - len(given)))


def spec_of(sharding: Sharding) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in sharding))


def size_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    size = 1
    for axis in axes:
        size *= sizes[axis]
    return size
