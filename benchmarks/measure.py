"""What all measurements share: the loop over cases, compiling side by side, plans, figures."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.planning import losses
from jax_cudnn._core.planning.cost import cost
from jax_cudnn.commands import bench, timing
from jax_cudnn.commands.bench import FAILED, TIMED, WRONG

from . import torch_graphs

Call = Callable[[], Any]
Entry = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: of the rounds of what takes turns.
        calls: in a row, at most.
        rounds: at most.
    """

    seconds: float
    calls: int
    rounds: int = 15

    @property
    def tiny(self) -> bool:
        return self.calls == 1


TINY = Effort(0.0, 1)
LIMIT = 3600.0
"""Seconds that a process of many cases may tune: each stands for a program of its own."""


def measured(
    cases: Iterable[Any],
    entry: Callable[[Any], Entry],
    base: Callable[[Any], Entry],
    done: Callable[[dict[str, Entry]], None] = lambda results: None,
    say: Callable[[str], None] = print,
) -> dict[str, Entry]:
    """Case name -> its JSON entry: what is always told of it, and what was measured.

    What fails is part of the result, with its reason. ``done`` gets all results so far after each
    case: a run may be ended early.
    """
    results: dict[str, Entry] = {}
    for case in cases:
        began = time.perf_counter()
        found = base(case)
        try:
            with torch_graphs.fresh():
                found |= entry(case)
        except Exception as error:
            found |= {"status": FAILED, "reason": told(error)}
        found["seconds"] = round(time.perf_counter() - began, 1)
        results[case.name] = found
        ratio = f" {found['ratio']:.2f}" if "ratio" in found else ""
        say(f"{case.name}: {found['status']}{ratio} ({found['seconds']} s)")
        done(results)
    return results


def tried(function: Callable[..., Entry], *arguments: Any) -> Entry:
    """A part of an entry; where it fails, that is the part."""
    try:
        return function(*arguments)
    except Exception as error:
        return {"status": FAILED, "reason": told(error)}


def worst(entries: Mapping[str, Entry]) -> str:
    """The status of several together."""
    states = [entry["status"] for entry in entries.values()]
    return next((state for state in (FAILED, WRONG) if state in states), TIMED)


def by_sizes(
    about: str,
    sizes: Mapping[str, tuple[int, ...]],
    tiny: Mapping[str, tuple[int, ...]],
    measure: Callable[..., Entry],
    seconds: float,
) -> None:
    """The command of a benchmark whose cases differ in sizes alone: writes ``--into`` a file what
    ``measure(*sizes, seconds)`` finds for each, with ``--tiny`` of small ones."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    options = parser.parse_args()
    result: Entry = {"environment": environment(), "cases": {}}
    for name, case in (tiny if options.tiny else sizes).items():
        result["cases"][name] = measure(*case, 0.1 if options.tiny else seconds)
        print(name, json.dumps(result["cases"][name]), flush=True)
    options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def optional(module: str) -> Any:
    """A module of another library; None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def told(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def compiled(
    functions: Mapping[Key, tuple[Callable[..., Any], tuple[Any, ...]]],
) -> tuple[dict[Key, Call], dict[Key, str]]:
    """Each function compiled for its operands, bound to them and run once; and why some cannot."""
    lowered, failed = {}, {}
    for key, (function, operands) in functions.items():
        try:  # here and not in the threads below: JAX's contexts belong to a thread
            lowered[key] = jax.jit(function).lower(*operands)
        except Exception as error:
            failed[key] = told(error)
    with ThreadPoolExecutor(max_workers=max(len(lowered), 1)) as pool:
        futures = {key: pool.submit(program.compile) for key, program in lowered.items()}
    ready = {}
    for key, future in futures.items():
        try:
            call = partial(future.result(), *functions[key][1])
            jax.block_until_ready(call())
            ready[key] = call
        except Exception as error:
            failed[key] = told(error)
    return ready, failed


def balanced(count: int, number: int) -> list[int]:
    """The order of ``count`` functions in round ``number``: one that runs after a long load finds
    the device hot and its clock low, and this should not always be the same function.

    In ``count`` rounds each function follows each other function once. An odd count takes one round
    more, in which some follow twice (E. J. Williams, "Experimental designs balanced for the
    estimation of residual effects of treatments", 1949).
    """
    size = count + count % 2
    steps = [(i + 1) // 2 * (1 if i % 2 else -1) for i in range(size)]  # 0, 1, -1, 2, -2, ...
    every = [(number + step) % size for step in steps]
    return [position for position in every if position < count]


def plans(function: Callable[..., Any], operands: tuple[Any, ...]) -> Entry:
    """How many graphs a program holds; on a GPU how many segments of them are cuDNN's, on which
    engines, how many are XLA's, and why; with pattern, flops and bytes of each segment that is
    cuDNN's."""
    try:
        live, _ = compat.live_program(jax.make_jaxpr(function)(*operands))
        found = bench.of_jaxpr(live)
    except Exception as error:
        return {"reason": told(error)}
    held: Entry = {"graphs": len(found)}
    try:
        cut = bench.placed(found)
    except JaxCudnnError as error:  # references run, or nothing does
        return held | {"reason": told(error)}
    segments = [segment for plan in cut for segment in plan.segments]
    engines = [segment.engine for segment in segments if segment.plan is not None]
    reasons = [s.reason for s in segments if s.plan is None and s.reason]
    held |= {"cuDNN": len(engines), "XLA": len(segments) - len(engines), "engines": engines}
    specs = [segment.spec for segment in segments if segment.plan is not None]
    costs = [(losses.pattern(spec), cost(spec)) for spec in specs]
    held["segments"] = [[pattern, each.flops, each.bytes] for pattern, each in costs]
    return held | ({"why_xla": " ".join(reasons[0].split())[:300]} if reasons else {})


def configured(**settings: Any) -> bool:
    """Sets those settings of the process that this version has; whether it has all."""
    known = inspect.signature(jc.configure).parameters
    jc.configure(**{name: value for name, value in settings.items() if name in known})
    return settings.keys() <= known.keys()


def fastest(us: Mapping[str, float], names: Iterable[str]) -> str | None:
    return min((name for name in names if name in us), key=us.__getitem__, default=None)


def short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def environment(*packages: str) -> Entry:
    """Where this was measured, with the versions of PyTorch, of the driver and of more packages."""
    return timing.environment("torch", "triton", *packages) | {"driver": driver()}


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        found = None
    return found[1] if found else "none"
