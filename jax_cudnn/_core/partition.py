"""Partitions graphs over a mesh: each device runs the graph on its part of the arrays.

A graph becomes one custom call, which names it by a digest and states its rule to Shardy. XLA calls
:func:`_partition` with the shardings it has found, and replaces the call by what that returns: the
graph on local shapes, and the sums over devices.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import __version__
from . import compat
from .graph.spec import Call, GraphSpec, Tensor, intern
from .user_context import TARGET

PARTITIONED = "jax_cudnn_partitioned"

Factors = tuple[int | None, ...]
Axes = tuple[str, ...]
Shardings = list[tuple[Axes, ...]]


# -- the rule of a graph ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Which dimensions of a graph's tensors belong together.

    ``of`` has a factor for each dimension of each tensor: dimensions with the same factor are
    sharded alike, None stays whole. ``summed`` has the factors over which a result is a sum.
    """

    of: dict[str, Factors]
    summed: dict[str, frozenset[int]]
    together: tuple[frozenset[int], ...]
    """The factors of each call: a mesh axis shards one of them."""


@functools.lru_cache(maxsize=4096)
def rule(spec: GraphSpec) -> Rule:
    """Unifies the letters of all calls."""
    parent: dict[Any, Any] = {}

    def find(x: Any) -> Any:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    whole, sums = set(), {}
    for n, call in enumerate(spec.calls):
        ports = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        letters, fixed = _letters(call, ports)
        for port, tensor in ports.items():
            for axis, letter in enumerate(letters[port]):
                here = tensor.name, axis
                if letter is None or letter in fixed:
                    whole.add(here)
                else:
                    parent[find(here)] = find((n, letter))
        read = {a for port, _ in call.inputs for a in letters[port] if a is not None} - fixed
        for port, name in call.outputs:
            kept = {a for a, s in zip(letters[port], ports[port].shape, strict=True) if s != 1}
            sums[name] = {(n, letter) for letter in read - kept}
    # A partial sum is complete where the graph ends: what is read again inside needs a whole axis.
    inner = {name for call in spec.calls for _, name in call.inputs}
    whole |= {x for name in inner & sums.keys() for x in sums[name]}
    roots = {find(x) for x in whole}
    ids = {root: i for i, root in enumerate(dict.fromkeys(map(find, [*parent])))}

    def factor(x: Any) -> int | None:
        root = find(x)
        return None if root in roots else ids.setdefault(root, len(ids))

    of = {
        t.name: tuple(
            None if size == 1 else factor((t.name, axis)) for axis, size in enumerate(t.shape)
        )
        for t in spec.tensors
    }
    summed = {
        name: frozenset(f for x in sums.get(name, ()) if (f := factor(x)) is not None)
        for name in spec.outputs
    }
    together = tuple(
        frozenset(f for _, name in (*call.inputs, *call.outputs) for f in of[name] if f is not None)
        for call in spec.calls
    )
    return Rule(of, summed, together)


def is_known(spec: GraphSpec) -> bool:
    """Whether this module has a rule for all nodes of a graph."""
    methods = ("rmsnorm", "rmsnorm_backward", "matmul")
    return all(
        call.node.method in methods
        or (call.node.ports.is_elementwise and call.node.method not in ("reduction", "gen_index"))
        for call in spec.calls
    )


def _letters(call: Call, ports: dict[str, Tensor]) -> tuple[dict[str, tuple], set]:
    """For each port a letter for each dimension (None: whole), and the letters that stay whole."""
    dims, node = call.node.ports, call.node
    named = {port.name: port.axes for port in (*dims.inputs, *dims.outputs)}
    rank = max(len(t.shape) for t in ports.values())
    letters: dict[str, tuple] = {}
    for port, tensor in ports.items():
        axes = named.get(port, ())
        fixed = [axis for axis in axes if axis != "..."]
        lead = len(tensor.shape) - len(fixed)
        letters[port] = tuple(range(lead)) + tuple(fixed)
    if node.method in ("rmsnorm", "rmsnorm_backward"):
        letters = {port: tuple(range(len(t.shape))) for port, t in ports.items()}
        x, kept = (ports[p] for p in ("input", "inv_var" if "inv_var" in ports else "inv_variance"))
        return letters, {a for a in range(rank) if x.shape[a] != kept.shape[a]}
    if not (
        node.method == "matmul"
        or (dims.is_elementwise and node.method not in ("reduction", "gen_index"))
    ):
        return {port: (None,) * len(t.shape) for port, t in ports.items()}, set()
    # A size of 1 broadcasts.
    return {
        port: tuple(
            None if size == 1 else a for a, size in zip(letters[port], t.shape, strict=True)
        )
        for port, t in ports.items()
    }, {None}


