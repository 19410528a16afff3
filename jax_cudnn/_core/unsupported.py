"""Why cuDNN cannot run a graph: what we know beforehand, and its own reasons in readable form."""

from __future__ import annotations

import re
import textwrap

from . import layout
from .errors import UnsupportedGraphError
from .spec import GraphSpec


def known_reasons(spec: GraphSpec) -> dict[str, str]:
    """Empty tensors, and pointwise operations whose broadcast cuDNN gets wrong, with why.

    Measured on an H200 with cuDNN 9.19 over all 16 patterns of rank four: as an epilogue of a
    convolution, an operand of another pattern than the four below is accepted and read out of
    bounds. Alone, such an operation is refused by cuDNN. Around a matmul every pattern is right.
    """
    found: dict[str, str] = {}
    if spec.is_empty:
        found["shape"] = "a tensor has no elements (under jit XLA runs such a graph)"
    if any(call.node.broadcasts_any for call in spec.calls):
        return found
    for call in spec.calls:
        broadcasting = [port.name for port in call.node.ports.inputs if port.axes == ("...",)]
        if len(broadcasting) < 2:
            continue
        tensors = [spec.tensor(name) for _, name in (*call.inputs, call.outputs[0])]
        dims = [layout.view(spec, tensor)[0] for tensor in tensors]
        *operands, out = dims
        n, c, *spatial = out
        ones = [1] * len(spatial)
        allowed = [[*out], [1, c, *ones], [n, 1, *spatial], [1, 1, *ones]]
        wrong = [list(dim) for dim in operands if list(dim) not in allowed]
        if wrong or out not in operands:
            found[call.name] = (
                f"broadcasting {' and '.join(map(str, wrong or map(list, operands)))} to "
                f"{list(out)} is not supported: beside a full operand cuDNN takes "
                f"{', '.join(map(str, allowed[1:]))}"
            )
    return found


# What cuDNN writes (status without its prefix, then its failed check) -> what it means, what helps.
_MEANINGS = (
    (
        r"mmaNodeCount > 1",
        "more than one convolution or matmul in one graph",
        "cut the function into graphs of one convolution or matmul each",
    ),
    (
        r"type mismatch|types? of (the )?(inputs|A and B)",
        "the operands of a convolution or matmul have different types",
        "give both operands one dtype; a value computed before them is float32 until you call "
        ".set_data_type on it",
    ),
    (
        r"getDimA\(\)\[1\] == 1",
        "a pointwise graph over a single channel",
        "apply such an operation in jnp, or beside a convolution or matmul",
    ),
    (r"ARCH_MISMATCH|deviceVer", "made for another GPU architecture", None),
    (
        r"LAYOUT",
        "the memory layout of a tensor is not supported",
        "give the tensors of a convolution rank 4 (NCHW dims) and those of a matmul rank 3",
    ),
    (
        r"DATA_TYPE|dataType|yType",
        "a data type is not supported",
        "use bfloat16 or float16 inputs; leave a reduction's result float32",
    ),
    (
        r"reduction_o",
        "reduces dimensions that this engine cannot reduce",
        "reduce the last dimension, or all the others, or everything, as the last operation",
    ),
    (
        r"GRAPH_PATTERN",
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
_BROADCAST_ADVICE = "broadcast that operand before the call: jnp.broadcast_to(x, shape)"


def engine_reasons(text: str) -> dict[str, str]:
    """``{engine: reason}`` from the text of a frontend exception.

    cuDNN writes one block an engine, its checks from the innermost outwards: the first line is
    the cause, the rest is the call stack of its checks. Engines for other GPUs come last.
    """
    reasons: dict[str, str] = {}
    for block in re.split(r'(?=\{"engineId")', text):
        engine = re.match(r'\{"engineId":(\d+)', block)
        cause = re.search(r"Warning: CUDNN_STATUS_(\w+); Reason: (.*)", block)
        if cause is not None:
            meaning = next(
                m for pattern, m, _ in _MEANINGS if re.search(pattern, " ".join(cause.groups()))
            )
            detail = textwrap.shorten(cause[2], 160, placeholder=" ...")
            reasons[f"engine {engine[1]}" if engine else "graph"] = f"{meaning} ({detail})"
    if not reasons:
        return {"cuDNN": text.strip()}
    return dict(sorted(reasons.items(), key=lambda item: "architecture" in item[1]))


def unsupported(spec: GraphSpec, reasons: dict[str, str]) -> UnsupportedGraphError:
    """The error for a graph that cuDNN has no engine for, from the reasons of the engines."""
    text = " ".join(reasons.values())
    advice = [
        hint
        for _, meaning, hint in _MEANINGS
        if hint and meaning in text and not (len(spec.calls) == 1 and hint.startswith("cut"))
    ]
    if "broadcasting" in text:
        advice.append(_BROADCAST_ADVICE)
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
            else "apply this operation in jnp, outside a graph"
        ),
    )
