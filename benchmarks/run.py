"""``python -m benchmarks run``: measures the cases of a suite and writes them as JSON."""

from __future__ import annotations

import fnmatch
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jax_cudnn._core.cuda import device_nodes
from jax_cudnn._core.errors import GraphError, TargetError

from . import ROOT
from .measure import TINY, Effort, Entry, environment, measured

EFFORTS = {
    "cases": Effort(2.0, 30),  # all of them, compilation included, take some minutes
    "steps": Effort(4.0, 10),
    "norms": Effort(1.5, 20, 21),
    "attention": Effort(2.0, 20),
    # In so many calls the first, whose issue nothing hides, counts little.
    "flax": Effort(10.0, 20),
}
"""The suites: each a folder with ``cases.cases(tiny)`` and ``tables.render(result)``."""
_PACKAGES = {"flax": ("flax", "optax")}
_BESIDE = ("norms", "attention", "flax")  # which PyTorch's sides, or many models, stand beside
_MODES = {"command_buffers": "", "no_command_buffers": "--xla_gpu_enable_command_buffer="}
_PROCESSES = 3  # of each mode: the host's speed differs from process to process


def run(
    suite: str,
    out: Path,
    only: str | None = None,
    tiny: bool = False,
    into: Path | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """All measurements of a suite, or the cases that ``only`` names, on this machine's GPU;
    ``tiny`` ones anywhere.

    Writes ``<model>.json``, of other suites than "cases" ``<suite>_<model>.json``, into ``out``,
    with "-tiny" or "-partial" in its name where it holds tiny cases or some; or puts the cases in
    the place of those of an earlier result, ``into``, of the same GPU and versions. With PyTorch in
    this process JAX takes GPU memory as it needs it, and not most of it at once
    (``XLA_PYTHON_CLIENT_PREALLOCATE=false``), unless the variable is set.
    """
    chosen = _chosen(suite, only, tiny)
    if not tiny and not device_nodes():
        raise TargetError(
            "measurements need an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix="run it on a machine with a GPU; --tiny runs the same with small shapes anywhere",
        )
    if suite in _BESIDE:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    first = _host_and_planning() if suite == "cases" and only is None and not tiny else {}
    entry, base, about = _measure(suite, TINY if tiny else EFFORTS[suite], profiled)
    where = environment(*_PACKAGES.get(suite, ()))
    result = {"environment": where, **about, **first, suite: {}}
    name = f"{suite}_" * (suite != "cases") + where["device"].removeprefix("NVIDIA ").lower()
    name += "-tiny" * tiny + "-partial" * bool(only)
    path = out / (re.sub(r"[^\w.]+", "-", name) + ".json")

    def keep(entries: dict[str, Entry]) -> None:
        result[suite] = entries
        if into is None:
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")

    keep(measured(chosen, entry, base, keep))
    if into is not None:
        return merged(result, into, suite)
    print(importlib.import_module(f".{suite}.tables", __package__).render(result))
    print(f"written to {path}")
    return result


def cases(suite: str, tiny: bool = False) -> list[Any]:
    """Flax need not be installed for the others."""
    return list(importlib.import_module(f".{suite}.cases", __package__).cases(tiny))


def _measure(
    suite: str, effort: Effort, profiled: bool
) -> tuple[Callable[[Any], Entry], Callable[[Any], Entry], dict[str, Any]]:
    """What measures a case, what is always told of one, and what stands beside all figures."""
    if suite == "cases":
        from .cases.case import base, measure

        return partial(measure, effort=effort), base, {}
    from .case import LIMIT

    if suite == "flax":
        from .flax.measure import base, measure

        return partial(measure, effort=effort, profiled=profiled), base, {"limit": LIMIT}
    from . import forward_backward, queued
    from .attention.case import PUBLISHED

    fillers = queued.Fillers.made()
    about = {"limit": LIMIT} if suite != "steps" else {}
    about |= {"published": PUBLISHED} if suite == "attention" else {}
    return (
        partial(forward_backward.measure, effort=effort, fillers=fillers),
        forward_backward.base,
        about,
    )


def merged(part: dict[str, Any], into: Path, suite: str) -> dict[str, Any]:
    """Puts cases in the place of those of an earlier result, and writes that; GraphError where the
    two are of another GPU or other versions."""
    result = json.loads(into.read_text())
    theirs, ours = ({**r["environment"], "date": ""} for r in (result, part))
    if any(theirs[name] != ours[name] for name in theirs.keys() & ours.keys()):
        raise GraphError(
            f"{into} is a result of another GPU or of other versions",
            expected=str(theirs),
            got=str(ours),
            fix="measure all cases anew: leave out --only and --into",
        )
    if suite not in result:
        raise GraphError(f"{into} holds no {suite}", got=", ".join(result))
    result[suite] |= part[suite]
    into.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(part[suite])} {suite} put into {into}")
    return result


def _chosen(suite: str, only: str | None, tiny: bool) -> list[Any]:
    """Those whose names hold ``only`` (``*`` and ``?`` as in a shell)."""
    every = cases(suite, tiny)
    chosen = [c for c in every if only is None or fnmatch.fnmatchcase(c.name, f"*{only}*")]
    if not chosen:
        names = ", ".join(case.name for case in every)
        raise GraphError(f"no case of {suite} has such a name", expected=names, got=repr(only))
    return chosen


def _host_and_planning() -> dict[str, Any]:
    # The processes that measure come first: this one must not hold the GPU's memory then.
    host = {mode: [_host(flags) for _ in range(_PROCESSES)] for mode, flags in _MODES.items()}
    from . import planning

    return {"host": host, **planning.tracing(), **planning.planning()}


def _host(flags: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    # In a replayed command buffer no handler runs, so there is nothing to time.
    command = [sys.executable, "-m", "benchmarks.host", *["--overhead"] * bool(flags)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
