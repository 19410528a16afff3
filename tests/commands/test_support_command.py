"""`python -m jax_cudnn support`: where a user's function runs."""

import json
import sys
import types

import jax
import pytest

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core.plans.support_value import MEASURED, PUBLIC, Support, SupportRow
from jax_cudnn.commands import support as command


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

    monkeypatch.setattr(command, "support", support)
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
