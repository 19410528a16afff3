"""Attention as docs/benchmarks.md shows it between its ``attention`` marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..case import BACKWARD, FORWARD, OURS, REFERENCE, WHOLE
from ..measure import TIMED, fastest
from ..tables import (
    NAMES,
    SLOWER,
    listed,
    medians,
    met,
    notes,
    programs,
    quartiles,
    slower,
    table,
    time,
    where,
)
from .case import JAX_NN
from .torch_sides import CUDNN, FLASH

_TITLES = (
    "attention",
    "jax_cudnn, us",
    "TFLOP/s",
    "of the limit",
    "cuDNN, us",
    "jax.nn cudnn, us",
    "XLA's best, us",
    "torch cudnn, us",
    "torch flash, us",
    "other, us",
    "published, TFLOP/s",
    "best other / jax_cudnn",
)
_COLUMNS = (WHOLE, REFERENCE, OURS, JAX_NN, CUDNN, FLASH)


def render(result: dict[str, Any]) -> str:
    """Tables of the forwards, of the backwards and of their sums; what did not run."""
    environment, limit, entries = result["environment"], result["limit"], result["attention"]
    peaks = ", ".join(f"{rate:g} TFLOP/s in {kind}" for kind, rate in limit["tflops"].items())
    text = (
        f"{where(result, 'torch', 'triton')}, driver {environment['driver']}. GPU time only, "
        "medians over rounds in which all implementations take turns (jax_cudnn with quartiles). "
        "Names are batch x tokens x query heads-key heads x head size. FLOPs: 4 per query, key, "
        "head and element, half of that where causal, and 2.5 times as many in the backward. The "
        f"limit is the time for these at {peaks}, or for the bytes that must move at "
        f"{limit['tbytes_s']:g} TB/s ({limit['of']}, {limit['source']}). Columns: jax_cudnn is the "
        'default; cuDNN is `implementation="cudnn"` where that ran another plan; XLA\'s best is '
        "the fastest of several formulations in plain JAX, including the reference; torch runs as "
        "CUDA graphs, except for packed sequences, windows and, with flash attention, pages. "
        f"Published: {result['published']['source']}. Spreads, engines and errors are in the data."
    )
    lines = {
        program: [
            _Line(case, entry, found, entry["published"].get(program))
            for case, entry in entries.items()
            for name, found in programs(entry)
            if NAMES[name] == program
        ]
        for program in (FORWARD, BACKWARD)
    }
    lines["both added"] = [
        _Line(case, entry, entry["training_step"] | {"plans": _plans(entry)})
        for case, entry in entries.items()
        if "training_step" in entry
    ]
    parts = [text]
    for name, each in lines.items():
        if each:
            parts += [f"{name.capitalize()}:", table(_TITLES, [line.cells() for line in each])]
    said = [*_goals(result), *notes(entries)]
    return "\n\n".join([*parts, listed(said)] if said else parts)


def _plans(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Those of all programs."""
    every = [found.get("plans", {}) for found in entry["programs"].values()]
    return {side: [plans.get(side) for plans in every] for side in (OURS, WHOLE)}


@dataclass(frozen=True)
class _Line:
    """One program of a case, or both added."""

    case: str
    entry: Mapping[str, Any]
    found: Mapping[str, Any]
    published: float | None = None

    @property
    def best_other(self) -> str | None:
        """The fastest side that is none of ours."""
        us = medians(self.found)
        best, plain = self.found.get("best_xla"), (*self.entry.get("xla", ()), REFERENCE, WHOLE)
        others = [s for s in us if s == best or not (s in plain or s.startswith(OURS))]
        return fastest(us, others)

    def cells(self) -> list[str]:
        us, status, found = medians(self.found), self.found.get("status", TIMED), self.found
        if not us:
            return [self.case, "", status, *[""] * (len(_TITLES) - 3)]
        ours, other, plans = found["us"].get(OURS), self.best_other, found.get("plans", {})
        known = (*_COLUMNS, *self.entry.get("xla", ()))
        return [
            self.case + ("" if status == TIMED else f" ({status})"),
            quartiles(ours) if isinstance(ours, dict) else time(us, OURS),
            self._value("tflops", "{:.3g}"),
            self._value("of_limit", "{:.2f}"),
            "" if plans.get(OURS) == plans.get(WHOLE) and OURS in us else time(us, WHOLE),
            time(us, JAX_NN),
            time(us, found.get("best_xla"), named=True),
            time(us, CUDNN),
            time(us, FLASH),
            ", ".join(time(us, side, named=True) for side in us if side not in known),
            self._published(),
            f"{us[other] / us[OURS]:.2f} ({other})" if other and us.get(OURS) else "",
        ]

    def _published(self) -> str:
        if self.published is None:
            return ""
        side = self.entry["published"]["side"]
        ours = self.found["tflops"].get(side)
        named = f" ({side} {ours:.0f})" if side != OURS and ours is not None else ""
        return f"{self.published:g}{named}"

    def _value(self, kind: str, form: str) -> str:
        value = self.found[kind].get(OURS)
        return "" if value is None else form.format(value)


def _goals(result: dict[str, Any]) -> list[str]:
    """How many lines equal the best other implementation, and what is published, at least; none
    without a GPU."""
    if not result["environment"]["sm_version"]:
        return []
    lines = [
        (f"{case}, {NAMES[name]}", _Line(case, entry, found, entry["published"].get(NAMES[name])))
        for case, entry in result["attention"].items()
        for name, found in programs(entry)
        if OURS in found.get("us", {})
    ]
    times = [
        (name, medians(line.found)[OURS], medians(line.found).get(other or "", 0.0), other)
        for name, line in lines
        for other in [line.best_other]
    ]
    published = [
        (name, line.published, line.found["tflops"].get(line.entry["published"]["side"]) or 0)
        for name, line in lines
        if line.published
    ]
    below = sum(a * SLOWER < rate for _, rate, a in published)
    known = [met("not below the published figures", len(published), below)] if published else []
    return [slower(times), *known]
