"""Attention as users run it: with ``jc.ops``, by ``jax.nn``, in plain JAX, in PyTorch.

Operands have names: q, k and v are (B, S, N, H), with K heads of keys and values. A side may take
them in a form of its own, into which they are brought outside of the timing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import AttentionCase
from .dense import bias_case, causal_case, softcap_case, window_case
from .float8 import float8_case
from .ragged import packed_case, paged_case


def _drawn(count: int, least: int, most: int) -> list[int]:
    """Lengths, always the same."""
    return [int(n) for n in np.random.default_rng(0).integers(least, most + 1, count)]


def attention_cases() -> Iterator[AttentionCase]:
    """All cases, in the order of the table."""
    for size in (2048, 4096, 8192, 16384, 32768):
        yield causal_case(1, size, 64, 8, 128)
    yield causal_case(2, 8192, 32, 8, 128)
    yield packed_case(_drawn(8, 1, 4096), 4096, 32, 8, 128)
    yield window_case(16384, 64, 8, 128, 1024)
    yield bias_case(4096, 32, 8, 128)
    yield softcap_case(4096, 32, 8, 128, 50.0)
    for size in (4096, 8192, 16384):
        yield float8_case(size, 64, 8, 128)
    yield paged_case([8192] * 64, 128, 64, 64, 8)
    yield paged_case(_drawn(64, 4096, 8192), 128, 64, 64, 8)


def tiny_cases() -> Iterator[AttentionCase]:
    """The same with small shapes, for a CPU."""
    yield causal_case(2, 64, 4, 2, 16)
    yield packed_case([40, 64, 9], 64, 4, 2, 16)
    yield window_case(64, 4, 2, 16, 20)
    yield bias_case(64, 4, 2, 16)
    yield softcap_case(64, 4, 2, 16, 2.0)
    yield float8_case(64, 4, 2, 128)  # the size that cuDNN has a backward for
    yield paged_case([33, 64, 1], 4, 16, 4, 2)
