"""``python -m jax_cudnn doctor`` in healthy and in broken set-ups."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core.cuda import device_nodes
from jax_cudnn._core.planning import frontend

no_gpu = pytest.mark.skipif(bool(device_nodes()), reason="it needs a machine without a GPU")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None,
    reason="it needs Linux's search for libraries, and cc",
)
built = pytest.mark.skipif(
    not (Path(jc.__file__).parent / "_lib").is_dir(),
    reason="the package in the clone has no executor: run pytest, not python -m pytest",
)
BARE = ("jax_plugins", "jax_cuda", "jax-cuda", "cudnn", "nvidia")
NO_CUDNN = ("nvidia-", "nvidia_cudnn_cu", "nvidia_cub", "nvidia")


def newer_cudnn(folder):
    (folder / "source.c").write_text("unsigned long cudnnGetVersion() { return 92199; }\n")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcudnn.so.9", "-o", "libcudnn.so.9"]
    subprocess.run(["cc", *options, "source.c"], cwd=folder, check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def environment(folder, *without):
    """An interpreter with this one's packages, except those whose names begin so."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in (Path(entry) for path in sys.path for entry in sorted(Path(path).glob("*"))):
        if entry.parent.name not in ("site-packages", "dist-packages", "site"):
            continue
        if entry.name.startswith(without) or entry.suffix == ".pth":
            continue
        if entry.name != "jax_cudnn" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    (site / "jax_cudnn").symlink_to(Path(jc.__file__).parent)
    return folder / "bin" / "python"


class Answer:
    """The doctor's report in an environment, and its exit code."""

    def __init__(self, interpreter, variables, folder):
        hidden = ("JAX_", "XLA_", "CUDA_", "PYTHON", "LD_", "VIRTUAL_ENV")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        command = [str(interpreter), "-m", "jax_cudnn", "doctor", "--json"]
        environ = {**inherited, **variables}
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.json = done.returncode, json.loads(done.stdout)
        self.findings = {finding["name"]: finding for finding in self.json["findings"]}

    def text(self, name):
        """Value, reason and advice of a finding."""
        return "\n".join(self.findings[name][part] or "" for part in ("value", "why", "fix"))

    def problems(self):
        return [name for name, finding in self.findings.items() if finding["status"] == "problem"]


# Packages left out, what adds the rest -> the first finding with a problem, words of it
SETUPS = {
    "healthy": ((), None, "", ""),
    "bare": (BARE, None, "", ""),
    "no cuDNN": (NO_CUDNN, None, "cuDNN", "none found.*pip install -U 'nvidia-cudnn-cu1"),
    "two": ((), newer_cudnn, "cuDNN", "two versions.*9.21.99.*remove .* from LD_LIBRARY_PATH"),
}


@built
@no_gpu
@pytest.mark.deviceless
@pytest.mark.parametrize(("without", "more", "problem", "words"), SETUPS.values(), ids=SETUPS)
def test_the_cause_is_found_and_advice_given(without, more, problem, words, tmp_path):
    """It comes before its consequences."""
    python = environment(tmp_path / "environment", *without)
    answer = Answer(python, more(tmp_path) if more else {}, tmp_path)
    if without == NO_CUDNN and answer.json["cudnn"]:
        pytest.skip(f"this machine has a system-wide cuDNN: {answer.json['cudnn']}")
    assert answer.code == bool(problem)
    assert answer.problems()[:1] == [problem] * bool(problem)
    verdict = " ".join(answer.json["verdict"].split())
    if problem:
        assert re.search(words, answer.text(problem), re.S), answer.text(problem)
    elif not without:
        assert "plans can be built for an absent GPU" in verdict
        assert "correct on the CPU" in answer.text("a graph")
        assert "engine" in answer.text("planning")
        used = "used by .*the frontend, the executor, the planning worker"
        assert re.search(used, answer.text("cuDNN"))
    else:
        assert "graphs run on their reference" in verdict
        for absent in ("driver", "GPUs", "CUDA plugin", "cuDNN frontend", "planning"):
            assert answer.findings[absent]["status"] == "absent", absent


def test_the_doctor_itself_loads_and_starts_nothing(tmp_path):
    code = """if True:
        from jax._src import xla_bridge
        from jax_cudnn._core.planning import frontend
        from jax_cudnn.commands.doctor import doctor
        doctor()
        assert not xla_bridge._backends
        assert not frontend.loaded_paths()
        assert "libcuda.so" not in open("/proc/self/maps").read()
    """
    command = [environment(tmp_path / "environment", *BARE), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok +Python +3\..*^verdict: ", done.stdout, re.M | re.S)


@pytest.mark.gpu
def test_on_a_gpu():
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jax_cudnn", "doctor", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout, done.stderr)
    answer = json.loads(done.stdout)
    findings = {finding["name"]: finding["value"] for finding in answer["findings"]}
    model = jax.devices("gpu")[0].device_kind
    assert model in findings["GPUs"]
    assert findings["a graph"] == f"correct on {model}, in one cuDNN plan"
    loaded = frontend.version_text(frontend.load().backend_version())
    assert re.search(f"^{loaded} from .*used by JAX", findings["cuDNN"], re.M)
    assert "everything works" in answer["verdict"]
