"""``python -m benchmarks run flax``: training steps of Flax's models on all sides.

All sides run in one process and in the same rounds, each with parameters of its own. Memory is what
XLA assigns to the step's buffers, which a process of several sides can say of each.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_cudnn as jc
from jax_cudnn.commands import timing
from jax_cudnn.flax import accelerate, report

from ..case import LIMIT
from ..collectives import collectives
from ..measure import FAILED, TIMED, WRONG, Effort, Entry, balanced, short, told
from . import gradients
from .cases import Batch, FlaxCase, loss_step, step
from .profile import profile
from .tables import LOSS, OURS, PLAIN, STEP, WHOLE

_LEAST = 5  # rounds
_ISSUED = 5  # calls of which each is issued to a free device
# How far apart losses of the first steps may be, relatively: with each step roundings count more.
_ALLOWED = (0.01, 0.03, 0.1)


@dataclass
class Training:
    """A side that trains: each call is a step from the arrays of the model and its optimizer to
    those after it.

    The step is a function of arrays in lists: NNX's own ``jit`` takes some 50 ms of the host for
    each step of a model of hundreds of parameters, more than some steps take on several GPUs.

    Attributes:
        update: the step, of the model, its optimizer and a batch.
        program: the compiled step.
        text: the program in HLO.
        report: what ``accelerate`` swapped.
    """

    model: nnx.Module
    optimizer: nnx.Optimizer
    batch: Batch
    whole: bool = False  # whether jc.accelerate gets the whole step
    update: Callable[..., jax.Array] = step
    program: Any = None
    text: str = ""
    report: Any = None

    def __post_init__(self) -> None:
        graph, state = nnx.split((self.model, self.optimizer))
        self.arrays, self._tree = jax.tree.flatten(state)

        def run(arrays: list[jax.Array], *batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            both = nnx.merge(graph, jax.tree.unflatten(self._tree, arrays))
            loss = self.update(*both, *batch)
            return jax.tree.leaves(nnx.state(both)), loss

        run.__name__ = "step"
        self.step = jax.jit(jc.accelerate(run) if self.whole else run, donate_argnums=0)

    def __call__(self) -> jax.Array:
        self.arrays, loss = self.step(self.arrays, *self.batch)
        return loss

    def lower(self) -> jax.stages.Lowered:
        return self.step.lower(self.arrays, *self.batch)

    def trained(self) -> nnx.Optimizer:
        """The optimizer after the steps so far."""
        state = jax.tree.unflatten(self._tree, self.arrays)
        nnx.update((self.model, self.optimizer), state)
        return self.optimizer


class Forward(nnx.Module):
    """A model whose forward is one function of its state, which ``jc.accelerate`` gets."""

    def __init__(self, model: nnx.Module) -> None:
        self.model = model

    def __call__(self, inputs: jax.Array) -> jax.Array:
        graph, state = nnx.split(self.model)

        def forward(state: nnx.State, inputs: jax.Array) -> tuple[jax.Array, nnx.State]:
            model = nnx.merge(graph, state)
            return model(inputs), nnx.state(model, nnx.BatchStat)

        outputs, averages = jc.accelerate(forward)(state, inputs)
        nnx.update(self.model, averages)
        return outputs


def base(case: FlaxCase) -> Entry:
    return {
        "what": case.what,
        "unit": case.unit,
        "items": case.items,
        "sides": {},
    }


def measure(
    case: FlaxCase,
    effort: Effort,
    profiled: bool = False,
    sides: Sequence[str] = (),
    shardings: Callable[[Any], Any] = lambda arrays: None,
) -> Entry:
    """The entry of a model: of each side ms a step, images or tokens a second, the share of the
    chip's peak, memory, losses; and which layers were swapped.

    Where the losses or gradients of ours are not those of plain Flax the case is wrong.
    ``shardings`` says where arrays are, of the model's state and of a batch.
    """
    began = time.perf_counter()
    plain = nnx.jit(lambda: case.make(PLAIN))()
    initial = jax.device_put(nnx.state(plain), shardings(nnx.state(plain)))
    entry: Entry = {
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(plain, nnx.Param))),
        "flops": case.flops(plain),
    }
    key = jax.random.key(1)
    placed = shardings(jax.eval_shape(case.batch, key))
    batch = jax.block_until_ready(jax.jit(case.batch, out_shardings=placed)(key))
    ready, not_run = _ready(case, sides or case.sides, initial, batch)
    if OURS in ready:
        report = ready[OURS].report
        kept = Counter(f"{layer.name}: {layer.why}" for layer in report.kept)
        swapped = Counter(layer.name for layer in report.swapped)
        entry["swapped"] = {"ours": dict(swapped), "kept": dict(kept)}
    entry["ready_s"] = round(time.perf_counter() - began, 1)
    found = _begun(ready, not_run)
    times = timing.interleaved(
        ready,
        (),
        rounds=effort.rounds,
        calls=effort.calls,
        seconds=effort.seconds,
        least=1 if effort.tiny else _LEAST,
        warm=1,
        order=balanced,
    )
    for side, training in ready.items():
        ms = timing.summary(times[side], 1e3)
        each = ms["median"] / 1e3
        peak = LIMIT["tflops"]["bfloat16"] * 1e12
        found[side] |= {
            "rounds": len(times[side]),
            "ms": ms,
            "per_s": short(case.items / each),
            "mfu": short(entry["flops"] / each / peak),
            "host_ms": round(_issued(training) * 1e3, 3),
        }
        if profiled:
            try:
                found[side]["profile"] = profile(training, training.text)
            except Exception as error:  # where the profiler does not work it costs no figures
                found[side]["profile"] = {"reason": told(error)}
    return entry | {"sides": found, "not_run": not_run} | _verdict(found, not_run)


def _ready(
    case: FlaxCase, sides: Sequence[str], initial: nnx.State, batch: Batch
) -> tuple[dict[str, Training], dict[str, str]]:
    """Each side with a step that is compiled for it; and why some have none."""
    made, lowered, not_run, ready = {}, {}, {}, {}
    for side in sides:
        try:
            made[side] = _made(case, side, initial, batch)
            lowered[side] = made[side].lower()
        except Exception as error:
            not_run[side] = told(error)
    # Our choice is measured on a free device, which XLA's autotuning keeps busy: after all is
    # lowered, and on a mesh, where plans are made while XLA compiles, one by one.
    on_mesh = any(len(x.sharding.device_set) > 1 for x in jax.tree.leaves(batch))
    with ThreadPoolExecutor(max_workers=1 if on_mesh else len(sides)) as pool:
        compiling = {side: pool.submit(lowered[side].compile) for side in lowered}
    for side in sides:
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
    model, swapped = nnx.eval_shape(lambda: case.make(side)), None
    nnx.update(model, jax.tree.map(jnp.copy, initial))
    if side == OURS:
        model, swapped = accelerate(model), report(model)
    if side == WHOLE:
        model = Forward(model)
    optimizer = nnx.Optimizer(model, case.optimizer, wrt=nnx.Param)
    update = loss_step if side == LOSS else step
    return Training(model, optimizer, batch, side == STEP, update, report=swapped)


def started(case: FlaxCase) -> Entry:
    """Seconds to lower and to compile the step of the accelerated model, and of its first run."""
    plain = nnx.jit(lambda: case.make(PLAIN))()
    batch = jax.block_until_ready(jax.jit(case.batch)(jax.random.key(1)))
    training = _made(case, OURS, nnx.state(plain), batch)
    times = [time.perf_counter()]
    lowered = training.lower()
    times.append(time.perf_counter())
    training.program = lowered.compile()
    times.append(time.perf_counter())
    jax.block_until_ready(training())
    times.append(time.perf_counter())
    took = [round(b - a, 2) for a, b in itertools.pairwise(times)]
    return dict(zip(("lower_s", "compile_s", "step_s"), took, strict=True))


def _begun(ready: dict[str, Training], not_run: dict[str, str]) -> dict[str, Entry]:
    """What each program says of itself, the losses of its first steps, and how far ours is from its
    gradients; a side that does not run moves to ``not_run``."""
    found = {}
    for side, training in [*ready.items()]:
        try:
            losses = [float(training()) for _ in _ALLOWED]
            found[side] = {**facts(training), "losses": losses}
        except Exception as error:  # often it is memory that is missing
            not_run[side] = told(error)
            del ready[side]
    for side in found.keys() - {OURS}:
        if OURS in found:
            optimizers = (ready[each].trained() for each in (OURS, side))
            found[side]["gradients"] = gradients.compared(*optimizers)
    return found


def facts(training: Training) -> Entry:
    """What the compiled step says of itself."""
    memory = training.program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    calls = training.text.count('custom_call_target="jax_cudnn"')  # that run our plans
    moved = collectives(training.text)
    return {"memory_gb": short(held / 1e9), "custom_calls": calls} | (
        {"collectives": moved} if moved else {}
    )


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


def _verdict(found: Mapping[str, Entry], not_run: Mapping[str, str]) -> Entry:
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
