"""``python -m benchmarks run steps``: whole training steps against XLA's default."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from ..case import OURS
from ..measure import FAILED, TIMED, WRONG, Effort, Entry, compiled, short, told, tried, worst
from .cases import StepCase

IN_XLA, PLAIN, EXACT = "its graphs in XLA", "XLA", "float32"
_LEAST = 7  # rounds
# Ours may be as far from the result in float32 as XLA's bfloat16 program, this many times; and by
# two roundings in any case: of a single number XLA's may be right by chance.
_FACTOR, _ROUNDINGS = 3.0, 2.0**-6
# Without the tuning of kernels, which takes longer than the one run that is wanted of it.
_UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}

Function = Callable[..., Any]


def measure(case: StepCase, effort: Effort) -> Entry:
    """The entry of a case: each program's times in ms on all sides, their ratios, how many graphs
    and segments it holds, and how far its results are from the same in float32.

    A program of which our side is wrong is not timed.
    """
    operands = jax.block_until_ready(case.arrays(jax.random.key(0)))
    entries = {n: tried(_held, make(case.ours), operands) for n, make in case.programs.items()}
    sides = {
        (name, side): (function, operands)
        for name, make in case.programs.items()
        for side, function in _sides(make, case).items()
    }
    ready, failed = compiled(sides)
    for name, make in case.programs.items():
        entry, functions = entries[name], {s: f for (n, s), f in ready.items() if n == name}
        entry["not_run"] = {side: why for (n, side), why in failed.items() if n == name}
        found = {"status": FAILED, "reason": entry["not_run"].get(OURS)}
        if OURS in functions:
            found = tried(_checked, make(case.plain), functions, operands, entry["not_run"])
        entry |= found
    right = {key: call for key, call in ready.items() if entries[key[0]]["status"] == TIMED}
    if right:
        times = timing.interleaved(
            right,
            (),
            rounds=max(effort.rounds, _LEAST),
            calls=_affordable(right, effort),
            seconds=effort.seconds,
            least=_LEAST,
        )
        for name, entry in entries.items():
            entry |= _timed({side: times[n, side] for n, side in times if n == name})
        _against_first(entries)
    return {"status": worst(entries), "programs": entries}


def _sides(make: Callable[[Function], Function], case: StepCase) -> dict[str, Function]:
    """A program on each side."""
    ours = make(case.ours)

    def in_xla(*operands: Any) -> Any:
        with implementation(XLA):
            return ours(*operands)

    return {OURS: ours, PLAIN: make(case.plain), IN_XLA: in_xla}


def _held(program: Function, operands: Any) -> Entry:
    """How many graphs it holds and how many different ones; its loops over graphs (one that vmap
    folds is in none); and with a GPU, or ``jax_cudnn.target``, how all are cut and how long they
    take to plan where nothing is known."""
    live, _ = compat.live_program(jax.make_jaxpr(program)(*operands))
    found = [(spec, name) for spec, name, _ in programs.of_jaxpr(live)]
    entry: Entry = {
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


# -- held against float32 --------------------------------------------------------------------------


def _checked(
    plain: Function, functions: Mapping[str, Function], operands: Any, failed: dict[str, str]
) -> Entry:
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
    theirs = {figure: error or 0.0 for figure, error in errors.get(PLAIN, {}).items()}
    off = [
        f"{figure} error {ours} against {to}, where XLA's is {theirs.get(figure, 0.0)}"
        for figure, ours in errors[OURS].items()
        if ours is None or ours > _FACTOR * theirs.get(figure, 0.0) + _ROUNDINGS
    ]
    verdict = {"status": WRONG, "reason": "; ".join(off)} if off else {"status": TIMED}
    return {"errors_against": to, "errors": errors, **verdict}


def distance(got: Any, want: Any) -> dict[str, float | None]:
    """``|got - want| / |want|`` in the Euclidean norm: "relative" over all arrays of the trees
    together, "leaf" the largest of one array. None where that is no number."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise GraphError(
            "the two sides of a step return different trees",
            expected=str(jax.tree.structure(want)),
            got=str(jax.tree.structure(got)),
        )
    pairs = [(float(a), float(b)) for a, b in jax.device_get(_squares(got, want))]
    tiny = float(jnp.finfo(jnp.float32).tiny)
    figures = {
        "relative": math.sqrt(sum(a for a, _ in pairs) / (sum(b for _, b in pairs) + tiny)),
        "leaf": max(math.sqrt(a / (b + tiny)) if a == a else math.nan for a, b in pairs),
    }
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return dict.fromkeys(figures)
    return {name: short(value, 3) for name, value in figures.items()}


@jax.jit
def _squares(got: Any, want: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Of each leaf the squared norms of the difference and of what is wanted."""
    wide = partial(jnp.asarray, dtype=jnp.float32)
    leaves = zip(map(wide, jax.tree.leaves(got)), map(wide, jax.tree.leaves(want)), strict=True)
    return [(jnp.sum((a - b) ** 2), jnp.sum(b * b)) for a, b in leaves]


# -- times -----------------------------------------------------------------------------------------


def _affordable(functions: Mapping[Any, Function], effort: Effort) -> int:
    """Calls in a row, fewer when the least number of rounds would take longer than there is."""
    began = time.perf_counter()
    for function in functions.values():
        jax.block_until_ready(function())
    once = time.perf_counter() - began
    return max(1, min(effort.calls, int(effort.seconds / (_LEAST * once))))


def _timed(seconds: Mapping[str, Sequence[float]]) -> Entry:
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


def _against_first(entries: Mapping[str, Entry]) -> None:
    """What a program costs beside the first one, the forward, on each side."""
    first, *others = entries.values()
    for entry in others:
        of, ms = first.get("ms", {}), entry.get("ms", {})
        entry["over_forward"] = {
            side: round(ms[side]["median"] / of[side]["median"], 3)
            for side in (OURS, PLAIN, IN_XLA)
            if side in of and side in ms
        }
