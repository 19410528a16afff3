"""Run functions in the planning worker: a subprocess that each process starts when needed.

Planning for a profile always happens there, even on a machine with a GPU, because the null driver
must never be loaded in a process that may use a GPU. There is one worker unless ``workers`` allows
more: cuDNN plans one graph at a time per process, so parallel planning needs several workers.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ...errors import JaxCudnnError, LibraryError, PlanningWorkerError
from ...package import install, packaged_library

log = logging.getLogger("jax_cudnn")

_TAIL = 4096  # bytes of the worker's output in an error
_WARNED, _STUCK = 5, 30  # seconds without any use of the CPU: until a warning, and until its end

_condition = threading.Condition()  # guards the four below
_calls = 0  # that run, or start a worker
_idle: list[_Worker] = []
_started: list[_Worker] = []  # those that live
_wanted: list[int] = []  # the count of each ``workers`` block that is open


def call(
    function: str, *args: Any, timeout: float = 600.0, fresh: bool = False, **kwargs: Any
) -> Any:
    """``function(*args, **kwargs)`` in the planning worker, which has the null driver.

    ``function`` is ``"package.module:name"``; arguments and result are pickled. The worker has
    this process's ``sys.path``, but not its ``__main__``. ``timeout`` is in seconds; it includes
    starting the worker, but not waiting for calls of other threads. ``fresh`` starts a new worker.

    Raises what the function raises (an exception that does not pickle becomes a ``RuntimeError``
    with its traceback), ``PlanningWorkerError`` if the worker cannot be started, dies, times out
    or does not run (stopped, or in a deadlock), ``LibraryError`` where a part of it is missing.
    After that, the next call starts a new worker.
    """
    request = pickle.dumps((function, args, kwargs), pickle.HIGHEST_PROTOCOL)
    with _worker(fresh) as (worker, began):
        try:
            answer = worker.ask(request, began + timeout)
        except EOFError:
            raise worker.death(function) from None
        except TimeoutError as error:
            how = str(error) or f"did not answer within {timeout:g} s"
            raise worker.death(function, f"{how} and was stopped") from None
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
            excess = [_idle.pop() for _ in range(min(len(_idle), len(_started) - _limit()))]
        for worker in excess:
            worker.stop()


def _limit() -> int:
    return max((1, *_wanted))


@contextlib.contextmanager
def _worker(fresh: bool) -> Iterator[tuple[_Worker, float]]:
    """A worker for one call, an idle one unless ``fresh``, and since when its time counts."""
    global _calls
    with _condition:
        _condition.wait_for(lambda: _calls < _limit())
        _calls += 1
        worker = _idle.pop() if _idle else None
    began = time.monotonic()
    try:
        if worker is not None and (fresh or worker.process.poll() is not None):
            worker.stop()  # if it died while it was idle, nothing is lost
            worker = None
        worker = worker or _start()
        yield worker, began
    finally:
        usable = [] if worker is None or worker.stopped else [worker]
        with _condition:
            _calls -= 1
            if len(_idle) + _calls < _limit():
                _idle.extend(usable)
                usable = []
            _condition.notify()
        for worker in usable:
            worker.stop()


def _start() -> _Worker:
    check()
    try:
        return _Worker()
    except OSError as error:
        raise PlanningWorkerError(
            "the planning worker cannot be started",
            got=f"{type(error).__name__}: {error}",
            why="this machine lacks memory, processes, open files or temporary space",
            fix="free some, and try again",
        ) from error


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
    """The subprocess, our end of its connection, and the file that takes its output."""

    def __init__(self) -> None:
        interpreter = [python(), "-P", "-X", "faulthandler"]
        module = ["-m", "jax_cudnn._core.planning.deviceless.worker"]
        self.ready = self.stopped = False
        self.thread: threading.Thread | None = None
        # A file, not a pipe: the worker never waits for a reader. It appends, so that we can
        # empty the file.
        self.log = tempfile.TemporaryFile("a+b")
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [*interpreter, *module, str(theirs.fileno()), str(null_driver())],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                env=variables(),
                start_new_session=True,  # Ctrl-C is for us; we then stop the worker
            )
        _started.append(self)

    def ask(self, request: bytes, deadline: float) -> bytes:
        """Its answer to a request; TimeoutError after the deadline, or before if the worker does
        not run.

        Its use of the CPU is what shows that it runs: cuDNN's frontend holds Python's lock, so
        that no thread of the worker could tell. Seconds are counted, not measured: where this
        process was stopped, too, nothing is wrong with the worker.
        """
        answer: Future[bytes] = Future()
        self.thread = threading.Thread(target=self._talk, args=(request, answer), daemon=True)
        self.thread.start()
        idle, used = 0, ""
        while (left := deadline - time.monotonic()) > 0:
            if wait([answer], min(1.0, left)).done:
                return answer.result()
            before, used = used, self._cpu()
            idle = idle + 1 if used and used == before else 0
            if idle == _WARNED:
                log.warning(
                    "the planning worker (process %d) has not run for %d s; it is ended after %d s",
                    self.process.pid,
                    idle,
                    _STUCK,
                )
            if idle >= _STUCK:
                raise TimeoutError(f"did not run for {idle} s")
        raise TimeoutError

    def _talk(self, request: bytes, answer: Future[bytes]) -> None:
        """In a thread, as a worker that is stopped blocks what is sent, and a part of an answer."""
        try:
            if not self.ready:
                _unpack(self.connection.recv_bytes())
                self.ready = True
            self.log.truncate(0)
            self.connection.send_bytes(request)
            answer.set_result(self.connection.recv_bytes())
        except OSError as error:
            answer.set_exception(EOFError(str(error)))
        except BaseException as error:
            answer.set_exception(error)

    def _cpu(self) -> str:
        """How much it has used the CPU, as the kernel says; empty where that is not known."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return ""
        return " ".join(stat.rpartition(")")[2].split()[11:13])  # utime and stime

    def death(self, function: str, how: str = "") -> PlanningWorkerError:
        """Stop it; the error says how it died, or ``how`` it failed."""
        how = how or f"died: {self._exit_reason()}"
        tail = self._tail()
        self.stop()
        return PlanningWorkerError(
            f"the planning worker {how}",
            got=f"while running {function}",
            why="its last output:\n" + tail if tail else "it printed nothing",
            fix="try again: nothing is kept of it, and the next call starts a new worker; free "
            "memory; python -m jax_cudnn doctor checks the installation; report a graph that fails "
            "in this way each time",
        )

    def stop(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a disk for long
            self.process.wait(10)
        if self.thread is not None:
            self.thread.join(10)  # it reads no other file that gets the same number
        self._close()

    def forget(self) -> None:
        """After a fork: it is the parent's, and our copy of the socket must not keep it alive."""
        self.process.returncode = 0  # not our child: nothing to wait for, nothing to warn of
        self._close()

    def _close(self) -> None:
        self.stopped = True
        with contextlib.suppress(ValueError):  # it was closed before
            _started.remove(self)
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
    global _condition, _calls
    _condition, _calls = threading.Condition(), 0  # another thread may have held it
    _idle.clear()
    for worker in [*_started]:
        worker.forget()


def _exit() -> None:
    for worker in [*_started]:
        worker.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_exit)


