"""Matrix products with a bias and an activation in cuDNN's epilogue, and a gated MLP of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from opt_einsum.parser import parse_einsum_input

from .. import ops
from .._core.graph.trace import GraphFunction
from ..ops import epilogue
from ..ops.arguments import chosen, promoted
from ..ops.epilogue import Activation
from ..ops.matmul.functions import MATMUL, product
from ..ops.matmul.nodes import contracted
from . import float8
from .layer import ActivatedLayer, Operands, finished, unknown

Pairs = tuple[tuple[int, ...], tuple[int, ...]]
Numbers = tuple[Pairs, Pairs]
"""Dimension numbers as for lax.dot_general: contracted and batch dimensions of both operands."""


class Linear(ActivatedLayer, nnx.Linear):
    """``flax.nnx.Linear`` with fused bias and activation: ``activation(x W + b)``.

    Args:
        activation: as for ``jax_cudnn.ops.matmul``, or None.
        float8: the product and its gradients in float8, ``jax_cudnn.ops.float8_matmul``:
            ``"current"``, ``"delayed"`` or the first state of delayed scaling,
            ``jax_cudnn.ops.DelayedScaling.create(..., operation="matmul")``. None: as in Flax.
        *args, **named: the arguments of ``nnx.Linear``.

    Shapes: x (..., in_features), result (..., out_features); kernel (in_features, out_features),
    bias (out_features,), as in Flax. Bias and activation are computed in float32 and rounded once,
    while Flax rounds after each step.

    A custom ``dot_general``, a precision that cuDNN does not support, an ``out_sharding``, float64,
    complex and empty arrays fall back to Flax's implementation, followed by the activation.

    In float8 bias and activation are computed in the dtype of the result, which cuBLASLt fuses. The
    kernel is read as it is stored, so parameters in float32 have gradients in float32. Delayed
    scaling has its state in ``scaling``, a :class:`Float8Scaling`.

    Raises:
        GraphError: float8 has none of these values, or there is a custom ``dot_general`` or a
            precision besides.
        GraphTypeError: a call in float8 with arrays that are not float32, bfloat16 or float16.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.Linear(3, 4, activation="relu", rngs=nnx.Rngs(0))(jnp.ones((2, 3))).shape
        (2, 4)
    """

    own: ClassVar = {**ActivatedLayer.own, "float8": None}
    float8: str | None
    scaling: float8.Float8Scaling | None = None

    def _keep(self, own: Mapping[str, Any]) -> None:
        super()._keep(own)
        float8.keep(self, own["float8"])

    @property
    def unfused(self) -> str | None:
        if self.dot_general is not lax.dot_general:
            return "it has a custom dot_general"
        return unknown(self.dtype, self.precision)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.float8 is not None:
            return float8.product(self, inputs, out_sharding)
        operands = None if out_sharding is not None else _of_rows(self, inputs)
        if operands is None:
            return finished(super().__call__(inputs, out_sharding), self.activation)
        return dense(operands, _numbers(operands.x), self.precision, self.activation)


class LinearGeneral(ActivatedLayer, nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with fused bias and activation.

    Args:
        activation: as for :class:`Linear`.
        *args, **named: the arguments of ``nnx.LinearGeneral``.

    Shapes: as in Flax. If the last axes are contracted and ``batch_axis`` is empty, this is a
    matrix product with bias and activation in its epilogue. Otherwise it is
    ``jax_cudnn.ops.dot_general``, and XLA runs bias and activation.

    A custom ``dot_general`` or ``dot_general_cls``, and the cases listed at :class:`Linear`, fall
    back to Flax's implementation.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((7, 2, 3))).shape
        (7, 4, 5)
    """

    @property
    def unfused(self) -> str | None:
        if self.dot_general not in (None, lax.dot_general) or self.dot_general_cls is not None:
            return "it has a custom dot_general"
        return unknown(self.dtype, self.precision)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        operands = None if out_sharding is not None else _operands(self, inputs)
        numbers = None if operands is None else self._numbers(operands)
        if operands is None or numbers is None:
            return finished(super().__call__(inputs, out_sharding), self.activation)
        if operands.bias is not None:  # aligned with the result: batch, other and output dimensions
            (axes, _), (batch, _) = numbers
            others = [(a, size) for a, size in enumerate(operands.x.shape) if a not in axes]
            sizes = (size if a in batch else 1 for a, size in others)
            operands = operands._replace(bias=operands.bias.reshape(*sizes, *self.out_features))
        return dense(operands, numbers, self.precision, self.activation)

    def _numbers(self, operands: Operands) -> Numbers | None:
        """Dimension numbers, or None if the operands do not fit them."""
        rank = operands.x.ndim
        given: Any = self.axis, self.batch_axis
        axes, batch = (tuple(sorted(a if a >= 0 else a + rank for a in some)) for some in given)
        of_kernel = tuple(range(len(batch) + len(axes)))  # batch axes come first
        numbers = (axes, of_kernel[len(batch) :]), (batch, of_kernel[: len(batch)])
        valid = {*axes, *batch} <= {*range(rank)} and len({*axes, *batch}) == len(axes + batch)
        return numbers if valid and _fit(operands, numbers) else None


