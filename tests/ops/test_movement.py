"""Where elements lie: nodes that move them, slices, and matrices with batch dimensions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, product

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.layout import layout

arrays = functools.partial(normal, jax.random.key(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_elements_are_moved_and_nothing_else(dtype):
    x = jnp.arange(-96, 96).reshape(4, 6, 8).astype(dtype)
    part = slice(1, 3), slice(None, -1, 2), slice(-20, 90, 3)

    @jc.graph
    def moved(g, x):
        turned, pair = g.transpose(x, [2, 0, 1]), g.concatenate([x, x], axis=1)
        return g.reshape(x, out_dims=[8, 24]), turned, pair, g.slice(x, [*part])

    want = x.reshape(8, 24), x.transpose(2, 0, 1), jnp.concatenate([x, x], 1), x[part]
    for a, b in zip(jax.jit(moved)(x), want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "slices", "order"),
    [
        ((2, 16, 24), [slice(1, 2), slice(0, 16, 3), slice(0, 24, 2)], None),
        ((2, 16, 24), [slice(None), slice(3, 9), slice(8, 24)], [384, 1, 16]),
        ((2, 16, 9, 7), [slice(None), slice(8, 16), slice(1, 9, 2), slice(2, 7)], None),
    ],
)
def test_a_slice_has_the_strides_of_its_operand(shape, slices, order):
    @jc.graph
    def graph(g, x, w):
        part = g.slice(x if order is None else x.set_stride(order), slices)
        return g.matmul(part, w) if part.ndim == 3 else g.conv_fprop(part, w)

    out = np.empty(shape)[tuple(slices)].shape
    weight = (1, out[2], 8) if len(shape) == 3 else (8, out[1], 1, 1)
    spec = graph.trace(jnp.ones(shape, "bfloat16"), jnp.ones(weight, "bfloat16"))[1].spec
    whole, steps = layout(spec).views["x"]
    dims, strides = layout(spec).views["slice.0::OUT_0"]
    memory = np.arange(np.prod(whole))
    operand = np.lib.stride_tricks.as_strided(memory, whole, [8 * s for s in steps])
    want = operand[tuple(slices)]
    assert (dims, [8 * s for s in strides]) == (want.shape, list(want.strides))


@pytest.mark.gpu
def test_a_slice_into_a_matmul_on_the_gpu():
    if pytest.importorskip("cudnn").backend_version() < 92200:
        pytest.skip("cuDNN before 9.22 has no slices")
    x, w = arrays((1, 64, 128), (1, 48, 32), dtype="bfloat16")
    part = jc.graph(
        lambda g, x, w: g.matmul(g.slice(x, [slice(None), slice(8, 40), slice(64, 112)]), w),
        implementation="cudnn",
    )
    want = x[:, 8:40, 64:112].astype("float32") @ w.astype("float32")
    np.testing.assert_allclose(jax.jit(part)(x, w).astype("float32"), want, rtol=2e-2, atol=0.1)


@pytest.mark.deviceless
def test_slices_that_are_no_view_of_an_operand_are_refused():
    def of_a_product(g, x, w):
        return g.slice(g.matmul(x, w), [slice(2)] * 3)

    def of_two_batches(g, x, w):
        return g.matmul(g.slice(x, [slice(2), slice(3), slice(0, 32), slice(32)]), w)

    for function, batch, words in (
        (of_a_product, (1,), "not an operand of the graph"),
        (of_two_batches, (2, 3), "several batch dimensions"),
    ):
        avals = [jax.ShapeDtypeStruct((*batch, *s), jnp.bfloat16) for s in ((64, 32), (32, 48))]
        with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError, match=words):
            jc.plan(jc.graph(function, implementation="cudnn"), *avals)


@jc.graph
def fused(g, a, b, bias, residual):
    return g.relu(g.add(g.add(g.matmul(a, b), bias), residual))


def spec_of(function, *avals):
    return boundary(function.trace(*avals)[1].spec.for_planning).planned


def test_cudnn_sees_one_batch_dimension():
    """A broadcast in part is XLA's, in front of the plan."""
    spec = spec_of(fused, *arrays((2, 3, 8, 6), (2, 3, 6, 16), (1, 1, 1, 16), (2, 3, 8, 16)))
    seen = layout(spec).views
    dims = [seen[name][0] for name in ("a", "b", "bias", "residual")]
    assert dims == [(6, 8, 6), (6, 6, 16), (1, 1, 16), (6, 8, 16)]
    assert seen["a"][1] == [48, 6, 1]
    spec = spec_of(product, *arrays((2, 3, 8, 6), (2, 1, 6, 16)))
    assert spec.tensor("b").shape == (2, 3, 6, 16)
    assert spec_of(product, *arrays((2, 3, 8, 6), (1, 1, 6, 16))).tensor("b").shape[:2] == (1, 1)


@pytest.mark.parametrize(
    ("strides", "dims"),
    [
        ([48, 16, 96, 1], ((6, 6, 16), [16, 96, 1])),  # the batch between rows and columns
        ([96, 192, 16, 1], None),  # the second batch dimension in front of the first
    ],
)
def test_stated_strides_are_shown_where_the_batch_is_one_in_memory(strides, dims):
    strided = jc.graph(lambda g, a, b: g.matmul(a, b.set_stride(strides)))
    spec = spec_of(strided, *arrays((2, 3, 8, 6), (2, 3, 6, 16)))
    assert layout(spec).matrices["b"] == dims
