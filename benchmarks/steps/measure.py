"""``python -m benchmarks run steps``: whole training steps against XLA's default."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core import compat, context
from jax_cudnn._core.errors import GraphError, TargetError
from jax_cudnn._core.implementation import XLA, implementation
from jax_cudnn._core.planning import placement
from jax_cudnn.commands import programs, timing

from .. import planning
from ..compiling import compiled, told
from .models import StepCase

OURS, IN_XLA, PLAIN, EXACT = "jax_cudnn", "its graphs in XLA", "XLA", "float32"
TIMED, WRONG, FAILED = "timed", "WRONG", "failed"
_ROUNDS, _LEAST, _CALLS = 15, 7, 10
_SECONDS = 8.0  # of rounds, for all programs of a case together
# Ours may be as far from the result in float32 as XLA's bfloat16 program, this many times; and by
# two roundings in any case: of a single number XLA's may be right by chance.
_FACTOR, _ROUNDINGS = 3.0, 2.0**-6
# Without the tuning of kernels, which takes longer than the one run that is wanted of it.
_UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}

Function = Callable[..., Any]


def measure_steps(
    cases: Iterable[StepCase],
    *,
    seconds: float = _SECONDS,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    say: Callable[[str], None] = print,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: each program's times in ms on all sides, their ratios, how many
    graphs and segments it holds, and how far its results are from the same in float32.

    What fails is part of the result, with its reason; a program of which our side is wrong is not
    timed.
    """
    results = {}
    for case in cases:
        began = time.perf_counter()
        try:
            entry = _entry(case, seconds, calls, rounds)
        except Exception as error:
            entry = {"status": FAILED, "reason": told(error), "programs": {}}
        results[case.name] = {"what": case.what, **entry}
        say(f"{case.name}: {entry['status']} ({time.perf_counter() - began:.1f} s)")
    return results


def _entry(case: StepCase, seconds: float, calls: int, rounds: int) -> dict[str, Any]:
    operands = jax.block_until_ready(case.arrays(jax.random.key(0)))
    entries = {name: _tried(_held, make(case.ours), operands) for name, make in _programs(case)}
    ready, failed = _compiled(_sides(case), operands)
    for name, make in _programs(case):
        entries[name]["not_run"] = failed[name]
        found = {"status": FAILED, "reason": failed[name].get(OURS)}
        if OURS in ready[name]:
            found = _tried(_checked, make(case.plain), ready[name], operands, failed[name])
        entries[name] |= found
    right = {
        (name, side): function
        for name, entry in entries.items()
        for side, function in ready[name].items()
        if entry["status"] == TIMED
    }
    if right:
        calls = _affordable(right, calls, seconds)
        times = timing.interleaved(
            right, (), rounds=max(rounds, _LEAST), calls=calls, seconds=seconds, least=_LEAST
        )
        for name, entry in entries.items():
            entry |= _timed({side: times[n, side] for n, side in times if n == name})
        _against_first(entries)
    status = next((s for s in (FAILED, WRONG) if _any(entries, s)), TIMED)
    return {"status": status, "programs": entries}


def _programs(case: StepCase) -> list[tuple[str, Any]]:
    return [*case.programs.items()]


