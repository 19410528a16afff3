"""Attention in fp8: scales, largest values, derivatives, plans; and scales of blocks (MXFP8)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_attention_fp8
import pytest
import transformations
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn.ops import attention_reference
from jax_cudnn.ops.attention_fp8_reference import stored
from jax_cudnn.ops.mxfp8 import scales_shape
from jax_cudnn.ops.scaling import scale_of

S = jax.ShapeDtypeStruct
ours = jc.ops.dot_product_attention_fp8
RNG = np.random.default_rng(0)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# Relative errors, in the norm, beside attention in float64: of results, which are rounded three
# times to 3 binary digits, and of gradients, of which two roundings are to 2.
RESULTS, GRADIENTS = 0.07, 0.13


@pytest.fixture(autouse=True)
def same_numbers_whichever_tests_run():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(b=2, t=24, s=24, n=4, k=4, h=16, e=None, dtype="bfloat16"):
    return (
        normal((b, t, n, h), dtype),
        normal((b, s, k, h), dtype),
        normal((b, s, k, e or h), dtype),
    )


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 2000)


def seen(t, s, b, *, is_causal=False, lengths=None, window=None, bottom_right=False):
    """(B, 1, T, S), which keys a query sees."""
    i, j = np.arange(t)[:, None], np.arange(s)[None, :]
    found = np.ones((b, 1, t, s), bool)
    at = i + (s - t if bottom_right else 0)
    if window is not None:
        found &= (j >= at - window[0]) & (j <= at + window[1])
    if is_causal:
        found &= j <= at
    if lengths is not None:
        queries, keys = (np.asarray(x).reshape(b, 1, 1, 1) for x in lengths)
        found &= (i < queries) & (j < keys)
    return found


def exact(operands, weights, **structure):
    """The result in float64, and the gradients of its sum times ``weights``."""
    q, k, v, w = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (*operands, weights))
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    wide_k, wide_v = (np.repeat(x, groups, axis=1) for x in (k, v))
    mask = seen(q.shape[2], k.shape[2], q.shape[0], **structure)
    scores = np.where(mask, scale * q @ wide_k.swapaxes(2, 3), -np.inf)
    largest = scores.max(-1, keepdims=True)
    each = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = each.sum(-1, keepdims=True)
    p = each / np.where(total == 0, 1, total)
    dp = w @ wide_v.swapaxes(2, 3)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))

    def shared(x):
        return x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2)

    gradients = ds @ wide_k, shared(ds.swapaxes(2, 3) @ q), shared(p.swapaxes(2, 3) @ w)
    return (p @ wide_v).swapaxes(1, 2), tuple(x.swapaxes(1, 2) for x in gradients)


STRUCTURES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (6, 0)},
    "lengths": {"lengths": ([24, 9], [20, 24])},
    "causal lengths": {"lengths": ([24, 9], [24, 17]), "is_causal": True},
    "bottom right": {"is_causal": True, "bottom_right": True},
}
SIZES = {
    "heads": {},
    "grouped heads": {"n": 6, "k": 2, "h": 32},
    "values of another size": {"k": 1, "e": 48},
}


def arguments(structure):
    given = dict(structure)
    if window := given.pop("window", None):
        given["local_window_size"] = window
    if lengths := given.pop("lengths", None):
        named = zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True)
        given |= {name: jnp.asarray(x, jnp.int32) for name, x in named}
    return given


def loss(function, weights):
    return lambda *x: jnp.sum(function(*x).astype(jnp.float32) * weights)


def settled(function, operands, weights, steps=2):
    """A state of delayed scaling that has seen these operands."""
    state = jc.ops.DelayedScaling.create(4)
    step = jax.jit(jax.grad(lambda s: loss(lambda *x: function(*x, s), weights)(*operands)))
    for _ in range(steps):
        state = step(state)
    return state


def check(function, operands, weights, structure, limits=(RESULTS, GRADIENTS)):
    want, gradients = exact(operands, weights, **structure)
    got, pull = jax.vjp(jax.jit(function), *operands)
    assert got.dtype == operands[0].dtype
    assert relative_error(np.asarray(got, np.float64), want) < limits[0]
    for x, a, b in zip(operands, pull(weights.astype(got.dtype)), gradients, strict=True):
        assert (a.shape, a.dtype) == (x.shape, x.dtype)
        assert relative_error(np.asarray(a, np.float64), b) < limits[1]
    return got


# -- results and gradients -------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.parametrize("scaling", ["current", "delayed"])
@pytest.mark.parametrize(
    ("size", "name"),
    [*(("heads", n) for n in STRUCTURES), ("grouped heads", "causal lengths"),
     ("values of another size", "causal")],
)  # fmt: skip
def test_results_and_gradients_beside_float64(size, name, scaling, request):
    if size != "heads":
        request.getfixturevalue("blocks")
    structure = STRUCTURES[name]
    operands = qkv(**SIZES[size])
    weights = normal((*operands[0].shape[:3], operands[2].shape[3]))
    function = functools.partial(ours, **arguments(structure))
    if scaling == "delayed":
        function = functools.partial(function, scaling=settled_with(function, operands, weights))
    check(function, operands, weights, structure)


def settled_with(function, operands, weights):
    return settled(lambda *x: function(*x[:3], scaling=x[3]), operands, weights)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_and_three_dimensions(dtype):
    operands = qkv(dtype=dtype)
    check(ours, operands, normal(operands[0].shape), {})
    one = [x[0] for x in operands]
    got, want = ours(*one, scale=0.3), ours(*(x[None] for x in one), scale=0.3)[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_current_scaling_does_not_depend_on_the_operands_sizes(size):
    """Of values and gradients; powers of fp8's range apart."""
    q, k, v = qkv(dtype="float32")
    weights = normal(q.shape) * size
    check(ours, (q, k, v * size), weights, {})


