"""Plans by the names of their graphs, which print as a table."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..cuda import CudaDevice
from ..errors import TargetError
from ..graph.spec import GraphSpec, Tensor
from ..planning.cost import cost, roofline
from ..planning.deviceless import profiles
from ..planning.deviceless.profiles import Profile
from .plan import Plan

_HEADER = ("graph", "operands", "runs on", "MB", "roofline us")


class Explanations(dict[str, Any]):
    """Explanations by the names of their graphs or GPUs; prints one below the other, each with its
    note on the mesh, if it has one."""

    notes: Mapping[str, str] = MappingProxyType({})

    def __str__(self) -> str:
        pairs = ((value, self.notes.get(name)) for name, value in self.items())
        return "\n".join(
            f"{value}\n  on the mesh: {note}" if note else str(value) for value, note in pairs
        )


class Plans(dict[str, Plan]):
    """The plans of a function's graphs by name; prints as a table.

    ``MB`` counts each operand and result of a cuDNN plan or XLA part once. ``roofline us`` is the
    least time on the GPU, of these bytes or the arithmetic; where lengths, packing, pages or block
    masks decide what is read, of the results alone. Equal graphs share a row. On a mesh plans are
    those of one device, and ``notes`` says of each graph how it is sharded, and what is gathered.
    ``calls`` holds for each graph the lines that call it, and how often.
    """

    notes: Mapping[str, str] = MappingProxyType({})
    calls: Mapping[str, Mapping[str, int]] = MappingProxyType({})

    def __missing__(self, name: str) -> Any:
        raise KeyError(_unknown("graph", name, self))

    def explain(self) -> Explanations:
        """The explanations of all plans, by name; prints one below the other."""
        made = Explanations({name: plan.explain() for name, plan in self.items()})
        made.notes = self.notes
        return made

    def __str__(self) -> str:
        rows = aligned([_HEADER, *self._cells()], 3)
        notes = (f"{name} on the mesh: {note}" for name, note in self.notes.items())
        return "\n".join((*rows, *notes))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        site = next((plan.site for plan in self.values() if plan.site is not None), None)
        every: list[GraphSpec] = []
        for name, plan in self.items():
            specs = [segment.spec for segment in plan.segments]
            yield name, _operands(plan.spec), where(plan), *_figures(specs, site)
            every += specs
        fused = sum(len(plan.execution_plans) for plan in self.values())
        yield "total", "", f"{fused} cuDNN, {len(every) - fused} XLA", *_figures(every, site)


class ByGpu(dict[str, Any]):
    """Values by the names of GPUs, found under each spelling that ``jax_cudnn.target`` takes."""

    def __missing__(self, gpu: str) -> Any:
        with contextlib.suppress(TargetError):
            if (name := profiles.get(gpu).name) in self:
                return self[name]
        raise KeyError(_unknown("GPU", gpu, self))

    def explain(self) -> Explanations:
        """The explanations for all GPUs, by name; prints one below the other."""
        return Explanations({gpu: value.explain() for gpu, value in self.items()})

    def __str__(self) -> str:
        return "\n\n".join(f"{gpu}\n{value}" for gpu, value in self.items())


def _unknown(kind: str, name: Any, there: Iterable[str]) -> str:
    return f"{name!r} is not the name of a {kind} here; there are {', '.join(map(repr, there))}"


def aligned(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """The lines of a table: the first columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = (cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in pairs)
        yield "  ".join(cells).rstrip()


def where(plan: Plan) -> str:
    """Who runs the segments of a plan: "2 cuDNN + XLA"."""
    fused = len(plan.execution_plans)
    others = len(plan.segments) - fused
    cudnn = "" if not fused else "cuDNN" if fused == 1 else f"{fused} cuDNN"
    xla = "" if not others else "XLA" if others == 1 else f"{others} XLA"
    return " + ".join(filter(None, (cudnn, xla)))


def _operands(spec: GraphSpec) -> str:
    return ", ".join(map(shape, spec.input_tensors))


def shape(tensor: Tensor) -> str:
    """A tensor's dtype and sizes as JAX prints them: ``bf16[8,64]``."""
    dtype = re.sub(r"(?<=u)int|(?<=i)nt|(?<=f)loat", "", tensor.dtype)
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def _figures(specs: Sequence[GraphSpec], site: Profile | CudaDevice | None) -> tuple[str, str]:
    seconds = [roofline(spec, site) for spec in specs]
    known = [s * 1e6 for s in seconds if s is not None]
    moved = sum(cost(spec).bytes for spec in specs) / 1e6
    return f"{moved:,.2f}", f"{sum(known):,.1f}" if len(known) == len(specs) else "unknown"
