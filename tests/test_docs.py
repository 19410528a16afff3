"""The documents show the committed data, and their examples run."""

import doctest
import json
import re
from pathlib import Path

import pytest

from jax_cudnn._core import trace
from jax_cudnn.bench.run import RESULTS, render

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("document", ["README.md", "BUILD.md"])
def test_shown_figures_are_the_committed_ones(document):
    text = (ROOT / document).read_text()
    shown = re.search(r"<!-- bench -->\n(.*?)\n<!-- /bench -->", text, re.S)
    assert shown is not None
    assert shown[1] == render(json.loads((RESULTS / "h200.json").read_text()))


def test_readme_example_runs():
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(first[1], names)
    assert names["y"].shape == (8, 64, 28, 28)


@pytest.mark.deviceless
def test_readme_plans_without_a_gpu():
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[:2]
    names = {}
    exec(first + second, names)
    assert names["plan"].engine
    assert "jax_cudnn" in names["lowered"].as_text()


def test_docstring_examples_run():
    result = doctest.testmod(trace)
    assert result.attempted >= 3
    assert result.failed == 0


def test_goals_hold_in_the_committed_figures():
    data = json.loads((RESULTS / "h200.json").read_text())
    for runs in data["host"].values():
        for run in runs:
            chain = run["chain_us_per_convolution"]
            assert chain["ours"]["median"] <= chain["xla"]["median"]
    assert all(r["ns_per_call"]["added"] <= 1000 for r in data["host"]["no_command_buffers"])
    assert data["first_trace_of_10_nodes_ms"]["median"] <= 2
    assert max(data["cold_plan_ms"].values()) <= 1000
