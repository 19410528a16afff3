"""The facts that the doctor examines: what is installed, and what happens when it is used.

Drivers and libraries are loaded only in subprocesses, so that a crash is a report and not the
doctor's end. A subprocess runs stages, and prints a line of JSON after each. Stages of a driver or
of one library run without the package and site-packages (``python -I -S facts.py``), so that
nothing else can break them: at the top this file imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

SONAME, LIBRARY_PATH, WHEEL = "libcudnn.so.9", "LD_LIBRARY_PATH", "nvidia-cudnn package"
ABSENT = {"absent": "nvidia-cudnn-frontend is not installed"}

_WITH_GPU = ("devices", "frontend_here", "cudnn_here", "executor", "compute")
_WITHOUT_GPU = ("planned", "registration")
_NEED_FRONTEND = ("frontend_here", "cudnn_here", "planned")
_PACKAGES = (
    *("jax-cudnn", "jax", "jaxlib", "numpy", "nvidia-cudnn-frontend"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"),
)
# Variables that select GPUs, libraries or compiler options.
_VARIABLES = re.compile(
    r"JAX_\w+|XLA_\w+|CUDA_\w+|CUDNN_\w+|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)"
    r"|CONDA_PREFIX|PYTHONPATH"
)
_FRAME = re.compile(r"\s*@ +0x|\*\*\* Check failure stack trace")  # of XLA's stack traces

Reports = dict[str, dict[str, Any]]


class Copy(NamedTuple):
    """A libcudnn.so.9, the places in which it was found, and ``cudnnGetVersion()``; None for a file
    that cannot be loaded: ``broken`` then says why."""

    path: str
    found_by: list[str]
    version: int | None
    broken: str = ""


@dataclass(frozen=True)
class Facts:
    """Facts about a machine and an installation.

    Attributes:
        packages: versions of the packages that are installed.
        plugins: CUDA major versions of the plugins that JAX finds ("12", "13").
        variables: the relevant environment variables.
        signs: device files of an NVIDIA GPU, and NVIDIA's kernel module.
        copies: every libcudnn.so.9, in the order of the frontend's search.
        reports: what the stages reported.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    plugins: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    signs: Sequence[str] = ()
    copies: Sequence[Copy] = ()
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def report(self, stage: str) -> Mapping[str, Any]:
        return self.reports.get(stage, {"untried": "it was not started"})

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that a process in this environment sees: name, capability, gib."""
        return self.report("driver").get("gpus", [])

    @property
    def gpu_present(self) -> bool:
        return bool(self.gpus or self.signs)


def collect() -> Facts:
    """The facts of this machine, in a few seconds."""
    from .._core.cuda import device_nodes, kernel_driver
    from .._core.planning.deviceless import client

    inherited = client.variables()
    using = {
        **os.environ,
        "PYTHONPATH": inherited["PYTHONPATH"],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes may use the GPU
    }
    hidden = {name: inherited[name] for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    package = ("-P", "-m", "jax_cudnn.commands.facts")
    with ThreadPoolExecutor() as threads:  # these two take longest, mostly waiting
        with_gpu = threads.submit(run, package, _WITH_GPU, using)
        without = threads.submit(run, package, _WITHOUT_GPU, {**using, **hidden})
        return Facts(
            packages=_packages(),
            plugins=cuda_plugins(),
            variables={k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)},
            signs=[*device_nodes(), *(f"kernel module {v}" for v in [kernel_driver()] if v)],
            copies=_copies(client.wheel_folders()),
            reports=_alone("driver") | with_gpu.result() | without.result(),
        )


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cuda_plugins() -> list[str]:
    """Majors of the CUDA plugins that JAX finds, such as "12"."""
    spec = importlib.util.find_spec("jax_plugins")
    roots = (spec and spec.submodule_search_locations) or ()
    found = {path.name for root in roots for path in Path(root).glob("xla_cuda*")}
    return sorted(name.removeprefix("xla_cuda") for name in found)


def _copies(wheels: Sequence[str]) -> list[Copy]:
    found: dict[str, dict[str, None]] = {}
    for how, path in _places(wheels):
        if os.path.exists(path):
            found.setdefault(os.path.realpath(path), {})[how] = None
    copies = []
    for path, ways in found.items():
        (report,) = _alone(f"cudnn_version={path}").values()
        error = report.get("error", {})
        broken = " ".join(filter(None, (error.get("summary"), error.get("why"))))
        copies.append(Copy(path, [*ways], report.get("version"), broken))
    return copies


def _places(wheels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where a process could find cuDNN, in the order of the frontend's search."""
    for folder in filter(None, os.environ.get(LIBRARY_PATH, "").split(os.pathsep)):
        # Also without a version: the frontend accepts such a link.
        yield from ((LIBRARY_PATH, os.path.join(folder, n)) for n in (SONAME, "libcudnn.so"))
    for folder in (os.path.join(sysconfig.get_path("purelib"), "nvidia/cudnn/lib"), *wheels):
        yield WHEEL, os.path.join(folder, SONAME)
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/sbin", "/usr/sbin"])
    if ldconfig := shutil.which("ldconfig", path=search):
        listed = subprocess.run([ldconfig, "-p"], capture_output=True, text=True).stdout
        lines = [line.split() for line in listed.splitlines()]
        yield from (("dynamic linker's cache", words[-1]) for words in lines if SONAME in words)
    for prefix in filter(None, (os.environ.get("CONDA_PREFIX"), sys.prefix)):
        yield "environment", f"{prefix}/lib/{SONAME}"


