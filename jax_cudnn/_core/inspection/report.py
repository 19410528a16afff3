"""The report of ``bisect``: one entry per run of a graph, a table and next steps."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from ..graph.dtypes import FP8, is_floating
from ..graph.spec import GraphSpec
from ..text import aligned

SUSPECT = 4.0
"""An operation is suspect from this multiple of the error that rounding explains."""
_ROWS = 20
_HEADER = ("operation", "role", "where", "runs", "result", "largest error", "relative")
_HEADER = (*_HEADER, "times rounding", "NaN and Inf")

FUSED, BOTH, OPERANDS, REFERENCE = "fused", "both", "operands", "reference"
_NONFINITE = {
    "": "",
    FUSED: "from the fused operation alone",
    BOTH: "from the operation and its reference",
    OPERANDS: "already in the operands",
    REFERENCE: "in the reference alone",
}


@dataclass(frozen=True)
class Output:
    """One result of a graph, compared with its reference in float32 (float64 for such graphs).

    Attributes:
        name, dtype, shape: of the result in the graph (inside shard_map, of one device's shard).
        largest: the largest ``|result - reference|``, over the finite elements.
        relative: ``|result - reference| / |reference|`` in the Euclidean norm, over these.
        times_rounding: the larger of both in units of what rounding explains: at most about 1 for
            a correct operation. Infinite where the result is NaN or Inf and the reference is not.
        nan, inf: how many elements of the result are NaN, or infinite.
        reference_nan, reference_inf: the same for the reference, in the range of that dtype.
        reference_largest: the largest finite ``|reference|``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    relative: float
    times_rounding: float
    nan: int = 0
    inf: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    reference_largest: float = 0.0

    @property
    def overflows(self) -> bool:
        """Whether the reference has finite values that the dtype cannot hold."""
        if not is_floating(self.dtype) or self.dtype in FP8:  # there, they saturate
            return False
        return self.reference_largest > float(jnp.finfo(self.dtype).max)


@dataclass(frozen=True, eq=False)
class Entry:
    """One run of a graph, compared with its reference.

    Attributes:
        name: the graph function's name.
        role: "" for the graph as written, "forward" (with residuals for its backward),
            "tangent", "backward", ...
        path: where in the program: "scan[3]/cond[1]" is branch 1 in step 3 of a scan.
        line: the user's line that called it, "file:line, in function: text", or "".
        outputs: its results, see :class:`Output`.
        nonfinite: the source of NaN or Inf in the results: "fused" (the reference is finite
            there), "both", "operands" (they contained some already), "reference" (the fused
            operation has none), or "".
        spec: the graph; prints as its operations.
        operands: NumPy arrays by their names in the graph, for ``worst`` and ``first_nan`` of the
            report; else None. Inside a shard_map they have a leading dimension with one element
            for each device that ran the graph.
    """

    name: str
    role: str
    path: str
    line: str
    outputs: tuple[Output, ...]
    nonfinite: str
    spec: GraphSpec
    operands: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def times_rounding(self) -> float:
        """The largest ``times_rounding`` of its results."""
        return max((output.times_rounding for output in self.outputs), default=0.0)

    @property
    def worst_output(self) -> Output:
        """The result with the largest ``times_rounding``."""
        return max(self.outputs, key=lambda output: output.times_rounding)

    @property
    def title(self) -> str:
        """Name, role and path as text."""
        name = self.name + self.spec.origin.suffix
        return f"{name} in {self.path}" if self.path else name

    @property
    def _group(self) -> tuple[Any, ...]:
        return self.name, self.role, re.sub(r"\[\d+\]", "", self.path), self.line, self.spec


@dataclass(frozen=True, eq=False, repr=False)
class Bisection:
    """The result of :func:`bisect`. Prints as a table, the most suspicious operation first.

    Attributes:
        name: the function's name.
        device: the device that ran the graphs.
        on_gpu: whether that is an NVIDIA GPU.
        entries: one for each run of a graph, in program order.
        notes: constructs whose graphs ran without comparison.
    """

    name: str
    device: str
    on_gpu: bool
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def worst(self) -> Entry:
        """The entry with the largest error, in units of the error that rounding explains."""
        return max(self.entries, key=lambda entry: entry.times_rounding)

    @property
    def suspects(self) -> tuple[Entry, ...]:
        """The entries with at least 4 times the error that rounding explains, worst first."""
        found = [entry for entry in self.entries if entry.times_rounding >= SUSPECT]
        return tuple(sorted(found, key=lambda entry: -entry.times_rounding))

    @property
    def first_nan(self) -> Entry | None:
        """The first entry that produces NaN or Inf from finite operands, or None."""
        return next((e for e in self.entries if e.nonfinite in (FUSED, BOTH)), None)

    def __repr__(self) -> str:
        return f"<{'; '.join(self._summary())}>"

    def __str__(self) -> str:
        return "\n".join([*self._summary(), "", *self._table(), "", *self._next_steps()])

    def _summary(self) -> Iterator[str]:
        operations = len({entry._group for entry in self.entries})
        dtypes = {output.dtype for entry in self.entries for output in entry.outputs}
        wide = "float64" if "float64" in dtypes else "float32"
        yield (
            f"{self.name}: {operations} fused operation{'s' * (operations != 1)}, run "
            f"{len(self)} time{'s' * (len(self) != 1)} on {self.device}, compared with {wide}"
        )
        suspects = {entry._group: entry for entry in reversed(self.suspects)}
        if suspects:
            times = f"{_number(self.worst.times_rounding)} times the error that rounding explains"
            yield f"{len(suspects)} suspect; the worst: {self.worst.title}, {times}"
        else:
            yield "none differs from its reference by more than rounding explains"
        arrived = next((e for e in self.entries if e.nonfinite), None)
        if self.first_nan is not None:
            made, where = self.first_nan.outputs, _NONFINITE[self.first_nan.nonfinite]
            kinds = ["NaN"] * any(x.nan for x in made) + ["Inf"] * any(x.inf for x in made)
            yield f"first {' and '.join(kinds)}: {self.first_nan.title}, {where}"
        elif arrived is not None and arrived.nonfinite == OPERANDS:
            yield f"the operands already contained NaN or Inf, first at {arrived.title}"

    def _table(self) -> Iterator[str]:
        groups: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry._group, []).append(entry)
        rows = [(max(group, key=_suspicion), len(group)) for group in groups.values()]
        rows.sort(key=lambda row: _suspicion(row[0]), reverse=True)
        cells = [_HEADER, *(_cells(entry, runs) for entry, runs in rows[:_ROWS])]
        head, *lines = aligned(cells)
        yield head
        for line, (entry, _) in zip(lines, rows, strict=False):
            yield line
            if entry.line:
                yield f"    {_short(entry.line)}"
        if len(rows) > _ROWS:
            yield f"and {len(rows) - _ROWS} less suspicious operations"

    def _next_steps(self) -> Iterator[str]:
        yield "What to do next"
        for step in _advice(self):
            yield from textwrap.wrap(
                step, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )


