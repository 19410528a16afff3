"""``python -m jax_cudnn bench``: runs the measurements and writes them as JSON with versions."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .._core.cuda import device_nodes
from .._core.errors import GraphError, TargetError
from .attention import cases as attention_cases
from .attention.case import LIMIT, AttentionCase
from .attention.published import PUBLISHED
from .attention.tables import render_attention as render_attention
from .command import NAMED
from .comparison import Formulation
from .flax.tables import render_flax as render_flax
from .models.cases import ModelCase, Operand, model_cases
from .norms import cases as norm_cases
from .norms.tables import render_norms as render_norms
from .steps import models as step_models
from .steps.tables import render_steps as render_steps
from .tables import RESULTS as RESULTS
from .tables import render as render
from .tables import render_cases as render_cases

if TYPE_CHECKING:
    from .flax.case import FlaxCase

Named = TypeVar("Named", step_models.StepCase, norm_cases.NormCase, AttentionCase, "FlaxCase")

_MODES = {"command_buffers": "", "no_command_buffers": "--xla_gpu_enable_command_buffer="}
_SECONDS = 2.0  # of rounds a case: all cases, compilation included, take some minutes
_PROCESSES = 3  # of each mode: the host's speed differs from process to process


def run(out: Path, only: str | None = None, into: Path | None = None) -> dict[str, Any]:
    """All measurements, or the cases that ``only`` names, on this machine's GPU.

    Writes ``<model>.json`` into ``out``, or ``<model>-partial.json`` with ``only``; or puts the
    cases in the place of those of an earlier result, ``into``, of the same GPU and versions.
    """
    cases = select(only)
    _need_a_gpu("`python -m jax_cudnn demo` runs anywhere")
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


def run_steps(
    out: Path, only: str | None = None, tiny: bool = False, into: Path | None = None
) -> dict[str, Any]:
    """Training steps, or those that ``only`` names, on this machine's GPU; ``tiny`` ones anywhere.

    Writes ``steps_<model>.json`` into ``out``, with "-tiny" or "-partial" in its name where it
    holds tiny steps or some; or puts them in the place of those of an earlier result, ``into``.
    """
    from . import timing
    from .steps import measure as steps

    cases = step_models.tiny_cases() if tiny else step_models.step_cases()
    chosen = _chosen(cases, only, "training step")
    if not tiny:
        _need_a_gpu("`--steps --tiny` runs the same programs with small shapes anywhere")
    entries = steps.measure_steps(chosen, **({"seconds": 0.0, "calls": 1} if tiny else {}))
    result = {"environment": timing.environment(), "steps": entries}
    if into is not None:
        return merge(result, into)
    print(render_steps(result))
    _save(result, out, "steps_" + _model(result) + "-tiny" * tiny + "-partial" * bool(only))
    return result


def run_norms(
    out: Path, only: str | None = None, tiny: bool = False, into: Path | None = None
) -> dict[str, Any]:
    """Normalizations, as :func:`run_steps` does training steps; writes ``norms_<model>.json``.

    With PyTorch in this process: JAX then takes GPU memory as it needs it, and not most of it at
    once (``XLA_PYTHON_CLIENT_PREALLOCATE=false``), unless the variable is set.
    """
    from .norms import measure as norms

    cases = norm_cases.tiny_cases() if tiny else norm_cases.norm_cases()
    chosen = _chosen(cases, only, "normalization")
    measured = partial(norms.measure_norms, chosen)
    return _run_sides(
        "norms", measured, render_norms, {"limit": norms.LIMIT}, out, only, tiny, into
    )


def run_attention(
    out: Path, only: str | None = None, tiny: bool = False, into: Path | None = None
) -> dict[str, Any]:
    """Attention, as :func:`run_norms` does normalizations; writes ``attention_<model>.json``."""
    from .attention import measure as attention

    cases = attention_cases.tiny_cases() if tiny else attention_cases.attention_cases()
    chosen = _chosen(cases, only, "attention")
    measured = partial(attention.measure_attention, chosen)
    about = {"limit": LIMIT, "published": PUBLISHED}
    return _run_sides("attention", measured, render_attention, about, out, only, tiny, into)


def run_flax(
    out: Path,
    only: str | None = None,
    tiny: bool = False,
    into: Path | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """Flax's models, as :func:`run_norms` does normalizations; writes ``flax_<model>.json``."""
    from .flax import cases as flax_cases
    from .flax import measure as flax

    cases = flax_cases.tiny_cases() if tiny else flax_cases.flax_cases()
    chosen = _chosen(cases, only, "model of Flax")
    measured = partial(flax.measure_flax, chosen, profiled=profiled)
    about = {"limit": LIMIT}
    return _run_sides(
        "flax", measured, render_flax, about, out, only, tiny, into, packages=("flax", "optax")
    )


