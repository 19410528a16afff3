"""The doctor's rules on facts that no machine at hand has, and its processes."""

import dataclasses
import sys
import time
import tomllib
from pathlib import Path

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn._core import compat
from jax_cudnn._core.planning import frontend, planner
from jax_cudnn.doctor import checks, facts, report, stages
from jax_cudnn.doctor.copies import Copy
from jax_cudnn.doctor.facts import Facts
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.process import Outcome, run

ROOT = Path(__file__).parent.parent
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


HEALTHY = Facts(
    python=((3, 12, 1), "python"),
    system="linux",
    packages={
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "jax-cuda13-plugin": "0.11.2",
        "jax-cuda13-pjrt": "0.11.2",
        "nvidia-cudnn-cu13": "9.19.0.56",
    },
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


def test_a_healthy_machine_with_a_gpu():
    problems, verdict = examined()
    assert not problems
    assert "all works" in verdict


# facts, the finding with the problem, a word of its reason, a word of its advice
BROKEN = {
    "old Python": ({"python": ((3, 10, 4), "")}, "Python", "too old", "Python 3.11"),
    "old jax": ({"packages": packages(jax="0.9.1")}, "jax", ">= 0.10.2", "pip install -U jax"),
    "old driver": ({"driver": told(12040)}, "CUDA plugin", "CUDA 12.4 at most", ">= 580"),
    "older driver": ({"driver": told(11080)}, "CUDA plugin", "CUDA 11.8 at most", ">= 580"),
    "plugin of another version": (
        {"packages": packages(jax_cuda13_plugin="0.11.1")},
        *("CUDA plugin", "jaxlib 0.11.2", "pip install -U 'jax[cuda13]'"),
    ),
    "half a plugin": (
        {"packages": packages(jax_cuda13_pjrt=None)},
        *("CUDA plugin", "incomplete", "--force-reinstall 'jax[cuda13]'"),
    ),
    "two plugins, driver of CUDA 12": (
        {"plugins": ("12", "13"), "driver": told(12080)},
        *("CUDA plugin", "only one", "pip uninstall jax-cuda13-plugin"),
    ),
    "two cuDNN packages": (
        {"packages": packages(nvidia_cudnn_cu12="9.19.0.56")},
        *("cuDNN package", "same folder", "pip uninstall nvidia-cudnn-cu12 nvidia-cudnn-cu13"),
    ),
    "cuDNN for the other CUDA": (
        {"packages": packages(nvidia_cudnn_cu12="9.19.0.56", nvidia_cudnn_cu13=None)},
        *("cuDNN package", "for CUDA 13", "pip uninstall nvidia-cudnn-cu12"),
    ),
    "old cuDNN": (
        {
            "copies": (Copy(CUDNN, ("nvidia-cudnn package",), 91001),),
            "jax": stages_of(cudnn_here={**USED, "cudnn": 91001}, executor={"cudnn": 91001}),
            "planning": Outcome({"worker": {**USED, "cudnn": 91001}}),
        },
        *("cuDNN", ">= 9.19.0", "pip install -U nvidia-cudnn"),
    ),
    "planning with another cuDNN": (
        {"planning": Outcome({"worker": {**USED, "cudnn": 92800}})},
        *("cuDNN", "the planning worker has 9.28.0", "keep one"),
    ),
    "stub driver": ({"driver": told(gpus=(), status=34)}, "GPUs", "answers 34", "stub"),
    "driver newer than the kernel's": (
        {"driver": told(gpus=(), status=803)},
        *("GPUs", "answers 803", "reboot"),
    ),
    "libraries not in the container": (
        {"driver": Outcome({"driver": {"missing": "No such file"}})},
        *("driver", "although there is /dev/nvidiactl", "--gpus all"),
    ),
    "GPU hidden from JAX": (
        {"jax": stages_of(devices=ON_THE_CPU), "variables": {"JAX_PLATFORMS": "cpu"}},
        *("JAX's devices", "JAX_PLATFORMS is 'cpu'", "unset JAX_PLATFORMS"),
    ),
    "GPU refused by JAX": (
        {"jax": stages_of(devices=ON_THE_CPU)},
        *("JAX's devices", "cuInit(0) failed: 803", "see JAX's own message"),
    ),
    "no frontend": (
        {"jax": stages_of(frontend_here=stages.ABSENT, cudnn_here=stages.ABSENT)},
        *("cuDNN frontend", "builds the cuDNN plans", "jax-cudnn[cuda12]"),
    ),
    "wrong results": (
        {"jax": stages_of(run={"error": {"summary": "7 values are wrong"}})},
        *("a graph", "7 values", "mend"),
    ),
    "the doctor's own failure": ({"failed": {"copies": "no disk"}}, "doctor", "no disk", "report"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_a_problem_with_advice(case):
    changes, name, why, fix = BROKEN[case]
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


def test_a_check_that_fails_is_a_finding():
    problems, _ = examined(packages=None)
    assert "AttributeError" in problems["jax"].why
    assert problems["jax"].value == "this check failed"


def test_the_table_has_every_part():
    findings = [Finding("one", "ok", "1"), Finding("second", "problem", "2\n3", "because", "do so")]
    assert report.table(findings).splitlines() == [
        "ok       one     1",
        "PROBLEM  second  2",
        "                 3",
        "                 why: because",
        "                 do:  do so",
    ]


# -- requirements ----------------------------------------------------------------------------------


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


def test_first_stages_are_the_first():
    firsts = {which: row[0].__name__ for which, row in stages.STAGES.items()}
    assert firsts == facts.FIRST_STAGES


def test_the_graph_that_is_tried_is_cudnns_and_not_left_to_xla(made_up_plans, monkeypatch):
    def refuse(spec, site):
        raise jc.UnsupportedGraphError("no engine")

    monkeypatch.setattr(planner, "_build", refuse)
    avals = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in stages.operands()]
    traced = jax.jit(stages.matmul_bias_relu).trace(*avals)
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match="no engine"):
        traced.lower(lowering_platforms=("cuda",))


# -- processes -------------------------------------------------------------------------------------


def script(code, seconds=30.0):
    return run([sys.executable, "-c", code], {}, seconds, "first")


def test_a_process_that_ends_early_is_placed():
    begin = "import os\ndef say(text): print('{\"stage\": ' + text + '}', flush=True)\n"
    done = script(begin + "say('\"a\"'); say('\"a\", \"x\": 1'); print('noise')")
    assert done == Outcome({"a": {"x": 1}}, "", "", "noise")
    died = script(begin + 'say(\'"a", "x": 1\'); say(\'"b"\'); os.abort()')
    assert (died.reports, died.ended, died.stopped_in) == ({"a": {"x": 1}}, "died of SIGABRT", "b")
    left = script("import sys; sys.exit('words')")
    assert (left.ended, left.stopped_in, left.tail) == (
        "ended with exit code 1",
        "first",
        "words",
    )


def test_a_process_that_hangs_is_stopped_with_its_children():
    began = time.monotonic()
    code = "import subprocess, sys, time\n"
    code += "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    hung = script(code + "time.sleep(60)", 1.0)  # its child has its pipes, too
    assert "did not end within 1 s" in hung.ended
    assert time.monotonic() - began < 20


def test_a_command_that_is_not_there():
    gone = run(["/nowhere/python"], {}, 1.0, "first")
    assert "did not start" in gone.ended
    assert gone.stopped_in == "first"
