"""Partitions graphs over a mesh: each device runs the graph on its part of the arrays.

A graph becomes one custom call, which names it by a digest and states its rule to Shardy. XLA calls
:func:`_partition` with the shardings it has found, and replaces the call by what that returns: the
graph on local shapes, and the sums over devices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from . import compat, ffi, mesh_compat
from .errors import GraphError
from .graph.reference import evaluate
from .graph.spec import GraphSpec, Tensor
from .package import fingerprint
from .primitive import Seen, lower_local, lower_reference, observe, observer, title
from .settings import settings as current
from .sharding.axes import WHOLE, factors
from .sharding.work import (
    Note,
    Sharding,
    Work,
    described,
    gathered,
    is_left_whole,
    padded,
    size_of,
    spec_of,
    work,
)
from .user_context import TARGET, WAYS

PARTITIONED = "jax_cudnn_partitioned"
LARGE = 2**20
"""Bytes of an operand from which on it is said that it is gathered."""
_BY_XLA = "XLA runs and partitions it"
_EXCHANGED = "XLA runs it, of the whole arrays: it exchanges statistics between devices"
T = TypeVar("T")
log = logging.getLogger("jax_cudnn")


@dataclass(frozen=True, eq=False)
class _Partitioned:
    """What XLA's callbacks need: nothing of the user's data."""

    spec: GraphSpec
    name: str
    mesh: Any
    axes: Any
    module: Any
    target: Any
    ways: Any
    settings: Any
    turns: tuple[tuple[int, ...], ...]
    """The dimensions of each array of the call, in the order of the graph's operand."""
    seen: Seen | None
    """What wants to know the graphs of one device."""
    made: dict[Work, bytes] = field(default_factory=dict)
    """Modules by what they do: the layers of a model share them."""

    @contextlib.contextmanager
    def contexts(self) -> Iterator[None]:
        """What held where the graph was lowered: XLA's thread may not be the user's."""
        with TARGET.entered(self.target), WAYS.entered(self.ways), self.settings():
            yield

    def work(self, given: tuple[Sharding, ...], wanted: tuple[Sharding, ...]) -> Work:
        with self.contexts():
            return work(self.spec, given, wanted, (*self.axes.shape.items(),), self.sums)

    @property
    def sums(self) -> bool:
        """Whether devices can add up, or know their place along an axis: not along several axes
        next to manual ones. XLA numbers the devices of a group there in an order of each operation,
        so shardings name no axis."""
        sizes = [size for size in self.axes.axis_sizes if size > 1]
        return len(self.axes.axis_names) == len(self.mesh.axis_names) or len(sizes) < 2


_known: weakref.WeakValueDictionary[bytes, _Partitioned] = weakref.WeakValueDictionary()
"""By the text in the call. The text states all that determines the result: JAX's persistent
cache, which sees only it, cannot serve the program of another graph."""


def _exchanged(titled: str, spec: GraphSpec) -> tuple[str, GraphSpec, str]:
    """What is said of a graph that XLA runs on a mesh."""
    options = replace(spec.options, implementation="xla")
    return titled, replace(spec, options=options), _EXCHANGED


