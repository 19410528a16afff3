"""Attention as the Markdown that README.md shows between its ``attention`` marks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..sides import BACKWARD, FORWARD, OURS, REFERENCE, TIMED, TRAINING, WHOLE
from ..tables import where
from . import power
from .parts import JAX_NN
from .torch_sides import CUDNN, FLASH

_NAMES = {FORWARD: FORWARD, TRAINING: FORWARD, BACKWARD: BACKWARD}
_MOST = 400  # letters of a reason
_SLOWER = 1.02  # a difference of less is none
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
    "others, us",
    "published, TFLOP/s",
    "best other / jax_cudnn",
)
_COLUMNS = (WHOLE, REFERENCE, OURS, JAX_NN, CUDNN, FLASH)


def render_attention(result: dict[str, Any]) -> str:
    """A table of the forwards, one of the backwards, one of both added; where ours is slower, and
    what did not run."""
    environment, limit = result["environment"], result["limit"]
    peaks = ", ".join(f"{rate:g} TFLOP/s in {kind}" for kind, rate in limit["tflops"].items())
    text = (
        f"{where(result)}, torch {environment['torch']}, triton {environment['triton']}, driver "
        f"{environment['driver']}; medians of rounds in which all sides take turns, of the GPU's "
        "time alone (jax_cudnn with the quartiles). Names are batch x tokens x heads-heads of keys "
        "x size. FLOPs are 4 for each pair of a query and a key, head and element, half of the "
        "pairs where it is causal, and 2.5 times that in the backward. The limit is that of these "
        f"at {peaks}, or of the bytes that must move at {limit['tbytes_s']:g} TB/s "
        f"({limit['of']}, {limit['source']}). jax_cudnn is the default; cuDNN "
        '`implementation="cudnn"`, where that ran another plan; XLA\'s best that of several '
        "formulations in plain JAX, by name, with the reference; torch runs as CUDA graphs, "
        "but for packed examples, windows and, by flash attention, pages. "
        f"Published: {result['published']['source']}. Spreads, engines and errors are in the data."
    )
    parts = [text]
    for name in (FORWARD, BACKWARD):
        lines = [
            _Line(case, entry, found, entry["published"].get(name))
            for case, entry in result["attention"].items()
            for program, found in _programs(entry)
            if _NAMES[program] == name
        ]
        if lines:
            parts += [f"{name.capitalize()}:", _table(_TITLES, [line.cells() for line in lines])]
    lines = [
        _Line(case, entry, entry["training_step"] | {"plans": _plans(entry)})
        for case, entry in result["attention"].items()
        if "training_step" in entry
    ]
    if lines:
        parts += ["Both added:", _table(_TITLES, [line.cells() for line in lines])]
    notes = "\n".join(f"- {note}" for note in [*_goals(result), *_notes(result)])
    return "\n\n".join([*parts, notes] if notes else parts)


def _programs(entry: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Of a case that failed as a whole a forward that says so."""
    return [*entry["programs"].items()] or [(FORWARD, {"status": entry["status"]})]


