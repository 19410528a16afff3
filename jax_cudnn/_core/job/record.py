"""Messages between the processes of a job: a decision, or an error."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..errors import JaxCudnnError, JobError, LibraryError

_FORMAT = 1  # of a record; not a part of its key, so that a process can say that it differs
_LARGEST = 2**26  # bytes of a record: it has a plan for each segment


@dataclass(frozen=True)
class Question:
    """The subject of an agreement: the arguments of ``agreement.agreed``, and the indices of the
    processes that take part, ascending."""

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
        names = []
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
