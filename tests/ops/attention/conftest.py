"""Fixtures of the attention tests."""

import pytest
from attention_checks import drawing

from jax_cudnn.ops.attention import reference as attention_reference


@pytest.fixture
def normal(key):
    """Draws new normal values of a shape in each call."""
    return drawing(key)


@pytest.fixture
def blocks(monkeypatch, request):
    """The reference computes a few rows at a time, with a remainder."""
    few = getattr(request.module, "SCORES_AT_A_TIME", 2000)
    monkeypatch.setattr(attention_reference, "_SCORES", few)
