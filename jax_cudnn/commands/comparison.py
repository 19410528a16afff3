"""``jax_cudnn.commands.bench.compare``: functions timed against each other, once they agree."""

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

from .._core.errors import GraphError
from . import agreement, timing
from .agreement import Difference

_CALLS, _ROUNDS, _LEAST_ROUNDS = 30, 15, 7


@dataclass(frozen=True)
class Formulation:
    """A way to compute something, with what happens before and after that is not timed.

    Attributes:
        function: what is compiled and timed.
        prepare: brings the common operands into the form that ``function`` takes, for example
            weights into another order; returns them all.
        finish: brings the result into the common form, for the check of agreement alone.
    """

    function: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None
    finish: Callable[[Any], Any] | None = None

    def __call__(self, *operands: Any) -> Any:
        """From common operands to a common result."""
        given = operands if self.prepare is None else self.prepare(*operands)
        result = self.function(*given)
        return result if self.finish is None else self.finish(result)


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found; the first function is the one that others are held against.

    Attributes:
        names: the functions, in the given order.
        differences: of each other function's result from the first one's.
        tolerance: what they may differ by.
        failed: functions that could not be compiled or run, with the reason; never the first.
        seconds: seconds a call, one figure a round; empty when the results disagree.
        calls: executions in each figure.
    """

    names: tuple[str, ...]
    differences: Mapping[str, Difference]
    tolerance: float
    failed: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    calls: int = 0

    @property
    def wrong(self) -> tuple[str, ...]:
        """Functions whose results differ from the first one's by more than rounding."""
        return tuple(n for n, d in self.differences.items() if not d.within(self.tolerance))

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    @property
    def best_other(self) -> str | None:
        """The fastest function besides the first, by median; None when there is none."""
        others = [name for name in self.names[1:] if name in self.seconds]
        return min(others, key=self.median, default=None)

    def ratio(self, name: str | None = None) -> float:
        """Median of another function (the best one) over the first one's: > 1, the first wins."""
        name = name or self.best_other
        if name is None or name not in self.seconds:
            raise GraphError(
                "there is no second time to divide by the first",
                got=f"times of {', '.join(self.seconds) or 'no function'}",
                why="; ".join(f"{n} disagrees" for n in self.wrong)
                or "; ".join(f"{n}: {reason}" for n, reason in self.failed.items()),
            )
        return self.median(name) / self.median(self.names[0])

    def ratios(self, name: str) -> list[float]:
        """That ratio in each round: functions of a round ran one right after the other."""
        pairs = zip(self.seconds[name], self.seconds[self.names[0]], strict=True)
        return [other / first for other, first in pairs]

    def __str__(self) -> str:
        lines = ["| function | us a call: median (smallest to largest) | against the first |"]
        lines.append("|---|---|---|")
        for name in self.names:
            if name in self.failed:
                lines.append(f"| {name} | failed: {self.failed[name].splitlines()[0]} | |")
            elif name in self.seconds:
                us = timing.summary(self.seconds[name], 1e6)
                lines.append(
                    f"| {name} | {us['median']:g} ({us['min']:g} to {us['max']:g}) "
                    f"| {self.median(name) / self.median(self.names[0]):.2f} |"
                )
            else:
                how = f"WRONG: {self.differences[name]}" if name in self.wrong else "not timed"
                lines.append(f"| {name} | {how} | |")
        return "\n".join(lines)


def compare(
    functions: Mapping[str, Callable[..., Any] | Formulation],
    *operands: Any,
    tolerance: float | None = None,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times jitted functions of the same operands against each other, in this process.

    All are compiled, then run once, and their results compared: when one differs from the
    first one's by more than rounding, nothing is timed. Then they take turns in rounds of
    ``calls`` asynchronous executions and one wait, so that the host's and the GPU's moods reach
    all of them alike.

    Args:
        functions: name -> function or :class:`Formulation`. The first is the one that the
            others are held against, and must run; another that fails is left out, with its
            reason in the result.
        *operands: arrays, the same for all. Not zeros: GPUs draw less power and clock higher on
            them.
        tolerance: largest relative difference of results; by default twice the machine epsilon
            of the coarsest type of 16 bits or more among operands and results.
        calls: executions in a round; fewer, when seven rounds would take far more than
            ``seconds``.
        rounds: at most so many, at least seven.
        seconds: after so many, no round beyond the seventh begins.

    Returns:
        A Comparison; printed, it is a table.

    Raises:
        What the first function raises; GraphError for no functions or results of other shapes.

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
    ready, failed = _compiled(ways, operands)
    differences, allowed = _check(ways, ready, operands, failed, tolerance)
    found = Comparison(names, differences, allowed, failed)
    if found.wrong:
        return found
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
    )
    return Comparison(names, differences, allowed, failed, times, calls)


def _compiled(
    ways: Mapping[str, Formulation], operands: tuple[Any, ...]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Each function compiled and bound to its operands; and the reasons of those that failed."""
    lowered, bound = {}, {}
    failed: dict[str, str] = {}
    first = next(iter(ways))
    for name, way in ways.items():
        try:
            prepare = way.prepare
            bound[name] = operands if prepare is None else jax.jit(prepare)(*operands)
            # Here and not in the threads below: JAX's context managers belong to a thread.
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
    """``calls``, or fewer when seven rounds of them would take over twice ``seconds``."""
    began = clock()
    for function in ready.values():
        jax.block_until_ready(function())
    once = clock() - began
    fits = 2 * seconds / (_LEAST_ROUNDS * once) if once > 0 else math.inf
    return calls if fits >= calls else max(3, int(fits))
