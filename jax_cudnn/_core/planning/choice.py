"""From options to cuDNN's candidates: heuristics, notes, an explicit engine with knobs, and the
limit on workspace: that of attention's deterministic backward grows with the square of a length,
and without a limit XLA would run out of memory."""

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
    """Makes a pygraph propose plans according to the spec's options. An explicit engine with notes
    is looked up among all proposals under these notes: cuDNN would build it without a check."""
    options, modes = spec.options, dict.fromkeys(spec.options.heuristics)
    if options.engine is not None:
        kinds = cudnn._pybind_module.knob_type.__members__
        if unknown := ", ".join(name for name, _ in options.knobs if name not in kinds):
            what = "unknown knob of cuDNN's frontend"
            raise GraphError(what, expected=", ".join(kinds), got=unknown)
        if not any(_filters(spec).values()):
            knobs = {kinds[name]: value for name, value in options.knobs}
            graph.create_execution_plan(options.engine, knobs)
            return
        modes |= dict.fromkeys(HEURISTICS)
    graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
    restrict(graph, spec, cudnn)


def restrict(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Makes a pygraph exclude the plans that the notes of the options do not allow."""
    for method, names in _filters(spec).items():
        if names:
            kind = cudnn.numerical_note if "numeric" in method else cudnn.behavior_note
            getattr(graph, method)([getattr(kind, name) for name in names])


def order(spec: GraphSpec, candidates: Sequence[tuple[int, Mapping[str, int]]]) -> list[int]:
    """The positions of candidates (engines with knobs) in the order in which they are tried: that
    of the heuristics, with the corrections of the anchor."""
    if not spec.anchors:
        return [*range(len(candidates))]
    call, tensors = next(at for at in spec.at_ports if at[0] is spec.anchors[0])
    slow, rank = call.node.anchor.slow, call.node.engines(tensors, spec).rank

    def key(position: int) -> tuple[bool, int]:
        engine, knobs = candidates[position]
        return engine in slow, rank(engine, knobs)

    return sorted(range(len(candidates)), key=key)


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
        return Reason("runs only in the Python frontend, not inside an XLA program", Kind.ENGINE)
    wrong = wrongly_computed(spec, engine, knobs)
    return Reason(f"computes {wrong} wrongly", Kind.ENGINE) if wrong else None


def wrongly_computed(spec: GraphSpec, engine: int, knobs: Mapping[str, int]) -> str:
    """The operation of this graph that an engine computes wrongly, by its name; "" for none."""
    for call, tensors in spec.at_ports:
        known = call.node.engines(tensors, spec)
        if engine in known.wrong or (known.knob and known.knob not in knobs):
            return call.name
    return ""


def default_workspace(properties: str) -> int:
    """The limit without an option, equal for all GPUs of a model: their memory differs by less than
    a GiB. Plans depend on it, and so do cache keys. ``properties`` are in cuDNN's format (JSON)."""
    part = int(json.loads(properties).get("totalGlobalMem", 0)) // _PART
    return part >> 30 << 30 or part or sys.maxsize


def too_large(spec: GraphSpec, properties: str, needed: int) -> Reason | None:
    """Why a plan that needs so many bytes of workspace is rejected on a GPU, if it is."""
    own, source = spec.options.max_workspace, "max_workspace"
    limit = default_workspace(properties) if own is None else own
    source += ", by default a quarter of the GPU's memory" if own is None else ""
    words = f"needs {needed:,} bytes of workspace, more than the {limit:,} of {source}: raise it, "
    words += "or use a smaller batch or shorter sequences"
    return Reason(words, Kind.WORKSPACE) if needed > limit else None


def other_form(spec: GraphSpec, cudnn: int) -> GraphSpec | None:
    """The graph with the anchor's alternative node and engine, which computes the same results, if
    this version of cuDNN (``cudnnGetVersion()``) has it."""
    for i, (call, tensors) in enumerate(spec.at_ports if spec.options.engine is None else ()):
        other = call.node.engines(tensors, spec).otherwise
        if other is not None and cudnn >= other.cudnn:
            # The engine is deterministic, though no note says so.
            options = replace(pinned(spec, other.engine, other.knobs).options, deterministic=False)
            calls = (*spec.calls[:i], replace(call, node=other.node), *spec.calls[i + 1 :])
            return replace(spec, calls=calls, options=options)
    return None


def pinned(spec: GraphSpec, engine: int, knobs: Mapping[str, int]) -> GraphSpec:
    """The graph with an engine."""
    given = {"engine": engine, "knobs": tuple(sorted(knobs.items()))}
    return replace(spec, options=replace(spec.options, **given))
