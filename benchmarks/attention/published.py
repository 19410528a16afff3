"""What NVIDIA says of its attention, in TFLOP/s."""

from __future__ import annotations

from collections.abc import Mapping

PUBLISHED = {
    "source": "NVIDIA, figures for H200 of the attention benchmark in github.com/NVIDIA/"
    "cudnn-frontend: batch 1, 64 and 8 heads, 128, causal"
}
_FIGURES = {
    ("bfloat16", 4096): {"forward": 591, "backward": 474},
    ("bfloat16", 16384): {"forward": 673, "backward": 579},
    ("float8_e4m3fn", 4096): {"forward": 854},
    ("float8_e4m3fn", 16384): {"forward": 1010},
    ("float8_e4m3fn", 32768): {"forward": 1042},
}


def published(dtype: str, size: int) -> Mapping[str, float]:
    """By "forward" and "backward", where there is a figure for these products and S."""
    return _FIGURES.get((dtype, size), {})
