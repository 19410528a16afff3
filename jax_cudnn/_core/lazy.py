"""Public names that are loaded on first use, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .errors import LibraryAttributeError, LibraryImportError, nearest, rebuild
from .package import version

_PACKAGE = __name__.partition(".")[0]
HOMES = {
    "accelerate": "acceleration.api",
    "Candidate": "_core.planning.build",
    "Candidates": "_core.candidates",
    "ExecutionPlan": "_core.planning.execution_plan",
    "Explanation": "_core.plans.plan",
    "Graph": "interop.wrapper",
    "Picture": "_core.plans.picture",
    "Plan": "_core.plans.plan",
    "PlannedSegment": "_core.planning.planned_graph",
    "Profile": "_core.planning.deviceless.profiles",
    "Report": "_core.plans.explain",
    "Support": "_core.plans.support",
    "bisect": "_core.inspection.bisect",
    "configure": "_core.settings",
    "explain": "_core.plans.explain",
    "from_pygraph": "interop.pygraph",
    "graph_cache": "interop.cache",
    "plan": "_core.plans.plans",
    "plans": "_core.plans.plans",
    "support": "_core.plans.support",
    "target": "_core.context",
    "tune": "_core.plans.tune",
    "warmup": "_core.plans.plans",
}
"""The module of each name."""
ROOMS = ("flax",)
"""Public subpackages with optional dependencies."""
_OF_FLAX = ("report", "Linear", "Conv", "LayerNorm", "MultiHeadAttention")
"""Names for which an error points to jax_cudnn.flax, which may not be imported."""


def __getattr__(name: str) -> Any:
    """The package's ``__getattr__`` (PEP 562)."""
    if name in ROOMS:
        try:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        except LibraryImportError as error:  # so that hasattr is False
            raise rebuild(LibraryAttributeError, vars(error)) from error
    if name == "__version__":
        return version()
    if name not in HOMES:
        hint = nearest(name, __dir__())
        for room in ("ops", *ROOMS):
            if name in getattr(sys.modules.get(f"{_PACKAGE}.{room}"), "__all__", _OF_FLAX):
                hint = f"did you mean {_PACKAGE}.{room}.{name}?"
                break
        hint = f": {hint}" if hint else ""
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(f"{_PACKAGE}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names alone: those imported by name, and those loaded on first use."""
    loaded = vars(sys.modules[_PACKAGE]).items()
    names = {
        name for name, value in loaded if getattr(value, "__module__", "").startswith(_PACKAGE)
    }
    return sorted({*names, *HOMES, *ROOMS, "ops"} - {"__dir__", "__getattr__"})
