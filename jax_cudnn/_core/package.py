"""This package's installation: version, binaries, and how to install extras."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path


def install(*extras: str) -> str:
    """The command that installs this package with one of some extras."""
    first, *others = (f"[{extra}]" for extra in extras)
    also = f" (or {', '.join(others)})" if others else ""
    return f"pip install 'jax-cudnn{first}'{also}; in a clone: pip install '.{first}'"


def version() -> str:
    """This package's version as installed; a valid version also for a bare source tree."""
    try:
        return importlib.metadata.version("jax-cudnn")
    except importlib.metadata.PackageNotFoundError:
        return "0+not.installed"


@functools.cache
def fingerprint() -> str:
    """A digest of the code that plans graphs: any change to it invalidates cached plans."""
    package = Path(__file__).parent.parent
    sources = sorted([*package.glob("_core/**/*.py"), *package.glob("ops/**/*.py")])
    digest = hashlib.sha256()
    for source in sources:
        name = source.relative_to(package).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def packaged_library(name: str) -> Path:
    """The path of a library in ``_lib``: next to the package, or in the installed distribution
    when the package is imported from a source tree (a clone, an editable install).
    """
    package = (__package__ or "").partition(".")[0]
    roots = [Path(root) for root in sys.modules[package].__path__]
    try:
        installed = importlib.metadata.distribution("jax-cudnn").locate_file(package)
        roots.append(Path(str(installed)))
    except importlib.metadata.PackageNotFoundError:
        pass
    paths = [root / "_lib" / name for root in roots]
    return next((path for path in paths if path.exists()), paths[0])
