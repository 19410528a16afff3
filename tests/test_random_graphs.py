"""Random graphs: what they are like, that none is refused or changed, neither by transformations,
and that checks can fail."""

import collections
import dataclasses
import itertools
import json
import os
import secrets
import subprocess
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fuzz import agreements, runs, transform_runs
from fuzz import checks as graph_checks
from fuzz.__main__ import main
from fuzz.agreements import Agreement
from fuzz.derivatives import Differentiated, narrowest
from fuzz.graphs import LEAST, MOST, random_graph
from fuzz.interpreter import interpreted
from fuzz.pool import in_processes
from fuzz.sensitivity import Reference
from fuzz.transform_runs import TransformChecks, Transformed
from fuzz.transforms import TRANSFORMS, draw
from helpers import python

import jax_cudnn as jc
from jax_cudnn._core import settings
from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.dtypes import is_floating
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning import split
from jax_cudnn._core.planning.plan import Plan, PlannedSegment
from jax_cudnn._core.transforms import batch, linearize, transpose
from jax_cudnn.deviceless import client, profiles

MANY = range(300)
"""Seeds of the graphs that are only drawn."""


def fresh_seed():
    """Another one for each commit; where there is no clone a random one, which workers share."""
    here = Path(__file__).parent
    head = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(head, cwd=here, capture_output=True, text=True, check=False)
    by_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex(4))
    return int((done.stdout if done.returncode == 0 else by_run)[:7], 16)


FRESH = fresh_seed()


def chunks(count, size):
    """Parameters: ranges of fresh seeds, named by them."""
    starts = range(FRESH, FRESH + count, size)
    return [pytest.param(range(s, s + size), id=f"seeds {s} to {s + size - 1}") for s in starts]


# -- what the graphs are like ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    return [random_graph(seed) for seed in MANY]


def test_equal_seeds_give_equal_graphs_in_every_process():
    code = """
        from fuzz.graphs import random_graph
        for seed in range(20):
            print(random_graph(seed).spec)
    """
    assert python(code).stdout.splitlines() == [
        line for seed in range(20) for line in str(random_graph(seed).spec).splitlines()
    ]


def test_equal_seeds_give_equal_operands():
    graph = random_graph(3)
    for first, second in zip(graph.operands(1), graph.operands(1), strict=True):
        assert first.tobytes() == second.tobytes()
    assert [x.tobytes() for x in graph.operands(1)] != [x.tobytes() for x in graph.operands(2)]
    for operand, aval in zip(graph.operands(), graph.avals, strict=True):
        assert (operand.shape, operand.dtype) == (aval.shape, aval.dtype)


def test_graphs_have_3_to_12_operations_and_nothing_in_vain(many):
    sizes = collections.Counter(len(graph.spec.calls) for graph in many)
    assert [*sorted(sizes)] == [*range(LEAST, MOST + 1)]
    assert min(sizes.values()) > len(MANY) / (MOST - LEAST + 1) / 3
    for graph in many:
        spec = graph.spec
        used = {name for call in spec.calls for _, name in call.inputs}
        assert len(graph.avals) == len(spec.inputs)
        assert used >= {*spec.inputs}
        for call in spec.calls:
            assert {name for _, name in call.outputs} & (used | {*spec.outputs})


def test_every_node_occurs(many):
    drawn = {method for graph in many for method in methods(graph)}
    # Tests of their own have attention of float8's.
    assert drawn == {method for method in REGISTRY if "fp8" not in method}


def test_attributes_and_dtypes_of_every_kind_occur(many):
    calls = [call for graph in many for call in graph.spec.calls]
    found = collections.defaultdict(set)
    for call in calls:
        for name, value in call.node.keywords().items():
            found[call.node.method, name].add(str(value))
    modes = {e.attributes["mode"] for e in REGISTRY["reduction"].examples}
    assert found["reduction", "mode"] == modes
    modes = {e.attributes["resample_mode"] for e in REGISTRY["resample"].examples}
    assert found["resample", "resample_mode"] == modes
    assert found["conv_fprop", "convolution_mode"] == {"CROSS_CORRELATION", "CONVOLUTION"}
    for convolution in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert {"[2, 2]", "[1]", "[1, 1, 1]"} <= found[convolution, "stride"]
        assert {"[2, 2]", "[1, 1]"} <= found[convolution, "dilation"]
    tensors = [tensor for graph in many for tensor in graph.spec.tensors]
    dtypes = {"float32", "float16", "bfloat16", "bool", "int8", "uint8", "int32"}
    assert dtypes | {"float8_e4m3fn", "float8_e5m2"} == {tensor.dtype for tensor in tensors}
    assert {1, 2, 3, 4, 5} <= {len(tensor.shape) for tensor in tensors}
    assert any(tensor.order for tensor in tensors)
    assert max(np.prod(tensor.shape) for tensor in tensors) <= 200_000


OF_ROWS = ("rmsnorm", "layernorm", "adalayernorm")
FORWARDS = (*OF_ROWS, "instancenorm", "batchnorm")
NORMALIZATIONS = (*FORWARDS, *(f"{kind}_backward" for kind in FORWARDS), "batchnorm_inference")


def groups(spec, call):
    """Of a forward convolution; 0 of anything else."""
    if call.node.method != "conv_fprop":
        return 0
    return spec.tensor(call.inputs[0][1]).shape[1] // depth(spec, call)


def depth(spec, call):
    """The input channels of a group."""
    return spec.tensor(call.inputs[1][1]).shape[1]


def normalizations(spec):
    return [c for c in spec.calls if c.node.method in NORMALIZATIONS]


def forwards(spec):
    """Those that take the statistics of their operand."""
    return [c for c in normalizations(spec) if "epsilon" in dict(c.inputs)]


def backwards(spec):
    return [c for c in normalizations(spec) if "grad" in dict(c.inputs)]


def at(spec, call, port):
    """The tensor at an input port."""
    return spec.tensor(dict(call.inputs)[port])


