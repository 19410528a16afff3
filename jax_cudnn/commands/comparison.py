"""``jax_cudnn.commands.bench.compare``: checks that functions agree, then times them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from .._core import agreement
from .._core.agreement import Difference
from .._core.errors import GraphError
from . import timing

_CALLS, _ROUNDS, _LEAST_ROUNDS = 30, 15, 7


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
        lines = ["| function | us per call: median (min to max) | relative to the first |"]
        lines.append("|---|---|---|")
        for name in self.names:
            said = ""
            if name in self.differences:
                said = f"difference {self.differences[name]}; tolerance {self.tolerance:.2g}"
            if name in self.failed:
                lines.append(f"| {name} | failed: {self.failed[name].splitlines()[0]} | |")
            elif name in self.seconds:
                us = timing.summary(self.seconds[name], 1e6)
                lines.append(
                    f"| {name} | {us['median']:g} ({us['min']:g} to {us['max']:g}) "
                    f"| {self.median(name) / self.median(self.names[0]):.2f} |"
                )
            else:
                how = f"WRONG: {said}" if name in self.wrong else f"agrees: {said}"
                lines.append(f"| {name} | {how if said else 'not timed'} | |")
        return "\n".join(lines)


def compare(
    functions: Mapping[str, Callable[..., Any] | Formulation],
    *operands: Any,
    tolerance: float | None = None,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
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
    names = tuple(functions)
    ways = {
        name: f if isinstance(f, Formulation) else Formulation(f) for name, f in functions.items()
    }
    progress("compiling")
    ready, failed = _compiled(ways, operands)
    progress("comparing results")
    differences, allowed = _check(ways, ready, operands, failed, tolerance)
    found = Comparison(names, differences, allowed, failed)
    if found.wrong or not rounds:
        return found
    progress("timing")
    if seconds < math.inf:
        calls = _affordable(ready, calls, seconds, clock)
    times = timing.interleaved(
        ready,
        (),
        rounds=max(rounds, _LEAST_ROUNDS),
        calls=calls,
        seconds=seconds,
        least=_LEAST_ROUNDS,
        clock=clock,
        progress=progress,
    )
    return Comparison(names, differences, allowed, failed, times, calls)


def _compiled(
    ways: Mapping[str, Formulation], operands: tuple[Any, ...]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Each function, compiled and bound to its operands; and why others failed."""
    lowered, bound = {}, {}
    failed: dict[str, str] = {}
    first = next(iter(ways))
    for name, way in ways.items():
        try:
            prepare = way.prepare
            bound[name] = operands if prepare is None else jax.jit(prepare)(*operands)
            # Not in the threads below: JAX's context managers are thread-local.
            lowered[name] = jax.jit(way.function).lower(*bound[name])
        except Exception as error:
            _record(error, name, first, failed)
    ready: dict[str, Callable[[], Any]] = {}
    with ThreadPoolExecutor(max_workers=max(len(lowered), 1)) as pool:
        futures = {name: pool.submit(program.compile) for name, program in lowered.items()}
        for name, future in futures.items():
            try:
                ready[name] = partial(future.result(), *bound[name])
            except Exception as error:
                _record(error, name, first, failed)
    return ready, failed


def _check(
    ways: Mapping[str, Formulation],
    ready: dict[str, Callable[[], Any]],
    operands: tuple[Any, ...],
    failed: dict[str, str],
    tolerance: float | None,
) -> tuple[dict[str, Difference], float]:
    """Runs each function once; one that fails moves from ``ready`` to ``failed``."""
    differences: dict[str, Difference] = {}
    first = next(iter(ways))
    want, allowed = None, tolerance or 0.0
    for name in list(ready):
        try:
            result = jax.block_until_ready(ready[name]())
        except Exception as error:
            _record(error, name, first, failed)
            del ready[name]
            continue
        finish = ways[name].finish
        result = result if finish is None else jax.jit(finish)(result)
        if name == first:
            want = result
            allowed = agreement.tolerance(operands, want) if tolerance is None else tolerance
        else:
            differences[name] = agreement.difference(result, want)
    return differences, allowed


def _record(error: Exception, name: str, first: str, failed: dict[str, str]) -> None:
    if name == first:
        raise error
    failed[name] = f"{type(error).__name__}: {error}"


def _affordable(
    ready: Mapping[str, Callable[[], Any]], calls: int, seconds: float, clock: Callable[[], float]
) -> int:
    """``calls``, or fewer if seven rounds would take more than twice ``seconds``."""
    began = clock()
    for function in ready.values():
        jax.block_until_ready(function())
    once = clock() - began
    fits = 2 * seconds / (_LEAST_ROUNDS * once) if once > 0 else math.inf
    return calls if fits >= calls else max(3, int(fits))
