"""What the doctor tries in processes of their own: a crash there is a report, not the doctor's end.

The process's side runs stages, and prints a line of JSON after each. Stages of a driver or of one
library run without the package and site-packages (``python -I -S trials.py``), so that nothing
else can break them: at the top this file uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

ALONE = ("driver",)
WITH_GPU = ("devices", "frontend_here", "cudnn_here", "executor", "compute")
WITHOUT_GPU = ("planned", "registration")
NEED_FRONTEND = ("frontend_here", "cudnn_here", "planned")
ABSENT = {"absent": "nvidia-cudnn-frontend is not installed"}

Reports = dict[str, dict[str, Any]]

_TAIL = 1500  # characters of a process's output in a report
_FRAME = re.compile(r"\s*@ +0x|\*\*\* Check failure stack trace")  # of XLA's stack traces


def tried(stages: Sequence[str], variables: Mapping[str, str] | None = None) -> Reports:
    """The reports of stages that run one after the other in a process with these environment
    variables; without any, in one that has neither the package nor site-packages."""
    if variables is None:
        return run(["-I", "-S", __file__, *stages], os.environ, 60, stages)
    return run(["-P", "-m", "jax_cudnn.commands.trials", *stages], variables, 300, stages)


def run(
    arguments: Sequence[str], variables: Mapping[str, str], seconds: float, stages: Sequence[str]
) -> Reports:
    """The report of each stage of a Python program that prints ``{"stage": name, ...}``.

    The stage that the process did not survive has an ``error``; those after it are ``untried``.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=dict(variables),
        start_new_session=True,  # so that a time limit also ends its children
    )
    try:
        out, err = process.communicate(timeout=seconds)
        ended = f"ended with exit code {process.returncode}"
        if process.returncode < 0:
            known = -process.returncode in signal.valid_signals()
            ended = f"died of {signal.Signals(-process.returncode).name}" if known else ended
    except subprocess.TimeoutExpired:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        out, err = process.communicate()
        ended = f"did not end within {seconds:g} s and was stopped"
    reports: Reports = {}
    noise = err.splitlines()
    for line in out.splitlines():
        try:
            report = json.loads(line)
            reports[report.pop("stage")] = report
        except (ValueError, AttributeError, KeyError, TypeError):
            noise.append(line)  # a library printed it
    if left := [stage for stage in stages if stage not in reports]:
        tail = "\n".join(line for line in noise if not _FRAME.match(line))[-_TAIL:].strip()
        why = {"summary": f"its process {ended}", "why": tail or "it printed nothing"}
        earlier = {"untried": f"its process ended earlier, in stage {left[0]!r}"}
        reports |= {left[0]: {"error": why}, **dict.fromkeys(left[1:], earlier)}
    return reports


# -- stages without the package --------------------------------------------------------------------


def cudnn_version(path: str) -> dict[str, Any]:
    """The version of a copy of cuDNN."""
    library = ctypes.CDLL(path)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return {"version": library.cudnnGetVersion()}


