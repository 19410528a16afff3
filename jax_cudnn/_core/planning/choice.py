"""From options to cuDNN's candidates: heuristics, notes, an explicit engine with knobs, and the
limit on workspace.

A workspace is XLA memory in use while the call runs. Most plans need little; some need memory that
grows with the square of a length (the deterministic backward of attention). Without a limit such
a program runs out of memory, at run time or while it is compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import GraphError
from ..graph.options import HEURISTICS
from ..graph.spec import GraphSpec
from ..reasons import Kind, Reason

FIRST_PYTHON_ENGINE = 20000
"""Engines of the frontend itself (CuTe DSL) begin here."""
_PART = 4  # a plan may take a quarter of the GPU's memory unless the options set a limit
# TF32 runs on tensor cores only, and float32 on none of them.
NOTES_OF_FULL_FLOAT32 = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")


def propose(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Makes a pygraph propose plans according to the spec's options.

    An explicit engine with notes is looked up among the proposals of all heuristics modes under
    these notes: cuDNN would build it without checking them.
    """
    engine, others = spec.options.engine, ()
    if engine is not None:
        kinds, others = cudnn._pybind_module.knob_type.__members__, HEURISTICS
        if unknown := [name for name, _ in spec.options.knobs if name not in kinds]:
            raise GraphError(
                "unknown knob of cuDNN's frontend",
                expected=", ".join(kinds),
                got=", ".join(unknown),
            )
        if not any(_filters(spec).values()):
            knobs = {kinds[name]: value for name, value in spec.options.knobs}
            graph.create_execution_plan(engine, knobs)
            return
    modes = dict.fromkeys((*spec.options.heuristics, *others))
    graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
    restrict(graph, spec, cudnn)


def restrict(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Makes a pygraph exclude the plans that the notes of the options do not allow."""
    for method, names in _filters(spec).items():
        if names:
            kind = cudnn.numerical_note if "numeric" in method else cudnn.behavior_note
            getattr(graph, method)([getattr(kind, name) for name in names])


def is_chosen(spec: GraphSpec, engine: int, knobs: Mapping[str, int]) -> bool:
    """Whether a candidate is the engine that the options fix, if they fix one."""
    options = spec.options
    return options.engine in (None, engine) and {*options.knobs} <= {*knobs.items()}


def order(spec: GraphSpec, candidates: Sequence[tuple[int, Mapping[str, int]]]) -> list[int]:
    """The positions of candidates (engines with knobs) in the order in which they are tried: that
    of the heuristics, with the corrections of the anchor."""
    anchors = ((call.node, tensors) for call, tensors in spec.at_ports if call.node.anchor)
    node, tensors = next(anchors, (None, {}))
    if node is None:
        return [*range(len(candidates))]

    def rank(position: int) -> tuple[bool, int]:
        engine, knobs = candidates[position]
        return engine in node.slow, node.rank(engine, knobs, tensors)

    return sorted(range(len(candidates)), key=rank)


def _filters(spec: GraphSpec) -> dict[str, tuple[str, ...]]:
    """pygraph's methods that select and deselect notes, with the notes."""
    options = spec.options
    return {
        "select_numeric_notes": options.select_numeric_notes,
        "deselect_numeric_notes": left_out(spec),
        "select_behavior_notes": options.select_behavior_notes,
        "deselect_behavior_notes": options.deselect_behavior_notes,
    }


def left_out(spec: GraphSpec) -> tuple[str, ...]:
    """The numeric notes that options exclude, by name or through determinism and precision."""
    options = spec.options
    notes = [*options.deselect_numeric_notes]
    if options.deterministic:
        notes.append("NONDETERMINISTIC")
    if options.precision in ("high", "highest") and spec.has_float32_product:
        notes += NOTES_OF_FULL_FLOAT32
    return tuple(dict.fromkeys(notes))


def barred(spec: GraphSpec, engine: int, knobs: Mapping[str, int]) -> Reason | None:
    """Why an engine is never taken for this graph, if it is so."""
    if engine >= FIRST_PYTHON_ENGINE:
        words = "runs only in the Python frontend, not inside an XLA program"
        return Reason(words, Kind.ENGINE)
    wrong = distrusted(spec, engine, knobs)
    return Reason(f"computes {wrong} wrongly", Kind.ENGINE) if wrong else None


def distrusted(spec: GraphSpec, engine: int, knobs: Mapping[str, int]) -> str:
    """The operation of this graph that an engine computes wrongly, by its name; "" for none."""
    for call, tensors in spec.at_ports:
        needed = call.node.needs_knob(spec)
        wrong = engine in call.node.distrusted(tensors, spec)
        if wrong or (needed and needed not in knobs):
            return call.name
    return ""


def default_workspace(properties: str) -> int:
    """The limit without an option, equal for all GPUs of a model: their memory differs by less than
    a GiB. Plans depend on it, and so do cache keys. ``properties`` are in cuDNN's format (JSON)."""
    part = int(json.loads(properties).get("totalGlobalMem", 0)) // _PART
    return part >> 30 << 30 or part or sys.maxsize


def too_large(spec: GraphSpec, properties: str, needed: int) -> Reason | None:
    """Why a plan that needs so many bytes of workspace is rejected on a GPU, if it is."""
    limit, source = spec.options.max_workspace, "max_workspace"
    if limit is None:
        limit = default_workspace(properties)
        source = "max_workspace, by default a quarter of the GPU's memory"
    if needed <= limit:
        return None
    return Reason(
        f"needs {needed:,} bytes of workspace, more than the {limit:,} of {source}: raise it, or "
        "use a smaller batch or shorter sequences",
        Kind.WORKSPACE,
    )


def other_form(spec: GraphSpec, cudnn: int) -> GraphSpec | None:
    """The graph with the anchor's alternative node and engine, which computes the same results, if
    this version of cuDNN (``cudnnGetVersion()``) has it."""
    if spec.options.engine is not None:
        return None
    for i, call in enumerate(spec.calls):
        other = call.node.instead()
        if other is not None and cudnn >= other.cudnn:
            knobs = tuple(sorted(other.knobs.items()))
            # The engine is deterministic, though no note says so.
            pinned = {"deterministic": False, "engine": other.engine, "knobs": knobs}
            calls = (*spec.calls[:i], replace(call, node=other.node), *spec.calls[i + 1 :])
            return replace(spec, calls=calls, options=replace(spec.options, **pinned))
    return None
