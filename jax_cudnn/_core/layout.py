"""How a graph's tensors lie in memory: cuDNN's dims and strides and XLA's layouts from one choice.

Arrays of rank four and five are channels-last: cuDNN's fused engines refuse the packed NCHW
order, and arrays that a model holds as NHWC reach such an operand through a transpose that XLA
turns into a bitcast. Arrays of lower rank are row-major.

A graph of pointwise operations and reductions alone is shown to cuDNN with rank four, whatever
its own rank: the engines for such graphs take nothing else (cuDNN 9.19 accepts rank three, and
then broadcasts a (1, 1, N) operand wrongly).
"""

from __future__ import annotations

import math

from .dims import Shape
from .spec import GraphSpec


def major_to_minor(rank: int) -> tuple[int, ...]:
    """The order of an array's dimensions in memory, slowest first."""
    if rank >= 4:
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


def cudnn_dims(spec: GraphSpec, shape: Shape) -> Shape:
    """The dims under which cuDNN sees an array: its own, or NCHW dims for the same memory.

    Row-major (a, b, c) is the channels-last tensor of N = a, H = b, W = 1 and C = c.
    """
    if any(call.node.anchor for call in spec.calls):
        return shape
    if _is_flat(spec):
        return 1, math.prod(shape), 1, 1
    if len(shape) >= 4:
        return shape
    n, h, c = (1,) * (3 - len(shape)) + shape if len(shape) != 2 else (shape[0], 1, shape[1])
    return n, c, h, 1


def _is_flat(spec: GraphSpec) -> bool:
    """Whether a pointwise graph is shown as vectors: where it has one shape throughout, and that
    has a single channel or more than five dimensions, which no engine takes."""
    shapes = {tensor.shape for tensor in spec.tensors if tensor.value is None}
    if len(shapes) != 1:
        return False
    (shape,) = shapes
    return not shape or len(shape) > 5 or shape[major_to_minor(len(shape))[-1]] == 1


def strides(dims: Shape) -> list[int]:
    """Element strides of a packed tensor in the order of :func:`major_to_minor`."""
    result, step = [0] * len(dims), 1
    for axis in reversed(major_to_minor(len(dims))):
        result[axis] = step
        step *= dims[axis]
    return result
