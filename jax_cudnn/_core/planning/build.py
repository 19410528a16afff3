"""GraphSpec -> cudnn.pygraph -> ExecutionPlan: what drives cuDNN's frontend."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..cuda import CudaDevice
from ..errors import JaxCudnnError, TargetError
from ..graph.dtypes import cudnn_name
from ..graph.layout import layout
from ..graph.options import HEURISTICS, NUMERIC_NOTES
from ..graph.spec import GraphSpec
from ..reasons import Kind, Reason, Reasons
from . import choice, frontend
from . import unsupported as failure
from .deviceless.profiles import HOW_TO_READ, Profile
from .execution_plan import ExecutionPlan, decode, from_ubjson, uids
from .unsupported import LEFT_OUT, engine_reasons, unsupported


class Numbers(dict[str, int]):
    """Integers by name, which nothing changes: it can be hashed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Candidate:
    """One of the plans that cuDNN proposes for a graph.

    Attributes:
        index: its position among :class:`Candidates`.
        engine: the index of the engine in cuDNN.
        name: the engine with its knobs, as cuDNN writes them.
        knobs: the values of its knobs by name.
        modes: the modes of cuDNN's heuristics that propose it, with its rank in each (0 is first).
        numeric_notes, behavior_notes: cuDNN's notes on it: "TENSOR_CORE", "NONDETERMINISTIC",
            "RUNTIME_COMPILATION", "SUPPORTS_CUDA_GRAPH_NATIVE_API", ...
        workspace_bytes: device memory in use while it runs, as far as cuDNN reports it before
            building; else None.
        supported: whether it can be selected; None if not known before it is built.
        reason: why it cannot be selected.
        seconds: device time, if :meth:`jax_cudnn.Plan.time_candidates` measured it.
    """

    index: int
    engine: int
    name: str
    knobs: Mapping[str, int]
    modes: Mapping[str, int]
    numeric_notes: tuple[str, ...] = ()
    behavior_notes: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    supported: bool | None = None
    reason: str = ""
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("knobs", "modes"):
            object.__setattr__(self, name, Numbers(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """All attributes as data for ``json.dumps``."""
        return dataclasses.asdict(self)


Config = tuple[int, Numbers]
"""An engine and the values of its knobs."""
_WORKSPACE = r"workspace violation\. Requires (\d+)"


@contextlib.contextmanager
def at(site: Profile | CudaDevice) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """cuDNN's frontend, a GPU's properties, and what a graph of the frontend's takes for that GPU:
    a real handle, or in the deviceless worker the properties."""
    cudnn = frontend.load()
    if isinstance(site, Profile):
        try:
            properties = cudnn.create_device_properties(site.properties_json)
        except RuntimeError as error:
            raise TargetError(
                f"cuDNN does not take the profile {site.name!r}",
                expected="properties as cuDNN writes them, of a GPU that this version supports",
                got=site.properties_json[:200],
                why=str(error),
                fix=HOW_TO_READ,
            ) from error
        where = {"device_property": properties, "sm_version": site.sm_version}
        yield cudnn, site.properties_json, where
    else:
        with site.planning_handle(cudnn) as handle:
            yield cudnn, site.properties(cudnn), {"handle": handle}


def build_for(spec: GraphSpec, site: Profile | CudaDevice) -> ExecutionPlan:
    """The plan for a GPU. For one that is not here it runs in the deviceless worker."""
    with at(site) as (cudnn, properties, where):
        found = _first(spec, cudnn, properties, where)
        if isinstance(found, ExecutionPlan):
            return found
        if other := choice.other_form(spec, cudnn.backend_version()):
            second = _first(other, cudnn, properties, where)
            if isinstance(second, ExecutionPlan):
                return second
            # Other kinds say that the form has no engine here.
            found |= {name: r for name, r in second.items() if r.kind is Kind.WORKSPACE}
        raise unsupported(spec, found)


def _first(
    spec: GraphSpec, cudnn: Any, properties: str, where: dict[str, Any]
) -> ExecutionPlan | Reasons:
    """The first acceptable candidate, or why there is none."""
    reasons: Reasons = {}
    try:
        graph = operation_graph(spec, cudnn, **where)
        choice.propose(graph, spec, cudnn)
    except Exception as error:
        return reasons_of(error, cudnn)
    candidates = configs(graph)
    for index in choice.order(spec, candidates):
        engine, knobs = candidates[index]
        options = spec.options
        if options.engine not in (None, engine) or not {*options.knobs} <= {*knobs.items()}:
            continue
        name = graph.get_plan_name_at_index(index)
        if wrong := choice.barred(spec, engine, knobs):
            reasons[name] = wrong
            continue
        try:
            graph.build_plan_at_index(index)
        except Exception as error:
            (reasons[name], *_) = reasons_of(error, cudnn).values()
            continue
        needed = graph.get_workspace_size()
        if too_much := choice.too_large(spec, properties, needed):
            reasons[name] = too_much
            continue
        blob = from_ubjson(bytes(graph.serialize()))
        more = engine, tuple(knobs.items()), behavior_notes(graph, index)
        return decode(spec, blob, name, needed, len(candidates), *more)
    none = "cuDNN proposed no engine that matches the options (engine and notes)"
    return reasons or {"heuristics": Reason(none, Kind.OPTIONS)}


def operation_graph(spec: GraphSpec, cudnn: Any, **where: Any) -> Any:
    """The graph as the frontend's, checked, without plans; ``where`` says for which GPU."""
    failure.check_room()
    kinds = "io_data_type", "intermediate_data_type", "compute_data_type"
    types = dict.fromkeys(kinds, cudnn.data_type.FLOAT)
    graph = cudnn.pygraph(name="jax_cudnn", **types, **where)
    _emit(spec, graph, cudnn)
    graph.validate()
    graph.build_operation_graph()
    return graph


def behavior_notes(graph: Any, index: int) -> tuple[str, ...]:
    """cuDNN's behaviour notes on the engine of a plan."""
    notes = graph.get_behavior_notes_for_plan_at_index(index)
    return tuple(str(getattr(note, "name", note)) for note in notes)


def configs(graph: Any) -> list[Config]:
    """The engines with the values of their knobs by name that a graph of the frontend proposes."""
    every = map(graph.get_engine_and_knobs_at_index, range(graph.get_execution_plan_count()))
    named = ((e, {getattr(k, "name", str(k)): int(v) for k, v in x.items()}) for e, x in every)
    return [(int(engine), Numbers(sorted(knobs.items()))) for engine, knobs in named]


def reasons_of(error: Exception, cudnn: Any) -> Reasons:
    """What an exception of the frontend says of a graph; raises what says something else.

    The frontend raises RuntimeError both for graphs that cuDNN cannot represent and for a failing
    device, and Python's exceptions in its Python parts.
    """
    if isinstance(error, JaxCudnnError):
        raise error
    if isinstance(error, (cudnn.cudnnGraphNotSupportedError, RuntimeError)):
        if failed := failure.passing(error):
            raise failed from error
    else:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)  # of the code that raised it
        own = frame.f_globals.get("__name__", "").partition(".")[0] == cudnn.__name__
        if not (own and isinstance(error, (AssertionError, ValueError))):
            raise error
    return engine_reasons(str(error))


def _emit(spec: GraphSpec, graph: Any, cudnn: Any) -> None:
    places = uids(spec)
    constants = [constant.name for constant in spec.constants]
    tensors: dict[str, list[Any]] = {}

    def data_type(dtype: str) -> Any:
        return getattr(cudnn.data_type, cudnn_name(dtype))

    parts = {name: [*enumerate(shown)] for name, shown in layout(spec).shown.items()}
    for name in (*spec.inputs, *constants):
        tensors[name] = [
            graph.tensor(
                name=f"{name}.{part.port}" if part.port else name,
                dim=list(part.dims),
                stride=list(part.strides),
                data_type=data_type(spec.tensor(name).dtype),
                is_pass_by_value=name in constants,
                uid=places[name, i],
            )
            for i, part in parts[name]
        ]
    for call in spec.calls:
        inputs = {
            part.port or port: tensors[name][i]
            for port, name in call.inputs
            for i, part in parts[name]
        }
        compute = data_type(call.node.compute_data_type)
        common = {"name": call.name, "compute_data_type": compute}
        made = iter(call.node.emit(graph, inputs, common))
        for _, name in call.outputs:
            tensors[name] = []
            for i, part in parts[name]:
                out = next(made)
                out.set_dim(list(part.dims)).set_stride(list(part.strides))
                out.set_data_type(data_type(spec.tensor(name).dtype))
                if name in spec.outputs:
                    out.set_output(True).set_uid(places[name, i])
                tensors[name].append(out)
        assert next(made, None) is None, f"{call.node.method} has more results than ports"


# -- all candidates, without building them ---------------------------------------------------------
#
# The frontend reports neither the numeric notes nor the workspace of a candidate by index. But
# before it builds anything, it refuses candidates with a deselected note, and then those above a
# workspace limit; both are read from these refusals, each with a separate graph.


def list_for(spec: GraphSpec, site: Profile | CudaDevice) -> tuple[Candidate, ...]:
    """The candidates for a GPU, those of the options' heuristics first. For one that is not here it
    runs in the deviceless worker."""
    with at(site) as (cudnn, properties, where):

        def proposing(*modes: str) -> Any:
            graph = operation_graph(spec, cudnn, **where)
            graph.create_execution_plans([getattr(cudnn.heur_mode, mode) for mode in modes])
            return graph

        places = _places(spec, cudnn, proposing)
        modes = [mode for mode in HEURISTICS if any(mode in found for found in places.values())]
        graph = proposing(*modes)
        said = {
            config: (graph.get_plan_name_at_index(i), behavior_notes(graph, i))
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
        name, behavior = said.get(config, (f"eng{config[0]}", ()))
        row = Candidate(
            len(found),
            config[0],
            name,
            config[1],
            places[config],
            numeric_notes=tuple(note for note, carrying in carriers.items() if config in carrying),
            behavior_notes=behavior,
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
            refusals.append(reasons_of(error, cudnn))
            continue
        for place, config in enumerate(configs(graph)):
            places.setdefault(config, {}).setdefault(mode, place)
    if not places and refusals:
        raise unsupported(spec, refusals[0])
    return places


def _of_backend(graph: Any) -> Iterator[tuple[int, Config]]:
    every = enumerate(configs(graph))
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
