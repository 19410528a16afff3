"""Normalizations of the channels of each image by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._core.graph.builder import register
from .._core.graph.example import Example
from .extents import Spatial
from .normalization_base import BACKWARD_DIMS, Phased
from .normalization_of_channels import (
    CHANNELS,
    IMAGES,
    BackwardOfChannels,
    ForwardOfChannels,
    backward_example,
)

if TYPE_CHECKING:
    from .._core.graph.spec import GraphSpec, Tensor

_IMAGE = (1, *IMAGES[1:])


@register
class InstancenormBackward(BackwardOfChannels):
    """Gradients of instancenorm.

    With ``xhat = (input - mean) * inv_variance``, ``s = grad * scale`` and m the mean over a
    channel of an image: ``DX = inv_variance * (s - m(s) - xhat * m(s * xhat))``,
    ``DScale = sum(grad * xhat)`` and ``DBias = sum(grad)`` over all but the channels.

    Args:
        grad: the gradient by Y, (N, C, *spatial).
        input: as in the forward.
        scale: as in the forward.
        mean: the forward's.
        inv_variance: the forward's inv_var.

    Returns: DX, DScale, DBias, of the dtypes of input and scale. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with ``CUDNN_INSTANCE_NORM``.
    """

    method = "instancenorm_backward"
    dims = BACKWARD_DIMS
    requires = "one image: of more cuDNN 9.19 loses some in DScale and DBias, and XLA runs it"
    extent = Spatial(batch=False)
    examples = (backward_example(_IMAGE),)

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        # Measured on an H200 with cuDNN 9.19: of 8 images DScale and DBias lack one or more, in
        # each run others, so that they are off by up to their own size. DX is right.
        images = tensors["input"].shape[0]
        if images > 1:
            return (
                f"of {images} images cuDNN loses some in DScale and DBias, which it writes with DX"
            )
        return super().refuses(tensors, graph)


@register
class Instancenorm(ForwardOfChannels, Phased):
    """Instance normalization: ``Y = (input - mean) * inv_var * scale + bias``.

    ``inv_var = (var + epsilon)**-0.5``; mean and (biased) variance are those of each channel of
    each image.

    Args:
        input: (N, C, *spatial).
        scale: (1, C, 1, ...).
        bias: like scale.
        epsilon: a Python number, added to the variance.
        norm_forward_phase: "TRAINING" (the default) or "INFERENCE", or the member of
            ``cudnn.norm_forward_phase``.

    Returns: Y, of input's dtype; in training also mean and inv_var, (N, C, 1, ...) in float32.
    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with
    ``CUDNN_INSTANCE_NORM``.
    """

    method = "instancenorm"
    dims = "input: *x, scale: *s, bias: *b, epsilon: *e -> Y: *x, mean: *m, inv_var: *m"
    extent = Spatial(batch=False)
    backward = InstancenormBackward
    examples = (
        Example(
            {"input": IMAGES, "scale": CHANNELS, "bias": CHANNELS, "epsilon": 1e-5},
            dtypes={"scale": "float32", "bias": "float32"},
        ),
        Example(
            {
                "input": (2, 16, 4, 6, 5),
                "scale": (1, 16, 1, 1, 1),
                "bias": (1, 16, 1, 1, 1),
                "epsilon": 1e-5,
            },
            "float32",
        ),
    )
