"""What was measured of graphs: XLA's time over cuDNN's, by pattern and size.

Where nothing is measured on the spot, "auto" and "split" leave a graph to XLA if it was faster for
the nearest measured graphs. A graph is filed under its pattern, a text for its main operations;
``losses.json`` holds for each architecture the measured graphs of each pattern. ``python -m
benchmarks losses`` writes it from the results of ``python -m benchmarks auto``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..graph.dtypes import FP8
from ..graph.layout import layout
from ..graph.planned import MATRICES
from ..graph.promotion import default_compute
from ..graph.spec import Call, GraphSpec, Tensor
from .call_sets import CallSets, members
from .cost import cost
from .execution_plan import ExecutionPlan

TABLE = Path(__file__).with_name("losses.json")

# Kinds of element types that share kernels; others are their own kind.
_KINDS = {"bfloat16": "", "float16": "", **dict.fromkeys(FP8, "float8")}
_NEAREST = 3  # measured graphs that decide
_LOSS = 0.9  # of cuDNN's time: XLA must be as fast to be faster, and not noise
_REACH = 6.0  # the sum of two base-2 logarithms: beyond, all cases of the pattern must lose
_LEAST = 2  # measured graphs of a pattern, else nothing is known of it


@dataclass(frozen=True)
class Loss:
    """A measured loss; its text is the reason to leave a graph to XLA. ``ratio``, XLA's time over
    cuDNN's, is the mean of the nearest ``cases`` in ``benchmarks``, as they were measured."""

    pattern: str
    ratio: float
    device: str
    date: str
    cudnn: str
    cases: tuple[str, ...]
    near: bool  # else all measured graphs are far, and the ratio is the largest of them

    def __str__(self) -> str:
        return (
            f"XLA is faster for {self.pattern!r}: about {self.ratio:.0%} of the time of cuDNN in "
            f"the measured cases {', '.join(self.cases)} ({self.device}, cuDNN {self.cudnn}, "
            f"{self.date})"
        )


def loss(spec: GraphSpec, sm_version: int) -> Loss | None:
    """The loss that is expected if cuDNN runs this whole graph, or None: also on an architecture
    (compute capability times ten) without measurements, if the options fix the engine, and if they
    require determinism of a node that XLA may also compute with atomics."""
    found = nearest(spec, sm_version) if _may_be_xlas(spec) else None
    return found if found is not None and found.ratio < _LOSS else None


def nearest(spec: GraphSpec, sm_version: int) -> Loss | None:
    """What the nearest measured graphs of the same pattern say: near in operations and bytes, each
    by its logarithm. None if too few were measured."""
    measured = table().get(str(sm_version))
    if measured is None:
        return None
    filed, own = pattern(spec), cost(spec)
    rows = measured["patterns"].get(filed, ())
    if len(rows) < _LEAST:
        return None

    def distance(row: Sequence[Any]) -> float:
        pairs = zip((own.flops, own.bytes), row, strict=False)
        return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in pairs)

    near = sorted(rows, key=distance)[:_NEAREST]
    reached = distance(near[0]) <= _REACH
    if not reached:
        near = [max(rows, key=lambda row: row[2])]
    weights = [1 / (1 + distance(row)) for row in near]
    logs = (weight * math.log(row[2]) for weight, row in zip(weights, near, strict=True))
    ratio = math.exp(sum(logs) / sum(weights))
    where = {key: measured[key] for key in ("device", "date", "cudnn")}
    cases = tuple(row[3] for row in near)
    return Loss(filed, ratio, **where, cases=cases, near=reached)


def slow(spec: GraphSpec, plan: ExecutionPlan, sm_version: int) -> str:
    """Why XLA is faster than the best remaining engine for a graph; "" if no measurement says so,
    and wherever :func:`loss` is None."""
    measured = table().get(str(sm_version))
    anchors = (c.node for c in spec.calls if plan.engine_id in c.node.anchor.slow)
    node = next(anchors, None)
    if measured is None or node is None or not _may_be_xlas(spec):
        return ""
    return (
        f"only {plan.engine} supports it, and XLA is faster "
        f"({measured['device']}, cuDNN {measured['cudnn']}); {node.method}: {node.about.requires}"
    )


def _may_be_xlas(spec: GraphSpec) -> bool:
    return spec.options.engine is None and (
        not spec.options.deterministic
        or all(call.node.deterministic() == call.node for call in spec.calls)
    )


def key(sm_version: int) -> str:
    """What the decisions for an architecture depend on: a part of the key of stored cuts."""
    return json.dumps(table().get(str(sm_version)), sort_keys=True)


