"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .process import Outcome

OK, WARNING, PROBLEM, ABSENT = "ok", "warning", "problem", "absent"
AFTERWARDS = "mend what stands above, and try again"  # advice for what only follows
Status = Literal["ok", "warning", "problem", "absent"]


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    Attributes:
        name: what was looked at.
        status: "ok"; "absent": not installed, and not needed for what this machine can do;
            "warning": works now, but may not last; "problem": installed and does not work or
            fit, or a GPU that cannot be used.
        value: versions and places, perhaps in several lines.
        why: the reason for the status.
        fix: what to do.
    """

    name: str
    status: Status
    value: str
    why: str = ""
    fix: str = ""


def stage(outcome: Outcome, name: str) -> dict[str, Any]:
    """A stage's report; ``error`` or ``untried`` in place of one that did not come."""
    report = outcome.reports.get(name)
    if report is not None:
        return report
    if outcome.stopped_in != name:
        return {"untried": f"its process ended before, in stage {outcome.stopped_in!r}"}
    ended = f"the process that tries it {outcome.ended}"
    return {"error": {"summary": ended, "why": outcome.tail or "it printed nothing"}}


def blamed(report: dict[str, Any]) -> bool:
    return "error" in report or "untried" in report


def failure(name: str, report: dict[str, Any], fix: str) -> Finding:
    """The finding for an ``error`` (its own advice before ours) or an ``untried`` stage."""
    if "untried" in report:
        return Finding(name, WARNING, "not tried", report["untried"])
    error = report["error"]
    expected = f"expected {error['expected']}" if error.get("expected") else ""
    got = f"got {error['got']}" if error.get("got") else ""
    why = "\n".join(filter(None, (", ".join(filter(None, (expected, got))), error.get("why"))))
    return Finding(name, PROBLEM, error["summary"], why, error.get("fix") or fix)
