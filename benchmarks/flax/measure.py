"""``python -m benchmarks run flax``: training steps of Flax's models on all sides.

All sides run in one process and in the same rounds, each with parameters of its own. Memory is what
XLA assigns to the step's buffers, which a process of several sides can say of each.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_cudnn.commands import timing

from ..attention.case import LIMIT
from ..compiling import told
from ..sides import FAILED, TIMED, WRONG
from . import gradients
from .case import Batch, FlaxCase, step
from .profile import profile
from .tables import OURS, PLAIN

# In so many calls the first, whose issue nothing hides, counts little.
_ROUNDS, _LEAST, _CALLS = 15, 5, 20
_ISSUED = 5  # calls of which each is issued to a free device
_SECONDS = 10.0  # of rounds, for all sides of a case together
# How far apart losses of the first steps may be, relatively: with each step roundings count more.
_ALLOWED = (0.01, 0.03, 0.1)


@dataclass
class Training:
    """A side that trains: each call is a step, which changes the model and the optimizer.

    Attributes:
        program: the compiled step.
        text: the program in HLO.
        report: what ``accelerate`` swapped.
    """

    model: nnx.Module
    optimizer: nnx.Optimizer
    batch: Batch
    program: Any = None
    text: str = ""
    report: Any = None

    def __call__(self) -> jax.Array:
        return self.program(self.model, self.optimizer, *self.batch)


def measure_flax(
    cases: Iterable[FlaxCase],
    *,
    seconds: float = _SECONDS,
    calls: int = _CALLS,
    rounds: int = _ROUNDS,
    profiled: bool = False,
    say: Callable[[str], None] = print,
    done: Callable[[dict[str, dict[str, Any]]], None] = lambda results: None,
) -> dict[str, dict[str, Any]]:
    """Case name -> its JSON entry: of each side ms a step, images or tokens a second, the share of
    the chip's peak, memory, losses; and which layers were swapped.

    What fails is part of the result, with its reason. Where the losses of ours are not those of
    plain Flax the case is wrong. ``done`` gets all results so far after each case.
    """
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        began = time.perf_counter()
        try:
            entry = _entry(case, seconds, calls, rounds, profiled)
        except Exception as error:
            entry = {"status": FAILED, "reason": told(error), "sides": {}}
        took = round(time.perf_counter() - began, 1)
        results[case.name] = {"what": case.what, **entry, "seconds": took}
        say(f"{case.name}: {entry['status']} ({took} s)")
        done(results)
    return results


def _entry(
    case: FlaxCase, seconds: float, calls: int, rounds: int, profiled: bool
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "status": TIMED,
        "unit": case.unit,
        "items": case.items,
        "known_ms": dict(case.known or {}),
        "goal_ms": case.goal,
    }
    began = time.perf_counter()
    plain = nnx.jit(lambda: case.make(PLAIN))()
    initial = nnx.state(plain)
    entry["parameters"] = sum(x.size for x in jax.tree.leaves(nnx.state(plain, nnx.Param)))
    entry["flops"] = case.flops(plain)
    batch = jax.block_until_ready(jax.jit(case.batch)(jax.random.key(1)))
    ready, not_run = _ready(case, initial, batch)
    if OURS in ready:
        entry["swapped"] = swapped(ready[OURS].report)
    entry["ready_s"] = round(time.perf_counter() - began, 1)
    found = _begun(ready, not_run)
    least = _LEAST if calls > 1 else 1
    times = timing.interleaved(
        ready, (), rounds=rounds, calls=calls, seconds=seconds, least=least, warm=1, mixed=True
    )
    for side, training in ready.items():
        found[side] |= _figures(case, entry["flops"], times[side])
        found[side]["host_ms"] = round(_issued(training) * 1e3, 3)
        if profiled:
            found[side]["profile"] = _profiled(training)
    return entry | {"sides": found, "not_run": not_run} | _verdict(found, not_run)


def _ready(
    case: FlaxCase, initial: nnx.State, batch: Batch
) -> tuple[dict[str, Training], dict[str, str]]:
    """Each side with a step that is compiled for it; and why some have none."""
    made, compiling, not_run = {}, {}, {}
    with ThreadPoolExecutor(max_workers=len(case.sides)) as pool:
        for side in reversed(case.sides):  # ours last: it plans while the others compile
            try:
                made[side] = _made(case, side, initial, batch)
                lowered = step.lower(made[side].model, made[side].optimizer, *batch)
                compiling[side] = pool.submit(lowered.compile)
            except Exception as error:
                not_run[side] = told(error)
    ready = {}
    for side in case.sides:
        if side in compiling:
            try:
                made[side].program = compiling[side].result()
                made[side].text = made[side].program.as_text() or ""
                ready[side] = made[side]
            except Exception as error:
                not_run[side] = told(error)
    return ready, not_run


def _made(case: FlaxCase, side: str, initial: nnx.State, batch: Batch) -> Training:
    """The side's model, with a copy of the parameters and an optimizer of its own."""
    model, report = nnx.eval_shape(lambda: case.make(side)), None
    nnx.update(model, jax.tree.map(jnp.copy, initial))
    if side == OURS:
        model, report = accelerated(model)
    optimizer = nnx.Optimizer(model, case.optimizer, wrt=nnx.Param)
    return Training(model, optimizer, batch, report=report)


