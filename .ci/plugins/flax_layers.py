"""Puts the layers of jax_cudnn.flax in the place of Flax's, for Flax's own tests."""

import numpy as np
import pytest
from flax import nnx

from jax_cudnn.flax.layer import SWAPPED

DIFFERENT: dict[str, str] = {}
"""Tests that must fail, and why: differences that the documents tell of."""

STEPS = 4
"""Flax's tests want the bits of another way to compute the same. Layers here round once where Flax
rounds after each step: results may differ by so many units in the last place."""


def within_rounding(actual, desired, *args, **kwargs):
    """numpy.testing.assert_array_equal, but for floats."""
    wide = [np.asarray(x) for x in (actual, desired)]
    if any(x.dtype.kind not in "fV" for x in wide):  # bfloat16 is of kind V
        return exact(actual, desired, *args, **kwargs)
    assert wide[0].dtype == wide[1].dtype
    step = STEPS * float(np.finfo(wide[0].dtype).eps)
    largest = float(np.max(np.abs(wide[1].astype(np.float64)), initial=0.0))
    np.testing.assert_allclose(
        *(x.astype(np.float64) for x in wide), rtol=step, atol=step * largest
    )


exact = np.testing.assert_array_equal


def pytest_configure():
    for theirs, ours in SWAPPED.items():
        assert getattr(nnx, theirs.__name__) is theirs
        setattr(nnx, theirs.__name__, ours)
    np.testing.assert_array_equal = within_rounding


def pytest_collection_modifyitems(items):
    found = {item.nodeid.rpartition("/")[2]: item for item in items}
    if gone := DIFFERENT.keys() - found.keys():
        raise pytest.UsageError(f"no such tests any more: {', '.join(sorted(gone))}")
    for name, reason in DIFFERENT.items():
        found[name].add_marker(pytest.mark.xfail(reason=reason, strict=True))
