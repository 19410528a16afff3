"""A job of two processes with a GPU each: one plans, both run the same program to its end."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

WORKER = Path(__file__).with_name("gpu_job_worker.py")


@pytest.mark.gpu
def test_one_process_plans_for_two(tmp_path):
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        # Each has a plan cache of its own, as on two hosts.
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path / str(rank)),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(port), str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        finished = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, finished, strict=True):
        assert process.returncode == 0, errors
    zero, one = (json.loads(output.splitlines()[-1]) for output, _ in finished)
    assert zero["text"] == one["text"]
    assert zero["calls"] == one["calls"] == 1
    assert (zero["built"], one["built"]) == (1, 0)
    assert zero["mine"] != one["mine"]
    for rank in (zero, one):
        assert rank["total"] == pytest.approx(zero["mine"] + one["mine"], rel=1e-3)
