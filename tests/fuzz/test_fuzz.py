"""Random graphs, calls and alterations: none is refused or wrong, and the checks can fail."""

import functools
import json
import os
import signal
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from helpers import python
from transformations import methods

import jax_cudnn as jc
from fuzz import checks, runner
from fuzz.__main__ import main
from fuzz.calls import FIRST
from fuzz.checks import Checks
from fuzz.comparison import WrongResult
from fuzz.functions import NAMES, random_call
from fuzz.graphs import LEAST, MOST, random_graph
from fuzz.meaning import graph_call
from jax_cudnn._core import auto, settings
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.graph.xla_form import NARROW, evaluate
from jax_cudnn._core.planning import split
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.planning.planned_graph import PlannedSegment
from jax_cudnn._core.transforms import batch, linearize, transpose

PLAN: Any = "a plan"


@pytest.fixture(scope="module")
def many():
    return [random_graph(seed) for seed in range(200)]


def returning(many, method):
    """Small graphs that return what the method makes, so that nothing hides it."""
    for graph in sorted(many, key=lambda graph: len(graph.spec.calls)):
        spec = graph.spec
        made = [c.outputs[0][1] for c in spec.calls if c.node.method == method]
        if any(n in spec.outputs and "float8" not in spec.tensor(n).dtype for n in made):
            yield graph


def call_and_results(graph):
    call = graph_call(graph.spec, graph.inputs(), graph.seed, FIRST)
    return call, Checks().run(call.program(), *call.data)


def test_equal_seeds_give_equal_graphs_and_operands_in_every_process(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent.parent)
    code = "from fuzz.graphs import random_graph\nfor seed in range(5):\n"
    code += "  g = random_graph(seed)\n  print(g.spec, [float(x.sum()) for x in g.inputs()])"
    exec(code, {})
    assert python(code).stdout == capsys.readouterr().out


def test_every_node_and_dtype_occurs_and_nothing_is_in_vain(many):
    # Tests of their own have attention of float8's, and products of groups with any offsets.
    drawn = {method for graph in many for method in methods(graph.spec)}
    assert drawn == {name for name in registry() if "fp8" not in name and "moe" not in name}
    assert {len(graph.spec.calls) for graph in many} == {*range(LEAST, MOST + 1)}
    tensors = [tensor for graph in many for tensor in graph.spec.tensors]
    dtypes = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    dtypes |= {"float8_e8m0fnu", "float4_e2m1fn"}
    assert {tensor.dtype for tensor in tensors} == dtypes | {"bool", "int8", "uint8", "int32"}
    assert {len(tensor.shape) for tensor in tensors} == {1, 2, 3, 4, 5}
    assert any(tensor.order for tensor in tensors)
    for spec in (graph.spec for graph in many):
        used = {name for call in spec.calls for _, name in call.inputs}
        made = [{name for _, name in call.outputs} for call in spec.calls]
        assert used >= {*spec.inputs}
        assert all(names & (used | {*spec.outputs}) for names in made)


VALUES = {
    "matmul": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, 99, x),
    "conv_fprop": lambda x: np.roll(x, 1, 1),
    "reduction": lambda x: x * 1.3 + 0.5,
    "cmp_lt": lambda x: 1 - x,
    "layernorm": lambda x: (x[0] * 1.2, *x[1:]),
    "sdpa_backward": lambda x: (0.0 - x[0], *x[1:]),
}


@pytest.mark.parametrize("method", VALUES)
def test_a_wrong_value_is_noticed(method, many, monkeypatch):
    right = oracle.OPERATIONS[method]
    noticed = 0
    for graph in [*returning(many, method)][:4]:  # in some, edges hide it
        operands = graph.inputs()
        with np.errstate(all="ignore"), monkeypatch.context() as patch:
            exact = oracle.rounded(graph.spec, operands)
            patch.setitem(oracle.OPERATIONS, method, lambda n, **xs: VALUES[method](right(n, **xs)))
            wrong = oracle.rounded(graph.spec, operands)
        call = graph_call(graph.spec, operands, 0, ["forward"])
        call.check({"forward": exact})
        try:
            call.check({"forward": wrong})
        except WrongResult:
            noticed += 1
    assert noticed >= 2


