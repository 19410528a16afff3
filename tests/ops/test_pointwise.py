"""Pointwise operations, comparisons and reductions: what the shared cases do not show.

Special values (signed zeros, infinities, NaN, ties, negative remainders), derivatives, dtypes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.node import registry


def apply(method, *operands, **attributes):
    """One operation as a graph under jit."""
    graph = jc.graph(lambda g, *arrays: getattr(g, method)(*arrays, **attributes))
    return jax.jit(graph)(*operands)


each_place = pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])

INF, NAN = np.inf, np.nan
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, INF, -INF, NAN, 3.0, 1e-3, -1e-3, 88.0, -88.0])


def special(rows=SPECIAL, columns=SPECIAL):
    """All pairs, as two images of 16 channels (one channel alone has no engine)."""
    a, b = np.broadcast_arrays(*np.meshgrid(rows, columns, indexing="ij"))
    return [jnp.asarray(np.repeat(x.reshape(1, 1, *x.shape), 16, 1), jnp.float32) for x in (a, b)]


METHODS = "add sub mul div min max mod pow add_square relu_backward cmp_eq cmp_neq cmp_gt".split()
METHODS += "cmp_ge cmp_lt cmp_le abs neg ceil floor exp log reciprocal rsqrt sqrt identity".split()
METHODS += "tanh sigmoid relu elu softplus".split()
# Where the oracle's formula says otherwise: the smallest and the largest pass over NaN, and the
# loss passes where x is NaN.
OWN = {
    "min": np.fmin,
    "max": np.fmax,
    "mod": lambda a, b: np.where(np.isinf(b) & np.isfinite(a), a, a - b * np.trunc(a / b)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "relu_backward": lambda loss, x: np.where(x <= 0, 0.0, loss),
    "relu": lambda x: np.where(x <= 0, 0.0, x),
}


def exact(method, *operands):
    node = registry()[method].create()
    ports = dict(zip(node.ports.input_names, operands, strict=True))
    with np.errstate(all="ignore"):
        own = OWN.get(method)
        return own(*operands) if own else oracle.OPERATIONS[method](node, **ports)


@each_place
@pytest.mark.parametrize("method", METHODS)
def test_special_values(method, place, by_cudnn):
    """All values, NaN and infinities too; zeros of either sign are equal."""
    operands = special()[: len(registry()[method].ports.inputs)]
    got = np.asarray(apply(method, *operands), np.float32)
    want = exact(method, *(np.asarray(x, np.float64) for x in operands))
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    # cuDNN's elu is exp(x) - 1, which near 0 has the absolute error of numbers near 1.
    atol = 1e-7 if (method, place) == ("elu", "gpu") else 1e-30
    wrong = ~np.isclose(got, want, rtol=1e-5, atol=atol, equal_nan=True)
    told = {tuple(float(x[tuple(at)]) for x in (*operands, got, want)) for at in np.argwhere(wrong)}
    assert not told, f"operands, got, wanted: {told}"


TIES = [
    ({"negative_slope": 0.5}, [1.5, 1.5, 1.5, 3, 3, 3, 3, 3]),
    ({"lower_clip": 0.5, "upper_clip": 2.0}, [0, 0, 0, 0, 3, 3, 0, 0]),
]


@each_place
@pytest.mark.parametrize(("attributes", "wanted"), TIES, ids=["slope", "clips"])
def test_relu_backward_at_its_clips(attributes, wanted, place, by_cudnn):
    x = np.array([-1.0, -0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0] * 2, np.float32)
    x = jnp.asarray(np.broadcast_to(x[:, None, None], (2, 16, 4, 4)))
    got = apply("relu_backward", jnp.full_like(x, 3.0), x, **attributes)
    assert np.asarray(got)[0, :8, 0, 0].tolist() == wanted


@each_place
@pytest.mark.parametrize("mode", ["ADD", "MIN", "MAX", "AMAX"])
def test_sums_keep_nan_and_the_largest_pass_over_it(mode, place, by_cudnn):
    x = np.ones((64, 16), np.float32)
    x[3, 5] = np.nan
    got = np.asarray(apply("reduction", jnp.asarray(x), mode=mode, out_dims=[64, 1]))
    want = [[3, 0]] if mode == "ADD" else []
    assert np.argwhere(np.isnan(got)).tolist() == want


def test_the_largest_and_smallest_pass_over_nan_and_a_product_over_zeros():
    for mode, row, wanted in (
        ("MIN", [NAN, INF, NAN], INF),
        ("MAX", [-5.0, NAN, -3.0], -3.0),
        ("AMAX", [0.0, NAN, -INF], INF),
        ("MUL_NO_ZEROS", [2.0, 0.0, -4.0], -8.0),
    ):
        got = apply("reduction", jnp.asarray([row], jnp.float32), mode=mode, out_dims=[1, 1])
        assert got.tolist() == [[wanted]]


def test_integers_and_float8_saturate():
    x = jnp.full((2, 16, 3, 4), 100, jnp.int8)
    assert int(apply("add", x, x).min()) == 127
    assert int(apply("neg", jnp.full((2, 16, 3, 4), 5, jnp.uint8)).max()) == 0
    rounded = jc.graph(lambda g, x: g.neg(x).set_data_type("float8_e4m3fn"))
    assert rounded(jnp.asarray([1e4, -1e4])).tolist() == [-448, 448]


def test_selection_by_numbers_is_by_those_that_are_not_zero():
    x, y = jnp.ones((1, 4)), jnp.zeros((1, 4))
    for mask in (jnp.asarray([[0.0, -0.5, 1e-3, 0.0]]), jnp.asarray([[0, 2, -1, 0]], jnp.int8)):
        assert apply("binary_select", x, y, mask).tolist() == [[0, 1, 1, 0]]


def test_whole_numbers_beside_integers_are_of_32_bits():
    x = jnp.zeros((4, 8), "int32")
    for number in (2**31, -(2**31) - 1, np.int64(2**40)):
        function = jc.graph(lambda g, x, n=number: g.add(x, n))
        with pytest.raises(jc.GraphError, match="too large"):
            function(x)
        assert function(x.astype("float32")).shape == (4, 8)
    for number in (2**31 - 1, -(2**31)):
        np.testing.assert_array_equal(jc.graph(lambda g, x, n=number: g.add(x, n))(x), number)


def test_a_mask_does_not_make_chosen_integers_floats():
    x, mask = jnp.arange(6, dtype="int32"), jnp.arange(6) % 2 == 0
    for function, want in (
        (lambda g, x, m: g.binary_select(x, 3, m), jnp.where(mask, x, 3)),
        (lambda g, x, m: g.binary_select(7, x, m), jnp.where(mask, 7, x)),
        (lambda g, x, m: g.binary_select(x, 3.5, m), jnp.where(mask, x, 3.5)),
    ):
        got = jc.graph(function)(x, mask)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def normalized(g, x, scale, bias, mean, var, residual):
    y, mask = g.relu_mask(g.batchnorm(x, scale, bias, mean, var, 1e-5, 0.1)[0] + residual)
    return y.set_data_type(x.dtype), mask


IMAGE, CHANNELS = (32, 64, 56, 56), (1, 64, 1, 1)
AVALS = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in ((IMAGE, "bfloat16"), *[(CHANNELS, "float32")] * 4, (IMAGE, "bfloat16"))
]


@pytest.mark.parametrize("shape", [(2, 8, 3), (2, 24, 2, 3, 2)])
def test_bits_are_those_of_the_channels(shape, key):
    x = jax.random.normal(key, shape)
    y, mask = jc.graph(lambda g, x: g.relu_mask(x))(x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    assert (mask.shape, mask.dtype) == ((shape[0], shape[1] // 8, *shape[2:]), jnp.uint8)
    bits = np.unpackbits(np.asarray(mask), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits, np.asarray(x) > 0)
    t = jax.random.normal(jax.random.key(1), shape)
    through = jc.graph(lambda g, t, mask: g.masked(t, mask))(t, mask)
    np.testing.assert_array_equal(through, np.where(np.asarray(x) > 0, t, 0))


def test_gradients_of_a_result_in_float8(key):
    """Which masked does not take."""
    rounded = jc.graph(lambda g, x: g.relu_mask(x)[0].set_data_type("float8_e5m2"))
    x = jax.random.normal(key, (2, 16, 3, 4))
    along = jnp.ones(x.shape, "float8_e5m2")
    np.testing.assert_array_equal(jax.vjp(rounded, x)[1](along)[0], x > 0)


def test_the_derivative_keeps_the_mask_and_not_the_result():
    def loss(*args):
        return jnp.sum(jnp.sin(jc.graph(normalized)(*args)[0].astype(jnp.float32)))

    _, backward = graphs_of(jax.grad(loss), *AVALS)
    (kept,) = (str(t) for t in backward.input_tensors if "MASK" in t.name)
    assert "uint8[32,8,56,56]" in kept
    assert not any("OUT_0" in t.name and "d(" not in t.name for t in backward.input_tensors)


def test_what_cudnn_gets_of_a_mask():
    """Nothing, where nothing reads it; alone, a comparison with what relu gives."""
    result, mask = (
        jc.graph(lambda g, *args, i=i: normalized(g, *args)[i]).trace(*AVALS)[1].spec
        for i in (0, 1)
    )
    assert methods(boundary(result).planned) == ["batchnorm", "add", "relu"]
    sent = boundary(mask).planned
    assert methods(sent) == ["batchnorm", "add", "relu", "cmp_gt"]
    assert sent.tensor(sent.outputs[0]).dtype == "bool"
    assert sent.outputs[1] == dict(sent.calls[2].outputs)["OUT_0"]  # written, and dropped
