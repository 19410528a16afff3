"""What one process has planned, another takes over: no plan is built, and its program is equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("second_process.py")


def process(how, cache, **environment):
    """What the script prints; its plan cache lies in the folder ``cache``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    command = [sys.executable, str(SCRIPT), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deviceless
def test_a_second_process_builds_no_plan_and_lowers_the_same_program(tmp_path):
    first = process("lower", tmp_path, PYTHONHASHSEED="1")
    assert (first["built"], first["calls"]) == (1, 2)
    second = process("lower", tmp_path, PYTHONHASHSEED="2")
    assert second == {**first, "built": 0, "known": 1}


@pytest.mark.gpu
def test_a_second_process_finds_its_program_in_jaxs_compilation_cache(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    first = process("run", tmp_path / "shared", **settings)
    assert first["built"] == 1
    assert first["misses"] == 1
    second = process("run", tmp_path / "shared", **settings)
    assert second["text"] == first["text"]
    assert (second["built"], second["hits"], second["misses"]) == (0, 1, 0)
    assert second["results"] == first["results"]
    # A process that plans for itself makes another program of it, and misses.
    third = process("run", tmp_path / "own", **settings)
    assert (third["hits"], third["misses"]) == (0, 1)
    assert third["results"] == pytest.approx(first["results"], rel=1e-3)
