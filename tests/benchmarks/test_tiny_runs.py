"""Every kind of measurement runs end to end on a CPU, with tiny shapes."""

import json

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(
    ("kind", "only"), [("cases", "*relu*"), *((k, None) for k in ("steps", "norms", "attention"))]
)
def test_tiny_cases_are_measured_and_rendered(kind, only, tmp_path, capsys):
    chosen = ["--only", only] if only else []
    assert main(["run", kind, "--tiny", "--out", str(tmp_path), *chosen]) == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert {entry["status"] for entry in result[kind].values()} == {"timed"}
    capsys.readouterr()
    assert main(["render", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in result[kind])
