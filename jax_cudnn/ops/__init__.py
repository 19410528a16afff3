"""The operations: functions in JAX's conventions, and graph nodes, a folder a family."""

from types import ModuleType as _ModuleType

from . import movement as movement
from . import pointwise as pointwise
from . import pooling as pooling
from . import reduction as reduction
from . import score_mods as score_mods
from . import slicing as slicing
from .attention.flax_hook import attention_fn as attention_fn
from .attention.fp8_functions import dot_product_attention_fp8 as dot_product_attention_fp8
from .attention.functions import dot_product_attention as dot_product_attention
from .attention.packed_functions import dot_product_attention_qkv as dot_product_attention_qkv
from .attention.packed_functions import packed_dot_product_attention as packed_dot_product_attention
from .attention.paged_functions import paged_dot_product_attention as paged_dot_product_attention
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

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in globals().items()
    if name == "score_mods" or not (name.startswith("_") or isinstance(value, _ModuleType))
)
__dir__ = __all__.copy  # dir() shows these alone

_FUNCTIONS = {
    "attention": "dot_product_attention",
    "convolution": "conv",
    "normalization": "layer_norm, rms_norm, group_norm or batch_norm",
}


def __getattr__(name: str) -> object:
    hint = f": did you mean {_FUNCTIONS[name]}?" if name in _FUNCTIONS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


# Internal modules are importable, but are not attributes where users look for functions.
for _name in [name for name, value in globals().items() if isinstance(value, _ModuleType)]:
    if _name not in __all__:
        del globals()[_name]