def _advice(report: Bisection) -> Iterator[str]:
    blamed = report.first_nan
    if report.suspects or (blamed is not None and blamed.nonfinite == FUSED):
        name = "worst" if report.suspects else "first_nan"
        entry = getattr(report, name)
        yield (
            f"Run {entry.name} in XLA and check whether the program is correct: "
            f'{entry.name}.with_options(implementation="xla"), or with '
            'jax_cudnn.implementation("xla"): around the call while it is traced.'
        )
        yield (
            f"Save the case for a bug report: report.{name}.operands holds its arrays by name, "
            f"print(report.{name}.spec) prints its operations. The logger jax_cudnn names the "
            "engines at level DEBUG."
        )
    if blamed is not None and blamed.nonfinite == BOTH:
        over = [output for output in blamed.outputs if output.overflows]
        if over:
            yield (
                f"In {blamed.title} {over[0].name} reaches {_number(over[0].reference_largest)}, "
                f"which {over[0].dtype} cannot hold: scale it, or keep it in bfloat16 or float32 "
                "(.set_data_type)."
            )
        else:
            yield (
                f"The reference of {blamed.title} produces it as well: its operations have no "
                "finite result for these operands (report.first_nan.operands), on cuDNN or in XLA."
            )
    arrived = next((entry for entry in report if entry.nonfinite), None)
    if arrived is not None and arrived.nonfinite == OPERANDS:
        yield (
            f"The operands of {arrived.title} already contain NaN or Inf, from the arguments or "
            'from operations of XLA; jax.config.update("jax_debug_nans", True) finds the latter.'
        )
    if not report.suspects and blamed is None:
        yield (
            "These operations are correct. If the program is still wrong, check the operations "
            "between them, and the precision of the dtypes: compare with the program in float32."
        )
    if not report.on_gpu:
        yield (
            "No NVIDIA GPU ran this: XLA computed the operations from their references, so no "
            "cuDNN kernel was compared."
        )
    for note in report.notes:
        yield f"Not inspected: {note}."


def _suspicion(entry: Entry) -> tuple[int, float]:
    suspect = entry.times_rounding >= SUSPECT
    rank = 3 if entry.nonfinite == FUSED else 2 if suspect else entry.nonfinite == BOTH
    return int(rank), entry.times_rounding


def _cells(entry: Entry, runs: int) -> tuple[str, ...]:
    output = entry.worst_output
    return (
        entry.name,
        entry.role,
        entry.path,
        str(runs),
        f"{output.name}: {output.dtype}[{','.join(map(str, output.shape))}]",
        _number(output.largest),
        _number(output.relative),
        _number(output.times_rounding),
        _NONFINITE[entry.nonfinite],
    )


def _number(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"


def _short(line: str) -> str:
    """The user's line without the folders of its file, shortened."""
    place, comma, rest = line.partition(", in ")
    short = os.path.basename(place) + comma + rest.replace("<locals>.", "")
    return short if len(short) <= 96 else f"{short[:93]}..."
