"""Times jitted functions that take turns, after a check that their results agree."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from .._core import agreement
from .._core.agreement import Difference
from .._core.errors import GraphError, LibraryError
from .._core.planning import frontend

_CALLS, _ROUNDS, _LEAST_ROUNDS = 30, 15, 7
_PACKAGES = ("jax-cudnn", "jax", "jaxlib", "nvidia-cudnn-frontend")


@dataclass(frozen=True)
class Formulation:
    """A function to time, with conversions before and after it that are not timed.

    Attributes:
        function: what is compiled and timed.
        prepare: converts the common operands to those that ``function`` takes, for example
            transposes weights; returns all of them.
        finish: converts the result to the common form, only to compare it.
    """

    function: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None
    finish: Callable[[Any], Any] | None = None

    def __call__(self, *operands: Any) -> Any:
        """The common result of common operands."""
        given = operands if self.prepare is None else self.prepare(*operands)
        result = self.function(*given)
        return result if self.finish is None else self.finish(result)


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`; the first function is the baseline.

    Attributes:
        names: the functions, in the given order.
        differences: the difference of each other function's result from the first one's.
        tolerance: the largest allowed difference.
        failed: functions that could not be compiled or run, with the reason; never the first.
        seconds: seconds per call, one value per round; empty if results disagree or if no rounds
            were requested.
        calls: executions per value.
    """

    names: tuple[str, ...]
    differences: Mapping[str, Difference]
    tolerance: float
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    calls: int = 0

    @property
    def wrong(self) -> tuple[str, ...]:
        """Functions whose results differ from the first one's by more than the tolerance."""
        return tuple(n for n, d in self.differences.items() if not d.within(self.tolerance))

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    @property
    def best_other(self) -> str | None:
        """The fastest function other than the first, by median; None if there is none."""
        others = [name for name in self.names[1:] if name in self.seconds]
        return min(others, key=self.median, default=None)

    def ratio(self, name: str | None = None) -> float:
        """Median time of a function (by default the best other one) over the first one's: above 1,
        the first is faster."""
        name = name or self.best_other
        if name is None or name not in self.seconds:
            raise GraphError(
                "no second function was timed, so there is no ratio",
                got=f"times of {', '.join(self.seconds) or 'no function'}",
                why="; ".join(f"{n} disagrees" for n in self.wrong)
                or "; ".join(f"{n}: {reason}" for n, reason in self.failed.items()),
            )
        return self.median(name) / self.median(self.names[0])

    def ratios(self, name: str) -> list[float]:
        """That ratio in each round, in which the functions ran back to back."""
        pairs = zip(self.seconds[name], self.seconds[self.names[0]], strict=True)
        return [other / first for other, first in pairs]

    def __str__(self) -> str:
        return "\n".join(
            (
                "| function | us per call: median (min to max) | relative to the first |",
                "|---|---|---|",
                *(f"| {name} | {self._row(name)} |" for name in self.names),
            )
        )

    def _row(self, name: str) -> str:
        if name in self.failed:
            return f"failed: {self.failed[name].splitlines()[0]} | "
        if name in self.seconds:
            us = summary(self.seconds[name], 1e6)
            relative = self.median(name) / self.median(self.names[0])
            return f"{us['median']:g} ({us['min']:g} to {us['max']:g}) | {relative:.2f}"
        if name not in self.differences:
            return "not timed | "
        how = "WRONG" if name in self.wrong else "agrees"
        return f"{how}: difference {self.differences[name]}; tolerance {self.tolerance:.2g} | "


