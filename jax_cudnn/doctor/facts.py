"""The facts that the checks examine, gathered once. Nothing here judges or raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .._core.cuda import device_nodes, kernel_driver
from .._core.planning.deviceless import environment
from . import copies, process

T = TypeVar("T")

_OF_CUDA = ("jax-cuda{}-plugin", "jax-cuda{}-pjrt", "nvidia-cudnn-cu{}")
PACKAGES = (
    *("jax-cudnn", "jax", "jaxlib", "numpy", "nvidia-cudnn-frontend"),
    *(name.format(major) for major in (12, 13) for name in _OF_CUDA),
)
FIRST_STAGES = {"jax": "devices", "planning": "worker"}  # of stages.STAGES
_NOTHING = process.Outcome(ended="was not started")
# Variables that select GPUs, libraries or compiler options.
VARIABLES = re.compile(
    r"JAX_\w+|XLA_\w+|CUDA_\w+|CUDNN_\w+|NVIDIA_VISIBLE_DEVICES|LD_(LIBRARY_PATH|PRELOAD)"
    r"|CONDA_PREFIX|PYTHONPATH"
)


@dataclass(frozen=True)
class Facts:
    """Facts about a machine and an installation.

    Attributes:
        python: version and interpreter.
        packages: versions of those ``PACKAGES`` that are installed.
        plugins: CUDA major versions of the plugins that JAX finds ("12", "13").
        variables: the relevant environment variables.
        nodes: device files of an NVIDIA GPU.
        kernel_driver: version of NVIDIA's kernel module, or "".
        driver: the outcome of ``driver.py`` in this environment.
        unhidden: the same without CUDA_VISIBLE_DEVICES, if no GPU is visible with it.
        copies: every libcudnn.so.9.
        jax, planning: the outcomes of the two rows of ``stages.STAGES``.
        failed: facts that could not be gathered, and why.
    """

    python: tuple[tuple[int, ...], str] = (tuple(sys.version_info[:3]), sys.executable or "")
    system: str = sys.platform
    packages: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    kernel_driver: str = ""
    driver: process.Outcome = _NOTHING
    unhidden: process.Outcome = _NOTHING
    copies: tuple[copies.Copy, ...] = ()
    jax: process.Outcome = _NOTHING
    planning: process.Outcome = _NOTHING
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def driver_report(self) -> dict[str, Any]:
        return self.driver.reports.get("driver", {})

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that a process in this environment sees: name, capability, gib."""
        return self.driver_report.get("gpus", [])

    @property
    def hidden_gpus(self) -> list[dict[str, Any]]:
        return self.unhidden.reports.get("driver", {}).get("gpus", [])

    @property
    def gpu_present(self) -> bool:
        return bool(self.gpus or self.hidden_gpus or self.nodes or self.kernel_driver)


def collect() -> Facts:
    """The facts of this machine, in a few seconds; risky steps run in separate processes."""
    failed: dict[str, str] = {}

    def safe(name: str, gather: Callable[[], T], otherwise: T) -> T:
        try:
            return gather()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            return otherwise

    with ThreadPoolExecutor() as threads:  # these two take longest, mostly waiting
        jax = threads.submit(safe, "jax", lambda: _stages("jax"), _NOTHING)
        planning = threads.submit(safe, "planning", lambda: _stages("planning"), _NOTHING)
        driver = safe("driver", lambda: _driver(os.environ), _NOTHING)
        unhidden = _NOTHING
        others = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        if len(others) < len(os.environ) and not driver.reports.get("driver", {}).get("gpus"):
            unhidden = safe("driver", lambda: _driver(others), _NOTHING)
        return Facts(
            packages=safe("packages", _packages, {}),
            plugins=safe("plugins", cuda_plugins, ()),
            variables={k: v for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k)},
            nodes=safe("device files", lambda: tuple(device_nodes()), ()),
            kernel_driver=safe("kernel driver", kernel_driver, ""),
            driver=driver,
            unhidden=unhidden,
            copies=safe("copies of cuDNN", lambda: copies.find(os.environ), ()),
            jax=jax.result(),
            planning=planning.result(),
            failed=failed,
        )


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cuda_plugins() -> tuple[str, ...]:
    """Majors of the CUDA plugins that JAX finds, such as "12"."""
    spec = importlib.util.find_spec("jax_plugins")
    roots = spec.submodule_search_locations if spec is not None else None
    found = {path.name for root in roots or () for path in Path(root).glob("xla_cuda*")}
    return tuple(sorted(name.removeprefix("xla_cuda") for name in found))


def _driver(variables: Mapping[str, str]) -> process.Outcome:
    script = str(Path(__file__).with_name("driver.py"))
    return process.run([environment.python(), "-I", "-S", script], variables, 60, "driver")


def _stages(which: str) -> process.Outcome:
    inherited = environment.variables()
    variables = {
        **os.environ,
        "PYTHONPATH": inherited["PYTHONPATH"],
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other processes may use the GPU
    }
    if which == "planning":  # as on a machine without a GPU
        variables |= {name: inherited[name] for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    module = ["-P", "-m", "jax_cudnn.doctor.stages", which]
    first = FIRST_STAGES[which]
    return process.run([environment.python(), *module], variables, 300, first)
