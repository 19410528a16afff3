"""The table: each case beside the float64 oracle, and each of its transformations beside jnp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import all_cases, dtype_cases
from helpers import has_cudnn
from transformations import (
    ALL,
    FEW_PIXELS,
    SMALL,
    Transformations,
    compare,
    methods,
    smaller,
    spec_and_operands,
    tolerance,
)

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.primitive import bind

CASES = {case.name: case for case in (*all_cases(), *dtype_cases())}
SPECS = {name: case.function.trace(*case.avals)[1].spec for name, case in CASES.items()}
# A minute each: all of them run on the GPU, and derivatives of small ones in test_attention_fp8.py.
IN_FLOAT8 = ("sdpa_fp8_backward", "sdpa_mxfp8")
OF_ERF = {"erf", "gelu", "gelu_backward"}
# In README's run, of one case of each operation.
TELLING = ("vjp", "vmap", "vmap_of_vjp")


def of_each_operation():
    """Cases that together hold all operations, and all modes of reductions."""
    seen, names = set(), []
    for name, spec in SPECS.items():
        found = {(call.node.method, getattr(call.node, "mode", "")) for call in spec.calls}
        if found - seen:
            names.append(name)
        seen |= found
    return names


def of_each_kind():
    """The first case of each sequence of nodes."""
    first = {}
    for case in all_cases():
        first.setdefault(tuple(call.node for call in SPECS[case.name].calls), case.name)
    return [*first.values()]


FEW = of_each_operation()
each_case = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)


def failures(errors, allowed):
    return {name: f"{error:.1e}" for name, error in errors.items() if not error <= allowed}


@each_case
def test_values_are_the_oracles(name):
    spec, operands = spec_and_operands(CASES[name], SMALL)
    run = lambda *x: bind(spec, "graph", *x)  # noqa: E731
    ways = [jax.jit(run), run] if name in FEW and "fp8" not in name else [jax.jit(run)]
    for way in ways:
        outputs = way(*operands)
        oracle.check_outputs(spec, operands, outputs, on_gpu=False)
        assert [y.dtype for y in outputs] == [t.dtype for t in spec.output_tensors]


@pytest.mark.parametrize("name", [n for n in FEW if "fp8" not in n])
def test_gradients_and_batches_are_those_of_jnp(name):
    spec, operands = spec_and_operands(CASES[name], SMALL)
    assert not failures(compare(spec, operands, TELLING), tolerance(spec)), str(spec)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in of_each_kind() if not n.startswith(IN_FLOAT8)])
def test_all_transformations_are_those_of_jnp(name):
    spec, operands = spec_and_operands(CASES[name], SMALL)
    # jax.lax.erf has no gradient in a shard_map that checks which values vary (JAX 0.12).
    chosen = [n for n in ALL if n != "shard_map" or not OF_ERF & {*methods(spec)}]
    assert not failures(compare(spec, operands, chosen), tolerance(spec)), str(spec)


def test_the_table_holds_every_operation_and_differentiates_it():
    assert {m for spec in SPECS.values() for m in methods(spec)} == {*registry()}
    moving = set()
    for spec in SPECS.values():
        operands = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in spec.input_tensors]
        outputs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in spec.output_tensors]
        if Transformations(operands, outputs).applies("vjp"):
            moving |= {*methods(spec)}
    assert all(method.startswith(("cmp_", "logical_")) for method in {*registry()} - moving)
    whole = [name for name, spec in SPECS.items() if smaller(spec, SMALL) is spec]
    assert len(whole) < len(CASES) / 10, whole


def test_a_tangent_without_results_is_no_hindrance():
    """That of an index, beside one that is read by a cast alone."""

    @jc.graph
    def function(g, x, scale):
        return g.mul(g.mul(x, g.gen_index(x, axis=1)), scale)

    x, scale = jnp.ones((2, 8, 4), "bfloat16"), jnp.ones((1, 1, 1), "float32")
    got = jax.grad(lambda x: function(x, scale).astype("float32").sum())(x)
    np.testing.assert_array_equal(got[0, :, 0], jnp.arange(8, dtype="bfloat16"))


def test_a_cast_of_a_constant_alone_stays():
    x, scale = jnp.full((3, 4, 1), 2, "bfloat16"), jnp.ones((3, 1), "bfloat16")
    np.testing.assert_allclose(jax.vmap(jc.ops.rms_norm)(x, scale), 1, rtol=1e-2)


def by_cudnn(case):
    """The same in one plan, measured losses or not; but cut around what is always XLA's."""
    nodes = [call.node for call in SPECS[case.name].calls]
    lacking = case.name.startswith("moe_") and not has_cudnn(92800)
    scaled = any(n.method == "block_scale_dequantize" for n in nodes)
    lacking |= scaled and float(jax.devices()[0].compute_capability) < 10
    if lacking or any(n.xla_only or getattr(n, "mode", None) == "GATHER" for n in nodes):
        return case
    return dataclasses.replace(case, function=case.function.with_options(implementation="cudnn"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.planned])
def test_values_on_the_gpu(name, key):
    case = by_cudnn(CASES[name])
    operands = case.operands(key)
    _, trace = case.function.trace(*operands)
    named = dict(zip(trace.leaves, jax.tree.leaves(jax.jit(case.function)(*operands)), strict=True))
    outputs = [named[name] for name in trace.spec.outputs]
    oracle.check_outputs(trace.spec, operands, outputs, on_gpu=True)
    compiled = jax.jit(case.function).lower(*operands).compile().as_text()
    plans = jc.plan(case.function, *case.avals).execution_plans
    assert compiled.count('custom_call_target="jax_cudnn"') == len(plans)


# Second derivatives of these sums of squares are beyond float16 where there are many pixels.
OVERFLOWING = ("normalized_conv_with_statistics",)
# Where rounding carries an element across a jump (of mod, of relu) its derivative is another: some
# elements of thousands, 9e-3 of the norm on an H200.
JUMPING, AT_A_JUMP = ("mod_2_float16", "normalized_conv_with_statistics"), 6
# Those with graphs of their own: the others hold the same in other programs.
ON_THE_GPU = ("vjp", "jvp", "jvp_of_vjp", "vmap", "vmap_of_each", "vmap_of_vjp")


@pytest.mark.gpu
@pytest.mark.parametrize("name", of_each_kind())
def test_transformations_on_the_gpu(name):
    spec, operands = spec_and_operands(CASES[name], SMALL if name in OVERFLOWING else FEW_PIXELS)
    allowed = tolerance(spec, on_gpu=True) * (AT_A_JUMP if name in JUMPING else 1)
    assert not failures(compare(spec, operands, ON_THE_GPU), allowed), str(spec)