def test_zeros_and_queries_that_see_no_key():
    q, k, v = qkv(b=2)
    zero = jnp.zeros_like(q)
    *found, by_value = jax.grad(loss(ours, 1.0), (0, 1, 2))(zero, zero, zero)
    for gradient in found:
        np.testing.assert_array_equal(gradient, 0)
    np.testing.assert_allclose(by_value.astype("float32"), 1, rtol=0.15)
    masked = functools.partial(ours, key_value_seq_lengths=jnp.array([0, 24], "int32"))
    np.testing.assert_array_equal(masked(q, k, v)[0], 0)
    for gradient in jax.grad(loss(masked, 1.0), (0, 1, 2))(q, k, v):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        np.testing.assert_array_equal(gradient[0], 0)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_what_is_no_number_stays_none_and_moves_no_scale(scaling):
    """Nor does what is infinite become the largest number of fp8."""
    operands = qkv(b=1, t=8, s=8, n=2, k=2, dtype="float32")
    state = jc.ops.DelayedScaling.create(4) if scaling == "delayed" else None

    @jax.jit
    def run(*operands):
        loss = lambda *x: (lambda out: (jnp.sum(out**2), out))(ours(*x, state))  # noqa: E731
        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*operands)
        return out, gradients

    whole, _ = run(*operands)
    for at, value in itertools.product(range(3), [np.nan, np.inf]):
        given = [*operands]
        given[at] = given[at].at[0, 3, 1, 2].set(value)
        out, gradients = run(*given)
        hit = np.zeros((1, 8, 2), bool)
        hit[0, 3 if at == 0 else slice(None), 1] = True
        np.testing.assert_array_equal(np.isnan(out).any(-1), hit)
        np.testing.assert_array_equal(out[~hit], whole[~hit])
        assert all(np.isnan(x).any() for x in gradients)


@pytest.mark.wide
def test_long_sequences_keep_their_gradients():
    """Bounds of gradients grow with the number of queries; float8_e5m2 has the range for it."""
    operands = qkv(b=1, t=2048, s=2048, n=4, k=1, h=16, dtype="float32")
    weights = normal(operands[0].shape)
    check(ours, operands, weights, {}, limits=(0.08, 0.14))


# -- the nodes: largest values and saturation --------------------------------------------------


def fp8_operands(dtype=E4M3, b=2, h=4, n=2, s=24, t=40, d=16):
    shapes = (b, h, s, d), (b, n, t, d), (b, n, t, d)
    return [jnp.asarray(RNG.standard_normal(shape) * 8, dtype) for shape in shapes]


def factors(node, **given):
    """Every factor of a node as (1, 1, 1, 1)."""
    names = [p for p in REGISTRY[node].ports.input_names if p.startswith(("scale_", "descale_"))]
    defaults = {name: 0.125 if name.startswith("descale") else 1.0 for name in names}
    values = defaults | {"scale_s": 448.0, "descale_s": 1 / 448} | given
    return {name: jnp.full((1, 1, 1, 1), values[name], jnp.float32) for name in names}


@jc.graph
def forward(g, operands, factors, *, kind=None, **attributes):
    out, *others = g.sdpa_fp8(*operands, **factors, **attributes)
    return (out if kind is None else out.set_data_type(kind)), *others


@jc.graph
def backward(g, operands, stats, factors, *, kind=None, **attributes):
    results = g.sdpa_fp8_backward(*operands, stats, **factors, **attributes)
    gradients = (x if kind is None else x.set_data_type(kind) for x in results[:3])
    return *gradients, *results[3:]


