"""``tune``: the measured choice within the user's whole step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jax

from .. import compat, context, tuning
from ..cuda import CudaDevice
from ..errors import GraphError, GraphTypeError, TargetError, shown
from ..graph.spec import GraphSpec
from ..planning.planned_graph import Outcome
from ..trials import in_turns
from ..user_context import WAYS
from .collect import check_function, graphs

_GAIN = 0.995  # of the step's time: less is noise
_ROUNDS, _SECONDS = 9, 2.0  # of both programs in turns: at most so many, for so long
_LEAST = 5
_FAR = 4.0  # times the way taken: how slow an alternative may be alone

Choice = dict[GraphSpec, int]


@dataclass(frozen=True)
class Tried:
    """A way to run one kind of graph that was tried in a step.

    Attributes:
        graph: the name of the graph.
        what: the way, as in :attr:`jax_cudnn.Plan.measured`.
        seconds: of the step with it; None if it did not run.
        before: of the step without it, measured in turns.
        taken: whether the step runs so from now on.
    """

    graph: str
    what: str
    seconds: float | None
    before: float
    taken: bool

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.graph}: {self.what}: does not run, not taken"
        verb = "taken" if self.taken else "not taken"
        ratio = f"{self.before * 1e3:.2f} -> {self.seconds * 1e3:.2f} ms"
        return f"{self.graph}: {self.what}: {ratio}, {verb}"


@dataclass(frozen=True)
class Tuned:
    """What :func:`jax_cudnn.tune` found; prints as a table.

    Attributes:
        before, after: seconds of the step, measured in turns.
        tried: what was tried, in order.
        finished: whether everything was tried within the limit of time.
    """

    before: float
    after: float
    tried: tuple[Tried, ...]
    finished: bool = True

    def __str__(self) -> str:
        end = "" if self.finished else "; the limit of time was reached"
        total = f"step: {self.before * 1e3:.2f} ms -> {self.after * 1e3:.2f} ms{end}"
        return "\n".join((*map(str, self.tried), total))


def tune(step: Callable[..., Any], *args: Any, minutes: float = 10.0) -> Tuned:
    """Chooses between cuDNN and XLA within a whole step, and remembers the choice.

    A graph that wins alone can lose in a model, where XLA fuses its neighbours. This compiles the
    step with one kind of graph after the other, those that take most time first, on each way that
    measured well alone; times both programs in turns; and keeps what makes the step faster. Each
    trial compiles and runs the step, and prints a line. What makes it faster is kept in the plan
    cache at once. It holds for equal graphs in every program that uses this cache.

    Args:
        step: a function of arrays, with or without ``jax.jit``; its donation and shardings hold.
            It runs many times, with its effects.
        *args: its arguments, which stay as they are: donated ones are copied before each run.
            Static arguments are bound before ``jax.jit``, with ``functools.partial``.
        minutes: no further trial starts after this time.

    Raises:
        GraphTypeError: the step is not a function, an argument is a shape without an array, or
            ``minutes`` is not a number of at least 0.
        GraphError: the step contains no graph of ``implementation="auto"``, it has static
            arguments, tuning is off, or the step is one of several processes.
        TargetError: there is no NVIDIA GPU.

    Example:
        >>> import jax_cudnn as jc
        >>> jc.tune(train_step, state, batch, minutes=5)                       # doctest: +SKIP
    """
    check_function(step)
    if not isinstance(minutes, Real) or not minutes >= 0:
        raise GraphTypeError("minutes is not valid", expected="0 or more", got=shown(minutes))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise GraphTypeError(
            "tune runs the step", expected="arrays, such as jnp.zeros(shape, dtype)", got="shapes"
        )
    end = time.monotonic() + 60 * minutes
    function: Any = step if hasattr(step, "lower") else jax.jit(step)
    kinds = _kinds(function, args)
    best: Choice = {}
    program = _Program.of(function, args, best)
    start, now = program, program.seconds()
    tried: list[Tried] = []
    print(f"step: {now * 1e3:.2f} ms; {len(kinds)} kinds of graphs", flush=True)
    todo = [(kind, way, what) for kind in kinds for way, what in kind.alternatives()]
    for kind, way, what in todo:
        if time.monotonic() > end:
            break
        choice, other, taken, seconds = {**best, kind.spec: way}, program, False, None
        try:
            other = _Program.of(function, args, choice)
            now, seconds = _in_turns(program, other)
            taken = seconds < _GAIN * now
        except jax.errors.JaxRuntimeError as error:  # it needs too much memory, for example
            what += f" ({str(error).partition(chr(10))[0]:.100})"
        if taken:  # what is interrupted later has this
            best, program = choice, other
            tuning.remember(kind.spec, kind.site, kind.outcome, way)
            jitted = getattr(function, "jitted_fn", function)  # of nnx.jit
            getattr(jitted, "clear_cache", jax.clear_caches)()  # else it would stay as it ran
        tried.append(Tried(kind.name, what, seconds, now, taken))
        print(tried[-1], flush=True)
    before, after = _in_turns(start, program) if best else (start.seconds(),) * 2
    found = Tuned(before, after, tuple(tried), len(tried) == len(todo))
    print(str(found).rpartition("\n")[2], flush=True)
    return found


@dataclass(frozen=True)
class _Kind:
    """Equal graphs of a step: one of their names, how often they run, and what was measured."""

    spec: GraphSpec
    site: CudaDevice
    name: str
    times: int
    outcome: Outcome
    taken: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.times * (self.outcome.ways[self.taken].seconds or 0.0)

    def alternatives(self) -> Iterator[tuple[int, str]]:
        """The fastest other way that uses cuDNN, and the fastest that does not."""
        ways = self.outcome.ways
        seconds = {i: way.seconds for i, way in enumerate(ways) if way.seconds is not None}
        limit, seen = _FAR * seconds.pop(self.taken, math.inf), set()
        for i in sorted(seconds, key=seconds.__getitem__):
            if seconds[i] > limit:
                break
            if ways[i].in_xla not in seen:
                seen.add(ways[i].in_xla)
                yield i, ways[i].what


def _kinds(function: Any, args: tuple[Any, ...]) -> list[_Kind]:
    """The kinds of graphs of a step that may run in several ways, by the time that they take."""
    if jax.process_count() > 1:
        raise GraphError(
            "tune measures a step of one process",
            got=f"a job of {jax.process_count()} processes",
            fix="tune the step on one process with the shapes of one device, and share the plan "
            "cache: python -m jax_cudnn cache export",
        )
    devices = [device for device in jax.local_devices() if compat.is_cuda(device)]
    if not devices or context.targeted():
        raise TargetError(
            "tune runs a step on an NVIDIA GPU",
            got="jax_cudnn.target" if devices else "no GPU in this process",
            fix="run it where the GPU is; python -m jax_cudnn cache export carries the outcome",
        )
    found = graphs(function, args, {})
    kinds: dict[GraphSpec, _Kind] = {}
    for name, spec in found.items():
        site = context.site(devices, name)
        if not isinstance(site, CudaDevice) or not tuning.may_measure(spec):
            continue
        canonical = spec.for_planning.canonical()
        times = sum(found.calls.get(name, {}).values()) or 1
        if (known := kinds.get(canonical)) is not None:
            kinds[canonical] = replace(known, times=known.times + times)
        elif (outcome := tuning.measurement(canonical, site, name)) and outcome.taken is not None:
            kinds[canonical] = _Kind(canonical, site, name, times, outcome, outcome.taken)
    if not kinds:
        raise GraphError(
            "the step contains nothing to choose",
            expected="graphs with implementation='auto', which were measured",
            got=", ".join(found),
            fix="jax_cudnn.configure(tuning='fast'), without deterministic=True and engine=",
        )
    return sorted(kinds.values(), key=lambda kind: -kind.seconds)


@dataclass(frozen=True)
class _Program:
    """The step compiled with a choice, and its arguments."""

    function: Any
    compiled: Any
    args: tuple[Any, ...]
    donated: tuple[bool, ...]

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], choice: Choice) -> _Program:
        with WAYS.entered(tuple(choice.items())):
            lowered = function.lower(*args)
            donated = tuple(info.donated for info in jax.tree.leaves(lowered.args_info))
            taken = lowered.args_info[0]
            if len(taken) != len(args) or len(donated) != len(jax.tree.leaves(args)):
                raise GraphError(
                    "tune takes arrays, and the step has static arguments",
                    expected=f"{len(taken)} arguments of arrays",
                    got=f"{len(args)} arguments",
                    fix="bind static arguments before jax.jit: "
                    "jax.jit(functools.partial(step, name=value))",
                )
            with compat.uncached():
                return cls(function, lowered.compile(), args, donated)

    def once(self) -> float:
        """Seconds of a run, with copies of the arguments that it donates."""
        leaves, structure = jax.tree.flatten(self.args)
        pairs = zip(leaves, self.donated, strict=True)
        leaves = [x.copy() if gone and isinstance(x, jax.Array) else x for x, gone in pairs]
        args = jax.block_until_ready(jax.tree.unflatten(structure, leaves))
        began = time.perf_counter()
        jax.block_until_ready(self.compiled(*args))
        return time.perf_counter() - began

    def seconds(self) -> float:
        self.once()
        return statistics.median(self.once() for _ in range(_LEAST))


def _in_turns(first: _Program, second: _Program) -> tuple[float, float]:
    """Seconds of two programs: medians of rounds."""
    for program in (first, second):
        program.once()
    rounds = in_turns([first.once, second.once], _LEAST, _ROUNDS, _SECONDS)
    one, other = zip(*rounds, strict=True)
    return statistics.median(one), statistics.median(other)
