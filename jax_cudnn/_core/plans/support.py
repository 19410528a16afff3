"""``plan``, ``plans`` and ``support``: how a function's graphs run, on present or absent GPUs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

import jax

from .. import compat, context
from ..auto import place
from ..compat import Device
from ..cuda import CudaDevice
from ..errors import GraphError, GraphTypeError, TargetError, UnsupportedGraphError, shown
from ..graph.spec import GraphSpec
from ..planning import frontend, planner, progress
from ..planning import unsupported as failure
from ..planning.deviceless import client, profiles
from ..planning.deviceless.profiles import Profile
from ..planning.planned_graph import XLA
from .collect import Graphs, advised, graphs, in_jaxpr, is_sharded, pieces
from .plan import Plan
from .support_value import DEVICE, MEASURED, PUBLIC, Support, SupportRow
from .table import ByGpu, Plans

# GPUs to plan for: by name, profiles or GPUs of this process; and as users give them.
Sites = dict[str, Profile | CudaDevice]
Gpus = str | Profile | Device | Iterable[str | Profile | Device]


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
    chosen = None if gpus is None else _sites(gpus)
    traced = _traced(fn, args, static, chosen)
    for found in traced.values():
        if len(found) > 1:
            raise GraphError(
                f"{getattr(fn, '__name__', 'the function')} contains {len(found)} graphs",
                expected="one graph",
                got=", ".join(found),
                fix="jax_cudnn.plans gives the plans of all",
            )
    made = _plans(traced, chosen)
    if isinstance(made, Plans):
        return next(iter(made.values()))
    return ByGpu({gpu: next(iter(plans.values())) for gpu, plans in made.items()})


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
    chosen = None if gpus is None else _sites(gpus)
    return _plans(_traced(fn, args, static, chosen), chosen)


def _traced(
    fn: Callable[..., Any], args: Any, static: Any, chosen: Sites | None
) -> dict[str, Graphs]:
    """The graphs of a function by GPU; it is traced for each, as it may depend on the target."""
    found: dict[str, Graphs] = {}
    for gpu, site in (chosen or {"": None}).items():
        target = context.target(site) if isinstance(site, Profile) else contextlib.nullcontext()
        with target:
            found[gpu] = graphs(fn, args, static)
    return found


def _plans(traced: Mapping[str, Graphs], chosen: Sites | None) -> Plans | dict[str, Plans]:
    """The plans of graphs by GPU, on chosen GPUs or the default one."""
    with progress.counted(sum(map(len, traced.values()))) as program:

        def planned(found: Graphs, site: Profile | CudaDevice | None) -> Plans:
            made = Plans()
            made.notes, made.calls = found.notes, found.calls
            for name, spec in found.items():
                with program.graph():
                    there = site or context.site(default_devices(), name)
                    made[name] = Plan.of(place(spec, there, name))
            return made

        if chosen is None:
            return planned(traced[""], None)
        return ByGpu({gpu: planned(traced[gpu], site) for gpu, site in chosen.items()})


def support(
    fn: Callable[..., Any],
    *args: Any,
    gpus: Gpus | None = None,
    **static: Any,
) -> Support:
    """Which graphs of a function are one cuDNN plan: the plan or the reason, per graph and GPU.

    A graph without a single plan still runs, except under ``implementation="cudnn"``: it is split
    between cuDNN and XLA; :func:`plan` shows how. Pooling always runs in XLA and splits a graph.

    Args:
        fn: a graph function, or any JAX function that contains graphs (under jit, scan, cond,
            shard_map, remat, custom derivatives).
        *args: arrays, or ``jax.ShapeDtypeStruct`` for shapes alone, in any pytree.
        gpus: as for :func:`plan`. None: all shipped profiles, and the GPUs of this process, for
            which their real handle plans.
        **static: keyword arguments of ``fn``.

    Returns:
        A :class:`Support`: true if every graph has a plan on every GPU; prints as a table.

    Raises:
        GraphError: the function contains no graph.
        TargetError: there is no profile with that name.
        LibraryError: cuDNN or its frontend is missing.
        PlanningError: planning failed for a reason that may pass.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> x = jax.ShapeDtypeStruct((64, 128), "bfloat16")
        >>> print(jc.support(relu, x, gpus=["A100", "H200"]))                 # doctest: +SKIP
    """
    chosen = _everywhere() if gpus is None else _sites(gpus)
    found = {gpu: pieces(named) for gpu, named in _traced(fn, args, static, chosen).items()}
    return survey(found, chosen)


def survey(
    found: Mapping[str, Mapping[str, GraphSpec]],
    gpus: Mapping[str, Profile | CudaDevice],
    workers: int = 1,
) -> Support:
    """Plans the graphs of each GPU; for profiles in up to ``workers`` processes at a time."""
    names = dict.fromkeys(name for named in found.values() for name in named)
    pairs = [(name, gpu) for name in names for gpu in gpus if name in found[gpu]]

    def row(pair: tuple[str, str]) -> SupportRow:
        name, gpu = pair
        return _row(name, found[gpu][name], gpu, gpus[gpu])

    with contextlib.ExitStack() as stack:
        stack.enter_context(client.workers(workers))
        versions = _versions(gpus)
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        try:
            rows = tuple(pool.map(row, pairs))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else all other graphs would be planned first
            raise
    return Support(rows, *versions)


def _row(name: str, spec: GraphSpec, gpu: str, site: Profile | CudaDevice) -> SupportRow:
    basis = DEVICE if isinstance(site, CudaDevice) else MEASURED if site.measured else PUBLIC
    if all(call.node.xla_only for call in spec.calls):
        return SupportRow(name, gpu, basis, True, XLA, 0, 0)
    try:
        made = planner.plan(spec, site, name)
    except UnsupportedGraphError as error:
        reasons = (*error.reasons.items(),)
        return SupportRow(name, gpu, basis, False, reason=error.reason, reasons=reasons)
    return SupportRow(name, gpu, basis, True, made.engine, made.workspace_bytes, made.candidates)


def _versions(gpus: Mapping[str, Profile | CudaDevice]) -> tuple[str, str]:
    if any(isinstance(site, Profile) for site in gpus.values()):
        worker = "jax_cudnn._core.planning.frontend:versions"
        return failure.twice(functools.partial(client.call, worker))
    return frontend.versions()


def shipped() -> Sites:
    """All shipped profiles."""
    return {profile.name: profile for profile in profiles.shipped()}


def _sites(gpus: Gpus) -> Sites:
    """The profiles and GPUs by name; TargetError for other values, and for two with one name."""
    if isinstance(gpus, (str, Profile, Device)) or not isinstance(gpus, Iterable):
        gpus = [gpus]
    found: Sites = {}
    for gpu in [*gpus] or [None]:
        if isinstance(gpu, (str, Profile)):
            site = profiles.get(gpu) if isinstance(gpu, str) else gpu
            name = site.name
        elif isinstance(gpu, Device) and compat.is_cuda(gpu) and gpu in jax.local_devices():
            name, site = _local(gpu)
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


def _local(device: Device) -> tuple[str, CudaDevice]:
    """A GPU of this process and the name of its model's profile."""
    names = {profile.device_name: profile.name for profile in profiles.shipped()}
    name = names.get(device.device_kind) or device.device_kind.removeprefix("NVIDIA ")
    return name, CudaDevice(device.local_hardware_id)


def _everywhere() -> Sites:
    """The shipped profiles, with the GPUs of this process in place of the profiles of their
    models."""
    local: Sites = {}
    for device in filter(compat.is_cuda, jax.local_devices()):
        local.setdefault(*_local(device))
    return {**shipped(), **local}


def default_devices() -> list[Device]:
    """``jax.default_device`` if it is an NVIDIA GPU, else all devices of this process."""
    default = compat.default_device()
    if isinstance(default, str):  # a platform's name
        default = next(iter(jax.local_devices(backend=default)), None)
    if default is not None and compat.is_cuda(default):
        return [default]
    return jax.local_devices()


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
