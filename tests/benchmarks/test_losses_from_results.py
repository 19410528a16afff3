"""How results give the table of patterns at which cuDNN loses."""

import copy
import json

import pytest

from benchmarks import documents, losses, run
from benchmarks.__main__ import main
from jax_cudnn._core.planning import losses as known
from jax_cudnn.commands import programs


def entry(pattern, ratio, largest, **changes):
    figures = {"ratio_reference": ratio, "ratio_reference_max": largest}
    return {"status": "timed", "pattern": pattern, "ratio": 0.1, **figures, **changes}


CASES = {
    "lost a": entry("lost", 0.5, 0.99),
    "lost b": entry("lost", 0.9499, 0.96),
    "close a": entry("close", 0.5, 0.6),
    "close b": entry("close", 0.95, 0.96),
    "noisy a": entry("noisy", 0.5, 0.6),
    "noisy b": entry("noisy", 0.5, 1.0),
    "won a": entry("won once", 0.5, 0.6),
    "won b": entry("won once", 1.5, 1.6),
    "single": entry("single", 0.1, 0.1),
    "refused": entry("lost", 9.0, 9.0, status="unsupported"),
    "unnamed": {"status": "timed", "ratio": 0.1},
}
ENVIRONMENT = {"device": "NVIDIA X", "date": "2026-01-02", "cudnn": "9.99.0", "jax": "0.0"}


@pytest.fixture
def result():
    return copy.deepcopy({"environment": {**ENVIRONMENT, "sm_version": 91}, "cases": CASES})


def test_a_pattern_is_lost_when_the_reference_is_faster_in_every_case(result):
    lost = {"lost": {"lost a": 0.5, "lost b": 0.9499}}
    assert losses.generate(result) == {"91": {**ENVIRONMENT, "patterns": lost}}
    lines = losses.render(result).splitlines()[2:]
    shown = {line.split(" | ")[0].strip("| "): line for line in lines}
    why = {
        "close": "no: close b at 0.95",
        "lost": "| 2 | 0.50 to 0.95 | yes |",
        "noisy": "no: noisy b at 0.50, up to 1.00",
        "single": "no: only 1 case",
        "won once": "no: won b at 1.50",
    }
    assert [*shown] == [*why]
    assert all(words in shown[pattern] for pattern, words in why.items())


def test_each_architecture_has_its_part_of_the_table(result, tmp_path):
    table = tmp_path / "table.json"
    table.write_text('{"100": {"patterns": {"kept": {}}}, "91": {"patterns": {"old": {}}}}')
    written = json.loads(losses.merged([result], table))
    assert list(written) == ["91", "100"]
    assert written["91"]["patterns"].keys() == {"lost"}
    assert written["100"] == {"patterns": {"kept": {}}}


def norm(reference, whole, hidden=True, **plans):
    us = {
        "reference": {"median": reference, "q1": 0, "q3": reference * 1.1},
        "cuDNN": {"median": whole, "q1": whole * 0.9, "q3": 0},
    }
    plans = {"cuDNN": {"patterns": ["lost"], **plans}}
    held = {"us": us, "plans": plans, "host_hidden": {"cuDNN": hidden}}
    return {"programs": {"forward": held}}


def test_normalizations_are_filed_under_their_plans(result):
    """A program of several plans, or of none, says nothing of one."""
    norms = {"a": norm(50, 100), "b": norm(70, 100), "two": norm(1, 9, patterns=["lost", "lost"])}
    norms["cut"] = norm(900, 100, XLA=1)
    norms["the host's time"] = norm(48, 49, hidden=False)
    result = {"environment": result["environment"], "norms": norms}
    found = losses.generate(result)["91"]["patterns"]
    assert found == {"lost": {"a, forward": 0.5, "b, forward": 0.7}}
    norms["b"] = norm(89, 100)  # in some rounds slower
    assert losses.generate(result)["91"]["patterns"] == {}


def test_the_committed_table_is_that_of_the_committed_results():
    """And their cases have the patterns still that they are filed under."""
    assert main(["losses", "--check"]) == 0
    graphs = {case.name: case for case in run.cases("cases")}
    assert graphs.keys() == documents.read(documents.committed("h200"))["cases"].keys()
    for part in known.table().values():
        for name, cases in part["patterns"].items():
            for case in [graphs[case] for case in cases if case in graphs]:
                ((spec, _, _),) = programs.graphs(case.ours, *case.avals)
                assert known.pattern(spec) == name