class Einsum(ActivatedLayer, nnx.Einsum):
    """``flax.nnx.Einsum`` with fused bias and activation.

    Args:
        activation: as for :class:`Linear`.
        *args, **named: the arguments of ``nnx.Einsum``.

    Shapes: as in Flax. If the contracted letters come last in the input and first in the kernel,
    there is no batch letter, and the result has the input's letters before the kernel's, this is a
    matrix product with bias and activation in its epilogue. Otherwise it is
    ``jax_cudnn.ops.dot_general`` and a transpose, and XLA runs bias and activation.

    A custom ``einsum_op``, an equation that sums over a letter of only one operand or takes a
    diagonal, and the cases listed at :class:`Linear`, fall back to Flax's implementation.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.Einsum("btd,dhk->bthk", (8, 2, 4), (2, 4), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 8))).shape
        (3, 5, 2, 4)
    """

    @property
    def unfused(self) -> str | None:
        if self.einsum_op is not jnp.einsum:
            return "it has a custom einsum_op"
        return unknown(self.dtype, self.precision)

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        operands = None if out_sharding is not None else _operands(self, inputs)
        equation = self.einsum_str if einsum_str is None else einsum_str
        letters = None if operands is None else _letters(equation, operands)
        if operands is None or letters is None:
            y = super().__call__(inputs, einsum_str, out_sharding)
            return finished(y, self.activation)
        left, right, result = letters
        numbers = _contracted(left, right, result)
        batch = [left[a] for a in numbers[1][0]]
        made = [*batch, *(c for c in left + right if c in result and c not in batch)]
        bias = operands.bias
        if bias is not None:
            sizes = dict(zip(right, operands.kernel.shape, strict=True))
            bias = bias.reshape([sizes.get(c, 1) for c in result])
        if made == [*result]:
            operands = operands._replace(bias=bias)
            return dense(operands, numbers, self.precision, self.activation)
        y = dense(operands._replace(bias=None), numbers, self.precision, None)
        return finished(jnp.transpose(y, [made.index(c) for c in result]), self.activation, bias)


def _gated(g, x, kernel, bias, gate, *, activation, out):
    y = contracted(g, x, kernel, batched=0, depth=1)
    up = epilogue.apply(g, y, None, bias, None, None)
    return g.mul(epilogue.apply(g, gate, None, None, None, activation), up).set_data_type(out)


