"""Run functions in the planning worker: one subprocess for each process, started when needed.

Planning without a GPU always happens there, also on a machine that has one, because the null
driver must never be in a process that may use a GPU.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import Any

from jax_cudnn._core.errors import JaxCudnnError, PlanningWorkerError

from . import environment, wire

_TAIL = 4096  # bytes of the worker's output in an error

_lock = threading.Lock()  # one request at a time
_worker: _Worker | None = None


def call(function: str, *args: Any, timeout: float = 600.0, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` in the planning worker, which has the null driver.

    ``function`` is ``"package.module:name"``; arguments and result are pickled. The worker has
    this process's ``sys.path``, but not its ``__main__``. ``timeout`` is in seconds, a start of
    the worker included; waiting for other threads' calls is not.

    Raises what the function raises (an exception that does not pickle becomes a ``RuntimeError``
    with its traceback), ``PlanningWorkerError`` if the worker dies or is late, ``LibraryError`` if
    it cannot be started. After a death the next call starts a new worker.
    """
    request = wire.pack((function, args, kwargs))
    with _lock:
        deadline = time.monotonic() + timeout
        worker = _current()
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


def _current() -> _Worker:
    global _worker
    if _worker is not None and _worker.owner != os.getpid():
        _worker.forget()
    if _worker is not None and _worker.process.poll() is not None:
        _worker.stop()  # it died while idle: nothing is lost
    if _worker is None or _worker.stopped:
        environment.check()
        _worker = _Worker()
    return _worker


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
    """The subprocess, our end of its socket, and the file of its output."""

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
        """Stop it and say how it ended: by itself, or by us after ``timeout`` seconds."""
        fix = "the next call starts a new worker; if the same graph kills it again, report it"
        if timeout is not None:
            how = f"did not answer within {timeout:g} s and was stopped"
            fix = "give call() a longer timeout, or plan a smaller graph"
        else:
            how = f"died: {self._exit_reason()}"
        tail = self._tail()
        self.stop()
        return PlanningWorkerError(
            f"the planning worker {how}",
            got=f"while it ran {function}",
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
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    if _worker is not None and not _worker.stopped:
        _worker.forget()


def _exit() -> None:
    if _worker is not None and _worker.owner == os.getpid() and not _worker.stopped:
        _worker.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_exit)
