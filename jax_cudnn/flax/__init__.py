"""Flax NNX layers that run on cuDNN: ``jax_cudnn.flax.Linear`` replaces ``flax.nnx.Linear``."""

from types import ModuleType as _ModuleType

from . import requirement as requirement

# isort: split
from .accelerate import Report as Report
from .accelerate import accelerate as accelerate
from .accelerate import report as report
from .attention import MultiHeadAttention as MultiHeadAttention
from .convolution import Conv as Conv
from .convolution import ConvNormAct as ConvNormAct
from .convolution import ConvTranspose as ConvTranspose
from .float8 import Float8Scaling as Float8Scaling
from .float8 import ScalingState as ScalingState
from .linear import Einsum as Einsum
from .linear import GatedMLP as GatedMLP
from .linear import Linear as Linear
from .linear import LinearGeneral as LinearGeneral
from .moe import MoE as MoE
from .normalization import BatchNorm as BatchNorm
from .normalization import GroupNorm as GroupNorm
from .normalization import InstanceNorm as InstanceNorm
from .normalization import LayerNorm as LayerNorm
from .normalization import RMSNorm as RMSNorm
from .paged_cache import PagedCache as PagedCache
from .quantized import QuantizedLinear as QuantizedLinear

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in globals().items()
    if not (name.startswith("_") or isinstance(value, _ModuleType))
)
__dir__ = __all__.copy  # dir() shows these alone


def __getattr__(name: str) -> object:
    from flax import nnx

    from .._core.errors import nearest

    hint = "did you mean Linear?" if name == "Dense" else nearest(name, __all__)
    if hasattr(nnx, name):
        hint = f"it is not replaced, use flax.nnx.{name}"
    hint = f": {hint}" if hint else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