ATTRIBUTES = {"attn_scale": 0.25, "right_bound": 4}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_largest_values_of_the_forward_are_exact(dtype):
    operands = fp8_operands(dtype)
    given = factors("sdpa_fp8", scale_o=4.0)
    out, stats, amax_s, amax_o = forward(operands, given, kind="float32", **ATTRIBUTES)
    assert float(amax_o[0, 0, 0, 0]) == float(jnp.abs(out).max()) / 4
    wide = [np.asarray(x, np.float64) / 8 for x in operands]
    node = REGISTRY["sdpa_fp8"](**ATTRIBUTES)
    _, want, weights = oracle_attention_fp8._forward(node, *wide)
    np.testing.assert_allclose(stats, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(amax_s.reshape(()), weights.max(), rtol=1e-5)
    rounded = forward(operands, given, **ATTRIBUTES)[0]
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(rounded, stored(out, dtype).astype(dtype))


@pytest.mark.usefixtures("blocks")
def test_largest_values_of_the_backward_are_exact():
    operands = fp8_operands()
    out, stats, _, _ = forward(operands, factors("sdpa_fp8", scale_o=8.0), **ATTRIBUTES)
    grad = jnp.asarray(RNG.standard_normal(out.shape) * 8, E5M2)
    scales = {"scale_dQ": 2.0, "scale_dK": 4.0, "scale_dV": 8.0, "scale_dP": 64.0}
    given = factors("sdpa_fp8_backward", **scales, descale_dP=1 / 64)
    found = backward([*operands, out, grad], stats, given, kind="float32", **ATTRIBUTES)
    for x, amax, name in zip(found[:3], found[3:6], scales, strict=False):
        assert float(amax[0, 0, 0, 0]) == float(jnp.abs(x).max()) / scales[name]
    node = REGISTRY["sdpa_fp8_backward"](**ATTRIBUTES)
    arrays = [np.asarray(x, np.float64) for x in (*operands, out, grad, stats)]
    named = {n: np.asarray(x, np.float64) for n, x in given.items()}
    exactly = oracle_attention_fp8.sdpa_fp8_backward(node, *arrays, **named)
    want = dict(zip(node.results, exactly, strict=True))
    np.testing.assert_allclose(found[6].reshape(()), want["amax_dP"].reshape(()), rtol=1e-4)
    for x, name in zip(found[:3], ("dQ", "dK", "dV"), strict=True):
        assert relative_error(np.asarray(x), want[name]) < GRADIENTS


def test_what_exceeds_fp8_saturates():
    """As in cuDNN; a plain conversion to float8_e5m2 makes infinities, to float8_e4m3fn NaN."""
    for dtype, most in ((E4M3, 448.0), (E5M2, 57344.0)):
        np.testing.assert_array_equal(stored(jnp.array([1e9, -1e9, 2.0]), dtype), [most, -most, 2])
        out = forward(fp8_operands(dtype), factors("sdpa_fp8", scale_o=1e6))[0]
        assert np.isfinite(np.asarray(out, np.float32)).all()
        assert float(jnp.abs(out.astype(jnp.float32)).max()) == most
    q, k, v = qkv()
    state = jc.ops.DelayedScaling.create(2)
    large = settled(lambda q, k, v, s: ours(q, k, v * 4096, s), (q, k, v), 1.0)
    clipped = ours(q, k, v * 4096, state)  # with scales of 1
    assert float(jnp.abs(clipped.astype(jnp.float32)).max()) <= 448
    check(lambda q, k, v: ours(q, k, v * 4096, large) / 4096, (q, k, v), normal(q.shape), {})


def test_rounding_is_straight_through():
    x, along = jnp.array([0.3, 1000.0]), jnp.array([2.0, 3.0])
    value, tangent = jax.jvp(lambda x: stored(x, E4M3), (x,), (along,))
    np.testing.assert_array_equal(value, [0.3125, 448])
    np.testing.assert_array_equal(tangent, along)


def test_a_scale_is_what_brings_the_largest_value_to_the_end_of_the_range():
    amax = jnp.array([448.0, 1.0, 0.0, jnp.inf, jnp.nan, 1e-36])
    got = scale_of(amax, E4M3, 1.0, jnp.float32(7))
    np.testing.assert_array_equal(got, [0.5, 224, 7, 7, 7, 2.0**120])
    assert scale_of(jnp.float32(2), E5M2) == 57344 / 2


# -- delayed scaling -------------------------------------------------------------------------------


def one_step(state, size=1.0):
    q, k, v = (jnp.full((1, 16, 1, 16), x * size, jnp.float32) for x in (1.0, 2.0, 3.0))
    return jax.grad(lambda s: loss(lambda *x: ours(*x, s), 0.5)(q, k, v))(state)


def test_the_gradient_by_the_state_is_the_state_of_the_next_step():
    state = jc.ops.DelayedScaling.create(3, margin=1)
    after = one_step(state)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    # q, k, v, o, dO, and dV: each key gets 1/16 of 16 queries' gradients
    np.testing.assert_allclose(after.amax_history[0, [0, 1, 2, 3, 4]], [1, 2, 3, 3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(after.amax_history[0, 8], 0.5, rtol=0.07)
    np.testing.assert_array_equal(after.amax_history[1:], 0)
    np.testing.assert_allclose(after.scale[:4], 224 / np.array([1, 2, 3, 3]), rtol=1e-6)
    np.testing.assert_allclose(after.scale[4], 57344 / 2 / 0.5, rtol=1e-6)
    np.testing.assert_allclose(after.scale[8], 57344 / 2 / after.amax_history[0, 8], rtol=1e-6)


def test_a_scale_is_of_the_largest_value_in_the_window():
    state = jc.ops.DelayedScaling.create(2)
    sizes = [1.0, 8.0, 1.0, 1.0, 1.0]
    scales = []
    for size in sizes:
        state = one_step(state, size)
        scales.append(float(state.scale[0]))
    np.testing.assert_allclose(scales, [448, 56, 56, 448, 448], rtol=1e-6)
    assert state.amax_history.shape == (2, 9)


def test_a_step_with_infinities_leaves_no_trace():
    state = one_step(jc.ops.DelayedScaling.create(2))
    amax = dict.fromkeys(("q", "k", "v", "o", "dO", "dP", "dQ", "dK", "dV"), jnp.float32(jnp.inf))
    after = state.updated(amax)
    np.testing.assert_array_equal(after.scale, state.scale)
    assert np.isfinite(after.amax_history).all()


def test_states_of_layers_in_a_scan():
    """Each layer's gradient is its own new state."""
    x = normal((1, 16, 2, 16))
    states = jax.vmap(lambda _: jc.ops.DelayedScaling.create(4))(jnp.arange(3))

    def total(states, x):
        def layer(x, state):
            return x + 2 * ours(x, x, x, state), None

        return jnp.sum(jax.lax.scan(layer, x, states)[0] ** 2)

    step = jax.jit(jax.grad(total))
    after = step(step(states, x), x)
    assert after.scale.shape == (3, 9)
    largest = after.amax_history[:, 0, 0]
    np.testing.assert_allclose(largest[0], jnp.abs(x).max(), rtol=1e-6)
    assert float(largest[0]) < float(largest[1]) < float(largest[2])


def test_training_with_a_state():
    """Steps in a scan: parameters descend, the state is replaced."""
    q, k, v = qkv(b=1, dtype="float32")
    target = exact((q, k, v * 2), q)[0].astype(np.float32)

    def total(v, state):
        return jnp.mean((ours(q, k, v, state) - target) ** 2)

    def step(carry, _):
        value, (gradient, state) = jax.value_and_grad(total, (0, 1))(*carry)
        return (carry[0] - 200 * gradient, state), value

    _, values = jax.lax.scan(step, (v, jc.ops.DelayedScaling.create(16)), length=40)
    assert values[-1] < 0.2 * values[0]


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_gradient_is_one_forward_and_one_backward(scaling):
    operands = qkv()
    if scaling == "delayed":
        operands = (*operands, jc.ops.DelayedScaling.create(4))
    step = jax.grad(loss(functools.partial(ours, is_causal=True), 1.0), tuple(range(len(operands))))
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    first, second = graphs_of(step, *operands)
    assert methods(first).count("sdpa_fp8") == methods(second).count("sdpa_fp8_backward") == 1
    assert [t.dtype for t in second.tensors if t.name.endswith("::dQ")] == [E5M2]


def plain(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def causal(q, k, v):
    return ours(q, k, v, is_causal=True)


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
def test_forward_mode_and_second_derivatives():
    operands = qkv(b=1, t=12, s=12, n=2, k=1, dtype="float32")
    along = tuple(normal(x.shape) for x in operands)
    got, want = (jax.jvp(f, operands, along)[1] for f in (causal, plain))
    assert relative_error(np.asarray(got), np.asarray(want)) < 0.1
    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2))  # noqa: E731
    got, want = (jax.jvp(cubes(f), operands, along)[1] for f in (causal, plain))
    for a, b in zip(got, want, strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) < 0.3
    nested = lambda f: jax.grad(lambda q: jnp.sum(cubes(f)(q, *operands[1:])[1] ** 2))  # noqa: E731
    got, want = (np.asarray(nested(f)(operands[0])) for f in (causal, plain))
    # Squares of gradients of cubes: errors of 10 % grow, and along the right result cancel.
    assert relative_error(got, want) < 0.5
    assert np.vdot(got, want) / np.vdot(want, want) == pytest.approx(1, abs=0.15)


def test_vmap_has_scales_for_each_example():
    operands = [normal((3, *x.shape), "float32") for x in qkv(b=1)]
    operands[2] = operands[2] * jnp.array([1e-3, 1.0, 1e3]).reshape(3, 1, 1, 1, 1)
    gradient = jax.grad(loss(causal, 1.0), (0, 1, 2))
    for function in (causal, gradient):
        got = jax.jit(jax.vmap(function))(*operands)
        each = [function(*x) for x in zip(*operands, strict=True)]
        want = jax.tree.map(lambda *x: jnp.stack(x), *each)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            for one, other in zip(a, b, strict=True):  # their sizes differ by powers of ten
                assert relative_error(np.asarray(one), np.asarray(other)) < 1e-2


def test_vmap_is_a_dimension_of_examples_where_these_have_their_scales_in_common():
    """And where nothing asks for the largest values of each."""
    operands = [normal((3, *x.shape), "float32") for x in qkv()]
    state = settled(ours, [x[0] for x in operands], 1.0)
    function = functools.partial(ours, scaling=state)
    got = jax.vmap(function, (0, None, 0))(operands[0], operands[1][0], operands[2])
    want = [function(q, operands[1][0], v) for q, v in zip(operands[0], operands[2], strict=True)]
    assert relative_error(np.asarray(got), np.asarray(want)) < 1e-3
    (spec,) = graphs_of(jax.vmap(function), *operands)
    (folded,) = (call for call in spec.calls if call.node.method == "sdpa_fp8")
    assert spec.tensor(dict(folded.inputs)["q"]).shape[0] == 3 * 2
    largest = lambda *x: forward(x, factors("sdpa_fp8"))[3]  # noqa: E731
    pairs = [*zip(fp8_operands(), fp8_operands(), strict=True)]
    got = jax.vmap(largest)(*(jnp.stack(pair) for pair in pairs))
    np.testing.assert_allclose(got, [largest(*x) for x in zip(*pairs, strict=True)], rtol=1e-5)
    assert got[0] != got[1]


def test_remat_and_jit_of_a_state():
    operands, state = qkv(), jc.ops.DelayedScaling.create(4)
    function = loss(lambda *x: ours(*x), 1.0)
    want = jax.grad(function, (0, 3))(*operands, state)
    got = jax.jit(jax.grad(jax.checkpoint(function), (0, 3)))(*operands, state)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 1e-2


def test_the_batch_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    operands = qkv(b=8)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    along = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    got = jax.jit(jax.shard_map(causal, **along))(*operands)
    want = exact(operands, operands[0], is_causal=True)[0]
    assert relative_error(np.asarray(got, np.float64), want) < RESULTS
    gradient = jax.grad(lambda *x: jnp.sum(jax.shard_map(causal, **along)(*x).astype("float32")))
    want = exact(operands, np.ones(operands[0].shape), is_causal=True)[1][0]
    assert relative_error(np.asarray(jax.jit(gradient)(*operands), np.float64), want) < GRADIENTS


def test_devices_with_one_state_learn_the_largest_values_of_all():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    q, k, v = qkv(b=8)
    operands = q * jnp.arange(1, 9, dtype="float32")[:, None, None, None].astype(q.dtype), k, v
    state = jc.ops.DelayedScaling.create(2)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    specs = (P("data"), P("data"), P("data"), P())
    sharded = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got, want = (jax.jit(jax.grad(loss(f, 1.0), (0, 3)))(*operands, state) for f in (sharded, ours))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert relative_error(a, b) < 1e-2


def test_a_step_without_the_attention_leaves_a_state_to_begin_with():
    operands = qkv()

    @jax.jit
    def step(taken, state):
        run = lambda s: loss(ours, 1.0)(*operands, s)  # noqa: E731
        return jax.grad(lambda s: jax.lax.cond(taken, run, lambda s: 0.0, s))(state)

    skipped = step(False, jc.ops.DelayedScaling.create(2))
    after = step(True, skipped)
    for a, b in zip(after.scale, step(True, jc.ops.DelayedScaling.create(2)).scale, strict=True):
        assert a == b > 0


def test_memory_is_linear_in_the_number_of_queries():
    x = S((1, 16384, 1, 16), "bfloat16")
    for function in (causal, jax.grad(loss(causal, 1.0), (0, 1, 2))):
        used = jax.jit(function).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
        assert used < 2**29


# -- errors ----------------------------------------------------------------------------------------

Q = jnp.ones((2, 8, 4, 16), "bfloat16")
WRONG = {
    "heads": (lambda: ours(Q, Q[:, :, :3], Q[:, :, :3]), ["do not fit together"]),
    "dtypes": (lambda: ours(Q, Q, Q.astype("float16")), ["different dtypes", "float16"]),
    "fp8": (lambda: ours(*[Q.astype(E4M3)] * 3), ["query has a dtype", "astype"]),
    "scaling": (lambda: ours(Q, Q, Q, "current"), ["scaling is not valid", "DelayedScaling"]),
    "scale": (
        lambda: ours(Q, Q, Q, scale=Q[0, 0, 0, 0]),
        ["scale is no Python number", "multiply"],
    ),
    "window": (lambda: ours(Q, Q, Q, local_window_size=-1), ["local_window_size"]),
    "history": (lambda: jc.ops.DelayedScaling.create(0), ["amax_history_length", "at least 1"]),
    "gradients": (
        lambda: jc.ops.DelayedScaling.create(grad_dtype="bfloat16"),
        ["grad_dtype is not valid", E5M2, "bfloat16"],
    ),
    "blocks": (lambda: jc.ops.quantize_mxfp8(Q, 1), ["blocks are not valid", "axis=1"]),
    "rank": (lambda: jc.ops.quantize_mxfp8(Q[0]), ["blocks are not valid", "[8, 4, 16]"]),
    "wide blocks": (lambda: jc.ops.quantize_mxfp8(Q, -1, jnp.float32), [E4M3, "float32"]),
    "blocks of no dtype": (lambda: jc.ops.quantize_mxfp8(Q, -1, "foo"), [E4M3, "foo"]),
    "axis of scales": (
        lambda: jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(Q), -2),
        ["the scales do not fit", "[2, 8, 4, 128]", "[2, 8, 128, 4]"],
    ),
    "axis": (lambda: jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(Q), 1), ["axis=1"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_numbers_of_numpy_are_taken():
    assert jax.eval_shape(lambda q: ours(q, q, q, scale=np.float32(1)), Q).shape == Q.shape
    assert jc.ops.DelayedScaling.create(np.int64(4)).amax_history.shape == (4, 9)


X, ONE = S((2, 4, 8, 16), E4M3), S((1, 1, 1, 1), "float32")


def traced(function, *operands):
    return lambda: jc.graph(function).trace(*operands)


def call(g, q, k, v, one, **more):
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    return g.sdpa_fp8(q, k, v, **{**dict.fromkeys(names, one), **more})


NODES = {
    "operands": (
        traced(lambda g, q, one: call(g, q, q, q, one), S(X.shape, "bfloat16"), ONE),
        ["'q' has the wrong dtype", E4M3, "bfloat16"],
    ),
    "factors": (
        traced(lambda g, q, one: call(g, q, q, q, one), X, S((1, 1, 1, 1), "bfloat16")),
        ["'descale_q' has the wrong dtype", "expected: float32"],
    ),
    "factors of rows": (
        traced(lambda g, q, one: call(g, q, q, q, one), X, S((2, 1, 1, 1), "float32")),
        ["'descale_q' has the wrong shape", "expected: [1, 1, 1, 1]"],
    ),
    "heads": (
        traced(lambda g, q, k, one: call(g, q, k, k, one), X, S((2, 3, 8, 16), E4M3), ONE),
        ["numbers of heads", "q has 4 heads, k 3"],
    ),
    "lengths": (
        traced(
            lambda g, q, one, n: call(g, q, q, q, one, seq_len_q=n),
            X, ONE, S((2, 1, 1, 1), "int32"),
        ),
        ["one of the lengths is missing"],
    ),
    "alignment": (
        traced(lambda g, q, one: call(g, q, q, q, one, diagonal_alignment="LEFT"), X, ONE),
        ["unknown diagonal_alignment", "'TOP_LEFT'"],
    ),
    "bound": (
        traced(lambda g, q, one: call(g, q, q, q, one, left_bound=0), X, ONE),
        ["left_bound", "at least 1"],
    ),
    "accumulator": (
        traced(lambda g, q, one: call(g, q, q, q, one, compute_data_type="float16"), X, ONE),
        ["compute_data_type", "float32"],
    ),
    "scales of blocks": (
        traced(lambda g, q, n: g.sdpa_mxfp8(q, q, q, n, n, n), X, S(X.shape, "float8_e8m0fnu")),
        ["'descale_q' has the wrong shape", "[2, 4, 128, 4]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NODES)
def test_errors_of_the_nodes(what):
    trace, parts = NODES[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        trace()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# -- scales of blocks ------------------------------------------------------------------------------


def of_many_sizes(shape):
    """Of which each block has another largest value."""
    return RNG.standard_normal(shape) * np.exp2(RNG.integers(-12, 12, shape))


@pytest.mark.wide
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_blocks_have_the_least_power_of_two_that_holds_their_values(axis, dtype):
    x = of_many_sizes((2, 3, 200, 80))
    values, scales = jc.ops.quantize_mxfp8(jnp.asarray(x, "float32"), axis, dtype)
    assert (values.shape, values.dtype) == (x.shape, dtype)
    assert scales.shape == ((2, 3, 256, 4) if axis == -1 else (2, 3, 8, 128))
    assert scales.dtype == "float8_e8m0fnu"
    factor = oracle_attention_fp8.scales_of_blocks(np.asarray(scales, np.float64), x.shape, axis)
    most = float(jnp.finfo(dtype).max)
    rows = np.asarray(jnp.asarray(x, "float32"), np.float64)
    rows, factors = (a if axis == -1 else a.swapaxes(2, 3) for a in (rows, factor))
    for start in range(0, rows.shape[-1], 32):
        block = np.abs(rows[..., start : start + 32]).max(-1)
        each = factors[..., start : start + 32]
        assert (each == each[..., :1]).all()
        assert (block <= most * each[..., 0]).all()
        assert (block > most * each[..., 0] / 2).all()
    got = jc.ops.dequantize_mxfp8(values, scales, axis)
    np.testing.assert_array_equal(got, np.asarray(values, np.float64) * factor)
    assert relative_error(np.asarray(got), x) < (0.035 if dtype == E4M3 else 0.07)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_block_with_what_is_no_number_is_none(value):
    x = jnp.ones((1, 1, 2, 64)).at[0, 0, 1, 3].set(value)
    got = jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x))
    np.testing.assert_array_equal(np.isnan(got[0, 0, 1]), np.arange(64) < 32)
    np.testing.assert_array_equal(got[0, 0, 0], 1)


def test_a_block_scaled_array_may_be_empty():
    x = jnp.ones((1, 0, 4, 32))
    assert jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x)).shape == x.shape


def test_blocks_of_zeros_and_of_what_is_exact():
    x = jnp.zeros((1, 1, 3, 64)).at[0, 0, 1].set(448.0 * 2).at[0, 0, 2, :32].set(3.0)
    values, scales = jc.ops.quantize_mxfp8(x)
    np.testing.assert_array_equal(jc.ops.dequantize_mxfp8(values, scales), x)
    codes = jax.lax.bitcast_convert_type(scales, jnp.uint8).reshape(-1)
    assert [int(codes[16 * row]) for row in range(3)] == [0, 128, 120]  # exponents -127, 1, -7


def of_blocks(b=1, h=4, n=2, s=96, t=160, d=64, dtype=E4M3):
    """Operands of the forward with their scales, and those of the backward."""
    wide = {"q": (b, h, s, d), "k": (b, n, t, d), "v": (b, n, t, d), "dO": (b, h, s, d)}
    wide = {name: normal(shape) for name, shape in wide.items()}

    def quantized(**axes):
        made = {}
        for port, axis in axes.items():
            x = wide[port.removesuffix("_T")]
            made[port], made[f"descale_{port}"] = jc.ops.quantize_mxfp8(x, axis, dtype)
        return made

    forward = quantized(q=-1, k=-1, v=-2)
    backward = quantized(q=-1, q_T=-2, k=-1, k_T=-2, v=-1, dO=-1, dO_T=-2)
    return wide, forward, backward


@jc.graph
def mx_forward(g, arrays, **attributes):
    return g.sdpa_mxfp8(**arrays, **attributes)


@jc.graph
def mx_backward(g, arrays, **attributes):
    return g.sdpa_mxfp8_backward(**arrays, **attributes)


def of_tokens(x):
    return np.swapaxes(np.asarray(x, np.float64), 1, 2)


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_scales_of_blocks_beside_float64(is_causal):
    """Against attention of the arrays before they were rounded."""
    wide, first, second = of_blocks()
    attributes = {"attn_scale": 0.125}
    causal = 0 if is_causal else None
    out, stats, amax = mx_forward(first, **attributes, diagonal_band_right_bound=causal)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(amax.reshape(()), jnp.abs(out.astype("float32")).max(), rtol=4e-3)
    operands = [of_tokens(wide[name]) for name in "qkv"]
    want, gradients = exact(operands, of_tokens(wide["dO"]), is_causal=is_causal)
    assert relative_error(of_tokens(out), want) < RESULTS
    second = {**second, "o_f16": out, "dO_f16": wide["dO"].astype("bfloat16"), "stats": stats}
    found = mx_backward(second, **attributes, right_bound=causal)
    for a, largest, b in zip(found[:3], found[3:], gradients, strict=True):
        assert relative_error(of_tokens(a), b) < RESULTS
        np.testing.assert_allclose(largest.reshape(()), np.abs(b).max(), rtol=0.15)


def test_derivatives_of_nodes_with_scales_of_blocks():
    """Of values and scales about 1: gradients of what has small scales are nothing in float8."""
    wide, *made = of_blocks(b=1, h=2, n=1, s=32, t=32, d=32)
    first, second = (
        {
            name: jnp.ones_like(x) if name.startswith("descale") else (x / 100).astype(x.dtype)
            for name, x in arrays.items()
        }
        for arrays in made
    )
    out, stats, _ = mx_forward(first, attn_scale=0.1)
    second |= {"o_f16": out, "dO_f16": wide["dO"].astype("bfloat16"), "stats": stats}
    for function, arrays in ((mx_forward, first), (mx_backward, second)):
        given = jax.tree.leaves(arrays)
        _, trace = function.trace(arrays, attn_scale=0.1)
        operands = [given[i] for i in trace.operands]
        errors = transformations.compare(trace.spec, operands, ("vjp", "jvp"))
        assert max(errors.values()) < RESULTS, errors


def test_scales_of_blocks_have_no_derivative():
    _, first, _ = of_blocks(b=1, h=2, n=1, s=32, t=32, d=32)

    def total(arrays):
        return jnp.sum(mx_forward(arrays, attn_scale=0.1)[0].astype("float32"))

    with pytest.raises(jc.GraphTypeError, match="no derivative with respect to") as caught:
        jax.grad(total)(first)
    assert "the values alone" in str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

PLANNED = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "grouped": ({"n": 8, "k": 2}, {"is_causal": True}),
    "lengths that differ": ({"t": 128, "s": 320}, {}),
    "window": ({}, {"is_causal": True, "local_window_size": (64, 0)}),
    "lengths": ({}, {"lengths": True, "is_causal": True}),
    "float16": ({"dtype": "float16"}, {"is_causal": True}),
}
ON_BLACKWELL = {
    "bottom right": ({"t": 128, "s": 256}, {"is_causal": True, "bottom_right": True}),
    "small heads": ({"h": 64}, {"is_causal": True}),
    "values of another size": ({"h": 192, "e": 128}, {"is_causal": True}),
}


def avals(b=2, t=256, s=256, n=4, k=4, h=128, e=None, dtype="bfloat16"):
    return [S((b, t, n, h), dtype), S((b, s, k, h), dtype), S((b, s, k, e or h), dtype)]


def with_options(options, implementation=None):
    options = dict(options)
    lengths = options.pop("lengths", False)

    def function(q, k, v, *scaling):
        given = {}
        if lengths:
            b, t, s = q.shape[0], q.shape[1], k.shape[1]
            given["query_seq_lengths"] = jnp.full(b, t - 3, jnp.int32)
            given["key_value_seq_lengths"] = jnp.full(b, s - 5, jnp.int32)
        return ours(q, k, v, *scaling, implementation=implementation, **options, **given)

    return function


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *itertools.product(PLANNED, ["H200"]),
        *itertools.product(["grouped", *ON_BLACKWELL], ["B200"]),
    ],
)
def test_forward_and_backward_are_a_plan_each(name, gpu):
    """With delayed scaling nothing else; with current scaling XLA finds the scales around them."""
    sizes, options = {**PLANNED, **ON_BLACKWELL}[name]
    operands = avals(**sizes)
    state = jax.eval_shape(lambda: jc.ops.DelayedScaling.create(4))
    names = ["dot_product_attention_fp8", "dot_product_attention_fp8 (backward)"]
    for scaling in ((), (state,)):
        function = with_options(options, "cudnn")
        step = jax.grad(loss(function, 1.0), tuple(range(3 + len(scaling))))
        with jc.target(gpu):
            plans = jc.plans(step, *operands, *scaling)
        assert [*plans] == names
        for plan in plans.values():
            assert len(plan.execution_plans) == 1
            assert len(plan.segments) == 1 or not scaling


