"""Public names that are loaded when they are asked for: importing the package does without."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .errors import LibraryAttributeError, LibraryImportError, rebuild

_PACKAGE = __name__.partition(".")[0]
HOMES = {
    "Candidate": "_core.planning.candidates",
    "Candidates": "_core.planning.candidates",
    "Explanation": "_core.planning.explanation",
    "Graph": "interop.wrapper",
    "Plan": "_core.planning.plan",
    "PlannedSegment": "_core.planning.plan",
    "Profile": "deviceless.profiles",
    "Support": "_core.planning.support_value",
    "bisect": "_core.inspection.bisect",
    "configure": "_core.settings",
    "from_pygraph": "interop.pygraph",
    "graph_cache": "interop.factory",
    "plan": "_core.planning.support",
    "plans": "_core.planning.support",
    "support": "_core.planning.support",
    "target": "_core.context",
    "warmup": "_core.planning.warmup",
}
"""The module of each."""
ROOMS = ("flax",)
"""Public rooms that need what is not always installed."""


def __getattr__(name: str) -> Any:
    """The package's ``__getattr__`` (PEP 562)."""
    if name in ROOMS:
        try:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        except LibraryImportError as error:  # so that hasattr is False; an import says it itself
            raise rebuild(LibraryAttributeError, vars(error)) from error
    if name not in HOMES:
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_PACKAGE}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[_PACKAGE]), *HOMES, *ROOMS})