# -- what a worker needs to start ------------------------------------------------------------------


def null_driver() -> Path:
    """The stand-in for libcuda.so.1."""
    return packaged_library("libjax_cudnn_null_driver.so")


def check() -> None:
    """Raises ``LibraryError`` if planning without a GPU cannot work here."""
    if not sys.platform.startswith("linux"):
        raise LibraryError(
            "planning without a GPU needs Linux",
            got=sys.platform,
            why="it replaces libcuda.so.1, which cuDNN's runtime-compiled engines need",
            fix="lower the program on Linux",
        )
    if not null_driver().is_file():
        raise LibraryError(
            "the null driver is missing",
            expected=str(null_driver()),
            why="this installation of jax_cudnn has no compiled libraries",
            fix="install jax-cudnn from a wheel, or build it: pip install .",
        )
    if importlib.util.find_spec("cudnn") is None:
        raise LibraryError(
            "the Python frontend of cuDNN is not installed",
            expected="the module `cudnn` of nvidia-cudnn-frontend",
            fix="pip install 'nvidia-cudnn-frontend>=1.28', or all that planning needs: "
            + install("cuda12", "cuda13"),
        )


def python() -> str:
    """The interpreter for the worker; LibraryError for an embedded Python, which has none."""
    executable = sys.executable or ""
    if "python" not in Path(executable).name.lower() or getattr(sys, "frozen", False):
        raise LibraryError(
            "planning without a GPU needs a Python interpreter",
            expected="sys.executable to be a Python interpreter",
            got=repr(executable),
            why="planning runs in a subprocess, and this Python is embedded in another program",
            fix="set sys.executable to the Python interpreter of this environment",
        )
    return executable


def variables() -> dict[str, str]:
    """The worker's environment: no GPU, this process's ``sys.path``, CUDA's wheels."""
    # The same order as in the frontend: the user's LD_LIBRARY_PATH, then the wheels.
    libraries = [path for path in (os.environ.get("LD_LIBRARY_PATH"), *wheel_folders()) if path]
    paths = [os.path.abspath(path) for path in sys.path if os.pathsep not in path]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def wheel_folders() -> list[str]:
    """``nvidia/<library>/lib`` (CUDA 12's wheels) and ``nvidia/cu13/lib`` (CUDA 13's).

    cuDNN's libraries have an RPATH to their neighbours; this is for wheels in several places.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    return [str(path) for root in roots or () for path in sorted(Path(root).glob("*/lib"))]
