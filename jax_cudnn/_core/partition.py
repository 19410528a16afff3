"""Partitions graphs over a mesh: each device runs the graph on its part of the arrays.

A graph becomes one custom call, which names it by a digest and states its rule to Shardy. XLA calls
:func:`_partition` with the shardings it has found, and replaces the call by what that returns: the
graph on local shapes, and the sums over devices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from .. import __version__
from . import compat
from .graph.spec import GraphSpec, Tensor
from .sharding.axes import WHOLE, Factor, factors, localized, parts
from .sharding.classes import ADD, MAX, MIN
from .user_context import TARGET

PARTITIONED = "jax_cudnn_partitioned"

Axes = tuple[str, ...]
Sharding = tuple[Axes, ...]
"""The mesh axes of each dimension."""


# -- what each device does -------------------------------------------------------------------------


class Move(NamedTuple):
    """What happens to a tensor ahead of a call: shards are added (or the largest or smallest
    elements taken), scattered or gathered along a dimension, or one shard is cut out."""

    name: str
    how: str
    axes: Axes
    dim: int = 0

    def run(self, x: Any) -> Any:
        axes, dim = self.axes, self.dim
        if self.how == "scatter":
            return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        if self.how == "gather":
            return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        if self.how == "cut":
            size = x.shape[dim] // jax.lax.axis_size(axes)
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)
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
        from .primitive import cudnn_local_p

        values = dict(zip(names, arrays, strict=True))
        for moves, spec in self.stages:
            for move in moves:
                values[move.name] = move.run(values[move.name])
            given = [values[name] for name in spec.inputs]
            made = cudnn_local_p.bind(*given, spec=spec, name=title)
            values.update(zip(spec.outputs, made, strict=True))
        for move in self.last:
            values[move.name] = move.run(values[move.name])
        return [values[name] for name in self.outputs]


@functools.lru_cache(maxsize=4096)
def work(
    spec: GraphSpec,
    given: tuple[Sharding, ...],
    asked: tuple[Sharding, ...],
    mesh: tuple[tuple[str, int], ...],
    sums: bool = True,
) -> Work:
    """What each device does for operands with these shardings, and results that should have those
    of ``asked``, if any. Without ``sums``, what devices would add up is gathered."""
    sizes, goal = dict(mesh), dict(zip(spec.outputs, asked, strict=False))
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
        local = localized(first, {f: _size(axes, sizes) for f, axes in chosen.items()})
        for tensor in first.input_tensors:
            at.move(tensor, _sharding(chosen, tensor))
        stages.append((at.taken(), local))
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
    return Work(tuple(stages), at.taken(), operands, spec.outputs, results)


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
            if free and tensor.shape[dim] % _size(axes, self.sizes) == 0:
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
    """The mesh axes that shard each factor: those of operands before those of results; among them
    those of products, then large ones, come first. A mesh axis shards one factor of each call."""
    of = {
        at: (factor, calls)
        for factor, calls in _calls(spec).items()
        if factor.role != WHOLE and (sums or not factor.partial)
        for at in factor.axes
    }
    anchored = {name for call in spec.calls if call.node.anchor for _, name in call.inputs}
    given = sorted(spec.input_tensors, key=lambda t: (t.name not in anchored, -t.nbytes))
    sides = [(t, have[t.name]) for t in given]
    sides += [(t, goal[t.name]) for t in spec.output_tensors if t.name in goal]
    chosen: dict[Factor, Axes] = {}
    kinds: dict[str, str] = {}
    used: list[tuple[frozenset[int], Axes]] = []
    for tensor, sharding in sides:
        for dim, axes in enumerate(sharding):
            factor, calls = of.get((tensor.name, dim), (None, frozenset()))
            if factor is None or factor in chosen:
                continue
            taken = {axis for others, own in used if others & calls for axis in own}
            fits = [
                axes[:n]
                for n in range(len(axes), 0, -1)
                if factor.size % _size(axes[:n], sizes) == 0 and not taken & {*axes[:n]}
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


def _even(sharding: Sharding, tensor: Tensor, sizes: Mapping[str, int]) -> Sharding:
    """A sharding without the dimensions that it does not divide."""
    pairs = zip(sharding, tensor.shape, strict=True)
    return tuple(axes if size % _size(axes, sizes) == 0 else () for axes, size in pairs)


def sharding_types(
    spec: GraphSpec, operands: Sequence[PartitionSpec], mesh: Any
) -> list[PartitionSpec]:
    """How results are sharded for operands' types, on explicit axes."""
    given = tuple(_padded(s, t) for s, t in zip(operands, spec.input_tensors, strict=True))
    return [*map(_spec, work(spec, given, (), (*mesh.shape.items(),)).results)]


