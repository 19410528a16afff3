"""A policy for jax.checkpoint."""

from __future__ import annotations

from typing import Any


def save_cudnn(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy for ``jax.checkpoint``: saves the results of cuDNN graphs and the residuals that
    their backwards need, and recomputes everything else.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> block = jax.checkpoint(lambda x: jnp.sin(relu(x)), policy=jc.save_cudnn)
        >>> jax.grad(lambda x: block(x).sum())(jnp.ones((8, 16))).shape
        (8, 16)
    """
    return getattr(primitive, "name", "") == "cudnn"
