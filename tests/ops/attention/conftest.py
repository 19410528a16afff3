"""Fixtures of attention's tests."""

import pytest
from attention_checks import drawing

from jax_cudnn.ops import attention_reference


@pytest.fixture
def normal(key):
    """Draws normal numbers of a shape, others in each call."""
    return drawing(key)


@pytest.fixture
def blocks(monkeypatch, request):
    """The reference takes a few rows at a time, with some left over."""
    few = getattr(request.module, "SCORES_AT_A_TIME", 2000)
    monkeypatch.setattr(attention_reference, "_SCORES", few)