def _padded(spec: Iterable[Any], tensor: Tensor) -> Sharding:
    given = [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]
    return (*given, *[()] * (len(tensor.shape) - len(given)))


def _spec(sharding: Sharding) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in sharding))


def _size(axes: Axes, sizes: Mapping[str, int]) -> int:
    size = 1
    for axis in axes:
        size *= sizes[axis]
    return size


# -- the call --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Partitioned:
    """What XLA's callbacks need: nothing of the user's data."""

    spec: GraphSpec
    name: str
    mesh: Any
    axes: Any
    module: Any
    target: Any
    settings: Any
    made: dict[Work, bytes] = field(default_factory=dict)
    """Modules by what they do: the layers of a model share them."""

    @contextlib.contextmanager
    def contexts(self) -> Iterator[None]:
        """What held where the graph was lowered: XLA's thread may not be the user's."""
        with TARGET.entered(self.target), self.settings():
            yield

    def work(self, given: tuple[Sharding, ...], asked: tuple[Sharding, ...]) -> Work:
        with self.contexts():
            return work(self.spec, given, asked, (*self.axes.shape.items(),), self.sums)

    @property
    def sums(self) -> bool:
        """Whether devices can add up: not along several axes next to manual ones. XLA numbers the
        devices of a group there in an order of each operation, so shardings name no axis."""
        sizes = [size for size in self.axes.axis_sizes if size > 1]
        return len(self.axes.axis_names) == len(self.mesh.axis_names) or len(sizes) < 2


_known: weakref.WeakValueDictionary[bytes, _Partitioned] = weakref.WeakValueDictionary()
"""By the text in the call. The text states all that determines the result: JAX's persistent
cache, which sees only it, cannot serve the program of another graph."""

_exported: dict[bytes, _Partitioned] = {}
"""Those of exported programs, which may be called until the process ends."""


