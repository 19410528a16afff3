"""Runs several ways to compute a graph on a GPU: which are right, and how long each takes."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import agreement, compat, execution
from .compat import Device
from .cuda import CudaDevice
from .graph.layout import layout
from .graph.reference import evaluate
from .graph.spec import GraphSpec
from .operands import operands
from .planning import unsupported as failure
from .planning.cost import roofline
from .planning.planned_graph import PlannedGraph, Segments

# One program runs a way so often in a row, and a round runs the program so often, that a round
# takes about this long: starting a program and waiting for it then counts little.
_PROGRAM, _ROUND = 150e-6, 4e-3  # seconds
_MOST_RUNS, _MOST_CALLS = 8, 30
_ROUNDS = 7
_SHORTEST = 1e-6  # seconds that any program takes: less is noise
_SHARE = 0.1  # of the free memory of the GPU
_THREADS = 4  # that compile


@dataclass(frozen=True)
class Trial:
    """What became of a way: the seconds of one run, or why there are none; whether it is ``wrong``
    in its results, or fails when it runs."""

    seconds: float = math.inf
    note: str = ""
    wrong: bool = False


@dataclass
class _Program:
    """A function under jit, which finds what was compiled of it and costs the host least a call."""

    call: Any
    lowered: Any
    compiled: Any = None
    memory: int = 0  # bytes beside the operands

    @classmethod
    def of(cls, function: Callable[..., Any], *operands: Any) -> _Program:
        call = jax.jit(function)
        return cls(call, call.lower(*operands))

    def compile(self, options: Any = None) -> _Program:
        with compat.uncached():  # nothing of this belongs into the user's cache
            self.compiled = self.lowered.compile(options)
        if found := self.compiled.memory_analysis():
            self.memory = found.temp_size_in_bytes + found.output_size_in_bytes
        return self


def in_turns(
    runs: Sequence[Callable[[], float]], least: int, most: int, seconds: float
) -> list[tuple[float, ...]]:
    """What runs return, round by round: ``least`` rounds, and more for so long, up to ``most``."""
    rounds: list[tuple[float, ...]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        rounds.append(tuple(run() for run in runs))
    return rounds


class Bench:
    """One graph on one device: its operands, its reference's results, and the fastest program."""

    def __init__(
        self, spec: GraphSpec, site: CudaDevice, device: Device, xla: Segments | None = None
    ) -> None:
        """Begins to compile what compares results, and ``xla``, the graph in XLA alone, if it is a
        way: XLA compiles in other threads while cuDNN plans. Raises MemoryError where the graph is
        too large to be measured with what is in memory, and what the reference raises."""
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            self._spec = spec
            sides = spec.input_tensors, spec.output_tensors
            least = max(roofline(spec, site) or 0.0, 2e-6)
            self._runs = min(max(round(_PROGRAM / least), 1), _MOST_RUNS)
            if any(call.node.anchor.product for call in spec.calls):
                self._runs = 1  # behind such a barrier XLA adds a bias in a kernel of its own
            given, made = (sum(t.nbytes for t in side) for side in sides)
            filler = np.full((4096, 4096), 2.0**-12, jnp.bfloat16)
            self._room = int(_SHARE * _free(site, device)) - given - made - 2 * filler.nbytes
            if (self._runs + 2) * made > self._room:  # with the reference's
                raise MemoryError
            self._device = device
            # Arrays lie as a plan wants them, as those of a model do: XLA copies none for any way.
            self._in, self._out = ([layout(spec).orders[t.name] for t in side] for side in sides)
            self._pool, self._one = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(1)
            self._put(plain=False)
            self._filler = jax.device_put(filler, device)
            self._best: tuple[_Program, float] | None = None
            reference = _Program.of(
                self._arranged(functools.partial(evaluate, spec)), *self._operands
            )
            typed = functools.partial(
                jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device)
            )
            results = [typed(x.shape, x.dtype) for x in reference.lowered.out_info]
            figures = _Program.of(_figures, results, results)
            # In the reference nothing is autotuned.
            self._reference = self._pool.submit(reference.compile, {"xla_gpu_autotune_level": "0"})
            self._figures = self._pool.submit(figures.compile)
            self._xla = None if xla is None else self._begun(xla)
            failing.pop_all()

    def _put(self, plain: bool) -> None:
        """Puts operands onto the device."""
        arrays = zip(operands(self._spec, plain), self._in, strict=True)
        self._operands = [jax.device_put(x.transpose(order), self._device) for x, order in arrays]
        self._want: list[jax.Array] = []
        """The reference's results, once they are there."""

    def close(self) -> None:
        """Frees what it holds on the device."""
        for held in vars(self).values():
            if isinstance(held, ThreadPoolExecutor):
                held.shutdown(wait=False, cancel_futures=True)
        vars(self).clear()

    def trials(self, ways: Sequence[Segments]) -> list[Trial]:
        """Compiles ways, compares their results with the reference's, and times the right ones in
        turns with the fastest one so far. Raises MemoryError where the reference is too large, and
        :class:`.agreement.UninformativeError` where it says nothing about others."""
        xla = self._xla
        made = [
            xla if xla and all(s.plan is None for s in way) else self._begun(way) for way in ways
        ]
        if max(each.result().memory for each in (self._reference, self._figures)) > self._room:
            raise MemoryError
        wait(made)  # else those that run would disturb XLA's autotuning
        try:
            found = self._compared(made)
        except agreement.UninformativeError:
            self._put(plain=True)
            found = self._compared(made)
        right = {i: made[i].result() for i, trial in enumerate(found) if not trial.note}
        for i, seconds in self._times(right).items():
            found[i] = Trial(seconds)
            if self._best is None or seconds < self._best[1]:
                self._best = right[i], seconds
        return found

    def _compared(self, made: Sequence[Future[_Program]]) -> list[Trial]:
        """What becomes of each program but its time."""
        reference = self._reference.result().compiled
        self._want = self._want or reference(*self._operands)  # before any way can write elsewhere
        found = list(map(self._judged, made))
        agreement.wrong(self._spec, self._figures_of(reference(*self._operands)), _written)
        return found

    def _figures_of(self, results: Sequence[jax.Array]) -> list[agreement.Figures]:
        return jax.device_get(self._figures.result().compiled([*results], self._want))

    def _wrong(self, got: Sequence[jax.Array]) -> str:
        """How results differ from the reference's by more than rounding explains; else empty."""
        reference = self._reference.result()

        def near() -> list[agreement.Figures]:
            size = sum(x.nbytes for x in (*self._operands, *self._want))
            if size + reference.memory > self._room:
                raise MemoryError
            least = agreement.least_eps(self._spec)
            moved = (agreement.rounded(x, least) for x in self._operands)
            return self._figures_of(reference.compiled(*moved))

        return agreement.wrong(self._spec, self._figures_of(got), near)

    def _begun(self, segments: Segments) -> Future[_Program]:
        """The program of a way. XLA autotunes its products on the device, so these are compiled
        sequentially."""
        products = any(
            c.node.anchor.product for s in segments if s.plan is None for c in s.spec.calls
        )
        try:
            program = _Program.of(self._repeated(segments), *self._operands)
        except Exception as error:
            failed: Future[_Program] = Future()
            failed.set_exception(error)
            return failed
        return (self._one if products else self._pool).submit(program.compile)

    def _repeated(self, segments: Segments) -> Callable[..., Any]:
        """Runs a way several times in a row, each after the one before. Returns the last results,
        and an element of each other, else XLA would not compute those."""
        planned = PlannedGraph("measured", "", "", self._spec, segments)
        once = self._arranged(functools.partial(execution.run, planned, "measured"))

        def run(*arrays: jax.Array) -> Any:
            results, used = once(*arrays), []
            for _ in range(self._runs - 1):
                arrays, results = jax.lax.optimization_barrier((arrays, results))
                used += [x[(0,) * x.ndim].astype(jnp.float32) for x in results]
                results = once(*arrays)
            return results, jnp.stack(used) if used else ()

        return run

    def _arranged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the graph's arrays as one of row-major arrays that lie as those do."""

        def run(*arrays: jax.Array) -> list[jax.Array]:
            given = [
                x.transpose(np.argsort(order)) for x, order in zip(arrays, self._in, strict=True)
            ]
            results = function(*given)
            return [y.transpose(order) for y, order in zip(results, self._out, strict=True)]

        return run

    def _judged(self, begun: Future[_Program]) -> Trial:
        try:
            program = begun.result()
            if program.memory > self._room:
                return Trial(note="it needs more memory than measuring may take")
        except Exception as error:  # of XLA while it compiles
            return Trial(note=_line(error))
        try:
            got = jax.block_until_ready(program.call(*self._operands))[0]
        except Exception as error:  # of cuDNN or XLA while it runs
            return Trial(note=_line(error), wrong=not failure.may_pass(str(error)))
        try:
            wrong = self._wrong(got)
        except agreement.UninformativeError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError) or failure.may_pass(str(error)):
                return Trial(note="comparing it needs more memory than measuring may take")
            raise
        return Trial(note=wrong, wrong=bool(wrong))

    def _times(self, programs: Mapping[int, _Program]) -> dict[int, float]:
        """Seconds of one run of each program: medians of rounds in turns. The fastest one so far
        takes part, and what it takes now scales the others to what it took then."""
        every = {**programs, **({} if self._best is None else {-1: self._best[0]})}
        calls, begun = {}, min(self._round(None, 0) for _ in range(3))
        for key, program in every.items():
            took = max(min(self._round(program, 1) for _ in range(2)) - begun, 2e-5)
            calls[key] = min(max(round(_ROUND / took), 1), _MOST_CALLS)
        rounds: dict[int, list[float]] = {key: [] for key in every}
        filling: list[float] = []
        for _ in range(_ROUNDS):
            filling.append(self._round(None, 0))
            for key, program in every.items():
                rounds[key].append(self._round(program, calls[key]))
        begun = statistics.median(filling)
        found = {
            key: max((statistics.median(seconds) - begun) / calls[key] / self._runs, _SHORTEST)
            for key, seconds in rounds.items()
        }
        now = found.pop(-1, 1.0)
        scale = 1.0 if self._best is None else self._best[1] / now
        return {key: seconds * scale for key, seconds in found.items()}

    def _round(self, program: Any, calls: int) -> float:
        """Seconds of so many calls, which are issued while the device is busy with other work."""
        began = time.perf_counter()
        results = _fill(self._filler)
        for _ in range(calls):
            results = program.call(*self._operands)
        jax.block_until_ready(results)
        return time.perf_counter() - began


@jax.jit
def _fill(x: jax.Array) -> jax.Array:
    """Work of about two milliseconds on a large GPU."""
    for _ in range(8):
        x = x @ x
    return x


def _free(site: CudaDevice, device: Device) -> int:
    """Bytes of the device that this process may still use; those that no process uses where JAX's
    allocator has no limit (``XLA_PYTHON_CLIENT_ALLOCATOR=platform``)."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit - stats["bytes_in_use"] if limit else site.free_memory()


def idle(device: Device) -> None:
    """Returns once the device has done all that it was given."""
    with jax.default_device(device):
        jax.block_until_ready(jnp.zeros(()) + 1)


def _written() -> list[agreement.Figures]:
    raise RuntimeError("a way of the graph writes into its operands")


def _figures(got: Sequence[jax.Array], want: Sequence[jax.Array]) -> list[Any]:
    return [agreement.figures(a, b) for a, b in zip(got, want, strict=True)]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
