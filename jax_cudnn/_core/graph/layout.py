"""The memory layout of a graph's tensors, from which cuDNN's strides and XLA's layouts follow.

Arrays of rank four and five are channels-last: cuDNN's fused engines refuse the packed NCHW
order, and arrays that a model holds as NHWC reach such an operand through a transpose that XLA
turns into a bitcast. Arrays of lower rank are row-major, or channels-last in a graph with a
convolution. A tensor that states its ``order`` keeps it.

Around a node that normalizes rows all tensors are row-major, and cuDNN sees a matrix if the rows
are all leading dimensions: most engines exist for this form (MERGED).

Around a matmul tensors are row-major, and cuDNN sees a batch of matrices for any number of batch
dimensions (MATRICES): results of rank three are known to be correct.

cuDNN sees graphs of only pointwise operations and reductions with rank four, whatever their rank:
the engines for such graphs require it (cuDNN 9.19 accepts rank three, and then broadcasts a
(1, 1, N) operand wrongly).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from functools import cached_property

from .dims import Shape
from .dtypes import WORDS
from .planned import CHANNELS_LAST, MATRICES, MERGED, ROW_MAJOR, Planned, Seen, View
from .spec import GraphSpec, Tensor

_AS_IT_IS = Seen()
_LEAST_RANK = 4  # around CHANNELS_LAST nodes


class Layout:
    """That of a graph's tensors, by their names (:func:`layout`)."""

    def __init__(self, spec: GraphSpec) -> None:
        nodes = [call.node for call in spec.calls]
        kinds = {node.anchor.order for node in nodes}
        self._spec = spec
        self.has_matrices = MATRICES in kinds and all(
            node.anchor.order == MATRICES or node.ports.is_elementwise for node in nodes
        )
        """Whether all nodes treat the last two dimensions of every tensor as a matrix."""
        self._merges = MERGED in kinds
        self._row_major = bool(kinds & {MERGED, ROW_MAJOR})
        self._channels_last = CHANNELS_LAST in kinds
        # It computes the same under other dims: it has only pointwise operations and reductions,
        # in the memory order of those dims.
        self._has_free_rank = all(node.ports.is_elementwise for node in nodes) and all(
            tensor.order is None for tensor in spec.tensors
        )
        self.orders = {tensor.name: self.order(tensor) for tensor in spec.tensors}

    def order(self, tensor: Tensor) -> tuple[int, ...]:
        """The order of a tensor's dimensions in memory, slowest first; ``orders`` has it by name.

        A stated order that differs from the graph's default only in the positions of dimensions of
        size 1 is replaced by the default: cuDNN uses the strides of such dimensions, too (measured
        on an H200 with cuDNN 9.19: it wrote a wrong array for a 3-D weight gradient).
        """
        default = tuple(range(len(tensor.shape)))
        if not (self._row_major or self.has_matrices):
            default = _default_order(len(default), self._channels_last)
        return default if lies_so(tensor, default, default) else tensor.order or default

    @cached_property
    def _common(self) -> tuple[int, ...]:
        """The order of the largest tensor."""
        arrays = [t for t in self._spec.tensors if t.literal is None]
        return self.orders[max(arrays, key=lambda t: math.prod(t.shape)).name]

    @cached_property
    def _seen(self) -> list[Seen]:
        """What each node says of its tensors."""
        return [
            call.node.layout(at, self._common)
            if type(call.node).layout is not Planned.layout
            else _AS_IT_IS
            for call, at in self._spec.at_ports
        ]

    @cached_property
    def views(self) -> dict[str, tuple[Shape, list[int]]]:
        """The dims and element strides under which cuDNN sees each tensor."""
        views = {tensor.name: self._view(tensor) for tensor in self._spec.tensors}
        for name, strides in {} if self._merges else self.slices.items():
            if name not in self._spec.outputs and self._spec.tensor(name).order is None:
                views[name] = views[name][0], strides
        return views

    def _view(self, tensor: Tensor) -> tuple[Shape, list[int]]:
        """Row-major (a, b, c) in a pointwise graph is the channels-last tensor of N = a, H = b,
        W = 1 and C = c; the images of a one-dimensional convolution have H = 1."""
        shape = tensor.shape
        if tensor.dtype == WORDS:
            shape = (*shape[:-1], shape[-1] // 2)
        if self._has_free_rank:
            if self._is_flat:
                shape = (1, math.prod(shape), 1, 1)
            elif len(shape) < 4:
                n, *h, c = (1,) * (2 - len(shape)) + shape
                shape = (n, c, *(h or [1]), 1)
            return shape, packed_strides(shape, _default_order(len(shape), False))
        if self._merges:
            groups = self.merged or tuple((axis,) for axis in range(len(shape)))
            shape = tuple(math.prod(shape[axis] for axis in group) for group in groups)
            return shape, packed_strides(shape, tuple(range(len(shape))))
        if len(shape) != 3 and self.has_matrices and (shown := self.matrices[tensor.name]):
            return shown
        order = self.orders[tensor.name]
        missing = _LEAST_RANK - len(shape)
        if missing > 0 and self._channels_last:
            shape = (*shape[:2], *(1,) * missing, *shape[2:])
            old = [axis + missing if axis >= 2 else axis for axis in order]
            order = (old[0], *range(2, 2 + missing), *old[1:])
        return shape, packed_strides(shape, order)

    @cached_property
    def slices(self) -> dict[str, list[int]]:
        """The strides of results that share the memory of another tensor if a plan permits it. A
        slice of a slice is never in a plan (:mod:`..planning.limits`)."""
        slices = {}
        for call, seen in zip(self._spec.calls, self._seen, strict=True):
            if seen.steps is not None:
                _, strides = self._view(self._spec.tensor(call.inputs[0][1]))
                added = len(strides) - len(seen.steps)  # dimensions of size 1, after the second
                steps = [*seen.steps[:2], *(1,) * added, *seen.steps[2:]]
                slices[call.outputs[0][1]] = [a * b for a, b in zip(strides, steps, strict=True)]
        return slices

    @cached_property
    def parts(self) -> dict[str, tuple[View, ...]]:
        """The tensors that cuDNN sees for one whose node overrides its view, or which a single call
        reads at several ports that must be separate."""
        parts: dict[str, tuple[View, ...]] = {}
        for (_, tensors), seen in zip(self._spec.at_ports, self._seen, strict=True):
            for port, tensor in tensors.items():
                if tensor.name not in parts and (views := seen.views.get(port)):
                    parts[tensor.name] = tuple(views)
        readers: dict[str, list[int]] = {}
        for i, call in enumerate(self._spec.calls):
            for name in {name for _, name in call.inputs}:
                readers.setdefault(name, []).append(i)
        for name in self._spec.inputs:
            own = readers.get(name, [])
            if name not in parts and len(own) == 1 and self._seen[own[0]].separate:
                ports = [port for port, n in self._spec.calls[own[0]].inputs if n == name]
                if len(ports) > 1:
                    dims, strides = self.views[name]
                    parts[name] = tuple(View(port, dims, tuple(strides)) for port in ports)
        return parts

    @cached_property
    def shown(self) -> dict[str, tuple[View, ...]]:
        """The tensors that cuDNN sees for each tensor."""
        views = self.views.items()
        return {
            name: (View("", dims, (*strides,)),) for name, (dims, strides) in views
        } | self.parts

    @cached_property
    def merged(self) -> tuple[tuple[int, ...], ...] | None:
        """The dimensions merged into each of cuDNN's dimensions, slowest first, if the graph's
        anchor merges them; None if its tensors differ in memory order or rank."""
        calls, arrays = self._spec.calls, [t for t in self._spec.tensors if t.literal is None]
        if len({len(t.shape) for t in arrays}) > 1:
            return None
        order = self._common
        for t in arrays:
            own = [axis for axis in self.orders[t.name] if t.shape[axis] > 1]
            if own != [axis for axis in order if t.shape[axis] > 1]:
                return None
        sizes = [max(t.shape[axis] for t in arrays) for axis in range(len(order))]
        begins = {axis for seen in self._seen for axis in seen.begins}
        if not all(
            call.node.anchor.order == MERGED or call.node.ports.is_elementwise for call in calls
        ):
            begins |= {*order}  # attributes that name dimensions, such as a slice's
        groups: list[list[int]] = []
        for axis in order:
            whole = [axis, *(groups[-1] if groups else [])]
            if (
                groups
                and axis not in begins
                and all(
                    all(t.shape[i] == sizes[i] for i in whole)
                    or all(t.shape[i] == 1 for i in whole)
                    for t in arrays
                )
            ):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if len(groups) == 1:  # one row
            groups.insert(0, [])
        return tuple(map(tuple, groups))

    @cached_property
    def matrices(self) -> dict[str, tuple[Shape, list[int]] | None]:
        """Dims and strides of each tensor as a batch of matrices; None if its batch dimensions do
        not form one in memory, or are neither those of the graph nor all 1. All tensors have the
        same rank."""
        return {tensor.name: self._as_matrices(tensor) for tensor in self._spec.tensors}

    def _as_matrices(self, tensor: Tensor) -> tuple[Shape, list[int]] | None:
        lead = len(tensor.shape) - 2
        batch = tensor.shape[:lead]
        whole = zip(*(t.shape[:lead] for t in self._spec.tensors), strict=True)
        order = [axis for axis in self.orders[tensor.name] if tensor.shape[axis] > 1]
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

    @cached_property
    def _is_flat(self) -> bool:
        """Whether cuDNN sees a pointwise graph as vectors: if all shapes are equal and have a
        single channel, or more than five dimensions, which no engine takes."""
        shapes = {tensor.shape for tensor in self._spec.tensors if tensor.literal is None}
        if len(shapes) != 1:
            return False
        (shape,) = shapes
        return not shape or len(shape) > 5 or shape[_default_order(len(shape), False)[-1]] == 1


def shared(
    tensors: Collection[Tensor], orders: Iterable[tuple[int, ...]], default: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Those memory orders in which all tensors lie, by default ``default``."""
    return [order for order in orders if all(lies_so(t, order, default) for t in tensors)]


def lies_so(tensor: Tensor, wanted: tuple[int, ...], default: tuple[int, ...]) -> bool:
    """Whether a tensor's memory order, by default ``default``, equals ``wanted``, except for the
    positions of dimensions of size 1."""
    own, other = (
        [axis for axis in axes if tensor.shape[axis] != 1]
        for axes in (tensor.order or default, wanted)
    )
    return own == other


def _default_order(rank: int, channels_last: bool) -> tuple[int, ...]:
    if rank >= 4 or (channels_last and rank == 3):
        return (0, *range(2, rank), 1)
    return tuple(range(rank))


def packed_strides(shape: Shape, order: tuple[int, ...]) -> list[int]:
    """Element strides of a packed tensor."""
    result, step = [0] * len(shape), 1
    for axis in reversed(order):
        result[axis] = step
        step *= shape[axis]
    return result


def order_of_strides(shape: Shape, strides: list[int]) -> tuple[int, ...] | None:
    """The order in which packed ``strides`` lay out ``shape``; None if they are not packed.

    Dimensions of size 1 may have any stride; they keep their position.
    """
    if 0 in shape:
        return tuple(range(len(shape)))
    if not all(isinstance(step, int) for step in strides):  # symbolic ones have no order
        orders = itertools.permutations(range(len(shape)))
        return next((o for o in orders if packed_strides(shape, o) == [*strides]), None)
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axes.sort(key=lambda axis: -strides[axis])
    ranks = iter(axes)
    order = tuple(axis if shape[axis] == 1 else next(ranks) for axis in range(len(shape)))
    packed = packed_strides(shape, order)
    return order if all(packed[axis] == strides[axis] for axis in axes) else None


def layout(spec: GraphSpec) -> Layout:
    """That of a graph's tensors, computed once."""
    if "layout" not in spec._cache:
        spec._cache["layout"] = Layout(spec)
    return spec._cache["layout"]