def lower(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    """The custom call in place of a graph, or its reference where XLA runs it anyway."""
    titled, by_xla = title(spec=spec, name=name), spec.xla_only
    mesh = compat.partitioning_mesh(ctx)
    if spec.is_static and mesh_compat.is_explicit(ctx, mesh):
        given, made = ([x.sharding.spec for x in avals] for avals in (ctx.avals_in, ctx.avals_out))
        run = functools.partial(_on_types, spec, name)
        if by_xla or is_left_whole(spec, given):  # jnp has no types for some results
            observe((spec, name), (titled, spec, _BY_XLA) if by_xla else _exchanged(titled, spec))
            run = functools.partial(_by_reference, spec, made)
        return mesh_compat.lower_explicit(ctx, mesh, run, operands)
    elsewhere = mesh_compat.is_exported(ctx)  # another process would not know the graph
    if by_xla or elsewhere or not spec.is_static:
        observe((spec, name), (titled, spec, _BY_XLA))
        return lower_local(ctx, *operands, spec=spec, name=name)
    if is_left_whole(spec):
        observe((spec, name), _exchanged(titled, spec))
        return lower_reference(compat.without_types(ctx), *operands, spec=spec, name=name)
    axes, target = mesh_compat.automatic_axes(ctx, mesh), TARGET.value
    where = mesh.axis_names, mesh.axis_sizes, axes.axis_names, _identity(ctx, name)
    values, settings = compat.settings_of_thread()
    # What XLA gathers, or moves, is the array in its own order: once for all calls that read it.
    operands, turns = zip(*map(_untransposed, operands), strict=True) if operands else ((), ())
    tried = WAYS.value
    ways = [(graph._key, way) for graph, way in tried]
    parts = (spec._key, name, turns, where, ways, current().tuning, values)
    text = repr((*parts, fingerprint(), jax.__version__))
    seen = observer.get()
    if seen is not None:  # XLA partitions it anew, whatever JAX's cache holds
        seen.setdefault((spec, name), [])
        text += secrets.token_hex()
    key = f"{titled} {hashlib.sha256(text.encode()).hexdigest()}".encode()
    module = mesh_compat.module_platforms(ctx)
    if "cuda" in module[0]:  # JAX's cache may have the program: then nothing else registers it
        ffi.register()
    site = _Partitioned(spec, name, mesh, axes, module, target, tried, settings, turns, seen)
    site = _known.setdefault(key, site)
    mesh_compat.keep_alive(ctx, site)
    register()
    ins, outs, sums = _letters(spec)
    ins = [*map(_of_array, ins, turns)]
    return mesh_compat.partitioned_call(ctx, PARTITIONED, key, operands, ins, outs, sums)


def _untransposed(x: Any) -> tuple[Any, tuple[int, ...]]:
    """The operand of the transpose that made a value, or the value itself, and the permutation."""
    if getattr(x.owner, "name", "") == "stablehlo.transpose":
        return x.owner.opview.operand, tuple(x.owner.opview.permutation)
    return x, tuple(range(x.type.rank))


def _of_array(dims: Sequence[T], turn: Sequence[int]) -> tuple[T, ...]:
    """What belongs to each dimension of an operand, for those of the array of the call."""
    return tuple(dims[turn.index(i)] for i in range(len(turn)))


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
    given = tuple(padded(a.sharding.spec, t) for a, t in pairs)
    found = work(spec, given, (), (*mesh.shape.items(),))
    _report(spec, name, given, found, mesh.shape, True, observer.get())
    specs = tuple(map(spec_of, found.operands))
    arrays = tuple(
        jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, own))
        for x, own in zip(arrays, specs, strict=True)
    )
    body, results = functools.partial(found.run, spec.inputs, name), [*map(spec_of, found.results)]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return mapped(*arrays)


def _by_reference(
    spec: GraphSpec, specs: Sequence[PartitionSpec], mesh: Any, avals: Any, *arrays: Any
) -> list[Any]:
    reference = functools.partial(evaluate, spec)
    run: Any = jax.sharding.auto_axes(reference, out_sharding=[*specs])
    return run(*arrays)


def _identity(ctx: Any, name: str) -> str:
    """The GPU, the versions and the choices of steps that determine plans; empty where nothing is
    planned."""
    from . import context, tuning
    from .planning import planner

    if "cuda" not in mesh_compat.module_platforms(ctx)[0]:
        return ""
    return planner.identity(context.site(compat.lowering_devices(ctx), name)) + tuning.steps()


@functools.cache
def register() -> None:
    """Registers the callbacks with XLA, of this process and of its plugins."""
    mesh_compat.register_partitioner(PARTITIONED, _wanted, _partition, _inferred)


def _site(key: bytes) -> _Partitioned:
    if key not in _known:
        raise GraphError(
            f"this process does not know the graph {key.decode().partition(' ')[0]!r}",
            why="XLA compiles a program that another process lowered",
            fix="lower it here, or export it with jax.export",
        )
    return _known[key]


def _wanted(sharding: Any, shape: Any, key: bytes) -> Any:
    return sharding


def _inferred(shapes: Any, shardings: Any, result: Any, key: bytes) -> Any:
    """GSPMD's: an error would end the process. :func:`_partition` meets it again, and raises it."""
    try:
        site = _site(key)
        found = site.work(_operands(site, shardings), ())
        return mesh_compat.packed_shardings(result, _encoded(site, found.results))
    except Exception:
        return mesh_compat.replicated(result)


