"""``plan``, ``plans`` and ``warmup``: how a function's graphs run, on present or absent GPUs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import jax

from .. import compat, context
from ..auto import plan_graph
from ..compat import Device
from ..cuda import CudaDevice
from ..errors import GraphError, GraphTypeError, TargetError, shown
from ..graph.spec import GraphSpec
from ..planning import progress
from ..planning.cost import cost, roofline
from ..planning.deviceless import profiles
from ..planning.deviceless.profiles import Profile
from ..planning.planner import Site
from ..primitive import in_jaxpr
from ..text import aligned, shape
from .collect import Graphs, advised, graphs, is_sharded
from .plan import Plan

# GPUs to plan for: by name, profiles or GPUs of this process; and as users give them.
Sites = dict[str, Site]
Gpus = str | Profile | Device | Iterable[str | Profile | Device]
_DEFAULT = ""
_HEADER = ("graph", "operands", "runs on", "MB", "roofline us")


@overload
def plan(fn: Callable[..., Any], *args: Any, gpus: None = None, **static: Any) -> Plan: ...
@overload
def plan(fn: Callable[..., Any], *args: Any, gpus: Gpus, **static: Any) -> dict[str, Plan]: ...
def plan(
    fn: Callable[..., Any],
    *args: Any,
    gpus: Gpus | None = None,
    **static: Any,
) -> Plan | dict[str, Plan]:
    """How a function's graph runs on a GPU for these arguments: cuDNN's plans and XLA's parts.

    Args:
        fn: a graph function, or any JAX function that contains one distinct graph.
        *args: arrays, or ``jax.ShapeDtypeStruct`` for shapes alone, in any pytree.
        gpus: names of profiles ("H200"), profiles (no GPU is needed for these), or devices of this
            process; one or several. None: ``jax_cudnn.target``, else ``jax.default_device`` if it
            is an NVIDIA GPU, else this process's GPU.
        **static: keyword arguments of ``fn``.

    Returns:
        A :class:`Plan` (``segments``, ``engine``, ``workspace_bytes``, ``explain()``); with
        ``gpus`` a dictionary of plans by the name of the GPU.

    Raises:
        UnsupportedGraphError: under ``implementation="cudnn"``, when cuDNN has no engine for the
            whole graph on that GPU.
        GraphError: the function contains several graphs, or none.
        TargetError: there is no GPU and no target, or no profile of that name.

    In a ``jax.distributed`` job this call plans for its own process only; a program that runs on
    several processes uses the plans of the process with the lowest index.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> x = jax.ShapeDtypeStruct((64, 128), "bfloat16")
        >>> plans = jc.plan(relu, x, gpus=["A100", "H200"])                   # doctest: +SKIP
    """
    sites = {_DEFAULT: None} if gpus is None else sites_of(gpus)
    traced = traced_on(fn, args, static, sites)
    for found in traced.values():
        if len(found) > 1:
            raise GraphError(
                f"{getattr(fn, '__name__', 'the function')} contains {len(found)} graphs",
                expected="one graph",
                got=", ".join(found),
                fix="jax_cudnn.plans gives the plans of all",
            )
    made = ByGpu({gpu: next(iter(plans.values())) for gpu, plans in _plans(traced, sites).items()})
    return made[_DEFAULT] if gpus is None else made


@overload
def plans(fn: Callable[..., Any], *args: Any, gpus: None = None, **static: Any) -> Plans: ...
@overload
def plans(fn: Callable[..., Any], *args: Any, gpus: Gpus, **static: Any) -> dict[str, Plans]: ...
def plans(
    fn: Callable[..., Any],
    *args: Any,
    gpus: Gpus | None = None,
    **static: Any,
) -> Plans | dict[str, Plans]:
    """How all graphs of a function run on a GPU, such as those of a gradient.

    Args:
        fn, *args, gpus, **static: as for :func:`plan`; ``fn`` may contain several graphs.

    Returns:
        A dictionary with the :class:`Plan` of each graph by its name, in program order; it prints
        as a table of operands, bytes and roofline times. Derived graphs are named after their
        source, as in "conv (backward)"; the second graph of one name is "conv 2". With ``gpus``
        a dictionary of these by the name of the GPU.

    Raises: as :func:`plan`, except for several graphs.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> x = jax.ShapeDtypeStruct((64, 128), "float32")
        >>> with jc.target("H200"):
        ...     print(jc.plans(jax.grad(lambda x: relu(x).sum()), x))          # doctest: +SKIP
    """
    sites = {_DEFAULT: None} if gpus is None else sites_of(gpus)
    made = _plans(traced_on(fn, args, static, sites), sites)
    return made[_DEFAULT] if gpus is None else made


def traced_on(
    fn: Callable[..., Any], args: Any, static: Any, sites: Mapping[str, Site | None]
) -> dict[str, Graphs]:
    """The graphs of a function by GPU; it is traced for each, as it may depend on the target."""
    found: dict[str, Graphs] = {}
    for gpu, site in sites.items():
        target = context.target(site) if isinstance(site, Profile) else contextlib.nullcontext()
        with target:
            found[gpu] = graphs(fn, args, static)
    return found


def _plans(traced: Mapping[str, Graphs], sites: Mapping[str, Site | None]) -> ByGpu:
    """The plans of graphs by GPU."""
    made = ByGpu()
    with progress.counted(sum(map(len, traced.values()))) as program:
        for gpu, found in traced.items():
            plans = made[gpu] = Plans()
            plans.notes, plans.calls = found.notes, found.calls
            for name, spec in found.items():
                site = sites[gpu] or context.site(default_devices(), name)
                plans[name] = Plan.of(plan_graph(spec, site, name))
                program.done += 1
    return made


def warmup(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Plan every graph of a program ahead of its first call, also for other processes.

    The program is traced and lowered, but not compiled or run; its plans stay in memory and in
    the plan cache. Graphs inside a sharded program are planned for the shapes of one device; where
    arrays are sharded, XLA compiles it for their mesh to find these.

    Args:
        fn: a function of arrays, jitted or not (static arguments and shardings are kept).
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` for shapes alone.

    Returns:
        The lowered program, whose ``.compile()`` continues on a machine with that GPU. It is
        lowered for the GPU of ``jax_cudnn.target`` if set, else for the devices of ``fn``. Without
        a GPU and a target nothing is planned, with a warning.

    Raises:
        JaxCudnnError: planning failed; tracing and lowering raise their own errors.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> with jc.target("H200"):                                           # doctest: +SKIP
        ...     lowered = jc.warmup(relu, jax.ShapeDtypeStruct((64, 128), "bfloat16"))
    """
    if not callable(fn):
        raise GraphTypeError(
            "warmup takes a function",
            expected="a function of arrays, or a jitted one",
            got=shown(fn),
        )
    jitted: Any = fn if hasattr(fn, "trace") and hasattr(fn, "lower") else jax.jit(fn)
    with advised(args):
        traced = jitted.trace(*args, **kwargs)
    graphs = {*in_jaxpr(traced.jaxpr.jaxpr)}
    nothing = not context.targeted() and not any(map(compat.is_cuda, jax.local_devices()))
    if graphs and nothing:
        warnings.warn(
            "jax_cudnn.warmup plans nothing: there is no GPU. Name one: with "
            'jax_cudnn.target("H200"): ...',
            stacklevel=2,
        )
    elif graphs and is_sharded(traced.jaxpr.jaxpr, args):  # XLA says what a device computes
        plans(fn, *args, **kwargs)
    with progress.counted(len(graphs)):
        return traced.lower(lowering_platforms=("cuda",)) if context.targeted() else traced.lower()


