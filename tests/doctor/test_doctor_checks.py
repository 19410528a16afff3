"""The doctor's rules on made-up facts, and its processes."""

import dataclasses
import tomllib
from pathlib import Path

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.planning import frontend, planner
from jax_cudnn.commands import doctor, facts
from jax_cudnn.commands.facts import Copy, Facts

ROOT = Path(__file__).parents[2]
GPU = {"name": "NVIDIA H200", "capability": "9.0", "gib": 139.8}
CUDNN = "/site-packages/nvidia/cudnn/lib/libcudnn.so.9"
ACCEPTED = {"registration": {"accepted": True}}
USED = {"paths": [CUDNN]}


def told(version=13000, gpus=(GPU,), status=0, text=""):
    driver = {"path": "libcuda.so.1", "version": version, "status": status, "text": text}
    return {"driver": {**driver, "gpus": list(gpus)}}


def error_of(check, *arguments):
    """The report of a stage that raises what a check of the frontend does."""
    with pytest.raises(jc.LibraryError) as caught:
        check(*arguments)
    return {"error": vars(caught.value)}


REPORTS = {
    **told(),
    "devices": {"platform": "gpu", "gpus": ["NVIDIA H200"], "paths": [CUDNN], "heard": []},
    "frontend_here": {"version": "1.28.0", "path": "cudnn"},
    "cudnn_here": USED,
    "executor": {"path": "libjax_cudnn.so", **USED},
    "compute": {"device": "NVIDIA H200", "platform": "gpu"},
    "planned": {"engine": "eng1", "seconds": 0.3, **USED},
    **ACCEPTED,
}
VERSIONS = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.11.2")
HEALTHY = Facts(
    packages={**VERSIONS, "nvidia-cudnn-cu13": "9.19.0.56"},
    plugins=("13",),
    signs=("/dev/nvidiactl", "kernel module 580.1"),
    copies=(Copy(CUDNN, ["nvidia-cudnn package"], 91900),),
    reports=REPORTS,
)
ON_THE_CPU = {"platform": "cpu", "gpus": [], "paths": [], "heard": ["cuInit(0) failed: 803"]}


def packages(**changes):
    """HEALTHY's packages with changes; None removes one."""
    changed = {**HEALTHY.packages, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return {name: version for name, version in changed.items() if version is not None}


def reports(**changes):
    return {"reports": {**REPORTS, **changes}}


def examined(**changes):
    changed = dataclasses.replace(HEALTHY, **changes)
    findings = doctor.examine(changed)
    problems = {name: f for name, f in findings.items() if f.status == "problem"}
    return problems, doctor.verdict(changed, findings)


CU12 = "nvidia-cudnn-cu12"
NO_GPU = reports(devices=ON_THE_CPU)
OLD = error_of(frontend.check_cudnn, 91001)
# facts, the finding with the problem, a word of its reason, a word of its advice
BROKEN = [
    (reports(**told(12040)), "CUDA plugin", "up to CUDA 12.4", ">= 580"),
    ({"packages": packages(jax_cuda13_plugin="0.11.1")}, "CUDA plugin", "jaxlib 0.11.2", "-U"),
    ({"packages": packages(nvidia_cudnn_cu12="9.19.0.56")}, "cuDNN package", "same folder", CU12),
    (
        {"copies": (Copy(CUDNN, ["nvidia-cudnn package"], 91001),), **reports(cudnn_here=OLD)},
        *("cuDNN", ">= 9.19.0", "pip install -U nvidia-cudnn"),
    ),
    (
        reports(registration={"error": {"summary": "newer API version"}}),
        *("executor", "newer API version", "install"),
    ),
    (reports(**told(gpus=(), status=803)), "GPUs", "returned 803", "reboot"),
    ({**NO_GPU, "variables": {"JAX_PLATFORMS": "cpu"}}, "JAX's devices", "'cpu'", "unset"),
    (NO_GPU, "JAX's devices", "cuInit(0) failed: 803", "read JAX's message"),
    (
        reports(frontend_here=facts.ABSENT, cudnn_here=facts.ABSENT),
        *("cuDNN frontend", "builds cuDNN plans", "jax-cudnn[cuda12]"),
    ),
    (
        {**reports(**told(gpus=(), status=100)), "variables": {"CUDA_VISIBLE_DEVICES": "-1"}},
        *("GPUs", "CUDA_VISIBLE_DEVICES is '-1'", "unset CUDA_VISIBLE_DEVICES"),
    ),
]


def test_a_healthy_machine_with_a_gpu():
    problems, verdict = examined()
    assert (problems, "everything works" in verdict) == ({}, True)


def test_without_a_gpu_the_plugins_error_can_be_silenced():
    absent = reports(devices=ON_THE_CPU, driver={"missing": "No such file"})
    changed = dataclasses.replace(HEALTHY, signs=(), **absent)
    for variables, fix in (({}, "export JAX_PLATFORMS=cpu"), ({"JAX_PLATFORMS": "cpu"}, "")):
        found = doctor.devices(dataclasses.replace(changed, variables=variables))
        assert (found.status, found.fix) == ("ok", fix)


@pytest.mark.parametrize(("changes", "name", "why", "fix"), BROKEN)
def test_what_does_not_fit_is_a_problem_with_advice(changes, name, why, fix):
    problems, verdict = examined(**changes)
    assert name in problems
    assert why in problems[name].value + problems[name].why
    assert fix in problems[name].fix
    words = " ".join(problems[name].fix.split())
    assert words in " ".join(verdict.split()) or words == doctor.AFTERWARDS


def test_an_unused_copy_of_another_version_is_a_warning():
    system = Copy("/usr/lib/libcudnn.so.9", ["system folder"], 90100)
    changed = dataclasses.replace(HEALTHY, copies=(*HEALTHY.copies, system))
    findings = doctor.examine(changed)
    assert findings["cuDNN"].status == "warning"
    assert "9.1.0 from system folder" in findings["cuDNN"].value
    assert not any(finding.status == "problem" for finding in findings.values())


def test_requirements_are_the_packaged_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dotted = [".".join(map(str, numbers)) for numbers in (doctor.OLDEST_PYTHON, compat.OLDEST_JAX)]
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
    function, arrays = facts.graph()
    traced = jax.jit(function).trace(*arrays)
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match="no engine"):
        traced.lower(lowering_platforms=("cuda",))


def script(code, seconds=30.0):
    return facts.run(["-c", code], ("a", "b", "c"), {}, seconds)


def test_a_process_that_ends_early_is_placed():
    begin = "import os\ndef say(text): print('{\"stage\": ' + text + '}', flush=True)\n"
    died = script(begin + "say('\"a\", \"x\": 1'); print('last words', flush=True); os.abort()")
    assert died["a"] == {"x": 1}
    assert died["b"]["error"] == {"summary": "its process died of SIGABRT", "why": "last words"}
    assert "in stage 'b'" in died["c"]["untried"]
    code = "import subprocess, sys, time\n"
    code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    hung = script(code + "time.sleep(600)", 1.0)  # its child, which has its pipes, is stopped, too
    assert "did not end within 1 s" in hung["a"]["error"]["summary"]


@pytest.mark.parametrize("value", ["bogus", "off", ""])
def test_a_setting_that_is_none_is_a_problem(value):
    found = doctor.settings(dataclasses.replace(HEALTHY, variables={"JAX_CUDNN_TUNING": value}))
    assert (found.status == "problem") == (value == "bogus")
