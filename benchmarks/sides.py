"""What benches of several sides share: what keeps a GPU busy, who ran, where it was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core import compat
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.planning import losses
from jax_cudnn.commands import programs, timing

from . import torch_graphs
from .compiling import told

WHOLE, OURS, REFERENCE = "cuDNN", "jax_cudnn", "reference"
"""Ours with ``implementation="cudnn"``, by default, and with ``implementation="xla"``, to which
the default may leave it."""
FORWARD, TRAINING, BACKWARD = "forward", "forward that keeps residuals", "backward"
TIMED, WRONG, FAILED = "timed", "WRONG", "failed"

_FILLER = 2**30  # elements in float32: a millisecond to read

Call = Callable[[], Any]


@dataclass(frozen=True)
class Fillers:
    """What keeps the GPU busy while calls are issued, of JAX and of PyTorch; None on a CPU."""

    jax: Call | None = None
    torch: Call | None = None

    @classmethod
    def made(cls) -> Fillers:
        if all(device.platform == "cpu" for device in jnp.zeros(()).devices()):
            return cls()
        x = jax.block_until_ready(jax.lax.iota(jnp.float32, _FILLER))
        read = partial(jax.jit(jnp.sum), x)
        try:
            return cls(read, torch_graphs.total(x))
        except Exception:  # without PyTorch, or where it has no such GPU: its sides say why
            return cls(read)


def environment(*packages: str) -> dict[str, Any]:
    """Where this was measured, with the versions of PyTorch, of the driver and of more packages."""
    return timing.environment("torch", "triton", *packages) | {"driver": driver()}


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        found = None
    return found[1] if found else "none"


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of several sets of operands, one after the other; all results."""
    return lambda *sets: [function(*given) for given in sets]


def by_name(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda operands: function(**operands)


def plans(function: Callable[..., Any], operands: tuple[Any, ...]) -> dict[str, Any]:
    """How many graphs a program holds; on a GPU how many segments of them are cuDNN's, on which
    engines, how many are XLA's, and why."""
    try:
        live, _ = compat.live_program(jax.make_jaxpr(function)(*operands))
        found = programs.of_jaxpr(live)
    except Exception as error:
        return {"reason": told(error)}
    held: dict[str, Any] = {"graphs": len(found)}
    try:
        cut = programs.placed(found)
    except JaxCudnnError as error:  # references run, or nothing does
        return held | {"reason": told(error)}
    segments = [segment for plan in cut for segment in plan.segments]
    engines = [segment.engine for segment in segments if segment.plan is not None]
    reasons = [s.reason for s in segments if s.plan is None and s.reason]
    held |= {"cuDNN": len(engines), "XLA": len(segments) - len(engines), "engines": engines}
    held["patterns"] = [losses.pattern(s.spec) for s in segments if s.plan is not None]
    return held | ({"why_xla": " ".join(reasons[0].split())[:300]} if reasons else {})


def fastest(us: Mapping[str, float], names: Iterable[str]) -> str | None:
    return min((name for name in names if name in us), key=us.__getitem__, default=None)