# -- GPUs ----------------------------------------------------------------------------------------


def sites_of(gpus: Gpus) -> Sites:
    """The profiles and GPUs by name; TargetError for other values, and for two with one name."""
    if isinstance(gpus, (str, Profile, Device)) or not isinstance(gpus, Iterable):
        gpus = [gpus]
    found: Sites = {}
    for gpu in [*gpus] or [None]:
        if isinstance(gpu, (str, Profile)):
            site = profiles.get(gpu) if isinstance(gpu, str) else gpu
            name = site.name
        elif isinstance(gpu, Device) and compat.is_cuda(gpu) and gpu in jax.local_devices():
            name, site = local(gpu)
        else:
            raise TargetError(
                "gpus names no GPU",
                expected='profiles, their names, or GPUs of this process: gpus=["H200", "A100"]',
                got=shown(gpus),
                why=f"shipped profiles: {', '.join(profiles.names())}",
            )
        kept = found.setdefault(name, site)
        if kept != site and Profile in (type(kept), type(site)):  # else GPUs of one model
            raise TargetError(
                f"two different GPUs are called {name!r}",
                fix="rename a profile: Profile.from_json(source, name=...)",
            )
    return found


def local(device: Device) -> tuple[str, CudaDevice]:
    """A GPU of this process and the name of its model's profile."""
    names = {profile.device_name: profile.name for profile in profiles.shipped()}
    name = names.get(device.device_kind) or device.device_kind.removeprefix("NVIDIA ")
    return name, CudaDevice(device.local_hardware_id)