@functools.cache
def table() -> Mapping[str, Any]:
    """The SM version as text -> the conditions of the measurement, and ``patterns``: a pattern ->
    rows of operations, bytes, XLA's time over cuDNN's, and the name of the case."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def pattern(spec: GraphSpec) -> str:
    """The main operations of a graph, such as "conv_dgrad depthwise" or "matmul float8 + epilogue".

    These are the patterns of its nodes that are more than pointwise, in order, with the kinds of
    their operand dtypes unless these are 16-bit floats. Around convolutions and matmuls it also
    states operations before and after: "matmul + bias" has only a bias after it; in "prologue of
    int8 + matmul" the graph reads int8 and converts it, whatever comes after.
    """
    orders, at_ports = layout(spec).orders, spec.at_ports
    main_calls, read = {}, {*spec.outputs, *_read(spec.calls)}
    for i, (call, tensors) in enumerate(at_ports):
        ports = {port: replace(t, order=orders[t.name]) for port, t in tensors.items()}
        if words := _of_node(spec, call, ports, read):
            main_calls[i] = words
    anchors = spec.anchors
    if not anchors:
        # Bound by memory traffic: float32 uses the same kernels as 16-bit floats, and arithmetic
        # in between does not count.
        kinds = _kinds(spec, spec.inputs) - {"float32"}
        return _words([" + ".join(main_calls.values()) or "pointwise", *sorted(kinds)])
    sets = CallSets(spec)
    before = {*members(sets.before(sets.anchors))} - main_calls.keys()
    parts, new = list(main_calls.values()), set[str]()
    if before:
        read = _read(spec.calls[i] for i in before).intersection(spec.inputs)
        new = _kinds(spec, read) - _kinds(spec, _read(anchors))
        parts.insert(0, _words(["prologue", *(f"of {kind}" for kind in sorted(new))]))
    behind = [c for i, c in enumerate(spec.calls) if i not in main_calls and i not in before]
    if behind and not new:  # converted operands cost cuDNN more than any epilogue
        epilogue = "epilogue"
        if not anchors[
            0
        ].node.anchor.product:  # bound by memory traffic: an additional array matters
            read = _read(spec.calls[i] for i in members(sets.after(sets.anchors)))
            largest = max(math.prod(t.shape) for t in spec.tensors)
            sizes = [math.prod(t.shape) for t in spec.input_tensors if t.name in read]
            epilogue = "residual epilogue" if largest in sizes else epilogue
        elif len(anchors) == len(behind) == 1 and _is_bias(spec, behind[0], anchors[0]):
            epilogue = "bias"  # XLA's matmul library also adds one
        parts.append(epilogue)
    return " + ".join(parts)


def _of_node(spec: GraphSpec, call: Call, ports: Mapping[str, Tensor], read: set[str]) -> str:
    """A node's own words; empty for what only accompanies others."""
    unread = [port for port, name in call.outputs if name not in read]
    node = call.node.without(unread) if unread else call.node
    words = node.work(ports).pattern
    if not (words and node.anchor.product):
        return words
    inputs = {port: ports[port] for port, _ in call.inputs}
    usual = node.compute_data_type == default_compute(node, inputs)
    kinds = sorted(_kinds(spec, _read([call])))
    return _words([words, *kinds, "" if usual else f"in {node.compute_data_type}"])


def _read(calls: Iterable[Call]) -> set[str]:
    return {name for call in calls for _, name in call.inputs}


def _kinds(spec: GraphSpec, names: Iterable[str]) -> set[str]:
    """The kinds of these tensors' element types; 16-bit floats, as the usual ones, have none."""
    dtypes = {spec.tensor(name).dtype for name in names}
    return {_KINDS.get(dtype, dtype) for dtype in dtypes} - {""}


def _words(words: Iterable[str]) -> str:
    return " ".join(filter(None, words))


def _is_bias(spec: GraphSpec, call: Call, product: Call) -> bool:
    """Whether a call adds one number per column to a matrix product, which XLA's matmul
    library can fuse, too."""
    if not (call.node.algebra.adds and product.node.anchor.order == MATRICES):
        return False
    ((_, made),) = product.outputs
    added = [spec.tensor(name).shape for _, name in call.inputs if name != made]
    ports, shape = product.node.ports, spec.tensor(made).shape
    at = len(shape) - len({*ports.outputs[0].axes} - {*ports.inputs[0].axes})  # of the columns
    return added == [(*(1 for _ in shape[:at]), *shape[at:])]
