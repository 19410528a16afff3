"""What ``jax_cudnn.accelerate`` adds to the time and the host memory of tracing a model.

    python -m benchmarks.tracing --into benchmarks/results/tracing.json

The models of the Flax benchmark at their sizes, traced for an H200 that need not be there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import jax_cudnn as jc
from jax_cudnn.commands.timing import environment

from .tables import table

GPU, ROUNDS = "H200", 5


def measure(case: Any) -> dict[str, float]:
    """Milliseconds (medians of rounds in turns, without Python's garbage collection) of a forward
    and of a gradient, plain and accelerated, and the megabytes by which the peak of host memory
    grows."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: case.model(rngs=nnx.Rngs(0))))
    inputs, _ = jax.eval_shape(case.batch, jax.random.key(0))

    def forward() -> Callable[..., Any]:
        return lambda state, inputs: nnx.merge(graph, state)(inputs)  # new: nothing is known of it

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        loss = lambda state, inputs: fn(state, inputs).astype("float32").mean()  # noqa: E731
        return jax.grad(loss, allow_int=True)

    sides: dict[str, Callable[[], Callable[..., Any]]] = {
        "forward_plain": forward,
        "forward_accelerated": lambda: jc.accelerate(forward()),
        "gradient_plain": lambda: gradient(forward()),
        "gradient_accelerated": lambda: gradient(jc.accelerate(forward())),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    with jc.target(GPU):
        for _ in range(ROUNDS + 1):
            for name, make in sides.items():
                gc.collect()
                gc.disable()
                try:
                    begin = time.perf_counter()
                    jax.jit(make()).trace(state, inputs)
                    times[name].append(1e3 * (time.perf_counter() - begin))
                finally:
                    gc.enable()
        peaks = [_peak(make(), state, inputs) for make in sides.values()]
    found = {f"{name}_ms": statistics.median(ms[1:]) for name, ms in times.items()}
    found["more_memory_mb"] = (max(peaks[1::2]) - max(peaks[::2])) / 1e6
    return {name: round(value, 1) for name, value in found.items()}


def _peak(fn: Callable[..., Any], *args: Any) -> int:
    tracemalloc.start()
    jax.jit(fn).trace(*args)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def render(result: dict[str, Any]) -> str:
    """The table of docs/accelerate.md."""
    head = ["model", "forward, ms", "in `jc.accelerate`, times", "gradient, ms", "times"]
    rows = []
    for name, case in result["models"].items():
        cells = []
        for what in ("forward", "gradient"):
            plain, ours = (case[f"{what}_{side}_ms"] for side in ("plain", "accelerated"))
            cells += [f"{plain:.0f}", f"{ours / plain:.2f}"]
        rows.append([name, *cells, f"{case['more_memory_mb']:.1f}"])
    where = result["environment"]
    return f"{where['date']}, jax {where['jax']}, flax {where['flax']}.\n\n" + table(
        [*head, "more host memory, MB"], rows
    )


def main() -> None:
    from .flax.cases import cases

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    jc.configure(tuning="off")
    found = {}
    for case in cases():
        found[case.name] = measure(case)
        print(case.name, json.dumps(found[case.name]), flush=True)
    result = {"environment": environment("flax"), "models": found}
    options.into.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
