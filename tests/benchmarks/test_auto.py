"""The default against plain JAX: runs, what is made of them, and the table for planning."""

import copy
import dataclasses
import itertools
import json

import pytest

import jax_cudnn as jc
from benchmarks import documents, losses, overview
from benchmarks.__main__ import main
from benchmarks.auto import run, tables
from benchmarks.auto.bench import WAYS, Bench
from benchmarks.case import Side
from benchmarks.measure import TINY, balanced
from benchmarks.queued import Fillers


def measured(case):
    bench = Bench(case, TINY)
    for key, (lowered, options) in bench.lowered.items():
        bench.compiled(key, lambda lowered=lowered, options=options: lowered.compile(options))
    return dict(bench.measured(Fillers()))


def test_runs_go_on_where_they_were_cut_and_parts_are_joined(tmp_path, monkeypatch, capsys):
    out, parts = tmp_path / "all.json", [tmp_path / "1.json", tmp_path / "2.json"]
    few = ["auto", "--tiny", "--only", "*_norm/128x32"]
    for number, part in enumerate(parts, 1):
        assert main([*few, "--runs", "2", "--part", f"{number}/2", "--out", str(part)]) == 0
    names = [json.loads(part.read_text())["cases"].keys() for part in parts]
    assert [*map(list, names)] == [["rms_norm/128x32"], ["layer_norm/128x32"]]
    assert main([*few, "--join", *map(str, parts[::-1]), "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [*cases] == ["rms_norm/128x32", "layer_norm/128x32"]  # in the order of all cases
    for case in cases.values():
        assert case["status"] == "timed"
        *halves, step = list(case["programs"].values())[1:]
        for at, both in enumerate(step["runs"]):
            each = [half["runs"][at]["us"]["default"] for half in halves]
            assert both["us"]["default"] == pytest.approx(sum(each), rel=1e-3)
        for program in case["programs"].values():
            first, second = program["runs"]
            plain = {side: us for side, us in first["us"].items() if side not in WAYS}
            assert len(plain) >= 2
            assert {*WAYS} <= first["us"].keys() | first["not_run"].keys()
            assert first["best_plain"] == min(plain, key=plain.get)
            expected = min(plain.values()) / first["us"]["default"]
            assert first["ratio"] == pytest.approx(expected, abs=1e-4)
            middle = (first["ratio"] + second["ratio"]) / 2
            assert program["ratio"] == pytest.approx(middle, abs=1e-4)
            assert first["oracle"] >= first["ratio"]
    capsys.readouterr()
    assert main(["render", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "layer_norm/128x32, backward" in shown
    assert "over 4 programs" in shown  # a forward, and both halves of a step together

    monkeypatch.setattr(run, "Bench", None)  # nothing is left to be measured
    assert main([*few, "--runs", "2", "--part", "1/2", "--out", str(parts[0])]) == 0
    assert json.loads(parts[0].read_text())["cases"] == {
        "rms_norm/128x32": cases["rms_norm/128x32"]
    }


def test_what_is_wrong_is_not_timed():
    (task,) = (t for t in run.tasks(tiny=True) if t.name.endswith("sum-of-squares"))
    case = task.make()

    def doubled(side):
        return Side(lambda **given: {"y": 2 * side.function(**given)["y"]})

    first = next(iter(case.xla))
    found = measured(dataclasses.replace(case, xla={**case.xla, first: doubled(case.xla[first])}))
    entry = found["forward"]
    assert entry["status"] == "timed"
    assert first not in entry["us"]
    assert entry["not_run"][first].startswith("WRONG")
    assert entry["best_plain"] != first

    ours = case.ours
    wrong = dataclasses.replace(case, ours=lambda way: ours(way) if way else doubled(ours(way)))
    entry = measured(wrong)["forward"]
    assert entry["status"] == "WRONG"
    assert "default" not in entry["us"]
    assert "ratio" not in entry


def test_a_step_is_wrong_where_a_half_is():
    forward = {"status": "timed", "us": {"default": 2.0, "plain": 3.0}, "plans": {}}
    backward = {"status": "WRONG", "us": {"plain": 4.0}, "plans": {}}
    step = object.__new__(Bench)._step(forward, backward)
    assert step["status"] == "WRONG"
    assert step["us"] == {"plain": 7.0}
    assert "ratio" not in step


def test_a_case_in_which_a_process_ends_is_noted_and_the_others_go_on(tmp_path):
    path, todo = tmp_path / "cut.json", run.chosen("*sum-of-squares*", tiny=True)
    begun = {"environment": run.environment(), "cases": {}, "under_way": [todo[0].name]}
    path.write_text(json.dumps(begun))
    run.one_run(path, todo, 0, tiny=True, crashed=True)
    cases = json.loads(path.read_text())["cases"]
    states = {name: case["status"] for name, case in cases.items()}
    assert states == {todo[0].name: "failed", todo[1].name: "timed"}


def program(xla, cudnn, plain, segments, default=None, runs_on="cuDNN", host=(), **plan):
    us = {"default": default or cudnn, "xla": xla, "cudnn": cudnn, "plain": plain}
    figures = {"ratio": plain / us["default"], "xla_ratio": xla / plain, "oracle": 1.5}
    one = {"us": us, "host": [*host], "runs_on": runs_on, "not_run": {}, **figures}
    plans = {"cudnn": {"segments": segments, **plan}}
    return {"runs": [one], "plans": plans, "status": "timed", **figures}


@pytest.fixture
def result():
    one, two = ["p", 10, 2], ["q", 20, 4]
    slow = program(120, 50, 120, [one])
    slow["runs"] += [copy.deepcopy(slow["runs"][0]) for _ in range(2)]
    for at, xla in enumerate((100, 150, 500)):
        slow["runs"][at]["us"]["xla"] = xla
    cases = {
        "norm": {
            "family": "norms",
            "programs": {
                "forward": slow,
                "backward": program(80, 100, 76, [two], default=80, runs_on="XLA"),
            },
        },
        "conv": {"family": "convs", "programs": {"forward": program(30, 20, 20, [two])}},
        "of two plans": {"family": "convs", "programs": {"x": program(9, 9, 9, [one, two])}},
        "cut": {"family": "convs", "programs": {"x": program(9, 9, 9, [one], XLA=1)}},
        "of the host": {
            "family": "convs",
            "programs": {"x": program(9, 9, 9, [one], host=["cudnn"])},
        },
    }
    where = {"device": "NVIDIA X", "date": "2026-01-02", "cudnn": "9.99.0", "jax": "0.0"}
    return {"environment": {**where, "sm_version": 91}, "cases": cases}


def test_the_summary_names_losses_and_slow_forms_of_graphs(result):
    said = tables.summary(result)
    ratios = [2.4, 0.95, 1, 1, 1, 1]
    assert said["geomean"] == tables.geomean(ratios) == pytest.approx(1.1472, abs=1e-3)
    assert said["families"]["norms"] == tables.geomean(ratios[:2])
    assert said["slower"] == {"norm, backward": 0.95}
    assert said["faster"] == 1
    where_default = said["xla_where_default"]
    assert where_default["programs"] == 1
    assert where_default["max"] == pytest.approx(80 / 76)
    assert [*where_default["above"]] == ["norm, backward"]
    assert said["xla"]["max"] == 1.5


def test_the_picture_has_a_bar_for_each_family(result, tmp_path):
    drawn = tmp_path / "drawn.svg"
    overview.plot_auto(result, drawn)
    words = documents._words(drawn.read_text())
    assert {"norms (2)", "convs (4)", "all (6)"} <= {*words}
    assert f"{tables.geomean([2.4, 0.95]):.2f}" in words


def test_the_table_for_planning_holds_graphs_that_are_one_plan(result, tmp_path):
    """With wins and losses, in the place of what was known of this architecture."""
    table = tmp_path / "table.json"
    table.write_text('{"100": {"patterns": {"kept": []}}, "91": {"patterns": {"old": []}}}')
    written = json.loads(losses.merged([result], table))
    assert [*written] == ["91", "100"]
    assert written["100"] == {"patterns": {"kept": []}}
    environment = {k: v for k, v in result["environment"].items() if k != "sm_version"}
    rows = {
        "p": [[10, 2, 3.0, "norm, forward"]],
        "q": [[20, 4, 0.8, "norm, backward"], [20, 4, 1.5, "conv"]],
    }
    assert written["91"] == {**environment, "patterns": rows}
    with pytest.raises(jc.GraphError, match="architecture 91"):
        losses.merged([result, result], table)


def test_the_committed_table_is_that_of_the_committed_results():
    assert main(["losses", "--check"]) == 0
    for file in documents.autos():
        for name, case in documents.read(file)["cases"].items():
            assert case["programs"], f"{name} was not measured: {case.get('reason')}"


def test_in_balanced_rounds_each_function_follows_each_other_once():
    for count in (2, 3, 4, 5):
        rounds = [balanced(count, number) for number in range(count + count % 2)]
        assert all(sorted(order) == [*range(count)] for order in rounds)
        follow = {pair for order in rounds for pair in itertools.pairwise(order)}
        assert len(follow) == count * (count - 1)
