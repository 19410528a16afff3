"""The benchmark: honest clocks, checked results, cases that compute the same on both sides."""

import copy
import dataclasses
import itertools
import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn.__main__ import main
from jax_cudnn._core import implementation
from jax_cudnn._core.planning.cost import Cost, cost
from jax_cudnn.bench import (
    Comparison,
    Formulation,
    agreement,
    compare,
    measure,
    plot,
    programs,
    tables,
    timing,
)
from jax_cudnn.bench.avals import load_function, parse_aval
from jax_cudnn.bench.models.cases import ModelCase, Operand, model_cases
from jax_cudnn.bench.run import RESULTS, merge, select
from jax_cudnn.bench.steps import measure as steps
from jax_cudnn.bench.steps import models as step_models
from jax_cudnn.bench.steps import tables as step_tables

CASES = {case.name: case for case in model_cases()}
QUICK = {"calls": 1, "rounds": 1, "seconds": 0.0}


@jc.graph
def product(g, x, w):
    return g.relu(g.matmul(x, w))


# -- what a user writes in a shell -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[8,64]", (8, 64), "bfloat16"),
        ("float32[]", (), "float32"),
        (" f8e4m3fn[128, 3] ", (128, 3), "float8_e4m3fn"),
        ("s8[4,]", (4,), "int8"),
        ("pred[2]", (2,), "bool"),
    ],
)
def test_avals_are_parsed(text, shape, dtype):
    aval = parse_aval(text)
    assert (aval.shape, aval.dtype.name) == (shape, dtype)


@pytest.mark.parametrize("text", ["bf16", "bf16[2", "f32[2,,3]", "f32[-1]", "f32[n]", "[2]", ""])
def test_other_text_is_refused_with_an_example(text):
    with pytest.raises(jc.GraphError, match="bf16\\[8,64,28,28\\]"):
        parse_aval(text)


def test_unknown_dtypes_are_named():
    with pytest.raises(jc.GraphTypeError, match="bf17"):
        parse_aval("bf17[2]")


def test_functions_are_found_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_here.py").write_text("class A:\n    f = staticmethod(abs)\nx = 1\n")
    (tmp_path / "broken_here.py").write_text("import no_such_module_at_all\n")
    assert load_function("found_here:A.f") is abs
    assert "" not in sys.path[:1]
    with pytest.raises(jc.GraphError, match="there is no module 'not_here'"):
        load_function("not_here:f")
    with pytest.raises(jc.GraphError, match="has no 'g'"):
        load_function("found_here:g")
    with pytest.raises(jc.GraphTypeError, match="is no function"):
        load_function("found_here:x")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        load_function("broken_here:f")
    with pytest.raises(jc.GraphError, match="module:function"):
        load_function("found_here")


# -- clocks ----------------------------------------------------------------------------------------


