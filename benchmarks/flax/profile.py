"""What a step spends its time on: its kernels, by JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

_STEPS, _SHOWN = 3, 30
_LIBRARIES = {
    "attention": r"sdpa|fmha|flash|attention",
    "copies": r"memcpy|memset",
    "normalizations": r"norm|bn_[fb]w",
    "convolutions": r"conv|fprop|dgrad|wgrad|xmma.*nhwc|implicit",
    "products": r"gemm|nvjet|cutlass|cublas|splitk",
    "transposes": r"nchwtonhwc|nhwctonchw|transpose",
}
"""Kinds of kernels of cuDNN and cuBLAS, by words in their names; the first that fits."""
_XLAS = {"XLA's products": r"gemm|dot", "XLA's transposes": r"transpose"}
_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = (?:.*metadata=\{[^}]*?op_name="([^"]*)")?', re.MULTILINE
)

Event = tuple[str, float]
"""The name of a kernel, or of what XLA made of an operation, and its time in ns."""


def profile(call: Callable[[], Any], program: str | None) -> dict[str, Any]:
    """The kernels of a call that take longest; ``program`` is its text in HLO, which says of what
    of the model's a fusion is.

    Times are ms of one call: of all kernels, of each kind, and of each kernel.
    """
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_STEPS):
                last = call()
            jax.block_until_ready(last)
        events = [event for path in Path(folder).rglob("*.xplane.pb") for event in read(path)]
    return summed(events, _STEPS, operations(program or ""))


def read(path: Path) -> list[Event]:
    """The kernels of a GPU's streams in a profile; on a CPU the operations of XLA's programs."""
    found: list[Event] = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_gpu and line.name.startswith("Stream"):
                found += ((event.name, event.duration_ns) for event in line.events)
            elif plane.name == "/host:CPU" and line.name.startswith("tf_XLA"):
                found += (
                    (event.name, event.duration_ns)
                    for event in line.events
                    if any(name == "hlo_op" for name, _ in event.stats)
                )
    return found


def operations(program: str) -> dict[str, str]:
    """What of the traced function each instruction stands for, by the name that its kernel has."""
    found = _INSTRUCTION.findall(program)
    return {kernel_name(name): _short(operation) for name, operation in found}


def kernel_name(instruction: str) -> str:
    return re.sub(r"[.-]", "_", instruction)


def summed(events: Iterable[Event], steps: int, known: Mapping[str, str]) -> dict[str, Any]:
    """Times by kernel and by kind, of one step."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, nanoseconds in events:
        times[name].append(nanoseconds / 1e6)
    kinds: dict[str, float] = defaultdict(float)
    for name, each in times.items():
        kinds[kind(name, kernel_name(name) in known)] += sum(each) / steps
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_SHOWN]
    return {
        "busy_ms": round(sum(kinds.values()), 3),
        "kinds_ms": {n: round(ms, 3) for n, ms in sorted(kinds.items(), key=lambda i: -i[1])},
        "kernels": [
            {
                "kernel": name[:160],
                "calls": round(len(each) / steps, 2),
                "ms": round(sum(each) / steps, 4),
                "of": known.get(kernel_name(name), ""),
            }
            for name, each in longest
        ],
    }


def kind(kernel: str, xlas: bool) -> str:
    """What sort of work a kernel is, by its name; ``xlas`` says that XLA has made it."""
    words, other = (_XLAS, "XLA's fusions") if xlas else (_LIBRARIES, "others")
    name = kernel.lower()
    return next((kind for kind, fits in words.items() if re.search(fits, name)), other)


def _short(operation: str) -> str:
    """``jit(step)/jvp(Block)/dot_general`` without what all have."""
    return operation.removeprefix("jit(step)/")[-120:]
