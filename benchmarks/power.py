"""What the GPU's power limit does to a program's time: calls after pauses, calls at length, and
calls on equal numbers, which switch fewer bits. Its clocks are read, never set."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_QUERY = {
    "MHz": "clocks.sm",
    "W": "power.draw",
    "most_MHz": "clocks.max.sm",
    "most_W": "power.limit",
}
_BATCH = 0.008  # seconds of calls in a row behind a pause: less than the limit takes to act
_PAUSE, _PAUSES = 0.4, 8
_LONG = 2.5  # seconds of calls at length, of which the second half counts


def power(
    function: Callable[..., Any], operands: Any, flops: float, equal: bool
) -> dict[str, Any] | None:
    """Times of a function in us, with the clock in MHz and the power in W meanwhile; ``equal`` says
    whether to run it on ones, too. None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    call = jax.jit(function).lower(*operands).compile()
    found = {
        "rested": _rested(lambda: call(*operands), flops),
        "at_length": _at_length(lambda: call(*operands), flops),
    }
    if equal:
        ones = jax.tree.map(jnp.ones_like, operands)
        found["equal_numbers"] = _at_length(lambda: call(*ones), flops)
    return found


def told(found: dict[str, Any]) -> str:
    """The figures in words."""
    names = {"at_length": "calls at length", "rested": "after pauses", "equal_numbers": "on ones"}
    said = []
    for kind, name in names.items():
        if one := found.get(kind):
            text = f"{name} {one['us']:.4g} us ({one['tflops']:.3g} TFLOP/s)"
            if "W" in one:
                text += f" at {one['MHz']:.0f} of {one['most_MHz']:.0f} MHz"
                text += f" and {one['W']:.0f} of {one['most_W']:.0f} W"
            said.append(text)
    return ", ".join(said)


def _rested(call: Callable[[], Any], flops: float) -> dict[str, float]:
    jax.block_until_ready(call())
    count, times = max(1, int(_BATCH / _seconds(call, 1))), []
    for _ in range(_PAUSES):
        time.sleep(_PAUSE)
        jax.block_until_ready(call())
        times.append(_seconds(call, count))
    return _rate(statistics.median(times), flops)


def _at_length(call: Callable[[], Any], flops: float) -> dict[str, float]:
    jax.block_until_ready(call())
    count, times = max(1, int(4 * _BATCH / _seconds(call, 1))), []
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(_QUERY.values())}"]
    command += ["-lms", "50", "--format=csv,noheader,nounits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        end = time.perf_counter() + _LONG
        while time.perf_counter() < end:
            times.append(_seconds(call, count))
        process.terminate()
        text = process.communicate()[0]
    rows = [line.split(",") for line in text.splitlines()]
    samples = [[float(x) for x in row] for row in rows if len(row) == len(_QUERY)]
    late = zip(*samples[len(samples) // 2 :], strict=True)
    clock = dict(zip(_QUERY, map(statistics.median, late), strict=False))
    return _rate(statistics.median(times[len(times) // 2 :]), flops) | clock


def _seconds(call: Callable[[], Any], count: int) -> float:
    """Of a call, from several in a row."""
    began, last = time.perf_counter(), None
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / count


def _rate(seconds: float, flops: float) -> dict[str, float]:
    return {"us": round(seconds * 1e6, 2), "tflops": round(flops / seconds / 1e12, 1)}
