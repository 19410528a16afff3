"""fp8 attention: scales, amax values, derivatives, plans; MXFP8, with one scale per 32 elements."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
import transformations
from attention_checks import CAUSAL, LAST, S, lengths, qkv
from fuzz.attentions import attention
from helpers import exactly
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry
from jax_cudnn.ops.attention.fp8_reference import stored
from jax_cudnn.ops.scaling import scale_of

ours, create = jc.ops.dot_product_attention_fp8, jc.ops.DelayedScaling.create
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Relative errors, in the norm, beside attention in float64: of results, which are rounded three
# times to 3 binary digits, of gradients in 16 bits, and in fp8, of which two roundings are to 2.
RESULTS, GRADIENTS, FP8_GRADIENTS = 0.07, 0.07, 0.13


def loss(function, weights=1.0):
    return lambda *x: jnp.sum(function(*x).astype(jnp.float32) * weights)


def settled(function, operands, weights=1.0):
    """A state of delayed scaling that has seen these operands and their gradients, twice."""
    function = functools.partial(function, fp8_backward=True)
    step = jax.jit(jax.grad(lambda s: loss(lambda *x: function(*x, scaling=s), weights)(*operands)))
    return step(step(create(4)))


def check(function, operands, weights, more=0.0, **options):
    want, gradients = exactly(functools.partial(attention, **options), operands, weights)
    for fp8, limit in ((False, GRADIENTS), (True, FP8_GRADIENTS)):
        run = functools.partial(function, fp8_backward=fp8, **options)
        got, pull = jax.vjp(jax.jit(run), *operands)
        assert got.dtype == operands[0].dtype
        assert relative_error(got, want) < RESULTS + more
        for x, a, b in zip(operands, pull(weights.astype(got.dtype)), gradients, strict=True):
            assert (a.shape, a.dtype) == (x.shape, x.dtype)
            assert relative_error(a, b) < limit + more


MANY = {"b": 1, "t": 2048, "s": 2048, "k": 1, "dtype": "float32"}
CASES = {  # sizes, options, whether scaling is delayed
    "window": ({}, {**CAUSAL, "local_window_size": (6, 0)}, True),
    "causal lengths": (
        {"n": 6, "k": 2, "h": 32},
        {**CAUSAL, **lengths([24, 9], [20, 24])},
        True,
    ),
    "from the last": ({"k": 1, "e": 48, "dtype": "float16"}, LAST, False),
    "many": (MANY, {}, False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "many")) for n in CASES]
)
def test_results_and_gradients(name, normal, request):
    if name != "many":
        request.getfixturevalue("blocks")
    sizes, options, delayed = CASES[name]
    operands = qkv(normal, **{"dtype": "bfloat16", **sizes})
    weights = normal((*operands[0].shape[:3], operands[2].shape[3]))
    scaling = settled(functools.partial(ours, **options), operands, weights) if delayed else None
    function = functools.partial(ours, scaling=scaling)
    check(function, operands, weights, 0.01 * (name == "many"), **options)


def test_current_scaling_does_not_depend_on_the_operands_sizes(normal):
    """For values and gradients far beyond fp8's range, and without a batch dimension."""
    q, k, v = qkv(normal, dtype="float32")
    check(ours, (q, k, v * 1e4), normal(q.shape) * 1e-4)
    np.testing.assert_array_equal(ours(q[0], k[0], v[0]), ours(q[:1], k[:1], v[:1])[0])


def test_zeros_and_queries_that_see_no_key(normal):
    q, k, v = qkv(normal, dtype="bfloat16")
    *found, by_value = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(*[jnp.zeros_like(q)] * 3)
    assert not any(gradient.any() for gradient in found)
    np.testing.assert_allclose(by_value.astype("float32"), 1, rtol=0.15)
    masked = functools.partial(ours, key_value_seq_lengths=jnp.array([0, 24], "int32"))
    for x in (masked(q, k, v), *jax.jit(jax.grad(loss(masked), (0, 1, 2)))(q, k, v)):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        assert not x[0].any()


