"""Every function with symbolic sizes, for ``jax.export``, and with sizes of 0."""

import flax_cases
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from function_cases import CASES, SIZES, differentiated, letters, operands, parts

import jax_cudnn as jc

LAYOUTS = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]  # of float8_matmul
ALLOW = [*LAYOUTS, jax.export.DisabledSafetyCheck.custom_call("jax_cudnn")]
OF_XLA = (
    *("batch_norm, inference", "pooling", "write_pages", "mxfp8"),
    *("cross-entropy", "cross-entropy, each token"),
    *("rotary", "rotary, no positions", "ragged_dot", "ragged_dot, gated"),
    *("quantized", "quantized, groups", "quantize_weights", "float8_matmul"),
)


def symbolic(case):
    names = sorted(letters(case))
    scope = dict(zip(names, jax.export.symbolic_shape(", ".join(names)), strict=True))
    return [jax.ShapeDtypeStruct(*part) for part in parts(case, scope)]


@pytest.mark.parametrize("name", CASES)
def test_functions_and_gradients_are_exported_with_symbolic_sizes(name):
    """For the CPU; for CUDA they say what to do, or run in XLA."""
    case, arrays = CASES[name], [*operands(CASES[name])]
    function = differentiated(case)
    export = jax.export.export(function, platforms=("cpu",), disabled_checks=LAYOUTS)
    exported = export(*symbolic(case))
    helpers.same(exported.call(*arrays), differentiated(case, 1)(*arrays), 1e-3)
    cuda = {"platforms": ("cuda",), "disabled_checks": ALLOW}
    with jc.implementation("xla"):
        jax.export.export(function, **cuda)(*symbolic(case))
    if name not in OF_XLA:
        with pytest.raises(jc.GraphError, match="cannot be planned for CUDA") as caught:
            jax.export.export(function, **cuda)(*symbolic(case))
        error = caught.value
        assert all((error.expected, error.got, error.why, error.fix))


EMPTY = [(n, s) for n, case in CASES.items() for s in sorted(letters(case) - {*case.never})]


@pytest.mark.parametrize(("name", "letter"), EMPTY)
def test_sizes_may_be_0(name, letter):
    case = CASES[name]
    arrays = [*operands(case, {**SIZES, letter: 0})]
    got = differentiated(case)(*arrays)
    if case.theirs:
        helpers.same(got, differentiated(case, 1)(*arrays), 1e-3)
    else:
        assert not any(jnp.isnan(x).any() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("name", flax_cases.CASES)
def test_layers_are_exported_with_symbolic_sizes(name):
    case = flax_cases.CASES[name]
    free = 1 if name == "linear_general" else len(case.shape) - 1
    sizes = jax.export.symbolic_shape(", ".join("abc"[:free]))
    graph, state = nnx.split(case.made(case.ours))

    def total(state, x):
        return jnp.sin(nnx.merge(graph, state)(x)).sum()

    function = jax.jit(lambda *given: jax.grad(total, (0, 1), allow_int=True)(*given)[1])
    x = flax_cases.inputs(*case.shape)
    aval = jax.ShapeDtypeStruct((*sizes, *case.shape[free:]), x.dtype)
    got = jax.export.export(function, platforms=("cpu",))(state, aval).call(state, x)
    helpers.same(got, function(state, x), 1e-3)
