"""Times of a device alone: calls that are queued behind other work, while it is busy with that.

Where a kernel takes a few microseconds, calls one after the other measure the host that issues
them. So each measured batch stands behind work that keeps the device busy until the whole batch is
issued, and the time of that work alone, measured in the same round, is taken off.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_cudnn.commands import timing

from . import torch_graphs
from .measure import balanced

Call = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)

_FILLER = 2**30  # elements in float32: a millisecond to read
_AHEAD = 2  # calls that wait when the last one is issued
_MOST_FILLS = 8  # with the calls no more than the 32 executions that JAX lets be under way


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


@dataclass(frozen=True)
class Queued:
    """Times of one function.

    Attributes:
        seconds: of a call, one figure a round.
        issued: seconds that the host takes to issue a call.
        hidden: whether all calls were issued while the device was busy before them, or before it
            had come to the last two. If not, the times may hold some of the host's.
    """

    seconds: list[float]
    issued: float
    hidden: bool


def times(
    functions: Mapping[Key, Call],
    fillers: Mapping[Key, Call | None],
    *,
    calls: Mapping[Key, int],
    rounds: int,
    seconds: float,
    least: int = 7,
    warm: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Queued]:
    """The functions taking turns, in each round in another order, each ``calls`` times in a row
    behind its filler.

    Args:
        functions: what is timed, each result waited for by its ``block_until_ready``.
        fillers: by the same keys work of some hundred microseconds or more, that runs in order
            with the function; None where nothing hides the host.
        calls, rounds, seconds, least, warm, clock: as for
            :func:`jax_cudnn.commands.timing.interleaved`.
    """
    units: dict[int, float] = {}
    batches: dict[Any, _Batch] = {}
    for key, function in functions.items():
        filler = fillers[key]
        fills = 0
        if filler is not None:
            if id(filler) not in units:
                units[id(filler)] = _time_of(filler, clock)
            issue = _issue(function, calls[key], clock)
            fills = min(_MOST_FILLS, 1 + math.ceil(1.5 * issue / units[id(filler)]))
            batches.setdefault((id(filler), fills), _Batch(None, 0, filler, fills, clock))
        batches[key] = _Batch(function, calls[key], filler, fills, clock)
    found = timing.interleaved(
        batches,
        (),
        rounds=rounds,
        calls=1,
        seconds=seconds,
        least=least,
        warm=warm,
        clock=clock,
        order=balanced,
    )
    results = {}
    for key in functions:
        batch, whole = batches[key], found[key]
        alone = [0.0] * len(whole)
        if batch.fills:
            alone = found[id(batch.filler), batch.fills]
        each = [(a - b) / calls[key] for a, b in zip(whole, alone, strict=True)]
        issued = statistics.median(batch.issued)
        behind = statistics.median(whole) - issued >= _AHEAD * statistics.median(each)
        hidden = batch.fills > 0 and (issued < statistics.median(alone) or behind)
        results[key] = Queued(each, issued / calls[key], hidden)
    return results


@dataclass
class _Batch:
    """Some fillers and then some calls; returns the last results, to be waited for."""

    function: Call | None
    calls: int
    filler: Call | None
    fills: int
    clock: Callable[[], float]
    issued: list[float] = field(default_factory=list)

    def __call__(self) -> Any:
        began = self.clock()
        last: list[Any] = [None, None]
        for _ in range(self.fills):
            assert self.filler is not None
            last[0] = self.filler()
        for _ in range(self.calls):
            assert self.function is not None
            last[1] = self.function()
        self.issued.append(self.clock() - began)
        return last


def _issue(function: Call, calls: int, clock: Callable[[], float]) -> float:
    """Seconds in which the host issues the calls."""
    jax.block_until_ready(function())
    batch = _Batch(function, calls, None, 0, clock)
    jax.block_until_ready(batch())
    return batch.issued[0]


def _time_of(filler: Call, clock: Callable[[], float]) -> float:
    """Seconds of one filler, from several in a row."""
    jax.block_until_ready(filler())
    batch = _Batch(None, 0, filler, _MOST_FILLS // 2, clock)
    measured = []
    for _ in range(3):
        began = clock()
        jax.block_until_ready(batch())
        measured.append((clock() - began) / batch.fills)
    return min(measured)
