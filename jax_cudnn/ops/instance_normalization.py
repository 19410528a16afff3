"""Instance normalization: statistics per channel and batch element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._core.graph.builder import register
from .._core.graph.example import Example
from .._core.reasons import Reason
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
    dims = BACKWARD_DIMS
    requires = (
        "a batch of 1: with more, cuDNN 9.19 drops some from DScale and DBias, so XLA runs it"
    )
    extent = Spatial(batch=False)
    examples = (backward_example(_IMAGE),)

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: with 8 images, DScale and DBias miss one or more,
        # different ones in each run, so they are off by up to their own size. DX is correct.
        images = tensors["input"].shape[0]
        if images > 1:
            return Reason(
                f"with a batch of {images} images, cuDNN drops some from DScale and DBias"
            )
        return super().refuses(tensors, graph)


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
