"""The graphs of a JAX function: the cuDNN primitives in its jaxpr."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from .. import compat
from ..errors import GraphError, GraphTypeError, shown
from ..graph.source import users_place
from ..graph.spec import GraphSpec
from ..graph.trace import GraphFunction
from ..planning.call_sets import CallSets, members
from ..planning.split import part
from ..primitive import Seen, calls_in, observer, title

# A graph's name, the graph, and how a mesh shards it -> where it is called -> how often.
_Found = dict[tuple[str, GraphSpec, str], Counter[str]]


class Graphs(dict[str, GraphSpec]):
    """Graphs by name. On a mesh these are the graphs of one device, and ``notes`` says of each how
    the mesh shards it. ``calls`` holds for each the lines of the user's code that call it, as
    "file:line", with how often a run of the program executes it there."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, str] = {}
        self.calls: dict[str, Counter[str]] = {}


def graphs(fn: Callable[..., Any], args: tuple[Any, ...], static: Mapping[str, Any]) -> Graphs:
    """The different graphs of ``fn(*args, **static)`` by name, in the order of the program.

    A graph is named after its graph function; where a function gives several (other shapes,
    other statics) the second is ``"name 2"``. Nothing is planned or run. Where arrays are sharded
    over a mesh, XLA compiles the function, which determines the graphs of one device.

    Raises:
        GraphTypeError: ``fn`` is not a function.
        GraphError: it contains no graph, or one with symbolic dimensions.
    """
    check_function(fn)
    if "gpu" in static:
        raise GraphTypeError(
            "there is no argument gpu: plans are of several GPUs",
            expected='gpus=["H200"], a list',
            got=f"gpu={shown(static['gpu'])}",
            fix="jax_cudnn.explain and the report of an accelerated function take one gpu",
        )
    found: _Found = {}
    with advised(args):
        if isinstance(fn, GraphFunction):
            code = getattr(fn.fn, "__code__", None)
            place = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
            found[fn.name, fn.trace(*args, **static)[1].spec, ""] = Counter([place])
            sharded = is_sharded(None, args)
        else:
            function = of_arrays(fn, args, static)
            jaxpr = jax.make_jaxpr(function.run)(*function.arrays).jaxpr
            jaxpr = compat.without_dead_code(jaxpr)  # as jit does
            for call, times in calls_in(jaxpr):
                graph = title(**call.params), call.params["spec"], ""
                found.setdefault(graph, Counter())[users_place(compat.user_frames(call))] += times
            sharded = bool(found) and is_sharded(jaxpr, args)
    if sharded:
        found = _local(fn, args, static, found) or found
    if not found:
        raise GraphError(
            f"{getattr(fn, '__name__', type(fn).__name__)} contains no cuDNN graph",
            expected="a function that calls jax_cudnn.ops, jax_cudnn.flax layers or functions "
            "decorated with @jax_cudnn.graph",
            got="a program of XLA's own operations",
            why="operations of jax.numpy and jax.nn run on cuDNN only in an accelerated function; "
            "XLA runs some of jax_cudnn.ops: ragged_dot, float8_matmul, quantized_matmul, "
            "linear_cross_entropy and rotary_embedding",
            fix="wrap it, jax_cudnn.accelerate(fn), or call jax_cudnn.ops.conv, matmul, "
            "layer_norm or dot_product_attention instead, or use the layers of jax_cudnn.flax. "
            'Of an accelerated function name the GPU, as gpu="H200", where this process has none; '
            "its report(*args, gpu=...) says what stays in XLA, and why",
        )
    named = Graphs()
    for (name, spec, note), calls in found.items():
        if not spec.is_static:
            raise GraphError(
                f"{name}: symbolic dimensions cannot be planned",
                expected="static shapes",
                got=str(spec).splitlines()[0],
                why="a cuDNN plan is built for fixed shapes",
            )
        unique = _unused(name, named)
        named[unique], named.calls[unique] = spec, calls
        if note:
            named.notes[unique] = note
    return named


def check_function(fn: Any) -> None:
    if not callable(fn):
        raise GraphTypeError(
            "expected a function",
            expected="a function of arrays, such as one decorated with @jax_cudnn.graph",
            got=shown(fn),
        )


