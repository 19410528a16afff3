"""Examples of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Example(NamedTuple):
    """Shapes and dtypes that tests, benchmarks and the support table share.

    ``dtypes`` names the ports whose dtype is not ``dtype``; for a variadic port ``inputs`` holds
    a list of shapes, for a number (an epsilon) that. ``out`` is the dtype of the result, where it
    is not the inferred one.
    ``positive`` names ports whose operands are at least 0.25 (for logarithms and divisors).
    ``alone`` is False if cuDNN has no engine for this node alone, only together with others.
    """

    inputs: Mapping[str, Any]
    dtype: str = "bfloat16"
    attributes: Mapping[str, Any] = {}
    dtypes: Mapping[str, str] = {}
    out: str | None = None
    alone: bool = True
    positive: tuple[str, ...] = ()
