"""The table of patterns at which cuDNN loses, from results: ``python -m benchmarks losses``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_cudnn._core.errors import GraphError, TargetError
from jax_cudnn._core.planning.deviceless import profiles

from .case import REFERENCE, WHOLE
from .measure import TIMED

# A loss is no noise: XLA takes less than this part of cuDNN's time in every case of the pattern, of
# which there are at least two; and is faster in every round, unless there are as many as four.
_RATIO, _CASES, _MANY = 0.95, 2, 4
RESULTS = ("h200", "norms_h200")
"""The committed results that name patterns and decide."""
_ISSUED = 50  # us; no call of a graph keeps the host for so long


def generate(*results: dict[str, Any]) -> dict[str, Any]:
    """The part of the table that results of one machine give: its SM version with what was
    measured there. Of what differs between them the first says how that was.

    A case counts as XLA would run it: its graph's reference (``ratio_reference``), which is what
    "split" leaves to XLA, and not the best formulation that somebody wrote by hand. A case without
    that figure is no loss. Raises GraphError where the SM version is neither in the result nor
    that of a profile.
    """
    environment = results[0]["environment"]
    if len(of := {(r["environment"]["device"], r["environment"]["cudnn"]) for r in results}) > 1:
        raise GraphError(
            "these results are not of one machine",
            expected="one device and one version of cuDNN",
            got="; ".join(f"{device} with cuDNN {cudnn}" for device, cudnn in sorted(of)),
        )
    patterns: dict[str, dict[str, Any]] = {}
    for result in results:
        for pattern, entries in _by_pattern(result).items():
            patterns.setdefault(pattern, {}).update(entries)
    lost = {
        pattern: {name: entry["ratio_reference"] for name, entry in entries.items()}
        for pattern, entries in sorted(patterns.items())
        if not _why_not(entries)
    }
    where = {key: environment[key] for key in ("device", "date", "cudnn", "jax")}
    where["date"] = ", ".join(sorted({result["environment"]["date"] for result in results}))
    return {str(_sm_version(environment)): {**where, "patterns": lost}}


def render(result: dict[str, Any]) -> str:
    """All patterns of a result: how XLA's time compares, and whether XLA runs them."""
    rows = [
        "| pattern | cases | reference in XLA / jax_cudnn | XLA runs it |",
        "|---|---|---|---|",
    ]
    for pattern, entries in sorted(_by_pattern(result).items()):
        ratios = [e["ratio_reference"] for e in entries.values() if "ratio_reference" in e]
        shown = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
        why = _why_not(entries)
        rows.append(f"| {pattern} | {len(entries)} | {shown} | {f'no: {why}' if why else 'yes'} |")
    if len(rows) == 2:
        return "This result names no patterns: a bench of the named cases measures them."
    return "\n".join(rows)


def merged(results: Sequence[dict[str, Any]], file: Path) -> str:
    """The text of a table with what results give in it, beside other architectures' parts."""
    try:
        table = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        table = {**table, **generate(*results)}
        table = dict(sorted(table.items(), key=lambda part: int(part[0])))
    except (ValueError, TypeError) as error:
        raise GraphError(
            f"{file} does not hold a table of losses",
            expected="a new file, or a table that this command wrote",
            got=repr(error),
        ) from error
    return json.dumps(table, indent=1) + "\n"


def _by_pattern(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The timed cases by pattern."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in result.get("cases", {}).items():
        if entry["status"] == TIMED and "pattern" in entry:
            found.setdefault(entry["pattern"], {})[name] = entry
    several = {**result.get("norms", {}), **result.get("attention", {})}
    for case, measured in several.items():
        for program, entry in measured["programs"].items():
            plans, us = entry.get("plans", {}).get(WHOLE, {}), entry.get("us", {})
            patterns = plans.get("patterns", ())
            alone = len(patterns) == 1 and not plans.get("XLA")
            if alone and {WHOLE, REFERENCE} <= us.keys() and not _of_the_host(entry):
                found.setdefault(patterns[0], {})[f"{case}, {program}"] = _compared(us)
    return found


def _of_the_host(entry: dict[str, Any]) -> bool:
    """Whether cuDNN's time may be that of the host, which issued its calls too slowly."""
    return not entry["host_hidden"][WHOLE] and entry["us"][WHOLE]["median"] < _ISSUED


def _compared(us: dict[str, dict[str, float]]) -> dict[str, float]:
    """The ratio of medians, and the largest that half of the rounds leave likely."""
    reference, whole = us[REFERENCE], us[WHOLE]
    return {
        "ratio_reference": round(reference["median"] / whole["median"], 4),
        "ratio_reference_max": round(reference["q3"] / whole["q1"], 4),
    }


def _why_not(entries: dict[str, Any]) -> str:
    """Why a pattern of these cases stays with cuDNN; empty where XLA is to run it."""
    cases = {name.partition(", ")[0] for name in entries}  # of one there may be several programs
    if len(cases) < _CASES:
        return f"only {len(cases)} case"
    for name, entry in entries.items():
        ratio, slowest = entry.get("ratio_reference"), entry.get("ratio_reference_max")
        if ratio is None or slowest is None:
            return f"no time of the reference of {name}"
        if ratio >= _RATIO or (slowest >= 1 and len(cases) < _MANY):
            return f"{name} at {ratio:.2f}, up to {slowest:.2f}"
    return ""


def _sm_version(environment: dict[str, Any]) -> int:
    """Of the result, or of the profile of its device: results before this table had none."""
    if environment.get("sm_version") is not None:
        return int(environment["sm_version"])
    try:
        return profiles.get(environment["device"]).sm_version
    except TargetError as error:
        raise GraphError(
            "this result does not say on which architecture it was measured",
            expected="an environment with sm_version, or a device with a shipped profile",
            got=environment["device"],
        ) from error