@pytest.mark.deviceless
def test_arrays_of_tokens_are_read_where_they_lie():
    """(B, T, N, H) in memory is cuDNN's (B, N, T, H) with other strides: nothing is transposed."""
    step = jax.grad(loss(causal, 1.0), (0, 1, 2))
    with jc.target("H200"):
        lowered = jax.jit(step).trace(*avals()).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "@jax_cudnn" in line]
    assert len(calls) == 2
    by_token, by_head = (f"dense<{list(x)}>" for x in ((3, 1, 2, 0), (3, 2, 1, 0)))
    for line in calls:
        operands, _, results = line.partition("operand_layouts = ")[2].partition("result_layouts")
        types = line.rpartition("} : ")[2].partition(" -> ")
        for layouts, shapes in ((operands, types[0]), (results, types[2])):
            fp8 = shapes.count("xf8E")
            assert fp8
            assert layouts.count(by_token) == fp8
            assert layouts.count(by_head) == shapes.count("xf32>")


@pytest.mark.deviceless
def test_what_hopper_lacks_is_xlas_with_a_reason():
    """The backward for heads of another size than 128."""
    with jc.target("H200"):
        plans = jc.plans(jax.grad(loss(causal, 1.0), (0, 1, 2)), *avals(h=64))
        first, second = plans.values()
        assert len(first.execution_plans) == 1
        assert not second.execution_plans
        reasons = " ".join(segment.reason for segment in second.segments)
        assert "128" in reasons
        function = with_options({"is_causal": True, "bottom_right": True}, "cudnn")
        for scaling in ((), (jax.eval_shape(lambda: jc.ops.DelayedScaling.create(4)),)):
            with pytest.raises(jc.UnsupportedGraphError, match="Blackwell"):
                jc.plans(function, *avals(), *scaling)


