"""The only home of jax._src and of branches on versions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch, distributed, source_info_util
from jax._src import sharding_impls as _sharding_impls
from jax._src.core import Primitive  # jax.extend has it, too, at 18 ms of import time
from jax._src.interpreters import partial_eval as _partial_eval

from .errors import TargetError

OLDEST_JAX = (0, 10, 2)

Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
"""What JAX declares as a variable, and pyright therefore takes for no type."""

ShardingTypeError = _core.ShardingTypeError
"""Raised where the sharding of a result is ambiguous on a mesh with explicit axes."""

dce_rules = _partial_eval.dce_rules
"""Primitive -> what is left of its equation when only some results are used."""


def new_primitive(name: str, title: Callable[..., str]) -> Primitive:
    """A primitive with several results that runs eagerly through jit, and whose lowering rules
    are run for each device assignment, which they can then see.

    ``title(**params)`` names an application of it where ``jax_debug_nans`` finds a NaN in a
    result: eagerly, and in the call that JAX repeats without jit.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def run(*operands: Any, **params: Any) -> Any:
        try:
            return dispatch.apply_primitive(primitive, *operands, **params)
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}: {title(**params)}") from None

    primitive.def_impl(run)
    # Without this one lowering serves all devices, and no rule knows for which it is.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


PLACING = ("reshard", "pvary", "pcast")
"""Operations of a jaxpr that change where an array lies in a mesh, and no value."""


def lowering_devices(ctx: Any) -> tuple[Device, ...]:
    """The devices of the compilation a lowering rule runs for (empty when there are none)."""
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, _sharding_impls.SPMDAxisContext):
        mesh = axis_context.mesh
        if isinstance(mesh, jax.sharding.Mesh):
            return tuple(mesh.devices.flat)
        if mesh.size != len(jax.devices()) and jax.process_count() > 1:
            raise TargetError(
                "this program's devices are not known",
                got=f"an abstract mesh of {mesh.size}, in a job of {len(jax.devices())} devices",
                why="the processes that run a program agree on its plans",
                fix="give shard_map the mesh, mesh=..., or enter it: with jax.set_mesh(mesh)",
            )
        return tuple(jax.devices())  # an abstract mesh names none: the backend's
    return tuple(getattr(axis_context, "device_assignment", None) or ())


@functools.cache
def checkify_nans(primitive: Primitive, title: Callable[..., str]) -> None:
    """Has ``jax.experimental.checkify`` look for NaN in a primitive's results (nan_checks and
    float_checks), and name the application by ``title(**params)``.

    What it cannot see, because a graph is one operation: a NaN inside that reaches no result, a
    division by zero inside (div_checks) whose result is not NaN, an index out of bounds inside
    (index_checks), and infinities, for which checkify has no check.

    To be called before an equation of the primitive is made, and not when the package is imported:
    checkify takes 2 ms to import.
    """
    from jax._src import checkify

    # What JAX passes before the operands; newer versions pass a context first.
    *state, _ = list(inspect.signature(checkify.check_nans).parameters)[1:]
    check_nans: Any = checkify.check_nans

    def rule(*given: Any, **params: Any) -> tuple[Any, list[Any]]:
        before, operands = given[: len(state)], given[len(state) :]
        results = primitive.bind(*operands, **params)
        floats = [x for x in results if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
        named = SimpleNamespace(name=f"{primitive.name}: {title(**params)}", multiple_results=True)
        return check_nans(named, *before, floats), results

    checkify.error_checks[primitive] = rule


def program(ctx: Any) -> int:
    """A number that is the same for all lowering rules of one program, while it is lowered."""
    return id(ctx.module_context.module)


def varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which an abstract value varies (shard_map's check_vma)."""
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", ()))


def is_cuda(device: Device) -> bool:
    """Whether a device is an NVIDIA GPU (ROCm devices have the platform "gpu", too)."""
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


def default_device() -> Any:
    """``jax.default_device`` as it holds in this thread: a device, a platform's name, or None."""
    return _config.default_device.value


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters (of jit, scan, cond, custom derivatives, ...)."""
    return _core.jaxprs_in_params(equation.params)


def without_dead_code(jaxpr: Any) -> Any:
    """A jaxpr without what none of its results needs."""
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def live_program(closed: Any) -> tuple[Any, list[Any]]:
    """The jaxpr of ``jax.make_jaxpr``, or one inside of it, without what no result needs, as jit
    compiles it, and its constants, which are its first inputs."""
    jaxpr = _partial_eval.convert_constvars_jaxpr(getattr(closed, "jaxpr", closed))
    return without_dead_code(jaxpr), list(getattr(closed, "consts", ()))


def scan_sizes(params: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def manual_axes(params: Any) -> tuple[str, ...]:
    """The mesh axes that a shard_map maps over, in the order of the mesh."""
    manual = params["newly_manual_axes"]
    return tuple(axis for axis in params["mesh"].axis_names if axis in manual)


def user_frames(equation: Any) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames that made an equation, the innermost first, without
    JAX's own."""
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def matmul_precision() -> str | None:
    """``jax.default_matmul_precision`` as it holds in this thread."""
    return _config.default_matmul_precision.value


def distributed_client() -> Any:
    """The client of the jax.distributed job this process belongs to, or None.

    Its ``key_value_*`` methods reach a store that all processes share. They release Python's GIL,
    and took and gave 64 MiB in one value.
    """
    return distributed.global_state.client


def is_sharded(x: Any, axis: int) -> bool:
    """Whether a mesh with explicit axes shards an array's axis, which JAX neither slices nor
    reshapes there."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] not in (None, ())