def _partition(shapes: Any, shardings: Any, result: Any, wanted: Any, key: bytes) -> Any:
    site = _site(key)
    spec = site.spec
    wanted = wanted.tuple_elements() if result.is_tuple() else [wanted]
    given = _operands(site, shardings)
    found = site.work(given, _decoded(site, wanted, spec.output_tensors))
    _report(spec, site.name, given, found, site.axes.shape, site.sums, site.seen)
    if found not in site.made:
        avals = []
        for t, own, turn in zip(spec.input_tensors, found.operands, site.turns, strict=True):
            parts = [size_of(axes, site.axes.shape) for axes in own]
            shape = [n // shards for n, shards in zip(t.shape, parts, strict=True)]
            avals.append(jax.ShapeDtypeStruct(_of_array(shape, turn), t.dtype))

        def body(*arrays: Any) -> list[Any]:
            return found.run(spec.inputs, site.name, *map(jax.numpy.transpose, arrays, site.turns))

        with site.contexts():
            site.made[found] = mesh_compat.local_module(body, avals, site.mesh, *site.module)
    results = mesh_compat.packed_shardings(result, _encoded(site, found.results))
    return site.made[found], _encoded(site, map(_of_array, found.operands, site.turns)), results


def _report(
    spec: GraphSpec,
    name: str,
    given: Any,
    found: Work,
    sizes: Mapping[str, int],
    sums: bool,
    seen: Seen | None,
) -> None:
    """Reports what each device computes, and warns of large operands that are gathered."""
    all_of_them = gathered(spec, given, found, sizes, sums)
    how = Note("; ".join((described(spec, found), *map(str, all_of_them))))
    how.gathered = all_of_them
    for _, local in found.stages:
        log.debug("%s: each device computes %s", name, local)
    if seen is not None:
        after = Note("each device, after that exchange")
        graphs = [
            (title(spec=local, name=name), local, after if i else how)
            for i, (_, local) in enumerate(found.stages)
        ]
        seen.setdefault((spec, name), []).extend(graphs)
    large = [one for one in all_of_them if one.nbytes >= LARGE]
    if large:
        where = [spec._cache["line"]] if spec._cache.get("line") else []
        notes = [line for one in large for line in (str(one), f"  what to do: {one.fix}")]
        lines = f"{name}: on a mesh,", *notes, *where
        _warn("\n  ".join(lines))


@functools.lru_cache(maxsize=1024)
def _warn(text: str) -> None:
    """Once; a warning that a filter makes an error would end XLA's callback."""
    log.warning(text)


def _operands(site: _Partitioned, shardings: Any) -> tuple[Sharding, ...]:
    tensors = site.spec.input_tensors
    decoded = _decoded(site, shardings, tensors)
    return tuple(tuple(own[i] for i in turn) for own, turn in zip(decoded, site.turns, strict=True))


def _decoded(site: _Partitioned, shardings: Any, tensors: Iterable[Tensor]) -> tuple[Sharding, ...]:
    return tuple(
        padded(_mesh_axes(sharding, site.axes), tensor)
        for sharding, tensor in zip(shardings, tensors, strict=True)
    )


def _encoded(site: _Partitioned, shardings: Iterable[Sharding]) -> list[Any]:
    return [mesh_compat.hlo_sharding(site.axes, spec_of(own), len(own)) for own in shardings]


def _mesh_axes(sharding: Any, mesh: Any) -> list[tuple[str, ...]]:
    """The axes of a mesh that shard each dimension according to XLA: those ahead of the first of
    which only a part does, and none where the mesh cannot state it."""
    if sharding is None or not sharding.is_tiled():
        return []
    sizes = {(axis, i): p for axis, n in mesh.shape.items() for i, p in enumerate(_primes(n))}
    parts = {axis: [part for part in sizes if part[0] == axis] for axis in mesh.shape}
    try:
        devices = sharding.tile_assignment_devices()
        order = mesh_compat.unflattened(devices, sizes)
        dims = []
        for size in sharding.tile_assignment_dimensions():
            used, axes = [], []
            while size > 1:
                used.append(next(order))
                size, rest = divmod(size, sizes[used[-1]])
                if rest:
                    return []
            while used and used[: len(parts[used[0][0]])] == parts[used[0][0]]:
                axes.append(used[0][0])
                del used[: len(parts[axes[-1]])]
            dims.append(tuple(axes))
    except (KeyError, ValueError, StopIteration):
        return []
    groups = len(sharding.subgroup_types()) or sharding.replicate_on_last_tile_dim()
    return dims[: len(dims) - groups]


def _primes(size: int) -> list[int]:
    found, p = [], 2
    while size > 1:
        if size % p == 0:
            found.append(p)
            size //= p
        else:
            p += 1
    return found
