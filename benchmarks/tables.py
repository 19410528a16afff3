"""What all tables share: Markdown, where a result is from, medians, and what did not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import power
from .case import BACKWARD, FORWARD, OURS, TRAINING

NAMES = {FORWARD: FORWARD, TRAINING: FORWARD, BACKWARD: BACKWARD}
SLOWER = 1.02  # a difference of less is none
_MOST = 400  # letters of a reason


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def listed(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


def where(result: Mapping[str, Any], *packages: str) -> str:
    e = result["environment"]
    alone = "No GPU: both sides are XLA on the CPU, and the ratio says nothing about cuDNN. "
    note = alone if e["device"].lower().startswith("cpu") else ""
    return (
        f"{note}{e['device']}, {e['date']}, cuDNN {e['cudnn']}, jax {e['jax']}, "
        f"nvidia-cudnn-frontend {e['nvidia-cudnn-frontend']}"
        + "".join(f", {package} {e[package]}" for package in packages)
    )


def spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:g} ({values['min']:g} to {values['max']:g})"


def quartiles(values: Mapping[str, float]) -> str:
    return "{median:.4g} ({q1:.4g} to {q3:.4g})".format(**values)


def pair(figures: Mapping[str, float | None], sides: Iterable[str | None], form: str) -> str:
    """The figures of two sides."""
    values = [figures[side] for side in sides if side in figures]
    return ", ".join("unknown" if value is None else form.format(value) for value in values)


def medians(found: Mapping[str, Any]) -> dict[str, float]:
    """By side, in us."""
    return {
        side: figure["median"] if isinstance(figure, dict) else figure
        for side, figure in found.get("us", {}).items()
    }


def time(us: Mapping[str, float], side: str | None, named: bool = False) -> str:
    if side not in us:
        return ""
    return f"{us[side]:.4g}" + (f" {side}" if named else "")


def programs(entry: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Of a case that failed as a whole a forward that says so."""
    return [*entry["programs"].items()] or [(FORWARD, {"status": entry["status"]})]


def slower(lines: Iterable[tuple[str, float, float, str | None]]) -> str:
    """Of lines with our time, another's and its name: how many are not slower."""
    known = [(line, ours, other, name) for line, ours, other, name in lines if name and ours]
    missed = sum(ours > SLOWER * other for _, ours, other, _ in known)
    return met("not slower than the best other implementation", len(known), missed)


def met(what: str, count: int, missed: int) -> str:
    return f"{what}: {count - missed} of {count}"


def notes(
    entries: Mapping[str, Any], named: Callable[[str], str] = NAMES.__getitem__
) -> Iterator[str]:
    """What did not run and what was wrong, each said once; and where the host is in the times."""
    said: dict[str, dict[str, list[str]]] = {}
    for case, entry in entries.items():
        if "reason" in entry:
            said.setdefault(f"{entry['status']}: {entry['reason']}", {})[case] = []
        for program, found in entry["programs"].items():
            for text in _told(found):
                said.setdefault(text, {}).setdefault(case, []).append(named(program))
    for text, cases in said.items():
        which = [
            case + (f" {' and '.join(p)}" if 0 < len(p) < len(entries[case]["programs"]) else "")
            for case, p in cases.items()
        ]
        every = len(cases) == len(entries) and [*cases] == which
        yield f"{'all' if every else ', '.join(which)}: {text}"


def _told(found: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of a program."""
    not_run, reasons = found.get("not_run", {}), {}
    for side, reason in not_run.items():
        text = reason.partition(" what to do: ")[0][:_MOST]
        reasons.setdefault(text, []).append(side)
    if "reason" in found and found["reason"] != not_run.get(OURS):
        yield f"{found['status']}: {found['reason']}"
    for reason, sides in reasons.items():
        yield f"{', '.join(sides)} did not run: {reason}"
    hidden = found.get("host_hidden", {})
    shown = [side for side, each in hidden.items() if not each]
    if shown and len(shown) < len(hidden):  # on a CPU all are
        yield f"host time may be included for {', '.join(shown)}"
    if found.get("power"):
        yield f"{OURS}: {power.told(found['power'])}"
    why = found.get("plans", {}).get(OURS, {}).get("why_xla")
    if why:
        yield f"XLA runs it by default: {why}"