def normalized_axes(spec, call):
    return call.node.extent.reduced(*(at(spec, call, port).shape for port in ("input", "scale")))


def asides(spec):
    """The results of normalizations beside the first."""
    return {name for c in normalizations(spec) for _, name in c.outputs if name != first(c)}


def first(call):
    return next((n for port, n in call.outputs if port == call.node.results[0]), "")


def methods(graph):
    return [call.node.method for call in graph.spec.calls]


def attentions(spec):
    return [c for c in spec.calls if c.node.method in ("sdpa", "sdpa_backward")]


def forward_attentions(spec):
    return [c for c in attentions(spec) if c.node.method == "sdpa"]


def statistics(spec):
    """Of attention, by name."""
    return {name for c in forward_attentions(spec) for port, name in c.outputs if port == "Stats"}


def band(call):
    return call.node.diagonal_band_left_bound, call.node.diagonal_band_right_bound


def of_a_result(spec, call, port):
    """Whether the graph computes what stands at a port."""
    return at(spec, call, port).name in made(spec)


def for_cudnn(spec, call):
    """Whether attention is of 16 bits throughout, and of one dtype."""
    dtypes = {at(spec, call, port).dtype for port in "qkv"} | {spec.tensor(first(call)).dtype}
    return len(dtypes) == 1 and dtypes < {"bfloat16", "float16"}


# What graphs have, and at least which share of them.
KINDS = {
    "several products": (0.25, lambda s: sum(c.node.anchor for c in s.calls) >= 2),
    "three outputs": (0.4, lambda s: len(s.outputs) >= 3),
    "one output": (0.1, lambda s: len(s.outputs) == 1),
    "a result used and returned": (0.3, lambda s: bool({*s.outputs} & used(s).keys())),
    "a result used three times": (0.1, lambda s: any(used(s)[n] > 2 for n in made(s))),
    "unconnected parts": (0.15, lambda s: len(parts(s)) > 1),
    "connected": (0.3, lambda s: len(parts(s)) == 1),
    "booleans inside": (0.05, lambda s: any(s.tensor(n).dtype == "bool" for n in used(s))),
    "numbers": (0.1, lambda s: bool(s.constants)),
    "options": (0.05, lambda s: bool(str(s.options))),
    "biases of channels": (0.1, lambda s: any(t.shape[2:] == (1, 1) for t in s.input_tensors)),
    "rounded inside": (0.2, lambda s: any(s.tensor(n).dtype == "bfloat16" for n in made(s))),
    "moved by XLA": (0.3, lambda s: any(c.node.leftover for c in s.calls)),
    "nothing moved": (0.3, lambda s: not any(c.node.leftover for c in s.calls)),
    "groups": (0.02, lambda s: any(groups(s, c) > 1 for c in s.calls)),
    "depthwise": (0.01, lambda s: any(groups(s, c) > 1 == depth(s, c) for c in s.calls)),
    "gradients of both operands": (
        0.02,
        lambda s: {"conv_dgrad", "conv_wgrad"} <= {c.node.method for c in s.calls},
    ),
    "normalizations": (0.3, normalizations),
    "several normalizations": (0.1, lambda s: len(normalizations(s)) > 1),
    "no normalization": (0.3, lambda s: not normalizations(s)),
    "backwards of normalizations": (0.1, backwards),
    "of those in the graph": (
        0.03,
        lambda s: any(at(s, c, "inv_variance").name in asides(s) for c in backwards(s)),
    ),
    "statistics used": (0.1, lambda s: asides(s) & used(s).keys()),
    "statistics returned": (0.1, lambda s: asides(s) & {*s.outputs}),
    "no statistics": (
        0.03,
        lambda s: any(c.node.results == ("Y",) for c in forwards(s)),
    ),
    "normalizations without bias": (
        0.03,
        lambda s: any("bias" not in dict(c.inputs) for c in forwards(s)),
    ),
    "several normalized dimensions": (
        0.04,
        lambda s: any(
            len(normalized_axes(s, c)) > 1 for c in forwards(s) if c.node.method in OF_ROWS
        ),
    ),
    "rows that are not the last dimensions": (
        0.005,
        lambda s: any(
            len(at(s, c, "input").shape) - 1 not in normalized_axes(s, c)
            for c in forwards(s)
            if c.node.method in OF_ROWS
        ),
    ),
    "rows of one element": (0.02, lambda s: any(row(s, c) == 1 for c in forwards(s))),
    "rows of many elements": (0.2, lambda s: any(row(s, c) >= 16 for c in forwards(s))),
    "channels not by 8": (
        0.01,
        lambda s: any(
            at(s, c, "input").shape[1] % 8
            for c in normalizations(s)
            if c.node.method.startswith("batchnorm")
        ),
    ),
    "scales of another dtype": (
        0.1,
        lambda s: any(
            at(s, c, "scale").dtype != at(s, c, "input").dtype for c in normalizations(s)
        ),
    ),
    "epsilon in an array": (
        0.003,
        lambda s: any(at(s, c, "epsilon").value is None for c in forwards(s)),
    ),
    "attention": (0.15, attentions),
    "no attention": (0.5, lambda s: not attentions(s)),
    "attention that cuDNN may run": (
        0.05,
        lambda s: any(for_cudnn(s, c) for c in forward_attentions(s)),
    ),
    "attention of results": (
        0.05,
        lambda s: any(of_a_result(s, c, "q") for c in forward_attentions(s)),
    ),
    "results of attention used": (
        0.05,
        lambda s: {first(c) for c in forward_attentions(s)} & used(s).keys(),
    ),
    "statistics of attention used": (0.02, lambda s: statistics(s) & used(s).keys()),
    "statistics of attention returned": (0.02, lambda s: statistics(s) & {*s.outputs}),
    "attention without statistics": (
        0.02,
        lambda s: any("Stats" not in c.node.results for c in forward_attentions(s)),
    ),
    "backwards of attention": (0.03, lambda s: len(attentions(s)) > len(forward_attentions(s))),
    "backwards of attention in the graph": (
        0.02,
        lambda s: any(
            of_a_result(s, c, "stats") for c in attentions(s) if c.node.method != "sdpa"
        ),
    ),
    "heads that share keys": (
        0.03,
        lambda s: any(
            at(s, c, "q").shape[1] > at(s, c, "k").shape[1] for c in attentions(s)
        ),
    ),
    "values of another size than keys": (
        0.02,
        lambda s: any(
            at(s, c, "v").shape[3] != at(s, c, "k").shape[3] for c in attentions(s)
        ),
    ),
    "causal attention": (0.05, lambda s: any(band(c) == (None, 0) for c in attentions(s))),
    "windows of attention": (0.02, lambda s: any(None not in band(c) for c in attentions(s))),
    "positions from the last": (
        0.01,
        lambda s: any(c.node.diagonal_alignment == "BOTTOM_RIGHT" for c in attentions(s)),
    ),
    **{
        f"attention with {port}": (
            least,
            lambda s, port=port: any(port in dict(c.inputs) for c in attentions(s)),
        )
        for port, least in (("bias", 0.04), ("seq_len_kv", 0.02), ("sink_token", 0.005))
    },
}  # fmt: skip


