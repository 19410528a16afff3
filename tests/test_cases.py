"""Every example of every node and every fusion, on every way it can run."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import oracle
import oracle_shapes
import pytest
from cases import FUSIONS, all_cases, dtype_cases

import jax_cudnn as jc
from jax_cudnn._core.planning.placement import place
from jax_cudnn.deviceless import client, profiles


def by_cudnn(case):
    """The same in one plan, measured losses or not; but cut around what is always XLA's."""
    spec = case.function.trace(*case.avals)[1].spec
    if any(call.node.leftover for call in spec.calls):
        return case
    return dataclasses.replace(case, function=case.function.with_options(implementation="cudnn"))


CASES = tuple(map(by_cudnn, (*all_cases(), *dtype_cases())))
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_planned, each_refused = (
    pytest.mark.parametrize(
        "case", [c for c in CASES if c.planned == planned], ids=lambda case: case.name
    )
    for planned in (True, False)
)


def run_and_check(case, key, on_gpu):
    operands = case.operands(key)
    _, trace = case.function.trace(*operands)
    got = jax.tree.leaves(jax.jit(case.function)(*operands))
    named = dict(zip(trace.leaves, got, strict=True))
    outputs = [named[name] for name in trace.spec.outputs]
    for output, tensor in zip(outputs, trace.spec.output_tensors, strict=True):
        assert output.dtype == tensor.dtype
    return operands, got, oracle.check_outputs(trace.spec, operands, outputs, on_gpu)


@each_case
def test_reference(case, key):
    operands, got, _ = run_and_check(case, key, on_gpu=False)
    for eager, jitted in zip(jax.tree.leaves(case.function(*operands)), got, strict=True):
        np.testing.assert_allclose(
            np.asarray(eager, np.float32), np.asarray(jitted, np.float32), rtol=1e-2, atol=1e-5
        )


@pytest.mark.gpu
@each_planned
def test_on_the_gpu(case, key):
    operands, _, errors = run_and_check(case, key, on_gpu=True)
    compiled = jax.jit(case.function).lower(*operands).compile().as_text()
    plans = compiled.count('custom_call_target="jax_cudnn"')
    planned = jc.plan(case.function, *case.avals)
    assert plans == len(planned.execution_plans), "one call for each plan, inside the program"
    print(case.name, "relative errors", errors)


@pytest.fixture(scope="module")
def planned(request):
    """The plans of all cases whose tests run: made by two workers at the same time."""
    here = [item.callspec.params["case"] for item in request.session.items if wants_plans(item)]

    def made(case):
        spec = case.function.trace(*case.avals)[1].spec
        return place(spec, profiles.get("H200"), case.name)

    with client.workers(2), concurrent.futures.ThreadPoolExecutor(2) as pool:
        return {case.name: pool.submit(made, case) for case in here}


def wants_plans(item):
    return item.module.__name__ == __name__ and "planned" in getattr(item, "fixturenames", ())


@pytest.mark.deviceless
@each_planned
def test_planned_without_a_gpu(case, planned):
    plan = planned[case.name].result()
    calls = [call.node for call in plan.spec.calls]
    if not any(node.leftover for node in calls):
        assert len(plan.segments) == len(plan.execution_plans) == 1
    # A convolution or matmul with its neighbours, and nothing else beside what XLA moves.
    assert len(plan.execution_plans) == max(1 - any(n.leftover for n in calls), anchors(calls))
    with jc.target("H200"):
        again = jc.plan(case.function, *case.avals)
        lowered = jax.jit(case.function).trace(*case.avals).lower(lowering_platforms=("cuda",))
    assert again.execution_plans == plan.execution_plans
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @jax_cudnn") == len(plan.execution_plans)
    for made in plan.execution_plans:
        assert made.device_name == "NVIDIA H200"
        assert made.candidates >= 1
        assert made.workspace_bytes >= 0
        assert made.engine.startswith("eng")
        assert made.digest in text
        print(case.name, made)


def anchors(nodes):
    return sum(node.anchor for node in nodes)


def test_cases_have_none_one_and_several_anchors():
    """Among those that are cut."""
    cut = {}
    for case in CASES:
        nodes = [call.node for call in case.function.trace(*case.avals)[1].spec.calls]
        if any(node.leftover for node in nodes):
            cut[case.name] = anchors(nodes)
    assert cut["transpose_0_bfloat16"] == 0
    assert cut["conv_concatenated"] == 1
    assert cut["conv_then_matmul_of_its_pixels"] == 2
    movers = {"broadcast", "concatenate", "resample", "reshape", "transpose"}
    without = {name.split("_")[0] for name, count in cut.items() if count == 0}
    assert without == {*movers, "batchnorm"}  # its inference is pointwise


@pytest.mark.deviceless
@each_refused
def test_refused_in_words(case):
    """An operation that cuDNN plans beside others only says where."""
    function = case.function.with_options(implementation="cudnn")
    (call,) = function.trace(*case.avals)[1].spec.calls
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError) as caught:
        jc.plan(function, *case.avals)
    assert call.node.requires in str(caught.value)


