"""Random graphs: none is refused or changed, nor by transformations; and the checks can fail."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from helpers import python

import jax_cudnn as jc
from fuzz import checks, transforms
from fuzz.__main__ import main
from fuzz.checks import Checks
from fuzz.graphs import LEAST, MOST, random_graph
from fuzz.transforms import TRANSFORMS, draw
from jax_cudnn._core import settings
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning import placement, split
from jax_cudnn._core.transforms import batch, linearize, transpose
from jax_cudnn.deviceless import profiles


@pytest.fixture(scope="module")
def many():
    return [random_graph(seed) for seed in range(200)]


def methods(graph):
    return [call.node.method for call in graph.spec.calls]


def returning(many, method):
    """Small graphs that return what the method makes, so that nothing hides it."""
    for graph in sorted(many, key=lambda graph: len(graph.spec.calls)):
        spec = graph.spec
        made = [c.outputs[0][1] for c in spec.calls if c.node.method == method]
        if any(n in spec.outputs and "float8" not in spec.tensor(n).dtype for n in made):
            yield graph


def case_and_results(graph):
    case = draw(graph.spec, graph.inputs, graph.seed)
    return case, Checks().run(case.program(), *case.data)


def test_equal_seeds_give_equal_graphs_and_operands_in_every_process(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent.parent)
    code = "from fuzz.graphs import random_graph\nfor seed in range(5):\n"
    code += "  g = random_graph(seed)\n  print(g.spec, [float(x.sum()) for x in g.inputs()])"
    exec(code, {})
    assert python(code).stdout == capsys.readouterr().out


def test_every_node_attribute_and_dtype_occurs_and_nothing_is_in_vain(many):
    # Tests of their own have attention of float8's.
    drawn = {method for graph in many for method in methods(graph)}
    assert drawn == {method for method in REGISTRY if "fp8" not in method}
    assert {len(graph.spec.calls) for graph in many} == {*range(LEAST, MOST + 1)}
    tensors = [tensor for graph in many for tensor in graph.spec.tensors]
    dtypes = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    assert {tensor.dtype for tensor in tensors} == dtypes | {"bool", "int8", "uint8", "int32"}
    assert {len(tensor.shape) for tensor in tensors} == {1, 2, 3, 4, 5}
    assert any(tensor.order for tensor in tensors)
    nodes = [call.node for graph in many for call in graph.spec.calls]
    seen = {(n.method, name, str(x)) for n in nodes for name, x in n.keywords().items()}
    modes = {example.attributes["mode"] for example in REGISTRY["reduction"].examples}
    assert {("reduction", "mode", mode) for mode in modes} <= seen
    for method in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert {(method, "stride", "[2, 2]"), (method, "dilation", "[2, 2]")} <= seen
    for spec in (graph.spec for graph in many):
        used = {name for call in spec.calls for _, name in call.inputs}
        made = [{name for _, name in call.outputs} for call in spec.calls]
        assert used >= {*spec.inputs}
        assert all(names & (used | {*spec.outputs}) for names in made)


# -- planted defects -------------------------------------------------------------------------------

VALUES = {
    "matmul": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, 99, x),
    "conv_fprop": lambda x: np.roll(x, 1, 1),
    "reduction": lambda x: x * 1.3 + 0.5,
    "cmp_lt": lambda x: 1 - x,
    "layernorm": lambda x: (x[0] * 1.05, *x[1:]),
    "sdpa_backward": lambda x: (0.0 - x[0], *x[1:]),
}


@pytest.mark.parametrize("method", VALUES)
def test_a_wrong_value_is_noticed(method, many, monkeypatch):
    right = oracle.OPERATIONS[method]
    for graph in [*returning(many, method)][:2]:
        operands = graph.inputs()
        with np.errstate(all="ignore"), monkeypatch.context() as patch:
            exact = oracle.rounded(graph.spec, operands)
            patch.setitem(oracle.OPERATIONS, method, lambda n, **xs: VALUES[method](right(n, **xs)))
            wrong = oracle.rounded(graph.spec, operands)
        transforms.check_results(graph.spec, operands, exact)
        with pytest.raises(transforms.WrongResult):
            transforms.check_results(graph.spec, operands, wrong)


RULES = {
    ("mul", "slope"): {"grad", "jvp", "vmap of grad"},
    **{(method, "transpose"): {"grad", "vmap of grad"} for method in ("matmul", "conv_fprop")},
    **{(method, "jvp"): {"grad", "jvp", "vmap of grad"} for method in ("layernorm", "sdpa")},
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
    right = getattr(REGISTRY[method], name)

    def wrong(self, g, *args, **kwargs):
        found = right(self, g, *args, **kwargs)
        if isinstance(found, dict):
            return {port: g.mul(x, 1.5) for port, x in found.items()}
        return found if found is None or found is NotImplemented else g.mul(found, 1.5)

    for graph in returning(many, method):  # until one whose derivatives say something
        case, results = case_and_results(graph)
        if case.transforms != TRANSFORMS or transforms.check(case, results)[1]:
            continue
        forget()
        monkeypatch.setattr(REGISTRY[method], name, wrong)
        try:
            transforms.check(*case_and_results(graph))
        except transforms.WrongResult as error:
            wrong_ones = {part.partition(":")[0][:-2] for part in error.got.split("; ")}
            assert wrong_ones <= RULES[rule]
            return
        monkeypatch.undo()  # what the operation stands on may be no float
        forget()
    pytest.fail("not noticed")


@pytest.mark.parametrize("name", ["vmap", "vmap of grad"])
def test_a_wrong_axis_of_vmap_is_noticed(name, many):
    case, right = case_and_results(next(returning(many, "add")))
    axes = case.out_axes if name == "vmap" else [0] * len(case.floats)
    turned = [np.flip(x, axis) for x, axis in zip(right[name], axes, strict=True)]
    with pytest.raises(transforms.WrongResult, match=f"{name} 0: "):
        transforms.check(case, {**right, name: turned})


def changed(segment, **changes):
    return replace(segment, spec=replace(segment.spec, _cache={}, **changes))


def retyped(segment):
    name, tensors = segment.spec.outputs[0], segment.spec.tensors
    narrow = tuple(replace(t, dtype="float16") if t.name == name else t for t in tensors)
    return changed(segment, tensors=narrow)


def swapped(segment):
    (call,) = segment.spec.calls
    ports, names = zip(*call.inputs, strict=True)
    swap = replace(call, inputs=tuple(zip(ports, names[::-1], strict=True)))
    return changed(segment, calls=(swap,))


DAMAGE = {
    "left out": (lambda a, b: [a], "not every operation"),
    "too early": (lambda a, b: [b, a], "before its operands"),
    "another rounding": (lambda a, b: [retyped(a), b], "something else"),
    "options": (lambda a, b: [changed(a, options=jc.Options(deterministic=True)), b], "options"),
    "swapped operands": (lambda a, b: [a, swapped(b)], "something else"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_segments_are_noticed(damage):
    avals = [jax.ShapeDtypeStruct((1, 8, 8), "bfloat16")] * 3
    product = jc.graph(lambda g, x, w, v: g.matmul(g.matmul(x, w).set_data_type("bfloat16"), v))
    spec = product.trace(*avals)[1].spec
    each = [split.Segment(split.part(spec, (i,)), (i,), False) for i in range(2)]
    checks.check_segments(spec, each)
    change, words = DAMAGE[damage]
    with pytest.raises(checks.WrongSegments, match=words):
        checks.check_segments(spec, change(*each))


@pytest.mark.long
def test_the_command_checks_in_processes():
    options = ["--gpu", "none", "--transforms", "--seeds", "2", "--workers", "2"]
    here = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "fuzz", *options], cwd=here, capture_output=True)
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["failures"]) == (0, [])
    assert facts["results"] > 2


def test_the_command_tells_a_refused_plan_and_its_smallest_part(
    many, monkeypatch, capsys, tmp_path
):
    def place(spec, site, name):
        if "genstats" in [call.node.method for call in spec.calls]:
            raise jc.UnsupportedGraphError("no sums today")
        return placed(spec, site, name)

    placed = placement.place
    monkeypatch.setattr(settings, "_given", settings._given)
    monkeypatch.setattr(placement, "place", place)
    seed = next(g.seed for g in many if "genstats" in methods(g) and len({*methods(g)}) > 3)
    assert main(["--gpu", "H200", "--seed", str(seed)]) == 1
    graph, _, smallest = capsys.readouterr().out.partition("the smallest part that fails alike:\n")
    assert graph.startswith(str(random_graph(seed).spec))
    assert smallest.count(" = ") == smallest.count(" = genstats(") == 1
    file = tmp_path / "figures.json"
    assert main(["--gpu", "H200", "--start", str(seed), "--seeds", "1", "--write", str(file)]) == 1
    (failure,) = json.loads(file.read_text())["failures"]
    assert failure == [seed, "UnsupportedGraphError: no sums today"]


FEW = {"float32": {"alignment": "BOTTOM_RIGHT"}, "bfloat16": {"band_left_bound": 1}}


@pytest.mark.parametrize(("dtype", "band"), FEW.items())
def test_attention_of_queries_that_see_few_keys_is_compared(band, dtype):
    """Also where statistics are -inf, and where gradients cancel."""
    band = {f"diagonal_{name}": x for name, x in {"band_right_bound": 0, **band}.items()}

    def attention(g, q, k, v):
        o, stats = g.sdpa(q, k, v, attn_scale=0.25, **band)
        return [o, *g.sdpa_backward(q, k, v, o, q, stats, attn_scale=0.25, **band)]

    shapes = (2, 2, 24, 16), (2, 1, 20, 16), (2, 1, 20, 16)
    spec = jc.graph(attention).trace(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))[1].spec

    def operands(number):
        noise = np.random.default_rng(number)
        return [noise.standard_normal(s, np.float32).astype(dtype) for s in shapes]

    case = draw(spec, operands, 0)
    assert transforms.check(case, Checks().run(case.program(), *case.data))[1] == 0


# -- many graphs: ``python -m fuzz --seed`` tells more of one that fails ---------------------------


def check_all(checks, seeds):
    outcomes = [checks.outcome(seed) for seed in seeds]
    assert not [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem]
    return outcomes


def test_whatever_is_refused_segments_compute_what_the_graph_does(many):
    cuts = set()
    for graph in many[:40]:
        for share in (20, 60, 100):

            def ask(piece, share=share):
                refused = zlib.crc32(str(piece).encode()) % 100 < share
                return split.Refusal("by lot") if refused else None

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


@starts(0, 5, long=(*range(10, 60, 10), 228))
def test_transformations_agree_with_the_references(start):
    seeds = range(start, start + (5 if start < 10 else 10))
    outcomes = check_all(Checks(None, transformed=True), seeds)
    compared = [c for outcome in outcomes for c in outcome.comparisons]
    assert sum(c.blunt > 0.5 for c in compared) < 0.1 * len(compared)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(0, 16, 4))
def test_transformations_on_the_gpu(start):
    device = CudaDevice(jax.devices("gpu")[0].local_hardware_id)
    check_all(Checks(device, transformed=True), range(start, start + 4))