def row(spec, call):
    """Over how many elements a normalization goes."""
    shape = at(spec, call, "input").shape
    return np.prod([shape[axis] for axis in normalized_axes(spec, call)])


def used(spec):
    """How many ports each computed tensor feeds."""
    names = [name for call in spec.calls for _, name in call.inputs]
    return collections.Counter(name for name in names if name in made(spec))


def made(spec):
    return {name for call in spec.calls for _, name in call.outputs}


def parts(spec):
    sets = []
    for call in spec.calls:
        names = {name for _, name in (*call.inputs, *call.outputs)}
        joined = [other for other in sets if other & names]
        sets = [other for other in sets if not other & names] + [names.union(*joined)]
    return sets


def test_a_tenth_of_the_operations_normalizes(many):
    operations = [method for graph in many for method in methods(graph)]
    assert 0.07 < sum(m in NORMALIZATIONS for m in operations) / len(operations) < 0.13


@pytest.mark.parametrize("kind", KINDS)
def test_the_mix_has(kind, many):
    least, has = KINDS[kind]
    assert sum(bool(has(graph.spec)) for graph in many) >= least * len(MANY)


# -- their references, and the tolerance -----------------------------------------------------------


@pytest.mark.parametrize("seeds", chunks(12, 6))
def test_references_are_tame_and_agree_with_float64(seeds):
    for seed in seeds:
        graph = random_graph(seed)
        operands = graph.inputs()
        reference = Reference(graph.spec, operands)
        for output in reference.outputs:
            assert np.isfinite(output.astype(np.float64)).all(), seed
        with np.errstate(all="ignore"):
            exact = oracle.rounded(graph.spec, operands)
        for comparison in reference.compare(exact):
            assert comparison.right, (seed, comparison)


def by_size(graphs):
    return sorted(graphs, key=lambda graph: len(graph.spec.calls))


WRONG = {
    "conv_fprop": lambda right: np.roll(right, 1, 1),
    "matmul": lambda right: np.where(np.arange(right.size).reshape(right.shape) == 5, 99, right),
    "reduction": lambda right: right * 1.3 + 0.5,
    "cmp_lt": lambda right: 1 - right,
    "sigmoid": lambda right: right * 1.04,
    "transpose": lambda right: right[::-1],
    "layernorm": lambda right: (right[0] * 1.05, *right[1:]),
    "batchnorm": lambda right: (np.roll(right[0], 1, 1), *right[1:]),
    "rmsnorm_backward": lambda right: (right[0] * 1.1 + 0.01, *right[1:]),
    "sdpa": lambda right: (np.roll(right[0], 1, 2), *right[1:]),
    "sdpa_backward": lambda right: (0.0 - right[0], *right[1:]),
}


@pytest.mark.parametrize("method", WRONG)
def test_a_wrong_operation_is_noticed(method, many, monkeypatch):
    """In small graphs that return its result: what follows may hide it."""
    right, tried, noticed = oracle.OPERATIONS[method], 0, 0

    def wrong(node, **arrays):
        return WRONG[method](right(node, **arrays))

    for graph in by_size(many):
        returned = [c for c in graph.spec.calls if c.outputs[0][1] in graph.spec.outputs]
        if tried == 4 or method not in [call.node.method for call in returned]:
            continue
        operands = graph.inputs()
        outputs = []
        for operation in (right, wrong):
            monkeypatch.setitem(oracle.OPERATIONS, method, operation)
            with np.errstate(all="ignore"):
                outputs.append(oracle.rounded(graph.spec, operands))
        if all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True)):
            continue  # one element, or one channel: nothing to mix up
        tried += 1
        found = Reference(graph.spec, operands).compare(outputs[1])
        noticed += not all(comparison.right for comparison in found)
    assert tried >= 3
    assert noticed == tried


@pytest.mark.parametrize("kind", ["conv_fprop", "conv_wgrad", "reduction"])
def test_rounding_and_the_order_of_sums_are_no_errors(kind, many):
    """The program that XLA compiles of a whole graph rounds and adds otherwise than its parts."""
    cpu = jax.local_devices(backend="cpu")[0]
    fitting = (g for g in many if methods(g).count(kind) > 1 and "matmul" not in methods(g))
    for graph in itertools.islice(fitting, 2):
        ratio, _ = graph_checks.check_result(graph, cpu)
        assert ratio < 1