def sharding_types(spec: GraphSpec, operands: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """How results are sharded for operands' types, on explicit axes."""
    known = [_padded(s, t) for s, t in zip(operands, spec.input_tensors, strict=True)]
    axes = _axes(spec, known, [], {}, True)
    return [
        PartitionSpec(*(axes.get(f) or None for f in rule(spec).of[name])) for name in spec.outputs
    ]


def _padded(spec: Iterable[Any], tensor: Tensor) -> tuple[Axes, ...]:
    given = [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]
    return (*given, *[()] * (len(tensor.shape) - len(given)))


def _axes(
    spec: GraphSpec, operands: Shardings, results: Shardings, sizes: dict[str, int], sums: bool
) -> dict[int | None, Axes]:
    """The mesh axes that shard each factor. What operands have counts before what results would
    have, and large operands before small ones."""
    given = sorted(zip(spec.input_tensors, operands, strict=True), key=lambda pair: -pair[0].nbytes)
    wanted = zip(spec.output_tensors, results, strict=True) if results else ()
    chosen: dict[int | None, Axes] = {}
    of, together = rule(spec).of, rule(spec).together
    whole = frozenset() if sums else frozenset().union(*rule(spec).summed.values())
    for tensor, sharding in itertools.chain(given, wanted):
        for factor, size, axes in zip(of[tensor.name], tensor.shape, sharding, strict=True):
            if factor is None or factor in chosen or factor in whole or not axes:
                continue
            others = frozenset().union(*(c for c in together if factor in c)) - {factor}
            if any({*axes} & {*chosen.get(other, ())} for other in others):
                continue
            if size % _size(axes, sizes) == 0:
                chosen[factor] = axes
    return chosen


def local(spec: GraphSpec, parts: dict[int | None, int]) -> GraphSpec:
    """The graph on the shapes of one device."""
    of = rule(spec).of
    tensors = (
        replace(
            t, shape=tuple(s // parts.get(f, 1) for s, f in zip(t.shape, of[t.name], strict=True))
        )
        for t in spec.tensors
    )
    return intern(replace(spec, tensors=tuple(tensors), _cache={}))


@dataclass(frozen=True, eq=False)
class Work:
    """What each device does: the graph on local shapes, and for each result the axes over which it
    is added up, and the dimension that is scattered over them, if any."""

    spec: GraphSpec
    axes: dict[int | None, Axes]
    sums: list[tuple[Axes, int | None]]

    @classmethod
    def of(
        cls, spec: GraphSpec, given: Shardings, asked: Shardings, sizes: dict[str, int], sums: bool
    ) -> Work:
        axes = _axes(spec, given, asked, sizes, sums)
        own, found = local(spec, {f: _size(a, sizes) for f, a in axes.items()}), rule(spec)
        ways = []
        for i, name in enumerate(spec.outputs):
            over = tuple(a for f in sorted(found.summed[name]) for a in axes.get(f, ()))
            shape, factors = own.tensor(name).shape, found.of[name]
            scattered = (
                at
                for at, wanted in enumerate(asked[i] if asked else ())
                if wanted and wanted == over and not axes.get(factors[at])
                if shape[at] % _size(over, sizes) == 0
            )
            ways.append((over, next(scattered, None)))
        return cls(own, axes, ways)

    def run(self, name: str, *arrays: Any) -> list[Any]:
        from .primitive import cudnn_local_p

        results = cudnn_local_p.bind(*arrays, spec=self.spec, name=name)
        return [_summed(x, *how) for x, how in zip(results, self.sums, strict=True)]


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
    made: dict[Any, bytes] = field(default_factory=dict)
    """Modules by the mesh axes of factors: the layers of a model share them."""

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

    if left_to_xla(spec) or not is_known(spec):
        return lower_local(ctx, *operands, spec=spec, name=name)

    mesh = compat.partitioning_mesh(ctx)
    if compat.is_explicit(ctx, mesh):
        return compat.lower_explicit(ctx, mesh, functools.partial(_on_types, spec, name), operands)
    axes, target = compat.automatic_axes(ctx, mesh), TARGET.value
    where = mesh.axis_names, mesh.axis_sizes, axes.axis_names, _identity(ctx, name)
    said = repr((spec._key(), name, where, __version__, jax.__version__))
    key = f"{title(spec=spec, name=name)} {hashlib.sha256(said.encode()).hexdigest()}".encode()
    settings = compat.settings_of_thread()
    site = _Partitioned(spec, name, mesh, axes, compat.module_platforms(ctx), target, settings)
    site = _known.setdefault(key, site)
    if not compat.keep_alive(ctx, site):
        _exported[key] = site
    register()
    of = rule(spec)
    factors = [[of.of[t] for t in side] for side in (spec.inputs, spec.outputs)]
    produced = {f for side in factors[1] for f in side}
    reduced = {f for side in factors[0] for f in side if f is not None} - produced
    return compat.partitioned_call(ctx, PARTITIONED, key, operands, factors[0], factors[1], reduced)


def _on_types(spec: GraphSpec, name: str, mesh: Any, avals: Any, *arrays: Any) -> list[Any]:
    """The graph in a shard_map: on explicit axes the types say how arrays are sharded, so nothing
    is left for XLA to decide, and plans are made while lowering."""
    given = [_padded(a.sharding.spec, t) for a, t in zip(avals, spec.input_tensors, strict=True)]
    work = Work.of(spec, given, [], dict(mesh.shape), True)
    specs_in, specs_out = (
        [PartitionSpec(*(work.axes.get(f) or None for f in rule(spec).of[t])) for t in side]
        for side in (spec.inputs, spec.outputs)
    )
    arrays = tuple(
        jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, own))
        for x, own in zip(arrays, specs_in, strict=True)
    )
    body = functools.partial(work.run, name)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=tuple(specs_in), out_specs=specs_out, check_vma=False
    )
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
    spec, sizes = site.spec, dict(site.axes.shape)
    axes = _axes(spec, _decoded(site, shardings, spec.input_tensors), [], sizes, site.sums)
    return compat.packed_shardings(result, _encoded(site, spec.outputs, axes))


