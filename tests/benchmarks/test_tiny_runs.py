"""Every suite runs end to end on a CPU, with tiny shapes and without PyTorch; documents show what
the committed results give."""

import json

import pytest

import jax_cudnn as jc
from benchmarks import documents, run
from benchmarks.__main__ import main

FEW = {
    "cases": "resnet50/3x3-256-at-14/*",
    "steps": "per-example*",
    "norms": "batch_norm-residual-relu*",
    "attention": "packed*",
    "flax": "resnet*",
}


@pytest.mark.parametrize(
    ("suite", "few"),
    [
        pytest.param(suite, few, marks=() if few and suite != "flax" else pytest.mark.long)
        for suite in FEW
        for few in (True, False)
    ],
)
def test_tiny_cases_are_measured_and_rendered(suite, few, tmp_path, capsys):
    chosen = ["--only", FEW[suite]] if few else []
    assert main(["run", suite, "--tiny", "--out", str(tmp_path), *chosen]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert {entry["status"] for entry in result[suite].values()} == {"timed"}
    capsys.readouterr()
    assert main(["render", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in result[suite])
    assert "not measured: torch is not installed" in shown or suite not in ("norms", "attention")


def test_cases_measured_anew_take_the_place_of_earlier_ones(tmp_path):
    environment = {"device": "NVIDIA H200", "cudnn": "9.19.0", "date": "2026-01-01"}
    earlier = {"environment": environment, "cases": {"a": {"ratio": 1.0}, "b": {"ratio": 2.0}}}
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(earlier))
    later = {**environment, "date": "2026-02-01"}
    part = {"environment": later, "cases": {"b": {"ratio": 3.0}, "c": {"ratio": 4.0}}}
    run.merged(part, path, "cases")
    cases = {"a": {"ratio": 1.0}, "b": {"ratio": 3.0}, "c": {"ratio": 4.0}}
    assert json.loads(path.read_text()) == {"environment": environment, "cases": cases}
    other = {"environment": {**later, "cudnn": "9.28.0"}, "cases": {}, "steps": {}}
    with pytest.raises(jc.GraphError, match="other versions"):
        run.merged(other, path, "cases")


@pytest.mark.parametrize("command", ["render", "numerics"])
def test_documents_show_what_is_generated(command, capsys):
    assert main([command, "--check"]) == 0, capsys.readouterr().out


def test_a_document_is_compared_and_rewritten(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- support -->\n<!-- /support -->\nafter\n")
    for shown in ("one\ntwo", "one\nthree"):
        assert documents.placed(document, "support", shown, check=True)
        documents.placed(document, "support", shown, check=False)
        assert not documents.placed(document, "support", shown, check=True)
        marks = f"<!-- support -->\n{shown}\n<!-- /support -->"
        assert document.read_text() == f"before\n{marks}\nafter\n"
