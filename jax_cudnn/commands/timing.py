"""Timing of jitted functions, and the environment that a result records."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._core.errors import LibraryError
from .._core.planning import frontend


def interleaved(
    functions: Mapping[Any, Callable[..., Any]],
    operands: Sequence[Any],
    *,
    rounds: int,
    calls: int,
    seconds: float = math.inf,
    least: int = 7,
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 3,
    mixed: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[Any, list[float]]:
    """Seconds per call of each function, one value per round; the functions take turns.

    After ``warm`` calls of each function, each round dispatches ``calls`` executions of each
    function and waits for the last. No round starts once ``seconds`` have passed, but at least
    ``least`` rounds run. With ``mixed``, the order differs from round to round: a function that
    runs after a long load finds the device hot and its clock low, and this should not always be the
    same function.
    """
    names = list(functions)
    for function in functions.values():
        for _ in range(warm):
            jax.block_until_ready(function(*operands))
    times: dict[Any, list[float]] = {name: [] for name in functions}
    began = clock()
    for number in range(rounds):
        if number >= least and clock() - began > seconds:
            break
        for position in balanced(len(names), number) if mixed else range(len(names)):
            name = names[position]
            function = functions[name]
            progress(f"timing {name}, round {number + 1} of {rounds} at most")
            start = clock()
            result = None
            for _ in range(calls):
                result = function(*operands)
            jax.block_until_ready(result)
            times[name].append((clock() - start) / calls)
    return times


def balanced(count: int, number: int) -> list[int]:
    """The order of ``count`` functions in round ``number``.

    In ``count`` rounds each function follows each other function once. An odd count takes one round
    more, in which some follow twice (E. J. Williams, "Experimental designs balanced for the
    estimation of residual effects of treatments", 1949).
    """
    size = count + count % 2
    apart = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(size)]  # 0, 1, -1, 2, -2, ...
    every = [(number + step) % size for step in apart]
    return [position for position in every if position < count]


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, minimum, maximum and quartiles, times ``scale``."""
    scaled = sorted(value * scale for value in values)
    q1, _, q3 = (
        statistics.quantiles(scaled, n=4, method="inclusive") if len(scaled) > 1 else scaled * 3
    )
    figures = {
        "median": statistics.median(scaled),
        "min": scaled[0],
        "max": scaled[-1],
        "q1": q1,
        "q3": q3,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def environment(*packages: str) -> dict[str, Any]:
    """Date, device and versions of a measurement, including those of ``packages``; ``sm_version``
    is None without a GPU."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)  # "9.0"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "sm_version": capability and int(capability.replace(".", "")),
        "platform": device.client.platform_version.splitlines()[0],
        "cudnn": _cudnn(),
        **{package: _version(package) for package in (*_PACKAGES, *packages)},
    }


_PACKAGES = ("jax-cudnn", "jax", "jaxlib", "nvidia-cudnn-frontend")


def _cudnn() -> str:
    try:
        return frontend.version_text(frontend.load().backend_version())
    except LibraryError:  # on a machine where only references run
        return "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
