"""What shards of a graph's tensors compute is what the whole graph computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from transformations import graphs_of, is_float

import jax_cudnn as jc
from jax_cudnn._core.graph.promotion import inferred
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.sharding.axes import PASS, SUM, WHOLE, factors
from jax_cudnn._core.sharding.shards import localized, parts

_JOINED = {"add": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


# The axes that are sharded together, by ports; "->" names partial results of one shard. All others
# are whole: normalized elements, softmax keys, windows, the batch of a batch normalization, and
# queries' positions under a mask.
ROLES = {
    "matmul_1_float16": "A0 B0 C0 | A1 C1 | A2 B1 -> C add | B2 C2",
    "matmul_6_float16": "A0 C0 | A1 C1 | A2 C2 | A3 B2 -> C add | B3 C3",
    "moe_grouped_matmul_0_bfloat16": "OUT_02 weight2",  # rows are of groups
    "moe_grouped_matmul_bwd_0_bfloat16": "doutput2 dweight2 | dweight1 token2",
    "conv_fprop_0_bfloat16": "Y0 image0 | image1 weight1 -> Y add | Y1 weight0",
    "conv_fprop_7_float32": "Y0 image0 | Y1 image1 weight0",  # in groups
    "conv_dgrad_0_bfloat16": "DX0 loss0 | filter0 loss1 -> DX add | DX1 filter1",
    "conv_wgrad_0_bfloat16": "image0 loss0 -> DW add | DW1 image1 | DW0 loss1",
    "sdpa_0_bfloat16": "O0 Stats0 k0 q0 v0 | O1 Stats1 k1 q1 v1 | O2 Stats2 q2 | O3 v3",
    "sdpa_1_float16": "O0 k0 q0 v0 | O1 k1 q1 v1 | O3 v3",  # causal
    "sdpa_2_bfloat16": "O0 Stats0 bias0 k0 q0 v0 | O1 Stats1 k1 q1 v1 | O2 Stats2 bias2 q2 | O3 v3",
    "sdpa_fp8_1_float8_e5m2": "O0 k0 q0 v0 -> Amax_S max, Amax_O max | "
    "O1 k1 q1 v1 -> Amax_S max, Amax_O max | O3 v3 -> Amax_O max",
    "sdpa_backward_0_bfloat16": "dK0 dO0 dQ0 dV0 k0 o0 q0 stats0 v0 | "
    "dK1 dO1 dQ1 dV1 k1 o1 q1 stats1 v1 | dO2 dQ2 o2 q2 stats2 -> dK add, dV add | "
    "dK2 dV2 k2 v2 -> dQ add | dO3 dV3 o3 v3 -> dQ add, dK add",
    "layernorm_0_bfloat16": "Y0 input0 inv_var0 mean0",
    "layernorm_backward_0_bfloat16": "DX0 grad0 input0 inv_variance0 mean0 -> "
    "DScale add, DBias add",
    "rmsnorm_1_float16": "Y0 input0 inv_var0 | Y1 input1 inv_var1",
    "rmsnorm_backward_0_bfloat16": "DX0 grad0 input0 inv_variance0 -> DScale add",
    "batchnorm_0_bfloat16": "Y1 bias1 in_running_mean1 in_running_var1 input1 inv_var1 mean1 "
    "next_running_mean1 next_running_var1 scale1",
    "batchnorm_inference_0_bfloat16": "Y0 input0 | Y1 bias1 input1 inv_variance1 mean1 scale1 | "
    "Y2 input2 | Y3 input3",
    "reduction_0_bfloat16": "input0 -> Y add | Y1 input1 | input2 -> Y add | input3 -> Y add",
    "reduction_8_bfloat16": "input0 -> Y max | Y1 input1 | input2 -> Y max | input3 -> Y max",
    "reduction_12_float32": "Y0 input0",  # a mean
    "reshape_1_float32": "OUT_00 input0 | OUT_01 input2",
    "gen_index_0_bfloat16": "OUT_00 input0 | OUT_02 input2 | OUT_03 input3",
}
DERIVED = ("resample_1_float32", "resample_2_float16", "conv_bias_relu", "sdpa_0_bfloat16")
_FUSED = ("conv_bias_relu", "conv_with_statistics", "matmul_scale_bias_relu", "lower_triangles")


def run(spec, operands):
    return jax.jit(functools.partial(evaluate, spec))(*operands)


def in_halves(spec, factor, operands):
    """The results of a graph of which each of two shards computes its part."""
    first, rest = parts(spec, [factor])
    local = localized(first, {factor: 2})
    for call in local.calls:  # nodes hold the sizes of shards
        made = inferred(call.node, {port: local.tensor(name) for port, name in call.inputs})
        assert [made[port][0] for port, _ in call.outputs] == [
            local.tensor(name).shape for _, name in call.outputs
        ]
    values, halves = dict(zip(spec.inputs, operands, strict=True)), ([], [])
    for name in first.inputs:
        axis = factor.axis(name)
        cut = [values[name]] * 2 if axis is None else jnp.split(values[name], 2, axis)
        for half, part in zip(halves, cut, strict=True):
            half.append(part)
    for name, *pair in zip(first.outputs, *(run(local, half) for half in halves), strict=True):
        how, axis = dict(factor.partial).get(name), factor.axis(name)
        assert how is None or axis is None
        values[name] = (
            _JOINED[how](*pair) if how else pair[0] if axis is None else jnp.concatenate(pair, axis)
        )
    if rest is not None:
        made = run(rest, [values[name] for name in rest.inputs])
        values.update(zip(rest.outputs, made, strict=True))
    return [values[name] for name in spec.outputs]


def roles(spec):
    """The factors of a graph with one call that are not whole, as in ROLES."""
    (call,) = spec.calls
    ports = {name: port for port, name in (*call.inputs, *call.outputs)}
    found = set()
    for factor in factors(spec):
        if factor.role != WHOLE:
            said = " ".join(sorted(f"{ports[name]}{axis}" for name, axis in factor.axes))
            sums = ", ".join(f"{ports[name]} {how}" for name, how in factor.partial)
            assert factor.role == (SUM if sums else PASS)
            found.add(f"{said} -> {sums}" if sums else said)
    return found


@pytest.mark.parametrize(
    "case", [c for c in all_cases() if c.name in ROLES], ids=lambda case: case.name
)
def test_roles(case):
    _, trace = case.function.trace(*case.avals)
    assert roles(trace.spec) == {*ROLES[case.name].split(" | ")}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in {*ROLES, *_FUSED} else pytest.mark.long)
        for c in all_cases()
    ],
)
def test_halves_give_the_whole(case):
    operands = case.operands(jax.random.key(0))
    _, trace = case.function.trace(*operands)
    check_halves(trace.spec, [operands[i] for i in trace.operands])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in DERIVED else pytest.mark.long)
        for c in all_cases()
    ],
)
def test_halves_of_derivatives_give_the_whole(case):
    """Also of nodes made from references, which may need an operand for its shape only."""
    places = [i for i, x in enumerate(case.avals) if is_float(x)]

    if not places:
        return

    def gradients(*operands):
        def total(*floats):
            given = [*operands]
            for i, x in zip(places, floats, strict=True):
                given[i] = x
            leaves = jax.tree.leaves(case.function(*given))
            kept = [jnp.sum(jnp.sin(x.astype("float32"))) for x in leaves if is_float(x)]
            return sum(kept, jnp.float32(0))

        return jax.grad(total, range(len(places)))(*(operands[i] for i in places))

    try:
        specs = graphs_of(gradients, *case.avals)
    except jc.GraphError:  # it has no derivative
        return
    random = np.random.default_rng(0)
    for spec in specs:
        shapes = [(t.shape, t.dtype) for t in spec.input_tensors]
        floats = [jnp.issubdtype(dtype, jnp.floating) for _, dtype in shapes]
        values = [
            jnp.asarray(random.random(s) + 0.25 if f else np.ones(s), d)  # also of square roots
            for (s, d), f in zip(shapes, floats, strict=True)
        ]
        check_halves(spec, values)


def check_halves(spec, named):
    whole = run(spec, named)
    wide = {tensor.dtype for tensor in spec.tensors} <= {"float32", "int32", "bool"}
    for factor in factors(spec):
        if factor.role == WHOLE or factor.size % 2:
            continue
        made = in_halves(spec, factor, named)
        for name, got, want in zip(spec.outputs, made, whole, strict=True):
            got, want = (np.asarray(x, np.float32) for x in (got, want))
            largest = np.max(np.abs(want), initial=0, where=np.isfinite(want)) + 1e-6
            exact = 2e-4 if wide else 2e-2
            if "float8" in spec.tensor(name).dtype:  # one step of float8_e5m2
                exact = 0.25
            np.testing.assert_allclose(
                got, want, exact, exact * largest, err_msg=str((name, factor))
            )
