"""cuDNN's Python frontend, loaded on demand and bound to the cuDNN that JAX has loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from ..errors import LibraryError
from ..package import install
from .deviceless.client import wheel_folders
from .single_flight import SingleFlight

OLDEST_FRONTEND = (1, 28)
OLDEST_CUDNN = 91900
INSTALL = install("cuda12", "cuda13")
_loaded: SingleFlight[Any] = SingleFlight()  # its import is not thread-safe: it loads a library


def load() -> Any:
    """The module ``cudnn``; LibraryError when it or cuDNN is missing, too old, or mixed."""
    return _loaded.get("cudnn", _load)


def _load() -> Any:
    if importlib.util.find_spec("cudnn") is None:
        raise LibraryError(
            "nvidia-cudnn-frontend is not installed",
            why="it builds cuDNN plans",
            fix=f"pip install 'nvidia-cudnn-frontend>=1.28', or all that planning needs: {INSTALL}",
        )
    loaded = _loaded_library()
    try:
        import cudnn  # pyright: ignore[reportMissingImports]

        # Before it is used: an older one may lack what the lines below need.
        check_frontend(cudnn.__version__, cudnn.__file__)
        if loaded is not None:
            # The frontend may have opened another copy (LD_LIBRARY_PATH comes first for it).
            # Plans must come from the copy that runs them: the one JAX has loaded.
            cudnn._pybind_module._set_dlhandle_cudnn(loaded._handle)
        version = cudnn.backend_version()
    except LibraryError:
        raise
    except Exception as error:
        raise LibraryError(
            "cuDNN or its frontend cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            why="libcudnn.so.9 is searched in LD_LIBRARY_PATH, then in nvidia/cudnn/lib of "
            "site-packages, then by the dynamic linker",
            fix=_repair(str(error).partition(": ")[0]),
        ) from error
    check_cudnn(version)
    if loaded is not None and loaded.cudnnGetVersion() != version:
        raise LibraryError(
            "two copies of cuDNN of different versions are loaded",
            expected=f"{version_text(loaded.cudnnGetVersion())}, as loaded by JAX",
            got=f"{version_text(version)} in the cuDNN frontend",
            why="loaded copies: " + ", ".join(loaded_paths()),
            fix="keep one copy: unset LD_LIBRARY_PATH, or uninstall the other one",
        )
    return cudnn


def _repair(path: str) -> str:
    """What to do about a library that cannot be loaded."""
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folder, own = os.path.dirname(path), wheel_folders()  # the planning worker searches these, too
    if folder in [each.rstrip("/") for each in searched if each and each not in own]:
        return f"repair or delete {path}, or remove {folder} from LD_LIBRARY_PATH"
    return INSTALL


def check_frontend(version: str, path: str | None) -> None:
    """LibraryError for a frontend (``cudnn.__version__``) older than ``OLDEST_FRONTEND``."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_FRONTEND:
        oldest = ".".join(map(str, OLDEST_FRONTEND))
        fix = "pip install -U nvidia-cudnn-frontend; if that updates another copy, fix PYTHONPATH"
        raise _too_old("nvidia-cudnn-frontend", oldest, f"{version} from {path}", fix)


def check_cudnn(version: int) -> None:
    """LibraryError for a cuDNN (``cudnnGetVersion()``) older than ``OLDEST_CUDNN``."""
    if version < OLDEST_CUDNN:
        got = f"{version_text(version)} from {', '.join(loaded_paths())}"
        wheel = "pip install -U nvidia-cudnn-cu12 (or -cu13)"
        fix = f"{wheel}, and keep LD_LIBRARY_PATH free of other copies"
        raise _too_old("cuDNN", version_text(OLDEST_CUDNN), got, fix)


def _too_old(what: str, oldest: str, got: str, fix: str) -> LibraryError:
    return LibraryError(f"{what} is too old", expected=f">= {oldest}", got=got, fix=fix)


def versions() -> tuple[str, str]:
    """The versions of cuDNN and of its frontend that plan in this process."""
    return version_text(load().backend_version()), load().__version__


def identity() -> dict[str, str]:
    """The versions on which a plan depends, by name."""
    cudnn, frontend = versions()
    library = _loaded_library()
    runtime = library.cudnnGetCudartVersion() if library is not None else 0
    return {"cuDNN": cudnn, "CUDA runtime": str(runtime), "nvidia-cudnn-frontend": frontend}


def version_text(version: int) -> str:
    """91900 -> '9.19.0'."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _loaded_library() -> ctypes.CDLL | None:
    """The libcudnn.so.9 that this process has loaded already (by JAX, when it has a GPU)."""
    try:
        library = ctypes.CDLL("libcudnn.so.9", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (AttributeError, OSError):  # another system, or it is not loaded
        return None
    library.cudnnGetVersion.restype = library.cudnnGetCudartVersion.restype = ctypes.c_size_t
    return library


def loaded_paths() -> list[str]:
    """Real paths of all copies of libcudnn.so in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({*re.findall(r"/.*libcudnn\.so.*", maps)})
