"""The epilogue of a product in one graph: scale, bias, residual and activation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._core.errors import GraphError, nearest, shown
from .._core.graph.reference import rounded
from .._core.primitive import broadcasting
from .arguments import array

Activation = str | Callable[..., Any] | None

_ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda g, y: g.relu(y),
    "relu6": lambda g, y: g.relu(y, lower_clip=0.0, upper_clip=6.0),
    "leaky_relu": lambda g, y: g.leaky_relu(y, negative_slope=0.01),
    "gelu": lambda g, y: g.gelu_approx_tanh(y),
    "gelu_exact": lambda g, y: g.gelu(y),
    "silu": lambda g, y: g.swish(y),
    "swish": lambda g, y: g.swish(y),
    "sigmoid": lambda g, y: g.sigmoid(y),
    "tanh": lambda g, y: g.tanh(y),
    "elu": lambda g, y: g.elu(y),
    "softplus": lambda g, y: g.softplus(y),
}
_FUNCTIONS = {
    getattr(jax.nn, name): name for name in _ACTIVATIONS if hasattr(jax.nn, name) if name != "swish"
} | {jax.numpy.tanh: "tanh", jax.lax.tanh: "tanh", jax.lax.logistic: "sigmoid"}


def activation_name(activation: Activation) -> str | None:
    """The name of an activation, given by name or as a jax.nn function; otherwise GraphError.

    ``"gelu"`` is ``jax.nn.gelu`` with its default, the tanh approximation; ``"gelu_exact"`` is
    ``functools.partial(jax.nn.gelu, approximate=False)``, with the error function.
    """
    if activation is None or (isinstance(activation, str) and activation in _ACTIVATIONS):
        return activation
    listed = not isinstance(activation, str) and callable(activation)
    name = _FUNCTIONS.get(activation, _gelu(activation)) if listed else None
    if name is None:
        other = "apply another activation to the result, or write the graph with jax_cudnn.graph"
        raise GraphError(
            "unknown activation",
            expected=", ".join(map(repr, _ACTIVATIONS)) + ", or the jax.nn function of that name",
            got=shown(activation),
            fix=nearest(activation, _ACTIVATIONS, other),
        )
    return name


def _gelu(activation: Any) -> str | None:
    """The name of ``functools.partial(jax.nn.gelu, approximate=...)``, otherwise None."""
    if not isinstance(activation, functools.partial) or activation.func is not jax.nn.gelu:
        return None
    if activation.args or activation.keywords.keys() - {"approximate"}:
        return None
    return "gelu" if activation.keywords.get("approximate", True) else "gelu_exact"


class Terms(NamedTuple):
    """The checked terms of an epilogue; None means omitted."""

    scale: Any
    bias: Any
    residual: Any
    activation: str | None

    @classmethod
    def of(
        cls,
        scale: Any,
        bias: Any,
        residual: Any,
        activation: Activation,
        *,
        shape: tuple[int, ...],
        features: int,
        rank: int,
        axis: int,
    ) -> Terms:
        """Scale and bias at the graph's rank with ``features`` along ``axis``; the residual as
        given, with the result's ``shape``. GraphError if a term does not fit."""
        return cls(
            per_feature("scale", scale, features, rank, axis),
            per_feature("bias", bias, features, rank, axis),
            like_result(residual, shape),
            activation_name(activation),
        )

    @property
    def given(self) -> bool:
        return any(term is not None for term in self)


NO_TERMS = Terms(None, None, None, None)


def apply(g: Any, y: Any, scale: Any, bias: Any, residual: Any, activation: str | None) -> Any:
    """``activation(y * scale + bias + residual)``; None means omitted."""
    if scale is not None:
        y = g.mul(y, scale)
    if bias is not None:
        y = g.add(y, bias)
    if residual is not None:
        y = g.add(y, residual)
    return y if activation is None else _ACTIVATIONS[activation](g, y)


def apply_outside(y: jax.Array, terms: Terms, out: str) -> jax.Array:
    """The epilogue after a graph, in float32 or the wider dtype of y, if cuDNN cannot fuse it."""
    scale, bias, residual = broadcasting(y, *terms[:3])
    wide = y.astype(jax.numpy.promote_types(y.dtype, jax.numpy.float32))
    if scale is not None:
        wide = wide * scale
    for term in (bias, residual):
        if term is not None:
            wide = wide + term
    return rounded(activated(wide, terms.activation), out)


def activated(y: jax.Array, activation: str | None) -> jax.Array:
    """An activation of this name, in the dtype of y."""
    if activation is None:
        return y
    if activation == "gelu_exact":
        return jax.nn.gelu(y, approximate=False)
    name = "silu" if activation == "swish" else activation
    return (jax.numpy.tanh if name == "tanh" else getattr(jax.nn, name))(y)


def like_result(residual: Any, shape: tuple[int, ...]) -> Any:
    """A residual; GraphError unless it has the shape of the result."""
    if residual is None:
        return None
    residual = array("residual", residual)
    if residual.shape != tuple(shape):
        raise GraphError(
            "residual does not fit",
            expected=f"shape {tuple(shape)}, the shape of the result",
            got=f"shape {residual.shape}",
            fix="broadcast it before the call, or pass a term with one value per feature as bias",
        )
    return residual


def per_feature(name: str, value: Any, features: int, rank: int, axis: int) -> Any:
    """A bias or scale at the graph's rank: (features,) along ``axis``, or a scalar."""
    if value is None or isinstance(value, (int, float)):
        return value
    value = array(name, value, "an array or a scalar")
    if value.shape not in ((), (features,)):
        raise GraphError(
            f"{name} does not fit",
            expected=f"shape ({features},), one value per feature of the result, or a scalar",
            got=f"shape {value.shape}",
            fix="pass a term with the shape of the result as residual",
        )
    shape = [1] * rank
    if value.ndim:
        shape[axis] = features
    return value.reshape(shape)
