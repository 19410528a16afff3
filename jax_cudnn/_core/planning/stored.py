"""What is stored of plans, and the check of it, for the plan cache, serialized plans and the
processes of a job: types, ranges, sizes, versions, and that each operand, result, constant and part
is bound once, as the graph and cuDNN's own text of the plan say. Whether the kernels in the text
compute the graph nothing can tell: see docs/trust.md.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..graph import record
from ..graph.boundary import boundary
from ..graph.dtypes import FP4, FROM_CUDNN, cudnn_name, itemsize
from ..graph.layout import layout
from ..graph.record import checked
from ..graph.spec import GraphSpec
from ..package import fingerprint
from ..settings import FAST, FULL
from ..store.cache import configured
from ..store.entry import Content, Unusable, parsed
from . import execution_plan as plans
from . import frontend
from .execution_plan import CONSTANT, OPERAND, RESULT, SCALAR_STRIDE, SLOT, UNBOUND, VIEW
from .planned_graph import Outcome, PlannedSegment, Rows, Segments, Way
from .split import part

V = TypeVar("V")
_FORMAT = 1
_MOST = 2**40  # bytes of workspace, where nothing else limits it
_ROWS = 256  # of bindings that the executor takes


def key_text(kind: str, spec: GraphSpec, identity: str, *more: str) -> str:
    """The key of a canonical graph, from which the graph can be read."""
    if "text" not in spec._cache:  # a graph that may be cut has two keys
        spec._cache["text"] = json.dumps(record.encoded(spec))
    return "\n".join([f"{kind} {_FORMAT}", spec._cache["text"], identity, *more])


def check_entry(content: Content) -> None:
    """Raises Unusable unless an entry's value fits its key, which holds the graph. What another
    version of the package has stored passes: that version alone reads it, and checks it then."""
    kind, *lines = content.key.split("\n")
    if len(lines) < 2 or f'"jax_cudnn": "{fingerprint()}"' not in lines[1]:
        return
    try:
        spec = record.decoded(parsed(lines[0].encode()))
        name, version = kind.split()
        need(version == str(_FORMAT), "format", _FORMAT, version)
        read = {"plan": plan_of, "split": rows_of, "choice": choice_of}[name]
        read(content.value, spec, lines[1])
    except Exception as error:  # anything may stand there
        raise Unusable(f"foreign: {said(error)}") from error


def kept(key: str, read: Callable[[dict[str, Any]], V]) -> V | None:
    """The value that the plan cache has for a key, as ``read`` makes it of data; None without one.
    Where something else is stored, that is removed."""
    return _read(key, configured().get(key), read)


def keep(
    key: str, made: V, data: dict[str, Any], read: Callable[[dict[str, Any]], V], label: str
) -> V:
    """Stores a value, unless another process has been first; returns what all processes use."""
    stored = configured().put(key, data, label)
    return made if stored is data else _read(key, stored, read) or made


def _read(key: str, stored: dict[str, Any] | None, read: Callable[[dict[str, Any]], V]) -> V | None:
    try:
        return None if stored is None else read(stored)
    except Exception as error:  # anything may stand there
        configured().discard(key, f"foreign: {said(error)}")
        return None


class Wrong(ValueError):
    """Which field is wrong, what is expected there, and what there is."""


def said(error: BaseException) -> str:
    """An error about what was read, on one line."""
    kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
    return f"{kind}{error}".replace("\n", "; ")[:300]


def need(holds: object, field: str, expected: object, got: object) -> None:
    if not holds:
        raise Wrong(f"{field}: expected {expected}, got {str(got)[:100]}")


def rows_of(value: Any, spec: GraphSpec, identity: str = "") -> Rows:
    """The segments of a graph as stored; an exception for anything else."""
    rows = tuple((tuple(calls), in_xla, reason) for calls, in_xla, reason in value["segments"])
    for _, in_xla, reason in rows:
        typed = isinstance(in_xla, bool) and isinstance(reason, str)
        need(typed, "segments", "positions, a boolean, a text", (in_xla, reason))
    _check_order(spec, [calls for calls, _, _ in rows])
    return rows


def choice_of(value: Any, spec: GraphSpec, identity: str = "") -> Outcome:
    """A measured choice as ``dataclasses.asdict`` gives it; an exception for anything else."""
    ways = tuple(_way_of(way, spec) for way in value["ways"])
    found = checked(Outcome(**{**value, "ways": ways}))
    need(found.level in (FAST, FULL), "level", f"{FAST} or {FULL}", found.level)
    right = [i for i, way in enumerate(ways) if not way.note]
    need(found.taken in (right or [None]), "taken", f"one of {right}", found.taken)
    return found


def _way_of(value: Any, spec: GraphSpec) -> Way:
    pinned = tuple((at, engine, tuple(map(tuple, knobs))) for at, engine, knobs in value["pinned"])
    way = checked(Way(**{**value, "segments": rows_of(value, spec), "pinned": pinned}))
    need(all(at in range(len(way.segments)) for at, *_ in pinned), "pinned", "a segment", pinned)
    timed = way.seconds is not None and 0 < way.seconds < math.inf
    need(timed == (not way.note), "seconds", "a time, or a note", (way.seconds, way.note))
    return way


def _check_order(spec: GraphSpec, segments: Sequence[tuple[int, ...]]) -> None:
    """Raises Wrong unless segments hold each call once, after those whose results it reads."""
    flat = [call for calls in segments for call in calls]
    whole = all(type(call) is int for call in flat) and sorted(flat) == [*range(len(spec.calls))]
    need(whole and all(segments), "segments", f"each of {len(spec.calls)} calls once", segments)
    known = {*spec.inputs}
    for calls in segments:
        piece = part(spec, calls)
        need(known.issuperset(piece.inputs), "segments", "an order of execution", segments)
        known.update(piece.outputs)


def row_of(segment: PlannedSegment) -> dict[str, Any]:
    """A segment as data, without its graph, which is a part of the whole one."""
    plan = None if segment.plan is None else segment.plan.to_json()
    strict, reason = segment.strict, segment.reason
    return {"calls": list(segment.calls), "plan": plan, "reason": reason, "strict": strict}


def segments_of(rows: list[dict[str, Any]], spec: GraphSpec, identity: str = "") -> Segments:
    """The segments of a graph from :func:`row_of`; an exception for anything else. ``identity``: of
    GPU and versions, if they are known."""
    _check_order(spec, [tuple(row["calls"]) for row in rows])
    found = []
    for row in rows:
        piece, plan = part(spec, row["calls"]), row["plan"]
        if plan is not None:
            plan = plan_of(plan, boundary(piece.for_planning).planned, identity)
        calls, reason, strict = tuple(row["calls"]), row["reason"], row.get("strict", False)
        found.append(checked(PlannedSegment(piece, calls, plan, reason, strict)))
    return tuple(found)


def plan_of(value: Any, spec: GraphSpec, identity: str = "") -> plans.ExecutionPlan:
    """The plan that ``to_json`` wrote for a graph as it is planned (``boundary.planned``); an
    exception for anything else. ``identity``: of GPU and versions, if they are known."""
    plan = checked(plans.ExecutionPlan.from_json(value))
    limit, known = spec.options.max_workspace, json.loads(identity or "{}")
    limit = known.get("workspace", _MOST) if limit is None else limit
    space, offset = plan.workspace_bytes, plan.plan_workspace_offset
    need(0 <= space <= limit, "workspace_bytes", f"0 to {limit}", space)
    fits = 0 <= offset <= space and offset % SCALAR_STRIDE == 0
    need(fits, "plan_workspace_offset", f"a multiple of {SCALAR_STRIDE} up to {space}", offset)
    need(0 < plan.candidates < 2**31, "candidates", "at least 1", plan.candidates)
    own, length = SCALAR_STRIDE * len(spec.constants), len(plan.scalars)
    fits = length >= own and length % SCALAR_STRIDE == 0 and plan == plan.with_constants(spec)
    need(fits, "scalars", f"{own} bytes of the graph's, then others", plan.scalars.hex())
    version, device = plans.version_in(plan.text), plans.device_in(plan.text)
    if identity:
        gpu = plans.device_in(known["GPU"])
        need(device == gpu, "text", gpu, device)
        text = frontend.version_text(version)
        need(text == known["cuDNN"], "text", f"cuDNN {known['cuDNN']}", text)
    need(plan.cudnn_version == version, "cudnn_version", version, plan.cudnn_version)
    need(plan.device_name == device, "device_name", device, plan.device_name)
    facts = json.loads(plan.text)
    engine = facts.get("engine", {}).get("engineId", plan.engine_id)
    need(plan.engine_id == engine, "engine_id", engine, plan.engine_id)
    _check_bindings(plan, spec, [*_listed(facts.get("operationGraph"))])
    for fill in plan.fills:
        start, unit, count, word = fill
        fits = 0 <= start <= start + count <= offset and start % plans.SCALAR_STRIDE == 0
        fits = fits and (unit, word) == (1, 0)
        need(fits, "fills", f"zeros within {offset} bytes, from a multiple of 16 on", fill)
    return plan


def _check_bindings(
    plan: plans.ExecutionPlan, spec: GraphSpec, listed: list[tuple[int, Any]]
) -> None:
    """Raises Wrong unless the rows are the graph's and those that the frontend adds, and bind the
    tensors that the text lists, which have the graph's dtypes and dimensions, and room there: what
    csrc/call_site.cc refuses is refused, else such a plan would stay in the cache."""
    own, rows = plans.graph_rows(spec), plan.bindings
    arrays = sum(kind in (OPERAND, RESULT) for kind, *_ in own.values())
    need(arrays <= len(rows) <= _ROWS, "bindings", f"{arrays} to {_ROWS} rows", rows)
    before_own = plan.plan_workspace_offset  # bytes of workspace
    tables, constant = 0, SCALAR_STRIDE * (len(spec.constants) - 1)  # the last ones seen
    # The frontend may give the uid of an operand that its plan omits to a constant.
    free = {place for place, row in enumerate(rows[:arrays], 1) if row[0] == UNBOUND}
    for place, (uid, kind, value, size) in enumerate(rows):
        row = kind, value, size
        if place < arrays:
            fits = uid in (place + 1, UNBOUND) and row == own[place + 1]
        elif uid in own and (uid not in free or kind != CONSTANT):
            fits = uid > arrays and row == own[uid]
        elif kind == OPERAND:
            table = [(len(spec.inputs) + i, 4 * len(t)) for i, t in enumerate(plan.tables)]
            fits, tables = (value, size) in table[tables:][:1], tables + 1
        elif kind == CONSTANT:
            fits = constant < value < len(plan.scalars) and value % SCALAR_STRIDE == size == 0
            constant = value
        elif kind == VIEW:
            fits = 0 <= value < arrays and 0 <= size < rows[value][3]
            fits = fits and size % SCALAR_STRIDE == 0
        else:
            fits = kind == SLOT and 0 <= value < before_own
            fits = fits and value % SCALAR_STRIDE == size == 0
        need(fits, "bindings", own.get(uid, "a place within what it points into"), rows[place])
    need(tables == len(plan.tables), "tables", f"{tables} tables", plan.tables)
    bound = {uid: row for uid, *row in rows if 0 < uid < 2**62}
    unbound = [uid for uid, kind, *_ in rows if uid == UNBOUND and kind in (OPERAND, RESULT)]
    need(bound and len(bound) + len(unbound) == len(rows), "bindings", "each uid once", rows)
    shown = {}
    for (name, i), uid in plans.uids(spec).items():
        dtype, dims = cudnn_name(spec.tensor(name).dtype), sorted(layout(spec).shown[name][i].dims)
        shown |= {} if uid in free else {uid: (f"CUDNN_DATA_{dtype}", dims)}
    slots: dict[int, tuple[int, int]] = {}
    for uid, tensor in listed:
        kind, value, size = bound.get(uid, (UNBOUND, 0, 0))
        fits = kind != UNBOUND and (kind == CONSTANT) == tensor["isByValue"]
        need(fits, "bindings", f"uid {uid}, by value: {tensor['isByValue']}", rows)
        found = tensor["dataType"], sorted(tensor["dim"])  # it transposes the keys of attention
        need(found == shown.get(uid, found), "text", f"uid {uid}: {shown.get(uid)}", found)
        least = _least(tensor)
        room = {CONSTANT: SCALAR_STRIDE, SLOT: before_own - value}.get(kind, size)
        room = rows[value][3] - size if kind == VIEW else room
        need(0 <= least <= room, "bindings", f"{least} bytes for uid {uid}", room)
        if kind == SLOT:
            slots[uid] = value, value + least
    for (_, end), (start, _) in itertools.pairwise(sorted(slots.values())):
        need(end <= start, "bindings", "parts of the workspace that do not overlap", rows)
    for uid in bound.keys() - dict(listed).keys() if listed else ():
        need(bound[uid][0] == CONSTANT, "bindings", "the arrays of the text", rows)


def _least(tensor: dict[str, Any]) -> int:
    """The least bytes of a tensor of a text, as csrc/call_site.cc counts them."""
    dtype = FROM_CUDNN.get(tensor["dataType"].removeprefix("CUDNN_DATA_"))
    regular = str(tensor.get("reordering")).endswith("REORDERING_NONE")
    if dtype is None or not regular or "isRagged" in tensor:
        return 0
    last = sum((dim - 1) * step for dim, step in zip(tensor["dim"], tensor["stride"], strict=True))
    bits = {"bool": 1, FP4: 4}.get(dtype) or 8 * itemsize(dtype)
    return -(-(last + 1) * bits // 8)


def _listed(operations: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The tensors that a plan's text has outside of kernels, by uid."""
    if isinstance(operations, dict):
        if operations.get("isVirtual") is False:
            yield int(operations["name"]), operations
        operations = [*operations.values()]
    for item in operations if isinstance(operations, list) else ():
        yield from _listed(item)
