"""How a graph's tensors lie in memory: cuDNN's strides and XLA's layouts from one choice.

Convolutions, and pointwise graphs of rank four and five, are channels-last: cuDNN's fused
engines refuse the packed NCHW order, and arrays that a model holds as NHWC reach such an
operand through a transpose that XLA turns into a bitcast. Everything else is row-major.
"""

from __future__ import annotations

from .dims import Shape


def major_to_minor(rank: int) -> tuple[int, ...]:
    """The order of dimensions in memory, slowest first."""
    if rank >= 4:
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


def strides(shape: Shape) -> list[int]:
    """Element strides of a packed tensor in the order of :func:`major_to_minor`."""
    result, step = [0] * len(shape), 1
    for axis in reversed(major_to_minor(len(shape))):
        result[axis] = step
        step *= shape[axis]
    return result
