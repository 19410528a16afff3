"""How much workspace a plan may take, and what is tried where it takes more.

A workspace is memory of XLA's while the call runs. Most plans take little; some take memory that
grows with the square of a length (attention's deterministic backward). Without a limit such a
program fails when it runs, or while it is compiled, for lack of memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..graph.spec import GraphSpec

PART = 4  # of the GPU's memory that a plan may take where the options do not say how much
_BY_DEFAULT = "max_workspace, by default a quarter of the GPU's memory"
_MORE = "bytes of workspace, more than"


@dataclass(frozen=True)
class Limit:
    """The bytes that a workspace may have, and what says so."""

    nbytes: int
    source: str = "max_workspace"

    def refusal(self, needed: int) -> str:
        """Why a plan is not taken."""
        return (
            f"needs {needed:,} {_MORE} the {self.nbytes:,} of {self.source}: allow more there, or "
            "compute fewer or shorter examples at a time"
        )


def refusals(reasons: Mapping[str, str]) -> dict[str, str]:
    """Those of several reasons that are a limit's."""
    return {plan: reason for plan, reason in reasons.items() if _MORE in reason}


def limit(spec: GraphSpec, properties: str) -> Limit:
    """The limit for a graph on a GPU, by its properties as cuDNN writes them (JSON)."""
    if spec.options.max_workspace is not None:
        return Limit(spec.options.max_workspace)
    return Limit(default(properties), _BY_DEFAULT)


def default(properties: str) -> int:
    """The bytes where options name none, the same for all GPUs of a model: these differ by less
    than a GiB. A plan depends on it, and so do the keys of what is known of a graph."""
    part = int(json.loads(properties).get("totalGlobalMem", 0)) // PART
    return part >> 30 << 30 or part or sys.maxsize


def other_form(spec: GraphSpec, cudnn: int) -> GraphSpec | None:
    """The same results from the other node that the anchor names, with an engine of its own, if a
    version of cuDNN (``cudnnGetVersion()``) has that."""
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
            return replace(spec, calls=calls, options=options, _cache={})
    return None
