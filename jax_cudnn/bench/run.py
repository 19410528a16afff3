"""``python -m jax_cudnn bench``: runs the measurements and writes them as JSON with versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .._core.cuda import device_nodes
from .._core.errors import TargetError

RESULTS = Path(__file__).parent / "results"
_MODES = {"command_buffers": "", "no_command_buffers": "--xla_gpu_enable_command_buffer="}
_PROCESSES = 3  # of each mode: the host's speed differs from process to process


def run(out: Path) -> dict[str, Any]:
    """All measurements on this machine's GPU; writes ``<model>.json`` into ``out``."""
    if not device_nodes():
        raise TargetError(
            "bench needs an NVIDIA GPU",
            got="no NVIDIA device on this machine",
            fix="run it on a machine with a GPU; `python -m jax_cudnn demo` runs anywhere",
        )
    # The processes that measure come first: this one must not hold the GPU's memory then.
    host = {mode: [_host(flags) for _ in range(_PROCESSES)] for mode, flags in _MODES.items()}
    from . import planning, timing

    environment = timing.environment()
    result = {"environment": environment, "host": host}
    result.update(planning.tracing())
    result.update(planning.planning())
    name = environment["device"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(render(result))
    print(f"written to {path}")
    return result


def _host(flags: str) -> dict[str, Any]:
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    # In a replayed command buffer no handler runs, so there is nothing to time.
    options = ["--overhead"] if flags else []
    command = [sys.executable, "-m", "jax_cudnn.bench.host", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def render(result: dict[str, Any]) -> str:
    """The figures as the Markdown that BUILD.md shows."""
    e = result["environment"]
    rows = ["| what | jax_cudnn | XLA's own |", "|---|---|---|"]
    for mode, runs in result["host"].items():
        for run in runs:
            chain = run["chain_us_per_convolution"]
            rows.append(
                f"| chain of 200 tiny convolutions, {mode.replace('_', ' ')}, us each "
                f"| {_spread(chain['ours'])} | {_spread(chain['xla'])} |"
            )
    for run in result["host"]["no_command_buffers"]:
        ns = run["ns_per_call"]
        rows.append(
            f"| host ns a call: initialize {ns['initialize']:.0f} + execute {ns['execute']:.0f}, "
            f"of which cudnnBackendExecute {ns['cudnnBackendExecute']:.0f} "
            f"| {ns['added']:.0f} added | |"
        )
    trace = _spread(result["first_trace_of_10_nodes_ms"])
    rows.append(f"| first trace of a graph of 10 nodes, ms | {trace} | |")
    rows.append(
        f"| plan of a fusion, cold, ms (median of {len(result['cold_plan_ms'])}; largest) "
        f"| {result['cold_plan_ms_median']}; {max(result['cold_plan_ms'].values())} | |"
    )
    rows.append(f"| plan from memory, ms | {_spread(result['from_memory_ms'])} | |")
    return (
        f"{e['device']}, {e['date']}, cuDNN {e['cudnn']}, jax {e['jax']}, "
        f"nvidia-cudnn-frontend {e['nvidia-cudnn-frontend']}; median (smallest to largest); "
        "one row for each of three processes.\n\n" + "\n".join(rows)
    )


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:g} ({values['min']:g} to {values['max']:g})"
