"""``python -m jax_cudnn bench``: runs the measurements and writes them as JSON with versions."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._core.cuda import device_nodes
from .._core.errors import GraphError, TargetError
from .comparison import Formulation
from .models import ModelCase, Operand, model_cases
from .tables import RESULTS as RESULTS
from .tables import render as render
from .tables import render_cases as render_cases

_MODES = {"command_buffers": "", "no_command_buffers": "--xla_gpu_enable_command_buffer="}
_SECONDS = 2.0  # of rounds a case: all cases, compilation included, take some minutes
_PROCESSES = 3  # of each mode: the host's speed differs from process to process


def run(out: Path, only: str | None = None, into: Path | None = None) -> dict[str, Any]:
    """All measurements, or the cases that ``only`` names, on this machine's GPU.

    Writes ``<model>.json`` into ``out``, or ``<model>-partial.json`` with ``only``; or puts the
    cases in the place of those of an earlier result, ``into``, of the same GPU and versions.
    """
    cases = select(only)
    if not device_nodes():
        raise TargetError(
            "bench needs an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix="run it on a machine with a GPU; `python -m jax_cudnn demo` runs anywhere",
        )
    if only is not None:
        part = _measured(cases, cudnn=True)
        return _write(part, out, "-partial") if into is None else merge(part, into)
    # The processes that measure come first: this one must not hold the GPU's memory then.
    host = {mode: [_host(flags) for _ in range(_PROCESSES)] for mode, flags in _MODES.items()}
    from . import planning

    result = {"host": host, **planning.tracing(), **planning.planning()}
    result |= _measured(cases, cudnn=True)
    print(render(result) + "\n")
    return _write(result, out)


def merge(part: dict[str, Any], into: Path) -> dict[str, Any]:
    """Puts the cases of a result in the place of those of an earlier one, and writes that.

    GraphError where the two are of another GPU or other versions.
    """
    result = json.loads(into.read_text())
    theirs, ours = ({**r["environment"], "date": ""} for r in (result, part))
    if theirs != ours:
        raise GraphError(
            f"{into} is a result of another GPU or of other versions",
            expected=str(theirs),
            got=str(ours),
            fix="measure all cases anew: leave out --only and --into",
        )
    result["cases"] |= part["cases"]
    into.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(part['cases'])} cases put into {into}")
    return result


def run_function(
    name: str,
    function: Callable[..., Any],
    avals: Sequence[Any],
    *,
    against: tuple[str, Callable[..., Any]] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """A user's function on random operands against another, or against its graphs' references.

    Runs on whatever device JAX has; writes ``<name>.json`` when ``out`` is given. An exception
    of the function is raised.
    """
    from .programs import with_references

    label, other = against or ("its reference in XLA", with_references(function))
    operands = tuple(Operand(a.shape, a.dtype.name) for a in avals)
    case = ModelCase(name, "", "", function, {label: Formulation(other)}, operands)
    return _write(_measured([case], tolerant=False), out, name=name)


def select(only: str | None) -> list[ModelCase]:
    """The cases whose names hold ``only`` (``*`` and ``?`` as in a shell); all for None."""
    cases = list(model_cases())
    if only is None:
        return cases
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.name, f"*{only}*")]
    if not chosen:
        raise GraphError(
            "no case has such a name",
            expected="a part of a name that `python -m jax_cudnn bench --list` prints",
            got=repr(only),
        )
    return chosen


def listing() -> str:
    """The names of all cases with their operands."""
    return "\n".join(f"{c.name}  {' '.join(map(str, c.operands))}" for c in model_cases())


def _measured(cases: Sequence[ModelCase], **options: Any) -> dict[str, Any]:
    from . import measure, timing

    entries = measure.measure(cases, seconds=_SECONDS, **options)
    return {"environment": timing.environment(), "cases": entries}


def _write(
    result: dict[str, Any], out: Path | None, suffix: str = "", name: str | None = None
) -> dict[str, Any]:
    result = {"environment": result.pop("environment"), **result}
    print(render_cases(result))
    if out is not None:
        device = result["environment"]["device"].removeprefix("NVIDIA ").lower()
        out.mkdir(parents=True, exist_ok=True)
        path = out / (re.sub(r"[^\w.]+", "-", name or device) + suffix + ".json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return result


def _host(flags: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    # In a replayed command buffer no handler runs, so there is nothing to time.
    options = ["--overhead"] if flags else []
    command = [sys.executable, "-m", "jax_cudnn.bench.host", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
