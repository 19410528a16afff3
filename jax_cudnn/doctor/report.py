"""The doctor's report: a table or JSON, a verdict and an exit code."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from . import checks
from .facts import Facts, collect
from .finding import ABSENT, AFTERWARDS, OK, PROBLEM, WARNING, Finding

_WIDTH = 100
_MARKS = {OK: "ok", WARNING: "warning", ABSENT: "absent", PROBLEM: "PROBLEM"}


def doctor(as_json: bool = False) -> int:
    """Prints what is installed, whether it works together, and what to do.

    Returns the exit code: 1 if there is a problem (something is installed but broken or
    incompatible, or a GPU cannot be used), else 0. A machine without a GPU, with or without cuDNN,
    is not a problem: graphs run on their reference there.
    """
    facts = collect()
    findings = checks.examine(facts)
    code = exit_code(findings)
    if as_json:
        print(json.dumps(as_dict(facts, findings), indent=2))
    else:
        print(f"jax_cudnn {facts.packages.get('jax-cudnn', '(a source tree)')}\n")
        print(table(findings) + "\n\n" + verdict(facts, findings))
    return code


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.status == PROBLEM for finding in findings))


def as_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report for other programs: ``ok``, ``verdict``, ``findings``, and the raw facts."""
    return {
        "jax_cudnn": facts.packages.get("jax-cudnn"),
        "ok": exit_code(findings) == 0,
        "verdict": verdict(facts, findings),
        "findings": [vars(finding) for finding in findings],
        "packages": dict(facts.packages),
        "environment": dict(facts.variables),
        "gpus": facts.gpus,
        "cudnn": [{**vars(c), "found_by": list(c.found_by)} for c in facts.copies],
    }


def table(findings: Sequence[Finding]) -> str:
    """One row per finding: status, name, value; below it the reason and what to do."""
    left = max(len(mark) for mark in _MARKS.values()) + 2
    middle = max(len(finding.name) for finding in findings) + 2
    lines = []
    for finding in findings:
        first, *others = finding.value.splitlines() or [""]
        lines.append(f"{_MARKS[finding.status]:{left}}{finding.name:{middle}}{first}".rstrip())
        lines += [" " * (left + middle) + line for line in others]
        for label, text in (("why: ", finding.why), ("do:  ", finding.fix)):
            lines += _wrapped(label, text, left + middle)
    return "\n".join(lines)


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """What works; or what does not work and how to fix it, causes before consequences."""
    problems = [finding for finding in findings if finding.status == PROBLEM]
    if problems:
        names = ", ".join(finding.name for finding in problems)
        fixes = list(dict.fromkeys(finding.fix for finding in problems if finding.fix))
        if len(fixes) > 1 and AFTERWARDS in fixes:
            fixes.remove(AFTERWARDS)
        steps = [line for n, fix in enumerate(fixes, 1) for line in _wrapped(f"{n}. ", fix, 2)]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        head = _wrapped("verdict: ", f"{count}: {names}. What to do, in this order:", 0)
        return "\n".join([*head, *steps])
    if facts.gpus:
        text = "everything works: graphs run as cuDNN plans on this machine's GPU."
    elif "engine" in facts.planning.reports.get("planned", {}):
        text = "nothing is broken. There is no GPU: graphs run on their reference, and plans can "
        text += "be built for an absent GPU (jax_cudnn.target)."
    else:
        text = "nothing is broken. There is no GPU, and cuDNN or its frontend is missing: graphs "
        text += f"run on their reference. To plan for an absent GPU: {checks.INSTALL}"
    return "\n".join(_wrapped("verdict: ", text, 0))


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Paragraphs with a hanging label; long paths and commands are not broken."""
    lines = []
    for paragraph in text.splitlines():
        lines += textwrap.wrap(
            paragraph,
            max(_WIDTH, indent + 40),
            initial_indent=" " * indent + label,
            subsequent_indent=" " * (indent + len(label)),
            break_long_words=False,
            break_on_hyphens=False,
        )
        label = " " * len(label)
    return lines
