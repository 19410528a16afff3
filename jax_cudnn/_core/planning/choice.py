"""From options to cuDNN's candidates: heuristics, notes, an explicit engine with knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GraphError
from ..graph.node import Node
from ..graph.options import HEURISTICS, Options
from ..graph.spec import GraphSpec

# TF32 runs on tensor cores only, and float32 on none of them.
NOTES_OF_FULL_FLOAT32 = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")


def propose(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Makes a pygraph propose plans according to the spec's options.

    An explicit engine with notes is looked up among the proposals of all heuristics modes under
    these notes: cuDNN would build it without checking them.
    """
    options = spec.options
    knobs = _knobs(options, cudnn)
    if options.engine is not None and not any(_filters(spec).values()):
        graph.create_execution_plan(options.engine, knobs)
        return
    others = HEURISTICS if options.engine is not None else ()
    modes = dict.fromkeys((*options.heuristics, *others))
    graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
    restrict(graph, spec, cudnn)


def restrict(graph: Any, spec: GraphSpec, cudnn: Any) -> None:
    """Makes a pygraph exclude the plans that the notes of the options do not allow."""
    for method, names in _filters(spec).items():
        if names:
            kind = cudnn.numerical_note if "numeric" in method else cudnn.behavior_note
            getattr(graph, method)([getattr(kind, name) for name in names])


def is_chosen(spec: GraphSpec, engine: int, knobs: Mapping[Any, int]) -> bool:
    """Whether a candidate is the engine that the options fix, if they fix one."""
    given = {getattr(knob, "name", str(knob)): value for knob, value in knobs.items()}
    return spec.options.engine in (None, engine) and all(
        given.get(name) == value for name, value in spec.options.knobs
    )


def order(spec: GraphSpec, candidates: Sequence[tuple[int, Mapping[Any, int]]]) -> list[int]:
    """The positions of candidates (engines with knobs) in the order in which they are tried: that
    of the heuristics, with the corrections of the anchor."""
    anchor = next((call for call in spec.calls if call.node.anchor), None)
    if anchor is None:
        return [*range(len(candidates))]
    tensors = {port: spec.tensor(name) for port, name in (*anchor.inputs, *anchor.outputs)}

    def rank(position: int) -> tuple[bool, int]:
        engine, knobs = candidates[position]
        named = {getattr(knob, "name", str(knob)): int(value) for knob, value in knobs.items()}
        return int(engine) in anchor.node.slow, anchor.node.rank(int(engine), named, tensors)

    return sorted(range(len(candidates)), key=rank)


def slow(spec: GraphSpec, engine: int) -> Node | None:
    """The anchor for which an engine is measured to be slower than XLA."""
    return next((c.node for c in spec.calls if c.node.anchor and engine in c.node.slow), None)


def _filters(spec: GraphSpec) -> dict[str, tuple[str, ...]]:
    """pygraph's methods that select and deselect notes, with the notes."""
    options = spec.options
    return {
        "select_numeric_notes": options.select_numeric_notes,
        "deselect_numeric_notes": left_out(spec),
        "select_behavior_notes": options.select_behavior_notes,
        "deselect_behavior_notes": options.deselect_behavior_notes,
    }


def _knobs(options: Options, cudnn: Any) -> dict[Any, int]:
    knob_type = cudnn._pybind_module.knob_type
    unknown = [name for name, _ in options.knobs if name not in knob_type.__members__]
    if unknown:
        raise GraphError(
            "unknown knob of cuDNN's frontend",
            expected=", ".join(knob_type.__members__),
            got=", ".join(unknown),
        )
    return {getattr(knob_type, name): value for name, value in options.knobs}


def left_out(spec: GraphSpec) -> tuple[str, ...]:
    """The numeric notes that options exclude, by name or through determinism and precision."""
    options = spec.options
    notes = [*options.deselect_numeric_notes]
    if options.deterministic:
        notes.append("NONDETERMINISTIC")
    if options.precision in ("high", "highest") and spec.has_float32_product:
        notes += NOTES_OF_FULL_FLOAT32
    return tuple(dict.fromkeys(notes))


def distrusted(spec: GraphSpec, engine: int, knobs: Mapping[Any, int]) -> str:
    """The operation of this graph that an engine computes wrongly, by its name; "" for none."""
    has = {getattr(knob, "name", str(knob)) for knob in knobs}
    for call in spec.calls:
        tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        if engine in call.node.distrusted(tensors, spec):
            return call.name
        if (needed := call.node.needs_knob(spec)) and needed not in has:
            return call.name
    return ""