def _run_sides(
    kind: str,
    measured: Callable[..., dict[str, Any]],
    rendered: Callable[[dict[str, Any]], str],
    about: dict[str, Any],
    out: Path,
    only: str | None,
    tiny: bool,
    into: Path | None,
    packages: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A bench of several sides, such as PyTorch's, which is written after each case."""
    from . import sides

    if not tiny:
        _need_a_gpu(f"`--{kind} --tiny` runs the same programs with small shapes anywhere")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    result = {"environment": sides.environment(*packages), **about, kind: {}}
    name = f"{kind}_" + _model(result) + "-tiny" * tiny + "-partial" * bool(only)

    def keep(entries: dict[str, Any]) -> None:  # a run may be ended early
        result[kind] = entries
        if into is None:
            _put(result, out, name)

    measured(done=keep, **({"seconds": 0.0, "calls": 1} if tiny else {}))
    if into is not None:
        return merge(result, into)
    print(rendered(result))
    _save(result, out, name)
    return result


def merge(part: dict[str, Any], into: Path) -> dict[str, Any]:
    """Puts the cases, or entries of a named bench, in the place of those of an earlier result, and
    writes that.

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
    kind = next(kind for kind in (*NAMED, "cases") if kind in part)
    if kind not in result:
        raise GraphError(f"{into} holds no {kind}", got=", ".join(result))
    result[kind] |= part[kind]
    into.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(part[kind])} {kind} put into {into}")
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
    chosen = [case for case in cases if _named(case.name, only)]
    if not chosen:
        raise GraphError(
            "no case has such a name",
            expected="a part of a name that `python -m jax_cudnn bench --list` prints",
            got=repr(only),
        )
    return chosen


def listing(kind: str | None = None) -> str:
    """The names of all cases with their operands, or of those of one of ``NAMED``."""
    every: dict[str, Callable[[], Iterable[Any]]] = {
        "steps": step_models.step_cases,
        "norms": norm_cases.norm_cases,
        "attention": attention_cases.attention_cases,
        "flax": _flax_cases,
    }
    if kind is not None:
        return "\n".join(f"{case.name}  {case.what}" for case in every[kind]())
    return "\n".join(f"{c.name}  {' '.join(map(str, c.operands))}" for c in model_cases())


def _flax_cases() -> Iterable[Any]:
    from .flax.cases import flax_cases  # Flax need not be installed for the others

    return flax_cases()


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
        _save(result, out, (name or _model(result)) + suffix)
    return result


def _save(result: dict[str, Any], out: Path, name: str) -> None:
    print(f"written to {_put(result, out, name)}")


def _put(result: dict[str, Any], out: Path, name: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / (re.sub(r"[^\w.]+", "-", name) + ".json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _chosen(cases: Iterable[Named], only: str | None, kind: str) -> list[Named]:
    """Those whose names hold ``only``; GraphError where none does."""
    cases = list(cases)
    chosen = [case for case in cases if _named(case.name, only)]
    if not chosen:
        raise GraphError(
            f"no {kind} has such a name",
            expected=", ".join(case.name for case in cases),
            got=repr(only),
        )
    return chosen


def _model(result: dict[str, Any]) -> str:
    return result["environment"]["device"].removeprefix("NVIDIA ").lower()


def _named(name: str, only: str | None) -> bool:
    return only is None or fnmatch.fnmatchcase(name, f"*{only}*")


def _need_a_gpu(otherwise: str) -> None:
    if not device_nodes():
        raise TargetError(
            "bench needs an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix=f"run it on a machine with a GPU; {otherwise}",
        )


def _host(flags: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    # In a replayed command buffer no handler runs, so there is nothing to time.
    options = ["--overhead"] if flags else []
    command = [sys.executable, "-m", "jax_cudnn.bench.host", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