def default_devices() -> list[Device]:
    """``jax.default_device`` if it is an NVIDIA GPU, else all devices of this process."""
    default = compat.default_device()
    if isinstance(default, str):  # a platform's name
        default = next(iter(jax.local_devices(backend=default)), None)
    if default is not None and compat.is_cuda(default):
        return [default]
    return jax.local_devices()


# -- plans by name ------------------------------------------------------------------------------


class Explanations(dict[str, Any]):
    """Explanations by the names of their graphs or GPUs; prints one below the other, each with its
    note on the mesh, if it has one."""

    notes: Mapping[str, str] = MappingProxyType({})

    def __str__(self) -> str:
        pairs = ((value, self.notes.get(name)) for name, value in self.items())
        return "\n".join(
            f"{value}\n  on the mesh: {note}" if note else str(value) for value, note in pairs
        )


class Plans(dict[str, Plan]):
    """The plans of a function's graphs by name; prints as a table.

    ``MB`` counts each operand and result of a cuDNN plan or XLA part once. ``roofline us`` is the
    least time on the GPU, of these bytes or the arithmetic; where lengths, packing, pages or block
    masks decide what is read, of the results alone. Equal graphs share a row. On a mesh plans are
    those of one device, and ``notes`` says of each graph how it is sharded, and what is gathered.
    ``calls`` holds for each graph the lines that call it, and how often.
    """

    notes: Mapping[str, str] = MappingProxyType({})
    calls: Mapping[str, Mapping[str, int]] = MappingProxyType({})

    def __missing__(self, name: str) -> Any:
        raise KeyError(_unknown("graph", name, self))

    def explain(self) -> Explanations:
        """The explanations of all plans, by name; prints one below the other."""
        made = Explanations({name: plan.explain() for name, plan in self.items()})
        made.notes = self.notes
        return made

    def __str__(self) -> str:
        rows = aligned([_HEADER, *self._cells()], 3)
        notes = (f"{name} on the mesh: {note}" for name, note in self.notes.items())
        return "\n".join((*rows, *notes))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        site = next((plan.site for plan in self.values() if plan.site is not None), None)
        every: list[GraphSpec] = []
        for name, plan in self.items():
            specs = [segment.spec for segment in plan.segments]
            yield (
                name,
                ", ".join(map(shape, plan.spec.input_tensors)),
                where(plan),
                *_figures(specs, site),
            )
            every += specs
        fused = sum(len(plan.execution_plans) for plan in self.values())
        yield "total", "", f"{fused} cuDNN, {len(every) - fused} XLA", *_figures(every, site)


class ByGpu(dict[str, Any]):
    """Values by the names of GPUs, found under each spelling that ``jax_cudnn.target`` takes."""

    def __missing__(self, gpu: str) -> Any:
        with contextlib.suppress(TargetError):
            if (name := profiles.get(gpu).name) in self:
                return self[name]
        raise KeyError(_unknown("GPU", gpu, self))

    def explain(self) -> Explanations:
        """The explanations for all GPUs, by name; prints one below the other."""
        return Explanations({gpu: value.explain() for gpu, value in self.items()})

    def __str__(self) -> str:
        return "\n\n".join(f"{gpu}\n{value}" for gpu, value in self.items())


def _unknown(kind: str, name: Any, there: Iterable[str]) -> str:
    return f"{name!r} is not the name of a {kind} here; there are {', '.join(map(repr, there))}"


def where(plan: Plan) -> str:
    """Who runs the segments of a plan: "2 cuDNN + XLA"."""
    fused = len(plan.execution_plans)
    others = len(plan.segments) - fused
    cudnn = "" if not fused else "cuDNN" if fused == 1 else f"{fused} cuDNN"
    xla = "" if not others else "XLA" if others == 1 else f"{others} XLA"
    return " + ".join(filter(None, (cudnn, xla)))


def _figures(specs: Sequence[GraphSpec], site: Site | None) -> tuple[str, str]:
    seconds = [roofline(spec, site) for spec in specs]
    known = [s * 1e6 for s in seconds if s is not None]
    moved = sum(cost(spec).bytes for spec in specs) / 1e6
    return f"{moved:,.2f}", f"{sum(known):,.1f}" if len(known) == len(specs) else "unknown"
