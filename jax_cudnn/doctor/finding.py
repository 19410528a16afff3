"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .process import Outcome

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"
AFTERWARDS = "fix the problems above, then try again"  # advice for consequences
Status = Literal["ok", "warning", "problem", "absent"]


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        name: what was checked.
        status: "ok"; "absent": not installed, and not needed on this machine; "warning": works
            now, but may break; "problem": installed but broken or incompatible, or a GPU that
            cannot be used.
        value: versions and locations, possibly on several lines.
        why: the reason for the status.
        fix: what to do.
    """

    name: str
    status: Status
    value: str
    why: str = ""
    fix: str = ""


def stage(outcome: Outcome, name: str) -> dict[str, Any]:
    """A stage's report; ``error`` or ``untried`` if the stage printed none."""
    report = outcome.reports.get(name)
    if report is not None:
        return report
    if outcome.stopped_in != name:
        return {"untried": f"its process ended earlier, in stage {outcome.stopped_in!r}"}
    ended = f"its process {outcome.ended}"
    return {"error": {"summary": ended, "why": outcome.tail or "it printed nothing"}}


def blamed(report: dict[str, Any]) -> bool:
    return "error" in report or "untried" in report


def failure(name: str, report: dict[str, Any], fix: str) -> Finding:
    """The finding for an ``untried`` stage or an ``error``, whose own advice takes precedence."""
    if "untried" in report:
        return Finding(name, WARNING, "not tried", report["untried"])
    error = report["error"]
    expected = f"expected {error['expected']}" if error.get("expected") else ""
    got = f"got {error['got']}" if error.get("got") else ""
    why = "\n".join(filter(None, (", ".join(filter(None, (expected, got))), error.get("why"))))
    return Finding(name, PROBLEM, error["summary"], why, error.get("fix") or fix)
