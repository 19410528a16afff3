"""The operations: functions in JAX's conventions, and graph nodes, a folder a family.

Both are loaded on first use: a function by its name, nodes with the first graph.
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from .._core.graph.node import FAMILIES as _FAMILIES
from .._core.graph.node import registry as _registry
from .._core.graph.record import VALUES as _VALUES

if TYPE_CHECKING:
    from . import score_mods as score_mods
    from .attention.flax_hook import attention_fn as attention_fn
    from .attention.fp8_functions import dot_product_attention_fp8 as dot_product_attention_fp8
    from .attention.functions import dot_product_attention as dot_product_attention
    from .attention.packed_functions import dot_product_attention_qkv as dot_product_attention_qkv
    from .attention.packed_functions import (
        packed_dot_product_attention as packed_dot_product_attention,
    )
    from .attention.paged_functions import (
        paged_dot_product_attention as paged_dot_product_attention,
    )
    from .attention.paged_functions import write_pages as write_pages
    from .bucketing import bucket as bucket
    from .bucketing import pad_to_bucket as pad_to_bucket
    from .convolution.functions import conv as conv
    from .convolution.functions import conv_transpose as conv_transpose
    from .cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .experts import expert_parallel as expert_parallel
    from .float8 import float8_matmul as float8_matmul
    from .hooks import conv_general_dilated as conv_general_dilated
    from .hooks import dot_general as dot_general
    from .matmul.functions import matmul as matmul
    from .mxfp8 import dequantize_mxfp8 as dequantize_mxfp8
    from .mxfp8 import quantize_mxfp8 as quantize_mxfp8
    from .normalization.batch_functions import batch_norm as batch_norm
    from .normalization.batch_functions import conv_batch_norm as conv_batch_norm
    from .normalization.channel_functions import group_norm as group_norm
    from .normalization.channel_functions import instance_norm as instance_norm
    from .normalization.row_functions import ada_layer_norm as ada_layer_norm
    from .normalization.row_functions import layer_norm as layer_norm
    from .normalization.row_functions import rms_norm as rms_norm
    from .quantized import quantize_weights as quantize_weights
    from .quantized import quantized_matmul as quantized_matmul
    from .ragged import ragged_dot as ragged_dot
    from .rotary import rotary_embedding as rotary_embedding
    from .rotary import rotary_frequencies as rotary_frequencies
    from .scaling import DelayedScaling as DelayedScaling

_FAMILIES += [
    f"{__name__}.{family}"
    for family in "movement pointwise pooling reduction slicing attention block_scaling matmul "
    "convolution normalization".split()
]
_VALUES |= {
    "ops.attention.fp8_paged": "PagedSdpaFp8",
    "ops.attention.fp8_tangent": "Bounds QuantizeGradient Quantize",
    "ops.attention.packed": "Packed",
    "ops.attention.paged": "Paged",
    "ops.attention.score_mod.value": "ScoreMod",
    "ops.attention.storage": "StoredSdpa InOneArray",
    "ops.attention.tangent": "SdpaTangent SinkGradient",
    "ops.matmul.nodes": "Contraction",
    "ops.normalization.base": "NormalizationTangent",
}
_HOMES = {
    "attention.flax_hook": "attention_fn",
    "attention.fp8_functions": "dot_product_attention_fp8",
    "attention.functions": "dot_product_attention",
    "attention.packed_functions": "dot_product_attention_qkv packed_dot_product_attention",
    "attention.paged_functions": "paged_dot_product_attention write_pages",
    "bucketing": "bucket pad_to_bucket",
    "convolution.functions": "conv conv_transpose",
    "cross_entropy": "linear_cross_entropy",
    "experts": "expert_parallel",
    "float8": "float8_matmul",
    "hooks": "conv_general_dilated dot_general",
    "matmul.functions": "matmul",
    "mxfp8": "dequantize_mxfp8 quantize_mxfp8",
    "normalization.batch_functions": "batch_norm conv_batch_norm",
    "normalization.channel_functions": "group_norm instance_norm",
    "normalization.row_functions": "ada_layer_norm layer_norm rms_norm",
    "quantized": "quantize_weights quantized_matmul",
    "ragged": "ragged_dot",
    "rotary": "rotary_embedding rotary_frequencies",
    "scaling": "DelayedScaling",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME, "score_mods"])  # pyright: ignore[reportUnsupportedDunderAll]
__dir__ = __all__.copy  # dir() shows these alone

_FUNCTIONS = {
    "attention": "dot_product_attention",
    "convolution": "conv",
    "normalization": "layer_norm, rms_norm, group_norm or batch_norm",
}


def __getattr__(name: str) -> object:
    if name == "score_mods":
        return _import_module(".score_mods", __name__)
    if name in _HOME:
        _registry()
        value = globals()[name] = getattr(_import_module(f".{_HOME[name]}", __name__), name)
        return value
    hint = f": there is {_FUNCTIONS[name]}" if name in _FUNCTIONS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


class _Ops(_ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Internal modules are importable, but are not attributes where users look for functions:
        ``matmul`` is one."""
        if not isinstance(value, _ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Ops
