"""Public names that are loaded when they are asked for: importing the package does without."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_PACKAGE = __name__.partition(".")[0]
HOMES = {
    "Candidate": "_core.planning.candidates",
    "Candidates": "_core.planning.candidates",
    "Graph": "interop.wrapper",
    "from_pygraph": "interop.pygraph",
    "graph_cache": "interop.factory",
}
"""The module of each."""


def __getattr__(name: str) -> Any:
    """The package's ``__getattr__`` (PEP 562)."""
    if name not in HOMES:
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_PACKAGE}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[_PACKAGE]), *HOMES})
