"""The table of operations, examples and transformations on the GPU, beside plain jnp on the CPU."""

import jax
import jax.numpy as jnp
import pytest
from cases import FUSIONS, all_cases
from transformations import FEW_PIXELS, SMALL, compare, methods, spec_and_operands, tolerance

import jax_cudnn as jc

pytestmark = pytest.mark.gpu

CASES = {case.name: case for case in all_cases()}
# Those with graphs of their own: the rest of the table holds the same in other programs. What does
# not move is in tests/test_cases.py.
TRANSFORMATIONS = ("vjp", "jvp", "jvp_of_vjp", "vmap", "vmap_of_each", "vmap_of_vjp")


# Second derivatives of these sums of squares are beyond float16 where there are many pixels.
OVERFLOWING = ("normalized_conv_with_statistics",)
# Where rounding carries an element across a jump (of mod, of relu) its derivative is another: some
# elements of thousands, 9e-3 of the norm on an H200.
JUMPING, _AT_A_JUMP = ("mod_2_float16", "normalized_conv_with_statistics"), 6


@pytest.mark.parametrize("name", CASES)
def test_each_graph_of_each_transformation(name):
    sizes = SMALL if name in OVERFLOWING else FEW_PIXELS
    spec, operands = spec_and_operands(CASES[name], sizes)
    errors = compare(spec, operands, TRANSFORMATIONS)
    allowed = tolerance(spec, on_gpu=True) * (_AT_A_JUMP if name in JUMPING else 1)
    print(f"{name}, of {allowed:.1e}:", {k: f"{v:.1e}" for k, v in errors.items()})
    assert not {k: f"{v:.1e}" for k, v in errors.items() if not v <= allowed}, str(spec)


# Case -> the anchors that its training step runs in cuDNN, each in a plan of its own.
TRAINED = {
    "conv_bias_relu": ["conv_fprop", "conv_wgrad", "conv_dgrad"],
    "conv_scale_bias_swish": ["conv_fprop", "conv_wgrad", "conv_dgrad"],
    "conv_bias_sigmoid": ["conv_fprop", "conv_wgrad", "conv_dgrad"],
    "matmul_bias_gelu": ["matmul", "matmul", "matmul"],
}


@pytest.mark.parametrize("name", TRAINED)
def test_forward_and_backward_are_plans_inside_one_program(name):
    (case,) = (case for case in FUSIONS if case.name == name)
    total = lambda *args: jnp.sum(case.function(*args).astype(jnp.float32))  # noqa: E731
    step = jax.value_and_grad(total, tuple(range(len(case.avals))))
    planned = jc.plans(step, *case.avals)
    parts = [s.spec for p in planned.values() for s in p.segments if s.plan is not None]
    anchors = [m for spec in parts for m in methods(spec) if m in TRAINED[name]]
    assert sorted(anchors) == sorted(TRAINED[name])
    program = jax.jit(step).lower(*case.avals).compile().as_text()
    assert program.count('custom_call_target="jax_cudnn"') == len(parts)
