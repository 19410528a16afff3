"""Row normalizations: statistics per row, over the dimensions that the scale has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims
from ..._core.graph.node import BY_REFERENCE, Fold, Node, frozen
from ..._core.graph.planned import Example
from ..._core.graph.spec import Tensor
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensors, Values
from .base import BACKWARD_PORTS, TRAINING
from .extents import Rows, backward_example
from .rows_base import BackwardOfRows, ForwardOfRows, ones


@register
class AdalayernormBackward(BackwardOfRows):
    """Gradients of adalayernorm.

    With ``xhat = (input - mean) * inv_variance``, ``s = grad * scale`` and m the mean over the
    normalized dimensions: ``DX = inv_variance * (s - m(s) - xhat * m(s * xhat))``,
    ``DScale = sum(grad * xhat)`` and ``DBias = sum(grad)`` over the dimensions in which scale is 1.

    Args:
        grad: gradient with respect to Y, with the shape of input.
        input: as in the forward.
        scale: as in the forward.
        mean: result of the forward.
        inv_variance: inv_var of the forward.

    Returns: DX in the dtype of input; DScale and DBias in the dtype of scale. Source: cuDNN
    documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with ``CUDNN_ADA_LAYER_NORM``.
    """

    method = "adalayernorm_backward"
    ports = BACKWARD_PORTS
    extent = Rows(first=1)
    examples = (backward_example((4, 64, 256), (4, 1, 256), (4, 64, 1)),)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        yield Fold(dict.fromkeys(tensors, 0))


@register
class Adalayernorm(ForwardOfRows):
    """Layer normalization with a scale and bias per batch element (the first dimension).

    ``Y = (input - mean) * inv_var * scale + bias`` with ``inv_var = (var + epsilon)**-0.5``.

    Args:
        input: (B, ...).
        scale: (B, ...) with the rank of input; each further dimension is 1 or equal to that of
            input. Mean and variance are taken over the dimensions that are not 1.
        bias: like scale; optional.
        epsilon: a Python scalar, added to the variance.
        norm_forward_phase: "TRAINING" (the default) or "INFERENCE", or the member of
            ``cudnn.norm_forward_phase``.

    Returns: Y in the dtype of input; in training also mean and inv_var in float32, with the shape
    of input and size 1 in the normalized dimensions. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with ``CUDNN_ADA_LAYER_NORM``.
    """

    method = "adalayernorm"
    ports = Dims.parse(
        "input: *x, scale: *s, ?bias: *b, epsilon: *e -> Y: *x, mean: *m, inv_var: *m"
    )
    extent = Rows(first=1)
    backward = AdalayernormBackward
    examples = (
        Example.of("input: 4 64 256, scale: 4 1 256, bias: 4 1 256, epsilon: 1e-5"),
        Example.of("input: 2 24 96, scale: 2 1 96, bias: 2 1 96, epsilon: 1e-5", "float32"),
    )

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if "bias" not in tensors:  # frontend 1.28 reads a null pointer and ends the process
            return Reason("without a bias nvidia-cudnn-frontend 1.28 crashes: pass a bias of zeros")
        return super().support(tensors, graph)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        if "epsilon" not in batched:
            yield Fold({port: 0 for port in tensors if port != "epsilon"})
        yield BY_REFERENCE


@register
class LayernormBackward(BackwardOfRows):
    """Gradients of layernorm.

    With ``xhat = (input - mean) * inv_variance``, ``s = grad * scale`` and m the mean over a row:
    ``DX = inv_variance * (s - m(s) - xhat * m(s * xhat))``, ``DScale = sum(grad * xhat)`` and
    ``DBias = sum(grad)`` over all rows.

    Args:
        grad: gradient with respect to Y, with the shape of input.
        input: as in the forward.
        scale: as in the forward.
        mean: result of the forward.
        inv_variance: inv_var of the forward.

    Returns: DX in the dtype of input; DScale and DBias in the dtype of scale. Source: cuDNN
    documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with ``CUDNN_LAYER_NORM``.
    """

    method = "layernorm_backward"
    ports = BACKWARD_PORTS
    extent = Rows()
    in_front = AdalayernormBackward
    examples = (
        backward_example((64, 256), (1, 256), (64, 1)),
        backward_example((3, 24, 96), (1, 1, 96), (3, 24, 1), "float32"),
    )

    def rank(self, length: int, tensors: Tensors, engine: int, knobs: Mapping[str, int]) -> int:
        # Measured on an H200 with cuDNN 9.19: these knobs are 1.4 times as fast as those that
        # heuristics propose first for 4096 and 8192 rows, and as fast for 16384.
        fast = {"STAGES": 1, "KERNEL_CFG": 2, "OCCUPANCY": 1, "SPLIT_COLS": 0, "TILE_COLS": 3}
        preferred = engine == 4 and fast.items() <= knobs.items()
        if preferred and 2048 < length <= 4096:
            return -1
        return super().rank(length, tensors, engine, knobs)


@register
class Layernorm(ForwardOfRows):
    """Layer normalization: ``Y = (input - mean) * inv_var * scale + bias``.

    ``inv_var = (var + epsilon)**-0.5``; mean and (biased) variance are those of each row.

    Args:
        input: any shape.
        scale: with the rank of input; each dimension is 1 or equal to that of input. A row spans
            the dimensions that are not 1: (1, N) for an input of (M, N), or (1, 1, H, W) for
            (A, B, H, W).
        bias: like scale.
        epsilon: a Python scalar, added to the variance.
        norm_forward_phase: "TRAINING" (the default) or "INFERENCE", or the member of
            ``cudnn.norm_forward_phase``.

    Returns: Y in the dtype of input; in training also mean and inv_var in float32, with the shape
    of input and size 1 in the normalized dimensions. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with ``CUDNN_LAYER_NORM``.
    """

    method = "layernorm"
    ports = Dims.parse(
        "input: *x, scale: *s, bias: *b, epsilon: *e -> Y: *x, mean: *m, inv_var: *m"
    )
    extent = Rows()
    backward = LayernormBackward
    in_front = Adalayernorm
    examples = (
        Example.of("input: 64 256, scale: 1 256, bias: 1 256, epsilon: 1e-5"),
        Example.of("input: 4 24 96, scale: 1 1 96, bias: 1 1 96, epsilon: 1e-5", "float16"),
        Example.of("input: 3 7 6 10, scale: 1 1 6 10, bias: 1 1 6 10, epsilon: 1e-5", "float32"),
        Example.of(
            "input: 64 128, scale: 1 128, bias: 1 128, epsilon: 1e-5",
            norm_forward_phase="INFERENCE",
        ),
    )

    def rank(self, length: int, tensors: Tensors, engine: int, knobs: Mapping[str, int]) -> int:
        # Measured on an H200 with cuDNN 9.19: for rows of 768 to 8192 elements the heuristics
        # propose the engine that fuses other operations; the one without is up to 1.4 times as
        # fast.
        with_neighbours = (3, 4) if self.norm_forward_phase == TRAINING else (4, 5)
        return with_neighbours.index(engine) + 1 if engine in with_neighbours else 0


@register
@frozen
class RmsnormBackward(BackwardOfRows):
    """Gradients of rmsnorm.

    With ``xhat = input * inv_variance``, ``s = grad * scale`` and m the mean over a row:
    ``DX = inv_variance * (s - xhat * m(s * xhat))``, ``DScale = sum(grad * xhat)`` and
    ``DBias = sum(grad)`` over all rows.

    Args:
        grad: gradient with respect to Y, with the shape of input.
        input: as in the forward.
        scale: as in the forward.
        inv_variance: inv_var of the forward.
        has_dbias: whether to compute DBias.

    Returns: DX in the dtype of input; DScale and DBias in the dtype of scale. Source: cuDNN
    documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with ``CUDNN_RMS_NORM``.
    """

    method = "rmsnorm_backward"
    ports = Dims.parse(
        "grad: *x, input: *x, scale: *s, inv_variance: *m -> DX: *x, DScale: *s, DBias: *s"
    )
    extent = Rows(centred=False)
    examples = (
        Example.of(
            "grad: 64 256, input: 64 256, scale: 1 256, inv_variance: float32 64 1",
            positive=("inv_variance",),
            has_dbias=False,
        ),
        Example.of(
            "grad: 64 96, input: 64 96, scale: 1 96, inv_variance: 64 1",
            "float32",
            positive=("inv_variance",),
        ),
    )

    has_dbias: bool = True

    @property
    def results(self) -> tuple[str, ...]:
        return ("DX", "DScale", "DBias") if self.has_dbias else ("DX", "DScale")

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, has_dbias=False) if "DBias" in results else self

    def scaled_after(self, like: Tensor, g: Derivation, inputs: Values) -> dict[str, GraphTensor]:
        """DX with the scale multiplied in first; cuDNN computes one DScale for all rows."""
        grad, x, inv_variance = (inputs[port] for port in ("grad", "input", "inv_variance"))
        node = dataclasses.replace(self, has_dbias=False)
        dx, _ = g.apply(
            node,
            grad=g.mul(grad, inputs["scale"]),
            input=x,
            scale=ones(g, like),
            inv_variance=inv_variance,
        )
        shape = inputs["scale"].shape
        found = {"DX": dx, "DScale": g.reduced(g.mul(grad, g.mul(x, inv_variance)), shape)}
        if self.has_dbias:
            found["DBias"] = g.reduced(grad, shape)
        return found


@register
class Rmsnorm(ForwardOfRows):
    """Root mean square normalization: ``Y = input * inv_var * scale + bias``.

    ``inv_var = (mean(input**2) + epsilon)**-0.5``, the mean over each row.

    Args:
        input: any shape.
        scale: with the rank of input; each dimension is 1 or equal to that of input. A row spans
            the dimensions that are not 1: (1, N) for an input of (M, N).
        bias: like scale; optional.
        epsilon: a Python scalar, added to the mean square.
        norm_forward_phase: "TRAINING" (the default) or "INFERENCE", or the member of
            ``cudnn.norm_forward_phase``.

    Returns: Y in the dtype of input; in training also inv_var in float32, with the shape of input
    and size 1 in the normalized dimensions. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with ``CUDNN_RMS_NORM``.
    """

    method = "rmsnorm"
    ports = Dims.parse("input: *x, scale: *s, ?bias: *b, epsilon: *e -> Y: *x, inv_var: *m")
    extent = Rows(centred=False)
    backward = RmsnormBackward
    about = ForwardOfRows.about._replace(rounding="the mean square in float32")
    examples = (
        Example.of("input: 64 256, scale: 1 256, epsilon: 1e-5"),
        Example.of("input: 4 24 96, scale: 1 1 96, bias: 1 1 96, epsilon: 1e-5", "float16"),
        Example.of("input: 3 7 6 10, scale: 1 1 1 10, epsilon: 1e-5", "float32"),
    )

    def scaled_after(self, like: Tensor, g: Derivation, inputs: Values) -> dict[str, GraphTensor]:
        """Normalizes with a scale of ones, then scales: cuDNN takes one scale for all rows."""
        values = {port: inputs[port] for port in ("input", "epsilon")}
        node = dataclasses.replace(self, norm_forward_phase=TRAINING)
        y, inv_var = g.apply(node, **values, scale=ones(g, like))
        y = g.mul(y, inputs["scale"])
        y = g.add(y, inputs["bias"]) if "bias" in inputs else y
        return {"Y": y, "inv_var": inv_var}
