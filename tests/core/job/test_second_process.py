"""What one process has planned, another takes over: no plan is built, and its program is equal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("second_process.py")


def process(cache, seed):
    """What the script prints; its plan cache lies in the folder ``cache``."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONHASHSEED": seed}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deviceless
def test_a_second_process_builds_no_plan_and_lowers_the_same_program(tmp_path):
    first = process(tmp_path, "1")
    assert (first["built"], first["calls"]) == (1, 2)
    second = process(tmp_path, "2")
    assert second == {**first, "built": 0, "known": 1}
