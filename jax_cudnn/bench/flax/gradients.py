"""Whether two models have the same gradients, as their optimizers keep them.

Losses of first steps say little: on random labels they are those of a model that has learned
nothing, whatever its layers compute.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ALLOWED = 0.1
"""Parts of the parameters whose gradients may differ: a key's bias has none but rounding."""
_FAR = 0.5  # of a gradient's norm; 16 bits make some hundredths


def compared(ours: nnx.Optimizer, theirs: nnx.Optimizer) -> dict[str, float]:
    """How far the means of gradients of two optimizers are from each other, array by array and
    relative to the norm: the median, and which part of the arrays is ``off`` by half and more.

    Args:
        ours, theirs: of SGD with momentum or of Adam, after equal steps from equal parameters.
    """
    errors = np.asarray(_errors(_means(ours), _means(theirs)))
    off = ~(errors < _FAR)  # of no number, too
    return {"median": float(f"{np.median(errors):.2g}"), "off": round(float(off.mean()), 4)}


def _means(optimizer: nnx.Optimizer) -> list[jax.Array]:
    state: Any = optimizer.opt_state
    found = [optax.tree_utils.tree_get(state, name, default=None) for name in ("mu", "trace")]
    return jax.tree.leaves([each for each in found if each is not None])


@jax.jit
def _errors(ours: list[jax.Array], theirs: list[jax.Array]) -> jax.Array:
    pairs = zip(ours, theirs, strict=True)
    return jnp.stack(
        [jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()) for a, b in pairs]
    )
