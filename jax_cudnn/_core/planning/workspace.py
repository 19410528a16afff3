"""The limit on the workspace of a plan, and the alternative for a plan above it.

A workspace is XLA memory in use while the call runs. Most plans need little; some need memory that
grows with the square of a length (the deterministic backward of attention). Without a limit such
a program runs out of memory, at run time or while it is compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..graph.spec import GraphSpec

PART = 4  # a plan may take a quarter of the GPU's memory unless the options set a limit
_BY_DEFAULT = "max_workspace, by default a quarter of the GPU's memory"
_MORE = "bytes of workspace, more than"


@dataclass(frozen=True)
class Limit:
    """The largest workspace in bytes, and the source of this limit."""

    nbytes: int
    source: str = "max_workspace"

    def refusal(self, needed: int) -> str:
        """Why a plan is rejected."""
        return (
            f"needs {needed:,} {_MORE} the {self.nbytes:,} of {self.source}: raise it, or use a "
            "smaller batch or shorter sequences"
        )


def refusals(reasons: Mapping[str, str]) -> dict[str, str]:
    """The reasons that are about the workspace limit."""
    return {plan: reason for plan, reason in reasons.items() if _MORE in reason}


def limit(spec: GraphSpec, properties: str) -> Limit:
    """The limit for a graph on a GPU, from the properties in cuDNN's format (JSON)."""
    if spec.options.max_workspace is not None:
        return Limit(spec.options.max_workspace)
    return Limit(default(properties), _BY_DEFAULT)


def default(properties: str) -> int:
    """The limit without an option, equal for all GPUs of a model: their memory differs by less than
    a GiB. Plans depend on it, and so do cache keys."""
    part = int(json.loads(properties).get("totalGlobalMem", 0)) // PART
    return part >> 30 << 30 or part or sys.maxsize


def other_form(spec: GraphSpec, cudnn: int) -> GraphSpec | None:
    """The graph with the anchor's alternative node and engine, which computes the same results, if
    this version of cuDNN (``cudnnGetVersion()``) has it."""
    if spec.options.engine is not None:
        return None
    for i, call in enumerate(spec.calls):
        other = call.node.instead()
        if other is not None and cudnn >= other.cudnn:
            options = replace(
                spec.options,
                deterministic=False,  # the engine is, though no note says so
                engine=other.engine,
                knobs=tuple(sorted(other.knobs.items())),
            )
            calls = (*spec.calls[:i], replace(call, node=other.node), *spec.calls[i + 1 :])
            return replace(spec, calls=calls, options=options)
    return None
