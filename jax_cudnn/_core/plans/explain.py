"""``explain``: what the calls of a function run as, what each costs, and what to change."""

from __future__ import annotations

import html
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..compat import Device
from ..errors import GraphTypeError, shown
from ..graph.boundary import boundary, stored
from ..graph.layout import layout, lies_so
from ..graph.merging import widened
from ..graph.spec import Tensor
from ..planning import losses
from ..planning.cost import roofline
from ..planning.deviceless.profiles import Profile
from ..planning.placement import model
from ..planning.planned_graph import XLA, PlannedSegment
from ..text import aligned, microseconds, shape, size, wrapped
from .picture import Picture, taken
from .plan import Plan
from .plans import plans, where

_HEADER = ("graph", "called at", "runs on", "MB", "us", "roofline us", "ratio")
_LEGEND = (
    "MB, us: of all calls; >= is the least that the GPU's rates allow, where nothing was measured",
    "roofline us: the least in one pass; ratio: what a perfect kernel of your own could gain",
)


def explain(
    fn: Callable[..., Any], *args: Any, gpu: str | Profile | Device | None = None, **static: Any
) -> Report:
    """What the calls of this package in a function run as, what they cost, and what to change.

    Args:
        fn: any JAX function that contains graphs, such as a training step or its gradient.
        *args: arrays, or ``jax.ShapeDtypeStruct`` for shapes alone, in any pytree.
        gpu: the GPU to plan for, as one of ``gpus`` of :func:`jax_cudnn.plan`.
        **static: keyword arguments of ``fn``.

    Returns:
        A :class:`Report`. For each graph: where the function calls it, how often, what is fused
        into which plan, memory traffic in bytes, the time in seconds of each candidate that was
        measured and the roofline (a lower bound), what is copied or gathered at its edge. Then
        totals, and the known reasons for cuts and copies, those with the most bytes first.

    Raises: as :func:`jax_cudnn.plans`; GraphTypeError where ``gpu`` is not one GPU.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> x = jax.ShapeDtypeStruct((1, 64, 128), "bfloat16")
        >>> w = jax.ShapeDtypeStruct((128, 128), "bfloat16")
        >>> print(jc.explain(jc.ops.matmul, x, w, gpu="H200"))                # doctest: +SKIP
    """
    if "gpus" in static or not isinstance(gpu, (str, Profile, Device, type(None))):
        raise GraphTypeError(
            "explain takes one GPU",
            expected='gpu="H200", a Profile, or a device of this process',
            got=f"gpus={shown(static['gpus'])}" if "gpus" in static else f"gpu={shown(gpu)}",
            fix="for several GPUs: jax_cudnn.plans(fn, *args, gpus=[...])",
        )
    if gpu is None:
        found = plans(fn, *args, **static)
    else:
        (found,) = plans(fn, *args, gpus=[gpu], **static).values()
    graphs, changes = [], []
    for name, plan in found.items():
        calls, note = found.calls.get(name, {}), found.notes.get(name, "")
        graphs.append(_graph(name, plan, calls, note))
        for nbytes, why in _changes(plan, note):
            changes.append({"bytes": nbytes * graphs[-1]["times"], "graph": name, "what": why})
    changes.sort(key=lambda change: -change["bytes"])
    data = {
        "function": getattr(fn, "__name__", type(fn).__name__),
        "gpu": next(iter(found.values())).gpu,
        "graphs": graphs,
        "changes": changes,
    }
    return Report(data, {name: Picture(plan) for name, plan in found.items()})


