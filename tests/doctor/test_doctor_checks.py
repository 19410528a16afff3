"""The doctor's rules on made-up facts, and its processes."""

import dataclasses
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.planning import frontend, planner
from jax_cudnn.doctor import checks, report, stages
from jax_cudnn.doctor.copies import Copy
from jax_cudnn.doctor.facts import Facts
from jax_cudnn.doctor.process import Outcome, run

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA H200", "capability": "9.0", "gib": 139.8}
CUDNN = "/site-packages/nvidia/cudnn/lib/libcudnn.so.9"
ACCEPTED = {"registration": {"accepted": True}}
USED = {"cudnn": 91900, "paths": [CUDNN]}


def told(version=13000, gpus=(GPU,), status=0, text=""):
    driver = {"path": "libcuda.so.1", "version": version, "status": status, "text": text}
    return Outcome({"driver": {**driver, "gpus": list(gpus)}})


def stages_of(**changes):
    devices = {"platform": "gpu", "gpus": ["NVIDIA H200"], "cudnn": [CUDNN], "heard": []}
    reports = {
        "devices": devices,
        "frontend_here": {"version": "1.28.0", "path": "cudnn"},
        "cudnn_here": USED,
        "executor": {"path": "libjax_cudnn.so", "cudnn": 91900, "cudnn_path": CUDNN},
        "run": {"device": "NVIDIA H200", "platform": "gpu"},
    }
    return Outcome({**reports, **changes})


VERSIONS = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.11.2")
HEALTHY = Facts(
    python=((3, 12, 1), "python"),
    system="linux",
    packages={**VERSIONS, "nvidia-cudnn-cu13": "9.19.0.56"},
    plugins=("13",),
    nodes=("/dev/nvidiactl",),
    kernel_driver="580.1",
    driver=told(),
    copies=(Copy(CUDNN, ("nvidia-cudnn package",), 91900),),
    jax=stages_of(),
    planning=Outcome(
        {"worker": USED, "planned": {"engine": "eng1", "cudnn": 91900, "seconds": 0.3}, **ACCEPTED}
    ),
)
ON_THE_CPU = {"platform": "cpu", "gpus": [], "cudnn": [], "heard": ["cuInit(0) failed: 803"]}