def test_products_of_float32_may_be_cut_to_10_bits_unless_that_is_forbidden(many, monkeypatch):
    def cut_short(x):
        bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)

    for method in ("conv_fprop", "conv_dgrad", "conv_wgrad", "matmul"):
        monkeypatch.setitem(
            oracle.OPERATIONS,
            method,
            lambda node, right=oracle.OPERATIONS[method], **arrays: right(
                node, **{port: cut_short(x) for port, x in arrays.items()}
            ),
        )
    cut = [g for g in many if g.spec.has_float32_product]
    fitting = [g for g in cut if g.spec.options.precision == "default"][:12]
    spec, operands = fitting[0].spec, fitting[0].inputs()
    for graph in fitting:
        cut_results = oracle.rounded(graph.spec, graph.inputs())
        for comparison in Reference(graph.spec, graph.inputs()).compare(cut_results):
            assert comparison.right
    exact = dataclasses.replace(spec, options=jc.Options(precision="highest"), _cache={})
    found = Reference(exact, operands).compare(oracle.rounded(spec, operands))
    assert not all(comparison.right for comparison in found)


def test_a_wrong_result_is_raised():
    graph = random_graph(8)
    wrong = types.SimpleNamespace(
        spec=graph.spec,
        operands=graph.operands,
        inputs=graph.inputs,
        function=lambda *x: [y + 1 for y in graph.function(*x)],
    )
    with pytest.raises(graph_checks.WrongResult, match="allowed"):
        graph_checks.check_result(wrong, jax.local_devices(backend="cpu")[0])


# -- cut into segments -----------------------------------------------------------------------------


def cut(graph, share):
    """Segments of a splitter that is refused a share of what it asks for, by its text."""

    def ask(piece):
        refused = zlib.crc32(str(piece).encode()) % 100 < 100 * share
        return split.Refusal("by lot") if refused else None

    return split.search(graph.spec, ask)


@pytest.mark.parametrize("seeds", chunks(100, 100))
def test_whatever_is_refused_segments_compute_what_the_graph_does(seeds):
    cuts = collections.Counter()
    for seed in seeds:
        graph = random_graph(seed)
        for share in (0.2, 0.6, 0.9, 1.0):
            segments = cut(graph, share)
            graph_checks.check_segments(graph.spec, segments)
            cuts[len(segments)] += 1
    assert len(cuts) >= 4, "too few different cuts to be worth it"


def test_segments_give_the_same_bits():
    for seed in (FRESH, FRESH + 1):
        graph_checks.check_reference(random_graph(seed), cut(random_graph(seed), 0.7))


def replaced(segment, **changes):
    return dataclasses.replace(
        segment, spec=dataclasses.replace(segment.spec, _cache={}, **changes)
    )


def retyped(segment):
    """Rounds a result of the segment to another dtype."""
    name = segment.spec.outputs[0]
    tensors = tuple(
        dataclasses.replace(t, dtype="float16") if t.name == name else t
        for t in segment.spec.tensors
    )
    return replaced(segment, tensors=tensors)


DAMAGE = {
    "a segment is left out": (lambda s: s[:-1], "not every operation"),
    "a segment runs twice": (lambda s: [*s, s[-1]], "not every operation"),
    "too early": (lambda s: s[::-1], "before its operands"),
    "another dtype at a cut": (lambda s: [retyped(s[0]), *s[1:]], "something else"),
    "other options": (
        lambda s: [replaced(s[0], options=jc.Options(deterministic=True)), *s[1:]],
        "other options",
    ),
    "swapped operands": (
        lambda s: [*s[:-1], replaced(s[-1], calls=tuple(map(swapped, s[-1].spec.calls)))],
        "something else",
    ),
}


def swapped(call):
    ports, names = zip(*call.inputs, strict=True)
    return dataclasses.replace(call, inputs=tuple(zip(ports, names[::-1], strict=True)))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_segments_are_noticed(damage):
    avals = [jax.ShapeDtypeStruct((1, 8, 8), "bfloat16")] * 3
    product = jc.graph(lambda g, x, w, v: g.matmul(g.matmul(x, w).set_data_type("bfloat16"), v))
    spec = product.trace(*avals)[1].spec
    one = [split.Segment(split.part(spec, (i,)), (i,), False) for i in range(2)]
    graph_checks.check_segments(spec, one)
    change, words = DAMAGE[damage]
    with pytest.raises(graph_checks.WrongSegments, match=words):
        graph_checks.check_segments(spec, change(one))


# -- planned ---------------------------------------------------------------------------------------


def failures(outcomes):
    """In words, with the command that repeats each."""
    command = "python -m fuzz --gpu H200 --seed"
    return "\n\n".join(f"{command} {o.seed}\n{o.problem}" for o in outcomes if o.problem)


def planned(seeds, bits):
    checks = runs.Checks(profiles.get("H200"), bits=bits)
    with client.workers(2):
        return runs.fuzz(seeds, checks, threads=2)