def _begun(ready: dict[str, Training], not_run: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What each program says of itself, the losses of its first steps, and how far ours is from its
    gradients; a side that does not run moves to ``not_run``."""
    found = {}
    for side, training in [*ready.items()]:
        try:
            losses = [float(training()) for _ in _ALLOWED]
            found[side] = _told(training) | {"losses": losses}
        except Exception as error:  # often it is memory that is missing
            not_run[side] = told(error)
            del ready[side]
    for side in found.keys() - {OURS}:
        if OURS in found:
            optimizers = (ready[each].optimizer for each in (OURS, side))
            found[side]["gradients"] = gradients.compared(*optimizers)
    return found


def _profiled(training: Training) -> dict[str, Any]:
    """Its kernels; why there are none where the profiler does not work, which costs no figures."""
    try:
        return profile(training, training.text)
    except Exception as error:
        return {"reason": told(error)}


def accelerated(model: nnx.Module) -> tuple[nnx.Module, Any]:
    """The model with our layers in the place of Flax's, and the report of it."""
    from jax_cudnn.flax import accelerate

    return accelerate(model)


def swapped(report: Any) -> dict[str, dict[str, int]]:
    """How many layers of each class are ours, and how many are not and why."""
    kept = Counter(f"{entry.name}: {entry.why}" for entry in report.kept)
    return {"ours": dict(Counter(entry.name for entry in report.swapped)), "kept": dict(kept)}


# -- figures ---------------------------------------------------------------------------------------


def _told(training: Training) -> dict[str, Any]:
    """What the compiled step says of itself."""
    memory = training.program.memory_analysis()
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return {
        "memory_gb": float(f"{held / 1e9:.4g}"),
        "custom_calls": len(custom_calls(training.text)),
    }


def custom_calls(text: str) -> list[str]:
    """The lines of a program in HLO that run our plans."""
    return [line for line in text.splitlines() if 'custom_call_target="jax_cudnn"' in line]


def _figures(case: FlaxCase, flops: int, seconds: list[float]) -> dict[str, Any]:
    ms = timing.summary(seconds, 1e3)
    each = ms["median"] / 1e3
    peak = LIMIT["tflops"]["bfloat16"] * 1e12
    return {
        "rounds": len(seconds),
        "ms": ms,
        "per_s": float(f"{case.items / each:.4g}"),
        "mfu": float(f"{flops / each / peak:.4g}"),
    }


def _issued(training: Training) -> float:
    """Seconds that the host takes to issue a step while the device is free, the median of some."""
    seconds = []
    for _ in range(_ISSUED):
        jax.block_until_ready(training())
        began = time.perf_counter()
        last = training()
        seconds.append(time.perf_counter() - began)
        jax.block_until_ready(last)
    return statistics.median(seconds)


def _verdict(found: Mapping[str, dict[str, Any]], not_run: Mapping[str, str]) -> dict[str, Any]:
    """Whether ours ran, and trains as all other sides do that ran."""
    if OURS not in found:
        return {"status": FAILED, "reason": not_run.get(OURS, "it did not run")}
    others = {side: each for side, each in found.items() if side != OURS}
    if not others:
        return {"status": FAILED, "reason": "no other side ran, so nothing says that it is right"}
    ours = found[OURS]["losses"]
    for side, other in others.items():
        off = (abs(a - b) / abs(b) for a, b in zip(ours, other["losses"], strict=True))
        # A loss that is no number is not less than anything.
        if not all(each < most for each, most in zip(off, _ALLOWED, strict=True)):
            said = f"losses {ours} are not those of {side}: {other['losses']}"
            return {"status": WRONG, "reason": said}
        if gradients.wrong(other["gradients"]):
            said = f"gradients are not those of {side}: of its arrays {other['gradients']}"
            return {"status": WRONG, "reason": said}
    return {"status": TIMED}
