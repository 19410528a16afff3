"""Graphs without an engine: cuDNN's words, read as reasons of a kind, and the error."""

from __future__ import annotations

import logging
import mmap
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import PlanningError, UnsupportedGraphError
from ..graph.spec import GraphSpec
from ..reasons import ADVICE, Kind, Reason, Reasons

LEFT_OUT = Reason("excluded by the options", Kind.OPTIONS)

# cuDNN's text (status without its prefix, then its failed check) -> its kind and meaning.
_MEANINGS = (
    (r"mmaNodeCount > 1", Kind.ANCHORS, "more than one convolution or matmul in one graph"),
    (
        r"type mismatch|types? of (the )?(inputs|A and B)",
        Kind.FACTORS,
        "the operands of a convolution or matmul have different types",
    ),
    (r"getDimA\(\)\[1\] == 1", Kind.CHANNEL, "a pointwise graph over a single channel"),
    (r"[Ii]nvalid engine id", Kind.NUMBER, "cuDNN has no engine with this id for these operations"),
    (r"QMMA kernels", Kind.TENSOR_CORES, "this GPU has no tensor cores for the data type"),
    (r"ARCH_MISMATCH|deviceVer", Kind.ARCHITECTURE, "made for another GPU architecture"),
    (r"LAYOUT", Kind.LAYOUT, "the memory layout of a tensor is not supported"),
    (r"DATA_TYPE|dataType|yType", Kind.DTYPE, "a data type is not supported"),
    (r"reduction_o", Kind.REDUCED, "this engine cannot reduce these dimensions"),
    (r"reduction_descriptor", Kind.REDUCTION, "cuDNN has no engine for this reduction mode"),
    (
        r"GRAPH_PATTERN|unsatisfiable deps",
        Kind.PATTERN,
        "this pattern of operations is not supported",
    ),
    (r"SHAPE", Kind.SHAPE, "a shape is not supported"),
)
_CUTTING = (Kind.ANCHORS, Kind.PATTERN)  # whose advice is to cut


def engine_reasons(text: str) -> Reasons:
    """The reasons of each engine from the text of a frontend exception: one block per engine, whose
    first line is the cause; the rest is the call stack of cuDNN's checks."""
    reasons: Reasons = {}
    for block in re.split(r'(?=\{"engineId")', text):
        engine = re.match(r'\{"engineId":(\d+)', block)
        cause = re.search(r"Warning: CUDNN_STATUS_(\w+); Reason: (.*)", block)
        if cause is not None:
            who = f"engine {engine[1]}" if engine else "graph"
            reasons[who] = _meant(" ".join(cause.groups()), cause[2])
    if reasons:
        return reasons
    if "COMPILATION_FAILED" in text:
        words = "the kernel that cuDNN generates for it does not compile"
        return {"cuDNN": Reason(words, Kind.COMPILATION)}
    if text.startswith("Deselecting"):
        return {"cuDNN": LEFT_OUT}
    meant = _meant(text, text)
    return {"cuDNN": Reason(text.strip(), Kind.OTHER) if meant.kind is Kind.OTHER else meant}


def _meant(text: str, shown: str) -> Reason:
    found = ((kind, words) for pattern, kind, words in _MEANINGS if re.search(pattern, text))
    kind, words = next(found, (Kind.OTHER, "not supported"))
    return Reason(f"{words} ({textwrap.shorten(shown, 160, placeholder=' ...')})", kind)


def unsupported(
    spec: GraphSpec, reasons: Mapping[str, Reason], why: str = ""
) -> UnsupportedGraphError:
    """The error for a graph without an engine, with the most telling reasons first; ``why``: in
    place of what the nodes require."""
    needs = {call.name: call.node.engines(at, spec).needs for call, at in spec.at_ports}
    found = {name: reason for name, reason in needs.items() if reason} | {**reasons}
    left_out = [who for who, reason in found.items() if reason == LEFT_OUT]
    if len(left_out) > 1:
        found = {who: reason for who, reason in found.items() if reason != LEFT_OUT}
        others = "the other plans" if found else "all plans"
        found[others] = Reason(f"{len(left_out)} plans, {LEFT_OUT}", Kind.OPTIONS)
    kinds = {reason.kind for reason in found.values()}
    required = {
        f"{c.node.method}: {c.node.about.requires}" for c in spec.calls if c.node.about.requires
    }
    return UnsupportedGraphError(
        "cuDNN has no engine for this graph",
        graph=str(spec),
        reasons={who: str(r) for who, r in sorted(found.items(), key=lambda item: item[1].kind)},
        why=why or "; ".join(sorted(required)),
        fix="; ".join(_advice(spec, kinds)),
    )


def _advice(spec: GraphSpec, kinds: set[Kind]) -> list[str]:
    """What to do about reasons of these kinds."""
    options = spec.options
    relax = [f"relax the options of the graph: {options}"] if Kind.OPTIONS in kinds else []
    if options.engine is not None:
        other = f"choose another engine than {options.engine}: without that option, "
        return [*relax, f"{other}jax_cudnn.plan(...).candidates lists the engines for this graph"]
    several = len(spec.calls) > 1
    kinds = kinds if several else kinds.difference(_CUTTING)
    split = "split the function into smaller graphs"
    alone = "apply this operation in jnp, outside the graph"
    advice = [ADVICE[kind] for kind in sorted(kinds) if kind in ADVICE]
    return [*relax, *advice] or [split if several else alone]


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