RULES = {
    ("mul", "slope"): {"vjp", "jvp", "vmap_of_vjp"},
    **{(method, "transpose"): {"vjp", "vmap_of_vjp"} for method in ("matmul", "conv_fprop")},
    **{(method, "jvp"): {"vjp", "jvp", "vmap_of_vjp"} for method in ("layernorm", "sdpa")},
}
"""What is wrong, and which transformations that makes wrong."""


@pytest.fixture
def forget():
    """Makes that no derived graph is known, also after the test."""
    derived = linearize.linearize, transpose.transpose, batch.batch
    yield lambda: [each.cache_clear() for each in derived]
    for each in derived:
        each.cache_clear()


@pytest.mark.parametrize("rule", RULES, ids=" of ".join)
def test_a_wrong_gradient_is_noticed(rule, many, monkeypatch, forget):
    method, name = rule
    right = getattr(registry()[method], name)

    def wrong(self, g, *args, **kwargs):
        found = right(self, g, *args, **kwargs)
        if isinstance(found, dict):
            return {port: g.mul(x, 1.5) for port, x in found.items()}
        return found if found is None or found is NotImplemented else g.mul(found, 1.5)

    for graph in returning(many, method):  # until one whose derivatives say something
        call, results = call_and_results(graph)
        if len(call.names) < 5 or call.check(results):
            continue
        forget()
        monkeypatch.setattr(registry()[method], name, wrong)
        try:
            call, results = call_and_results(graph)
            call.check(results)
        except WrongResult as error:
            wrong_ones = {part.split(":")[0].split()[1] for part in error.got.split("; ")}
            assert wrong_ones <= RULES[rule]
            return
        monkeypatch.undo()  # what the operation stands on may be no float
        forget()
    pytest.fail("not noticed")


def test_segments_that_compute_something_else_are_noticed():
    avals = [jax.ShapeDtypeStruct((1, 8, 8), "bfloat16")] * 3
    product = jc.graph(lambda g, x, w, v: g.matmul(g.matmul(x, w).set_data_type("bfloat16"), v))
    spec = product.trace(*avals)[1].spec
    a, b = (PlannedSegment(split.part(spec, (i,)), (i,), PLAN) for i in range(2))
    checks.check_segments(spec, [a, b])
    name = a.spec.outputs[0]
    half = (replace(t, dtype="float16") if t.name == name else t for t in a.spec.tensors)
    rounded = replace(a, spec=replace(a.spec, tensors=tuple(half)))
    for damaged in ([a], [b, a], [rounded, b]):
        with pytest.raises(checks.WrongSegments):
            checks.check_segments(spec, damaged)


def test_a_run_in_processes_is_data_that_slices_make_up(tmp_path, capsys):
    parts = [tmp_path / f"{start}.json" for start in (0, 2)]
    for start, part in zip((0, 2), parts, strict=True):
        seeds = ["--seeds", f"{start}:{start + 2}", "--workers", "2", "--json", str(part)]
        assert main(["graphs", "--gpu", "none", *seeds]) == 0
    assert main(["merge", *map(str, parts), "--json", str(tmp_path / "all.json")]) == 0
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["counts"] == {"right": 4, "refused": 0, "wrong": 0, "crashed": 0}
    assert [run["seeds"] for run in found["runs"]] == [[[0, 2]], [[2, 4]]]


def test_a_seed_that_is_run_again_counts_as_it_is_then():
    first = [(0, "right"), (1, "wrong"), (2, "refused"), (4, "crashed"), (5, "refused")]
    cases = first, [(4, "wrong"), (1, "right"), (2, "right")], [(6, "right")]
    parts = [[runner.Outcome(seed, kind, "why") for seed, kind in part] for part in cases]
    found = runner.merged(runner.facts("graphs", part, 1.0, None, "a") for part in parts)
    assert found["counts"] == {"right": 4, "refused": 1, "wrong": 1, "crashed": 0}
    assert [run["seeds"] for run in found["runs"]] == [[[0, 3], [4, 6]], [[1, 3], [4, 5]], [[6, 7]]]
    assert (found["fixed"], found["failures"]) == ([[1, "wrong", "why"]], [[4, "wrong", "why"]])
    assert found["refused"] == {"why": [5]}


def dies(seed):
    """A check of which some processes never report."""
    if seed % 3 == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    return runner.Outcome(seed)


