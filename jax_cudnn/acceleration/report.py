"""What :func:`jax_cudnn.accelerate` found in a function, and what became of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._core import compat
from .._core.graph.source import users_place
from .._core.plans.collect import in_jaxpr
from .._core.plans.table import aligned
from .choice import NO_BACKWARD
from .program import Missed, Program
from .region import Region
from .values import Equation

_FIELDS = ("kind", "what", "at", "runs_on", "gain", "why")
_ALONE = {"products": "dot_general", "convolutions": "conv_general_dilated"}
_CALL = "jax.grad(jc.accelerate(loss))"
FIX = f"put accelerate around the function that is differentiated, {_CALL}"
_HEADER = ("kind", "what", "at", "times", "runs on", "gain", "why")


@dataclass(frozen=True)
class Found:
    """The regions of a function, and what is nearly one; prints as a table.

    Attributes:
        data: as :meth:`to_json` gives it.
    """

    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """``{"function", "gpu", "regions": [{"kind", "what", "at": "file:line", "times", "runs_on":
        "cuDNN", "XLA" or "", "gain", "why"}], "missed": [{"at", "times", "why"}], "alone":
        {"products", "convolutions"}, "graphs"}``; a new dictionary each time.

        ``times``: how often a run of the program computes it; ``gain``: XLA's time over cuDNN's,
        measured or predicted, of the forward; ``alone``: how many products and convolutions are in
        no region; ``graphs``: how many graphs of ours the function has itself."""
        return json.loads(json.dumps(self.data))

    def __str__(self) -> str:
        regions, missed = self.data["regions"], self.data["missed"]
        rows = [
            (r["kind"], r["what"], r["at"], str(r["times"]), r["runs_on"], r["gain"], r["why"])
            for r in regions
        ]
        on = Counter(r["runs_on"] for r in regions if r["runs_on"])
        where = f" for {self.data['gpu']}" if self.data["gpu"] else ""
        counts = ", ".join(f"{n} on {who}" for who, n in on.items())
        lines = [f"{self.data['function']}{where}: {len(regions)} found{': ' * bool(on)}{counts}"]
        lines += aligned([_HEADER, *rows], len(_HEADER)) if rows else []
        lines += [f"nearly, at {m['at']}: {m['why']}" for m in missed]
        if any(r["what"].startswith("float32 q") and r["runs_on"] != "XLA" for r in regions):
            lines.append(f"where it is differentiated, XLA runs it: {NO_BACKWARD}")
        if count := self.data["graphs"]:
            lines.append(f"written with jax_cudnn already: {count} graph{'s' * (count > 1)}")
        left = [(n, what) for what, n in self.data["alone"].items() if n]
        alone = [f"{n} {what if n > 1 else what[:-1]}" for n, what in left]
        if alone:
            lines.append(f"alone, as XLA runs them: {' and '.join(alone)}")
        return "\n".join(lines)

    __repr__ = __str__


def found(name: str, gpu: str, program: Program, missed: Missed, decided: bool) -> Found:
    """The report of a program; equal regions of one line share a row."""
    rows: dict[tuple[str, ...], int] = {}
    times = dict(_times(program, 1))
    for region, often in _regions(program, 1):
        runs = ("XLA" if region.outcome else "cuDNN") if decided else ""
        key = (region.kind, region.what, _at(region.first), runs, region.gain, region.outcome)
        rows[key] = rows.get(key, 0) + often
    nearly: dict[tuple[str, str], int] = {}
    for equation, why in missed:
        key_ = _at(equation), why
        nearly[key_] = nearly.get(key_, 0) + times.get(equation, 1)
    regions = [{**dict(zip(_FIELDS, key, strict=True)), "times": n} for key, n in rows.items()]
    inside = {e for region, _ in _regions(program, 1) for e in region.replaced}
    counts = Counter()
    for equation, often in times.items():
        counts[equation.name] += often * (equation not in inside)
    alone = {what: counts[name] for what, name in _ALONE.items()}
    left = (e for e in times if e not in inside and e.name in _ALONE.values())
    hint = next((e for e in left if e.is_differentiated), None)
    if hint is not None and not any(_CALL in why for _, why in nearly):
        nearly[_at(hint), f"the function differentiates itself: {FIX}"] = 1
    missing = [{"at": at, "times": n, "why": why} for (at, why), n in nearly.items()]
    graphs = sum(1 for _ in in_jaxpr(program.jaxpr))
    data = {"function": name, "gpu": gpu, "regions": regions, "missed": missing, "alone": alone}
    return Found({**data, "graphs": graphs})


def _at(equation: Equation) -> str:
    return users_place(compat.user_frames(equation.written))


def _regions(program: Program, times: int) -> Iterator[tuple[Region, int]]:
    for region in program.found:
        yield region, times
    for equation in program.equations:
        turns = equation.params["length"] if equation.name == "scan" else 1
        for inner in equation.inner.values():
            yield from _regions(inner, times * turns)


def _times(program: Program, times: int) -> Iterator[tuple[Equation, int]]:
    for equation in program.equations:
        yield equation, times
        turns = equation.params["length"] if equation.name == "scan" else 1
        for inner in equation.inner.values():
            yield from _times(inner, times * turns)
