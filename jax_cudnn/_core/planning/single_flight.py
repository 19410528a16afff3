"""Values that are made once for equal keys, across all threads, and then kept in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

V = TypeVar("V")


class SingleFlight(Generic[V]):
    """Values by key, the oldest of more than ``capacity`` forgotten. Failures are not kept."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._futures: dict[Hashable, Future[V]] = {}
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_unfinished)

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value for a key; one thread makes it while the others wait.

        Raises what ``make`` raises, in all of these threads.
        """
        while True:
            with self._lock:
                mine = key not in self._futures
                future = self._futures.setdefault(key, Future())
                if len(self._futures) > self._capacity:
                    del self._futures[next(iter(self._futures))]
            if mine:
                try:
                    future.set_result(make())
                except BaseException as error:
                    self._futures.pop(key, None)  # the user may repair what is wrong, and retry
                    future.set_exception(error)
            try:
                return future.result()
            except (KeyboardInterrupt, SystemExit) as error:
                if mine or not (future.done() and future.exception() is error):
                    raise
                # The thread that made it was interrupted, not this one: make it here.

    def put(self, key: Hashable, value: V) -> None:
        """Replaces the value for a key."""
        future: Future[V] = Future()
        future.set_result(value)
        with self._lock:
            self._futures[key] = future

    def clear(self) -> None:
        with self._lock:
            self._futures.clear()

    def _forget_unfinished(self) -> None:
        """In a forked child no thread is left that could finish a value or release a lock."""
        self._lock = threading.Lock()
        self._futures = {key: made for key, made in self._futures.items() if made.done()}
