"""Normalizations as docs/benchmarks.md shows them between its ``norms`` marks."""

from __future__ import annotations

from typing import Any

from ..case import BACKWARD, OURS, REFERENCE, TRAINING, WHOLE
from ..measure import TIMED, fastest
from ..tables import listed, medians, met, notes, pair, programs, quartiles, slower, table, time
from ..tables import where as measured_where
from .cases import COMPILED, EAGER, PROGRAMS, TUNED

_NEAR = 0.85  # of the limit
_BOTH = (
    "normalization",
    "jax_cudnn, us",
    "cuDNN, us",
    "XLA, us",
    "XLA's best, us",
    "torch, us",
    "torch.compile, us",
    "limit, us",
    "best other / jax_cudnn",
)
_TITLES = (*_BOTH, "of the limit: jax_cudnn, best other", "jax_cudnn runs")


def render(result: dict[str, Any]) -> str:
    """A table for each program, one for forward and backward together, and what did not run."""
    environment, limit = result["environment"], result["limit"]
    text = (
        f"{measured_where(result, 'torch', 'triton')}, driver {environment['driver']}. GPU time "
        "only, medians over rounds in which all implementations take turns (jax_cudnn with "
        "quartiles). The limit is the time for the bytes that must move, each array once, at "
        f"{limit['tbytes_s']:g} TB/s ({limit['of']}, {limit['source']}); what fits into the L2 "
        "cache can be faster. Columns: jax_cudnn is the default, cuDNN is "
        '`implementation="cudnn"`, XLA is `implementation="xla"`, XLA\'s best is the fastest of '
        "several formulations in plain JAX, torch.compile the better of its default and "
        "max-autotune. Spreads, engines and errors are in the data."
    )
    parts, entries = [text], result["norms"]
    for program in PROGRAMS:
        rows = [
            _row(name, entry["programs"].get(program, {"status": entry["status"]}), result)
            for name, entry in entries.items()
        ]
        parts += [f"{program.capitalize()}:", table(_TITLES, rows)]
    rows = [_both(name, entry, limit) for name, entry in entries.items()]
    parts += ["Forward that keeps residuals, and backward, added:", table(_BOTH, rows)]
    goals = _goals(result) if environment["sm_version"] else []  # which no CPU meets
    said = [*goals, *notes(entries, str)]
    return "\n\n".join([*parts, listed(said)] if said else parts)


def best_other(found: dict[str, Any]) -> str | None:
    """The fastest side that is not ours: XLA's best, torch or torch.compile."""
    return fastest(medians(found), [found.get("best_xla", ""), EAGER, COMPILED, TUNED])


def _times(name: str, found: dict[str, Any], size: int, limit: dict[str, Any]) -> list[str]:
    """The cells that all tables have."""
    us, best, other = medians(found), found.get("best_xla"), best_other(found)
    compiled = fastest(us, (COMPILED, TUNED))
    spread = isinstance(found["us"][OURS], dict)
    marked = found.get("status", TIMED)
    return [
        name + ("" if marked == TIMED else f" ({marked})"),
        quartiles(found["us"][OURS]) if spread else time(us, OURS),
        time(us, WHOLE),
        time(us, REFERENCE),
        time(us, best, named=True),
        time(us, EAGER),
        time(us, compiled) + " max-autotune" * (spread and compiled == TUNED),
        f"{size / limit['tbytes_s'] / 1e6:.1f}",
        f"{us[other] / us[OURS]:.2f} ({other})" if other else "",
    ]


def _row(name: str, found: dict[str, Any], result: dict[str, Any]) -> list[str]:
    if OURS not in found.get("us", {}):
        return [name, "", found["status"], *[""] * (len(_TITLES) - 3)]
    return [
        *_times(name, found, found["bytes"], result["limit"]),
        pair(found["of_limit"], (OURS, best_other(found)), "{:.2f}"),
        _runs(found["plans"].get(OURS, {})),
    ]


def _both(name: str, entry: dict[str, Any], limit: dict[str, Any]) -> list[str]:
    found = entry.get("training_step", {})
    if OURS not in found.get("us", {}):
        return [name, "", entry["status"], *[""] * (len(_BOTH) - 3)]
    size = sum(entry["programs"][program]["bytes"] for program in (TRAINING, BACKWARD))
    return _times(name, found, size, limit)


def _goals(result: dict[str, Any]) -> list[str]:
    """How many lines are within 15 % of the limit, and how many not slower than another side."""
    lines = [
        (f"{name}, {program}", program, found)
        for name, entry in result["norms"].items()
        for program, found in programs(entry)
        if OURS in found.get("us", {})
    ]
    backward = [(line, found["of_limit"][OURS]) for line, p, found in lines if p == BACKWARD]
    far = sum(share is None or share < _NEAR for _, share in backward)
    again = [
        f"{found['bytes_read_twice'] / found['bytes'] * found['of_limit'][OURS]:.2f} ({line})"
        for line, _, found in lines
        if "bytes_read_twice" in found and found["of_limit"][OURS] is not None
    ]
    forwards = [
        (line, medians(found)[OURS], medians(found).get(other or "", 0.0), other)
        for line, program, found in lines
        for other in [best_other(found)]
        if program != BACKWARD
    ]
    text = (
        "batch statistics need more data than the chip holds, so x, and in the backward its "
        "gradient, are read twice. Of the limit for these bytes, jax_cudnn reaches "
    )
    return [
        met("backward within 15 % of the limit", len(backward), far),
        f"forward {slower(forwards)}",
        *([text + ", ".join(again)] if again else []),
    ]


def _runs(plan: dict[str, Any]) -> str:
    """Who ran the segments of a program by default, "" where no GPU says."""
    counts = [(plan.get(who, 0), who) for who in ("cuDNN", "XLA")]
    return " + ".join(f"{n} {who}" if n > 1 else who for n, who in counts if n)
