"""What fails where a function would run as it was, so that a user sees only a warning."""

import pytest

from jax_cudnn.acceleration import region


@pytest.fixture(autouse=True)
def _failures_are_errors(monkeypatch):
    def fail(message, what, exc_info):
        raise AssertionError(what) from exc_info

    monkeypatch.setattr(region.log, "warning", fail)