def packages(**changes):
    """HEALTHY's packages with changes; None removes one."""
    changed = {**HEALTHY.packages, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return {name: version for name, version in changed.items() if version is not None}


def examined(**changes):
    changed = dataclasses.replace(HEALTHY, **changes)
    findings = checks.examine(changed)
    problems = {f.name: f for f in findings if f.status == "problem"}
    assert report.exit_code(findings) == bool(problems)
    return problems, report.verdict(changed, findings)


CU12, OLD = "nvidia-cudnn-cu12", {"cudnn": 91001}
NO_GPU = {"jax": stages_of(devices=ON_THE_CPU)}
UNREGISTERED = {"worker": USED, "registration": {"error": {"summary": "newer API version"}}}
# facts, the finding with the problem, a word of its reason, a word of its advice
BROKEN = [
    ({"driver": told(12040)}, "CUDA plugin", "up to CUDA 12.4", ">= 580"),
    ({"packages": packages(jax_cuda13_plugin="0.11.1")}, "CUDA plugin", "jaxlib 0.11.2", "-U"),
    ({"packages": packages(nvidia_cudnn_cu12="9.19.0.56")}, "cuDNN package", "same folder", CU12),
    (
        {
            "copies": (Copy(CUDNN, ("nvidia-cudnn package",), 91001),),
            "jax": stages_of(cudnn_here={**USED, **OLD}, executor=OLD),
            "planning": Outcome({"worker": {**USED, **OLD}}),
        },
        *("cuDNN", ">= 9.19.0", "pip install -U nvidia-cudnn"),
    ),
    ({"planning": Outcome(UNREGISTERED)}, "executor", "newer API version", "install"),
    ({"driver": told(gpus=(), status=803)}, "GPUs", "returned 803", "reboot"),
    ({**NO_GPU, "variables": {"JAX_PLATFORMS": "cpu"}}, "JAX's devices", "'cpu'", "unset"),
    (NO_GPU, "JAX's devices", "cuInit(0) failed: 803", "read JAX's message"),
    (
        {"jax": stages_of(frontend_here=stages.ABSENT, cudnn_here=stages.ABSENT)},
        *("cuDNN frontend", "builds cuDNN plans", "jax-cudnn[cuda12]"),
    ),
]


def test_a_healthy_machine_with_a_gpu():
    problems, verdict = examined()
    assert (problems, "everything works" in verdict) == ({}, True)


def test_without_a_gpu_the_plugins_error_can_be_silenced():
    driver = Outcome({"driver": {"missing": "No such file"}})
    changed = dataclasses.replace(HEALTHY, driver=driver, nodes=(), kernel_driver="", **NO_GPU)
    for variables, fix in (({}, "export JAX_PLATFORMS=cpu"), ({"JAX_PLATFORMS": "cpu"}, "")):
        found = checks.jax_devices(dataclasses.replace(changed, variables=variables), "devices")
        assert (found.status, found.fix) == ("ok", fix)


@pytest.mark.parametrize(("changes", "name", "why", "fix"), BROKEN)
def test_what_does_not_fit_is_a_problem_with_advice(changes, name, why, fix):
    problems, verdict = examined(**changes)
    assert name in problems
    assert why in problems[name].value + problems[name].why
    assert fix in problems[name].fix
    words = " ".join(problems[name].fix.split())
    assert words in " ".join(verdict.split()) or words == checks.AFTERWARDS


def test_an_unused_copy_of_another_version_is_a_warning():
    system = Copy("/usr/lib/libcudnn.so.9", ("system folder",), 90100)
    changed = dataclasses.replace(HEALTHY, copies=(*HEALTHY.copies, system))
    findings = {finding.name: finding for finding in checks.examine(changed)}
    assert findings["cuDNN"].status == "warning"
    assert "9.1.0 from system folder" in findings["cuDNN"].value
    assert report.exit_code(list(findings.values())) == 0


def test_requirements_are_the_packaged_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dotted = [".".join(map(str, numbers)) for numbers in (checks.OLDEST_PYTHON, compat.OLDEST_JAX)]
    assert project["requires-python"] == f">={dotted[0]}"
    assert f"jax>={dotted[1]}" in project["dependencies"]
    cudnn = frontend.version_text(frontend.OLDEST_CUDNN).removesuffix(".0")
    front = ".".join(map(str, frontend.OLDEST_FRONTEND))
    for major in ("12", "13"):
        extra = project["optional-dependencies"][f"cuda{major}"]
        assert f"nvidia-cudnn-cu{major}>={cudnn}" in extra
        assert f"nvidia-cudnn-frontend>={front}" in extra


def test_the_graph_that_is_tried_is_cudnns_and_not_left_to_xla(made_up_plans, monkeypatch):
    def refuse(spec, site):
        raise jc.UnsupportedGraphError("no engine")

    monkeypatch.setattr(planner, "_build", refuse)
    avals = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in stages.operands()]
    traced = jax.jit(stages.matmul_bias_relu).trace(*avals)
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match="no engine"):
        traced.lower(lowering_platforms=("cuda",))


def script(code, seconds=30.0):
    return run([sys.executable, "-c", code], {}, seconds, "first")


def test_a_process_that_ends_early_is_placed():
    begin = "import os\ndef say(text): print('{\"stage\": ' + text + '}', flush=True)\n"
    died = script(begin + 'say(\'"a", "x": 1\'); say(\'"b"\'); os.abort()')
    assert (died.reports, died.ended, died.stopped_in) == ({"a": {"x": 1}}, "died of SIGABRT", "b")
    code = "import subprocess, sys, time\n"
    code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    hung = script(code + "time.sleep(600)", 1.0)  # its child, which has its pipes, is stopped, too
    assert "did not end within 1 s" in hung.ended


@pytest.mark.parametrize("value", ["bogus", "off", ""])
def test_a_setting_that_is_none_is_a_problem(value):
    found = checks.settings(
        dataclasses.replace(HEALTHY, variables={"JAX_CUDNN_TUNING": value}), "e"
    )
    assert (found.status == "problem") == (value == "bogus")
