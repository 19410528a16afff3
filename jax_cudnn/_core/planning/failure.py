"""Tells failures of planning that may pass from what cuDNN says of a graph: only that is kept."""

from __future__ import annotations

import logging
import mmap
import re
import textwrap
from collections.abc import Callable
from typing import TypeVar

from ..errors import PlanningError, UnsupportedGraphError

log = logging.getLogger("jax_cudnn")
V = TypeVar("V")

# Failures of memory, libraries and the driver, wherever they stand in a text.
_LACKING = re.compile(
    r"SUBLIBRARY|PREREQUISITE|ALLOC(ATION)?_FAILED|CUDA_ERROR|cudaError"
    r"|NOT_SUPPORTED_INCOMPATIBLE|(?i:bad_alloc|out.of.memory|cannot allocate memory"
    r"|too many open files|no space left on device|cannot open shared object)"
)
# Statuses that are not about the graph; cuDNN does write kernels that do not compile, which is the
# graph where there is memory. A status before " ==" stands in the text of a check.
_STATUS = re.compile(
    r"\bCUDNN_STATUS_(?!NOT_SUPPORTED|BAD_PARAM|INVALID_VALUE|ARCH_MISMATCH|SUCCESS"
    r"|INTERNAL_ERROR_COMPILATION_FAILED)\w+\b(?! ==)"
)
# A line on an engine that another follows: the last one is what became of it. Version 9.19 writes
# INTERNAL_ERROR before that for grouped convolutions which an engine does not support.
_INNER = re.compile(r"(?:Warning|Error): CUDNN_STATUS_\w+; .*\s+(?=(?:Warning|Error): )")
# With less memory, cuDNN 9.28 leaves out engines whose libraries it cannot map, without an error,
# and the kernels of others do not compile.
_ROOM = 768 << 20  # bytes of address space


def check_room() -> None:
    """PlanningError if this process cannot map the memory that planning needs."""
    try:
        mmap.mmap(-1, _ROOM).close()
    except OSError as error:
        raise _failed(f"{_ROOM >> 20} MiB of memory cannot be mapped: {error}") from None


def passing(error: BaseException) -> PlanningError | None:
    """The failure that an exception of planning is; None for what is said of the graph itself."""
    if isinstance(error, PlanningError):
        return error
    if isinstance(error, MemoryError):
        return _failed(f"MemoryError {error}")
    said = isinstance(error, (RuntimeError, OSError, ImportError))  # their words alone tell
    if not said or isinstance(error, UnsupportedGraphError):
        return None
    text = str(error).strip()
    if "COMPILATION_FAILED" in text:
        try:
            check_room()
        except PlanningError as failure:
            return failure
    failed = _LACKING.search(text) or _STATUS.search(_INNER.sub("", text))
    return _failed(textwrap.shorten(text, 500, placeholder=" ...")) if failed else None


def may_pass(text: str) -> bool:
    """Whether an error's text is about memory, libraries or the driver, and not about a graph."""
    return "RESOURCE_EXHAUSTED" in text or _LACKING.search(text) is not None


def twice(attempt: Callable[..., V]) -> V:
    """``attempt(fresh=False)``; where that fails in a way that may pass, ``attempt(fresh=True)``.
    Raises PlanningError if both fail so."""
    try:
        return attempt(fresh=False)
    except Exception as error:
        if not (failed := passing(error)):
            raise
    log.debug("planning failed, and is tried once more: %s", failed)
    try:
        return attempt(fresh=True)
    except Exception as error:
        failed = passing(error)
        if failed is None or failed is error:
            raise
        raise failed from error


def _failed(got: str) -> PlanningError:
    return PlanningError(
        "cuDNN failed while planning",
        got=got,
        why="too little memory, or a library or the driver failed; the graph is not the cause",
        fix="try again: nothing is kept of it; free memory; "
        "python -m jax_cudnn doctor checks the installation",
    )
