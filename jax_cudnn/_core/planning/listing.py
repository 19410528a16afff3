"""Lists all candidates for a graph from cuDNN's frontend, without building them.

The frontend reports neither the numeric notes nor the workspace of a candidate by index. But before
it builds anything, it refuses candidates with a deselected note, and then those above a workspace
limit; both are read from these refusals, each with a separate graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..cuda import CudaDevice
from ..graph.options import HEURISTICS, NUMERIC_NOTES
from ..graph.spec import GraphSpec
from ..reasons import Reasons
from . import build, choice
from . import unsupported as failure
from .build import Candidate, Config
from .deviceless.profiles import Profile
from .unsupported import LEFT_OUT, unsupported

_WORKSPACE = r"workspace violation\. Requires (\d+)"


def list_for(spec: GraphSpec, site: Profile | CudaDevice) -> tuple[Candidate, ...]:
    """The candidates for a GPU, those of the options' heuristics first. For one that is not here it
    runs in the deviceless worker."""
    with build.at(site) as (cudnn, properties, where):

        def proposing(*modes: str) -> Any:
            graph = build.operation_graph(spec, cudnn, **where)
            graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
            return graph

        places = _places(spec, cudnn, proposing)
        modes = [mode for mode in HEURISTICS if any(mode in found for found in places.values())]
        graph = proposing(*modes)
        said = {
            config: (graph.get_plan_name_at_index(i), build.behavior_notes(graph, i))
            for i, config in _of_backend(graph)
        }
        spaces = ((c, re.search(_WORKSPACE, refusal)) for c, refusal in _refusals(graph))
        needed = {config: int(match[1]) for config, match in spaces if match}

        def without(restrict: Callable[[Any], object]) -> set[Config]:
            restrict(graph := proposing(*modes))
            return {c for c, refusal in _refusals(graph) if refusal.startswith("Deselecting")}

        known = cudnn.numerical_note.__members__  # this version may lack some
        carriers = {
            note: without(lambda graph, note=note: graph.deselect_numeric_notes([known[note]]))
            for note in NUMERIC_NOTES
            if note in known
        }
        left_out = without(lambda graph: choice.restrict(graph, spec, cudnn))
    own = [config for config, found in places.items() if {*found} & {*spec.options.heuristics}]
    found: list[Candidate] = []
    for config in dict.fromkeys((*(own[i] for i in choice.order(spec, own)), *places)):
        why_not = choice.barred(spec, *config) or (LEFT_OUT if config in left_out else None)
        why_not = why_not or choice.too_large(spec, properties, needed.get(config, 0))
        name, behavior_notes = said.get(config, (f"eng{config[0]}", ()))
        row = Candidate(
            len(found),
            config[0],
            name,
            config[1],
            places[config],
            numeric_notes=tuple(note for note, carrying in carriers.items() if config in carrying),
            behavior_notes=behavior_notes,
            workspace_bytes=needed.get(config),
            supported=False if why_not else None,
            reason=str(why_not or ""),
        )
        found.append(row)
    return tuple(found)


def _places(
    spec: GraphSpec, cudnn: Any, proposing: Callable[[str], Any]
) -> dict[Config, dict[str, int]]:
    """Which modes of the heuristics propose an engine with its knobs, and at which place; those of
    the options first. UnsupportedGraphError where none proposes anything."""
    places: dict[Config, dict[str, int]] = {}
    refusals: list[Reasons] = []
    for mode in dict.fromkeys((*spec.options.heuristics, *HEURISTICS)):
        try:
            graph = proposing(mode)
        except Exception as error:
            refusals.append(build.reasons_of(error, cudnn))
            continue
        for place, config in enumerate(build.configs(graph)):
            places.setdefault(config, {}).setdefault(mode, place)
    if not places and refusals:
        raise unsupported(spec, refusals[0])
    return places


def _of_backend(graph: Any) -> Iterator[tuple[int, Config]]:
    every = enumerate(build.configs(graph))
    return ((i, config) for i, config in every if config[0] < choice.FIRST_PYTHON_ENGINE)


def _refusals(graph: Any) -> Iterator[tuple[Config, str]]:
    """Why the frontend builds none of the backend's plans where they may have no workspace."""
    graph.deselect_workspace_greater_than(-1)
    for i, config in _of_backend(graph):
        try:
            graph.build_plan_at_index(i)
        except Exception as error:  # the frontend's, of several kinds: its words are what counts
            if failure.passing(error):
                raise
            yield config, str(error)