@pytest.mark.deviceless
@pytest.mark.parametrize("seeds", chunks(100, 25))
def test_every_graph_is_planned(seeds):
    outcomes = planned(seeds, bits=25)
    assert not failures(outcomes), failures(outcomes)
    assert any(outcome.segments.count(True) for outcome in outcomes)
    print(json.dumps(runs.figures(outcomes)))


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.timeout(7200)
def test_two_thousand_graphs_are_planned(request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("2,000 graphs take half an hour: pytest -m slow")
    outcomes = planned(range(2000), bits=50)
    assert not failures(outcomes), failures(outcomes)


@pytest.mark.deviceless
def test_the_lowered_program_holds_the_planned_segments():
    lowered = 0
    for seed in range(FRESH, FRESH + 40):
        graph = random_graph(seed)
        with jc.target("H200"):
            held = len(jc.plan(graph.function, *graph.avals).execution_plans)
            if held < 2:
                continue
            program = jax.jit(graph.function).trace(*graph.avals)
            text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call @jax_cudnn") <= held  # equal ones are shared
        assert text.count("stablehlo.custom_call @jax_cudnn") >= 1
        lowered += 1
        if lowered == 3:
            break
    assert lowered == 3


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", chunks(300, 25))
def test_on_the_gpu(seeds):
    device = jax.devices("gpu")[0]
    checks = runs.Checks(CudaDevice(device.local_hardware_id), device, bits=0)
    outcomes = runs.fuzz(seeds, checks, threads=4)
    assert not failures(outcomes), failures(outcomes)
    print(json.dumps(runs.figures(outcomes)))


# -- transformed -----------------------------------------------------------------------------------


def gradients(spec):
    """A function of operands and of cotangents of the float results."""
    floats = [i for i, t in enumerate(spec.input_tensors) if is_floating(t.dtype)]
    results = [i for i, t in enumerate(spec.output_tensors) if is_floating(t.dtype)]

    def function(operands, cotangents):
        def of_floats(*moving):
            given = list(operands)
            for i, x in zip(floats, moving, strict=True):
                given[i] = x
            found = evaluate(spec, *given)
            return [found[i] for i in results]

        return jax.vjp(of_floats, *(operands[i] for i in floats))[1](cotangents)

    return function, floats, results


def drawn(seed):
    graph = random_graph(seed)
    return draw(graph.spec, graph.inputs, seed)


@pytest.mark.parametrize("seed", range(8))
def test_the_interpreter_computes_what_xla_does(seed):
    """The same seeds always: no rounding of theirs is turned into an error of order 1."""
    case = drawn(seed)
    function, floats, results = gradients(case.spec)
    data = [case.examples[0].operands, case.examples[0].cotangents]
    if not floats or not results:
        function, data = (lambda operands: evaluate(case.spec, *operands)), data[:1]
    got, want = interpreted(function)(*data), jax.jit(function)(*data)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        finite = np.isfinite(b)
        assert np.linalg.norm((a - b)[finite]) <= 0.02 * np.linalg.norm(b[finite]) + 1e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_the_interpreter_runs_loops_and_what_is_computed_again(reverse):
    def function(x, y):
        def step(total, row):
            return total + row, jnp.sin(total) * y

        return jax.lax.scan(jax.checkpoint(step), y, x, reverse=reverse)

    def gradients(x, y):
        results, pull = jax.vjp(function, x, y)
        return pull(results)

    x = np.random.default_rng(0).standard_normal((5, 3), np.float32)
    got, want = interpreted(gradients)(x, x[0]), jax.jit(gradients)(x, x[0])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_reference_of_derivatives_is_jaxs_derivative_of_the_whole(many):
    """Where nothing is rounded inside: else the latter rounds, too."""
    fitting = [g for g in many if not narrowest(g.spec) and "int" not in str(g.spec)]
    compared = 0
    for graph in fitting[:8]:
        case = draw(graph.spec, graph.inputs, 1)
        first = case.examples[0]
        function, floats, results = gradients(graph.spec)
        want = interpreted(function)(first.operands, first.cotangents)
        named = {graph.spec.outputs[i]: x for i, x in zip(results, first.cotangents, strict=True)}
        got = Differentiated(graph.spec, first.operands).gradients(named)
        for i, b in zip(floats, want, strict=True):
            a = got.get(graph.spec.inputs[i], np.zeros_like(b))
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
            compared += 1
    assert compared > 10


def test_cases_of_every_kind_occur():
    cases = [drawn(seed) for seed in range(40)]
    axes = [axis for case in cases for axis in case.axes]
    assert {None, 0, 1, 2, -1} <= {*axes}
    assert {0, 1, 2, -1} <= {axis for case in cases for axis in case.out_axes}
    assert {len(case.examples) for case in cases} == {2, 3}
    assert {mapped for case in cases for mapped in case.mapped} == {False, True}
    of_bytes = jc.graph(lambda g, x: g.cmp_gt(x, 0)).trace(np.ones((2, 3), np.int8))[1].spec
    cases.append(dataclasses.replace(cases[0], spec=of_bytes))  # rare, since most have floats
    assert {case.transforms for case in cases} == {("vmap",), TRANSFORMS}
    cases.pop()
    assert any({*case.tangents} < {*case.floats} for case in cases)
    for case in cases:
        assert any(axis is not None for axis in case.axes)
        if case.floats and case.results:
            assert case.tangents


def disagreements(outcomes):
    """In words, with the command that repeats each."""
    command = "python -m fuzz --transforms --seed"
    return "\n\n".join(f"{command} {o.seed}\n{o.problem}" for o in outcomes if o.problem)


@pytest.mark.wide
@pytest.mark.parametrize("seeds", chunks(100, 25))
def test_transformations_agree_with_the_references(seeds):
    outcomes = [TransformChecks().outcome(seed) for seed in seeds]
    assert not disagreements(outcomes), disagreements(outcomes)
    found = transform_runs.figures(outcomes)["transforms"]
    for name in TRANSFORMS:
        assert found[name]["results"] >= len(seeds)
        assert found[name]["blunt"] + found[name]["untame"] < 0.1 * found[name]["results"]
    print(json.dumps(found))


def times(factor, right):
    """A rule of a node whose results are multiplied."""

    def wrong(self, g, *args, **kwargs):
        found = right(self, g, *args, **kwargs)
        if isinstance(found, dict):
            return {port: g.mul(x, factor) for port, x in found.items()}
        return found if found is None or found is NotImplemented else g.mul(found, factor)

    return wrong


WRONG_RULES = {
    **{(method, "slope"): ("grad", "jvp", "vmap of grad") for method in ("sigmoid", "mul", "exp")},
    **{(method, "transpose"): ("grad", "vmap of grad") for method in ("matmul", "conv_fprop")},
    ("conv_wgrad", "jvp"): ("grad", "jvp", "vmap of grad"),
    ("reduction", "transpose"): ("grad", "vmap of grad"),
    **{(method, "jvp"): ("grad", "jvp", "vmap of grad") for method in ("layernorm", "rmsnorm")},
    **{(method, "jvp"): ("grad", "jvp", "vmap of grad") for method in ("batchnorm", "sdpa")},
}
"""What is wrong, and which transformations that makes wrong."""


def forget():
    for derived in (linearize.linearize, transpose.transpose, batch.batch):
        derived.cache_clear()


@pytest.fixture
def nothing_derived():
    """No derived graph is known before and after the test."""
    forget()
    yield
    forget()


def fitting_cases(many, method, count):
    """Cases of small graphs that return results of a method, whose derivatives are tame."""
    for graph in by_size(many):
        returned = [c for c in graph.spec.calls if c.outputs[0][1] in graph.spec.outputs]
        if method not in [call.node.method for call in returned]:
            continue
        case = draw(graph.spec, graph.inputs, graph.seed)
        if case.transforms != TRANSFORMS:
            continue
        right = agreements.check(case, TransformChecks().results(case))
        if not any(agreement.untame for agreement in right.values()):
            yield case
            count -= 1
            if not count:
                return


@pytest.mark.parametrize("rule", WRONG_RULES, ids=" of ".join)
def test_a_wrong_rule_is_noticed(rule, many, monkeypatch, nothing_derived):
    method, name = rule
    cases = [*fitting_cases(many, method, 3)]
    forget()
    node = REGISTRY[method]
    monkeypatch.setattr(node, name, times(1.5, getattr(node, name)))
    noticed = 0
    for case in cases:
        try:
            agreements.check(case, TransformChecks().results(case))
        except agreements.WrongTransform as error:
            told = {part.partition(":")[0] for part in error.got.split("; ")}
            noticed += told <= {*WRONG_RULES[rule]}
    assert len(cases) == 3
    assert noticed >= 2  # what the operation stands on may be no float


@pytest.mark.parametrize("name", ["vmap", "vmap of grad"])
def test_examples_in_another_order_are_noticed(name, many):
    (case,) = fitting_cases(many, "add", 1)
    results = TransformChecks().results(case)
    axes = case.out_axes if name == "vmap" else [0] * len(case.floats)
    turned = [np.flip(x, axis) for x, axis in zip(results[name], axes, strict=True)]
    with pytest.raises(agreements.WrongTransform, match=f"{name}: "):
        agreements.check(case, {**results, name: turned})


def test_values_that_are_not_finite_are_left_out_and_counted():
    reciprocal = jc.graph(lambda g, x, y: [g.reciprocal(x), g.mul(x, y)])
    x = np.ones((4, 8), np.float32)
    spec = reciprocal.trace(x, x)[1].spec
    for x[1, 2], untame in ((0, 1), (1e-5, 1), (1, 0)):  # no value, a pole, and nothing of these
        case = draw(spec, lambda number: [x, np.float32(number) + x], 0)
        found = agreements.check(case, TransformChecks().results(case))
        assert (found["grad"].untame, found["vmap"].untame) == (untame, 0)
        assert found["grad"].results == (0 if untame else 2)


FEW_KEYS = {
    "none": {"diagonal_band_right_bound": 0, "diagonal_alignment": "BOTTOM_RIGHT"},
    "one": {"diagonal_band_right_bound": 0, "diagonal_band_left_bound": 1},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys", FEW_KEYS)
def test_attention_of_queries_that_see_few_keys_is_compared(keys, dtype):
    """Also where statistics are -inf, and where gradients cancel."""

    def attention(g, q, k, v):
        o, stats = g.sdpa(q, k, v, attn_scale=0.25, **FEW_KEYS[keys])
        gradients = g.sdpa_backward(q, k, v, o, q, stats, attn_scale=0.25, **FEW_KEYS[keys])
        return [o, *gradients]

    shapes = (2, 2, 24, 16), (2, 1, 20, 16), (2, 1, 20, 16)
    avals = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    spec = jc.graph(attention).trace(*avals)[1].spec

    def operands(number):
        noise = np.random.default_rng(number)
        return [noise.standard_normal(s, np.float32).astype(dtype) for s in shapes]

    case = draw(spec, operands, 0)
    found = agreements.check(case, TransformChecks().results(case))
    assert {*found} == {*TRANSFORMS}
    assert not any(agreement.untame for agreement in found.values())


@pytest.mark.wide
@pytest.mark.deviceless
@pytest.mark.parametrize("seed", range(FRESH, FRESH + 4))
def test_everything_derived_is_planned(seed):
    checks = TransformChecks(profiles.get("H200"))
    outcome = checks.outcome(seed)
    assert not disagreements([outcome]), disagreements([outcome])
    assert outcome.graphs >= 1
    assert outcome.segments[0] >= outcome.graphs


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_transformations_of_a_thousand_graphs(request):
    """Run on the CPU; their figures are in the README."""
    if "slow" not in request.config.option.markexpr:
        pytest.skip("the transformations of 1,000 graphs take ten minutes: pytest -m slow")
    outcomes = transform_runs.fuzz(range(1000), TransformChecks(), workers=2)
    assert not disagreements(outcomes), disagreements(outcomes)


@pytest.mark.gpu
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", chunks(300, 100))
def test_transformations_on_the_gpu(seeds):
    device = CudaDevice(jax.devices("gpu")[0].local_hardware_id)
    outcomes = transform_runs.fuzz(seeds, TransformChecks(device, transform_runs.GPU), workers=6)
    assert not disagreements(outcomes), disagreements(outcomes)
    print(json.dumps(transform_runs.figures(outcomes)))


def test_what_kills_a_process_costs_one_call():
    """Calls of eval: in order, whatever becomes of them."""
    kill = "__import__('os').kill(__import__('os').getpid(), 9)"
    variable = "__import__('os').environ['JAX_CUDNN_FUZZ']"
    calls = ["1 + 1", kill, variable, "1 / 0", "__import__('time').sleep(60)", "'spoiled'", "3 + 3"]
    results = in_processes(
        eval,
        calls,
        lost=lambda call, why: f"lost: {why}",
        spoiled=lambda result: result == "spoiled",
        workers=2,
        timeout=10,
        variables={"JAX_CUDNN_FUZZ": "given"},
    )
    assert [*results] == [
        2,
        "lost: the process died: signal SIGKILL",
        "given",
        "lost: ZeroDivisionError: division by zero",
        "lost: no answer within 10 s",
        "spoiled",
        6,
    ]


def test_graphs_are_checked_in_processes():
    told = []
    seeds = range(FRESH, FRESH + 3)
    outcomes = transform_runs.fuzz(seeds, TransformChecks(), 2, told.append)
    assert outcomes == told == [TransformChecks().outcome(seed) for seed in seeds]


# -- what they have found --------------------------------------------------------------------------


@pytest.mark.deviceless
def test_a_part_of_rows_is_normalized():
    def of_a_part(g, x, scale):
        part = g.slice(x, slices=[slice(None), slice(None), slice(0, 512)])
        return g.rmsnorm(part, scale, epsilon=1e-6)[0]

    shapes = (8, 64, 1024), (1, 1, 512)
    with jc.target("H200"):
        plan = jc.plan(jc.graph(of_a_part), *(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
    assert any(segment.plan is not None for segment in plan.segments)


@pytest.mark.parametrize("method", ["layernorm", "adalayernorm"])
def test_rows_of_one_element_are_their_bias(method):
    """Also where what is kept of them for the derivative is rounded, and under vmap."""

    @jc.graph
    def normalized(g, x, y, scale, bias):
        return getattr(g, method)(g.matmul(x, y), scale, bias=bias, epsilon=1e-6)[0]

    shapes = (2, 5, 3), (2, 3, 1), (2 if method == "adalayernorm" else 1, 1, 1)
    x, y, scale = (10 * jax.random.normal(jax.random.key(0), s, "bfloat16") for s in shapes)
    gradients = jax.grad(lambda *xs: normalized(*xs).sum().astype("float32"), range(4))
    *others, bias = gradients(x, y, scale, scale)
    assert not any(np.asarray(g).any() for g in others)
    np.testing.assert_array_equal(np.asarray(bias, np.float32), 10 / scale.size)
    stacked = np.stack([x, 2 * x, -x])
    found = jax.vmap(normalized, in_axes=(0, None, None, None))(stacked, y, scale, scale)
    np.testing.assert_array_equal(found, np.broadcast_to(scale, found.shape))


@pytest.mark.deviceless
def test_attention_beside_a_normalization_of_another_rank_is_planned():
    def both(g, q, x, scale):
        o, _ = g.sdpa(q, q, q, attn_scale=0.125)
        return o, g.rmsnorm(x, scale, epsilon=1e-6)[0]

    shapes = (2, 4, 128, 64), (2, 128, 256), (1, 1, 256)
    with jc.target("H200"):
        plan = jc.plan(jc.graph(both), *(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
    assert any(segment.plan is not None for segment in plan.segments)


def test_running_variances_have_gradients_in_float16():
    """1 - momentum does not cancel, and the cube of inv_var does not overflow."""

    def running_variance(g, *operands):
        return g.batchnorm(*operands, epsilon=1e-6, momentum=0.999)[4]

    x = np.float32(0.02) * np.random.default_rng(0).standard_normal((4, 8, 5, 5), np.float32)
    arrays = (x, *[np.ones((1, 8, 1, 1), np.float32)] * 4)
    graphs = (
        jc.graph(running_variance, **kind) for kind in ({}, {"intermediate_data_type": "float16"})
    )
    sums = (lambda *xs, f=f: f(*xs).sum() for f in graphs)
    exact, narrow = (jax.grad(total, (0, 4))(*arrays) for total in sums)
    for a, b in zip(narrow, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())


# -- the figures and the command -------------------------------------------------------------------


def test_figures():
    outcomes = [
        runs.Outcome(0, 3, (True,), 1, 0.5),
        runs.Outcome(1, 12, (False, True, True), 40, 2.0, 0.25, 1),
        runs.Outcome(2, 5, (False,), 4, 0.1),
        runs.Outcome(3, 7, problem="LibraryError: no"),
    ]
    facts = runs.figures(outcomes)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["graphs"] == 4
    assert facts["nodes"] == 27
    assert (facts["one_plan"], facts["by_xla_alone"], facts["segments_of_cudnn"]) == (1, 1, 3)
    assert facts["by_segments"] == {"1": 2, "3": 1}
    assert facts["by_segments_of_cudnn"] == {"0": 1, "1": 1, "2": 1}
    assert facts["questions"] == {"median": 4, "p95": 40, "max": 40, "sum": 45}
    assert facts["planning_s"]["max"] == 2.0
    assert (facts["worst_ratio"], facts["blunt_outputs"]) == (0.25, 1)
    assert facts["failures"] == [[3, "LibraryError: no"]]


def test_figures_of_transformations():
    outcomes = [
        Transformed(
            0,
            nodes=3,
            graphs=7,
            segments=(9, 4),
            questions=10,
            seconds=1.5,
            agreements={"grad": Agreement(0.5, 4, 1, 1), "vmap": Agreement(0.25, 6)},
        ),
        Transformed(1, nodes=5, graphs=1, segments=(1, 1), agreements={"vmap": Agreement(0.75, 2)}),
        Transformed(2, nodes=4, agreements={"grad": Agreement(untame=1)}),
        Transformed(3, problem="the process died: signal SIGSEGV"),
    ]
    facts = transform_runs.figures(outcomes)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["graphs"], facts["nodes"], facts["derived_graphs"]) == (4, 12, 8)
    assert (facts["segments"], facts["segments_of_cudnn"]) == (10, 5)
    assert facts["questions"]["sum"] == 10
    assert facts["planning_s"]["max"] == 1.5
    assert facts["transforms"]["grad"] == {
        **{"graphs": 2, "results": 4, "worst_ratio": 0.5, "measured": 1, "blunt": 1, "untame": 1}
    }
    assert facts["transforms"]["vmap"]["worst_ratio"] == 0.75
    assert facts["transforms"]["jvp"]["graphs"] == 0
    assert facts["failures"] == [[3, "the process died: signal SIGSEGV"]]


def test_tables():
    versions = {"cudnn": "9.19.0", "date": "2026-11-21"}
    forward = {
        "environment": versions,
        "gpu": "H200",
        "run_on_the_gpu": False,
        **runs.figures([runs.Outcome(0, 3, (True,)), runs.Outcome(1, 4, (False,))]),
    }
    outcome = Transformed(0, nodes=3, graphs=7, agreements={"grad": Agreement(0.5, 4, 1, 2, 1)})
    transformed = {
        "environment": versions,
        "gpu": "NVIDIA H200",
        "run_on_the_gpu": True,
        **transform_runs.figures([outcome]),
    }
    first, second = runs.render([transformed, forward]).split("\n\n")
    assert first.splitlines()[1:] == [
        "|---|---|---|---|---|---|---|---|---|",
        "| 2 | 7 | H200, cuDNN 9.19.0, 2026-11-21 | no | 1 | 0 | 1 |  | 0 |",
    ]
    assert second.splitlines()[2] == (
        "| 1 | 7 | NVIDIA H200, cuDNN 9.19.0, 2026-11-21 | it | 4 "
        "| 0.5, 0.0, 0.0, 0.0 | 1 | 3 | 0 |"
    )
    assert runs.render([forward]) == first


def test_whatever_planning_raises_is_an_outcome():
    class Broken(runs.Checks):
        def plan(self, spec, name):
            if any(call.node.method == "genstats" for call in spec.calls):
                raise ValueError("no sums: today")
            return super().plan(spec, name)

    seed = next(s for s in MANY if "genstats" in str(random_graph(s).spec))
    outcome = Broken(None).outcome(seed)
    assert outcome.problem.startswith("ValueError: no sums: today (line ")
    (call,) = runs.smallest(random_graph(seed).spec, Broken(None).planning_problem).calls
    assert call.node.method == "genstats"


@pytest.fixture
def shell(monkeypatch):
    """The command, whose settings end with the test."""
    monkeypatch.setattr(settings, "_given", settings._given)
    return lambda *arguments: main(["--gpu", "H200", *arguments])


def refuse_genstats(monkeypatch):
    def plan(self, spec, name):
        if any(call.node.method == "genstats" for call in spec.calls):
            raise jc.UnsupportedGraphError("no sums today")
        whole = split.whole(spec, leftover=True)
        return Plan(
            name, "H200", "split", spec, [PlannedSegment(s.spec, s.calls, None) for s in whole]
        )

    monkeypatch.setattr(runs.Checks, "plan", plan)
    monkeypatch.setattr(runs.Checks, "questions", lambda self, graph: 1)


def test_the_command_tells_what_fails(shell, monkeypatch, capsys, tmp_path):
    refuse_genstats(monkeypatch)
    first = next(seed for seed in MANY if "genstats" in methods(random_graph(seed)))
    arguments = ["--seeds", "2", "--start", str(first), "--write", str(tmp_path / "figures.json")]
    assert shell(*arguments) == 1
    printed = capsys.readouterr().out
    assert f"seed {first}: UnsupportedGraphError: no sums today" in printed
    assert str(random_graph(first).spec) in printed
    facts = json.loads((tmp_path / "figures.json").read_text())
    assert facts["seeds"] == [first, first + 2]
    assert facts["failures"][0] == [first, "UnsupportedGraphError: no sums today"]
    assert facts["environment"]["jax"] == jax.__version__
    assert (facts["gpu"], facts["run_on_the_gpu"]) == ("H200", False)


def test_one_graph_is_told_in_full(shell, monkeypatch, capsys):
    refuse_genstats(monkeypatch)
    seed = next(
        s
        for s in MANY
        if len({*methods(random_graph(s))} - {"genstats"}) > 3
        and "genstats" in methods(random_graph(s))
    )
    assert shell("--seed", str(seed)) == 1
    graph, _, smallest = capsys.readouterr().out.partition("the smallest part that fails alike:\n")
    assert graph.startswith(str(random_graph(seed).spec))
    assert "no sums today" in graph
    assert smallest.count(" = ") == smallest.count(" = genstats(") == 1


def test_the_command_tells_which_transformations_fail(shell, monkeypatch, capsys, tmp_path):
    def fuzz(seeds, checks, workers, progress):
        assert checks == TransformChecks(profiles.get("H200"), transform_runs.CPU)
        assert workers == 3
        outcomes = [Transformed(seed, problem="no tangents" * (seed == 8)) for seed in seeds]
        for outcome in outcomes:
            progress(outcome)
        return outcomes

    monkeypatch.setattr(transform_runs, "fuzz", fuzz)
    file = tmp_path / "figures.json"
    arguments = ["--transforms", "--seeds", "2", "--workers", "3", "--write", str(file)]
    assert shell("--start", "7", *arguments) == 1
    assert f"seed 8: no tangents\n{random_graph(8).spec}" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert (facts["graphs"], facts["seeds"]) == (2, [7, 9])
    assert facts["failures"] == [[8, "no tangents"]]
    assert shell("--start", "1", *arguments) == 0


def test_transformations_of_one_graph_are_told_in_full(shell, monkeypatch, capsys):
    def problem(self, spec):
        return "no sums: today" * any(call.node.method == "genstats" for call in spec.calls)

    def outcome(self, seed):
        return Transformed(seed, problem=problem(self, random_graph(seed).spec))

    monkeypatch.setattr(TransformChecks, "problem", problem)
    monkeypatch.setattr(TransformChecks, "outcome", outcome)
    monkeypatch.setattr(TransformChecks, "plans", lambda self, case: [])
    bad = next(seed for seed in MANY if "genstats" in methods(random_graph(seed)))
    good = next(seed for seed in MANY if "genstats" not in methods(random_graph(seed)))
    assert shell("--transforms", "--seed", str(bad)) == 1
    graph, _, smallest = capsys.readouterr().out.partition("the smallest part that fails alike:\n")
    assert graph.startswith(str(random_graph(bad).spec))
    assert smallest.count(" = ") == smallest.count(" = genstats(") == 1
    assert shell("--transforms", "--seed", str(good)) == 0


@pytest.mark.deviceless
def test_the_command_plans(shell, capsys):
    good = next(s for s in itertools.count() if methods(random_graph(s))[:1] == ["matmul"])
    assert shell("--seed", str(good)) == 0
    assert "segments=(" in capsys.readouterr().out
