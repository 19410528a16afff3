"""A graph as a picture: what is fused into which plan, and what crosses memory between them."""

from __future__ import annotations

import html
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph.spec import GraphSpec, Tensor
from ..text import microseconds, shape, size
from .plan import Plan

_XLA, _CUDNN = "#e4e6e9", ("#d3ecae", "#b9e0f2", "#f7e0a6", "#e5d2f0", "#f6cfc4")
_CHARACTER, _LINE, _GAP = 6.7, 15, 12
_ROUNDS = 8  # of moving places towards their neighbours
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}"
font-family="monospace" font-size="11" text-anchor="middle">
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>"""


@dataclass(frozen=True)
class Picture:
    """The picture of a plan: SVG in a notebook, text where it is printed.

    Operations that are fused into one plan share a color, and those that XLA runs are gray. Arrows
    from one plan to another carry the bytes that cross memory there. A time is measured, or the
    least that the GPU's rates allow.
    """

    plan: Plan

    def svg(self) -> str:
        """The picture as SVG."""
        return "\n".join(_svg(self.plan))

    _repr_svg_ = svg

    def __str__(self) -> str:
        return "\n".join(_text(self.plan))

    __repr__ = __str__


def taken(plan: Plan) -> float | None:
    """The measured seconds of a graph as it runs; None where nothing was measured."""
    return next((one.seconds for one in plan.measured if one.taken), None)


def _heads(plan: Plan) -> Iterator[tuple[str, str]]:
    """Who runs each segment; its memory traffic and time."""
    for segment, said in zip(plan.segments, plan.explain().to_json()["segments"], strict=True):
        count = f"{len(segment.calls)} operation{'s' * (len(segment.calls) > 1)}"
        who = f"cuDNN {segment.engine.partition('_')[0]}: {count} in one plan"
        seconds, measured = said["roofline_seconds"], taken(plan)
        time = "" if seconds is None else f", at least {microseconds(seconds)} us"
        if measured is not None and len(plan.segments) == 1:
            time = f", {microseconds(measured)} us measured"
        moved = size(said["reads_bytes"] + said["writes_bytes"])
        yield f"XLA: {count}" if segment.plan is None else who, f"{moved}{time}"


def _of(spec: GraphSpec, name: str) -> str:
    """A value by the operation that makes it, an operand by its name, a constant by its value."""
    if (value := spec.tensor(name).value) is not None:
        return f"{value:.6g}"
    for call in spec.calls:
        for port, made in call.outputs:
            if made == name:
                return call.name if len(call.outputs) == 1 else f"{call.name}.{port}"
    return name


def _array(tensor: Tensor) -> list[str]:
    return [shape(tensor), size(tensor.nbytes)]


# -- as text ---------------------------------------------------------------------------------------


def _text(plan: Plan) -> Iterator[str]:
    spec, several = plan.spec, len(plan.segments) > 1
    for i, (segment, head) in enumerate(zip(plan.segments, _heads(plan), strict=True), 1):
        yield f"+- {f'{i}. ' * several}{', '.join(head)}"
        for tensor in segment.spec.input_tensors:
            again = "" if tensor.name in spec.inputs else "read back: "
            yield f"|  {again}{_of(spec, tensor.name)}: {', '.join(_array(tensor))}"
        for call in segment.spec.calls:
            yield f"|    {call.name}({', '.join(_of(spec, name) for _, name in call.inputs)})"
        for tensor in segment.spec.output_tensors:
            readers = enumerate(plan.segments, 1)
            to = [f"to {j}" for j, other in readers if tensor.name in other.spec.inputs]
            to += ["a result"] if tensor.name in spec.outputs else []
            yield f"+> {_of(spec, tensor.name)}: {', '.join([*_array(tensor), *to])}"


# -- as SVG ----------------------------------------------------------------------------------------


class _Drawn:
    """Nodes as lines of text, each with its segment (None at the graph's edge), and edges with
    their labels; and of each segment the color."""

    def __init__(self, plan: Plan) -> None:
        spec, tints = plan.spec, iter(_CUDNN * len(plan.segments))
        self.colors = [_XLA if s.plan is None else next(tints) for s in plan.segments]
        self.nodes: dict[str, tuple[list[str], int | None]] = {}
        self.edges: dict[tuple[str, str], str] = {}
        makers = {name: call.name for call in spec.calls for _, name in call.outputs}
        for number, segment in enumerate(plan.segments):
            for call in segment.spec.calls:
                given = [spec.tensor(name) for _, name in call.inputs]
                numbers = [_of(spec, t.name) for t in given if t.value is not None]
                self.nodes[call.name] = [" ".join([call.name, *numbers])], number
                for tensor in given:
                    maker = makers.get(tensor.name, f"operand {tensor.name}")
                    if tensor.name in spec.inputs:
                        self.nodes[maker] = [tensor.name, *_array(tensor)], None
                    crosses = tensor.name in makers and self.nodes[maker][1] != number
                    if tensor.value is None:
                        self.edges[maker, call.name] = size(tensor.nbytes) if crosses else ""
        for tensor in spec.output_tensors:
            self.nodes[f"result {tensor.name}"] = _array(tensor), None
            self.edges[makers[tensor.name], f"result {tensor.name}"] = ""


class _Layout:
    """Nodes in layers: each below all that it reads, near what it is connected with."""

    def __init__(self, drawn: _Drawn) -> None:
        self._layer: dict[Any, int] = {}
        for a, b in drawn.edges:  # in the order of the operations
            self._layer[b] = max(self._layer.get(b, 0), self._layer.setdefault(a, 0) + 1)
        read = {b for _, b in drawn.edges}
        for a in drawn.nodes.keys() - read:
            self._layer[a] = min((self._layer[b] for c, b in drawn.edges if c == a), default=1) - 1
        # Between layers that are not neighbours an edge has a place in each.
        self.paths = {
            (a, b): [a, *((a, b, i) for i in range(self._layer[a] + 1, self._layer[b])), b]
            for a, b in drawn.edges
        }
        self._layer |= {place: place[2] for path in self.paths.values() for place in path[1:-1]}
        self.sizes = dict.fromkeys(self._layer, (_GAP, _LINE))
        self.sizes |= {name: _size(lines) for name, (lines, _) in drawn.nodes.items()}
        rows: dict[int, list[Any]] = {}
        for place in [*drawn.nodes, *(x for path in self.paths.values() for x in path[1:-1])]:
            rows.setdefault(self._layer[place], []).append(place)
        self._x = dict.fromkeys(self._layer, 0.0)
        near: dict[Any, list[Any]] = {place: [] for place in self._layer}
        for path in self.paths.values():
            for a, b in itertools.pairwise(path):
                near[a].append(b)
                near[b].append(a)
        for _ in range(_ROUNDS):
            for row in rows.values():
                self._place(row, near)
        left = min(self._x[p] - self.sizes[p][0] / 2 for p in self._layer) - _GAP
        self.at: dict[Any, tuple[float, float]] = {}
        y = 0.0
        for _, row in sorted(rows.items()):
            height = max(self.sizes[place][1] for place in row)
            self.at |= {place: (self._x[place] - left, y + height / 2) for place in row}
            y += height + 2 * _LINE
        self.width = max(x + self.sizes[p][0] / 2 for p, (x, _) in self.at.items())
        self.height = y - 2 * _LINE

    def _place(self, row: list[Any], near: Mapping[Any, Sequence[Any]]) -> None:
        """Orders the places of a layer by those that they are connected with."""
        want = {p: statistics.mean([self._x[q] for q in near[p]] or [self._x[p]]) for p in row}
        row.sort(key=want.__getitem__)
        right = -math.inf
        for place in row:
            width = self.sizes[place][0]
            self._x[place] = max(want[place], right + width / 2)
            right = self._x[place] + width / 2 + _GAP
        moved = statistics.mean(self._x[place] - want[place] for place in row)
        self._x |= {place: self._x[place] - moved for place in row}


def _svg(plan: Plan) -> Iterator[str]:
    drawn, heads = _Drawn(plan), [f"{who}; {what}" for who, what in _heads(plan)]
    graph, sizes = _Layout(drawn), [_size([head]) for head in heads]  # which explain the colors
    above = sum(height + _GAP for _, height in sizes) + _GAP
    width = max(graph.width, *(width + _GAP for width, _ in sizes)) + _GAP
    yield _SVG.format(math.ceil(width), math.ceil(above + graph.height + _GAP))
    y = _GAP
    for head, color, (wide, high) in zip(heads, drawn.colors, sizes, strict=True):
        yield from _box([head], _GAP + wide / 2, y + high / 2, color)
        y += high + _GAP
    for (a, b), path in graph.paths.items():
        points = [(x, y + above) for x, y in map(graph.at.__getitem__, path)]
        points[0] = points[0][0], points[0][1] + graph.sizes[a][1] / 2
        points[-1] = points[-1][0], points[-1][1] - graph.sizes[b][1] / 2
        yield from _arrow(points, drawn.edges[a, b])
    for name, (lines, own) in drawn.nodes.items():
        x, y = graph.at[name]
        yield from _box(lines, x, y + above, "white" if own is None else drawn.colors[own])
    yield "</svg>"


def _size(lines: Sequence[str]) -> tuple[float, float]:
    return _CHARACTER * max(map(len, lines)) + _GAP, _LINE * len(lines) + _GAP / 2


def _box(lines: Sequence[str], x: float, y: float, color: str) -> Iterator[str]:
    width, height = _size(lines)
    left, top = x - width / 2, y - height / 2
    yield (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
        f'fill="{color}"/>'
    )
    for number, text in enumerate(lines, 1):
        yield f'<text x="{x:.1f}" y="{top + _LINE * number:.1f}">{html.escape(text)}</text>'


def _arrow(points: Sequence[tuple[float, float]], label: str) -> Iterator[str]:
    path, (x, y), (x2, y2) = " ".join(f"{x:.1f},{y:.1f}" for x, y in points), *points[-2:]
    yield (
        f'<polyline points="{path}" fill="none" stroke="#444" stroke-width="{2 if label else 1}" '
        'marker-end="url(#tip)"/>'
    )  # and the label where arrows from one node are apart
    yield f'<text x="{0.3 * x + 0.7 * x2:.1f}" y="{0.3 * y + 0.7 * y2:.1f}">{label}</text>'
