"""One process decides for all of a job; the others wait for what it has found.

Processes that plan independently may choose differently, and even the same choice has different
bytes in each build (cuDNN compiles kernels into its plans). They would then compile different
programs and hang in the first collective.

A success holds for the life of the job. A failure belongs to one attempt: requesting the key again
joins the next attempt, so a retry on all processes is a new attempt. All processes must therefore
request equally often: an additional request waits for an attempt that the lowest process never
makes, and a process that missed a failure (by a timeout) gets it at its next request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from . import compat, errors
from .compat import Device
from .errors import JaxCudnnError, JobError, LibraryError

_FORMAT = 1  # of a record; not a part of its key, so that a process can say that it differs
_LARGEST = 2**26  # bytes of a record: it has a plan for each segment


@dataclass(frozen=True)
class Question:
    """The subject of an agreement.

    Attributes:
        key: equal in all processes: the graph, its options, ``jax_cudnn.target``. What may differ
            by mistake belongs to ``identity``.
        processes: the indices of those that take part, ascending.
        name: the user's function, for messages.
        identity: returns what the decision depends on and all processes must share: versions and
            GPU, as text or as a JSON object, whose differences messages show.
        timeout: seconds that this process waits for the lowest one.
    """

    key: str
    processes: Sequence[int]
    name: str
    identity: Callable[[], str]
    timeout: float

    @property
    def leader(self) -> int:
        return self.processes[0]

    @property
    def path(self) -> str:
        """The key of its answers in the job's store."""
        text = json.dumps([self.key, list(self.processes)])
        return "jax_cudnn/agreed/" + hashlib.sha256(text.encode()).hexdigest()


def pack(**content: Any) -> bytes:
    content |= {"format": _FORMAT}
    return zlib.compress(json.dumps(content).encode())


