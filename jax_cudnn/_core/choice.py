"""From options to cuDNN's candidates: heuristics, notes, an explicit engine with knobs."""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedGraphError
from .options import Options
from .spec import GraphSpec

# TF32 runs on tensor cores only, and float32 on none of them.
NOTES_OF_FULL_FLOAT32 = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")


def propose(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Has a pygraph propose its plans as the spec's options say."""
    options = spec.options
    if options.engine is not None:
        knob_type = cudnn._pybind_module.knob_type
        unknown = [name for name, _ in options.knobs if name not in knob_type.__members__]
        if unknown:
            raise UnsupportedGraphError(
                "cuDNN's frontend has no such knob",
                expected=", ".join(knob_type.__members__),
                got=", ".join(unknown),
            )
        knobs = {getattr(knob_type, name): value for name, value in options.knobs}
        graph.create_execution_plan(options.engine, knobs)
        return
    graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in options.heuristics])
    numeric, behavior = cudnn.numerical_note, cudnn.behavior_note
    for method, kind, names in (
        (graph.select_numeric_notes, numeric, options.select_numeric_notes),
        (graph.deselect_numeric_notes, numeric, left_out(spec)),
        (graph.select_behavior_notes, behavior, options.select_behavior_notes),
        (graph.deselect_behavior_notes, behavior, options.deselect_behavior_notes),
    ):
        if names:
            method([getattr(kind, name) for name in names])


def left_out(spec: GraphSpec) -> tuple[str, ...]:
    """The numeric notes that options deselect, by name or by what they ask for."""
    options: Options = spec.options
    notes = [*options.deselect_numeric_notes]
    if options.deterministic:
        notes.append("NONDETERMINISTIC")
    if options.precision in ("high", "highest") and has_float32_product(spec):
        notes += NOTES_OF_FULL_FLOAT32
    return tuple(dict.fromkeys(notes))


def has_float32_product(spec: GraphSpec) -> bool:
    """Whether cuDNN may round an operand of a product to TF32."""
    anchored = {name for c in spec.calls if c.node.anchor for _, name in c.inputs}
    return any(spec.tensor(name).dtype == "float32" for name in anchored)


def distrusted(spec: GraphSpec) -> dict[int, str]:
    """Engines that compute an operation of this graph wrongly, with its name."""
    return {
        engine: call.name
        for call in spec.calls
        for engine in call.node.distrusted(
            {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        )
    }