@dataclass(frozen=True)
class Report:
    """What :func:`explain` finds: prints as text, and shows as HTML with pictures in a notebook.

    Attributes:
        data: as :meth:`to_json` gives it.
        pictures: a :class:`Picture` of each graph by its name.
    """

    data: dict[str, Any]
    pictures: Mapping[str, Picture]

    def to_json(self) -> dict[str, Any]:
        """``{"function", "gpu", "graphs": [{"graph", "operands", "called": {"file:line": times},
        "times", "runs_on", "bytes", "seconds" (measured, or None), "least_seconds",
        "roofline_seconds", "measured": [{"what", "seconds", "note", "taken"}],
        "predicted": {"xla_over_cudnn", "cases", "device"} or None, "edge", "mesh",
        "segments": as in Plan.explain()}], "changes": [{"bytes", "graph", "what"}]}``; a new
        dictionary each time. Figures are those of one call, bytes in "changes" of all calls."""
        return json.loads(json.dumps(self.data))

    def __str__(self) -> str:
        return "\n".join(map(str, self._parts()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = []
        for part in self._parts():
            text = f"<pre>{html.escape(str(part))}</pre>"
            shown.append(part.svg() if isinstance(part, Picture) else text)
        return re.sub(r' xmlns(:\w+)?="[^"]*"', "", "\n".join(shown))

    def _parts(self) -> Iterator[str | Picture]:
        graphs, changes = self.data["graphs"], self.data["changes"]
        calls = sum(graph["times"] for graph in graphs)
        yield f"{self.data['function']}, {self.data['gpu']}; graphs: {len(graphs)}, calls: {calls}"
        rows = [_HEADER, *map(_row, graphs), ("total", "", "", *_figures(graphs))]
        yield "\n".join((*aligned(rows, 3), *_LEGEND))
        for graph in graphs:
            yield f"\n{graph['graph']}: {graph['operands']}"
            yield self.pictures[graph["graph"]]
            yield from (wrapped(said) for said in _said(graph))
        if changes:
            yield "\nWhat to change, by the bytes that it concerns in a run:"
        for change in changes:
            yield wrapped(f"- {size(change['bytes'])}, {change['graph']}: {change['what']}")


# -- the data --------------------------------------------------------------------------------------


def _graph(name: str, plan: Plan, calls: Mapping[str, int], note: str) -> dict[str, Any]:
    said = plan.explain().to_json()
    segments, called = said["segments"], Counter()
    for place, times in calls.items():
        called[_short(place)] += times
    least = [segment["roofline_seconds"] for segment in segments]
    fields = "what", "seconds", "note", "taken"
    measured = [{f: getattr(one, f) for f in fields} for one in plan.measured]
    repeated = ((len([*same]), text) for text, same in groupby(map(shape, plan.spec.input_tensors)))
    return {
        "graph": name,
        "operands": ", ".join(f"{n} x {text}" if n > 1 else text for n, text in repeated),
        "called": called,
        "times": sum(calls.values()) or 1,
        "runs_on": where(plan),
        "bytes": sum(s["reads_bytes"] + s["writes_bytes"] for s in segments),
        "seconds": taken(plan),
        "least_seconds": None if None in least else sum(least),
        "roofline_seconds": roofline(plan.spec, plan.site),
        "measured": measured,
        "predicted": _predicted(plan),
        "edge": [edge for s in plan.segments if s.plan is not None for edge in _edge(s)],
        "mesh": str(note),
        "segments": segments,
    }


def _short(place: str) -> str:
    """A place as seen from the current folder; a notebook's cells are files of no use."""
    file, _, line = place.rpartition(":")
    if not file:  # no line of the user's calls it
        return ""
    if "ipykernel_" in file or file.startswith("<"):
        return f"cell:{line}"
    near = os.path.relpath(file)
    return place if near.startswith("..") else f"{near}:{line}"


def _edge(segment: PlannedSegment) -> Iterator[str]:
    """What XLA does around a plan to the arrays that it reads and writes."""
    spec, plan = segment.spec, segment.plan
    wide, sent = widened(spec), boundary(spec).planned
    own, planned = ((*each.input_tensors, *each.output_tensors) for each in (spec, sent))
    placed = []
    for tensor, other in zip(own, planned, strict=False):
        form, dtype = stored(other)
        if math.prod(form) != math.prod(tensor.shape) or dtype != tensor.dtype:
            way = "read from" if tensor.name in spec.outputs else "written as"
            copy = Tensor("", form, dtype)
            yield f"{_titled(tensor)}, is {way} {shape(copy)}, {size(copy.nbytes)}, in XLA"
        elif wide.tensor(tensor.name).order != tensor.order:
            yield f"{_titled(tensor)}, is reordered in memory, {size(tensor.nbytes)}, in XLA"
        elif tensor.order is None and len(tensor.shape) > 2:
            order = layout(sent).orders[other.name]
            if not lies_so(other, tuple(range(len(order))), order):
                placed.append(tensor.name)
    for unread in planned[len(own) :]:
        yield f"{_titled(unread)}, is written, and nothing reads it"
    if placed:
        yield f"channels-last in memory: {', '.join(placed)}; XLA transposes arrays that are not"
    if plan is not None and plan.tables:
        yield f"{4 * sum(map(len, plan.tables)):,} bytes of tables are read in each call"


def _titled(tensor: Tensor) -> str:
    return f"{tensor.name}, {shape(tensor)}"


def _changes(plan: Plan, note: str) -> Iterator[tuple[int, str]]:
    """The known reasons for cuts and copies, with the bytes that each concerns in one call."""
    said = plan.explain().to_json()
    several = len(plan.segments) > 1
    cuts = dict.fromkeys(s.reason for s in plan.segments if s.plan is not None and several)
    yield from ((said["cut_bytes"], f"cut, because {reason}") for reason in cuts if reason)
    for segment, figures in zip(plan.segments, said["segments"], strict=True):
        reads, both = figures["reads_bytes"], figures["reads_bytes"] + figures["writes_bytes"]
        yield from ((reads, advice) for advice in figures["advice"])
        by_xla = segment.plan is None and (segment.spec.anchors or not several)
        if by_xla and plan.implementation != "xla" and not _measured(plan, segment):
            yield both, f"runs in XLA, because {segment.reason}"
    for one in getattr(note, "gathered", ()):
        yield one.nbytes, f"{one}; {one.fix}"


def _measured(plan: Plan, segment: PlannedSegment) -> bool:
    """Whether XLA runs a segment because it measured faster."""
    if plan.measured:
        return any(way.seconds is not None and way.what != XLA for way in plan.measured)
    return plan.site is not None and losses.loss(segment.spec, model(plan.site)[1]) is not None


def _predicted(plan: Plan) -> dict[str, Any] | None:
    """What the measurements that ship with the package say of a graph that was not measured."""
    if plan.measured or plan.site is None:
        return None
    near = losses.nearest(plan.spec, model(plan.site)[1])
    if near is None or not near.near:
        return None
    return {"xla_over_cudnn": near.ratio, "cases": [*near.cases], "device": near.device}


# -- for people ------------------------------------------------------------------------------------


def _row(graph: Mapping[str, Any]) -> tuple[str, ...]:
    lines = [f"{line} x {n}" if n > 1 else line for line, n in graph["called"].items() if line]
    more = [f"and {len(lines) - 2} more"] if len(lines) > 2 else []
    return (graph["graph"], ", ".join((*lines[:2], *more)), graph["runs_on"], *_figures([graph]))


def _figures(graphs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The last four columns, of all calls of these graphs."""
    yield f"{sum(graph['bytes'] * graph['times'] for graph in graphs) / 1e6:,.2f}"
    times = [graph["times"] for graph in graphs]
    best = [graph["roofline_seconds"] for graph in graphs]
    now = [graph["seconds"] or graph["least_seconds"] for graph in graphs]
    if None in (*best, *now):
        yield from ("unknown",) * 3
        return
    total, least = (sum(map(operator.mul, times, each)) for each in (now, best))
    sign = ">= " if None in [graph["seconds"] for graph in graphs] else ""
    yield from (f"{sign}{microseconds(total)}", microseconds(least))
    yield f"{sign}{total / least:.2f}" if least else ""


def _said(graph: Mapping[str, Any]) -> Iterator[str]:
    """What is known of a graph besides its picture."""
    for one in sorted(graph["measured"], key=lambda one: one["seconds"] or math.inf):
        time = "not measured" if one["seconds"] is None else f"{microseconds(one['seconds'])} us"
        yield ", ".join(
            filter(None, (f"{one['what']}: {time}", one["note"], "taken" * one["taken"]))
        )
    if (near := graph["predicted"]) is not None:
        yield (
            f"predicted: XLA takes {near['xla_over_cudnn']:.2f} of cuDNN's time, as in the nearest "
            f"measured graphs, {', '.join(near['cases'])} ({near['device']})"
        )
    yield from graph["edge"]
    if graph["mesh"]:
        yield f"on the mesh: {graph['mesh']}"
