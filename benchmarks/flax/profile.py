"""What a step spends its time on: its kernels, by JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

_STEPS, _SHOWN = 3, 30
_LIBRARIES = {
    "collectives": r"nccl",
    "attention": r"sdpa|fmha|flash|attention",
    "copies": r"memcpy|memset",
    "normalizations": r"norm|bn_[fb]w",
    "convolutions": r"conv|fprop|dgrad|wgrad|xmma.*nhwc|implicit",
    "products": r"gemm|nvjet|cutlass|cublas|splitk",
    "transposes": r"nchwtonhwc|nhwctonchw|transpose",
}
"""Kinds of kernels of NCCL, cuDNN and cuBLAS, by words in their names; the first that fits."""
_XLAS = {"XLA's products": r"gemm|dot", "XLA's transposes": r"transpose"}
_INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = (?:.*metadata=\{[^}]*?op_name="([^"]*)")?', re.MULTILINE
)


def profile(call: Callable[[], Any], program: str) -> dict[str, Any]:
    """Times in ms of one call on one GPU: of all kernels, of each kind, and of the longest kernels.
    ``program`` is the call's text in HLO, which says of what of the model's a fusion is."""
    jax.block_until_ready(call())
    times: dict[str, list[float]] = defaultdict(list)
    planes: set[str] = set()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of Python would be an event
    if jax.default_backend() != "cpu":
        options.host_tracer_level = 0  # kernels are on the device's planes: the host's are not read
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(_STEPS):
                last = call()
            jax.block_until_ready(last)
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane, name, nanoseconds in _events(path):
                times[name].append(nanoseconds / 1e6)
                planes.add(plane)
    count = _STEPS * len(planes)
    known = {
        _kernel(name): operation.removeprefix("jit(step)/")[-120:]
        for name, operation in _INSTRUCTION.findall(program)
    }
    kinds: dict[str, float] = defaultdict(float)
    for name, each in times.items():
        kinds[_kind(name, _kernel(name) in known)] += sum(each) / count
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))
    shown = [item for i, item in enumerate(longest) if i < _SHOWN or "nccl" in item[0].lower()]
    return {
        "busy_ms": round(sum(kinds.values()), 3),
        "kinds_ms": {n: round(ms, 3) for n, ms in sorted(kinds.items(), key=lambda i: -i[1])},
        "kernels": [
            {
                "kernel": name[:160],
                "calls": round(len(each) / count, 2),
                "ms": round(sum(each) / count, 4),
                "of": known.get(_kernel(name), ""),
            }
            for name, each in shown
        ],
    }


def _events(path: Path) -> Iterator[tuple[str, str, float]]:
    """The kernels of each GPU's streams in a profile; on a CPU the operations of XLA's programs."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            streams = on_gpu and line.name.startswith("Stream")
            if streams or (plane.name == "/host:CPU" and line.name.startswith("tf_XLA")):
                for event in line.events:
                    if streams or any(name == "hlo_op" for name, _ in event.stats):
                        yield plane.name, event.name, event.duration_ns


def _kernel(instruction: str) -> str:
    """The name that an instruction's kernel has."""
    return re.sub(r"[.-]", "_", instruction)


def _kind(kernel: str, xlas: bool) -> str:
    """What sort of work a kernel is, by its name; ``xlas`` says that XLA has made it."""
    words, other = (_XLAS, "XLA's fusions") if xlas else (_LIBRARIES, "others")
    name = kernel.lower()
    return next((kind for kind, fits in words.items() if re.search(fits, name)), other)