@pytest.mark.deviceless
def test_cudnn_is_not_asked_for_what_is_not_known_to_be_right():
    mixed = X, S(X.shape, E5M2), ONE
    with jc.target("H200"), jc.implementation("cudnn"):
        with pytest.raises(jc.UnsupportedGraphError, match="of one dtype"):
            jc.plan(jc.graph(lambda g, q, k, one: call(g, q, k, k, one)), *mixed)
        with pytest.raises(jc.UnsupportedGraphError, match="give them as arrays"):
            jc.plan(jc.graph(lambda g, q: call(g, q, q, q, 1.0)), X)


@pytest.mark.deviceless
def test_the_backward_of_a_part_of_a_tile_is_left_to_xla():
    """Of it an H200 took a part of dQ for zero, with lengths and without."""

    def reason(length, **lengths):
        x, given = (
            S((2, 4, length, 128), E4M3),
            jax.eval_shape(lambda: factors("sdpa_fp8_backward")),
        )
        operands = [x] * 4 + [S(x.shape, E5M2)], S((*x.shape[:3], 1), "float32"), given | lengths
        with jc.target("H200"):
            (segment,) = jc.plan(backward, *operands).segments
        return segment.reason

    assert not reason(256)
    lengths = dict.fromkeys(("seq_len_q", "seq_len_kv"), S((2, 1, 1, 1), "int32"))
    for given in ({}, lengths):
        assert "multiples of 128" in reason(100, **given)