@pytest.mark.parametrize("state", [None, create(4)], ids=["current", "delayed"])
def test_what_is_no_number_stays_none_and_moves_no_scale(state, normal):
    """And infinity does not become the largest fp8 value."""
    operands = qkv(normal, b=1, t=8, s=8, n=2, k=2, dtype="float32")

    @jax.jit
    def run(*operands):
        out, pull = jax.vjp(lambda *x: ours(*x, state), *operands)
        return out, pull(out)

    whole, _ = run(*operands)
    for at, value in itertools.product(range(3), [np.nan, np.inf]):
        given = [x.at[0, 3, 1, 2].set(value) if i == at else x for i, x in enumerate(operands)]
        out, gradients = run(*given)
        hit = np.zeros((1, 8, 2), bool)
        hit[0, 3 if at == 0 else slice(None), 1] = True
        np.testing.assert_array_equal(np.isnan(out).any(-1), hit)
        np.testing.assert_array_equal(out[~hit], whole[~hit])
        assert all(np.isnan(x).any() for x in gradients)


NAMES = registry()["sdpa_fp8"].ports.input_names
FACTORS = {n: jnp.full((1, 1, 1, 1), 1.0, jnp.float32) for n in NAMES if "scale_" in n}


def test_what_exceeds_fp8_saturates_and_rounding_is_straight_through(normal):
    """As in cuDNN; a plain conversion gives infinity in float8_e5m2 and NaN in float8_e4m3fn."""
    for dtype, most in ((E4M3, 448.0), (E5M2, 57344.0)):
        np.testing.assert_array_equal(stored(jnp.array([1e9, -1e9, 2.0]), dtype), [most, -most, 2])
        operands = [(normal((2, 4, 24, 16)) * 8).astype(dtype)] * 3
        given = FACTORS | {"scale_o": jnp.full((1, 1, 1, 1), 1e6, jnp.float32)}
        out = jc.graph(lambda g, *x, given=given: g.sdpa_fp8(*x, **given)[0])(*operands)
        assert float(jnp.abs(out.astype(jnp.float32)).max()) == most
    q, k, v = qkv(normal, dtype="bfloat16")
    clipped = ours(q, k, v * 4096, create(2))  # with scales of 1
    assert float(jnp.abs(clipped.astype(jnp.float32)).max()) <= 448
    value, tangent = jax.jvp(lambda x: stored(x, E4M3), *[(jnp.array([0.3, 1000.0]),)] * 2)
    np.testing.assert_array_equal((value, tangent), ([0.3125, 448], jnp.array([0.3, 1000.0])))


def test_a_scale_brings_the_largest_value_to_the_end_of_the_range():
    amax = jnp.array([448.0, 1.0, 0.0, jnp.inf, jnp.nan, 1e-36])
    got = scale_of(amax, E4M3, 1.0, jnp.float32(7))
    np.testing.assert_array_equal(got, [0.5, 224, 7, 7, 7, 2.0**120])


def one_step(state, size=1.0, fp8=True):
    q, k, v = (jnp.full((1, 16, 1, 16), x * size, jnp.float32) for x in (1.0, 2.0, 3.0))
    return jax.grad(lambda s: loss(lambda *x: ours(*x, s, fp8_backward=fp8), 0.5)(q, k, v))(state)