def unpack(record: bytes, question: Question, process: int) -> dict[str, Any]:
    """The content of a record, an error as an exception; LibraryError if another installation
    wrote it, JobError if it is none."""
    try:
        text = zlib.decompressobj().decompress(record, _LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError(f"more than {_LARGEST} bytes")
        content = json.loads(text)
        if content["format"] == _FORMAT and "error" in content:
            content["error"] = _received(content["error"], question)
        elif content["format"] == _FORMAT:
            content |= {"identity": str(content["identity"]), "made": dict(content["made"])}
    except Exception as error:  # anything may stand there
        raise JobError(
            f"{question.name}: the store of this job holds something else than a plan",
            got=f"{type(error).__name__}: {error}"[:200],
            fix="run the job again, with a store that nothing else writes to",
        ) from error
    if content["format"] != _FORMAT:
        theirs, ours = "another version of jax_cudnn", "this one"
    elif "error" in content:  # all raise the same, as the lowest process does
        return content
    elif content["identity"] == (own := question.identity()):
        return content
    else:
        theirs, ours = _differences(content["identity"], own)
    raise LibraryError(
        f"{question.name}: the processes of this job use different libraries or GPUs",
        expected=f"process {question.leader}: {theirs}",
        got=f"process {process}: {ours}",
        why="a plan runs only with the versions and on the GPU model for which it was built",
        fix="install the same versions everywhere, and use GPUs of one model per program",
    )


def _differences(a: str, b: str) -> tuple[str, str]:
    """The differences between two JSON objects, nested ones included; else both texts."""
    try:
        left, right = json.loads(a), json.loads(b)
        names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    except (ValueError, TypeError, AttributeError):
        return a, b
    if not names:
        return a, b
    parts = []
    for name in names:
        pair = left.get(name), right.get(name)
        if isinstance(pair[0], str) and isinstance(pair[1], str):
            pair = _differences(*pair)
        parts.append([f"{name} {value}" for value in pair])
    return ", ".join(part[0] for part in parts), ", ".join(part[1] for part in parts)


def sent(error: BaseException) -> dict[str, Any]:
    """An error as data: with its class if it is from this package, else as text."""
    if not isinstance(error, JaxCudnnError):
        return {"text": f"{type(error).__name__}: {error}"}
    ours = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    parts = {part: value for part, value in error.__dict__.items() if part != "__notes__"}
    return {"class": ours.__name__, "parts": json.loads(json.dumps(parts, default=str))}


def _received(sent: dict[str, Any], question: Question) -> JaxCudnnError:
    first = f"process {question.leader}"
    if "class" in sent:
        parts = sent["parts"]
        summary = f"in {first}, which plans for this job: {parts['summary']}"
        kind = getattr(errors, sent["class"], JobError)  # a newer jax_cudnn may have more of them
        if not issubclass(kind, JaxCudnnError):
            raise TypeError(f"{kind.__name__} is not an error of jax_cudnn")
        error = errors.rebuild(kind, {**parts, "summary": summary})
        str(error)  # fails where parts are missing, or of other types
        return error
    return JobError(
        f"{question.name}: {first} failed to plan it",
        got=sent["text"],
        why=f"{first} plans for processes {question.processes}",
        fix=f"see the output of {first}",
    )


log = logging.getLogger("jax_cudnn")

_SLICE = 1.0  # seconds: Python sees Ctrl-C only between two calls of the client


def participants(devices: Sequence[Device]) -> list[int]:
    """The processes that agree on the program of these devices, ascending: the first decides.

    Empty if there is nothing to agree on: no devices, devices of one process, or none of this
    process, which then never runs the program.
    """
    found = sorted({device.process_index for device in devices})
    return found if len(found) > 1 and jax.process_index() in found else []


def agreed(question: Question, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``make()`` in the lowest of the question's processes, in all of them.

    Without processes, or without ``jax.distributed.initialize``, simply ``make()``. It returns a
    dictionary for JSON, and is called in the lowest process only.

    Raises:
        JobError: the lowest process did not answer in time, or failed with an error that is not
            of this package, or the job's store cannot be reached.
        LibraryError: the lowest process has another identity, or another jax_cudnn.
        JaxCudnnError: the error of ``make``, in all processes.
    """
    global _job
    client = compat.distributed_client()
    if not question.processes or client is None:
        return make()
    with _lock:
        if _job is None or _job.client is not client:  # the job may have been initialised anew
            _job = Job(client, jax.process_index())
        job = _job
    return job.agreed(question, make)


@dataclass
class _Answer:
    """This process's view of a decision; the lock is held while it waits or decides."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    attempt: int = 0
    record: bytes | None = None  # of the attempt that succeeded


class Job:
    """This process's part in a job: the client of the job's store, and all known decisions."""

    def __init__(self, client: Any, process: int):
        self.client, self.process = client, process
        self._answers: dict[str, _Answer] = {}
        self._lock = threading.Lock()

    def agreed(self, question: Question, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        deadline = time.monotonic() + question.timeout
        with self._lock:
            answer = self._answers.setdefault(question.path, _Answer())
        # One thread at a time takes part in an attempt: each failed request is one attempt, in
        # every process, whatever the order of its threads.
        leads = self.process == question.leader
        limit = -1 if leads else min(question.timeout, threading.TIMEOUT_MAX)
        if not answer.lock.acquire(timeout=limit):
            raise self._late(question, answer)
        try:
            record = answer.record
            if record is None:
                path = f"{question.path}/{answer.attempt}"
                if leads:
                    record = self._get(path) or self._decide(question, answer, path, make)
                else:
                    record = self._await(question, answer, path, deadline)
            content = unpack(record, question, self.process)
            if "error" in content:
                answer.attempt += 1
                raise content["error"]
            answer.record = record
        finally:
            answer.lock.release()
        return content["made"]

    def _decide(
        self, question: Question, answer: _Answer, path: str, make: Callable[[], dict[str, Any]]
    ) -> bytes:
        """Runs ``make`` and publishes its result or error."""
        started = time.monotonic()
        self._put(path + "/begun", b"1")
        try:
            record = pack(made=make(), identity=question.identity())
        except Exception as error:  # not an interrupt, after which the same attempt continues
            answer.attempt += 1
            self._put(path, pack(error=sent(error)))  # else no process may act on it
            raise
        self._put(path, record)
        log.debug(
            "%s: planned for processes %s in %.3f s, published %d bytes",
            question.name,
            question.processes,
            time.monotonic() - started,
            len(record),
        )
        return record

    def _await(self, question: Question, answer: _Answer, path: str, deadline: float) -> bytes:
        started, warned = time.monotonic(), False
        log.debug("waiting for process %d to plan %s", question.leader, question.name)
        while (left := deadline - time.monotonic()) > 0:
            record = self._get(path, min(left, _SLICE))
            if record is None and not warned and time.monotonic() - started > 2 * _SLICE:
                warned = True
                log.warning("waiting for process %d to plan %s", question.leader, question.name)
            if record is not None:
                waited = time.monotonic() - started
                log.debug(
                    "process %d planned %s: waited %.3f s", question.leader, question.name, waited
                )
                return record
        raise self._late(question, answer)

    def _late(self, question: Question, answer: _Answer) -> JobError:
        begun = self._get(f"{question.path}/{answer.attempt}/begun", 0.1) is not None
        first = f"process {question.leader}"
        if begun:
            got = f"{first} has started planning and has not finished"
            why = "planning takes longer than this, or that process hangs"
            fix = "jax_cudnn.configure(job_timeout=SECONDS)"
        else:
            got = f"{first} has not started planning"
            why = f"{first} is busy, has ended, compiles another program, or has a cached one"
            fix = (
                "in all processes, run the same program in the same order, with the same shapes, "
                "options, jax_cudnn.target, jax_cudnn.implementation, matmul precision and "
                "XLA_FLAGS, and with one folder for JAX's compilation cache, or none; "
                f"if {first} is only late, jax_cudnn.configure(job_timeout=SECONDS)"
            )
        return JobError(
            f"{question.name}: process {self.process} waited {question.timeout:g} s for {first} "
            "to plan it",
            expected=f"the plan from {first}, which plans for processes {question.processes}",
            got=got + (f" (attempt {answer.attempt + 1})" if answer.attempt else ""),
            why=why,
            fix=fix,
        )

    def _put(self, path: str, value: bytes) -> None:
        try:
            self.client.key_value_set_bytes(path, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise self._unreachable(error) from error

    def _get(self, path: str, seconds: float = 0) -> bytes | None:
        """The value, after waiting up to ``seconds``; None if there is none."""
        try:
            if seconds > 0:
                milliseconds = max(1, round(seconds * 1000))
                return self.client.blocking_key_value_get_bytes(path, milliseconds)
            return self.client.key_value_try_get_bytes(path)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise self._unreachable(error) from error

    def _unreachable(self, error: BaseException) -> JobError:
        return JobError(
            f"process {self.process} cannot reach the store of its jax.distributed job",
            got=str(error).splitlines()[0],
            why="the processes of a job agree on plans through this store",
            fix="check that the coordinator (process 0) is still running",
        )


_job: Job | None = None
_lock = threading.Lock()