GATED = GraphFunction(_gated, name="gated_mlp")


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``, with the gate in the epilogue of the second product.

    Args:
        in_features: features of x.
        hidden_features: features of the gate.
        out_features: features of the result; None for in_features.
        activation: as for ``jax_cudnn.ops.matmul``: "silu" for SwiGLU, "gelu" for GEGLU, "sigmoid"
            for GLU, None for a bilinear layer.
        use_bias: whether the three ``nnx.Linear`` have a bias.
        rngs: as for ``nnx.Linear``.
        **linear: other arguments of each :class:`Linear`, such as ``float8``.

    Shapes: x (..., in_features), result (..., out_features). Parameters are those of three
    ``nnx.Linear``: ``gate`` and ``up`` (in_features, hidden_features), ``down`` (hidden_features,
    out_features).

    Each product is one cuDNN plan. The first product is rounded to the result's dtype before the
    activation; the rest of the second is computed in float32 and rounded once. If ``up`` is not a
    :class:`Linear` without an activation, the layers run sequentially.

    Source: Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.GatedMLP(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "silu",
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        linear |= {"use_bias": use_bias, "rngs": rngs}
        self.activation = epilogue.activation_name(activation)
        self.gate = Linear(in_features, hidden_features, **linear)
        self.up = Linear(in_features, hidden_features, **linear)
        self.down = Linear(hidden_features, out_features or in_features, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate(x), self.up
        if isinstance(up, Linear) and up.float8 is not None:
            return self.down(float8.gated(gate, self.activation, up(x)))
        plain = type(up) is Linear and up.activation is None
        found = _of_rows(up, x) if plain else None
        shape = None if found is None else (*found.x.shape[:-1], found.kernel.shape[-1])
        if found is None or gate.dtype.name != found.out or gate.shape != shape:
            return self.down(finished(gate, self.activation) * self.up(x))
        bias = found.bias
        gated = chosen(GATED, precision=up.precision)(
            found.x,
            found.kernel,
            None if bias is None else bias.reshape(*(1,) * (gate.ndim - 1), -1),
            gate,
            activation=self.activation,
            out=found.out,
        )
        return self.down(gated)


def _of_rows(layer: nnx.Linear, inputs: jax.Array) -> Operands | None:
    """The operands of ``x W + b``; None where Flax handles or rejects them."""
    operands = _operands(layer, inputs)
    if operands is None or not operands.x.ndim or operands.kernel.ndim != 2:
        return None
    fits = operands.bias is None or operands.bias.shape == operands.kernel.shape[1:]
    return operands if fits and _fit(operands, _numbers(operands.x)) else None


def _operands(layer: Any, inputs: jax.Array) -> Operands | None:
    return None if layer.unfused else Operands.of(layer, inputs, layer.kernel[...])


def _numbers(x: jax.Array) -> Numbers:
    return ((x.ndim - 1,), (0,)), ((), ())


def _fit(operands: Operands, numbers: Numbers) -> bool:
    """Whether paired dimensions are equal: a reshape would hide a mismatch, and einsum broadcasts
    dimensions of size 1."""
    x, kernel = operands.x.shape, operands.kernel.shape
    return all([x[a] for a in one] == [kernel[a] for a in other] for one, other in numbers)


def dense(
    operands: Operands, numbers: Numbers, precision: Any, activation: Activation
) -> jax.Array:
    """``activation(lax.dot_general(x, kernel, numbers) + bias)``; bias has the result's rank."""
    x, kernel, bias, out = operands
    (of_x, of_kernel), (batch, _) = numbers
    last = of_x == tuple(range(x.ndim - len(of_x), x.ndim))
    if not (of_x and last and not batch and of_kernel == tuple(range(len(of_kernel)))):
        y = ops.dot_general(x, kernel, numbers, precision, preferred_element_type=np.dtype(out))
        return finished(y, activation, bias)
    if bias is not None:
        rank = x.ndim + kernel.ndim - 2 * len(of_x)
        bias = bias.reshape(*(1,) * (rank - bias.ndim), *bias.shape)
    x, kernel = promoted(x, kernel)
    terms = epilogue.Terms(None, bias, None, epilogue.activation_name(activation))
    return product(chosen(MATMUL, precision=precision), x, kernel, terms, out=out, depth=len(of_x))


def _letters(equation: str | None, operands: Operands) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, with "..." expanded; None if the equation is
    not a product of two operands, or does not fit these."""
    if equation is None or "->" not in equation or equation.count(",") != 1:
        return None
    shapes = operands.x.shape, operands.kernel.shape
    try:
        found, result, _ = parse_einsum_input((equation, *shapes), shapes=True)
    except ValueError:
        return None
    left, right = found.split(",")
    once = all(len({*side}) == len(side) for side in (left, right, result))
    both, either = {*left} & {*right}, {*left} | {*right}
    if not once or len(left) != len(shapes[0]) or len(right) != len(shapes[1]):
        return None
    whole = either - both <= {*result} and _fit(operands, _contracted(left, right, result))
    return (left, right, result) if whole else None


def _contracted(left: str, right: str, result: str) -> Numbers:
    both = [c for c in left if c in right]
    summed, batch = [c for c in both if c not in result], [c for c in both if c in result]

    def of(letters: list[str]) -> Pairs:
        return tuple(map(left.index, letters)), tuple(map(right.index, letters))

    return of(summed), of(batch)
