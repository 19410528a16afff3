"""The memory layout of a graph's tensors, from which cuDNN's strides and XLA's layouts follow.

Arrays of rank four and five are channels-last: cuDNN's fused engines refuse the packed NCHW
order, and arrays that a model holds as NHWC reach such an operand through a transpose that XLA
turns into a bitcast. Arrays of lower rank are row-major, or channels-last in a graph with a
convolution. A tensor that states its ``order`` keeps it.

Around a node that normalizes rows all tensors are row-major, and cuDNN sees a matrix if the rows
are all leading dimensions: most engines exist for this form (``Node.merges``).

Around a matmul tensors are row-major, and cuDNN sees a batch of matrices for any number of batch
dimensions (``Node.matrices``): results of rank three are known to be correct.

cuDNN sees graphs of only pointwise operations and reductions with rank four, whatever their rank:
the engines for such graphs require it (cuDNN 9.19 accepts rank three, and then broadcasts a
(1, 1, N) operand wrongly).
"""

from __future__ import annotations

import math

from .dims import Shape, packed_strides
from .dtypes import WORDS
from .planned import View
from .spec import GraphSpec, Tensor


def major_to_minor(spec: GraphSpec, tensor: Tensor) -> tuple[int, ...]:
    """The order of a tensor's dimensions in memory, slowest first.

    A stated order that differs from the graph's default only in the positions of dimensions of
    size 1 is replaced by the default: cuDNN uses the strides of such dimensions, too (measured
    on an H200 with cuDNN 9.19: it wrote a wrong array for a 3-D weight gradient).
    """
    if _is_row_major(spec) or has_matrices(spec):
        default = tuple(range(len(tensor.shape)))
    else:
        default = _default_order(len(tensor.shape), _is_channels_last(spec))
    return default if lies_so(tensor, default, default) else tensor.order or default


def lies_so(tensor: Tensor, wanted: tuple[int, ...], default: tuple[int, ...]) -> bool:
    """Whether a tensor's memory order, by default ``default``, equals ``wanted``, except for the
    positions of dimensions of size 1."""
    own, other = (
        [axis for axis in axes if tensor.shape[axis] != 1]
        for axes in (tensor.order or default, wanted)
    )
    return own == other


def view(spec: GraphSpec, tensor: Tensor) -> tuple[Shape, list[int]]:
    """The dims and element strides under which cuDNN sees a tensor.

    Row-major (a, b, c) in a pointwise graph is the channels-last tensor of N = a, H = b, W = 1
    and C = c; the images of a one-dimensional convolution have H = 1.
    """
    shape = tensor.shape
    if tensor.dtype == WORDS:
        shape = (*shape[:-1], shape[-1] // 2)
    if _has_free_rank(spec):
        if _is_flat(spec):
            shape = (1, math.prod(shape), 1, 1)
        elif len(shape) < 4:
            n, *h, c = (1,) * (2 - len(shape)) + shape
            shape = (n, c, *(h or [1]), 1)
        return shape, packed_strides(shape, _default_order(len(shape), False))
    if _merges(spec):
        groups = merged(spec) or tuple((axis,) for axis in range(len(shape)))
        shape = tuple(math.prod(shape[axis] for axis in group) for group in groups)
        return shape, packed_strides(shape, tuple(range(len(shape))))
    if len(shape) != 3 and has_matrices(spec) and (shown := as_matrices(spec, tensor)):
        return shown
    order = major_to_minor(spec, tensor)
    missing = max((call.node.least_rank for call in spec.calls), default=0) - len(shape)
    if missing > 0:
        shape = (*shape[:2], *(1,) * missing, *shape[2:])
        old = [axis + missing if axis >= 2 else axis for axis in order]
        order = (old[0], *range(2, 2 + missing), *old[1:])
    return shape, view_strides(spec, tensor) or packed_strides(shape, order)


def view_strides(spec: GraphSpec, tensor: Tensor) -> list[int] | None:
    """The strides of an intermediate that is a view of another tensor (a slice), or None."""
    if tensor.name in spec.outputs or tensor.order is not None:
        return None
    for call in spec.calls:
        if tensor.name == call.outputs[0][1]:
            return call.node.view_strides(*view(spec, spec.tensor(call.inputs[0][1])))
    return None


def views(spec: GraphSpec, tensor: Tensor) -> tuple[View, ...]:
    """The tensors that cuDNN sees for one whose node overrides :func:`view`."""
    for call in spec.calls:
        ports = (*call.inputs, *call.outputs)
        for port, name in ports:
            if name == tensor.name:
                shown = call.node.views(port, {port: spec.tensor(name) for port, name in ports})
                if shown:
                    return tuple(shown)
    return _apart(spec, tensor)


def shown(spec: GraphSpec, tensor: Tensor) -> tuple[View, ...]:
    """The tensors that cuDNN sees for a tensor."""
    dims, strides = view(spec, tensor)
    return views(spec, tensor) or (View("", dims, tuple(strides)),)


def _apart(spec: GraphSpec, tensor: Tensor) -> tuple[View, ...]:
    """A separate tensor for each port at which a single call reads the same operand."""
    readers = [c for c in spec.calls if any(name == tensor.name for _, name in c.inputs)]
    if tensor.name not in spec.inputs or len(readers) != 1 or not readers[0].node.apart:
        return ()
    ports = [port for port, name in readers[0].inputs if name == tensor.name]
    dims, strides = view(spec, tensor)
    return tuple(View(port, dims, tuple(strides)) for port in ports) if len(ports) > 1 else ()


def initial(spec: GraphSpec, tensor: Tensor) -> float | None:
    """The value of the elements of a result that a plan does not write, if there are any."""
    for call in spec.calls:
        for port, name in call.outputs:
            if name == tensor.name:
                return call.node.initial.get(port)
    return None


def merged(spec: GraphSpec) -> tuple[tuple[int, ...], ...] | None:
    """The dimensions merged into each of cuDNN's dimensions, slowest first, if the graph's anchor
    merges them; None if its tensors differ in memory order or rank."""
    arrays = [t for t in spec.tensors if t.value is None]
    if len({len(t.shape) for t in arrays}) > 1:
        return None
    largest = max(arrays, key=lambda t: math.prod(t.shape))
    order = major_to_minor(spec, largest)
    for t in arrays:
        own = [axis for axis in major_to_minor(spec, t) if t.shape[axis] > 1]
        if own != [axis for axis in order if t.shape[axis] > 1]:
            return None
    sizes = [max(t.shape[axis] for t in arrays) for axis in range(len(order))]
    begins = {
        axis
        for call in spec.calls
        for axis in call.node.begins(
            {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}, order
        )
    }
    if not all(call.node.merges or call.node.ports.is_elementwise for call in spec.calls):
        begins |= {*order}  # attributes that name dimensions, such as a slice's
    groups: list[list[int]] = []
    for axis in order:
        whole = [axis, *(groups[-1] if groups else [])]
        if (
            groups
            and axis not in begins
            and all(
                all(t.shape[i] == sizes[i] for i in whole) or all(t.shape[i] == 1 for i in whole)
                for t in arrays
            )
        ):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) == 1:  # one row
        groups.insert(0, [])
    return tuple(map(tuple, groups))


