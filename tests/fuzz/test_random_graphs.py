"""Random graphs: none is refused or changed, nor by transformations; and the checks can fail."""

import dataclasses
import functools
import json
import zlib
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
from fuzz.interpreter import interpreted
from fuzz.transforms import TRANSFORMS, draw
from jax_cudnn._core import settings
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning import placement, split
from jax_cudnn._core.transforms import batch, linearize, transpose
from jax_cudnn.deviceless import profiles


@pytest.fixture(scope="module")
def many():
    return [random_graph(seed) for seed in range(200)]


def methods(graph):
    return [call.node.method for call in graph.spec.calls]


def fails(found):
    return [(outcome.seed, outcome.problem) for outcome in found if outcome.problem]


# -- drawing ---------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_graphs_and_operands_in_every_process(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    code = """
        from fuzz.graphs import random_graph
        for seed in range(5):
            graph = random_graph(seed)
            print(graph.spec, [float(x.astype("float32").sum()) for x in graph.inputs()])
    """
    here = (random_graph(seed) for seed in range(5))
    told = [f"{g.spec} {[float(x.astype('float32').sum()) for x in g.inputs()]}" for g in here]
    assert python(code).stdout.splitlines() == "\n".join(told).splitlines()


def test_every_node_attribute_and_dtype_occurs_and_nothing_is_in_vain(many):
    assert {method for graph in many for method in methods(graph)} == {
        method
        for method in REGISTRY
        if "fp8" not in method  # attention of float8's has its own
    }
    assert {len(graph.spec.calls) for graph in many} == {*range(LEAST, MOST + 1)}
    tensors = [tensor for graph in many for tensor in graph.spec.tensors]
    floats = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    assert {tensor.dtype for tensor in tensors} == floats | {"bool", "int8", "uint8", "int32"}
    assert {len(tensor.shape) for tensor in tensors} == {1, 2, 3, 4, 5}
    assert any(tensor.order for tensor in tensors)
    calls = [call.node for graph in many for call in graph.spec.calls]
    seen = {(n.method, k, str(v)) for n in calls for k, v in n.keywords().items()}
    for mode in ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS"):
        assert ("reduction", "mode", mode) in seen
    for method in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert {(method, "stride", "[2, 2]"), (method, "dilation", "[2, 2]")} <= seen
    for graph in many:
        spec = graph.spec
        used = {name for call in spec.calls for _, name in call.inputs}
        assert used >= {*spec.inputs}
        for call in spec.calls:
            assert {name for _, name in call.outputs} & (used | {*spec.outputs})


# -- the reference and the checks can fail ---------------------------------------------------------


def test_references_are_tame_and_agree_with_float64():
    for seed in range(12):
        graph = random_graph(seed)
        with np.errstate(all="ignore"):
            exact = oracle.rounded(graph.spec, graph.inputs())
        assert all(np.isfinite(x).all() for x in exact)
        checks.check_results(graph.spec, graph.inputs(), exact)


@pytest.mark.parametrize("seed", range(4))
def test_the_interpreter_computes_what_xla_does(seed):
    graph = random_graph(seed)
    function, data = functools.partial(evaluate, graph.spec), graph.inputs()
    for a, b in zip(interpreted(function)(*data), jax.jit(function)(*data), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b) + 1e-6


def returning(many, method):
    """Small graphs that return what the method makes, so that nothing hides it."""
    for graph in sorted(many, key=lambda graph: len(graph.spec.calls)):
        calls = graph.spec.calls
        if method in [c.node.method for c in calls if c.outputs[0][1] in graph.spec.outputs]:
            yield graph


WRONG = {
    "matmul": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, 99, x),
    "conv_fprop": lambda x: np.roll(x, 1, 1),
    "reduction": lambda x: x * 1.3 + 0.5,
    "sigmoid": lambda x: x * 1.04,
    "transpose": lambda x: x[::-1],
    "cmp_lt": lambda x: 1 - x,
    "layernorm": lambda x: (x[0] * 1.05, *x[1:]),
    "rmsnorm_backward": lambda x: (x[0] * 1.1 + 0.01, *x[1:]),
    "sdpa": lambda x: (np.roll(x[0], 1, 2), *x[1:]),
    "sdpa_backward": lambda x: (0.0 - x[0], *x[1:]),
}


@pytest.mark.parametrize("method", WRONG)
def test_a_wrong_value_is_noticed(method, many, monkeypatch):
    right = oracle.OPERATIONS[method]
    for graph in [*returning(many, method)][:2]:
        operands = graph.inputs()
        with np.errstate(all="ignore"), monkeypatch.context() as patch:
            patch.setitem(oracle.OPERATIONS, method, lambda n, **xs: WRONG[method](right(n, **xs)))
            wrong = oracle.rounded(graph.spec, operands)
        with pytest.raises(checks.WrongResult):
            checks.check_results(graph.spec, operands, wrong)


def times(factor, right):
    def wrong(self, g, *args, **kwargs):
        found = right(self, g, *args, **kwargs)
        if isinstance(found, dict):
            return {port: g.mul(x, factor) for port, x in found.items()}
        return found if found is None or found is NotImplemented else g.mul(found, factor)

    return wrong


RULES = {
    **{(method, "slope"): ("grad", "jvp", "vmap of grad") for method in ("sigmoid", "mul")},
    **{(method, "transpose"): ("grad", "vmap of grad") for method in ("matmul", "conv_fprop")},
    **{(method, "jvp"): ("grad", "jvp", "vmap of grad") for method in ("layernorm", "sdpa")},
    ("conv_wgrad", "jvp"): ("grad", "jvp", "vmap of grad"),
}
"""What is wrong, and which transformations that makes wrong."""


@pytest.fixture
def forget():
    """Makes that no derived graph is known, also after the test."""
    derived = linearize.linearize, transpose.transpose, batch.batch
    yield lambda: [each.cache_clear() for each in derived]
    for each in derived:
        each.cache_clear()


def results(case):
    return Checks().run(case.program(), *case.data)


@pytest.mark.parametrize("rule", RULES, ids=" of ".join)
def test_a_wrong_gradient_is_noticed(rule, many, monkeypatch, forget):
    method, name = rule
    noticed = tried = 0
    for graph in returning(many, method):
        case = draw(graph.spec, graph.inputs, graph.seed)
        if (
            case.transforms == TRANSFORMS
            and None not in transforms.check(case, results(case)).values()
        ):
            forget()
            with monkeypatch.context() as patch:
                patch.setattr(REGISTRY[method], name, times(1.5, getattr(REGISTRY[method], name)))
                found = results(case)
            forget()
            tried += 1
            try:
                transforms.check(case, found)
            except transforms.WrongTransform as error:
                wrong = {part.partition(":")[0] for part in error.got.split("; ")}
                noticed += wrong <= {*RULES[rule]}
            if tried == 2:
                break
    assert noticed >= 1  # what the operation stands on may be no float


@pytest.mark.parametrize("name", ["vmap", "vmap of grad"])
def test_examples_in_another_order_are_noticed(name, many):
    graph = next(returning(many, "add"))
    case = draw(graph.spec, graph.inputs, graph.seed)
    right = results(case)
    axes = case.out_axes if name == "vmap" else [0] * len(case.floats)
    turned = [np.flip(x, axis) for x, axis in zip(right[name], axes, strict=True)]
    with pytest.raises(transforms.WrongTransform, match=f"{name}: "):
        transforms.check(case, {**right, name: turned})


def test_derivatives_beside_a_pole_are_left_out():
    spec = jc.graph(lambda g, x: g.reciprocal(x)).trace(x := np.ones((4, 8), np.float32))[1].spec
    for x[1, 2], skipped in ((0, True), (1e-5, True), (1, False)):
        case = draw(spec, lambda number: [x + np.float32(0)], 0)
        found = transforms.check(case, results(case))
        assert (found["grad 0"] is None, found["vmap 0"] is None) == (skipped, False)


BAND = {"diagonal_band_right_bound": 0, "attn_scale": 0.25}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "keys", [{"diagonal_alignment": "BOTTOM_RIGHT"}, {"diagonal_band_left_bound": 1}]
)
def test_attention_of_queries_that_see_few_keys_is_compared(keys, dtype):
    """Also where statistics are -inf, and where gradients cancel."""

    def attention(g, q, k, v):
        o, stats = g.sdpa(q, k, v, **BAND, **keys)
        return [o, *g.sdpa_backward(q, k, v, o, q, stats, **BAND, **keys)]

    shapes = (2, 2, 24, 16), (2, 1, 20, 16), (2, 1, 20, 16)
    spec = jc.graph(attention).trace(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))[1].spec

    def operands(number):
        noise = np.random.default_rng(number)
        return [noise.standard_normal(s, np.float32).astype(dtype) for s in shapes]

    case = draw(spec, operands, 0)
    assert None not in transforms.check(case, results(case)).values()


# -- segments and plans ----------------------------------------------------------------------------


def cut(graph, share):
    """Segments of a splitter that is refused a share of what it asks for, by its text."""

    def ask(piece):
        refused = zlib.crc32(str(piece).encode()) % 100 < 100 * share
        return split.Refusal("by lot") if refused else None

    return split.search(graph.spec, ask)


def test_whatever_is_refused_segments_compute_what_the_graph_does(many):
    cuts = set()
    for graph in many[:60]:
        for share in (0.2, 0.6, 0.9, 1.0):
            segments = cut(graph, share)
            checks.check_segments(graph.spec, segments)
            cuts.add(len(segments))
    assert len(cuts) >= 4
    for graph in many[:3]:
        checks.check_bits(graph.spec, cut(graph, 0.7), graph.inputs())


def replaced(segment, **changes):
    spec = dataclasses.replace(segment.spec, _cache={}, **changes)
    return dataclasses.replace(segment, spec=spec)


def retyped(segment):
    name, tensors = segment.spec.outputs[0], segment.spec.tensors
    new = (dataclasses.replace(t, dtype="float16") if t.name == name else t for t in tensors)
    return replaced(segment, tensors=tuple(new))


def swapped(segment):
    (call,) = segment.spec.calls
    ports, names = zip(*call.inputs, strict=True)
    call = dataclasses.replace(call, inputs=tuple(zip(ports, names[::-1], strict=True)))
    return replaced(segment, calls=(call,))


DAMAGE = {
    "a segment is left out": (lambda a, b: [a], "not every operation"),
    "a segment runs twice": (lambda a, b: [a, b, b], "not every operation"),
    "too early": (lambda a, b: [b, a], "before its operands"),
    "another rounding": (lambda a, b: [retyped(a), b], "something else"),
    "other options": (
        lambda a, b: [replaced(a, options=jc.Options(deterministic=True)), b],
        "other options",
    ),
    "swapped operands": (lambda a, b: [a, swapped(b)], "something else"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_segments_are_noticed(damage):
    avals = [jax.ShapeDtypeStruct((1, 8, 8), "bfloat16")] * 3
    product = jc.graph(lambda g, x, w, v: g.matmul(g.matmul(x, w).set_data_type("bfloat16"), v))
    spec = product.trace(*avals)[1].spec
    one = [split.Segment(split.part(spec, (i,)), (i,), False) for i in range(2)]
    checks.check_segments(spec, one)
    change, words = DAMAGE[damage]
    with pytest.raises(checks.WrongSegments, match=words):
        checks.check_segments(spec, change(*one))


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
    assert main(["--gpu", "H200", "--start", str(seed), "--seeds", "1"]) == 1
    assert f"seed {seed}: UnsupportedGraphError: no sums today" in capsys.readouterr().out
    file = tmp_path / "figures.json"
    run = ["--gpu", "none", "--transforms", "--seeds", "2", "--write", str(file)]
    assert main(run) == 0
    facts = json.loads(file.read_text())
    assert (facts["graphs"], facts["failures"]) == (2, [])
    assert facts["results"] > 2


# -- many graphs -----------------------------------------------------------------------------------

LONG = pytest.mark.long


@pytest.mark.deviceless
@pytest.mark.parametrize("start", [0, *(pytest.param(s, marks=LONG) for s in range(10, 50, 10))])
def test_every_graph_is_planned(start):
    outcomes = [Checks(profiles.get("H200")).outcome(seed) for seed in range(start, start + 10)]
    assert not fails(outcomes)
    assert any(any(outcome.segments) for outcome in outcomes)


@pytest.mark.parametrize(
    "start", [0, 5, *(pytest.param(s, marks=LONG) for s in range(10, 100, 15))]
)
def test_transformations_agree_with_the_references(start):
    """Run ``python -m fuzz --transforms --seed`` for more about one that fails."""
    seeds = range(start, start + (5 if start < 10 else 15))
    outcomes = [Checks(None, transformed=True).outcome(seed) for seed in seeds]
    assert not fails(outcomes)
    compared = [c for outcome in outcomes for c in outcome.comparisons]
    assert sum(c.blunt > 0.5 for c in compared) < 0.1 * len(compared)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", range(0, 16, 4))
def test_transformations_on_the_gpu(start):
    device = CudaDevice(jax.devices("gpu")[0].local_hardware_id)
    outcomes = [Checks(device, transformed=True).outcome(seed) for seed in range(start, start + 4)]
    assert not fails(outcomes)