def _decoded(site: _Partitioned, shardings: Any, tensors: Iterable[Tensor]) -> Shardings:
    return [
        _padded(compat.mesh_axes(sharding, site.axes), tensor)
        for sharding, tensor in zip(shardings, tensors, strict=True)
    ]


def _encoded(site: _Partitioned, names: Iterable[str], axes: dict, also: Any = None) -> list[Any]:
    of = rule(site.spec).of
    also = also or {}
    specs = [
        [also.get((name, i)) or axes.get(f) or None for i, f in enumerate(of[name])]
        for name in names
    ]
    return [compat.hlo_sharding(site.axes, PartitionSpec(*spec), len(spec)) for spec in specs]


def _partition(shapes: Any, shardings: Any, result: Any, wanted: Any, key: bytes) -> Any:
    site = _known[key]
    spec = site.spec
    wanted = wanted.tuple_elements() if result.is_tuple() else [wanted]
    given = _decoded(site, shardings, spec.input_tensors)
    asked = _decoded(site, wanted, spec.output_tensors)
    work = Work.of(spec, given, asked, dict(site.axes.shape), site.sums)
    made = tuple(sorted(work.axes.items())), tuple(work.sums)
    if made not in site.made:
        avals = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in work.spec.input_tensors]
        body = functools.partial(work.run, site.name)
        # XLA calls this from a thread that may not be the user's.
        with TARGET.entered(site.target), site.settings():
            site.made[made] = compat.local_module(body, avals, site.mesh, *site.module)
    scattered = {
        (name, at): over
        for name, (over, at) in zip(spec.outputs, work.sums, strict=True)
        if at is not None
    }
    operands = _encoded(site, spec.inputs, work.axes)
    results = _encoded(site, spec.outputs, work.axes, scattered)
    return site.made[made], operands, compat.packed_shardings(result, results)


def _summed(x: Any, over: Axes, at: int | None) -> Any:
    if not over:
        return x
    if at is None:
        return jax.lax.psum(x, over)
    return jax.lax.psum_scatter(x, over, scatter_dimension=at, tiled=True)


def _size(axes: Axes, sizes: dict[str, int]) -> int:
    size = 1
    for axis in axes:
        size *= sizes.get(axis, 1)
    return size
