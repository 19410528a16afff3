"""Steps on a mesh are measured end to end on four CPU devices, or compiled for absent GPUs, and
shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import many_gpus

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.deviceless
def test_steps_on_a_mesh_are_measured_and_rendered(tmp_path):
    path = tmp_path / "many.json"
    command = [sys.executable, "-m", "benchmarks.many_gpus", "--tiny", "--into", str(path)]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    for only in ("gpt2.*one GPU", "gpt2.*(FSDP|data x model), 4"):  # the second adds its cells
        subprocess.run([*command, "--only", only], cwd=ROOT, env=os.environ | flags, check=True)
    result = json.loads(path.read_text())
    names = "gpt2/tiny, one GPU, 1", "gpt2/tiny, FSDP, 4", "gpt2/tiny, data x model, 4"
    assert (*result["cells"],) == names
    for name, entry in result["cells"].items():
        assert (entry["status"], entry["gpus"]) == ("timed", int(name[-1])), entry
        for side in (many_gpus.WHOLE, many_gpus.OURS):
            moved = entry["sides"][side].get("collectives", {})
            assert ("all-reduce" in moved) == (entry["gpus"] > 1)
            assert many_gpus.efficiency(result, name, side) > 0
            assert entry["sides"][side]["profile"]["busy_ms"] > 0
    assert "all-gather" in result["cells"][names[1]]["sides"][many_gpus.OURS]["collectives"]
    assert "| gpt2/tiny | data x model | 4 | - | " in many_gpus.render(result)
    many_gpus.plot(result, tmp_path / "many.svg")
    assert "data x model, 4</text>" in (tmp_path / "many.svg").read_text()
    flags |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    only = ["--absent", "--only", "gpt2.*(FSDP, 4|tensor parallel, 2)"]
    subprocess.run([*command, *only], cwd=ROOT, env=os.environ | flags, check=True)
    with_absent = json.loads(path.read_text())
    new = with_absent["cells"].pop("gpt2/tiny, tensor parallel, 2")
    assert (new["status"], new["gpus"], new["sides"]) == ("compiled", 2, {})
    again = with_absent["cells"][names[1]].pop("compiled")
    assert with_absent == result  # what was measured stays
    assert "all-gather" in again["sides"][many_gpus.OURS]["collectives"]
    for side in new["compiled"]["sides"].values():
        assert side["memory_gb"] > 0
        assert side["collectives"]["all-reduce"][0] > 0
    shown = many_gpus.render(json.loads(path.read_text()))
    assert "| gpt2/tiny | tensor parallel | 2 | - | - | - | " in shown