def driver() -> dict[str, Any]:
    """``missing`` (why there is no driver), or ``path``, ``version``, ``status``, ``text`` and
    ``gpus``. It creates no CUDA context, and so uses no GPU memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    text, count, version = ctypes.c_char_p(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        cuda.cuGetErrorString(status, ctypes.byref(text))
    gpus = [] if status else [_gpu(cuda, ordinal) for ordinal in range(count.value)]
    told = (text.value or b"").decode(errors="replace")
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "libcuda.so" in line), "libcuda.so.1")
    return {"path": path, "version": version.value, "status": status, "text": told, "gpus": gpus}


def _gpu(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    size, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    # 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
    failed = (
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    )
    if failed:
        raise RuntimeError(f"the CUDA driver returned {failed} for GPU {ordinal}")
    return {
        "name": name.value.decode(errors="replace"),
        "capability": f"{major.value}.{minor.value}",
        "gib": round(size.value / 2**30, 1),
    }


# -- in the process that uses the GPU --------------------------------------------------------------


def devices() -> dict[str, Any]:
    """JAX's devices, what JAX logged while it looked for them, and the cuDNN that it loaded."""
    import jax

    from .._core import compat
    from .._core.planning import frontend

    heard: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        cause = record.exc_info[1] if record.exc_info else None
        heard.append(record.getMessage() + (f": {cause}" if cause else ""))
        return False

    handler = logging.Handler(logging.WARNING)
    handler.addFilter(hear)
    logging.getLogger("jax").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = jax.local_devices()
    heard += [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return {
        "platform": found[0].platform,
        "gpus": [device.device_kind for device in found if compat.is_cuda(device)],
        "paths": frontend.loaded_paths(),
        "heard": heard,
    }


def frontend_here() -> dict[str, Any]:
    """The frontend can be imported, and its version is supported."""
    from .._core.planning import frontend

    cudnn = importlib.import_module("cudnn")
    frontend.check_frontend(cudnn.__version__, cudnn.__file__)
    return {"version": cudnn.__version__, "path": cudnn.__file__}


def cudnn_here() -> dict[str, Any]:
    """The cuDNN that the frontend plans with in this process."""
    from .._core.planning import frontend

    frontend.load()
    return {"paths": frontend.loaded_paths()}


def executor() -> dict[str, Any]:
    """Loads our library; reports which cuDNN it runs."""
    from .._core import ffi

    library = ffi.library()
    path = library.JaxCudnnLoadedPath().decode(errors="replace")
    return {"path": library._name, "paths": [path] if path else []}


def graph() -> tuple[Any, list[Any]]:
    """relu(x @ w + b) in bfloat16 as one fused plan, and its operands: small integers, so that
    every sum (at most 67) is exact."""
    import jax
    import numpy as np

    import jax_cudnn as jc

    def matmul_bias_relu(g: Any, x: Any, w: Any, b: Any) -> Any:
        return g.relu(g.bias(g.matmul(x, w), b))

    rng = np.random.default_rng(0)
    numbers = *rng.integers(-1, 2, (2, 1, 64, 64)), rng.integers(-3, 4, (1, 1, 64))
    arrays = [jax.numpy.asarray(x, "bfloat16") for x in numbers]
    # Under "cudnn" it does not fall back to XLA.
    return jc.graph(matmul_bias_relu, implementation="cudnn"), arrays


def compute() -> dict[str, Any]:
    """Runs the graph under jit, on a GPU if JAX has one, and compares it with NumPy."""
    import jax
    import numpy as np

    function, arrays = graph()
    x, w, b = (np.asarray(array, np.float64) for array in arrays)
    y = jax.jit(function)(*arrays)
    wrong = int(np.sum(np.asarray(y, np.float64) != np.maximum(x @ w + b, 0)))
    if wrong:
        raise ArithmeticError(f"{wrong} of {y.size} values of relu(x @ w + b) are wrong")
    (device,) = y.devices()
    return {"device": device.device_kind, "platform": device.platform}


# -- in a process without a GPU, and its planning worker -------------------------------------------


def planned() -> dict[str, Any]:
    """The planning worker's cuDNN, and a plan that it builds, without the plan cache."""
    from .._core.planning.deviceless import client, profiles

    cudnn = client.call("jax_cudnn.commands.trials:cudnn_here", timeout=120)
    began = time.perf_counter()
    function, arrays = graph()
    spec = function.trace(*arrays)[1].spec
    made = client.call("jax_cudnn._core.planning.build:build_for", spec, profiles.get("H200"))
    return {**cudnn, "engine": made.engine, "seconds": round(time.perf_counter() - began, 2)}


def registration() -> dict[str, Any]:
    """This jaxlib accepts our library's handlers.

    For the CPU, XLA registers handlers immediately, and refuses those of a newer FFI than its own;
    for CUDA without a plugin it would only queue them. This does not run in the process that uses
    the GPU: it would register the type of our state for the CPU, which makes XLA's CUDA compiler
    abort.
    """
    import jax

    from .._core import ffi

    library, names = ffi.library(), ("Instantiate", "Initialize", "Execute")
    handlers = {n.lower(): jax.ffi.pycapsule(getattr(library, f"JaxCudnn{n}")) for n in names}
    jax.local_devices(backend="cpu")
    jax.ffi.register_ffi_target("jax_cudnn_doctor", handlers, platform="cpu")
    return {"accepted": True}


def main(stages: Sequence[str]) -> None:
    """Runs stages, each a name or ``name=argument``, and prints their reports."""
    # Keep what libraries print to stdout out of the reports.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for stage in stages:
        name, *argument = stage.split("=", 1)
        try:
            absent = name in NEED_FRONTEND and importlib.util.find_spec("cudnn") is None
            report = ABSENT if absent else globals()[name](*argument)
        except Exception as error:
            parts = ("expected", "got", "why", "fix")  # of a JaxCudnnError
            summary = getattr(error, "summary", f"{type(error).__name__}: {error}")
            report = {"error": {"summary": summary, **{p: getattr(error, p, None) for p in parts}}}
        print(json.dumps({"stage": stage, **report}), file=reports, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
