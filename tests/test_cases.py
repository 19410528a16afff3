"""Every example of every node and every fusion, on every way it can run."""

import jax
import numpy as np
import oracle
import pytest

import jax_cudnn as jc
from jax_cudnn.bench.cases import all_cases

CASES = all_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run_and_check(case, key):
    operands = case.operands(key)
    _, trace = case.function.trace(*operands)
    want = dict(zip(trace.spec.outputs, oracle.evaluate(trace.spec, operands), strict=True))
    got = jax.tree.leaves(jax.jit(case.function)(*operands))
    errors = []
    for leaf, output in zip(trace.leaves, got, strict=True):
        assert output.dtype == trace.spec.tensor(leaf).dtype
        errors.append(oracle.check(output, want[leaf], output.dtype.name))
    return operands, got, errors


@each_case
def test_reference(case, key):
    operands, got, _ = run_and_check(case, key)
    for eager, jitted in zip(jax.tree.leaves(case.function(*operands)), got, strict=True):
        np.testing.assert_allclose(
            np.asarray(eager, np.float32), np.asarray(jitted, np.float32), rtol=1e-2, atol=1e-5
        )


@pytest.mark.gpu
@each_case
def test_on_the_gpu(case, key):
    operands, _, errors = run_and_check(case, key)
    compiled = jax.jit(case.function).lower(*operands).compile().as_text()
    assert compiled.count('custom_call_target="jax_cudnn"') == 1, "one plan, inside the program"
    print(case.name, "relative errors", errors)


@pytest.mark.deviceless
@each_case
def test_planned_without_a_gpu(case):
    with jc.target("H200"):
        plan = jc.plan(case.function, *case.avals)
        lowered = jax.jit(case.function).trace(*case.avals).lower(lowering_platforms=("cuda",))
    assert plan.device_name == "NVIDIA H200"
    assert plan.candidates >= 1
    assert plan.workspace_bytes >= 0
    assert plan.engine.startswith("eng")
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @jax_cudnn") == 1
    assert plan.digest in text
    print(case.name, plan)