class Clock:
    """A clock that only functions advance."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def function(self, name, seconds):
        def run():
            self.now += seconds
            self.calls.append(name)

        return run


def test_functions_take_turns_and_times_are_those_of_one_call():
    clock = Clock()
    functions = {"a": clock.function("a", 2.0), "b": clock.function("b", 3.0)}
    times = timing.interleaved(functions, (), rounds=8, calls=5, clock=clock)
    assert times == {"a": [2.0] * 8, "b": [3.0] * 8}
    after_warm_up = clock.calls[6:]
    assert after_warm_up == (["a"] * 5 + ["b"] * 5) * 8


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 7), (95.0, 10), (1e9, 15)])
def test_a_budget_ends_rounds_but_not_before_the_seventh(seconds, rounds):
    clock = Clock()
    times = timing.interleaved(
        {"a": clock.function("a", 2.0)}, (), rounds=15, calls=5, seconds=seconds, clock=clock
    )
    assert len(times["a"]) == rounds


def test_summary_has_the_quartiles():
    figures = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0], 10)
    assert figures == {"median": 30, "min": 10, "max": 50, "q1": 20, "q3": 40}
    assert set(timing.summary([2.0]).values()) == {2.0}


def test_slow_functions_are_called_less_often():
    ticks = itertools.count()  # each look at the clock is a second later
    x = jnp.ones(3)
    found = compare({"f": jnp.sin}, x, seconds=40.0, clock=lambda: float(next(ticks)))
    assert found.calls == 11  # 7 rounds of 11 calls of one second fit into twice 40 s
    found = compare({"f": jnp.sin}, x, seconds=math.inf, clock=lambda: float(next(ticks)))
    assert found.calls == 30
    assert found.seconds["f"] == [1 / 30] * 15


# -- agreement -------------------------------------------------------------------------------------


def test_disagreeing_functions_are_not_timed(key):
    x = jax.random.normal(key, (64, 64))
    found = compare({"f": lambda x: x, "same": lambda x: x * 1.0001, "off": lambda x: x * 1.1}, x)
    assert found.wrong == ("off",)
    assert not found.seconds
    assert "WRONG" in str(found)
    with pytest.raises(jc.GraphError, match="off disagrees"):
        found.ratio()


def test_a_wrong_tile_in_a_large_result_is_found(key):
    want = jax.random.normal(key, (2048, 2048), jnp.bfloat16)
    got = want.at[64:72, 64:72].set(0)
    difference = agreement.difference(got, want)
    tolerance = agreement.tolerance((want,), want)
    assert difference.relative < tolerance  # the norm alone would miss it
    assert not difference.within(tolerance)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_values_that_are_not_finite_must_be_the_same(value):
    want = jnp.ones(8)
    got = want.at[3].set(value)
    assert not agreement.difference(got, want).within(1e30)
    assert not agreement.difference(want, got).within(0.1)
    assert agreement.difference(got, got).within(0.0)


def test_tolerance_is_that_of_the_coarsest_type_that_is_rounded_to():
    f8, bf16, f32 = (jnp.ones(2, t) for t in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32))
    assert agreement.tolerance((f8, f8), bf16) == 2.0**-6
    assert agreement.tolerance((f32,), f32) == 2.0**-9
    assert agreement.tolerance((bf16,), f8) == 2.0**-2


def test_results_of_other_shapes_are_refused():
    with pytest.raises(jc.GraphError, match="different shapes"):
        compare({"f": lambda x: x, "g": lambda x: x[:1]}, jnp.ones(4))


def test_prepare_and_finish_are_for_the_check_and_not_for_the_clock(key):
    x = jax.random.normal(key, (8, 16))
    seen = []

    def transposed(x):
        seen.append(x.shape)
        return x + 1

    way = Formulation(transposed, lambda x: (x.T,), lambda y: y.T)
    found = compare({"f": lambda x: x + 1, "transposed": way}, x, **QUICK)
    assert not found.wrong
    assert seen == [(16, 8)]
    assert len(found.seconds["transposed"]) == 7


def test_another_function_that_fails_is_left_out_and_the_first_one_must_run():
    def broken(x):
        raise ValueError("not today")

    found = compare({"f": jnp.sin, "broken": broken, "g": jnp.sin}, jnp.ones(3), **QUICK)
    assert found.failed == {"broken": "ValueError: not today"}
    assert found.best_other == "g"
    assert found.ratio() == found.median("g") / found.median("f")
    with pytest.raises(ValueError, match="not today"):
        compare({"broken": broken, "f": jnp.sin}, jnp.ones(3))
    with pytest.raises(jc.GraphError, match="needs functions"):
        compare({}, jnp.ones(3))


# -- what graphs cost ------------------------------------------------------------------------------


def _cost(function, *avals):
    return programs.graphs_cost(function, *(jax.ShapeDtypeStruct(s, d) for s, d in avals))


def test_cost_of_a_product_with_an_epilogue():
    @jc.graph
    def linear(g, x, w, b):
        return g.relu(g.matmul(x, w) * 0.5 + b)

    m, k, n = 3, 5, 7
    found = _cost(linear, ((2, m, k), "bfloat16"), ((1, k, n), "bfloat16"), ((1, 1, n), "float32"))
    multiply_adds = sum(1 for _ in itertools.product(range(2), range(m), range(k), range(n)))
    assert found.flops == 2 * multiply_adds + 3 * 2 * m * n
    assert found.bytes == 2 * (2 * m * k + k * n) + 4 * n + 4 * 2 * m * n  # 0.5 is by value


def test_cost_of_convolutions_is_that_of_their_windows():
    name = "resnet50/3x3-128-s2-at-56/scale-bias-relu"
    n, h, c, k = 256, 28, 128, 128
    assert _of(name).flops == 2 * n * h * h * k * c * 9 + 3 * n * h * h * k
    assert _of(name).bytes == 2 * (n * 56 * 56 * c + k * 9 * c + 2 * k + n * h * h * k)
    volume = 2 * 4 * 64**3 * 64 * 64 * 27
    for part in ("fprop", "dgrad", "wgrad"):
        assert _of(f"unet3d/3x3x3-64-at-64/{part}").flops == volume
        depthwise = _of(f"convnext/depthwise-7x7-96-at-56/{part}")
        assert depthwise.flops == 2 * 64 * 56 * 56 * 96 * 49


def _of(name):
    return programs.graphs_cost(CASES[name].ours, *CASES[name].avals)


def test_an_operand_that_is_used_twice_is_read_once():
    @jc.graph
    def square(g, x):
        return g.mul(x, x)

    assert _cost(square, ((4, 4), "float32")) == Cost(16, 2 * 64)
    assert cost(square.trace(jnp.ones((4, 4)))[1].spec) == Cost(16, 128)


def test_graphs_are_found_inside_of_programs():
    x, w = jnp.ones((1, 8, 8)), jnp.ones((1, 8, 8))
    once = programs.graphs_cost(product, x, w)

    def repeated(x, w):
        body = lambda c, _: (jax.jit(product)(c, w), None)  # noqa: E731
        return jax.checkpoint(product)(jax.lax.scan(body, x, None, length=5)[0], w)

    assert programs.graphs_cost(repeated, x, w) == once * 6
    with pytest.raises(jc.GraphError, match="inside of scan"):
        programs.with_references(repeated)(x, w)


def test_with_references_no_graph_is_left(key):
    x, w = jax.random.normal(key, (2, 1, 8, 8))

    def model(x, w):
        h = jax.jit(lambda x: product(x, w) + jnp.sum(x))(x)
        return {"y": jax.checkpoint(lambda h: product(h * 2, w))(h), "w": w}

    plain = programs.with_references(model)
    assert len(programs.graphs(model, x, w)) == 2
    assert not programs.graphs(plain, x, w)
    got, want = plain(x, w), model(x, w)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)


# -- the cases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_both_sides_of_a_case_compute_the_same(name, key):
    small = CASES[name].small
    assert small is not None
    found = compare(small.functions, *small.arrays(key), **QUICK)
    assert not found.failed
    assert not found.wrong, found
    assert set(found.differences) == set(CASES[name].xla)
    assert len(programs.graphs(small.ours, *small.avals)) == 1


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_formulation_of_a_case_would_be_noticed(name, key):
    small = CASES[name].small
    operands = small.arrays(key)
    want = small.ours(*operands)
    last = jnp.roll(operands[-1].astype(jnp.float32), 1, 0) * 1.5  # another bias, weight, ...
    got = small.ours(*operands[:-1], last.astype(operands[-1].dtype))
    assert not agreement.difference(got, want).within(agreement.tolerance(operands, want))


@pytest.mark.deviceless
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_planned_for_an_h200_at_its_full_size(name):
    case = CASES[name]
    with jc.target("H200"), implementation.implementation("cudnn"):
        traced = jax.jit(case.ours).trace(*case.avals)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @jax_cudnn") == 1


def test_the_survey_speaks_of_cases_that_exist():
    known = tables.survey()
    assert known["cases"].keys() <= CASES.keys()
    assert all(low <= high for low, high in (c["ratio"] for c in known["cases"].values()))


@pytest.mark.parametrize(
    ("ratio", "off"), [(1.0, None), (0.7, None), (0.6, -0.25), (1.37, None), (1.5, 0.25)]
)
def test_ratios_off_the_survey_by_more_than_15_percent_are_told(ratio, off):
    found = tables.off_survey(ratio, {"ratio": [0.8, 1.2]})
    assert found == (None if off is None else pytest.approx(off))


# -- results ---------------------------------------------------------------------------------------


def _case(name, function, **xla):
    operands = (Operand((1, 16, 16)), Operand((1, 16, 16)))
    formulations = {label: Formulation(f) for label, f in xla.items()}
    return ModelCase(name, "test", "product", function, formulations, operands)


def plain(x, w):
    return jax.nn.relu(x @ w)


def refused(x, w):
    raise jc.UnsupportedGraphError(
        "no engine for this graph", why="it is a test", reasons={"eng1": "too  small"}
    )


@pytest.fixture(scope="module")
def result():
    def broken(x, w):
        raise ValueError("a mistake in the case")

    cases = [
        _case("refused", refused, plain=plain),
        _case("broken", broken, plain=plain),
        _case("wrong", product, plain=lambda x, w: plain(x, w) * 2),
        _case("mlp/4096x4096x4096/fp8", product, plain=plain, broken=broken),
        _case("alone", product, broken=broken),
    ]
    told = []
    entries = measure.measure(cases, say=told.append, **QUICK)
    assert [line.partition(":")[0] for line in told] == [case.name for case in cases]
    return {"environment": timing.environment(), "cases": entries}


def test_what_cannot_run_is_recorded_and_the_run_goes_on(result):
    entries = result["cases"]
    status = {name: entry["status"] for name, entry in entries.items()}
    assert status == {
        "refused": "unsupported",
        "broken": "failed",
        "wrong": "WRONG",
        "mlp/4096x4096x4096/fp8": "timed",
        "alone": "failed",
    }
    assert entries["refused"]["reason"] == "no engine for this graph; it is a test; too small"
    assert entries["broken"]["reason"] == "ValueError: a mistake in the case"
    assert "plain by 1 (norm)" in entries["wrong"]["reason"]
    assert "us" not in entries["wrong"]
    assert entries["mlp/4096x4096x4096/fp8"]["not_run"]["broken"].startswith("ValueError")


def test_our_side_of_a_case_is_cudnn_alone_and_is_timed_against_its_reference():
    seen = []

    def ours(x, w):
        seen.append(implementation.current())
        return product(x, w)

    def entry(**options):
        return measure.measure([_case("a", ours, plain=plain)], say=str, **options, **QUICK)["a"]

    with_reference = entry(cudnn=True)
    assert set(seen) == {"cudnn"}
    assert with_reference["us"].keys() == {"jax_cudnn", "plain", "reference"}
    assert with_reference["differences"].keys() == {"plain", "reference"}
    assert with_reference["pattern"] == "matmul + epilogue"
    ratios = [with_reference[f"ratio_reference{which}"] for which in ("_min", "", "_max")]
    assert ratios == sorted(ratios)
    medians = [with_reference["us"][name]["median"] for name in ("reference", "jax_cudnn")]
    assert ratios[1] == pytest.approx(medians[0] / medians[1], rel=0.01)
    seen.clear()
    assert entry()["us"].keys() == {"jax_cudnn", "plain"}
    assert set(seen) == {"split"}
    assert implementation.current() == "split"


def test_the_reference_is_prepared_as_our_side_is():
    seen = []

    def ours(x, w):
        seen.append((x.shape, w.shape))
        return product(x, w)

    way = Formulation(ours, lambda x, w: (x, w.swapaxes(1, 2)), lambda y: y + 1)
    operands = (Operand((1, 8, 16)), Operand((1, 32, 16)))
    plainly = {"plain": Formulation(lambda x, w: plain(x, w.swapaxes(1, 2)) + 1)}
    case = ModelCase("a", "test", "product", way, plainly, operands)
    entry = measure.measure([case], cudnn=True, say=str, **QUICK)["a"]
    assert entry["status"] == "timed", entry
    assert "reference" in entry["us"]
    assert set(seen) == {((1, 8, 16), (1, 16, 32))}


def test_the_reference_is_not_one_of_xlas_best_formulations():
    agrees = agreement.Difference(0.0, 0.0)
    seconds = {"jax_cudnn": [2.0] * 7, "plain": [3.0] * 7, "reference": [1.0, *[1.5] * 6]}
    names = tuple(seconds)
    found = Comparison(names, {"plain": agrees, "reference": agrees}, 0.1, {}, seconds, 30)
    entry = measure._compared(found, Cost(10, 10))
    assert (entry["best_xla"], entry["ratio"]) == ("plain", 1.5)
    figures = [entry[f"ratio_reference{which}"] for which in ("", "_min", "_max")]
    assert figures == [0.75, 0.5, 0.75]


def test_a_reference_that_cannot_run_is_left_out():
    def looped(x, w):
        return jax.lax.fori_loop(0, 1, lambda _, x: product(x, w), x)

    entry = measure.measure([_case("a", looped, plain=plain)], cudnn=True, say=str, **QUICK)["a"]
    assert entry["status"] == "timed"
    assert "inside of" in entry["not_run"]["reference"]
    assert "ratio_reference" not in entry


def test_a_users_exception_is_raised():
    def broken(x, w):
        raise ValueError("a mistake of the user")

    with pytest.raises(ValueError, match="a mistake of the user"):
        measure.measure([_case("mine", broken, plain=plain)], tolerant=False)


def test_figures_of_an_entry_belong_together(result):
    entry = result["cases"]["mlp/4096x4096x4096/fp8"]
    ours, xla = entry["us"]["jax_cudnn"]["median"], entry["us"]["plain"]["median"]
    assert entry["best_xla"] == "plain"
    assert entry["ratio"] == pytest.approx(xla / ours, rel=0.01)
    assert entry["ratio_min"] <= entry["ratio_max"]
    assert entry["flops"] == 2 * 16**3 + 16**2
    assert entry["bytes"] == 3 * 2 * 16**2
    assert entry["tflops"]["jax_cudnn"] == pytest.approx(entry["flops"] / ours / 1e6, rel=0.01)
    assert entry["gbytes_s"]["plain"] == pytest.approx(entry["bytes"] / xla / 1e3, rel=0.01)
    assert entry["operands"] == ["bfloat16[1,16,16]"] * 2


def test_results_survive_json_and_are_rendered(result):
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again == result
    text = tables.render_cases(again)
    for name in result["cases"]:
        assert f"| {name} |" in text
    assert "- refused, unsupported: no engine for this graph" in text
    assert "| WRONG |" in text
    assert "| 1.20 |" in text  # the survey's figure
    assert "Survey: an earlier survey" in text
    assert "no host times" in tables.render(again)


def test_ratios_of_references_are_shown_where_they_were_measured(result):
    assert "reference" not in tables.render_cases(result)
    other = copy.deepcopy(result)
    figures = {"ratio_reference": 0.5, "ratio_reference_min": 0.25, "ratio_reference_max": 0.75}
    other["cases"]["mlp/4096x4096x4096/fp8"] |= figures
    other["cases"]["alone"] |= figures
    rows = [line for line in tables.render_cases(other).splitlines() if line.startswith("|")]
    assert "| reference in XLA / jax_cudnn |" in rows[0]
    assert len({row.count("|") for row in rows}) == 1
    assert "| 0.50 (0.25 to 0.75) |" in next(row for row in rows if "mlp/4096x4096" in row)


def test_disagreement_with_the_survey_is_told(result):
    other = copy.deepcopy(result)
    other["cases"]["mlp/4096x4096x4096/fp8"]["ratio"] = 0.6
    assert "fp8: -50% against the survey's 1.20" in tables.render_cases(other)
    other["cases"]["mlp/4096x4096x4096/fp8"]["ratio"] = 1.1
    assert "against the survey" not in tables.render_cases(other)


def test_shown_cases_are_the_committed_ones():
    data = json.loads((RESULTS / "h200.json").read_text())
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = re.search(r"<!-- cases -->\n(.*?)\n<!-- /cases -->", readme, re.S)
    if "cases" in data:
        assert shown is not None
        # A result from before references were timed lacks the cases that came with them.
        complete = any("ratio_reference" in entry for entry in data["cases"].values())
        assert data["cases"].keys() <= CASES.keys()
        assert data["cases"].keys() == CASES.keys() or not complete
        assert not [n for n, e in data["cases"].items() if e["status"] in ("WRONG", "failed")]
    if shown is not None:
        assert shown[1] == tables.render_cases(data)
    assert shown is None or "cases" in data


def test_a_result_without_cases_says_so():
    assert "holds no cases" in tables.render_cases({"environment": {}})


def test_the_plot_is_the_same_each_time(result, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        plot.plot(result, path)
    first, second = (path.read_text() for path in paths)
    assert first == second
    assert "mlp/4096x4096x4096/fp8" in first
    assert "earlier survey" in first
    assert "<dc:date>" not in first
    with pytest.raises(jc.GraphError, match="nothing to plot"):
        plot.plot({"environment": {}}, paths[0])


def test_without_matplotlib_the_plot_says_what_to_install(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(jc.LibraryError, match=r"jax-cudnn\[bench\]"):
        plot.plot(result, tmp_path / "a.svg")


# -- the command -----------------------------------------------------------------------------------

_MODULE = """
import jax, jax_cudnn as jc

