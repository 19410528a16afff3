"""Normalizations as the Markdown that README.md shows between its ``norms`` marks."""

from __future__ import annotations

from typing import Any

from jax_cudnn._core.planning import losses

from ..sides import BACKWARD, FORWARD, OURS, REFERENCE, TIMED, TRAINING, WHOLE
from ..tables import where
from ..torch_graphs import MISSING
from .cases import PROGRAMS
from .torch_sides import COMPILED, EAGER, TUNED

_NEAR, _SLOWER = 0.85, 1.02  # of the limit; and a difference of less is none
_TITLES = (
    "normalization",
    "jax_cudnn, us",
    "cuDNN, us",
    "XLA, us",
    "XLA's best, us",
    "torch, us",
    "torch.compile, us",
    "limit, us",
    "best other / jax_cudnn",
    "of the limit: jax_cudnn, best other",
    "jax_cudnn runs",
)
_BOTH = _TITLES[:9]


def render_norms(result: dict[str, Any]) -> str:
    """A table for each program, one for forward and backward together, what of the goals is met,
    and what did not run."""
    environment, limit = result["environment"], result["limit"]
    text = (
        f"{where(result)}, torch {environment['torch']}, triton {environment['triton']}, driver "
        f"{environment['driver']}; medians of rounds in which all sides take turns, of the GPU's "
        "time alone (jax_cudnn with the quartiles). The limit is that of the bytes "
        f"which must move, each array once, at {limit['tbytes_s']:g} TB/s ({limit['of']}, "
        f"{limit['source']}); what fits into the L2 cache can be faster. jax_cudnn is the default, "
        'cuDNN `implementation="cudnn"`, XLA `implementation="xla"`, XLA\'s best that of several '
        "formulations in plain JAX, by name, torch.compile the better of its default and "
        "max-autotune. Spreads, engines and errors are in the data."
    )
    parts = [text]
    for program in PROGRAMS:
        rows = [
            _row(name, entry, program, limit, environment["sm_version"])
            for name, entry in result["norms"].items()
        ]
        parts += [f"{program.capitalize()}:", _table(_TITLES, rows)]
    rows = [_both(name, entry, limit) for name, entry in result["norms"].items()]
    parts += ["Forward that keeps residuals, and backward, added:", _table(_BOTH, rows)]
    goals = _goals(result) if environment["sm_version"] else []  # which no CPU meets
    notes = "\n".join(f"- {note}" for note in [*goals, *_notes(result)])
    return "\n\n".join([*parts, notes] if notes else parts)


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(
    name: str, entry: dict[str, Any], program: str, limit: dict[str, Any], sm_version: Any
) -> list[str]:
    found = entry["programs"].get(program, {"status": entry["status"]})
    if OURS not in found.get("us", {}):
        return [name, "", found["status"], *[""] * (len(_TITLES) - 3)]
    us, other = found["us"], best_other(found)
    marked = "" if found["status"] == TIMED else f" ({found['status']})"
    return [
        name + marked,
        _spread(us, OURS),
        *(_median_of(us, side) for side in (WHOLE, REFERENCE)),
        _median_of(us, found.get("best_xla"), named=True),
        _median_of(us, EAGER),
        _compiled(us),
        f"{found['bytes'] / limit['tbytes_s'] / 1e6:.1f}",
        f"{us[other]['median'] / us[OURS]['median']:.2f} ({other})" if other else "",
        _figures(found["of_limit"], (OURS, other), "{:.2f}"),
        _runs(found["plans"], sm_version),
    ]


def _both(name: str, entry: dict[str, Any], limit: dict[str, Any]) -> list[str]:
    found = entry.get("training_step", {})
    us = found.get("us", {})
    if OURS not in us:
        return [name, "", entry["status"], *[""] * (len(_BOTH) - 3)]
    other = best_other(found)
    size = sum(entry["programs"][program]["bytes"] for program in (TRAINING, BACKWARD))
    compiled = [side for side in (COMPILED, TUNED) if side in us]
    best = found.get("best_xla")
    return [
        name,
        *(_number(us, side) for side in (OURS, WHOLE, REFERENCE)),
        _number(us, best) + (f" {best}" if best else ""),
        _number(us, EAGER),
        _number(us, min(compiled, key=us.__getitem__, default=None)),
        f"{size / limit['tbytes_s'] / 1e6:.1f}",
        f"{us[other] / us[OURS]:.2f} ({other})" if other else "",
    ]


def best_other(found: dict[str, Any]) -> str | None:
    """The fastest side that is not ours: XLA's best, torch or torch.compile."""
    us = found["us"]
    others = [s for s in (found.get("best_xla"), EAGER, COMPILED, TUNED) if s in us]
    return min(others, key=lambda s: _median(us[s]), default=None)