def test_the_gradient_by_the_state_is_the_state_of_the_next_step():
    """A scale follows from the largest value in the history; infinities are ignored."""
    after = one_step(create(3, margin=1))
    # q, k, v, o, dO, and dV: each key gets 1/16 of 16 queries' gradients
    np.testing.assert_allclose(after.amax_history[0, :5], [1, 2, 3, 3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(after.amax_history[0, 8], 0.5, rtol=0.07)
    assert not after.amax_history[1:].any()
    np.testing.assert_allclose(after.scale[:4], 224 / np.array([1, 2, 3, 3]), rtol=1e-6)
    np.testing.assert_allclose(after.scale[4], 57344 / 2 / 0.5, rtol=1e-6)
    forward = one_step(create(3, margin=1), fp8=False)
    np.testing.assert_array_equal(forward.scale[:4], after.scale[:4])
    assert (forward.scale[4:] == 1).all()
    assert not forward.amax_history[:, 4:].any()
    state, scales = create(2), []
    for size in (1.0, 8.0, 1.0, 1.0, 1.0):
        state = one_step(state, size)
        scales.append(float(state.scale[0]))
    np.testing.assert_allclose(scales, [448, 56, 56, 448, 448], rtol=1e-6)
    ports = ("q", "k", "v", "o", "dO", "dP", "dQ", "dK", "dV")
    after = state.updated(dict.fromkeys(ports, jnp.float32(jnp.inf)))
    np.testing.assert_array_equal(after.scale, state.scale)
    assert np.isfinite(after.amax_history).all()


def test_states_of_layers_in_a_scan_and_steps_without_the_attention(normal):
    """Each layer's gradient is its new state; a layer that did not run returns an initial one."""
    x, states = normal((1, 16, 2, 16)), jax.vmap(lambda _: create(4))(jnp.arange(3))

    def total(states, taken):
        layer = jax.checkpoint(lambda x, state: (x + 2 * ours(x, x, x, state), None))
        run = lambda s: jnp.sum(jax.lax.scan(layer, x, s)[0] ** 2)  # noqa: E731
        return jax.lax.cond(taken, run, lambda s: 0.0, states)

    step = jax.jit(jax.grad(total))
    largest = step(step(states, True), True).amax_history[:, 0, 0]
    np.testing.assert_allclose(largest[0], jnp.abs(x).max(), rtol=1e-6)
    assert float(largest[0]) < float(largest[1]) < float(largest[2])
    again = step(step(states, False), True).scale
    np.testing.assert_array_equal(again, step(states, True).scale)


def test_forward_mode_is_of_the_fp8_backward(normal):
    operands = qkv(normal, dtype="bfloat16")
    run = functools.partial(ours, fp8_backward=True)
    _, tangent = jax.jvp(run, operands, operands)
    pull = jax.vjp(run, *operands)[1]
    pairs = zip(pull(tangent), operands, strict=True)
    both = sum(jnp.vdot(a, x, preferred_element_type="f4") for a, x in pairs)
    square = jnp.sum(jnp.square(tangent.astype("f4")))
    assert abs(float(both / square) - 1) < 0.1
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(ours, operands, operands)


@pytest.mark.long
def test_vmap_has_scales_for_each_example_or_is_a_dimension_of_examples(normal):
    causal = functools.partial(ours, is_causal=True)
    operands = [normal((3, *x.shape)) for x in qkv(normal, b=1)]
    operands[2] = operands[2] * jnp.array([1e-3, 1.0, 1e3]).reshape(3, 1, 1, 1, 1)
    step = lambda *x: (causal(*x), *jax.grad(loss(causal), (0, 1, 2))(*x))  # noqa: E731
    got = jax.jit(jax.vmap(step))(*operands)
    for i, x in enumerate(zip(*operands, strict=True)):  # whose sizes differ by powers of ten
        for a, b in zip(got, step(*x), strict=True):
            assert relative_error(np.asarray(a[i]), np.asarray(b)) < 1e-2


def test_devices_with_one_state_learn_the_largest_values_of_all(normal):
    q, k, v = qkv(normal, b=8, dtype="bfloat16")
    operands = q * jnp.arange(1, 9, dtype=q.dtype)[:, None, None, None], k, v
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    specs = (P("data"), P("data"), P("data"), P())
    sharded = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got, want = (jax.jit(jax.grad(loss(f), (0, 3)))(*operands, create(2)) for f in (sharded, ours))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 1e-2


def test_in_a_shard_map_all_query_heads_share_a_key_head(normal):
    operands = qkv(normal, k=1, dtype="bfloat16")
    run = functools.partial(ours, scaling=create(2))
    mesh = Mesh(np.array(jax.devices("cpu")[: operands[0].shape[2]]), ("x",))
    heads = P(None, None, "x")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(heads, P(), P()), out_specs=heads)
    got, want = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(*operands) for f in (mapped, run))
    for x, y in zip(got, want, strict=True):
        assert relative_error(np.asarray(x, np.float64), np.asarray(y, np.float64)) < 1e-2


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("name", "qkv")
def test_on_explicit_axes_gradients_are_sharded_as_their_operands(name, fp8, normal):
    operands = qkv(normal, b=2, dtype="bfloat16")
    run = functools.partial(ours, scaling=create(2), fp8_backward=fp8)
    want = jax.jit(jax.grad(loss(run), (0, 1, 2)))(*operands)
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    placed = [
        jax.device_put(x, NamedSharding(mesh, P("x" if port == name else None)))
        for port, x in zip("qkv", operands, strict=True)
    ]
    got = jax.jit(jax.grad(loss(run), (0, 1, 2)))(*placed)
    for x, y, operand in zip(got, want, placed, strict=True):
        assert x.sharding.is_equivalent_to(operand.sharding, x.ndim)
        assert relative_error(np.asarray(x, np.float64), np.asarray(y, np.float64)) < 1e-2


