"""Whether cuDNN runs a region: decided while the function is traced, for the forward alone, and for
forward and backward together where the region is differentiated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.core
from jax.custom_derivatives import SymbolicZero

from .._core import auto, compat, context
from .._core.cuda import CudaDevice
from .._core.errors import JaxCudnnError
from .._core.graph.source import users_place
from .._core.graph.spec import GraphSpec
from .._core.planning import losses, placement
from .._core.planning.deviceless.profiles import Profile
from .._core.planning.planned_graph import XLA
from .._core.plans.collect import in_jaxpr
from .._core.plans.support import default_devices
from .._core.settings import settings
from .program import Program
from .region import Region

log = logging.getLogger("jax_cudnn")
Site = Profile | CudaDevice
NO_BACKWARD = (
    "cuDNN has no backward of attention in float32; cast queries, keys and values to bfloat16"
)
FAILED = "jax_cudnn.accelerate could not %s; the function runs as it is there. Please report this"


def site() -> Site | None:
    """The GPU that a function is traced for: the target, else JAX's default device; None where
    that is no NVIDIA GPU. GraphError where a setting of the environment is not valid."""
    settings()
    devices = [] if context.targeted() else default_devices()
    if not context.targeted() and not any(map(compat.is_cuda, devices)):
        return None
    return context.site(devices, "accelerate")


def decide(program: Program, where: Site) -> None:
    """Replaces the regions that cuDNN runs by functions that decide again when differentiated."""
    decided: dict[Hashable, Region] = {}
    for inner in program.programs:
        for region in inner.found:
            key = region.signature(users_place(compat.user_frames(region.first.written)))
            try:
                same = decided.setdefault(key, region)
            except TypeError:  # a key that is not hashable equals no other
                same = region
            if same is region:
                _decide(region, where)
            else:  # as of another layer
                region.outcome, region.gain = same.outcome, same.gain
                region.emit = region.emit if region.backward else same.emit
        inner.regions = [region for region in inner.found if not region.outcome]


def _decide(region: Region, where: Site) -> None:
    avals = _of_one_device(value.aval for value in region.reads)
    try:
        with compat.in_place_of(None, region.first.written):
            fused = jax.make_jaxpr(_whole(region))(*avals)
    except JaxCudnnError as error:
        region.outcome = error.summary
        return
    except Exception as error:
        log.warning(FAILED, f"build a graph of {region.kind} at {region.what}", exc_info=error)
        region.outcome = f"{type(error).__name__}: {error}"
        return
    region.outcome = refusal(fused, where)
    if region.outcome and region.backward is not None and region.what.startswith("float32"):
        region.outcome = NO_BACKWARD
    region.gain = "" if region.outcome else _gain(fused, where)
    if region.backward is None:
        region.emit = _either(region.original, region.emit, fused, where)


def _whole(region: Region) -> Callable[..., Any]:
    """A region, and its derivative where the program has it."""
    if region.backward is None:
        return region.emit

    def both(*arrays: Any) -> Any:
        out, gradients = region.differentiated(*arrays[:-1])
        return out, gradients(arrays[-1])

    return both


def _either(
    original: Callable[..., Any], emit: Callable[..., Any], jaxpr: Any, where: Site
) -> Callable[..., Any]:
    """The fused function, of which ``jaxpr`` is one device's, with the derivative of the original
    equations where cuDNN does not run forward and backward."""
    refused: dict[Hashable, bool] = {}  # for equal layers

    @jax.custom_jvp
    def accelerated(*operands: Any) -> Any:
        if any(compat.varying_axes(jax.typeof(x)) for x in operands):
            return emit(*operands)  # its equations are of the mesh around
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands)[0]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        fused = accelerated.fun
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        avals = _of_one_device(map(jax.typeof, primals))
        key = *moving, *avals
        if key not in refused:
            refused[key] = bool(refusal(_pair(fused, avals, moving), where))
        function = _of(original if refused[key] else fused, primals, moving)
        return jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])

    accelerated.defjvp(rule, symbolic_zeros=True)
    return accelerated


def _of_one_device(avals: Iterable[Any]) -> list[Any]:
    """Abstract values without the mesh axes over which they vary, inside of shard_map."""
    return [
        jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        if compat.varying_axes(aval)
        else aval
        for aval in avals
    ]


def _pair(function: Callable[..., Any], avals: Sequence[Any], moving: Sequence[int]) -> Any:
    """The jaxpr of a function and of its gradient."""

    def both(*operands: Any) -> Any:
        given = [operands[i] for i in moving]
        out, pull = jax.vjp(_of(function, operands, moving), *given)
        return out, pull(out)

    return jax.make_jaxpr(both)(*avals)


def _of(
    function: Callable[..., Any], operands: Sequence[Any], moving: Sequence[int]
) -> Callable[..., Any]:
    """The function of some of its operands alone."""

    def of(*given: Any) -> Any:
        filled = [*operands]
        for i, x in zip(moving, given, strict=True):
            filled[i] = x
        return function(*filled)

    return of


def refusal(jaxpr: Any, where: Site) -> str:
    """Why cuDNN does not run the products and normalizations of a jaxpr's graphs; else empty."""
    for name, spec in in_jaxpr(compat.live_program(jaxpr)[0]):
        why = _refused(spec, where, name)
        if why:
            return why
    return ""


def _gain(jaxpr: Any, where: Site) -> str:
    """What is known of XLA's time over cuDNN's for the one graph of a jaxpr, or nothing."""
    graphs = [*in_jaxpr(compat.live_program(jaxpr)[0])]
    if len(graphs) != 1:
        return ""
    ((name, spec),) = graphs
    ways = () if jax.process_count() > 1 else auto.place(spec, where, name).measured
    if ways:
        taken = next((way.seconds for way in ways if way.taken), None)
        xla = next((way.seconds for way in ways if way.what == XLA), None)
        return f"{xla / taken:.2f} measured" if taken and xla else ""
    near = losses.nearest(spec, placement.model(where)[1])
    return f"{near.ratio:.2f} predicted" if near is not None and near.near else ""


def _refused(spec: GraphSpec, where: Site, name: str) -> str:
    if spec.xla_only:
        return "; ".join(str(spec.xla_only).splitlines()) or "XLA runs it"
    try:
        # Processes of a job trace alike, and none may measure what the others do not.
        several = jax.process_count() > 1
        plan = placement.decide(spec, where, name) if several else None
        segments = plan or auto.place(spec, where, name).segments
    except JaxCudnnError as error:
        return error.summary
    for segment in segments:
        if segment.plan is None and any(call.node.anchor for call in segment.spec.calls):
            return segment.reason or "XLA is faster"
    return ""
