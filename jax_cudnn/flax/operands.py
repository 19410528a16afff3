"""The operands of a layer with a kernel, promoted as Flax promotes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.graph.dtypes import CUDNN_FLOATS as FLOATS
from .layer import fusible


class Operands(NamedTuple):
    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    out: str
    """The result's dtype: of the product (or ``preferred_element_type``) plus the bias."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``x W``."""
        return (*self.x.shape[:-1], self.kernel.shape[-1])

    @classmethod
    def of(cls, layer: Any, x: jax.Array, kernel: jax.Array) -> Operands | None:
        """None if graphs do not support them: float64, complex and empty arrays."""
        bias = None if layer.bias is None else layer.bias[...]
        x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
        if not fusible(x, kernel, bias):
            return None
        product = layer.preferred_element_type or jnp.result_type(x, kernel)
        out = jnp.result_type(product, *(() if bias is None else (bias,))).name
        return cls(x, kernel, bias, out) if out in FLOATS else None


def dimensions(setting: Any, rank: int) -> tuple[int, ...]:
    """A setting of a convolution for each spatial dimension; None means 1."""
    setting = 1 if setting is None else setting
    return (setting,) * rank if isinstance(setting, int) else tuple(setting)
