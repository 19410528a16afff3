"""Base classes of batch and instance normalization, and instance normalization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims
from ..._core.graph.dtypes import FP8
from ..._core.graph.node import BY_REFERENCE, Fold
from ..._core.graph.planned import CHANNELS_LAST, About, Example
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Tensor, Tensors
from .base import ANCHOR, BACKWARD_PORTS, Normalization, NormalizationBackward, Normalizing, Phased
from .extents import Spatial, backward_example

IMAGES, CHANNELS = (8, 64, 14, 14), (1, 64, 1, 1)
OF_CHANNELS = ANCHOR._replace(order=CHANNELS_LAST)
ROUNDING = "mean and variance in float32, of distances from the mean"


class OfChannels(Normalizing):
    """A normalization per channel: arrays are stored channels-last."""

    extent: ClassVar[Spatial]
    anchor = OF_CHANNELS
    about = About(requires="epsilon is a Python scalar")

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the channels; or into the batch, if batch elements are independent and no batched
        or summed operand is shared between them."""
        each = {"input", "Y", "mean", "inv_var"}
        if batched <= each and not (self.extent.batch or isinstance(self, NormalizationBackward)):
            yield Fold({port: 0 for port in tensors if port in each})
        if not batched & {"epsilon", "momentum"}:
            yield Fold({port: 1 for port in tensors if port not in ("epsilon", "momentum")})
        yield BY_REFERENCE


class BackwardOfChannels(OfChannels, NormalizationBackward):
    """Requires one dtype for all arrays with the shape of x."""

    about = OfChannels.about._replace(rounding=NormalizationBackward.about.rounding)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: into a float32 DX it writes the 16 bits of input.
        dtypes = {port: tensors[port].dtype for port in ("grad", "input", "DX")}
        if len({*dtypes.values()}) > 1:
            return Reason(f"{', '.join(f'{port} is {dtype}' for port, dtype in dtypes.items())}")
        return super().support(tensors, graph)


class ForwardOfChannels(OfChannels, Normalization):
    """cuDNN writes the result of the last operation fused after it."""

    about = OfChannels.about._replace(rounding=ROUNDING)

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


_IMAGE = (1, *IMAGES[1:])


@register
class InstancenormBackward(BackwardOfChannels):
    """Gradients of instancenorm.

    With ``xhat = (input - mean) * inv_variance``, ``s = grad * scale`` and m the mean over one
    channel of one batch element: ``DX = inv_variance * (s - m(s) - xhat * m(s * xhat))``,
    ``DScale = sum(grad * xhat)`` and ``DBias = sum(grad)`` over all dimensions but the channels.

    Args:
        grad: gradient with respect to Y, (N, C, *spatial).
        input: as in the forward.
        scale: as in the forward.
        mean: result of the forward.
        inv_variance: inv_var of the forward.

    Returns: DX in the dtype of input; DScale and DBias in the dtype of scale.

    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with
    ``CUDNN_INSTANCE_NORM``.
    """

    method = "instancenorm_backward"
    ports = BACKWARD_PORTS
    about = BackwardOfChannels.about._replace(
        requires="a batch of 1: with more, cuDNN 9.19 drops some from DScale and DBias, so XLA "
        "runs it",
    )
    extent = Spatial(batch=False)
    examples = (backward_example(_IMAGE, CHANNELS, CHANNELS, wide=("scale",)),)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: with 8 images, DScale and DBias miss one or more,
        # different ones in each run, so they are off by up to their own size. DX is correct.
        images = tensors["input"].shape[0]
        if images > 1:
            return Reason(
                f"with a batch of {images} images, cuDNN drops some from DScale and DBias"
            )
        return super().support(tensors, graph)


@register
class Instancenorm(ForwardOfChannels, Phased):
    """Instance normalization: ``Y = (input - mean) * inv_var * scale + bias``.

    ``inv_var = (var + epsilon)**-0.5``; mean and (biased) variance are per channel of each batch
    element.

    Args:
        input: (N, C, *spatial).
        scale: (1, C, 1, ...).
        bias: like scale.
        epsilon: a Python scalar, added to the variance.
        norm_forward_phase: "TRAINING" (the default) or "INFERENCE", or the member of
            ``cudnn.norm_forward_phase``.

    Returns: Y in the dtype of input; in training also mean and inv_var, (N, C, 1, ...) in float32.
    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with
    ``CUDNN_INSTANCE_NORM``.
    """

    method = "instancenorm"
    ports = Dims.parse(
        "input: *x, scale: *s, bias: *b, epsilon: *e -> Y: *x, mean: *m, inv_var: *m"
    )
    extent = Spatial(batch=False)
    backward = InstancenormBackward
    examples = (
        Example.of(
            "input: 8 64 14 14, scale: float32 1 64 1 1, bias: float32 1 64 1 1, epsilon: 1e-5"
        ),
        Example.of(
            "input: 2 16 4 6 5, scale: 1 16 1 1 1, bias: 1 16 1 1 1, epsilon: 1e-5", "float32"
        ),
    )
