"""Why cuDNN has no engine for a graph: its reasons in readable form, and what to do."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from ..errors import UnsupportedGraphError
from ..graph.spec import GraphSpec

# cuDNN's text (status without its prefix, then its failed check) -> its meaning, and the fix.
_MEANINGS = (
    (
        r"mmaNodeCount > 1",
        "more than one convolution or matmul in one graph",
        "cut the function into graphs of one convolution or matmul each",
    ),
    (
        r"type mismatch|types? of (the )?(inputs|A and B)",
        "the operands of a convolution or matmul have different types",
        "use one dtype for both operands; .set_data_type rounds a value that is computed in the "
        "graph (next to a 16-bit operand that is the default)",
    ),
    (
        r"getDimA\(\)\[1\] == 1",
        "a pointwise graph over a single channel",
        "apply the operation in jnp, or in a graph with a convolution or matmul",
    ),
    (
        r"[Ii]nvalid engine id",
        "cuDNN has no engine with this id for these operations",
        None,
    ),
    (r"QMMA kernels", "this GPU has no tensor cores for the data type", None),
    (r"ARCH_MISMATCH|deviceVer", "made for another GPU architecture", None),
    (
        r"LAYOUT",
        "the memory layout of a tensor is not supported",
        "use rank 4 (NCHW dims) for the tensors of a convolution and rank 3 for those of a matmul",
    ),
    (
        r"DATA_TYPE|dataType|yType",
        "a data type is not supported",
        "use bfloat16 or float16 inputs; keep the result of a reduction in float32",
    ),
    (
        r"reduction_o",
        "this engine cannot reduce these dimensions",
        "reduce the last dimension, all other dimensions, or everything, as the last operation",
    ),
    (r"reduction_descriptor", "cuDNN has no engine for this reduction mode", None),
    (
        r"GRAPH_PATTERN|unsatisfiable deps",
        "this pattern of operations is not supported",
        "cut the function into smaller graphs: one convolution or matmul each, a reduction last",
    ),
    (
        r"SHAPE",
        "a shape is not supported",
        "pad channels and features to a multiple of 8",
    ),
    (r"", "not supported", None),
)
_LAST = ("not supported", "made for another GPU architecture")
LEFT_OUT = "excluded by the options"
_WORKSPACE_ADVICE = "raise max_workspace, or use a smaller batch or shorter sequences"
_BROADCAST_ADVICE = "broadcast that operand before the call: jnp.broadcast_to(x, shape)"


def engine_reasons(text: str) -> dict[str, str]:
    """``{engine: reason}`` from the text of a frontend exception.

    cuDNN writes one block per engine, with its checks from the innermost outwards: the first line
    is the cause, the rest is the call stack of the checks. Engines for other GPUs come last.
    """
    reasons: dict[str, str] = {}
    for block in re.split(r'(?=\{"engineId")', text):
        engine = re.match(r'\{"engineId":(\d+)', block)
        cause = re.search(r"Warning: CUDNN_STATUS_(\w+); Reason: (.*)", block)
        if cause is not None:
            meaning = next(
                m for pattern, m, _ in _MEANINGS if re.search(pattern, " ".join(cause.groups()))
            )
            who = f"engine {engine[1]}" if engine else "graph"
            reasons[who] = f"{meaning} ({_shortened(cause[2])})"
    if not reasons and "COMPILATION_FAILED" in text:
        return {"cuDNN": "the kernel that cuDNN generates for it does not compile"}
    if not reasons and text.startswith("Deselecting"):
        return {"cuDNN": LEFT_OUT}
    if not reasons:
        known = (m for pattern, m, _ in _MEANINGS[:-1] if re.search(pattern, text))
        return {"cuDNN": next((f"{m} ({_shortened(text)})" for m in known), text.strip())}
    return dict(sorted(reasons.items(), key=lambda item: "architecture" in item[1]))


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 160, placeholder=" ...")


def most_telling(reasons: Mapping[str, str]) -> str:
    """The most specific of several engines' reasons.

    Rules of this package come first, then the order of ``_MEANINGS``; engines for other GPUs and
    refusals without an explanation come last.
    """
    words = [meaning for _, meaning, _ in _MEANINGS if meaning not in _LAST]

    def rank(reason: str) -> int:
        if reason.startswith(_LAST):
            return len(words) + next(i for i, m in enumerate(_LAST) if reason.startswith(m))
        return next((i for i, m in enumerate(words) if reason.startswith(m)), -1)

    return min(reasons.values(), key=rank, default="")


def unsupported(spec: GraphSpec, reasons: dict[str, str]) -> UnsupportedGraphError:
    """The error for a graph without an engine, from the reasons of the engines."""
    wants = {c.name: c.node.needs([port for port, _ in c.inputs]) for c in spec.calls}
    reasons = {**{name: words for name, words in wants.items() if words}, **reasons}
    kept = {engine: reason for engine, reason in reasons.items() if reason != LEFT_OUT}
    left_out = len(reasons) - len(kept)
    if left_out > 1:
        kept["the other plans" if kept else "all plans"] = f"{left_out} plans, {LEFT_OUT}"
        reasons = kept
    text = " ".join(reasons.values())
    advice = [
        hint
        for _, meaning, hint in _MEANINGS
        if hint and meaning in text and not (len(spec.calls) == 1 and hint.startswith("cut"))
    ]
    if "broadcasting" in text:
        advice.append(_BROADCAST_ADVICE)
    engine = spec.options.engine
    if engine is not None:
        advice = [
            f"choose another engine than {engine}: without that option, "
            "jax_cudnn.plan(...).candidates lists the engines for this graph"
        ]
    if LEFT_OUT in text:
        advice = [f"relax the options of the graph: {spec.options}", *advice]
    rules = {f"{c.node.method}: {c.node.requires}" for c in spec.calls if c.node.requires}
    return UnsupportedGraphError(
        "cuDNN has no engine for this graph on this GPU",
        graph=str(spec),
        reasons=reasons,
        why="; ".join(sorted(rules)),
        fix="; ".join(advice)
        or (
            "split the function into smaller graphs"
            if len(spec.calls) > 1
            else "apply this operation in jnp, outside the graph"
        ),
    )