def lower(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    """The custom call in place of a graph, or its reference where XLA runs it anyway."""
    from .planning.placement import left_to_xla
    from .primitive import lower_local, title

    if left_to_xla(spec) or not spec.is_static:
        return lower_local(ctx, *operands, spec=spec, name=name)

    mesh = compat.partitioning_mesh(ctx)
    if compat.is_explicit(ctx, mesh):
        return compat.lower_explicit(ctx, mesh, functools.partial(_on_types, spec, name), operands)
    axes, target = compat.automatic_axes(ctx, mesh), TARGET.value
    where = mesh.axis_names, mesh.axis_sizes, axes.axis_names, _identity(ctx, name)
    values, settings = compat.settings_of_thread()
    said = repr((spec._key(), name, where, values, __version__, jax.__version__))
    key = f"{title(spec=spec, name=name)} {hashlib.sha256(said.encode()).hexdigest()}".encode()
    site = _Partitioned(spec, name, mesh, axes, compat.module_platforms(ctx), target, settings)
    site = _known.setdefault(key, site)
    if not compat.keep_alive(ctx, site):
        _exported[key] = site
    register()
    return compat.partitioned_call(ctx, PARTITIONED, key, operands, *_letters(spec))


def _letters(spec: GraphSpec) -> tuple[Any, Any, set[int]]:
    """For each dimension of operands and of results its factor, with the size that shards may
    divide, or None if it is whole; and the factors that are summed."""
    free = [f for f in factors(spec) if f.role != WHOLE and f.size > 1]
    of = {at: (i, factor.size) for i, factor in enumerate(free) for at in factor.axes}
    ins, outs = (
        [[of.get((t.name, dim)) for dim in range(len(t.shape))] for t in tensors]
        for tensors in (spec.input_tensors, spec.output_tensors)
    )
    kept = {letter for dims in outs for letter in dims}
    summed = {i for i, f in enumerate(free) if f.partial and (i, f.size) not in kept}
    return ins, outs, summed


def _on_types(spec: GraphSpec, name: str, mesh: Any, avals: Any, *arrays: Any) -> list[Any]:
    """The graph in a shard_map: on explicit axes the types say how arrays are sharded, so nothing
    is left for XLA to decide, and plans are made while lowering."""
    pairs = zip(avals, spec.input_tensors, strict=True)
    given = tuple(_padded(a.sharding.spec, t) for a, t in pairs)
    found = work(spec, given, (), (*mesh.shape.items(),))
    specs = tuple(map(_spec, found.operands))
    arrays = tuple(
        jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, own))
        for x, own in zip(arrays, specs, strict=True)
    )
    body, results = functools.partial(found.run, spec.inputs, name), [*map(_spec, found.results)]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return mapped(*arrays)


def _identity(ctx: Any, name: str) -> str:
    """The GPU and the versions that determine plans; empty where nothing is planned."""
    from . import context
    from .planning import planner

    if "cuda" not in compat.module_platforms(ctx)[0]:
        return ""
    return planner.identity(context.site(compat.lowering_devices(ctx), name))


@functools.cache
def register() -> None:
    """Registers the callbacks with XLA, of this process and of its plugins."""
    compat.register_partitioner(PARTITIONED, _wanted, _partition, _inferred)


def _wanted(sharding: Any, shape: Any, key: bytes) -> Any:
    return sharding


def _inferred(shapes: Any, shardings: Any, result: Any, key: bytes) -> Any:
    site = _known[key]
    found = site.work(_decoded(site, shardings, site.spec.input_tensors), ())
    return compat.packed_shardings(result, _encoded(site, found.results))


def _partition(shapes: Any, shardings: Any, result: Any, wanted: Any, key: bytes) -> Any:
    site = _known[key]
    spec = site.spec
    wanted = wanted.tuple_elements() if result.is_tuple() else [wanted]
    given = _decoded(site, shardings, spec.input_tensors)
    found = site.work(given, _decoded(site, wanted, spec.output_tensors))
    if found not in site.made:
        avals = [
            jax.ShapeDtypeStruct(
                tuple(n // _size(a, site.axes.shape) for n, a in zip(t.shape, own, strict=True)),
                t.dtype,
            )
            for t, own in zip(spec.input_tensors, found.operands, strict=True)
        ]
        body = functools.partial(found.run, spec.inputs, site.name)
        with site.contexts():
            site.made[found] = compat.local_module(body, avals, site.mesh, *site.module)
    results = compat.packed_shardings(result, _encoded(site, found.results))
    return site.made[found], _encoded(site, found.operands), results


def _decoded(site: _Partitioned, shardings: Any, tensors: Iterable[Tensor]) -> tuple[Sharding, ...]:
    return tuple(
        _padded(compat.mesh_axes(sharding, site.axes), tensor)
        for sharding, tensor in zip(shardings, tensors, strict=True)
    )


def _encoded(site: _Partitioned, shardings: Iterable[Sharding]) -> list[Any]:
    return [compat.hlo_sharding(site.axes, _spec(own), len(own)) for own in shardings]
