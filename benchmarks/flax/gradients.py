"""Whether two models have the same gradients, as their optimizers keep them.

Losses of first steps say little: on random labels they are those of a model that has learned
nothing, whatever its layers compute.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..measure import short

_FAR = 0.5  # of a gradient's norm; 16 bits make some hundredths
_ALLOWED = 0.1  # of the arrays may be as far: in 16 bits some gradients are mostly rounding
_LEAST = 0.3  # of each gradient is there, along the other side's, whatever rounding adds to it
_NONE = re.compile(r"\bkey\.bias\b")  # softmax does not see a key's bias: it has rounding alone


def compared(ours: nnx.Optimizer, theirs: nnx.Optimizer) -> dict[str, Any]:
    """How far the means of gradients of two optimizers (SGD with momentum or Adam, after equal
    steps) are from each other, array by array and relative to the norm: the median, which part of
    the arrays is ``off`` by half and more, and of which parameter the ``least`` is there, along the
    other's gradient (1 where they are equal)."""
    means, others = _means(ours), _means(theirs)
    errors, along = map(np.asarray, _compared([*means.values()], [*others.values()]))
    at = int(np.argmin(np.where(np.isnan(along), -np.inf, along)))
    return {
        "median": short(np.median(errors), 2),
        "off": round(float((~(errors < _FAR)).mean()), 4),  # also what is no number
        "least": short(along[at], 2),
        "at": list(others)[at],
    }


def wrong(found: dict[str, Any]) -> bool:
    """Whether these are not gradients of one model."""
    return not (found["off"] <= _ALLOWED and found["least"] > _LEAST)


def _means(optimizer: nnx.Optimizer) -> dict[str, jax.Array]:
    """By the parameters' paths, without those whose gradients are rounding alone."""
    state: Any = optimizer.opt_state
    kept = (optax.tree_utils.tree_get(state, name, default=None) for name in ("mu", "trace"))
    leaves = [x for mean in kept if mean is not None for x in jax.tree.leaves_with_path(mean)]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    return {path: x for path, x in named.items() if not _NONE.search(path)}


@jax.jit
def _compared(ours: list[jax.Array], theirs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    pairs = [(a.ravel(), b.ravel()) for a, b in zip(ours, theirs, strict=True)]
    norms = jnp.stack([jnp.linalg.norm(b) for _, b in pairs])
    errors = jnp.stack([jnp.linalg.norm(a - b) for a, b in pairs])
    return errors / norms, jnp.stack([jnp.dot(a, b) for a, b in pairs]) / norms**2