def compare(
    functions: Mapping[str, Callable[..., Any] | Formulation],
    *operands: Any,
    tolerance: float | None = None,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Times jitted functions of the same operands in this process.

    First it compiles all functions, runs each once and compares the results. If one differs from
    the first by more than the tolerance, nothing is timed. Then the functions take turns, in
    rounds of ``calls`` asynchronous executions followed by one wait, so that variations of the
    host and the GPU affect all of them alike.

    Args:
        functions: name -> function or :class:`Formulation`. The first is the baseline, and must
            run. Another one that fails is left out, and the result holds the reason.
        *operands: arrays, the same for all functions. Avoid zeros: GPUs draw less power and clock
            higher on them.
        tolerance: largest relative difference of results; by default twice the machine epsilon
            of the coarsest type of 16 bits or more among operands and results.
        calls: executions per round; fewer if seven rounds would take far more than ``seconds``.
        rounds: the largest number of rounds, of which at least seven run; 0 compares results only.
        seconds: no round after the seventh starts once they have passed.
        progress: called with a line of text at each step.

    Returns:
        A Comparison; printed, it is a table.

    Raises:
        GraphError: there are no functions, or results have different shapes.
        Exception: whatever the first function raises.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_cudnn.commands.bench import compare
        >>> x = jax.random.normal(jax.random.key(0), (64, 64))
        >>> found = compare({"sum": jnp.sum, "mean": lambda x: jnp.mean(x) * x.size}, x)
        >>> found.names, found.wrong, len(found.seconds["sum"]) >= 7
        (('sum', 'mean'), (), True)
    """
    if not functions:
        raise GraphError("compare needs functions", expected='{"name": function, ...}', got="{}")
    first, *_ = names = tuple(functions)
    failed: dict[str, str] = {}

    def tried(name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Exception as error:
            if name == first:
                raise
            failed[name] = f"{type(error).__name__}: {error}"

    progress("compiling")
    ways = {n: f if isinstance(f, Formulation) else Formulation(f) for n, f in functions.items()}
    # Lowered not in the threads: JAX's context managers are thread-local.
    lowered = {name: tried(name, _lowered, way, operands) for name, way in ways.items()}
    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        jobs = {name: pool.submit(one[0].compile) for name, one in lowered.items() if one}
    progress("comparing results")
    ready: dict[str, Callable[[], Any]] = {}
    differences: dict[str, Difference] = {}
    want = None
    for name, job in jobs.items():
        if (program := tried(name, job.result)) is None:
            continue
        ready[name] = partial(program, *lowered[name][1])
        result = tried(name, lambda call: jax.block_until_ready(call()), ready[name])
        if name in failed:
            del ready[name]
            continue
        finish = ways[name].finish
        result = result if finish is None else jax.jit(finish)(result)
        if name != first:
            differences[name] = agreement.difference(result, want)
            continue
        want = result
        tolerance = agreement.tolerance(operands, want) if tolerance is None else tolerance
    found = Comparison(names, differences, tolerance or 0.0, failed)
    if found.wrong or not rounds:
        return found
    progress("timing")
    once = interleaved(ready, (), rounds=1, calls=1, warm=0)
    fits = 2 * seconds / (_LEAST_ROUNDS * sum(map(sum, once.values())))
    calls = calls if fits >= calls else max(3, int(fits))
    rounds = max(rounds, _LEAST_ROUNDS)
    how: dict[str, Any] = {"rounds": rounds, "calls": calls, "seconds": seconds}
    times = interleaved(ready, (), **how, progress=progress)
    return Comparison(names, differences, found.tolerance, failed, times, calls)


def _lowered(way: Formulation, operands: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The function, lowered, and its operands."""
    bound = operands if way.prepare is None else jax.jit(way.prepare)(*operands)
    return jax.jit(way.function).lower(*bound), bound


def interleaved(
    functions: Mapping[Any, Callable[..., Any]],
    operands: Sequence[Any],
    *,
    rounds: int,
    calls: int,
    seconds: float = math.inf,
    least: int = _LEAST_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 3,
    order: Callable[[int, int], Sequence[int]] = lambda count, number: range(count),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[Any, list[float]]:
    """Seconds per call of each function, one value per round; the functions take turns.

    After ``warm`` calls of each function, each round dispatches ``calls`` executions of each
    function and waits for the last. No round starts once ``seconds`` have passed, but at least
    ``least`` rounds run. ``order`` gives the positions of the functions in each round, from how
    many there are and the number of the round.
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
        for position in order(len(names), number):
            name = names[position]
            progress(f"timing {name}, round {number + 1} of {rounds} at most")
            start, result = clock(), None
            for _ in range(calls):
                result = functions[name](*operands)
            jax.block_until_ready(result)
            times[name].append((clock() - start) / calls)
    return times


def summary(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, minimum, maximum and quartiles, times ``scale``."""
    scaled = sorted(value * scale for value in values)
    several = scaled if len(scaled) > 1 else scaled * 2
    q1, median, q3 = statistics.quantiles(several, n=4, method="inclusive")
    figures = {"median": median, "min": scaled[0], "max": scaled[-1], "q1": q1, "q3": q3}
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
