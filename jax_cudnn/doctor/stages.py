"""Trial runs: ``python -m jax_cudnn.doctor.stages jax | planning``.

Each stage prints one report for ``process.run``: its result, ``absent`` if a package that it needs
is not installed, or ``error`` with the parts of a JaxCudnnError. If a stage crashes the process,
the reports of earlier stages remain.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jax_cudnn as jc

from .._core import compat, ffi
from .._core.errors import JaxCudnnError
from .._core.planning import frontend
from .._core.planning.deviceless import client, profiles

TARGET = "H200"  # the profile for which planning is tried
ABSENT = {"absent": "nvidia-cudnn-frontend is not installed"}


@jc.graph(implementation="cudnn")  # so that it does not fall back to XLA
def matmul_bias_relu(g, x, w, b):
    """relu(x @ w + b): x (1, m, k), w (1, k, n), b (1, 1, n), bfloat16; one fused plan."""
    return g.relu(g.bias(g.matmul(x, w), b))


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Small integers, so that every sum (at most 67) is exact in bfloat16."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-1, 2, (2, 1, 64, 64))
    return x, w, rng.integers(-3, 4, (1, 1, 64))


# -- in the process that uses the GPU --------------------------------------------------------------


def devices() -> dict[str, Any]:
    """JAX's devices, what JAX logged while it looked for them, and the cuDNN that it loaded."""
    heard: list[str] = []
    logging.getLogger("jax").addHandler(_Listener(heard))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = jax.local_devices()
    heard += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return {
        "platform": found[0].platform,
        "gpus": [device.device_kind for device in found if compat.is_cuda(device)],
        "cudnn": frontend.loaded_paths(),
        "heard": heard,
    }


def frontend_here() -> dict[str, Any]:
    """The frontend can be imported, and its version is supported."""
    if importlib.util.find_spec("cudnn") is None:
        return ABSENT
    cudnn = importlib.import_module("cudnn")
    frontend.check_frontend(cudnn.__version__, cudnn.__file__)
    return {"version": cudnn.__version__, "path": cudnn.__file__}


def cudnn_here() -> dict[str, Any]:
    """The cuDNN that the frontend plans with in this process."""
    if importlib.util.find_spec("cudnn") is None:
        return ABSENT
    return {"cudnn": frontend.load().backend_version(), "paths": frontend.loaded_paths()}


def executor() -> dict[str, Any]:
    """Loads our library; reports which cuDNN it runs."""
    library = ffi.library()
    return {
        "path": library._name,
        "cudnn": library.JaxCudnnLoadedVersion(),
        "cudnn_path": library.JaxCudnnLoadedPath().decode(errors="replace"),
    }


def run() -> dict[str, Any]:
    """Runs the graph under jit, on a GPU if JAX has one, and compares it with NumPy."""
    x, w, b = operands()
    expected = np.maximum(x @ w + b, 0)
    y = jax.jit(matmul_bias_relu)(*(jax.numpy.asarray(a, "bfloat16") for a in (x, w, b)))
    wrong = int(np.sum(np.asarray(y, np.float64) != expected))
    if wrong:
        raise ArithmeticError(f"{wrong} of {expected.size} values of relu(x @ w + b) are wrong")
    (device,) = y.devices()
    return {"device": device.device_kind, "platform": device.platform}


# -- in a process without a GPU, and its planning worker -------------------------------------------


def worker() -> dict[str, Any]:
    """The cuDNN of the planning worker."""
    if importlib.util.find_spec("cudnn") is None:
        return ABSENT
    return client.call("jax_cudnn.doctor.stages:cudnn_here", timeout=120)


def planned() -> dict[str, Any]:
    """Builds a plan for an absent GPU, without the plan cache."""
    if importlib.util.find_spec("cudnn") is None:
        return ABSENT
    began = time.perf_counter()
    avals = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in operands()]
    spec = matmul_bias_relu.trace(*avals)[1].spec
    made = client.call("jax_cudnn._core.planning.build:build_for", spec, profiles.get(TARGET))
    seconds = round(time.perf_counter() - began, 2)
    return {"engine": made.engine, "cudnn": made.cudnn_version, "seconds": seconds}


def registration() -> dict[str, Any]:
    """This jaxlib accepts our library's handlers.

    For the CPU, XLA registers handlers immediately, and refuses those of a newer FFI than its own;
    for CUDA without a plugin it would only queue them. This does not run in the process that uses
    the GPU: it would register the type of our state for the CPU, which makes XLA's CUDA compiler
    abort.
    """
    library = ffi.library()
    stages = {"instantiate": "Instantiate", "initialize": "Initialize", "execute": "Execute"}
    capsules = {s: jax.ffi.pycapsule(getattr(library, f"JaxCudnn{n}")) for s, n in stages.items()}
    jax.local_devices(backend="cpu")
    jax.ffi.register_ffi_target("jax_cudnn_doctor", capsules, platform="cpu")
    return {"accepted": True}


STAGES: dict[str, tuple[Callable[[], dict[str, Any]], ...]] = {
    "jax": (devices, frontend_here, cudnn_here, executor, run),
    "planning": (worker, planned, registration),
}


class _Listener(logging.Handler):
    """Keeps what JAX logs about plugins that it cannot use."""

    def __init__(self, heard: list[str]):
        super().__init__(logging.WARNING)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.heard.append(record.getMessage() + (f": {cause}" if cause else ""))


def _report(stage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return stage()
    except JaxCudnnError as error:
        parts = ("summary", "expected", "got", "why", "fix")
        return {"error": {part: getattr(error, part) for part in parts}}
    except Exception as error:
        return {"error": {"summary": f"{type(error).__name__}: {error}"}}


def main() -> None:
    # Keep what libraries print to stdout out of the reports.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for stage in STAGES[sys.argv[1]]:
        print(json.dumps({"stage": stage.__name__}), file=reports, flush=True)
        report = {"stage": stage.__name__, **_report(stage)}
        print(json.dumps(report), file=reports, flush=True)


if __name__ == "__main__":
    main()