def _plans(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Those of all programs."""
    every = [found.get("plans", {}) for found in entry["programs"].values()]
    return {side: [plans.get(side) for plans in every] for side in (OURS, WHOLE)}


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class _Line:
    """One program of a case, or both added."""

    case: str
    entry: Mapping[str, Any]
    found: Mapping[str, Any]
    published: float | None = None

    @property
    def us(self) -> dict[str, float]:
        """Medians, by side."""
        return {
            side: figure["median"] if isinstance(figure, dict) else figure
            for side, figure in self.found.get("us", {}).items()
        }

    @property
    def best_other(self) -> str | None:
        """The fastest side that is none of ours."""
        best, plain = self.found.get("best_xla"), (*self.entry.get("xla", ()), REFERENCE)
        others = {
            side: time
            for side, time in self.us.items()
            if side == best or not (side in plain or side == WHOLE or side.startswith(OURS))
        }
        return min(others, key=others.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        other, us = self.best_other, self.us
        if other is None or not us.get(OURS):
            return None
        return us[other] / us[OURS]

    def cells(self) -> list[str]:
        us, status = self.us, self.found.get("status", TIMED)
        if not us:
            return [self.case, "", status, *[""] * (len(_TITLES) - 3)]
        best, ratio, plans = self.found.get("best_xla"), self.ratio, self.found.get("plans", {})
        known = (*_COLUMNS, *self.entry.get("xla", ()))
        return [
            self.case + ("" if status == TIMED else f" ({status})"),
            self._ours(),
            self._value("tflops", "{:.3g}"),
            self._value("of_limit", "{:.2f}"),
            "" if plans.get(OURS) == plans.get(WHOLE) and OURS in us else self._time(WHOLE),
            self._time(JAX_NN),
            f"{us[best]:.4g} {best}" if best else "",
            self._time(CUDNN),
            self._time(FLASH),
            ", ".join(f"{us[side]:.4g} {side}" for side in us if side not in known),
            self._published(),
            "" if ratio is None else f"{ratio:.2f} ({self.best_other})",
        ]

    def _ours(self) -> str:
        figure = self.found["us"].get(OURS)
        if not isinstance(figure, dict):
            return self._time(OURS)
        return "{median:.4g} ({q1:.4g} to {q3:.4g})".format(**figure)

    def _published(self) -> str:
        if self.published is None:
            return ""
        side = self.entry["published"]["side"]
        ours = self.found["tflops"].get(side)
        named = f" ({side} {ours:.0f})" if side != OURS and ours is not None else ""
        return f"{self.published:g}{named}"

    def _time(self, side: str) -> str:
        us = self.us
        return f"{us[side]:.4g}" if side in us else ""

    def _value(self, kind: str, form: str) -> str:
        value = self.found[kind].get(OURS)
        return "" if value is None else form.format(value)


def _goals(result: dict[str, Any]) -> list[str]:
    """How many lines are at least equal to the best other side and to what is published; none
    without a GPU."""
    if not result["environment"]["sm_version"]:
        return []
    lines = [
        (
            f"{case}, {_NAMES[program]}",
            _Line(case, entry, found, entry["published"].get(_NAMES[program])),
        )
        for case, entry in result["attention"].items()
        for program, found in entry["programs"].items()
        if OURS in found.get("us", {})
    ]
    compared = [(name, line) for name, line in lines if line.ratio is not None]
    slower = [
        f"{name} ({1 / line.ratio:.2f} times {line.best_other})"
        for name, line in compared
        if line.ratio and line.ratio * _SLOWER < 1
    ]
    published = [
        (name, line.published, line.found["tflops"].get(line.entry["published"]["side"]) or 0)
        for name, line in lines
        if line.published
    ]
    below = [
        f"{name} ({ours:.0f} of {rate:g})"
        for name, rate, ours in published
        if ours * _SLOWER < rate
    ]
    return [
        _met("not slower than the best other side", len(compared), slower),
        *([_met("not below what is published", len(published), below)] if published else []),
    ]


def _met(what: str, count: int, missed: list[str]) -> str:
    return f"{what}: {count - len(missed)} of {count}" + (
        f"; not: {'; '.join(missed)}" if missed else ""
    )


def _notes(result: dict[str, Any]) -> list[str]:
    """What did not run and what was wrong, each said once; and where the host is in the times."""
    notes: dict[str, dict[str, list[str]]] = {}
    for case, entry in result["attention"].items():
        if "reason" in entry:
            notes.setdefault(f"{entry['status']}: {entry['reason']}", {})[case] = []
        for program, found in entry["programs"].items():
            for text in _told(found):
                notes.setdefault(text, {}).setdefault(case, []).append(_NAMES[program])
    said = []
    for text, cases in notes.items():
        where = [
            case + "".join(f" {program}" for program in programs if len(programs) == 1)
            for case, programs in cases.items()
        ]
        said.append(
            f"{'all' if len(where) == len(result['attention']) else ', '.join(where)}: {text}"
        )
    return said


def _told(found: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of a program."""
    reasons: dict[str, list[str]] = {}
    for side, reason in found.get("not_run", {}).items():
        text = reason.partition(" what to do: ")[0][:_MOST]
        reasons.setdefault(text, []).append(side)
    if "reason" in found and found["reason"] != found.get("not_run", {}).get(OURS):
        yield f"{found['status']}: {found['reason']}"
    for reason, sides in reasons.items():
        yield f"{', '.join(sides)} did not run: {reason}"
    hidden = found.get("host_hidden", {})
    shown = [side for side, each in hidden.items() if not each]
    if shown and len(shown) < len(hidden):  # on a CPU all are
        yield f"the host's time may be in that of {', '.join(shown)}"
    if found.get("power"):
        yield f"{OURS}: {power.told(found['power'])}"
    why = found.get("plans", {}).get(OURS, {}).get("why_xla")
    if why:
        yield f"XLA runs it by default: {why}"