@pytest.mark.deviceless
def test_precision_is_of_float32_products():
    """Factors and statistics are float32, and no operands of a product."""
    with jc.target("H200"), jax.default_matmul_precision("highest"):
        plans = jc.plans(jax.grad(loss(with_options({}, "cudnn"), 1.0)), *avals())
    assert [len(plan.execution_plans) for plan in plans.values()] == [1, 1]


def planned_or_skipped(function, *operands):
    """The plan for a B200; skipped where cuDNN is older than such plans."""
    try:
        with jc.target("B200"):
            return jc.plan(function.with_options(implementation="cudnn"), *operands)
    except jc.UnsupportedGraphError as error:
        if "requires cuDNN 9.21.0" not in str(error):
            raise
        pytest.skip("cuDNN here is older than 9.21, with which MXFP8 attention begins")


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["plain", "causal", "lengths", "odd", "heads of 64", "one head"])
def test_scales_of_blocks_are_planned_for_blackwell(name):
    sizes = {"odd": {"s": 200, "t": 333}, "heads of 64": {"d": 64}, "one head": {"n": 1}}
    arrays = {"b": 2, "h": 4, "n": 4, "s": 256, "t": 256, "d": 128} | sizes.get(name, {})
    _, first, second = jax.eval_shape(lambda: of_blocks(**arrays))
    shape = first["q"].shape
    second |= {port: S(shape, "bfloat16") for port in ("o_f16", "dO_f16")}
    second["stats"] = S((*shape[:3], 1), "float32")
    right = 0 if name == "causal" else None
    if name == "lengths":
        for operands in (first, second):
            operands |= dict.fromkeys(("seq_len_q", "seq_len_kv"), S((2, 1, 1, 1), "int32"))
    forward = functools.partial(planned_or_skipped, jc.graph(
        lambda g, x: g.sdpa_mxfp8(**x, attn_scale=0.1, diagonal_band_right_bound=right)
    ))  # fmt: skip
    backward = functools.partial(planned_or_skipped, jc.graph(
        lambda g, x: g.sdpa_mxfp8_backward(**x, attn_scale=0.1, right_bound=right)
    ))  # fmt: skip
    for plan in (forward(first), backward(second)):
        (segment,) = plan.segments
        assert segment.plan is not None
        assert segment.plan.engine.startswith("eng")


