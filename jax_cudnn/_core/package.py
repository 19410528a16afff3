"""Where the package's own binaries lie."""

from __future__ import annotations

import importlib
from pathlib import Path


def packaged_library(name: str) -> Path:
    """The path of a library in ``_lib``, also for an editable install, where the package is
    spread over the source tree and site-packages."""
    roots = [Path(root) for root in importlib.import_module(__name__.partition(".")[0]).__path__]
    paths = [root / "_lib" / name for root in roots]
    return next((path for path in paths if path.exists()), paths[0])
