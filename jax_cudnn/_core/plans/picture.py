"""A graph as a picture: what is fused into which plan, and what crosses memory between them.

The layout is that of Graphviz where its ``dot`` is installed, else that of the Python package
grandalf; without either a picture is text.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..graph.spec import GraphSpec, Tensor
from ..text import microseconds, shape, size
from .plan import Plan

_XLA, _CUDNN = "#e4e6e9", ("#d3ecae", "#b9e0f2", "#f7e0a6", "#e5d2f0", "#f6cfc4")
_CHARACTER, _LINE, _GAP = 6.7, 15, 12
_FONT = 'fontname="monospace" fontsize=11'
_DOT = f"""digraph {{ graph [{_FONT} bgcolor=white labeljust=l labelloc=b]
node [{_FONT} shape=box height=0.3]
edge [{_FONT}]"""
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}"
font-family="monospace" font-size="11" text-anchor="middle">
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>
<rect width="100%" height="100%" fill="white"/>"""


@dataclass(frozen=True)
class Picture:
    """The picture of a plan: SVG in a notebook, text where it is printed.

    Operations that are fused into one plan share a box or a color, and those that XLA runs are
    gray. Arrows from one plan to another carry the bytes that cross memory there. A time is
    measured, or the least that the GPU's rates allow.
    """

    plan: Plan

    def svg(self) -> str | None:
        """The picture as SVG; None where neither Graphviz nor grandalf is installed."""
        return _by_dot(self.plan) or _by_grandalf(self.plan)

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


def _by_dot(plan: Plan) -> str | None:
    dot = shutil.which("dot")
    if dot is None:
        return None
    text = "\n".join(_dot(plan))
    done = subprocess.run([dot, "-Tsvg"], input=text.encode(), capture_output=True, check=False)
    _, begin, rest = done.stdout.decode().partition("<svg")
    return f"{begin}{rest}" or None


def _dot(plan: Plan) -> Iterator[str]:
    drawn = _Drawn(plan)
    yield _DOT
    for number, (head, color) in enumerate(zip(_heads(plan), drawn.colors, strict=True)):
        yield f'subgraph cluster{number} {{ label={_quoted(*head)} style="rounded,filled"'
        yield f'color="{color}"; node [style=filled fillcolor=white]'
        yield from (_quoted(name) for name, (_, own) in drawn.nodes.items() if own == number)
        yield "}"
    for name, (lines, own) in drawn.nodes.items():
        yield f"{_quoted(name)} [label={_quoted(*lines)}{' shape=plaintext' * (own is None)}]"
    for (a, b), label in drawn.edges.items():
        wide = 2 if label else 1
        yield f"{_quoted(a)} -> {_quoted(b)} [label={_quoted(label)} penwidth={wide}]"
    yield "}"


def _quoted(*lines: str) -> str:
    return json.dumps("\n".join(lines), ensure_ascii=False)


class _Box:
    """What grandalf reads of a node, and where it puts it."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.w = _CHARACTER * max(map(len, lines)) + _GAP
        self.h = _LINE * len(lines) + _GAP / 2
        self.xy = (0.0, 0.0)


def _by_grandalf(plan: Plan) -> str | None:
    if importlib.util.find_spec("grandalf") is None:
        return None
    from grandalf.graphs import Edge, Graph, Vertex  # pyright: ignore[reportMissingImports]
    from grandalf.layouts import SugiyamaLayout  # pyright: ignore[reportMissingImports]
    from grandalf.routing import EdgeViewer  # pyright: ignore[reportMissingImports]

    drawn = _Drawn(plan)
    for number, head in enumerate(_heads(plan)):  # which explain the colors
        drawn.nodes[f"segment {number}"] = ["; ".join(head)], number
    vertices = {name: Vertex(name) for name in drawn.nodes}
    for name, vertex in vertices.items():
        vertex.view = _Box(drawn.nodes[name][0])  # pyright: ignore[reportAttributeAccessIssue]
    edges = [Edge(vertices[a], vertices[b], data=label) for (a, b), label in drawn.edges.items()]
    for edge in edges:
        edge.view = EdgeViewer()  # pyright: ignore[reportAttributeAccessIssue]
    shapes: list[str] = []
    right = bottom = 0.0
    for part in Graph([*vertices.values()], edges).C:  # one below the other
        layout = SugiyamaLayout(part)
        layout.yspace = 2 * _LINE
        layout.init_all(optimize=True)
        layout.draw()
        boxes = [vertex.view for vertex in part.sV]
        dx = _GAP - min(box.xy[0] - box.w / 2 for box in boxes)
        dy = _GAP - min(box.xy[1] - box.h / 2 for box in boxes) + bottom
        for edge in part.sE:
            points = [(x + dx, y + dy) for x, y in edge.view._pts]
            points[0] = points[0][0], points[0][1] + edge.v[0].view.h / 2
            points[-1] = points[-1][0], points[-1][1] - edge.v[1].view.h / 2
            shapes += _arrow(points, edge.data)
        for vertex in part.sV:
            (lines, own), (x, y) = drawn.nodes[vertex.data], vertex.view.xy
            shapes += _box(lines, x + dx, y + dy, "white" if own is None else drawn.colors[own])
        right = max(right, *(box.xy[0] + box.w / 2 + dx for box in boxes))
        bottom = max(box.xy[1] + box.h / 2 + dy for box in boxes)
    size_of_all = (math.ceil(right + _GAP), math.ceil(bottom + _GAP))
    return "\n".join((_SVG.format(*size_of_all), *shapes, "</svg>"))


def _box(lines: Sequence[str], x: float, y: float, color: str) -> Iterator[str]:
    box = _Box(lines)
    left, top = x - box.w / 2, y - box.h / 2
    yield (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" rx="4" '
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
