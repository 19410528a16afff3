"""Base classes of batch and instance normalization, and what cuDNN fuses with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from .._core.graph.dtypes import FP8
from .._core.graph.example import Example
from .._core.reasons import Reason
from .extents import Spatial
from .normalization_base import Normalization, NormalizationBackward, Normalizing

if TYPE_CHECKING:
    from .._core.graph.dims import Shape
    from .._core.graph.node import Tensors
    from .._core.graph.spec import GraphSpec, Tensor

IMAGES, CHANNELS = (8, 64, 14, 14), (1, 64, 1, 1)
ROUNDING = "mean and variance in float32, of distances from the mean"


def backward_example(images: Shape) -> Example:
    """An example of a backward with statistics per channel."""
    statistics = dict.fromkeys(("scale", "mean", "inv_variance"), CHANNELS)
    return Example(
        {"grad": images, "input": images, **statistics},
        dtypes=dict.fromkeys(statistics, "float32"),
        positive=("inv_variance",),
    )


class OfChannels(Normalizing):
    """A normalization per channel: arrays are stored channels-last."""

    extent: ClassVar[Spatial]
    least_rank = 4
    channels_last = True
    requires = "epsilon is a Python scalar"

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        """Into the channels; or into the batch, if batch elements are independent and no batched
        or summed operand is shared between them."""
        each = {"input", "Y", "mean", "inv_var"}
        if batched <= each and not (self.extent.batch or isinstance(self, NormalizationBackward)):
            yield {port: 0 for port in tensors if port in each}
        if not batched & {"epsilon", "momentum"}:
            yield {port: 1 for port in tensors if port not in ("epsilon", "momentum")}


class BackwardOfChannels(OfChannels, NormalizationBackward):
    """Requires one dtype for all arrays with the shape of x."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: into a float32 DX it writes the 16 bits of input.
        dtypes = {port: tensors[port].dtype for port in ("grad", "input", "DX")}
        if len({*dtypes.values()}) > 1:
            return Reason(f"{', '.join(f'{port} is {dtype}' for port, dtype in dtypes.items())}")
        return super().refuses(tensors, graph)


class ForwardOfChannels(OfChannels, Normalization):
    """cuDNN writes the result of the last operation fused after it."""

    rounding = ROUNDING

    def _wrong_in_plan(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # All measured on an H200 with cuDNN 9.19. A plan that writes float8 fails at execution.
        for tensor in graph.output_tensors:
            if tensor.dtype in FP8:
                return Reason(f"cuDNN cannot write {tensor.dtype} after it")
        # If relu(Y + residual) also returns the sum, the sum is wrong. A mask of that relu is
        # correct.
        after = {tensors["Y"].name}
        for call in graph.calls:
            names = {name for _, name in call.inputs}
            (_, result), *_ = call.outputs
            if names & after and graph.tensor(result).dtype != "bool":
                if names & after & {*graph.outputs}:
                    return Reason(f"{call.name} reads a tensor that the graph also returns")
                after.add(result)
        return super()._wrong_in_plan(tensors, graph)
