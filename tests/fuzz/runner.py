"""Checks of many seeds, in processes that may die."""

import collections
import datetime
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PACKAGES = ("jax-cudnn", "jax", "jaxlib", "flax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
KINDS = ("right", "refused", "wrong", "crashed")
_SPAWN = multiprocessing.get_context("spawn")
_PATIENCE = 240  # seconds for one seed


@dataclass(frozen=True)
class Outcome:
    """What became of a seed: one of KINDS and what is said of it; for each planned segment whether
    it is cuDNN's; how many transformations were compared (its values are one), and for how many
    examples derivatives say nothing."""

    seed: int
    kind: str = "right"
    text: str = ""
    segments: tuple[bool, ...] = ()
    transformations: int = 0
    skipped: int = 0


def _serve(check: Callable[[int], Outcome], channel: Any) -> None:
    while True:
        channel.send(check(channel.recv()))


class _Worker:
    """A process with at most one seed. After a crash another takes its place: an error of the GPU
    may last as long as its process."""

    def __init__(self, check: Callable[[int], Outcome]):
        self.channel, other = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(check, other), daemon=True)
        self.process.start()
        other.close()

    def give(self, seed: int) -> None:
        self.seed, self.since = seed, time.monotonic()
        self.channel.send(seed)

    def outcome(self) -> Outcome | None:
        """That of its seed, if it has come to an end."""
        if self.channel.poll():
            try:
                return self.channel.recv()
            except EOFError:
                self.process.join()
                text = f"the process ended with status {self.process.exitcode}"
                return Outcome(self.seed, "crashed", text)
        if time.monotonic() - self.since < _PATIENCE:
            return None
        return Outcome(self.seed, "crashed", f"not finished in {_PATIENCE} s")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.channel.close()


def outcomes(
    check: Callable[[int], Outcome], seeds: Iterable[int], workers: int, seconds: float = 1e9
) -> Iterator[Outcome]:
    """As they come. Seeds are begun in order, none after so many seconds."""
    waiting, start, idle, busy = iter(seeds), time.monotonic(), [], []
    while True:
        while len(busy) < workers and time.monotonic() - start < seconds:
            if (seed := next(waiting, None)) is None:
                break
            busy.append(idle.pop() if idle else _Worker(check))
            busy[-1].give(seed)
        if not busy:
            break
        multiprocessing.connection.wait([worker.channel for worker in busy], 1)
        for worker in [*busy]:
            if found := worker.outcome():
                busy.remove(worker)
                worker.end() if found.kind == "crashed" else idle.append(worker)
                yield found
    for worker in idle:
        worker.end()


def facts(
    what: str, found: list[Outcome], seconds: float, gpu: str | None, commit: str | None = None
) -> dict[str, Any]:
    """A run as data, which :func:`merged` joins with others."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    command = "git", "rev-parse", "HEAD"
    commit = commit or subprocess.run(command, capture_output=True, text=True).stdout
    seeds = sorted(outcome.seed for outcome in found)
    run = {
        "seeds": _ranges(seeds),
        "commit": commit.strip(),
        "date": f"{datetime.date.today()}",
        "gpu": gpu,
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "seconds": round(seconds),
    }
    refused = collections.defaultdict(list)
    for outcome in found:
        if outcome.kind == "refused":
            words = re.sub(r"\b[0-9a-f]{64}|\d+", "#", outcome.text.partition("\n")[0])
            refused[words[:160]].append(outcome.seed)
    failures = [[o.seed, o.kind, o.text] for o in found if o.kind in ("wrong", "crashed")]
    return {
        "what": what,
        "runs": [run],
        "counts": {kind: sum(o.kind == kind for o in found) for kind in KINDS},
        "transformations": sum(o.transformations for o in found),
        "segments_of_cudnn": sum(sum(o.segments) for o in found),
        "without_comparable_derivatives": sum(o.skipped for o in found),
        "refused": dict(refused),
        "failures": sorted(failures),
    }


def _ranges(seeds: list[int]) -> list[list[int]]:
    """Ascending seeds as ranges."""
    firsts = [seed for seed in seeds if seed - 1 not in seeds]
    ends = [seed + 1 for seed in seeds if seed + 1 not in seeds]
    return [[*pair] for pair in zip(firsts, ends, strict=True)]


def merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Slices of one kind as one. What a seed was earlier, a failure or a refusal, no longer counts
    where a later slice runs it again; failures that are right there are ``fixed``."""
    first, *others = parts
    for other in others:
        if other["what"] != first["what"]:
            raise ValueError(f"{first['what']} and {other['what']} are of different kinds")
        again = {seed for run in other["runs"] for ends in run["seeds"] for seed in range(*ends)}
        before = [failure for failure in first["failures"] if failure[0] in again]
        failing = {failure[0] for failure in other["failures"]}
        refused = {words: {*seeds} - again for words, seeds in first["refused"].items()}
        counts = {**first["counts"], "refused": sum(map(len, refused.values()))}
        for _, kind, _ in before:
            counts[kind] -= 1
        first = first | {
            "counts": counts,
            "refused": {words: sorted(seeds) for words, seeds in refused.items() if seeds},
            "failures": [failure for failure in first["failures"] if failure not in before],
            "fixed": first.get("fixed", []) + [f for f in before if f[0] not in failing],
        }
        first = _joined(first, other)
    return first


def _joined(a: Any, b: Any) -> Any:
    if isinstance(b, dict):
        both = {name: _joined(a[name], x) for name, x in b.items() if name in a}
        return {**a, **b, **both}
    return a if isinstance(a, str) else a + b
