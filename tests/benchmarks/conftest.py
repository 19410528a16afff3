"""Fixtures of the benchmarks' tests."""

import pytest

import jax_cudnn as jc
from jax_cudnn._core.settings import settings


@pytest.fixture(autouse=True)
def plan_cache_as_before():
    """A run has a plan cache that is gone when it ends."""
    kept = settings().plan_cache
    yield
    jc.configure(plan_cache=kept)
