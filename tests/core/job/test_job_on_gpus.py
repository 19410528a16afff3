"""A job of two processes with a GPU each: one plans, both run the same program to its end."""

from pathlib import Path

import jax
import pytest
from helpers import two_processes

WORKER = Path(__file__).with_name("gpu_job_worker.py")


@pytest.mark.gpu
def test_one_process_plans_for_two(tmp_path):
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    zero, one = two_processes(
        WORKER,
        timeout=240,
        XDG_CACHE_HOME=[tmp_path / "0", tmp_path / "1"],  # as on two hosts
        XLA_PYTHON_CLIENT_PREALLOCATE=["false"] * 2,
    )
    assert zero["text"] == one["text"]
    assert zero["calls"] == one["calls"] == 1
    assert (zero["built"], one["built"]) == (1, 0)
    assert zero["mine"] != one["mine"]
    for rank in (zero, one):
        assert rank["total"] == pytest.approx(zero["mine"] + one["mine"], rel=1e-3)
