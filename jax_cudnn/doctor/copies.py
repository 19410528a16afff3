"""Every copy of libcudnn.so.9 that a process on this machine could load, and its origin."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .._core.planning.deviceless import environment
from . import process

SONAME = "libcudnn.so.9"
LIBRARY_PATH, WHEEL = "LD_LIBRARY_PATH", "nvidia-cudnn package"

_FOLDERS = (
    ("system folder", "/usr/lib*"),
    ("system folder", "/usr/lib/*-linux-gnu"),
    ("system folder", "/usr/local/lib*"),
    ("CUDA toolkit", "/usr/local/cuda*/lib*"),
    ("CUDA toolkit", "/usr/local/cuda*/targets/*/lib"),
)

_ASK = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.cudnnGetVersion.restype = ctypes.c_size_t
print(json.dumps({"stage": "version", "version": library.cudnnGetVersion()}))
"""


@dataclass(frozen=True)
class Copy:
    """One file, the places in which it was found, and its version.

    ``version`` is ``cudnnGetVersion()``, or None for a file that cannot be loaded; ``broken`` then
    says why.
    """

    path: str
    found_by: tuple[str, ...]
    version: int | None
    broken: str = ""

    @property
    def by_name(self) -> bool:
        """Whether JAX or the frontend may load it by path, before the dynamic linker's search."""
        return LIBRARY_PATH in self.found_by or WHEEL in self.found_by


def find(variables: Mapping[str, str]) -> tuple[Copy, ...]:
    """All copies, in the order of the frontend's search; the same file is listed once."""
    found: dict[str, list[str]] = {}
    for how, path in _places(variables):
        if os.path.exists(path):
            ways = found.setdefault(os.path.realpath(path), [])
            if how not in ways:
                ways.append(how)
    return tuple(Copy(path, tuple(ways), *_version(path)) for path, ways in found.items())


def _places(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for folder in filter(None, variables.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        # Also without a version: the frontend accepts such a link.
        yield from ((LIBRARY_PATH, os.path.join(folder, n)) for n in (SONAME, "libcudnn.so"))
    site = [os.path.join(sysconfig.get_path("purelib"), "nvidia", "cudnn", "lib")]
    yield from ((WHEEL, os.path.join(f, SONAME)) for f in [*site, *environment.wheel_folders()])
    yield from (("dynamic linker's cache", path) for path in _linker_cache())
    prefixes = {variables.get("CONDA_PREFIX"), sys.prefix} - {None}
    yield from (("environment", f"{prefix}/lib/{SONAME}") for prefix in sorted(map(str, prefixes)))
    for how, pattern in _FOLDERS:
        yield from ((how, path) for path in sorted(glob.glob(f"{pattern}/{SONAME}")))


def _linker_cache() -> list[str]:
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/sbin", "/usr/sbin"])
    ldconfig = shutil.which("ldconfig", path=search)
    if ldconfig is None:
        return []
    try:
        done = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.split() for line in done.stdout.splitlines())
    return [words[-1] for words in lines if words and words[0] == SONAME]


def _version(path: str) -> tuple[int | None, str]:
    """Queries it in a separate process, because loading a broken library can crash."""
    command = [environment.python(), "-I", "-S", "-c", _ASK, path]
    asked = process.run(command, os.environ, 60, "version")
    report = asked.reports.get("version")
    if report is not None:
        return report["version"], ""
    lines = asked.tail.splitlines() or ["it printed nothing"]
    return None, f"{asked.ended}: {lines[-1]}"