def pieces(named: Mapping[str, GraphSpec]) -> dict[str, GraphSpec]:
    """The same with graphs cut around nodes that always run in XLA, such as pooling; where XLA runs
    all nodes of one, the graph itself, whose planning raises the reason."""
    found: dict[str, GraphSpec] = {}
    for name, spec in named.items():
        sets = CallSets(spec)
        groups = [g for g in sets.in_order([], sets.xla_only) if not g & sets.xla_only]
        for piece in [part(spec, members(group)) for group in groups] or [spec]:
            found[_unused(name, found)] = piece
    return found


@contextlib.contextmanager
def advised(args: tuple[Any, ...]) -> Iterator[None]:
    """Says what to do where tracing fails for shapes instead of arrays, or for a module of Flax
    that changes its own state."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise GraphError(
                "the module changes its state while it is traced",
                expected="a function that takes the module as an argument",
                why=str(error).partition(" (")[0],
                fix="jax_cudnn.plans(lambda model, *args: model(*args), model, *args)",
            ) from error
        shapes = [x for x in args if isinstance(x, str) or (isinstance(x, tuple) and x)]
        if shapes and not any(map(is_array, jax.tree.leaves(args))):
            raise GraphError(
                "no argument is an array",
                expected="arrays, or for shapes alone jax.ShapeDtypeStruct((8, 64), 'bfloat16')",
                got=shown(args),
                why=str(error).partition("\n")[0],
            ) from error
        raise


def _local(
    fn: Callable[..., Any], args: tuple[Any, ...], static: Mapping[str, Any], whole: _Found
) -> _Found:
    """The graphs of one device, with how a mesh shards them, as XLA compiles the function."""
    run, arrays, *_ = of_arrays(fn, args, static)
    seen: Seen = {}
    token = observer.set(seen)
    try:
        with compat.uncached():  # what is partitioned to look at it is not kept
            jax.jit(run).lower(*arrays).compile()
    finally:
        observer.reset(token)
    found: _Found = {}
    for (spec, name), graphs_of_device in seen.items():
        calls = whole.get((name + spec.origin.suffix, spec, ""), {})
        for each in dict.fromkeys(graphs_of_device):
            found.setdefault(each, Counter()).update(calls)
    return found


def is_sharded(jaxpr: Any, args: tuple[Any, ...]) -> bool:
    """Whether arguments or a program's shardings are over several devices."""
    leaves = jax.tree.leaves(args)
    given = any(map(_on_mesh, leaves))
    shardings = [x.sharding for x in leaves if hasattr(x, "sharding")]
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding) and any(s.spec)]
    if not given and any(isinstance(s.mesh, jax.sharding.AbstractMesh) for s in named):
        raise GraphError(
            "an argument is sharded over an abstract mesh",
            expected="a jax.sharding.Mesh: XLA partitions a program for devices",
            fix="call it inside of jax.set_mesh(mesh), with a mesh of devices; 8 host devices come "
            "from XLA_FLAGS=--xla_force_host_platform_device_count=8",
        )
    return given or (jaxpr is not None and _shards(jaxpr))


def _on_mesh(value: Any) -> bool:
    """Whether this is a sharding over several devices, or an array with one."""
    sharding = getattr(value, "sharding", value)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size <= 1:
        return False
    return isinstance(sharding.mesh, jax.sharding.Mesh) or not jax.sharding.get_mesh().empty


def _shards(jaxpr: Any) -> bool:
    """Whether jit's ``in_shardings`` or other shardings in a program are over several devices."""
    return any(
        any(map(_on_mesh, jax.tree.leaves([*equation.params.values()])))
        or any(map(_shards, compat.inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


class Call(NamedTuple):
    """A call as a function of its arrays; everything else stays the Python value it is. ``rest``:
    that, by its place among the leaves of the arguments, whose tree is ``structure``."""

    run: Callable[..., Any]
    arrays: list[Any]
    structure: Any
    rest: dict[int, Any]


def of_arrays(fn: Callable[..., Any], args: tuple[Any, ...], static: Mapping[str, Any]) -> Call:
    leaves, structure = jax.tree.flatten((args, dict(static)))
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    @functools.wraps(fn, updated=())  # errors of JAX name it, and its line
    def run(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            filled[i] = array
        positional, keywords = jax.tree.unflatten(structure, filled)
        return fn(*positional, **keywords)

    rest = {i: leaf for i, leaf in enumerate(leaves) if not is_array(leaf)}
    return Call(run, [leaves[i] for i in positions], structure, rest)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy, but not of strings, objects or dates."""
    kind = getattr(getattr(leaf, "dtype", "O"), "kind", "")
    return hasattr(leaf, "shape") and kind not in ("O", "S", "U", "M", "m")


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    numbered = (f"{name} {number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