def _alone(stage: str) -> Reports:
    """The report of a stage in a process without the package and site-packages."""
    return run(("-I", "-S", __file__), (stage,), os.environ, seconds=60)


def run(
    program: Sequence[str], stages: Sequence[str], env: Mapping[str, str], seconds: float = 300
) -> Reports:
    """The report of each stage of a Python program that prints ``{"stage": name, ...}``.

    The stage that the process did not survive has an ``error``; those after it are ``untried``.
    """
    process = subprocess.Popen(
        [sys.executable, *program, *stages],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=dict(env),
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
    reports, noise = Reports(), err.splitlines()
    for line in out.splitlines():
        try:
            report = json.loads(line)
            reports[report.pop("stage")] = report
        except (ValueError, AttributeError, KeyError, TypeError):
            noise.append(line)  # a library printed it
    if left := [stage for stage in stages if stage not in reports]:
        tail = "\n".join(line for line in noise if not _FRAME.match(line))[-1500:].strip()
        why = {"summary": f"its process {ended}", "why": tail or "it printed nothing"}
        earlier = {"untried": f"its process ended earlier, in stage {left[0]!r}"}
        reports |= {left[0]: {"error": why}, **dict.fromkeys(left[1:], earlier)}
    return reports


# -- stages without the package --------------------------------------------------------------------


def cudnn_version(path: str) -> dict[str, Any]:
    """The version of a copy of cuDNN."""
    return {"version": ctypes.CDLL(path).cudnnGetVersion()}  # a size_t, far below 2**31


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
    with open("/proc/self/maps") as maps:
        path = next((line.split()[-1] for line in maps if "libcuda.so" in line), "libcuda.so.1")
    message = (text.value or b"").decode(errors="replace")
    gpus = [] if status else [_gpu(cuda, ordinal) for ordinal in range(count.value)]
    return {"path": path, "version": version.value, "status": status, "text": message, "gpus": gpus}


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


# -- stages of the process that uses the GPU, and of one without -----------------------------------


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
    return jc.graph(matmul_bias_relu, implementation="cudnn"), arrays  # never XLA's


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


def planned() -> dict[str, Any]:
    """The planning worker's cuDNN, and a plan that it builds, without the plan cache."""
    from .._core.planning.deviceless import client, profiles

    cudnn = client.call("jax_cudnn.commands.facts:cudnn_here", timeout=120)
    began = time.perf_counter()
    function, arrays = graph()
    spec = function.trace(*arrays)[1].spec
    made = client.call("jax_cudnn._core.planning.build:build_for", spec, profiles.get("H200"))
    return {**cudnn, "engine": made.engine, "seconds": round(time.perf_counter() - began, 2)}


def registration() -> dict[str, Any]:
    """This jaxlib accepts our library's handlers: for the CPU XLA refuses those of a newer FFI at
    once, for CUDA without a plugin it would queue them. Not in the process that uses the GPU, where
    the type of our state, registered for the CPU, makes XLA's CUDA compiler abort."""
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
            absent = name in _NEED_FRONTEND and importlib.util.find_spec("cudnn") is None
            report = ABSENT if absent else globals()[name](*argument)
        except Exception as error:
            parts = ("expected", "got", "why", "fix")  # of a JaxCudnnError
            summary = getattr(error, "summary", f"{type(error).__name__}: {error}")
            report = {"error": {"summary": summary, **{p: getattr(error, p, None) for p in parts}}}
        print(json.dumps({"stage": stage, **report}), file=reports, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
