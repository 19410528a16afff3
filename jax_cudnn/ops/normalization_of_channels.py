"""What normalizations of channels have in common, and what cuDNN takes beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from .._core.graph.dtypes import FP8
from .._core.graph.example import Example
from .extents import Spatial
from .normalization_base import Normalization, NormalizationBackward, Normalizing

if TYPE_CHECKING:
    from .._core.graph.dims import Shape
    from .._core.graph.node import Tensors
    from .._core.graph.spec import GraphSpec, Tensor

# For the examples of the nodes.
IMAGES, CHANNELS = (8, 64, 14, 14), (1, 64, 1, 1)
ROUNDING = "mean and variance in float32, of distances from the mean"


def backward_example(images: Shape) -> Example:
    """Of a backward with statistics of channels."""
    statistics = dict.fromkeys(("scale", "mean", "inv_variance"), CHANNELS)
    return Example(
        {"grad": images, "input": images, **statistics},
        dtypes=dict.fromkeys(statistics, "float32"),
        positive=("inv_variance",),
    )


class OfChannels(Normalizing):
    """What these normalizations have in common: arrays lie channels-last."""

    extent: ClassVar[Spatial]
    least_rank = 4
    channels_last = True
    requires = "epsilon a Python number"

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        """As further channels, or, where each image is by itself and channels share nothing that
        is batched or summed, as further images."""
        each = {"input", "Y", "mean", "inv_var"}
        if batched <= each and not (self.extent.batch or isinstance(self, NormalizationBackward)):
            yield {port: 0 for port in tensors if port in each}
        if not batched & {"epsilon", "momentum"}:
            yield {port: 1 for port in tensors if port not in ("epsilon", "momentum")}


class BackwardOfChannels(OfChannels, NormalizationBackward):
    """Takes one dtype for all arrays of x's shape."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        # Measured on an H200 with cuDNN 9.19: into a DX of float32 it writes input's 16 bits.
        dtypes = {port: tensors[port].dtype for port in ("grad", "input", "DX")}
        if len({*dtypes.values()}) > 1:
            return f"{', '.join(f'{port} is {dtype}' for port, dtype in dtypes.items())}"
        return super().refuses(tensors, graph)


class ForwardOfChannels(OfChannels, Normalization):
    """Of the operations behind it cuDNN writes the last one's result."""

    rounding = ROUNDING

    def _wrong_in_plan(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        # All measured on an H200 with cuDNN 9.19. A plan that writes float8 fails in its execution.
        for tensor in graph.output_tensors:
            if tensor.dtype in FP8:
                return f"cuDNN writes no {tensor.dtype} behind it"
        # Of relu(Y + residual) the sum, as a further result, holds other numbers. A mask of that
        # relu is right.
        after = {tensors["Y"].name}
        for call in graph.calls:
            names = {name for _, name in call.inputs}
            (_, result), *_ = call.outputs
            if names & after and graph.tensor(result).dtype != "bool":
                if names & after & {*graph.outputs}:
                    return f"{call.name} reads what the graph returns as well"
                after.add(result)
        return super()._wrong_in_plan(tensors, graph)