@jc.graph
def product(g, x, w):
    return g.relu(g.matmul(x, w))

def model(x, w):
    return product(x, w) + 1

def plain(x, w):
    return jax.nn.relu(x @ w)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a user's module in the current folder."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_users_function_is_measured_against_its_reference(mine, tmp_path, capsys):
    avals = ["bf16[1,16,16]", "bf16[1,16,16]"]
    assert main(["bench", f"{mine}:model", *avals, "--out", str(tmp_path)]) == 0
    assert "its reference in XLA" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    entry = json.loads(path.read_text())["cases"][f"{mine}:model"]
    assert entry["status"] == "timed"
    assert entry["flops"] == 2 * 16**3 + 16**2
    assert main(["bench", "--render", str(path)]) == 0
    assert f"| {mine}:model |" in capsys.readouterr().out


def test_a_users_functions_must_agree(mine, capsys):
    avals = ["bf16[1,16,16]", "bf16[1,16,16]"]
    assert main(["bench", f"{mine}:product", *avals, "--against", f"{mine}:plain"]) == 0
    assert main(["bench", f"{mine}:model", *avals, "--against", f"{mine}:plain"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_users_mistake_is_told_as_it_is(mine, capsys):
    assert main(["bench", f"{mine}:product", "bf16[1,16,16]", "bf16[1,8,16]"]) == 1
    assert "GraphError: g.matmul" in capsys.readouterr().err


def test_cases_are_listed_and_chosen_by_a_part_of_their_names(capsys):
    assert main(["bench", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CASES)
    assert {case.model for case in select("unet3d")} == {"unet3d"}
    assert len(select("3x3-64-at-56*dgrad")) == 1
    assert main(["bench", "--only", "no such case"]) == 1
    assert "--list" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": {}, "host": 1}'])
def test_what_is_no_result_is_not_rendered(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["bench", "--render", str(path)]) == 1
    assert "no result of bench" in capsys.readouterr().err


def test_the_committed_result_is_rendered(capsys):
    assert main(["bench", "--render", str(RESULTS / "h200.json")]) == 0
    assert "chain of 200 tiny convolutions" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_case_on_the_gpu_has_all_fields(tmp_path):
    name = "resnet50/3x3-512-at-7/scale-bias-relu"
    assert main(["bench", "--only", name, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-partial.json")
    data = json.loads(path.read_text())
    known = {"date", "device", "sm_version", "cudnn", "jax", "nvidia-cudnn-frontend"}
    assert known <= data["environment"].keys()
    assert data["environment"]["sm_version"] >= 75
    entry = data["cases"][name]
    assert entry["status"] == "timed"
    assert len(entry["engines"]) == 1
    assert entry["rounds"] >= 7
    assert set(entry["us"]) == {"jax_cudnn", "reference", *CASES[name].xla} - set(entry["not_run"])
    for figures in entry["us"].values():
        order = [figures[key] for key in ("min", "q1", "median", "q3", "max")]
        assert order == sorted(order)
        assert order[0] > 0
    assert entry["ratio_min"] <= entry["ratio_max"]
    assert entry["tflops"]["jax_cudnn"] > 1
    assert {"relative", "worst"} == entry["differences"][entry["best_xla"]].keys()


def test_cases_measured_anew_take_the_place_of_earlier_ones(tmp_path):
    environment = {"device": "NVIDIA H200", "cudnn": "9.19.0", "date": "2026-01-01"}
    earlier = {"environment": environment, "cases": {"a": {"ratio": 1.0}, "b": {"ratio": 2.0}}}
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(earlier))
    later = {**environment, "date": "2026-02-01"}
    merge({"environment": later, "cases": {"b": {"ratio": 3.0}, "c": {"ratio": 4.0}}}, path)
    cases = {"a": {"ratio": 1.0}, "b": {"ratio": 3.0}, "c": {"ratio": 4.0}}
    assert json.loads(path.read_text()) == {"environment": environment, "cases": cases}
    with pytest.raises(jc.GraphError, match="other versions"):
        merge({"environment": {**later, "cudnn": "9.28.0"}, "cases": {}}, path)
    with pytest.raises(jc.GraphError, match="holds no steps"):
        merge({"environment": later, "steps": {}}, path)
    assert json.loads(path.read_text())["cases"] == cases


# -- training steps --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_steps(tmp_path_factory):
    """What ``bench --steps --tiny`` writes, with its exit status."""
    folder = tmp_path_factory.mktemp("steps")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        status = main(["bench", "--steps", "--tiny", "--out", str(folder)])
    (path,) = folder.glob("steps_*-tiny.json")
    return status, path


def _scaled(case, factor):
    """The case with a wrong loss on our side."""
    return dataclasses.replace(case, ours=lambda *operands: factor * case.plain(*operands))


def _step(name):
    return next(case for case in step_models.tiny_cases() if name in case.name)


def test_tiny_steps_agree_and_are_timed_on_all_sides(tiny_steps):
    status, path = tiny_steps
    result = json.loads(path.read_text())
    assert status == 0
    sides = {steps.OURS, steps.PLAIN, steps.IN_XLA}
    names = [(case.name, program) for case in step_models.tiny_cases() for program in case.programs]
    found = {(n, p): e for n, case in result["steps"].items() for p, e in case["programs"].items()}
    assert [*found] == names
    for entry in found.values():
        assert entry["status"] == "timed"
        assert entry["ms"].keys() == entry["errors"].keys() == sides
        assert entry["over_ours"].keys() == sides - {steps.OURS}
        assert entry["not_run"] == {}
        assert entry["errors_against"] == "float32"
        assert 0 < entry["errors"][steps.OURS]["relative"] < 0.02
        assert entry["rounds"] >= 7


def test_a_step_holds_one_forward_and_one_backward_of_each_operation(tiny_steps):
    """Nothing is left of gradients that nobody asked for, and vmap runs nothing in turn."""
    result = json.loads(tiny_steps[1].read_text())["steps"]
    found = {name.partition("/")[0]: {} for name in result}
    for name, entry in result.items():
        for program, held in entry["programs"].items():
            found[name.partition("/")[0]][program] = held["graphs"]
            assert held["loops"] == 0
    assert found["per-example"] == {"forward": 2, "gradient of each example": 4}
    assert found["mlp"] == {"forward": 2, "forward and backward": 4, "jvp": 4}
    network = next(iter(result.values()))["programs"]
    forward, both = (held["graphs"] for held in network.values())
    assert both == 2 * forward == 2 * (2 * 3 + 2)  # two blocks, each with a projection


def test_steps_are_rendered_with_all_programs(tiny_steps, capsys):
    _, path = tiny_steps
    assert main(["bench", "--render", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    for name, entry in json.loads(path.read_text())["steps"].items():
        assert f"- {name}: {entry['what']}" in lines
        for program, found in entry["programs"].items():
            (row,) = (row for row in rows if row.startswith(f"| {name} | {program} |"))
            assert f"| {found['ms']['jax_cudnn']['median']:g} (" in row


def test_full_steps_have_the_programs_of_tiny_ones():
    full, tiny = [*step_models.step_cases()], [*step_models.tiny_cases()]
    assert [[*case.programs] for case in full] == [[*case.programs] for case in tiny]
    blocks, image = full[0].operands
    assert [len(stage) for stage in blocks] == [3, 4, 6, 3]
    assert (len(blocks) and image.shape) == (128, 56, 56, 64)


def test_a_wrong_step_is_noticed_and_not_timed():
    case = _scaled(_step("mlp"), 1.05)
    entry = steps.measure_steps([case], seconds=0.0, calls=1, say=str)[case.name]
    assert entry["status"] == "WRONG"
    for found in entry["programs"].values():
        assert found["status"] == "WRONG"
        assert "where XLA's is" in found["reason"]
        assert "ms" not in found
    text = step_tables.render_steps({"environment": _ENVIRONMENT, "steps": {case.name: entry}})
    assert f"| {case.name} | forward | WRONG |" in text
    assert f"- {case.name}, forward, WRONG: relative error" in text


_ENVIRONMENT = {
    "device": "GPU",
    "date": "2026-01-01",
    "cudnn": "1",
    "jax": "2",
    "nvidia-cudnn-frontend": "3",
}


def test_what_fails_of_the_steps_leaves_the_others():
    def broken(*operands):
        raise ValueError("not today")

    mlp = _step("mlp")
    one = dict([*mlp.programs.items()][:1])
    cases = [
        dataclasses.replace(mlp, name="ours", ours=broken, programs=one),
        dataclasses.replace(mlp, name="plain", plain=broken, programs=one),
        dataclasses.replace(mlp, name="program", programs=one | {"odd": lambda loss: broken}),
        dataclasses.replace(mlp, name="good", programs=one),
    ]
    told = []
    entries = steps.measure_steps(cases, seconds=0.0, calls=1, say=told.append)
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "ours": "failed",
        "plain": "failed",
        "program": "failed",
        "good": "timed",
    }
    assert entries["program"]["programs"]["forward"]["status"] == "timed"
    assert entries["ours"]["programs"]["forward"]["reason"] == "ValueError: not today"
    assert "nothing to compare with" in entries["plain"]["programs"]["forward"]["reason"]
    assert "ms" in entries["good"]["programs"]["forward"]
    text = step_tables.render_steps({"environment": _ENVIRONMENT, "steps": entries})
    assert "- ours, forward, failed: ValueError: not today" in text
    assert "- plain, forward, XLA did not run: ValueError: not today" in text
    assert [line.split(":")[0] for line in told] == [*entries]


def test_the_distance_of_trees_is_that_of_all_and_of_the_worst_array():
    want = {"a": jnp.full(4, 3.0), "b": jnp.full(1, 8.0)}
    got = {"a": jnp.full(4, 3.0), "b": jnp.full(1, 7.0)}
    assert steps.distance(got, want) == {"relative": 0.1, "leaf": 0.125}
    assert steps.distance(want, want) == {"relative": 0.0, "leaf": 0.0}
    got["a"] = got["a"].at[0].set(jnp.nan)
    assert steps.distance(got, want) == {"relative": None, "leaf": None}
    with pytest.raises(jc.GraphError, match="different trees"):
        steps.distance([], want)


def test_graphs_in_loops_are_counted():
    x = w = jnp.ones((1, 8, 8))

    def looped(x, w):
        plain = jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=3)[0]
        return jax.jit(lambda x: jax.lax.map(lambda row: product(row[None], w), x))(plain)

    assert programs.loops(jax.make_jaxpr(looped)(x, w).jaxpr) == 1
    assert programs.loops(jax.make_jaxpr(jax.jit(product))(x, w).jaxpr) == 0


def test_options_of_steps_go_together(capsys):
    for options in (["--tiny"], ["--steps", "f:g"], ["--steps", "--plot", "x.svg"]):
        assert main(["bench", *options]) == 1
        assert "GraphError" in capsys.readouterr().err
    assert main(["bench", "--steps", "--tiny", "--only", "no such step"]) == 1
    assert "mlp/" in capsys.readouterr().err
    assert main(["bench", "--steps", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [case.name for case in step_models.step_cases()]


@pytest.mark.deviceless
def test_a_block_is_cut_in_one_plan_forward_and_in_three_segments_backward():
    case = next(case for case in step_models.step_cases() if "bottleneck" in case.name)
    avals = jax.tree.map(
        lambda drawn: jax.ShapeDtypeStruct(drawn.shape, jnp.bfloat16),
        case.operands,
        is_leaf=lambda x: isinstance(x, step_models.Drawn),
    )
    with jc.target("H200"):
        held = {
            name: steps._held(case.programs[name](case.ours), (avals, avals))
            for name in ("forward", "forward and backward")
        }
    assert held["forward"]["segments"] == {"cuDNN": 3, "XLA": 0}
    assert held["forward and backward"]["segments"] == {"cuDNN": 3 + 6, "XLA": 3}
    assert held["forward and backward"]["cold_planning_s"] > 0


@pytest.mark.gpu
def test_a_step_on_the_gpu_agrees_and_says_how_it_is_cut():
    case = _step("bottleneck")
    entry = steps.measure_steps([case], seconds=0.0, calls=1)[case.name]
    assert entry["status"] == "timed", entry
    for found in entry["programs"].values():
        assert found["not_run"] == {}
        assert found["segments"]["cuDNN"] >= found["graphs"]
        assert found["cold_planning_s"] > 0
        assert found["ms"].keys() == {steps.OURS, steps.PLAIN, steps.IN_XLA}


def test_shown_steps_are_the_committed_ones():
    committed = RESULTS / "steps_h200.json"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    shown = re.search(r"<!-- steps -->\n(.*?)\n<!-- /steps -->", readme, re.S)
    assert (shown is not None) == committed.exists()
    if shown is None:
        pytest.skip("no training steps are measured yet")
    data = json.loads(committed.read_text())
    assert data["steps"].keys() == {case.name for case in step_models.step_cases()}
    assert {entry["status"] for entry in data["steps"].values()} == {"timed"}
    assert shown[1] == step_tables.render_steps(data)
