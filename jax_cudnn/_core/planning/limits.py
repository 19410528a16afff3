"""Graphs that are never sent to cuDNN: it would refuse them, or accept and compute them wrongly.

The second kind was found by running every pattern on an H200 with cuDNN 9.19 and comparing with
float64 (``tests/gpu/test_broadcasts_on_the_gpu.py`` runs all that pass these rules):

- After a matmul every broadcast is correct. After fprop and dgrad those of (1, C, 1, 1),
  (N, 1, H, W) and (1, 1, 1, 1) are; after wgrad only that of (1, 1, 1, 1). Others are read out of
  bounds.
- Without a convolution or matmul, operations of two operands broadcast as after fprop; those of
  three (a selection) and those of rank three take scalars only. Values computed in the graph
  are not broadcast.

cuDNN also accepts graphs of which it computes only a part, leaving the rest unwritten (found with
random graphs): see ``structure.py``.
"""

from __future__ import annotations

from ..graph import layout
from ..graph.dims import Shape
from ..graph.merging import is_split
from ..graph.planned import ANY, NUMBERS_ONLY, ROWS_AND_CHANNELS
from ..graph.spec import Call, GraphSpec
from . import structure

_MERGED = (
    "cuDNN sees the dimensions of its batch, rows, columns and sum as one each, and those of some "
    "tensor in this graph do not merge so (some are broadcast, or not contiguous)"
)
FLOAT64 = "cuDNN has no engine for float64"


def known_reasons(spec: GraphSpec) -> dict[str, str]:
    """Why this graph is not planned, by operation; empty if cuDNN may plan it."""
    found: dict[str, str] = {}
    if spec.is_empty:
        found["shape"] = "a tensor has no elements (under jit XLA runs such a graph)"
    if spec.has_float64:
        found["dtype"] = FLOAT64
    found |= {call.name: call.node.requires for call in spec.calls if call.node.leftover}
    found |= {c.name: _MERGED for c in spec.calls if is_split(c.node)}
    if found:
        return found
    found |= structure.mixed_ranks(spec) or _no_matrices(spec)
    if found:
        return found  # what follows is about graphs that have a layout
    found |= _misplaced_views(spec)
    if any(call.node.merges for call in spec.calls) and layout.merged(spec) is None:
        found["order"] = "its tensors have different memory orders"
    anchors = [call.node for call in spec.calls if call.node.anchor]
    if not anchors:
        found |= _small_intermediates(spec)
    for call in spec.calls:
        tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        kind = anchors[0].broadcasts_around if anchors else _alone(spec, call)
        reason = call.node.refuses(tensors, spec) or _broadcast(spec, call, kind)
        if reason is not None:
            found[call.name] = reason
    return found or structure.reasons(spec)


def _no_matrices(spec: GraphSpec) -> dict[str, str]:
    """Why cuDNN cannot see the tensors around a matmul as a batch of matrices."""
    among = [call.name for call in spec.calls if call.node.matrices]
    shapes = {len(tensor.shape) for tensor in spec.tensors}
    if not among or shapes == {3}:
        return {}
    if not layout.has_matrices(spec):
        return {
            call.name: f"it is in a plan with {among[0]}, which has several batch dimensions"
            for call in spec.calls
            if not (call.node.matrices or call.node.ports.is_elementwise)
        }
    return {
        tensor.name: "cuDNN sees all leading dimensions of a matrix as one, and those of "
        f"{list(tensor.shape)} cannot be merged (some are broadcast, or not contiguous)"
        for tensor in spec.tensors
        if layout.as_matrices(spec, tensor) is None
    }


def _alone(spec: GraphSpec, call: Call) -> str:
    """The broadcasts that an operation may use in a graph without convolution and matmul."""
    rank = len(layout.view(spec, spec.tensor(call.outputs[0][1]))[0])
    return NUMBERS_ONLY if len(call.inputs) > 2 or rank == 3 else ROWS_AND_CHANNELS


def _broadcast(spec: GraphSpec, call: Call, kind: str) -> str | None:
    """Why an elementwise operation cannot broadcast its operands like this, or None."""
    if kind == ANY or not call.node.ports.is_elementwise or len(call.inputs) < 2:
        return None
    operands = [spec.tensor(name) for _, name in call.inputs]
    arrays = [layout.view(spec, t)[0] for t in operands if t.value is None]
    out = layout.view(spec, spec.tensor(call.outputs[0][1]))[0]
    allowed = _patterns(out, kind)
    wrong = [list(dims) for dims in arrays if dims != out and list(dims) not in allowed]
    if not wrong and out in arrays:
        return None
    return (
        f"broadcasting {' and '.join(map(str, wrong or map(list, arrays)))} to {list(out)} is "
        f"not supported: next to a full operand cuDNN takes "
        f"{', '.join(map(str, allowed)) or 'Python scalars'}"
    )


def _patterns(out: Shape, kind: str) -> list[list[int]]:
    n, c, *spatial = out
    ones = [1] * len(spatial)
    rows_and_channels = [[1, c, *ones], [n, 1, *spatial]] if kind == ROWS_AND_CHANNELS else []
    return [] if kind == NUMBERS_ONLY else [*rows_and_channels, [1, 1, *ones]]


def _small_intermediates(spec: GraphSpec) -> dict[str, str]:
    """Values computed in the graph with a smaller shape, and then broadcast.

    Measured on an H200 with cuDNN 9.19: without a convolution or matmul in the graph cuDNN reads
    them out of bounds.
    """
    made = {name for call in spec.calls for _, name in call.outputs}
    found = {}
    for call in spec.calls:
        if len(call.inputs) < 2 or not call.node.ports.is_elementwise:
            continue  # nothing is broadcast
        out = spec.tensor(call.outputs[0][1]).shape
        for port, name in call.inputs:
            if name in made and spec.tensor(name).shape != out:
                found[call.name] = (
                    f"{port} is computed in the graph with shape {list(spec.tensor(name).shape)} "
                    f"and then broadcast to {list(out)}: compute it before the call"
                )
    return found


def _misplaced_views(spec: GraphSpec) -> dict[str, str]:
    """Slices of another tensor's memory that a plan would have to copy."""
    found = {}
    for call in spec.calls:
        source, out = (spec.tensor(ports[0][1]) for ports in (call.inputs, call.outputs))
        if call.node.view_strides(*layout.view(spec, source)) is None:
            continue
        if source.name not in spec.inputs:
            found[call.name] = (
                f"it is a slice of {source.name}, which is not an operand of the graph "
                f"({call.node.requires})"
            )
        elif layout.view_strides(spec, out) is None:
            found[call.name] = (
                "its result leaves the graph or has its own layout, and so needs a copy "
                f"({call.node.requires})"
            )
    return found
