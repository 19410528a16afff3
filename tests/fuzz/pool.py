"""A function called in several processes: whatever kills one of them costs one call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

_spawn = multiprocessing.get_context("spawn")

T = TypeVar("T")
R = TypeVar("R")


def in_processes(
    function: Callable[[T], R],
    arguments: Iterable[T],
    *,
    lost: Callable[[T, str], R],
    spoiled: Callable[[R], bool],
    workers: int,
    timeout: float,
    variables: Mapping[str, str],
) -> Iterator[R]:
    """``function`` of each argument, in their order.

    Args:
        function: pickled once for each process.
        arguments: of one call each.
        lost: what stands for a call whose process has died, raised, or not answered in time.
        spoiled: whether a process is to be replaced after it gave this.
        workers: how many processes there are at a time.
        timeout: of a call, in seconds, a start of its process included.
        variables: of the processes' environment, before they start JAX's backends.
    """
    seats = [_Seat(function, dict(variables)) for _ in range(workers)]
    free = [*seats]

    def call(argument: T) -> R:
        seat = free.pop()
        try:
            result = seat.ask(argument, timeout)
        except _LostError as error:
            return lost(argument, str(error))
        else:
            if spoiled(result):
                seat.end()
            return result
        finally:
            free.append(seat)

    with contextlib.ExitStack() as ends, concurrent.futures.ThreadPoolExecutor(workers) as threads:
        for seat in seats:
            ends.callback(seat.end)
        yield from threads.map(call, arguments)


class _LostError(Exception):
    """Why there is no answer."""


class _Seat:
    """One of the processes at a time."""

    def __init__(self, function: Callable[[Any], Any], variables: Mapping[str, str]) -> None:
        self._function, self._variables = function, variables
        self._process: Any = None
        self._connection: Any = None

    def ask(self, argument: Any, timeout: float) -> Any:
        if self._process is None:
            self._connection, theirs = _spawn.Pipe()
            given = theirs, self._function, self._variables
            self._process = _spawn.Process(target=_serve, args=given, daemon=False)
            self._process.start()
            theirs.close()
        try:
            self._connection.send(argument)
            if not self._connection.poll(timeout):
                raise _LostError(f"no answer within {timeout:g} s")
            kind, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise self._ended(_LostError(f"the process died: {_reason(self._process)}")) from None
        except _LostError as error:
            raise self._ended(error) from None
        if kind == "raised":
            raise self._ended(_LostError(answer))
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _ended(self, error: _LostError) -> _LostError:
        self.end()
        return error


def _reason(process: Any) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"exit code {code}"
    known = -code in signal.valid_signals()
    return f"signal {signal.Signals(-code).name if known else -code}"


def _serve(connection: Any, function: Callable[[Any], Any], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    while True:
        try:
            argument = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = "answer", function(argument)
        except Exception as error:
            answer = "raised", f"{type(error).__name__}: {error}"
        connection.send(answer)
