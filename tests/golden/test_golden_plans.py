"""The plans and derivatives of all cases are those of the golden file of the installed versions."""

import json

import golden
import pytest

pytestmark = pytest.mark.deviceless


@pytest.fixture(scope="module")
def wanted():
    installed = golden.versions()
    path = golden.file_of(installed)
    if path is None:
        pytest.skip(f"no golden file of {installed}; to write one: python -m golden.golden --write")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "gpu", ["H200", *(pytest.param(g, marks=pytest.mark.long) for g in ("A100", "H100", "B200"))]
)
def test_plans_are_the_golden_ones(gpu, wanted):
    got = {name: golden.plans(case, gpu) for name, case in golden.cases().items()}
    found = golden.differences(got, golden.golden_plans(wanted, gpu))
    assert not found, "\n".join(found)


def test_derivatives_and_batches_are_the_golden_ones(wanted):
    got = {name: golden.jaxprs(case) for name, case in golden.cases().items()}
    found = golden.differences(got, {n: case["jaxprs"] for n, case in wanted["cases"].items()})
    assert not found, "\n".join(found)


@pytest.mark.parametrize("ends", ["oldest", "newest"])
def test_a_golden_file_is_of_the_versions_that_ci_installs(ends):
    pins = (golden.FOLDER.parents[1] / f"{ends}.txt").read_text()
    found = json.loads((golden.FOLDER / f"{ends}.json").read_text())["versions"]
    assert f"\njax=={found['jax']}" in pins
    assert f"\nnvidia-cudnn-frontend=={found['nvidia-cudnn-frontend']}\n" in pins
    for package in ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        assert f"\n{package}=={found['cuDNN']}." in pins


def test_a_difference_is_told_by_case_and_line():
    want = {"conv": {"split": ["cuDNN eng4: conv.0"]}, "same": {"split": ["XLA: add.0"]}}
    got = {**want, "conv": {"split": ["cuDNN eng5: conv.0"]}}
    told = ["conv", "  - split: cuDNN eng4: conv.0", "  + split: cuDNN eng5: conv.0"]
    assert golden.differences(got, want) == told
    assert golden.differences({}, want) == ["conv", told[1], "same", "  - split: XLA: add.0"]
