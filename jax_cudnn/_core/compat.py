"""The home of jax._src, with :mod:`.mesh_compat`, and of branches on versions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch, distributed, source_info_util
from jax._src import lib as _jaxlib
from jax._src import sharding_impls as _sharding_impls
from jax._src.core import Primitive  # jax.extend has it, too, at 18 ms of import time
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax.lax import _convert_element_type

from .errors import TargetError

JAXLIB = _jaxlib.version_str
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


def without_types(ctx: Any) -> Any:
    """The context of a lowering rule with abstract values that no mesh axis shards."""
    plain = [_core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return ctx.replace(avals_in=plain)


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


def in_order(x: jax.Array) -> jax.Array:
    """An array that lies in memory in the order of its dimensions, where XLA would choose another.
    Before JAX 0.11 it is as it was: its XLA gathers an array whose order is given."""
    from jax.experimental.layout import Layout, with_layout_constraint

    if jax.__version_info__ < (0, 11):
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def program(ctx: Any) -> weakref.ref[Any]:
    """An object that is the same for all lowering rules of one program, and no other's: an ``id``
    comes back, when the module is gone."""
    return weakref.ref(ctx.module_context.module)


def program_jaxpr() -> Any:
    """The jaxpr of the program that this thread lowers, which JAX gives no lowering rule: it is
    read from the caller that has it. None where there is no such caller."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "lower_jaxpr_to_module":
        frame = frame.f_back
    return getattr(frame and frame.f_locals.get("jaxpr"), "jaxpr", None)


def varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which an abstract value varies (shard_map's check_vma)."""
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", ()))


def is_cuda(device: Device) -> bool:
    """Whether a device is an NVIDIA GPU (ROCm devices have the platform "gpu", too)."""
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


def trace_context() -> Any:
    """A hashable value of all settings and contexts on which a trace depends."""
    return _config.trace_context()


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


def converted(x: Any, dtype: Any, weak_type: bool) -> Any:
    """An array of a dtype, which gives way to others if ``weak_type``."""
    return _convert_element_type(x, dtype, weak_type)


def in_place_of(named: Any, written: Any) -> Any:
    """A context in which new equations have the names of one (or no further ones), and the line of
    another."""
    stack = source_info_util.current_name_stack()
    if named is not None:
        stack += named.source_info.name_stack
    traceback = written.source_info.traceback
    return source_info_util.user_context(traceback, name_stack=stack)


def is_differentiated(equation: Any) -> bool:
    """Whether JAX's automatic differentiation made an equation."""
    stack = equation.source_info.name_stack.stack
    transforms = (x.name for x in stack if isinstance(x, source_info_util.Transform))
    return any(name in ("jvp", "transpose") for name in transforms)


def aval_of(x: Any) -> Any:
    """The abstract value of an array, or of ``jax.ShapeDtypeStruct``."""
    return _core.shaped_abstractify(x) if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)


def is_plain_call(params: Any) -> bool:
    """Whether a call of jit says nothing about where its arrays lie and what it may overwrite."""
    unsaid: Any = _sharding_impls.UnspecifiedValue  # pyright: ignore[reportPrivateImportUsage]
    places = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return not (
        any(not isinstance(place, unsaid) for place in places)
        or any(layout is not None for layout in layouts)
        or any(params.get("donated_invars", ()))
        or params.get("compiler_options_kvs")
        or params.get("keep_unused")
    )


_DERIVED = ("relu", "relu6", "_softmax", "logaddexp")
_OWN = f"{os.sep}jax{os.sep}_src{os.sep}"


def is_own_derivative(closed: Any) -> bool:
    """Whether a function with a derivative is one of JAX's own, whose derivative is that of its
    equations: by the code that made them."""
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            return is_own_derivative(equation.params["jaxpr"])
        traceback = equation.source_info.traceback
        for frame in traceback.frames if traceback else ():
            if _OWN not in frame.file_name:
                return False
            if frame.function_name in _DERIVED:
                return True
    return False


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


def user_frames(equation: Any = None) -> Iterator[tuple[str, int, str]]:
    """File, line and function of the frames that made an equation, the innermost first, without
    JAX's own; without one, those in whose place new equations are made (:func:`in_place_of`)."""
    info = source_info_util.current() if equation is None else equation.source_info
    for frame in source_info_util.user_frames(info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def matmul_precision() -> str | None:
    """``jax.default_matmul_precision`` as it holds in this thread."""
    return _config.default_matmul_precision.value


def is_unoptimized() -> bool:
    """Whether XLA leaves out most optimizations (``JAX_DISABLE_MOST_OPTIMIZATIONS``)."""
    return _compiler._DISABLE_MOST_OPTIMIZATIONS.value


def distributed_client() -> Any:
    """The client of the jax.distributed job this process belongs to, or None.

    Its ``key_value_*`` methods reach a store that all processes share. They release Python's GIL,
    and took and gave 64 MiB in one value.
    """
    return distributed.global_state.client


def partitioning_mesh(ctx: Any) -> Any:
    """The mesh over which XLA partitions what a lowering rule makes; None where nothing is."""
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, _sharding_impls.SPMDAxisContext):
        mesh = axis_context.mesh
        rest = {*mesh.axis_names} - axis_context.manual_axes
        return mesh if any(mesh.shape[axis] > 1 for axis in rest) else None
    devices = getattr(axis_context, "device_assignment", None)
    count = getattr(axis_context, "num_devices", None) or len(devices or ())
    if count <= 1:
        return None
    abstract = axis_context.abstract_mesh
    if abstract is None or abstract.empty:
        abstract = jax.sharding.AbstractMesh((count,), ("devices",))
    if not devices:
        return abstract
    placed = np.asarray(devices, dtype=object).reshape(abstract.axis_sizes)
    return jax.sharding.Mesh(placed, abstract.axis_names)


# JAX's cache keeps nothing. Switched off, it would be off for the whole process.
uncached = functools.partial(_config.persistent_cache_min_compile_time_secs, float("inf"))


_SETTINGS = (
    *("enable_x64", "default_matmul_precision", "threefry_partitionable", "default_prng_impl"),
    *("threefry_gpu_kernel_lowering", "random_seed_offset", "softmax_custom_jvp"),
    *("numpy_dtype_promotion", "numpy_rank_promotion"),
)
"""JAX's settings that change what a reference computes, or whether it can be traced."""


def settings_of_thread() -> tuple[Any, Any]:
    """What holds in this thread for the lowering of a reference, and a context manager that sets
    it in another."""
    values = {name: getattr(_config, name).value for name in _SETTINGS}

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                stack.enter_context(getattr(_config, name)(value))
            yield

    return values, entered