def as_matrices(spec: GraphSpec, tensor: Tensor) -> tuple[Shape, list[int]] | None:
    """Dims and strides of a tensor as a batch of matrices; None if its batch dimensions do not form
    one in memory, or are neither those of the graph nor all 1. All tensors have the same rank."""
    lead = len(tensor.shape) - 2
    batch, whole = tensor.shape[:lead], zip(*(t.shape[:lead] for t in spec.tensors), strict=True)
    order = [axis for axis in major_to_minor(spec, tensor) if tensor.shape[axis] > 1]
    own = [axis for axis in range(lead) if tensor.shape[axis] > 1]
    first = order.index(own[0]) if own else 0
    if batch not in (tuple(map(max, whole)), (1,) * lead):
        return None
    if order[first : first + len(own)] != own:
        return None
    shape = (math.prod(batch), *tensor.shape[lead:])
    shown = iter(dict.fromkeys(max(axis - lead + 1, 0) for axis in order))
    order = tuple(axis if shape[axis] == 1 else next(shown) for axis in range(3))
    return shape, packed_strides(shape, order)


def has_matrices(spec: GraphSpec) -> bool:
    """Whether all nodes of a graph treat the last two dimensions of every tensor as a matrix."""
    nodes = [call.node for call in spec.calls]
    return any(node.matrices for node in nodes) and all(
        node.matrices or node.ports.is_elementwise for node in nodes
    )


def _merges(spec: GraphSpec) -> bool:
    return any(call.node.merges for call in spec.calls)


def _is_row_major(spec: GraphSpec) -> bool:
    return any(call.node.merges or call.node.row_major for call in spec.calls)


def _default_order(rank: int, channels_last: bool) -> tuple[int, ...]:
    if rank >= 4 or (channels_last and rank == 3):
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


def _is_channels_last(spec: GraphSpec) -> bool:
    return any(call.node.channels_last for call in spec.calls)


def _has_free_rank(spec: GraphSpec) -> bool:
    """Whether a graph computes the same under other dims: it has only pointwise operations and
    reductions, in the memory order of those dims."""
    return all(call.node.ports.is_elementwise for call in spec.calls) and all(
        tensor.order is None for tensor in spec.tensors
    )


def _is_flat(spec: GraphSpec) -> bool:
    """Whether cuDNN sees a pointwise graph as vectors: if all shapes are equal and have a single
    channel, or more than five dimensions, which no engine takes."""
    shapes = {tensor.shape for tensor in spec.tensors if tensor.value is None}
    if len(shapes) != 1:
        return False
    (shape,) = shapes
    return not shape or len(shape) > 5 or shape[_default_order(len(shape), False)[-1]] == 1
