"""User contexts, and the GPU a lowering is for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import jax

from ..deviceless.profiles import Profile, get, names
from . import compat
from .cuda import CudaDevice
from .errors import GraphError, TargetError
from .spec import GraphSpec

# A user context is part of JAX's cache keys for tracing, lowering and compilation; a plain
# context manager is not, and would give the first target's program for the second.
_target = jax.make_user_context(None)


def target(gpu: str | Profile | None) -> Any:
    """Context manager and decorator: plan for this GPU model, whether or not one is here.

    Like all contexts of JAX it holds in the thread that entered it; enter it around the call or
    the lowering of a jitted function, not inside of one.

    Args:
        gpu: the name of a profile ("H200"), a ``Profile`` of your own, or None for the GPU of
            the compilation.

    Raises:
        TargetError: no profile of this name.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> with jc.target("H200"):                                           # doctest: +SKIP
        ...     lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    if not isinstance(gpu, (str, Profile, type(None))):
        raise TargetError(
            "jax_cudnn.target got no GPU",
            expected="a profile's name, a jax_cudnn.Profile, or None",
            got=f"{type(gpu).__name__}: {gpu!r}"[:200],
        )
    return _Target(get(gpu) if isinstance(gpu, str) else gpu)


class _Target(contextlib.ContextDecorator):
    """Enters a new user context each time, so that one object can be used again and nested."""

    def __init__(self, profile: Profile | None):
        self._profile, self._entered = profile, threading.local()

    def __enter__(self) -> None:
        self._entered.contexts = [*getattr(self._entered, "contexts", ()), _target(self._profile)]
        self._entered.contexts[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.contexts.pop().__exit__(*error)


def lowering_site(ctx: Any, spec: GraphSpec, name: str) -> Profile | CudaDevice:
    """The GPU a lowering rule is to plan for."""
    if not spec.is_static:
        raise GraphError(
            f"{name}: symbolic dimensions cannot be planned for CUDA",
            expected="static shapes",
            got=str(spec).splitlines()[0],
            why="a cuDNN plan is built for fixed shapes while lowering",
            fix="export one program for each shape, or export for platforms=('cpu',)",
        )
    return site(compat.lowering_devices(ctx), name)


def site(devices: Sequence[jax.Device], name: str) -> Profile | CudaDevice:  # pyright: ignore[reportInvalidTypeForm]
    """The user's target, else the one model of the CUDA devices among ``devices``."""
    if _target.value is not None:
        return _target.value
    devices = [device for device in devices if compat.is_cuda(device)]
    if not devices:
        raise TargetError(
            f"{name}: planning for CUDA needs to know the GPU",
            got="no CUDA device in this compilation and no jax_cudnn.target",
            why="a cuDNN plan is built for one GPU model while lowering",
            fix=_NAME_A_TARGET,
        )
    models = sorted({device.device_kind for device in devices})
    if len(models) > 1:
        raise TargetError(
            f"{name}: one program for different GPU models",
            expected="devices of one model",
            got=", ".join(models),
            why="a cuDNN plan runs only on the model it was built for",
            fix="compile one program for each model",
        )
    local = [d for d in devices if d.process_index == jax.process_index()]
    if not local:
        raise TargetError(
            f"{name}: none of the program's GPUs belongs to this process",
            got=", ".join(map(str, devices)),
            fix=_NAME_A_TARGET,
        )
    return CudaDevice(local[0].local_hardware_id)


_NAME_A_TARGET = (
    "with jax_cudnn.target(NAME): ...   NAME is one of "
    + ", ".join(names())
    + ", or a jax_cudnn.Profile of your own"
)