def _goals(result: dict[str, Any]) -> list[str]:
    """Which lines are within 15 % of the limit, and which are slower than another side."""
    lines = [
        (f"{name}, {program}", program, found)
        for name, entry in result["norms"].items()
        for program, found in entry["programs"].items()
        if OURS in found.get("us", {})
    ]
    backward = [(line, found["of_limit"][OURS]) for line, p, found in lines if p == BACKWARD]
    again = {
        line: found["bytes_read_twice"] / found["bytes"] * found["of_limit"][OURS]
        for line, _, found in lines
        if "bytes_read_twice" in found and found["of_limit"][OURS] is not None
    }
    far = [f"{line} ({share})" for line, share in backward if share is None or share < _NEAR]
    slower = [
        f"{line} ({_median(found['us'][OURS]) / _median(found['us'][other]):.2f} times {other})"
        for line, program, found in lines
        if program in (FORWARD, TRAINING)
        for other in [best_other(found)]
        if other and _median(found["us"][OURS]) > _SLOWER * _median(found["us"][other])
    ]
    forwards = sum(program in (FORWARD, TRAINING) for _, program, _ in lines)
    return [
        f"backward within 15 % of the limit: {len(backward) - len(far)} of {len(backward)}"
        + (f"; not: {'; '.join(far)}" if far else ""),
        f"forward not slower than the best other side: {forwards - len(slower)} of {forwards}"
        + (f"; not: {'; '.join(slower)}" if slower else ""),
        *(
            [
                "statistics of a batch are of more than the chip holds, so x, and in the backward "
                "its gradient, are read twice; of the limit of these bytes jax_cudnn reaches "
                + ", ".join(f"{share:.2f} ({line})" for line, share in again.items())
            ]
            if again
            else []
        ),
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    """What did not run and what was wrong, each said once; and where the host is in the times."""
    notes: dict[str, list[str]] = {}
    for name, entry in result["norms"].items():
        if "reason" in entry:
            notes.setdefault(f"{entry['status']}: {entry['reason']}", []).append(name)
        for program, found in entry["programs"].items():
            line = f"{name} {program}"
            if "reason" in found:
                notes.setdefault(f"{found['status']}: {found['reason']}", []).append(line)
            for side, reason in found.get("not_run", {}).items():
                how = side if reason == MISSING else f"{side} did not run"
                notes.setdefault(f"{how}: {reason.partition(' what to do: ')[0]}", []).append(line)
            shown = [side for side, hidden in found.get("host_hidden", {}).items() if not hidden]
            if shown and len(shown) < len(found["us"]):  # on a CPU all are
                text = f"the host's time may be in that of {', '.join(shown)}"
                notes.setdefault(text, []).append(line)
            why = found.get("plans", {}).get(OURS, {}).get("why_xla")
            if why:
                notes.setdefault(f"XLA runs it by default: {why}", []).append(line)
    lines = sum(len(entry["programs"]) for entry in result["norms"].values())
    return [
        f"{'all' if len(where) == lines else ', '.join(where)}: {text}"
        for text, where in notes.items()
    ]


def _runs(plans: dict[str, dict[str, Any]], sm_version: Any) -> str:
    """Who ran the segments of a program by default, "" where no GPU says; and whether it would be
    XLA now, by what was learned from such figures."""
    plan = plans.get(OURS, {})
    counts = [(plan.get(who, 0), who) for who in ("cuDNN", "XLA")]
    ran = " + ".join(f"{n} {who}" if n > 1 else who for n, who in counts if n)
    lost = losses.table().get(str(sm_version), {}).get("patterns", {})
    return f"{ran}; now XLA" if lost.keys() & {*plan.get("patterns", ())} else ran


def _compiled(us: dict[str, Any]) -> str:
    sides = [side for side in (COMPILED, TUNED) if side in us]
    best = min(sides, key=lambda side: us[side]["median"], default=None)
    return _median_of(us, best) + " max-autotune" * (best == TUNED)


def _median_of(us: dict[str, Any], side: str | None, named: bool = False) -> str:
    if side not in us:
        return ""
    return f"{us[side]['median']:.4g}" + (f" {side}" if named else "")


def _spread(us: dict[str, Any], side: str) -> str:
    figure = us[side]
    return "{median:.4g} ({q1:.4g} to {q3:.4g})".format(**figure)


def _figures(figures: dict[str, Any], sides: tuple[str | None, ...], form: str) -> str:
    values = [figures[side] for side in sides if side in figures]
    return ", ".join("no number" if value is None else form.format(value) for value in values)


def _number(us: dict[str, float], side: str | None) -> str:
    return f"{us[side]:.4g}" if side in us else ""


def _median(figure: dict[str, float] | float) -> float:
    return figure["median"] if isinstance(figure, dict) else figure
