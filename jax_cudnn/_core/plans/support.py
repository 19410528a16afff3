"""``support``: which graphs of a function are one cuDNN plan, on which GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from ..cuda import CudaDevice
from ..errors import UnsupportedGraphError
from ..graph.spec import GraphSpec
from ..planning import frontend, planner
from ..planning.deviceless import client, profiles
from ..planning.deviceless.profiles import Profile
from ..planning.planned_graph import XLA
from ..text import aligned
from .collect import pieces
from .plans import Gpus, Sites, local, sites_of, traced_on

# The source of a GPU's description.
DEVICE, MEASURED, PUBLIC = "this machine's GPU", "measured profile", "public specifications"
_MARKS = {
    DEVICE: (" (here)", "(here): a GPU of this machine, planned with its own handle"),
    PUBLIC: ("*", "*: a profile from public specifications, not read on a device"),
}
_HEADER = ("graph", "GPU", "engine", "workspace", "candidates")


def support(
    fn: Callable[..., Any],
    *args: Any,
    gpus: Gpus | None = None,
    **static: Any,
) -> Support:
    """Which graphs of a function are one cuDNN plan: the plan or the reason, per graph and GPU.

    A graph without a single plan still runs, except under ``implementation="cudnn"``: it is split
    between cuDNN and XLA; :func:`plan` shows how. Pooling always runs in XLA and splits a graph.

    Args:
        fn: a graph function, or any JAX function that contains graphs (under jit, scan, cond,
            shard_map, remat, custom derivatives).
        *args: arrays, or ``jax.ShapeDtypeStruct`` for shapes alone, in any pytree.
        gpus: as for :func:`plan`. None: all shipped profiles, and the GPUs of this process, for
            which their real handle plans.
        **static: keyword arguments of ``fn``.

    Returns:
        A :class:`Support`: true if every graph has a plan on every GPU; prints as a table.

    Raises:
        GraphError: the function contains no graph.
        TargetError: there is no profile with that name.
        LibraryError: cuDNN or its frontend is missing.
        PlanningError: planning failed for a reason that may pass.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> x = jax.ShapeDtypeStruct((64, 128), "bfloat16")
        >>> print(jc.support(relu, x, gpus=["A100", "H200"]))                 # doctest: +SKIP
    """
    chosen = _everywhere() if gpus is None else sites_of(gpus)
    found = {gpu: pieces(named) for gpu, named in traced_on(fn, args, static, chosen).items()}
    return survey(found, chosen)


def survey(
    found: Mapping[str, Mapping[str, GraphSpec]],
    gpus: Mapping[str, Profile | CudaDevice],
    workers: int = 1,
) -> Support:
    """Plans the graphs of each GPU; for profiles in up to ``workers`` processes at a time."""
    names = dict.fromkeys(name for named in found.values() for name in named)
    pairs = [(name, gpu) for name in names for gpu in gpus if name in found[gpu]]

    def row(pair: tuple[str, str]) -> SupportRow:
        name, gpu = pair
        return _row(name, found[gpu][name], gpu, gpus[gpu])

    with contextlib.ExitStack() as stack:
        stack.enter_context(client.workers(workers))
        versions = _versions(gpus)
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        try:
            rows = tuple(pool.map(row, pairs))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else all other graphs would be planned first
            raise
    return Support(rows, *versions)


def _row(name: str, spec: GraphSpec, gpu: str, site: Profile | CudaDevice) -> SupportRow:
    basis = DEVICE if isinstance(site, CudaDevice) else MEASURED if site.measured else PUBLIC
    if all(call.node.xla_only for call in spec.calls):
        return SupportRow(name, gpu, basis, True, XLA, 0, 0)
    try:
        made = planner.plan(spec, site, name)
    except UnsupportedGraphError as error:
        reasons = (*error.reasons.items(),)
        return SupportRow(name, gpu, basis, False, reason=error.reason, reasons=reasons)
    return SupportRow(name, gpu, basis, True, made.engine, made.workspace_bytes, made.candidates)


def _versions(gpus: Mapping[str, Profile | CudaDevice]) -> tuple[str, str]:
    sites = sorted(gpus.values(), key=lambda site: isinstance(site, CudaDevice))
    return planner.at(sites[0], frontend.versions)  # that of a profile's worker, if there is one


def shipped() -> Sites:
    """All shipped profiles."""
    return {profile.name: profile for profile in profiles.shipped()}


def _everywhere() -> Sites:
    """The shipped profiles, with the GPUs of this process in place of the profiles of their
    models."""
    here: Sites = {}
    for device in filter(compat.is_cuda, jax.local_devices()):
        here.setdefault(*local(device))
    return {**shipped(), **here}


# -- the result ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SupportRow:
    """Whether one graph has a plan on one GPU.

    Attributes:
        graph: the graph function's name.
        gpu: the GPU's name.
        basis: the source of the GPU's description: "this machine's GPU" (planned with its
            handle), "measured profile" or "public specifications".
        supported: whether there is a plan.
        engine, workspace_bytes, candidates: those of the plan, see :class:`ExecutionPlan`; None
            without a plan.
        reason: why there is no plan: the most specific of ``reasons``.
        reasons: pairs of an engine (or a step of planning) and its reason.
    """

    graph: str
    gpu: str
    basis: str
    supported: bool
    engine: str | None = None
    workspace_bytes: int | None = None
    candidates: int | None = None
    reason: str = ""
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Support:
    """The result of :func:`support`: true if every graph has a plan on every GPU.

    ``support["H200"]`` selects the rows of one GPU, ``support["H200", "conv_bias_relu"]`` one row;
    iteration yields the rows, graph by graph.

    Attributes:
        rows: one for each graph and GPU.
        cudnn, frontend: the versions that planned.
    """

    rows: tuple[SupportRow, ...]
    cudnn: str
    frontend: str

    def __bool__(self) -> bool:
        return all(row.supported for row in self.rows)

    def __iter__(self) -> Iterator[SupportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.gpu for row in self.rows))

    @property
    def graphs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.graph for row in self.rows))

    def __getitem__(self, key: str | tuple[str, str]) -> Any:
        gpu, graph = (key, None) if isinstance(key, str) else key
        rows = tuple(r for r in self.rows if r.gpu == gpu and graph in (None, r.graph))
        if not rows:
            raise KeyError(
                f"{key!r}: this table has the GPUs {', '.join(self.gpus)} "
                f"and the graphs {', '.join(self.graphs)}"
            )
        return dataclasses.replace(self, rows=rows) if graph is None else rows[0]

    def __str__(self) -> str:
        return "\n".join([*aligned([_HEADER, *self._cells()]), *self.notes()])

    def to_markdown(self) -> str:
        """The table in Markdown, with its notes as a list below."""
        lines = [_HEADER, ("---",) * len(_HEADER), *self._cells()]
        table = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([*table, "", *(f"- {note}" for note in self.notes())])

    def to_json(self) -> dict[str, Any]:
        """Everything as data for ``json.dumps``."""
        rows = [{**dataclasses.asdict(row), "reasons": dict(row.reasons)} for row in self.rows]
        return {"cudnn": self.cudnn, "nvidia-cudnn-frontend": self.frontend, "rows": rows}

    def notes(self) -> list[str]:
        """The meaning of the marks in the table, the reasons, and the library versions."""
        bases = {row.basis for row in self.rows}
        marks = [note for basis, (_, note) in _MARKS.items() if basis in bases]
        reasons = [f"[{i}]: {reason}" for i, reason in enumerate(self._reasons(), 1)]
        versions = f"planned by cuDNN {self.cudnn}, nvidia-cudnn-frontend {self.frontend}"
        return [*reasons, *marks, versions]

    def _reasons(self) -> list[str]:
        """The different reasons, in the order of the rows."""
        return list(dict.fromkeys(_one_line(row.reason) for row in self.rows if not row.supported))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        reasons = self._reasons()
        for row in self.rows:
            if row.supported:
                figures = str(row.engine), _bytes(row.workspace_bytes or 0), str(row.candidates)
            else:
                figures = f"none [{1 + reasons.index(_one_line(row.reason))}]", "", ""
            yield row.graph, marked(row), *figures


def marked(row: SupportRow) -> str:
    """The GPU's name with a mark for the source of its description."""
    return row.gpu + _MARKS.get(row.basis, ("",))[0]


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 240, placeholder=" ...")


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