def test_shapes_of_scales():
    assert scales_shape((2, 3, 200, 80), -1) == (2, 3, 256, 4)
    assert scales_shape((2, 3, 200, 80), -2) == (2, 3, 8, 128)
    assert scales_shape((1, 1, 128, 192), -1) == (1, 1, 128, 8)


# -- on the GPU ------------------------------------------------------------------------------------

ON_GPU = PLANNED | {
    "realistic": ({"b": 1, "t": 2048, "s": 2048, "n": 8, "k": 2}, {"is_causal": True}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *itertools.product(ON_GPU, ["current"]),
        *itertools.product(["plain", "lengths", "realistic"], ["delayed"]),
    ],
)
def test_results_and_gradients_on_the_gpu(name, scaling):
    """Beside attention in float64, and beside the reference, which rounds as cuDNN does."""
    sizes, options = ON_GPU[name]
    operands = [normal(a.shape, a.dtype) for a in avals(**sizes)]
    weights = normal((*operands[0].shape[:3], operands[2].shape[3]))
    state = ()
    if scaling == "delayed":
        state = (settled(with_options(options, "xla"), operands, weights),)

    def outcome(implementation):
        function = with_options(options, implementation)

        @jax.jit
        def run(*x):
            out, pull = jax.vjp(lambda *y: function(*y, *state), *x)
            return out, *pull(weights.astype(out.dtype))

        return run(*operands)

    structure = {"window": options.get("local_window_size")}
    structure["is_causal"] = options.get("is_causal", False)
    if options.get("lengths"):
        b, t, s = len(operands[0]), operands[0].shape[1], operands[1].shape[1]
        structure["lengths"] = [t - 3] * b, [s - 5] * b
    out, gradients = exact(operands, weights, **structure)
    got = outcome("cudnn")
    reference = outcome("xla")
    limits = (RESULTS, GRADIENTS, GRADIENTS, GRADIENTS)
    for a, b, c, limit in zip(got, (out, *gradients), reference, limits, strict=True):
        a, c = np.asarray(a, np.float64), np.asarray(c, np.float64)
        assert np.isfinite(a).all()
        assert relative_error(a, b) < limit
        assert relative_error(a, c) < 1.2 * limit


