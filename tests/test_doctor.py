"""``python -m jax_cudnn doctor`` in healthy and in really broken set-ups.

A set-up is a virtual environment of its own, with links to this one's packages but some, and
libraries compiled here on LD_LIBRARY_PATH.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from doctor_setups import (
    COMPILER,
    CUDNN,
    EXECUTOR,
    PLUGIN,
    Answer,
    compiled,
    cudnn,
    driver,
    environment,
)

import jax_cudnn as jc
from jax_cudnn._core.cuda import device_nodes
from jax_cudnn._core.planning import frontend

ROOT = Path(__file__).parent.parent
compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler (cc)")
no_gpu = pytest.mark.skipif(bool(device_nodes()), reason="its set-up is a machine without a GPU")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="libraries are looked for as Linux does"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("bare"), *PLUGIN, *CUDNN)


# -- nothing is broken -----------------------------------------------------------------------------


@no_gpu
@pytest.mark.deviceless
def test_whole_without_a_gpu(whole, tmp_path):
    answer = Answer(whole, {}, tmp_path)
    assert answer.code == 0
    assert answer.problems() == []
    assert answer.json["ok"] is True
    assert "plans for a GPU elsewhere are built" in " ".join(answer.json["verdict"].split())
    assert "right on the CPU" in answer["a graph"]["value"]
    assert "engine" in answer["planning"]["value"]
    (copy,) = [c for c in answer.json["cudnn"] if "nvidia-cudnn package" in c["found_by"]]
    assert frontend.version_text(copy["version"]) in answer["cuDNN"]["value"]
    assert copy["path"] in answer["cuDNN"]["value"]
    used = "used by .*the frontend, the executor, the planning worker"
    assert re.search(used, answer["cuDNN"]["value"])


@no_gpu
def test_bare(bare, tmp_path):
    answer = Answer(bare, {}, tmp_path)
    assert answer.code == 0
    assert answer.problems() == []
    for name in ("driver", "GPUs", "CUDA plugin", "cuDNN frontend", "planning"):
        assert answer[name]["status"] == "absent", name
    assert "pip install 'jax-cudnn[cuda12]'" in answer["planning"]["fix"]
    verdict = " ".join(answer.json["verdict"].split())
    assert "graphs run as their reference" in verdict
    assert "pip install 'jax-cudnn[cuda12]'" in verdict


def test_the_doctor_itself_loads_and_starts_nothing(bare, tmp_path):
    code = """
        from jax._src import xla_bridge
        from jax_cudnn._core.planning import frontend
        from jax_cudnn.doctor.report import doctor
        doctor()
        assert not xla_bridge._backends
        assert not frontend.loaded_paths()
        assert "libcuda.so" not in open("/proc/self/maps").read()
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([bare, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ok +Python +3\.", done.stdout, re.M)
    assert re.search(r"^verdict: ", done.stdout, re.M)
    assert max(map(len, done.stdout.splitlines())) < 200


# -- broken set-ups, for real ----------------------------------------------------------------------


@no_gpu
@pytest.mark.deviceless
def test_no_cudnn(tmp_path):
    interpreter = environment(tmp_path / "venv", "nvidia-", "nvidia_cudnn_cu", "nvidia_cub")
    nvidia = next(interpreter.parent.parent.glob("lib/python*/site-packages")) / "nvidia"
    nvidia.unlink()
    answer = Answer(interpreter, {}, tmp_path)
    if answer.json["cudnn"]:
        pytest.skip(f"this machine has a cuDNN of its own: {answer.json['cudnn']}")
    assert answer.code == 1
    assert answer["cuDNN"]["status"] == "problem"
    assert answer["cuDNN"]["value"] == "none found"
    assert re.search(r"pip install -U 'nvidia-cudnn-cu1[23]>=9\.19", answer["cuDNN"]["fix"])
    assert answer["cuDNN frontend"]["status"] == "ok"
    assert answer["planning"]["status"] == "problem"
    assert answer["a graph"]["status"] == "ok"  # the reference needs none


@no_gpu
@compiles
@pytest.mark.deviceless
@pytest.mark.parametrize("version", [92199, 90100, -1], ids=["other", "old", "crashing"])
def test_two_cudnns(whole, tmp_path, version):
    answer = Answer(whole, cudnn(tmp_path, version), tmp_path)
    assert answer.code == 1
    finding = answer["cuDNN"]
    assert finding["status"] == "problem"
    assert "two cuDNNs" in finding["why"]
    text = "SIGABRT" if version < 0 else frontend.version_text(version)
    assert text in finding["why"]
    assert f"{tmp_path}/libcudnn.so.9" in finding["value"]
    assert f"remove {tmp_path} from LD_LIBRARY_PATH" in finding["fix"]
    assert "pip uninstall nvidia-cudnn-cu" in finding["fix"]
    assert len(answer.json["cudnn"]) >= 2


@no_gpu
@pytest.mark.deviceless
def test_the_same_cudnn_twice_is_fine(whole, tmp_path):
    (copy,) = next(Path(whole).parent.parent.glob("lib/python*/site-packages")).glob(
        "nvidia/cudnn/lib/libcudnn.so.9"
    )
    answer = Answer(whole, {"LD_LIBRARY_PATH": str(copy.parent)}, tmp_path)
    assert answer.code == 0
    assert "LD_LIBRARY_PATH, nvidia-cudnn package" in answer["cuDNN"]["value"]


@no_gpu
@compiles
def test_no_plugin_although_there_is_a_gpu(bare, tmp_path):
    answer = Answer(bare, driver(tmp_path, 0), tmp_path)
    assert answer.code == 1
    assert answer["driver"]["status"] == "ok"
    assert "CUDA 13.0" in answer["driver"]["value"]
    assert answer["GPUs"]["value"] == "0: Fake GPU, compute capability 9.10, 3.0 GiB"
    assert answer["CUDA plugin"]["status"] == "problem"
    assert answer["CUDA plugin"]["fix"].startswith("pip install 'jax-cudnn[cuda13]'")
    for name in ("JAX's devices", "cuDNN frontend", "cuDNN"):
        assert answer[name]["status"] == "problem", name
    assert answer["a graph"]["status"] == "ok"


@no_gpu
@pytest.mark.deviceless
def test_old_frontend(whole, tmp_path):
    (tmp_path / "cudnn").mkdir()
    (tmp_path / "cudnn" / "__init__.py").write_text('__version__ = "1.10.0"\n')
    answer = Answer(whole, {"PYTHONPATH": str(tmp_path)}, ROOT)
    assert answer.code == 1
    finding = answer["cuDNN frontend"]
    assert finding["status"] == "problem"
    assert "too old" in finding["value"]
    assert f"expected >= 1.28, got 1.10.0 from {tmp_path}/cudnn" in finding["why"]
    assert finding["fix"].startswith("pip install -U nvidia-cudnn-frontend")
    assert "pip install -U nvidia-cudnn-frontend" in answer.json["verdict"]
    assert "too old" in answer["planning"]["value"]
    assert answer["cuDNN"]["status"] == "ok"  # told once, where it is


@no_gpu
@compiles
@pytest.mark.parametrize("setup", ["whole", "bare"])
def test_driver_but_no_gpu(setup, request, tmp_path):
    answer = Answer(request.getfixturevalue(setup), driver(tmp_path, 100), tmp_path)
    assert answer.code == 1
    assert answer.problems() == ["GPUs"]
    assert answer["GPUs"]["value"] == "none visible"
    assert "the driver answers 100: no CUDA-capable device" in answer["GPUs"]["why"]
    assert "docker run --gpus all" in answer["GPUs"]["fix"]
    assert "docker run --gpus all" in answer.json["verdict"]


@no_gpu
@compiles
@pytest.mark.parametrize("visible", ["", "-1"])
def test_all_gpus_hidden(bare, tmp_path, visible):
    variables = {**driver(tmp_path, 0), "CUDA_VISIBLE_DEVICES": visible}
    answer = Answer(bare, variables, tmp_path)
    assert answer.code == 1
    assert answer["GPUs"]["status"] == "problem"
    assert answer["GPUs"]["value"] == "none visible, 1 hidden: Fake GPU"
    assert answer["GPUs"]["why"] == f"CUDA_VISIBLE_DEVICES is {visible!r}"
    assert answer["GPUs"]["fix"].startswith("unset CUDA_VISIBLE_DEVICES")
    assert f"CUDA_VISIBLE_DEVICES={visible}" in answer["environment"]["value"]


@no_gpu
@compiles
def test_a_driver_that_crashes(bare, tmp_path):
    answer = Answer(bare, driver(tmp_path, -1), tmp_path)
    assert answer.code == 1
    assert answer.problems() == ["driver"]
    assert "SIGABRT" in answer["driver"]["why"]
    assert "reinstall" in answer["driver"]["fix"]


@no_gpu
def test_flags_with_which_xla_ends_the_process(bare, tmp_path):
    answer = Answer(bare, {"XLA_FLAGS": "--xla_nonsense=1"}, tmp_path)
    assert answer.code == 1
    assert answer["JAX's devices"]["status"] == "problem"
    assert "xla_nonsense" in answer["JAX's devices"]["why"]
    assert "check XLA_FLAGS" in answer["JAX's devices"]["fix"]
    assert answer["a graph"]["status"] == "warning"  # not tried


@no_gpu
@compiles
@pytest.mark.parametrize("broken", ["newer FFI", "no library", "missing"])
def test_an_executor_that_does_not_fit(tmp_path, broken):
    interpreter = environment(tmp_path, *PLUGIN, *CUDNN, "jax_cudnn-")
    (package,) = tmp_path.glob("lib/python*/site-packages/jax_cudnn")
    package.unlink()
    shutil.copytree(jc.__path__[0], package, ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    name = "libjax_cudnn.so"
    (package / "_lib" / name).unlink()
    if broken == "newer FFI":
        compiled(package / "_lib", EXECUTOR, name, "NEWER=1000")
    elif broken == "no library":
        (package / "_lib" / name).write_text("not ELF")
    answer = Answer(interpreter, {}, tmp_path)
    assert answer.code == 1
    assert answer.problems() == ["executor"]
    said = answer["executor"]["value"] + answer["executor"]["why"]
    words = {"newer FFI": "API version", "no library": "file too short", "missing": "No such file"}
    assert words[broken] in said
    assert "install" in answer["executor"]["fix"]


# -- on a machine with a GPU -----------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "jax_cudnn", "doctor", "--json"],
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout, done.stderr)
    answer = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in answer["findings"]}
    assert done.returncode == 0
    model = jax.devices("gpu")[0].device_kind
    assert model in findings["GPUs"]["value"]
    assert findings["a graph"]["value"] == f"right on {model}, as one cuDNN plan"
    loaded = frontend.version_text(frontend.load().backend_version())
    assert re.search(f"^{loaded} from .*used by JAX", findings["cuDNN"]["value"], re.M)
    assert "all works" in answer["verdict"]
