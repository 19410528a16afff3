"""GraphSpec -> cudnn.pygraph -> ExecutionPlan: from cuDNN's proposals for a graph, its candidates.
This and :mod:`.listing` drive cuDNN's frontend."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..cuda import CudaDevice
from ..errors import JaxCudnnError, TargetError
from ..graph.dtypes import cudnn_name
from ..graph.layout import layout
from ..graph.spec import GraphSpec
from ..reasons import Kind, Reason, Reasons
from . import choice, frontend, ubjson
from . import unsupported as failure
from .deviceless.profiles import HOW_TO_READ, Profile
from .execution_plan import ExecutionPlan, decode, uids
from .unsupported import engine_reasons, unsupported


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
        blob = ubjson.decode(bytes(graph.serialize()))
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