def of_the_nodes(dtype, implementation, b=2, h=8, n=2, s=512, t=384, **attributes):
    """Results of forward and backward as dictionaries; the same operands in each call."""
    noise = np.random.default_rng(3)
    shapes = (b, h, s, 128), (b, n, t, 128), (b, n, t, 128)
    operands = [jnp.asarray(noise.standard_normal(shape) * 8, dtype) for shape in shapes]
    largest = float(jnp.finfo(dtype).max)
    given = factors("sdpa_fp8", scale_s=largest, descale_s=1 / largest, scale_o=64.0)
    attributes = {"attn_scale": 128**-0.5, **attributes}
    options = {"implementation": implementation}
    found = jax.jit(functools.partial(forward.with_options(**options), **attributes))(
        operands, given
    )
    out, stats, *_ = jax.jit(functools.partial(forward.with_options(implementation="xla"),
                                               **attributes))(operands, given)  # fmt: skip
    grad = jnp.asarray(noise.standard_normal(out.shape) * 64, E5M2)
    scales = {
        "scale_dP": 2.0**12,
        "descale_dP": 2.0**-12,
        "descale_dO": 1 / 64,
        "descale_o": 1 / 64,
    }
    scales |= {"scale_dQ": 256.0, "scale_dK": 256.0, "scale_dV": 256.0}
    given = factors("sdpa_fp8_backward", scale_s=largest, descale_s=1 / largest, **scales)
    gradients = jax.jit(functools.partial(backward.with_options(**options), **attributes))(
        [*operands, out, grad], stats, given
    )
    names = REGISTRY["sdpa_fp8"].ports.output_names, REGISTRY["sdpa_fp8_backward"].ports
    return dict(zip((*names[0], *names[1].output_names), (*found, *gradients), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [None, 0])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_largest_values_and_statistics_on_the_gpu(dtype, bound):
    got, want = (of_the_nodes(dtype, i, right_bound=bound) for i in ("cudnn", "xla"))
    np.testing.assert_allclose(got["Stats"], want["Stats"], rtol=1e-3, atol=1e-3)
    # Results are rounded, so the largest of cuDNN's and the reference's agree to their digits.
    for name in ("Amax_O", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"):
        np.testing.assert_allclose(got[name], want[name], rtol=0.12, err_msg=name)
    for name, scale in (("O", 64), ("dQ", 256), ("dK", 256), ("dV", 256)):
        wide = np.abs(np.asarray(got[name], np.float32)).max() / scale
        amax = np.asarray(got[f"amax_{name}" if name != "O" else "Amax_O"]).item()
        assert wide == pytest.approx(amax, rel=0.13), name  # half a unit of 2 digits
        a, b = (np.asarray(x[name], np.float64) for x in (got, want))
        assert relative_error(a, b) < GRADIENTS, name


@pytest.mark.gpu
def test_the_largest_weight_on_the_gpu():
    """Of softmax's, not of what a kernel multiplies before it divides by their sum."""
    got, want = (of_the_nodes(E4M3, i) for i in ("cudnn", "xla"))
    assert np.asarray(want["Amax_S"]).item() < 0.5
    np.testing.assert_allclose(got["Amax_S"], want["Amax_S"], rtol=1e-2)


@pytest.mark.gpu
def test_cudnn_saturates_on_the_gpu():
    shapes = (1, 2, 128, 128), (1, 2, 128, 128), (1, 2, 128, 128)
    operands = [jnp.asarray(RNG.standard_normal(shape) * 8, E4M3) for shape in shapes]
    given = factors("sdpa_fp8", scale_o=1e6)
    out = jax.jit(forward.with_options(implementation="cudnn"))(operands, given)[0]
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    assert np.abs(out).max() == 448


@pytest.mark.gpu
def test_queries_that_see_no_key_on_the_gpu():
    operands = [normal(a.shape, a.dtype) for a in avals(t=64, s=64)]
    lengths = {"query_seq_lengths": jnp.array([40, 64], "int32")}
    lengths["key_value_seq_lengths"] = jnp.array([64, 0], "int32")
    function = functools.partial(ours, **lengths)
    out = jax.jit(function)(*operands)
    np.testing.assert_array_equal(out[0, 40:], 0)
    np.testing.assert_array_equal(out[1], 0)
    for gradient in jax.jit(jax.grad(loss(function, 1.0), (0, 1, 2)))(*operands):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        np.testing.assert_array_equal(gradient[1], 0)


@pytest.mark.gpu
def test_the_nodes_on_the_gpu_beside_float64():
    graph = jc.graph(
        lambda g, q, k, v, *f: g.sdpa_fp8(q, k, v, *f, attn_scale=0.125, right_bound=0)
    )
    operands = [*fp8_operands(s=128, t=192, d=64), *factors("sdpa_fp8").values()]
    got = jax.jit(graph.with_options(implementation="cudnn"))(*operands)
    oracle.check_outputs(graph.trace(*operands)[1].spec, operands, got, on_gpu=True)
