"""Timing of jitted functions, and what a result must say about where it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core import frontend


def interleaved(
    functions: dict[str, Callable[..., Any]], operands: Sequence[Any], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds a call of each function, one figure a round, the functions taking turns.

    Each round dispatches ``calls`` executions and waits for the last, after a warm-up.
    """
    for function in functions.values():
        for _ in range(3):
            jax.block_until_ready(function(*operands))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            result = None
            for _ in range(calls):
                result = function(*operands)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, smallest and largest, times ``scale``."""
    scaled = sorted(value * scale for value in values)
    return {
        "median": round(statistics.median(scaled), 3),
        "min": round(scaled[0], 3),
        "max": round(scaled[-1], 3),
    }


def environment() -> dict[str, Any]:
    """Date, device and versions of a measurement."""
    cudnn = frontend.load()
    device = jax.devices()[0]
    packages = ("jax-cudnn", "jax", "jaxlib", "nvidia-cudnn-frontend")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        "cudnn": frontend.version_text(cudnn.backend_version()),
        **{package: importlib.metadata.version(package) for package in packages},
    }