# -- the test of the tests: a wrong graph must not pass ------------------------------------------

_OTHER_MODE = {"ADD": "NORM1", "MIN": "MAX", "MAX": "AMAX", "AMAX": "MIN", "NORM2": "NORM1"}


def _mixed_up(node, input):
    mode = _OTHER_MODE.get(node.mode, "ADD")
    return oracle._reduction(input, dataclasses.replace(node, mode=mode))


MUTATIONS = {
    "add forgets b": ("add", lambda node, a, b: a),
    "add doubles b": ("add", lambda node, a, b: a + 2 * b),
    "bias is off by one channel": ("bias", lambda node, input, bias: input + np.roll(bias, 1)),
    "mul is 0.4 % off": ("mul", lambda node, a, b: a * b * 1.004),
    "sigmoid(1.02 x)": ("sigmoid", lambda node, input: oracle._sigmoid(1.02 * input)),
    "gelu is relu": ("gelu_approx_tanh", lambda node, input: np.maximum(input, 0)),
    "swish is relu": ("swish", lambda node, input: np.maximum(input, 0)),
    "relu_backward forgets its mask": ("relu_backward", lambda node, loss, input: loss),
    "tanh_backward takes the result": (
        "tanh_backward",
        lambda node, loss, input: loss * (1 - input**2),
    ),
    "gelu_backward is that of swish": (
        "gelu_backward",
        lambda node, loss, input: loss * oracle._swish_backward(input, 1.0),
    ),
    "gelu by a sigmoid": ("gelu", lambda node, input: input * oracle._sigmoid(1.702 * input)),
    "mod has the divisor's sign": ("mod", lambda node, input0, input1: np.mod(input0, input1)),
    "add_square squares a": ("add_square", lambda node, a, b: a**2 + b),
    "select picks the other": (
        "binary_select",
        lambda node, input0, input1, mask: np.where(mask != 0, input1, input0),
    ),
    "ge is le": ("cmp_ge", lambda node, input, comparison: input <= comparison),
    "indices from the end": (
        "gen_index",
        lambda node, input: np.flip(np.indices(input.shape)[node.axis], node.axis),
    ),
    "dgrad flips the filter": (
        "conv_dgrad",
        lambda node, loss, filter: oracle_shapes.OPERATIONS["conv_dgrad"](
            node, loss, filter[..., ::-1]
        ),
    ),
    "wgrad is off by one padding": (
        "conv_wgrad",
        lambda node, image, loss: oracle_shapes.OPERATIONS["conv_wgrad"](
            node, np.roll(image, 1, -1), loss
        ),
    ),
    "concatenate turns the order": (
        "concatenate",
        lambda node, **inputs: np.concatenate(list(inputs.values())[::-1], node.axis),
    ),
    "slice is off by one": (
        "slice",
        lambda node, input: np.roll(input, 1, -1)[tuple(slice(*s) for s in node.slices)],
    ),
    "modes of reductions are mixed up": ("reduction", lambda node, input: _mixed_up(node, input)),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_wrong_operation_is_noticed(what, key, monkeypatch):
    method, wrong = MUTATIONS[what]
    noticed = 0
    for case in CASES:
        _, trace = case.function.trace(*case.avals)
        if method not in [call.node.method for call in trace.spec.calls]:
            continue
        eight_bits = [t for t in trace.spec.output_tensors if t.nbytes == np.prod(t.shape) != 1]
        if any(tensor.dtype != "bool" for tensor in eight_bits):
            continue  # rounding to 8 bits hides more than these mutations change
        operands = case.operands(key)
        outputs = oracle.rounded(trace.spec, operands)
        oracle.check_outputs(trace.spec, operands, outputs, on_gpu=True)
        with monkeypatch.context() as patch:
            patch.setitem(oracle.OPERATIONS, method, wrong)
            mutated = oracle.rounded(trace.spec, operands)
        with pytest.raises(AssertionError, match="relative error"):
            oracle.check_outputs(trace.spec, operands, mutated, on_gpu=True)
        noticed += 1
    assert noticed >= 2


def test_rounding_an_intermediate_that_the_spec_keeps_in_float32_is_noticed(key):
    (case,) = (c for c in FUSIONS if c.name == "conv_scale_bias_swish")
    operands = case.operands(key)
    spec = case.function.trace(*operands)[1].spec
    coarse = dataclasses.replace(
        spec,
        tensors=tuple(
            t
            if t.name in (*spec.inputs, *spec.outputs)
            else dataclasses.replace(t, dtype="bfloat16")
            for t in spec.tensors
        ),
        _cache={},
    )
    with pytest.raises(AssertionError, match="relative error"):
        oracle.check_outputs(spec, operands, oracle.rounded(coarse, operands), on_gpu=True)
