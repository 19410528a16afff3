"""Where in the user's code something was written or went wrong; for error messages."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep
_JAX_PLUMBING = ("cache_miss", "reraise_with_filtered_traceback", "__call__", "bind")


def user_line() -> str:
    """``file:line, in function: source`` of the innermost frame that is the user's."""
    frame = next((f for f in _callers() if _is_users(f)), None)
    return "" if frame is None else _describe(frame, frame.f_lineno)


def users_place(frames: Iterable[tuple[str, int, str]]) -> str:
    """``file:line`` of the innermost of a program's frames (file, line, function) that is neither
    ours nor Flax's; JAX's are left out before."""
    flax = f"{os.sep}site-packages{os.sep}flax{os.sep}"
    for file, line, _ in frames:
        if flax not in file and not os.path.abspath(file).startswith(_PACKAGE):
            return f"{file}:{line}"
    return ""


def user_level() -> int:
    """The ``stacklevel`` of a warning by our caller that points at the user's innermost frame."""
    return next((level for level, frame in enumerate(_callers()) if _is_users(frame)), 1)


def jax_caller() -> str | None:
    """Name of the JAX or NumPy function that the user called to get here, if there is one."""
    inner = []
    for frame in _callers():
        if _is_users(frame):
            break
        inner.append(frame)
    return _jax_function(inner)


def raised_in(error: BaseException) -> tuple[str, str | None]:
    """The user's line that raised, and the JAX function it called there."""
    line, below = "", []
    traceback = error.__traceback__
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            line, below = _describe(traceback.tb_frame, traceback.tb_lineno), []
        else:
            below.insert(0, traceback.tb_frame)
        traceback = traceback.tb_next
    # JAX may have cut its own frames out of the traceback; then the source line decides.
    written = re.search(r"\b(?:jax|jnp|np|nn|lax|numpy)\.(\w+)\(", line)
    return line, _jax_function(below) or (written[1] if written else None)


def in_jax_operator() -> bool:
    """Whether our caller was called by a JAX array's operator."""
    caller = sys._getframe(2).f_code.co_name
    return caller.startswith(("_operator_", "deferring_binary_op"))


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    ours = os.path.abspath(name).startswith(_PACKAGE) or name.startswith("<frozen ")
    return not ours and not _is_library(frame)


def _is_library(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in ("jax", "jaxlib", "numpy")


def _jax_function(frames: Iterable[FrameType]) -> str | None:
    """The outermost public function of JAX or NumPy, from frames given innermost first.

    A jitted function of jnp never has its own frame: its wrappers hold it as a local.
    """
    found = None
    for frame in filter(_is_library, frames):
        local: Any = frame.f_locals
        holders = (local.get("fun"), local.get("self"), frame.f_code)
        names = [getattr(h, "__name__", getattr(h, "co_name", None)) for h in holders]
        name = next((n for n in names if n and n not in _JAX_PLUMBING), None)
        found = name or found
    return found


def _describe(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    return f"{place}: {text}" if text else place


def defined_at(function: Any) -> str:
    """``file:line, in function`` of a function's definition."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}" if code else ""
