"""How near layers of attention are to Flax's: results, and gradients of a sum."""

import jax
import jax.numpy as jnp
from flax_cases import assert_near

WITHIN = {"float32": 2e-6, "bfloat16": 4e-2}


def close(got, want, within=WITHIN["float32"]):
    """Of the same dtypes, and every array as near as so many parts of its own largest number."""
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (got, want)]
    assert dtypes[0] == dtypes[1]
    assert_near(got, want, within)


def loss(layer, *arrays, **named):
    """A sum: gradients of a mean are so small that none would be missed."""
    return (layer(*arrays, **named).astype(jnp.float32) ** 2).sum()


def told(tree):
    """The leaves of a tree of gradients but a key's bias, whose gradient is rounding alone."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf for path, leaf in leaves if "['key']['bias']" not in jax.tree_util.keystr(path)]