def _tried(function: Function, *arguments: Any) -> dict[str, Any]:
    """A part of an entry; where it fails, that is the part."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"status": FAILED, "reason": told(error)}


def _any(entries: Mapping[str, Any], status: str) -> bool:
    return any(entry["status"] == status for entry in entries.values())


def _sides(case: StepCase) -> dict[str, dict[str, Function]]:
    """Each program on each side."""

    def in_xla(program: Function) -> Function:
        def run(*operands: Any) -> Any:
            with implementation(XLA):
                return program(*operands)

        return run

    return {
        name: {
            OURS: make(case.ours),
            PLAIN: make(case.plain),
            IN_XLA: in_xla(make(case.ours)),
        }
        for name, make in case.programs.items()
    }


# -- what a program holds --------------------------------------------------------------------------


def _held(program: Function, operands: Any) -> dict[str, Any]:
    """How many graphs it holds and how many different ones; its loops over graphs (one that vmap
    folds is in none); and with a GPU, or ``jax_cudnn.target``, how all are cut and how long they
    take to plan where nothing is known."""
    live, _ = compat.live_program(jax.make_jaxpr(program)(*operands))
    found = [(spec, name) for spec, name, _ in programs.of_jaxpr(live)]
    entry: dict[str, Any] = {
        "graphs": len(found),
        "different_graphs": len({spec for spec, _ in found}),
        "loops": programs.loops(live),
    }
    try:
        site = context.site(jax.local_devices(), "bench")
    except TargetError:  # references run
        return entry
    with planning.nothing_planned():
        began = time.perf_counter()
        plans = {spec: placement.place(spec, site, name) for spec, name in found}
        entry["cold_planning_s"] = round(time.perf_counter() - began, 2)
    segments = [segment for spec, _ in found for segment in plans[spec].segments]
    cudnn = sum(segment.plan is not None for segment in segments)
    return entry | {"segments": {"cuDNN": cudnn, "XLA": len(segments) - cudnn}}


# -- compiled, and held against float32 ------------------------------------------------------------


def _compiled(
    sides: Mapping[str, Mapping[str, Function]], operands: Any
) -> tuple[dict[str, dict[str, Function]], dict[str, dict[str, str]]]:
    """The functions of each program by side, compiled, bound to their operands and run once; and
    why some cannot be."""
    ready, failed = compiled(
        {
            (name, side): (function, operands)
            for name, functions in sides.items()
            for side, function in functions.items()
        }
    )

    def grouped(found: Mapping[tuple[str, str], Any]) -> dict[str, dict[str, Any]]:
        return {name: {s: value for (n, s), value in found.items() if n == name} for name in sides}

    return grouped(ready), grouped(failed)


def _checked(
    plain: Function, functions: Mapping[str, Function], operands: Any, failed: dict[str, str]
) -> dict[str, Any]:
    """How far each side is from the plain program in float32; from XLA's where that cannot run."""
    try:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
        want, to = jax.jit(plain).lower(*wide).compile(_UNTUNED)(*wide), EXACT
        jax.block_until_ready(want)
    except Exception as error:
        failed[EXACT] = told(error)
        if PLAIN not in functions:
            return {"status": FAILED, "reason": "there is nothing to compare with"}
        want, to = functions[PLAIN](), PLAIN
    errors = {
        side: distance(function(), want) for side, function in functions.items() if side != to
    }
    entry = {"status": TIMED, "errors_against": to, "errors": errors}
    theirs = {figure: error or 0.0 for figure, error in errors.get(PLAIN, {}).items()}
    off = [
        f"{figure} error {ours} against {to}, where XLA's is {theirs.get(figure, 0.0)}"
        for figure, ours in errors[OURS].items()
        if ours is None or ours > _FACTOR * theirs.get(figure, 0.0) + _ROUNDINGS
    ]
    return entry | ({"status": WRONG, "reason": "; ".join(off)} if off else {})


def distance(got: Any, want: Any) -> dict[str, float | None]:
    """``|got - want| / |want|`` in the Euclidean norm: "relative" over all arrays of the trees
    together, "leaf" the largest of one array. None where that is no number."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise GraphError(
            "the two sides of a step return different trees",
            expected=str(jax.tree.structure(want)),
            got=str(jax.tree.structure(got)),
        )
    both = jax.device_get(_squares(got, want))
    pairs = [(float(a), float(b)) for a, b in both]
    tiny = float(jnp.finfo(jnp.float32).tiny)
    figures = {
        "relative": math.sqrt(sum(a for a, _ in pairs) / (sum(b for _, b in pairs) + tiny)),
        "leaf": max(math.sqrt(a / (b + tiny)) if a == a else math.nan for a, b in pairs),
    }
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return dict.fromkeys(figures)
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


@jax.jit
def _squares(got: Any, want: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Of each leaf the squared norms of the difference and of what is wanted."""
    wide = partial(jnp.asarray, dtype=jnp.float32)
    leaves = zip(map(wide, jax.tree.leaves(got)), map(wide, jax.tree.leaves(want)), strict=True)
    return [(jnp.sum((a - b) ** 2), jnp.sum(b * b)) for a, b in leaves]


# -- times -----------------------------------------------------------------------------------------


def _affordable(functions: Mapping[Any, Function], calls: int, seconds: float) -> int:
    """``calls``, or fewer when the least number of rounds would take longer than ``seconds``."""
    began = time.perf_counter()
    for function in functions.values():
        jax.block_until_ready(function())
    once = time.perf_counter() - began
    return max(1, min(calls, int(seconds / (_LEAST * once))))


def _timed(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds of each side, and each other side's time over ours."""
    if not seconds:
        return {}
    ratios = {
        side: timing.summary([b / a for a, b in zip(seconds[OURS], theirs, strict=True)])
        for side, theirs in seconds.items()
        if side != OURS
    }
    return {
        "rounds": len(seconds[OURS]),
        "ms": {side: timing.summary(values, 1e3) for side, values in seconds.items()},
        "over_ours": ratios,
    }


def _against_first(entries: Mapping[str, dict[str, Any]]) -> None:
    """What a program costs beside the first one, the forward, on each side."""
    first, *others = entries.values()
    for entry in others:
        sides = first.get("ms", {}).keys() & entry.get("ms", {}).keys()
        entry["over_forward"] = {
            side: round(entry["ms"][side]["median"] / first["ms"][side]["median"], 3)
            for side in (OURS, PLAIN, IN_XLA)
            if side in sides
        }
