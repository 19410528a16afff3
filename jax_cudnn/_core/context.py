"""The GPU that a program is lowered for: the user's target, or that of the compilation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from . import compat
from .compat import Device
from .cuda import CudaDevice
from .errors import TargetError, shown
from .planning.deviceless.profiles import Profile, get, names
from .user_context import TARGET


def target(gpu: str | Profile | None) -> Any:
    """Context manager and decorator: plan for this GPU model, with or without such a GPU.

    Like all JAX contexts it applies to the thread that entered it. Enter it around the call or
    the lowering of a jitted function, not inside the function.

    Args:
        gpu: the name of a profile ("H200"), your own :class:`Profile`, or None for the GPU of
            the compilation.

    Raises:
        TargetError: there is no profile with this name.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> with jc.target("H200"):                                           # doctest: +SKIP
        ...     lowered = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    if not isinstance(gpu, (str, Profile, type(None))):
        raise TargetError(
            "jax_cudnn.target got something that is not a GPU",
            expected="the name of a profile, a jax_cudnn.Profile, or None",
            got=shown(gpu),
        )
    return TARGET.entered(get(gpu) if isinstance(gpu, str) else gpu)


def targeted() -> bool:
    """Whether the user has set a target."""
    return TARGET.value is not None


def site(devices: Sequence[Device], name: str) -> Profile | CudaDevice:
    """The user's target, else the single model of the CUDA devices among ``devices``."""
    if TARGET.value is not None:
        return TARGET.value
    devices = [device for device in devices if compat.is_cuda(device)]
    if not devices:
        raise TargetError(
            f"{name}: the GPU to plan for is not known",
            got="no CUDA device in this compilation and no jax_cudnn.target",
            why="cuDNN plans are built for one GPU model during lowering",
            fix=_NAME_A_TARGET,
        )
    models = sorted({device.device_kind for device in devices})
    if len(models) > 1:
        raise TargetError(
            f"{name}: the program is for several GPU models",
            expected="devices of one model",
            got=", ".join(models),
            why="a cuDNN plan runs only on the GPU model for which it was built",
            fix="compile one program per model",
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
    + ', or your own jax_cudnn.Profile. jax_cudnn.plan and plans also take gpus=["H200"], '
    'explain gpu="H200", and its command --gpu H200'
)