def test_a_process_that_dies_is_told_with_its_seed():
    found = sorted((o.seed, o.kind, o.text) for o in runner.outcomes(dies, range(5), 2))
    died = "crashed", "the process ended with status -11"
    assert found == [(i, *(("right", "") if i % 3 else died)) for i in range(5)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_calls_are_right_and_a_wrong_result_is_noticed(name, turn):
    checks, seed = Checks(), NAMES.index(name) + turn * len(NAMES)
    call = random_call(seed, functools.partial(checks.run, compiled=True))
    got = checks.run(call.program(), *call.data, compiled=call.compiled)
    call.check(got)
    wrong = call.names[seed % len(call.names)]
    worse = jax.tree.map(lambda x: (np.asarray(x, float) * 1.5 + 0.1).astype(x.dtype), got[wrong])
    with pytest.raises(WrongResult):
        call.check(got | {wrong: worse})


@pytest.mark.deviceless
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_altered_files_are_refused_or_harmless(start, no_plans):
    found = [Checks().outcome("files", seed) for seed in range(start, start + 20)]
    assert not [o for o in found if o.kind not in ("right", "refused")]
    assert sum(o.kind == "refused" for o in found) > 10


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_altered_programs_are_refused_or_harmless():
    check = functools.partial(checks.outcome, None, "programs")
    found = [*runner.outcomes(check, range(200), 2)]
    assert not [o for o in found if o.kind not in ("right", "refused")]
    assert sum(o.kind == "refused" for o in found) > 50


def test_the_command_tells_a_refused_plan_and_its_smallest_part(many, monkeypatch, capsys):
    def place(spec, site, name):
        if "genstats" in methods(spec):
            raise jc.UnsupportedGraphError("no sums today")
        return placed(spec, site, name)

    placed = auto.plan_graph
    monkeypatch.setattr(settings, "_given", settings._given)
    monkeypatch.setattr(auto, "plan_graph", place)
    drawn = {graph.seed: {*methods(graph.spec)} for graph in many}
    seed = next(n for n, found in drawn.items() if "genstats" in found and len(found) > 3)
    assert main(["graphs", "--gpu", "H200", "--seeds", str(seed)]) == 1
    graph, _, smallest = capsys.readouterr().out.partition("the smallest part that fails alike:\n")
    assert graph.startswith(str(random_graph(seed).spec))
    assert smallest.count(" = ") == smallest.count(" = genstats(") == 1


def check_all(checks, seeds, kind="graphs"):
    outcomes = [checks.outcome(kind, seed) for seed in seeds]
    assert not [(o.seed, o.text) for o in outcomes if o.kind != "right"]
    return outcomes


def test_whatever_is_refused_segments_compute_what_the_graph_does(many):
    cuts = set()
    for graph in many[:40]:
        for share in (20, 60, 100):

            def ask(piece, share=share):
                refused = zlib.crc32(str(piece).encode()) % 100 < share
                return split.Refusal("by lot") if refused else PLAN

            segments = split.search(graph.spec, ask)
            checks.check_segments(graph.spec, segments)
            cuts.add(len(segments))
    assert len(cuts) >= 4


def starts(*default, long):
    return pytest.mark.parametrize(
        "start", [*default, *(pytest.param(s, marks=pytest.mark.long) for s in long)]
    )


@pytest.mark.deviceless
@starts(0, long=range(8, 48, 8))
def test_every_graph_is_planned(start):
    outcomes = check_all(Checks(profiles.get("H200")), range(start, start + 8))
    assert any(any(outcome.segments) for outcome in outcomes)


def test_the_form_for_xla_has_the_results_of_the_graph(many):
    for graph in many[:60]:
        form = functools.partial(evaluate, graph.spec, products=NARROW)
        operands = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in graph.spec.input_tensors]
        found = [(out.shape, out.dtype.name) for out in jax.eval_shape(form, *operands)]
        assert found == [(t.shape, t.dtype) for t in graph.spec.output_tensors], graph.seed


@starts(0, 5, long=range(10, 60, 10))
def test_transformations_agree_with_the_references(start):
    seeds = range(start, start + (5 if start < 10 else 10))
    outcomes = check_all(Checks(None, transformed=True), seeds)
    assert sum(outcome.skipped for outcome in outcomes) < 2 * len(outcomes)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(0, 16, 4))
def test_graphs_and_calls_on_the_gpu(start):
    site = Checks(CudaDevice(jax.devices("gpu")[0].local_hardware_id), transformed=True)
    check_all(site, range(start, start + 4))
    check_all(site, range(2 * start, 2 * start + 8), "calls")
