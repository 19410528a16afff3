"""Run code that could crash, hang or hold a GPU in a separate process, and report its progress."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_TAIL = 1500  # characters of a process's output in a report

_FRAME = re.compile(r"\s*@ +0x|\*\*\* Check failure stack trace")  # of XLA's stack traces


@dataclass(frozen=True)
class Outcome:
    """What a process reported, one line of JSON per report, and how it ended.

    Attributes:
        reports: its reports, by stage.
        ended: "" for a normal end, else a description ("died of SIGSEGV").
        stopped_in: the stage that it did not finish; the first stage if none began.
        tail: the end of the output of the process and its libraries.
    """

    reports: Mapping[str, Any] = field(default_factory=dict)
    ended: str = ""
    stopped_in: str = ""
    tail: str = ""


def run(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, first: str
) -> Outcome:
    """Runs a command that prints ``{"stage": name, ...}`` on stdout; never raises.

    A line without other keys marks the begin of a stage, so that a crash can be attributed to it;
    a crash before any such line belongs to the ``first`` stage.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # so that a time limit also ends its children
        )
    except OSError as error:
        return Outcome(ended=f"did not start: {error}", stopped_in=first)
    try:
        out, err = process.communicate(timeout=seconds)
        ended = _ended(process.returncode)
    except subprocess.TimeoutExpired:
        _stop(process)
        out, err = process.communicate()
        ended = f"did not end within {seconds:g} s and was stopped"
    reports, last, noise = _reports(out.decode(errors="replace"))
    words = [*noise, *err.decode(errors="replace").splitlines()]
    tail = "\n".join(line for line in words if not _FRAME.match(line))[-_TAIL:].strip()
    return Outcome(reports, ended, "" if last in reports else last or first, tail)


def _stop(process: subprocess.Popen) -> None:
    """Stops the process and its children, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (OSError, AttributeError):
        process.kill()


def _reports(out: str) -> tuple[dict[str, Any], str, list[str]]:
    """The reports, the stage that began last, and all other lines."""
    reports: dict[str, Any] = {}
    last, noise = "", []
    for line in out.splitlines():
        try:
            report = json.loads(line)
            last = report.pop("stage")
        except (ValueError, AttributeError, KeyError, TypeError):
            noise.append(line)  # a library printed it
            continue
        if report:
            reports[last] = report
    return reports, last, noise


def _ended(code: int) -> str:
    if code == 0:
        return ""
    if code > 0:
        return f"ended with exit code {code}"
    known = -code in signal.valid_signals()
    return f"died of {signal.Signals(-code).name if known else f'signal {-code}'}"
