"""Lists all candidates for a graph from cuDNN's frontend, without building them.

The frontend reports neither the numeric notes nor the workspace of a candidate by index. But before
it builds anything, it refuses candidates with a deselected note, and then those above a workspace
limit; both are read from these refusals, each with a separate graph.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..cuda import CudaDevice
from ..errors import UnsupportedGraphError
from ..graph.options import HEURISTICS, NUMERIC_NOTES
from ..graph.spec import GraphSpec
from . import build, choice, failure, frontend, workspace
from .candidates import Candidate
from .deviceless.profiles import Profile
from .unsupported import LEFT_OUT
from .workspace import Limit

_Fresh = Callable[[], Any]  # makes a graph of the frontend's
_Config = tuple[int, tuple[tuple[str, int], ...]]  # an engine and the values of its knobs
_BARRED = "Deselecting"
_WORKSPACE = r"workspace violation\. Requires (\d+)"


def list_for_profile(spec: GraphSpec, profile: Profile) -> tuple[Candidate, ...]:
    """The candidates for a GPU that is not here. Runs in the deviceless worker."""
    cudnn = frontend.load()
    properties = cudnn.create_device_properties(profile.properties_json)
    limit = workspace.limit(spec, profile.properties_json)
    return _listed(spec, cudnn, limit, device_property=properties, sm_version=profile.sm_version)


def list_for_device(spec: GraphSpec, device: CudaDevice) -> tuple[Candidate, ...]:
    """The candidates for a GPU of this process, with a real handle."""
    cudnn = frontend.load()
    limit = workspace.limit(spec, device.properties(cudnn))
    with device.planning_handle(cudnn) as handle:
        return _listed(spec, cudnn, limit, handle=handle)


def _listed(spec: GraphSpec, cudnn: Any, limit: Limit, **where: Any) -> tuple[Candidate, ...]:
    fresh = functools.partial(build.operation_graph, spec, cudnn, **where)
    places = _places(fresh, spec, cudnn)
    modes = [mode for mode in HEURISTICS if any(mode in found for found in places.values())]
    proposing = functools.partial(_proposing, fresh, cudnn, modes)
    graph = proposing()
    told = dict(_told(graph))
    workspaces = dict(_workspaces(graph))
    carriers = {note: _carriers(proposing(), cudnn, note) for note in NUMERIC_NOTES}
    left_out = _left_out(proposing(), spec, cudnn)

    def reason(engine: int, knobs: dict[str, int], config: _Config) -> str:
        if engine >= build.FIRST_PYTHON_ENGINE:
            return build.PYTHON_ONLY
        if wrong := choice.distrusted(spec, engine, knobs):
            return f"computes {wrong} wrongly"
        if config in left_out:
            return LEFT_OUT
        needed = workspaces.get(config, 0)
        return limit.refusal(needed) if needed > limit.nbytes else ""

    def candidate(index: int, config: _Config) -> Candidate:
        engine, knobs = config[0], dict(config[1])
        name, behavior_notes = told.get(config, (f"eng{engine}", ()))
        why_not = reason(engine, knobs, config)
        return Candidate(
            index,
            engine,
            name,
            knobs,
            places[config],
            numeric_notes=tuple(note for note in NUMERIC_NOTES if config in carriers[note]),
            behavior_notes=behavior_notes,
            workspace_bytes=workspaces.get(config),
            supported=False if why_not else None,
            reason=why_not,
        )

    own = [config for config, found in places.items() if {*found} & {*spec.options.heuristics}]
    order = choice.order(spec, [(engine, dict(knobs)) for engine, knobs in own])
    ordered = dict.fromkeys((*(own[i] for i in order), *places))
    return tuple(candidate(i, config) for i, config in enumerate(ordered))


def _places(fresh: _Fresh, spec: GraphSpec, cudnn: Any) -> dict[_Config, dict[str, int]]:
    """Which modes of the heuristics propose an engine with its knobs, and at which place; those of
    the options first. UnsupportedGraphError where none proposes anything."""
    own = spec.options.heuristics
    places: dict[_Config, dict[str, int]] = {}
    refusals: list[UnsupportedGraphError] = []
    for mode in (*own, *(mode for mode in HEURISTICS if mode not in own)):
        try:
            with build.reasons_of(spec, cudnn):
                graph = _proposing(fresh, cudnn, [mode])
        except UnsupportedGraphError as error:
            refusals.append(error)
            continue
        for place, config in enumerate(_configs(graph)):
            places.setdefault(config, {}).setdefault(mode, place)
    if not places and refusals:
        raise refusals[0]
    return places


def _proposing(fresh: _Fresh, cudnn: Any, modes: Sequence[str]) -> Any:
    graph = fresh()
    graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
    return graph


def _configs(graph: Any) -> list[_Config]:
    every = map(graph.get_engine_and_knobs_at_index, range(graph.get_execution_plan_count()))
    return [(int(engine), build.named(knobs)) for engine, knobs in every]


def _of_backend(graph: Any) -> Iterator[tuple[int, _Config]]:
    for i, config in enumerate(_configs(graph)):
        if config[0] < build.FIRST_PYTHON_ENGINE:
            yield i, config


def _told(graph: Any) -> Iterator[tuple[_Config, tuple[str, tuple[str, ...]]]]:
    """Of each plan its name and its behaviour notes."""
    for i, config in _of_backend(graph):
        yield config, (graph.get_plan_name_at_index(i), build.behavior_notes(graph, i))


def _workspaces(graph: Any) -> Iterator[tuple[_Config, int]]:
    for config, refusal in _refusals(graph):
        if match := re.search(_WORKSPACE, refusal):
            yield config, int(match[1])


def _carriers(graph: Any, cudnn: Any, note: str) -> set[_Config]:
    """Those that carry a numeric note."""
    members: Any = cudnn.numerical_note.__members__
    if note not in members:  # of another version
        return set()
    graph.deselect_numeric_notes([members[note]])
    return _barred(graph)


def _left_out(graph: Any, spec: GraphSpec, cudnn: Any) -> set[_Config]:
    """Those that the notes of the options leave out."""
    choice.restrict(graph, spec, cudnn)
    return _barred(graph)


def _barred(graph: Any) -> set[_Config]:
    return {config for config, refusal in _refusals(graph) if refusal.startswith(_BARRED)}


def _refusals(graph: Any) -> Iterator[tuple[_Config, str]]:
    """Why the frontend builds none of the backend's plans where they may have no workspace."""
    graph.deselect_workspace_greater_than(-1)
    for i, config in _of_backend(graph):
        try:
            graph.build_plan_at_index(i)
        except Exception as error:  # the frontend's, of several kinds: its words are what counts
            if failure.passing(error):
                raise
            yield config, str(error)