@pytest.mark.deviceless
def test_with_delayed_scaling_there_is_nothing_but_the_plans():
    """With current scaling XLA computes the scales. Precision applies to float32 only."""
    avals = [*[S((2, 256, 4, 128), "bfloat16")] * 3, jax.eval_shape(lambda: create(4))]
    for fp8, dtype in ((False, "bfloat16"), (True, E5M2)):
        function = functools.partial(ours, implementation="cudnn", fp8_backward=fp8)
        step = jax.grad(loss(function), range(4))
        with jc.target("H200"), jax.default_matmul_precision("highest"):
            plans = jc.plans(step, *avals).values()
        assert [len(p.segments) == len(p.execution_plans) == 1 for p in plans] == [True] * 2
        _, second = graphs_of(step, *avals)
        assert [t.dtype for t in second.tensors if t.name.endswith("::dQ")] == [dtype]


quantize, dequantize = jc.ops.quantize_mxfp8, jc.ops.dequantize_mxfp8


@pytest.mark.parametrize(("dtype", "axis"), [(E4M3, -2), (E5M2, -1)])
def test_blocks_have_the_least_power_of_two_that_holds_their_values(axis, dtype, normal):
    x = normal((2, 3, 200, 80)) * jnp.exp2(jnp.round(6 * normal((2, 3, 200, 80))))
    values, scales = quantize(x, axis, dtype)
    assert (values.shape, values.dtype) == (x.shape, dtype)
    assert scales.shape == ((2, 3, 256, 4) if axis == -1 else (2, 3, 8, 128))
    assert scales.dtype == "float8_e8m0fnu"
    factor = oracle_attention.scales_of_blocks(np.asarray(scales, np.float64), x.shape, axis)
    most, wide = float(jnp.finfo(dtype).max), np.asarray(x, np.float64)
    for start in range(0, x.shape[axis], 32):
        part = np.arange(start, min(start + 32, x.shape[axis]))
        block = np.abs(wide.take(part, axis)).max(axis, keepdims=True)
        each = factor.take(part, axis)
        assert ((block <= most * each) & (block > most * each / 2)).all()
        assert (np.diff(each, axis=axis) == 0).all()
    got = dequantize(values, scales, axis)
    np.testing.assert_array_equal(got, np.asarray(values, np.float64) * factor)
    assert relative_error(np.asarray(got), wide) < (0.035 if dtype == E4M3 else 0.07)


def test_blocks_of_zeros_of_what_is_exact_of_what_is_no_number_and_of_nothing():
    x = jnp.zeros((1, 1, 3, 64)).at[0, 0, 1].set(448.0 * 2).at[0, 0, 2, :32].set(3.0)
    values, scales = quantize(x)
    np.testing.assert_array_equal(dequantize(values, scales), x)
    codes = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(-1)
    assert [int(codes[16 * row]) for row in range(3)] == [0, 128, 120]  # exponents -127, 1, -7
    for value in (np.nan, np.inf):
        got = dequantize(*quantize(jnp.ones((1, 1, 2, 64)).at[0, 0, 1, 3].set(value)))
        np.testing.assert_array_equal(np.isnan(got[0, 0, 1]), np.arange(64) < 32)
        np.testing.assert_array_equal(got[0, 0, 0], 1)
    assert dequantize(*quantize(jnp.ones((1, 0, 4, 32)))).shape == (1, 0, 4, 32)


@pytest.mark.long
def test_derivatives_are_by_the_values_alone(normal):
    """With scales of about 1: gradients with small scales would underflow in fp8."""
    arrays = {}
    for port, axis in {"q": -1, "k": -1, "v": -2}.items():
        values, scales = quantize(normal((1, 1 + (port == "q"), 32, 32)), axis)
        arrays[port] = (values / 100).astype(E4M3)
        arrays[f"descale_{port}"] = jnp.ones_like(scales)
    forward = jc.graph(lambda g, arrays: g.sdpa_mxfp8(**arrays, attn_scale=0.1))
    _, trace = forward.trace(arrays)
    operands = [jax.tree.leaves(arrays)[i] for i in trace.operands]
    errors = transformations.compare(trace.spec, operands, ("vjp", "jvp"))
    assert max(errors.values()) < 0.07, errors
    with pytest.raises(jc.GraphTypeError, match="no derivative with respect to"):
        jax.grad(lambda arrays: jnp.sum(forward(arrays)[0].astype("f4")))(arrays)
