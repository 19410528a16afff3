"""``python -m benchmarks run``: measures cases and writes them as JSON with versions."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from jax_cudnn._core.cuda import device_nodes
from jax_cudnn._core.errors import GraphError, TargetError

from . import ROOT
from .attention.case import LIMIT
from .tables import render, render_cases

_MODES = {"command_buffers": "", "no_command_buffers": "--xla_gpu_enable_command_buffer="}
_SECONDS = 2.0  # of rounds a case: all cases, compilation included, take some minutes
_PROCESSES = 3  # of each mode: the host's speed differs from process to process


def run(
    kind: str,
    out: Path,
    only: str | None = None,
    tiny: bool = False,
    into: Path | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """All measurements of a kind, or the cases that ``only`` names, on this machine's GPU; ``tiny``
    ones anywhere.

    Writes ``<model>.json``, of other kinds than "cases" ``<kind>_<model>.json``, into ``out``, with
    "-tiny" or "-partial" in its name where it holds tiny cases or some; or puts the cases in the
    place of those of an earlier result, ``into``, of the same GPU and versions. With PyTorch in
    this process JAX takes GPU memory as it needs it, and not most of it at once
    (``XLA_PYTHON_CLIENT_PREALLOCATE=false``), unless the variable is set.
    """
    chosen = _chosen(_cases(kind, tiny), only, kind)
    if not tiny:
        _need_a_gpu()
    if kind in _BESIDE:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    first: dict[str, Any] = {}
    if kind == "cases" and only is None and not tiny:
        # The processes that measure come first: this one must not hold the GPU's memory then.
        first["host"] = {mode: [_host(f) for _ in range(_PROCESSES)] for mode, f in _MODES.items()}
        from . import planning

        first |= {**planning.tracing(), **planning.planning()}
    from . import sides

    measured, about, rendered = _measured(kind, profiled)
    result = {
        "environment": sides.environment(*_PACKAGES.get(kind, ())),
        **about,
        **first,
        kind: {},
    }
    name = "" if kind == "cases" else f"{kind}_"
    name += _model(result) + "-tiny" * tiny + "-partial" * bool(only)

    def keep(entries: dict[str, Any]) -> None:  # a run may be ended early
        result[kind] = entries
        if into is None:
            _put(result, out, name)

    effort: dict[str, Any] = {"seconds": 0.0, "calls": 1} if tiny else {}
    keep(measured(chosen, **effort))
    if into is not None:
        return _merge(result, into, kind)
    print(rendered(result))
    print(f"written to {_put(result, out, name)}")
    return result


_PACKAGES = {"flax": ("flax", "optax")}
_BESIDE = ("norms", "attention", "flax")  # which PyTorch's sides, or many models, stand beside


def listing(kind: str) -> str:
    """The names of a kind's cases, with what they are."""
    return "\n".join(f"{case.name}  {case.what}" for case in _cases(kind, tiny=False))


def _cases(kind: str, tiny: bool) -> list[Any]:
    if kind == "cases":
        from .models.cases import model_cases

        return [case.small if tiny else case for case in model_cases()]
    if kind == "steps":
        from .steps import models as module
    elif kind == "norms":
        from .norms import cases as module
    elif kind == "attention":
        from .attention import cases as module
    else:
        from .flax import cases as module  # Flax need not be installed for the others
    return list(module.tiny_cases() if tiny else getattr(module, _CASES[kind])())


_CASES = {
    "steps": "step_cases",
    "norms": "norm_cases",
    "attention": "attention_cases",
    "flax": "flax_cases",
}


def _measured(kind: str, profiled: bool) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """What measures cases of a kind, what stands beside the figures, and what shows them."""
    if kind == "cases":
        from .measure import measure

        return partial(measure, cudnn=True), {}, _both
    if kind == "steps":
        from .steps.measure import measure_steps
        from .steps.tables import render_steps

        return measure_steps, {}, render_steps
    if kind == "norms":
        from .norms.measure import LIMIT as OF_NORMS
        from .norms.measure import measure_norms
        from .norms.tables import render_norms

        return measure_norms, {"limit": OF_NORMS}, render_norms
    if kind == "attention":
        from .attention.measure import measure_attention
        from .attention.published import PUBLISHED
        from .attention.tables import render_attention

        return measure_attention, {"limit": LIMIT, "published": PUBLISHED}, render_attention
    from .flax.measure import measure_flax
    from .flax.tables import render_flax

    return partial(measure_flax, profiled=profiled), {"limit": LIMIT}, render_flax


def _both(result: dict[str, Any]) -> str:
    shown = [render(result)] if "host" in result else []
    return "\n\n".join([*shown, render_cases(result)])


def _merge(part: dict[str, Any], into: Path, kind: str) -> dict[str, Any]:
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
    if kind not in result:
        raise GraphError(f"{into} holds no {kind}", got=", ".join(result))
    result[kind] |= part[kind]
    into.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(part[kind])} {kind} put into {into}")
    return result


def _put(result: dict[str, Any], out: Path, name: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / (re.sub(r"[^\w.]+", "-", name) + ".json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _chosen(cases: Iterable[Any], only: str | None, kind: str) -> list[Any]:
    """Those whose names hold ``only`` (``*`` and ``?`` as in a shell)."""
    cases = list(cases)
    chosen = [c for c in cases if only is None or fnmatch.fnmatchcase(c.name, f"*{only}*")]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise GraphError(f"no case of {kind} has such a name", expected=names, got=repr(only))
    return chosen


def _model(result: dict[str, Any]) -> str:
    return result["environment"]["device"].removeprefix("NVIDIA ").lower()


def _need_a_gpu() -> None:
    if not device_nodes():
        raise TargetError(
            "measurements need an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix="run it on a machine with a GPU; --tiny runs the same with small shapes anywhere",
        )


def _host(flags: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    # In a replayed command buffer no handler runs, so there is nothing to time.
    options = ["--overhead"] if flags else []
    command = [sys.executable, "-m", "benchmarks.host", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
