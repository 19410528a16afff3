"""Warns when a function is planned for more and more shapes, as for sequences of every length."""

from __future__ import annotations

import logging
import threading

from ..graph.dims import Shape
from ..graph.spec import GraphSpec

log = logging.getLogger("jax_cudnn")

_MANY = 64  # shapes of one function; the convolutions of a large model have half as many

_Function = tuple[str, tuple[str, ...]]  # its name and its operations: nodes hold shapes, too
_shapes: dict[_Function, set[tuple[Shape, ...]]] = {}
_lock = threading.Lock()


def count(spec: GraphSpec, name: str) -> None:
    """Counts the shapes of a function's operands; warns at 64 and at each doubling."""
    shapes = tuple(tensor.shape for tensor in spec.input_tensors)
    with _lock:
        known = _shapes.setdefault((name, tuple(call.node.method for call in spec.calls)), set())
        if shapes in known:
            return
        known.add(shapes)
        found = len(known)
    if found >= _MANY and found & (found - 1) == 0:
        log.warning(
            "%s was planned for %d different shapes, most recently %s: each shape needs its own "
            "plan and compilation; use fewer shapes, for example by padding sequences with "
            "jax_cudnn.ops.pad_to_bucket",
            name,
            found,
            ", ".join(map(str, spec.input_tensors)),
        )


def clear() -> None:
    """Forget all shapes (tests)."""
    with _lock:
        _shapes.clear()
