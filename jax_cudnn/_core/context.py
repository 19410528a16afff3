"""The GPU that a lowering is for: the user's target, or the compilation's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..deviceless.profiles import Profile, get, names
from . import compat
from .compat import Device
from .cuda import CudaDevice
from .errors import TargetError
from .user_context import TARGET


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
    return TARGET.entered(get(gpu) if isinstance(gpu, str) else gpu)


def targeted() -> bool:
    """Whether the user has named a GPU."""
    return TARGET.value is not None


def site(devices: Sequence[Device], name: str) -> Profile | CudaDevice:
    """The user's target, else the one model of the CUDA devices among ``devices``."""
    if TARGET.value is not None:
        return TARGET.value
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
