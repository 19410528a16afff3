"""Base classes of row normalizations, and which cuDNN engines are fast for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..._core.graph.layout import layout
from ..._core.graph.node import BY_REFERENCE, LEAD, Fold
from ..._core.graph.planned import ANY, MERGED, About, Engines, Seen, Work
from ..._core.graph.spec import Tensor
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensors
from .base import ANCHOR, NormalizationBackward, Normalizing, Phased
from .extents import Rows

_REQUIRES = (
    "the normalized dimensions are the last in memory; epsilon is a Python scalar; the fast "
    "engines require one dtype for input, scale and result, and support row lengths such as 768, "
    "1024 or 5120, but not 1000"
)
_ROUNDING = "mean and variance in float32, of distances from the mean"


class OfRows(Normalizing):
    """A row normalization or its backward."""

    # Measured on an H200 with cuDNN 9.19: the slow engine, for all shapes, takes 3 times as long as
    # XLA in the forward and up to 45 times in the backward. It is the only one for rows of 1000.
    anchor = ANCHOR._replace(prologue=ANY, slow=(1,), order=MERGED)
    about = About(requires=_REQUIRES)

    extent: ClassVar[Rows]
    in_front: ClassVar[type[Normalizing] | None] = None
    """The class for a leading dimension in all operands, with a separate scale per index."""
    scaled_after: ClassVar[Callable[..., Any] | None] = None
    """As ``Fold.computed``, of the scale of one element: multiplies by the scales in other nodes,
    as cuDNN takes one for all rows."""

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        x = tensors["input"]
        axes = self.extent.reduced(x.shape, tensors["scale"].shape)
        order = [axis for axis in layout(graph).orders[x.name] if x.shape[axis] > 1]
        if axes and {*order[-len(axes) :]} != {*axes}:
            return Reason(f"the normalized dimensions {list(axes)} are not the last in memory")
        return super().support(tensors, graph)

    def length(self, tensors: Mapping[str, Tensor]) -> int:
        """Elements of a row."""
        x, scale = tensors["input"].shape, tensors["scale"].shape
        return math.prod(x[axis] for axis in self.extent.reduced(x, scale))

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        """A row begins, and the batch ends, where dimensions do not merge: with one row per batch
        element, nothing else separates these."""
        axes = self.extent.reduced(tensors["input"].shape, tensors["scale"].shape)
        rows = [axis for axis in order if axis in axes]
        return Seen(begins=(*rows[:1], *order[self.extent.first : 2 * self.extent.first]))

    def engines(self, tensors: Tensors, graph: GraphSpec) -> Engines:
        return Engines(rank=functools.partial(self.rank, self.length(tensors), tensors))

    def rank(self, length: int, tensors: Tensors, engine: int, knobs: Mapping[str, int]) -> int:
        """See :class:`Engines`; ``length`` is that of a row."""
        return 0

    def work(self, tensors: Tensors) -> Work:
        """cuDNN has separate kernels for rows that fit one block of threads and for longer ones."""
        work, length = super().work(tensors), self.length(tensors)
        words = " of short rows" if length <= 256 else " of long rows" if length > 4096 else ""
        return work._replace(pattern=work.pattern + words)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the rows if only row-wise operands are batched; otherwise leading."""
        of_rows = {"input", "Y", "mean", "inv_var"}
        if batched <= of_rows and not isinstance(self, NormalizationBackward):
            shape, scale = tensors["input"].shape, tensors["scale"].shape
            for axis in range(self.extent.first, len(scale)):
                longer = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
                if scale[axis] == 1 and self.extent.fits(longer, scale):
                    axes = {port: axis for port in tensors if port in of_rows}
                    yield Fold(axes, broadcast=("epsilon",))
        if "epsilon" not in batched and self.in_front is not None:
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self.in_front)}
            node = self.in_front(**fields)
            yield Fold(dict.fromkeys(tensors, LEAD), node, broadcast=("epsilon",))
        number = "epsilon" not in tensors or tensors["epsilon"].value is not None
        if self.scaled_after is not None and number:  # with an array it runs in XLA
            yield Fold({}, computed=functools.partial(self.scaled_after, tensors["scale"]))
        yield BY_REFERENCE


def ones(g: Derivation, scale: Tensor) -> GraphTensor:
    """A scale of ones, for rows with a leading vmap dimension."""
    like = Tensor("", (1, *scale.shape), scale.dtype)
    one = g.constant(Tensor("", (), "float32", (1.0).hex()), len(like.shape))
    return g.rounded(g.broadcast(one, like.shape), like.dtype)


class BackwardOfRows(OfRows, NormalizationBackward):
    """Also sums over rows, so with few rows much of the GPU is idle."""

    about = OfRows.about._replace(rounding=NormalizationBackward.about.rounding)

    def rank(self, length: int, tensors: Tensors, engine: int, knobs: Mapping[str, int]) -> int:
        # Measured on an H200 with cuDNN 9.19: 1024 rows of 12288 elements take up to twice as long
        # without splitting rows, which the heuristics propose first.
        x = tensors["input"].shape
        few_long_rows = length > 8192 and math.prod(x) // length <= 2048
        return -1 if few_long_rows and engine == 4 and knobs.get("SPLIT_COLS", 0) > 0 else 0


class ForwardOfRows(OfRows, Phased):
    """cuDNN fuses the operations that compute the input into the same plan."""

    about = OfRows.about._replace(rounding=_ROUNDING)
    computed = ("input",)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        for call in graph.calls:
            if call.node.ports.is_elementwise and call.node.method.endswith("_backward"):
                # Planning crashes the process (SIGSEGV in cuDNN 9.19, float32).
                return Reason(f"cuDNN's planner fails with {call.name} in the same plan")
        return super().support(tensors, graph)
