"""The only home of jax._src and of branches on versions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch, distributed
from jax._src import sharding_impls as _sharding_impls
from jax._src.core import Primitive  # jax.extend has it, too, at 18 ms of import time
from jax._src.interpreters import partial_eval as _partial_eval

from .errors import TargetError

OLDEST_JAX = (0, 10, 2)

dce_rules = _partial_eval.dce_rules
"""Primitive -> what is left of its equation when only some results are used."""


def new_primitive(name: str) -> Primitive:
    """A primitive with several results that runs eagerly through jit, and whose lowering rules
    are run for each device assignment, which they can then see."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    # Without this one lowering serves all devices, and no rule knows for which it is.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    return primitive


def lowering_devices(ctx: Any) -> tuple[jax.Device, ...]:  # pyright: ignore[reportInvalidTypeForm]
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


def program(ctx: Any) -> int:
    """A number that is the same for all lowering rules of one program, while it is lowered."""
    return id(ctx.module_context.module)


def varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes over which an abstract value varies (shard_map's check_vma)."""
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", ()))


def is_cuda(device: jax.Device) -> bool:  # pyright: ignore[reportInvalidTypeForm]
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


def matmul_precision() -> str | None:
    """``jax.default_matmul_precision`` as it holds in this thread."""
    return _config.default_matmul_precision.value


def distributed_client() -> Any:
    """The client of the jax.distributed job this process belongs to, or None.

    Its ``key_value_*`` methods reach a store that all processes share. They release Python's GIL,
    and took and gave 64 MiB in one value.
    """
    return distributed.global_state.client
