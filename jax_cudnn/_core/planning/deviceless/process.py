"""What the planning worker needs to start."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ...errors import LibraryError
from ...package import install, packaged_library


def null_driver() -> Path:
    """The stand-in for libcuda.so.1."""
    return packaged_library("libjax_cudnn_null_driver.so")


def check() -> None:
    """Raises ``LibraryError`` if planning without a GPU cannot work here."""
    if not sys.platform.startswith("linux"):
        raise LibraryError(
            "planning without a GPU needs Linux",
            got=sys.platform,
            why="it replaces libcuda.so.1, which cuDNN's runtime-compiled engines need",
            fix="lower the program on Linux",
        )
    if not null_driver().is_file():
        raise LibraryError(
            "the null driver is missing",
            expected=str(null_driver()),
            why="this installation of jax_cudnn has no compiled libraries",
            fix="install jax-cudnn from a wheel, or build it: pip install .",
        )
    if importlib.util.find_spec("cudnn") is None:
        raise LibraryError(
            "the Python frontend of cuDNN is not installed",
            expected="the module `cudnn` of nvidia-cudnn-frontend",
            fix="pip install 'nvidia-cudnn-frontend>=1.28', or all that planning needs: "
            + install("cuda12", "cuda13"),
        )


def python() -> str:
    """The interpreter for the worker; LibraryError for an embedded Python, which has none."""
    executable = sys.executable or ""
    if "python" not in Path(executable).name.lower() or getattr(sys, "frozen", False):
        raise LibraryError(
            "planning without a GPU needs a Python interpreter",
            expected="sys.executable to be a Python interpreter",
            got=repr(executable),
            why="planning runs in a subprocess, and this Python is embedded in another program",
            fix="set sys.executable to the Python interpreter of this environment",
        )
    return executable


def variables() -> dict[str, str]:
    """The worker's environment: no GPU, this process's ``sys.path``, CUDA's wheels."""
    # The same order as in the frontend: the user's LD_LIBRARY_PATH, then the wheels.
    libraries = [path for path in (os.environ.get("LD_LIBRARY_PATH"), *wheel_folders()) if path]
    paths = [os.path.abspath(path) for path in sys.path if os.pathsep not in path]
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def wheel_folders() -> list[str]:
    """``nvidia/<library>/lib`` (CUDA 12's wheels) and ``nvidia/cu13/lib`` (CUDA 13's).

    cuDNN's libraries have an RPATH to their neighbours; this is for wheels in several places.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    return [str(path) for root in roots or () for path in sorted(Path(root).glob("*/lib"))]
