"""`python -m jax_cudnn support`: where a user's function runs."""

import json
import re
import sys
import types

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core.plans.support import MEASURED, PUBLIC, Support, SupportRow
from jax_cudnn.commands import functions


def row(graph, gpu, reason=None):
    basis = PUBLIC if gpu == "A100" else MEASURED
    if reason is None:
        return SupportRow(graph, gpu, basis, True, "eng0", 0, 1)
    return SupportRow(graph, gpu, basis, False, reason=reason)


@pytest.fixture
def own(monkeypatch):
    """A user's module, and the calls of ``support``."""
    module = types.ModuleType("own_module")
    module.relu = jc.graph(lambda g, x, slope=None: g.relu(x, negative_slope=slope))
    monkeypatch.setitem(sys.modules, "own_module", module)
    asked = []

    def support(fn, *args, gpus=None, **static):
        asked.append((fn, args, gpus, static))
        rows = [row("relu", gpu, None if gpu == "H200" else "not supported") for gpu in gpus]
        return Support(tuple(rows), "9.28.0", "1.28.0")

    monkeypatch.setattr(functions, "support", support)
    return asked


def test_own_function(own, capsys):
    arguments = ["support", "own_module:relu", "bf16[8,64]", "slope=0.5", "--gpus", "H200"]
    assert main(arguments) == 0
    aval = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    assert own == [(sys.modules["own_module"].relu, (aval,), ["H200"], {"slope": 0.5})]
    assert capsys.readouterr().out.startswith("graph  GPU   engine")
    arguments[-1] = "H200,A100"
    assert main([*arguments, "--json"]) == 1  # one of the GPUs has no plan
    assert [r["gpu"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["H200", "A100"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("./own", "", "write own:f"),
        ("own.py", "", "write own:f"),
        ("own", "import nothing_here", r"No module named 'nothing_here' \(.*own.py:1\)"),
        ("own", "\n1 / 0", r"ZeroDivisionError: division by zero \(.*own.py:2\)"),
        ("own", "def f(:", r"invalid syntax.*own.py:1\)"),
    ],
)
def test_what_cannot_be_imported_is_said_in_one_error(
    name, content, words, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main(["support", f"{name}:f", "bf16[8]"]) == 1
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert "Traceback" not in said
