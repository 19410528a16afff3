"""Flax NNX's layers on cuDNN: ``jax_cudnn.flax.Linear`` in the place of ``flax.nnx.Linear``."""

from . import requirement as requirement

# isort: split
from .accelerate import Report as Report
from .accelerate import accelerate as accelerate
from .attention import MultiHeadAttention as MultiHeadAttention
from .conv_norm_act import ConvNormAct as ConvNormAct
from .convolution import Conv as Conv
from .convolution import ConvTranspose as ConvTranspose
from .linear import Einsum as Einsum
from .linear import Linear as Linear
from .linear import LinearGeneral as LinearGeneral
from .mlp import GatedMLP as GatedMLP
from .normalization import BatchNorm as BatchNorm
from .normalization import GroupNorm as GroupNorm
from .normalization import InstanceNorm as InstanceNorm
from .normalization import LayerNorm as LayerNorm
from .normalization import RMSNorm as RMSNorm
from .paged_cache import PagedCache as PagedCache
