"""Run functions in the planning worker: a subprocess that each process starts when needed.

Planning for a profile always happens there, even on a machine with a GPU, because the null driver
must never be loaded in a process that may use a GPU. There is one worker unless ``workers`` allows
more: cuDNN plans one graph at a time per process, so parallel planning needs several workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from jax_cudnn._core.errors import JaxCudnnError, PlanningWorkerError

from . import environment, wire

_TAIL = 4096  # bytes of the worker's output in an error

_condition = threading.Condition()  # guards the three below
_seats: list[_Seat] = []
_free: list[_Seat] = []
_wanted: list[int] = []  # the count of each ``workers`` block that is open


def call(function: str, *args: Any, timeout: float = 600.0, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` in the planning worker, which has the null driver.

    ``function`` is ``"package.module:name"``; arguments and result are pickled. The worker has
    this process's ``sys.path``, but not its ``__main__``. ``timeout`` is in seconds; it includes
    starting the worker, but not waiting for calls of other threads.

    Raises what the function raises (an exception that does not pickle becomes a ``RuntimeError``
    with its traceback), ``PlanningWorkerError`` if the worker dies or times out, ``LibraryError``
    if it cannot be started. After that, the next call starts a new worker.
    """
    request = wire.pack((function, args, kwargs))
    with _seat() as seat:
        deadline = time.monotonic() + timeout
        worker = seat.current()
        try:
            answer = worker.ask(request, deadline)
        except EOFError:
            raise worker.death(function) from None
        except TimeoutError:
            raise worker.death(function, timeout) from None
        except BaseException:  # after an interrupt, too, its answer would be the next call's
            worker.stop()
            raise
    return _unpack(answer)


@contextlib.contextmanager
def workers(count: int) -> Iterator[None]:
    """Inside, calls of up to ``count`` threads run at the same time, each in a separate worker.

    Workers start as calls need them; additional ones end with the block. A worker takes about two
    seconds to start and about 400 MB of memory.
    """
    with _condition:
        _wanted.append(count)
        _condition.notify_all()
    try:
        yield
    finally:
        with _condition:
            _wanted.remove(count)
            excess = [_free.pop() for _ in range(min(len(_free), len(_seats) - _limit()))]
            for seat in excess:
                _seats.remove(seat)
        for seat in excess:
            seat.stop()


def _limit() -> int:
    return max((1, *_wanted))


@contextlib.contextmanager
def _seat() -> Iterator[_Seat]:
    """Waits for a slot, which serves one call at a time."""
    with _condition:
        _condition.wait_for(lambda: _free or len(_seats) < _limit())
        if not _free:
            _seats.append(_Seat())
            _free.append(_seats[-1])
        seat = _free.pop()
    try:
        yield seat
    finally:
        with _condition:
            excess = len(_seats) > _limit()
            if excess:
                _seats.remove(seat)
            else:
                _free.append(seat)
            _condition.notify()
        if excess:
            seat.stop()


class _Seat:
    """A slot for one worker."""

    worker: _Worker | None = None

    def current(self) -> _Worker:
        """The worker, started if none is alive."""
        if self.worker is not None and self.worker.owner != os.getpid():
            self.worker.forget()
        if self.worker is not None and self.worker.process.poll() is not None:
            self.worker.stop()  # it died while idle: nothing is lost
        if self.worker is None or self.worker.stopped:
            environment.check()
            self.worker = _Worker()
        return self.worker

    def stop(self) -> None:
        worker = self.worker
        if worker is not None and worker.owner == os.getpid() and not worker.stopped:
            worker.stop()


def _unpack(answer: bytes) -> Any:
    kind, *content = pickle.loads(answer)
    if kind == "ok":
        return content[0]
    pickled, text = content
    try:
        error = pickle.loads(pickled) if pickled else None
    except Exception:  # its class can be imported there, but not here
        error = None
    if error is None:
        raise RuntimeError(f"in the planning worker:\n{text}")
    if not isinstance(error, JaxCudnnError):
        error.add_note(f"in the planning worker:\n{text}")
    raise error


class _Worker:
    """The subprocess, our end of its socket, and the file that takes its output."""

    def __init__(self) -> None:
        interpreter = [environment.python(), "-P", "-X", "faulthandler"]
        module = ["-m", "jax_cudnn.deviceless.worker"]
        self.owner = os.getpid()
        self.ready = self.stopped = False
        # A file, not a pipe: the worker never waits for a reader. It appends, so that we can
        # empty the file.
        self.log = tempfile.TemporaryFile("a+b")
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*interpreter, *module, str(theirs.fileno()), str(environment.null_driver())],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                env=environment.variables(),
                start_new_session=True,  # Ctrl-C is for us; we then stop the worker
            )

    def ask(self, request: bytes, deadline: float) -> bytes:
        if not self.ready:
            _unpack(wire.receive(self.connection, deadline))
            self.ready = True
        self.log.truncate(0)
        wire.send(self.connection, request, deadline)
        return wire.receive(self.connection, deadline)

    def death(self, function: str, timeout: float | None = None) -> PlanningWorkerError:
        """Stop it; the error says whether it died or was stopped after ``timeout`` seconds."""
        fix = "try again: the next call starts a new worker; report a graph that kills it again"
        if timeout is not None:
            how = f"did not answer within {timeout:g} s and was stopped"
            fix = "pass call() a longer timeout, or plan a smaller graph"
        else:
            how = f"died: {self._exit_reason()}"
        tail = self._tail()
        self.stop()
        return PlanningWorkerError(
            f"the planning worker {how}",
            got=f"while running {function}",
            why="its last output:\n" + tail if tail else "it printed nothing",
            fix=fix,
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """After a fork: it is the parent's, and our copy of the socket must not keep it alive."""
        self.process.returncode = 0  # not our child: nothing to wait for, nothing to warn of
        self._close()

    def _close(self) -> None:
        self.stopped = True
        self.connection.close()
        self.log.close()

    def _exit_reason(self) -> str:
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        known = -code in signal.valid_signals()
        name = signal.Signals(-code).name if known else str(-code)
        return f"signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def _tail(self) -> str:
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - _TAIL))
        return self.log.read().decode(errors="replace").strip()


def _after_fork_in_child() -> None:
    global _condition
    _condition = threading.Condition()  # another thread may have held it
    for seat in _seats:
        if seat.worker is not None and not seat.worker.stopped:
            seat.worker.forget()
    _seats.clear()
    _free.clear()


def _exit() -> None:
    for seat in _seats:
        seat.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_exit)
