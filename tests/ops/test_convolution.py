"""Convolutions and their gradients: shapes, words, and agreement with lax and its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.test_util import check_grads
from transformations import graphs_of

import jax_cudnn as jc
from jax_cudnn._core.graph.layout import layout
from jax_cudnn._core.graph.reference import evaluate

RNG = np.random.default_rng(5)
# rank, stride, dilation, padding before and after, groups: each pair of values somewhere.


def drawn(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def paddings(jaxpr):
    """What the convolutions of a program pad by."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield from eqn.params["padding"]
        for value in eqn.params.values():
            if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                yield from paddings(getattr(value, "jaxpr", value))


@pytest.mark.parametrize(("groups", "window"), [(1, (2, 1)), (2, (1, 1))])
def test_gradients_of_padding_beyond_the_window(groups, window):
    """jaxlib 0.10.2 convolves out of bounds on a CPU where padding is negative before and positive
    after the image, so that the reference never pads so."""
    spatial = {"pre_padding": [2, 0], "post_padding": [0, 3], "stride": [1, 2]}
    image, weight = drawn(2, 4, 6, 5), drawn(8, 4 // groups, *window)
    fprop = jc.graph(lambda g, x, w: g.conv_fprop(x, w, **spatial))
    dgrad = jc.graph(lambda g, y, w: g.conv_dgrad(y, w, **spatial, out_dims=image.shape))
    wgrad = jc.graph(lambda g, x, y: g.conv_wgrad(x, y, **spatial, out_dims=weight.shape))
    loss = drawn(*jax.eval_shape(fprop, image, weight).shape)
    by_vjp = jax.vjp(fprop, image, weight)[1](loss)
    for function, operands, also in (
        (dgrad, (loss, weight), by_vjp[0]),
        (wgrad, (image, loss), by_vjp[1]),
    ):
        spec = function.trace(*operands)[1].spec
        for got in (function(*operands), also):
            oracle.check_outputs(spec, operands, [got], on_gpu=False)
        program = jax.make_jaxpr(lambda *a, spec=spec: evaluate(spec, *a))(*operands)
        used = [*paddings(program.jaxpr)]
        assert used
        assert not [pair for pair in used if pair[0] < 0]


_X, _W, _Y = (1, 4, 8, 8), (4, 4, 3, 3), (1, 4, 3, 3)


@pytest.mark.parametrize(
    ("method", "shapes", "attributes", "words"),
    [
        ("fprop", (_X, (3, 2, 3, 3)), {}, "K a multiple of the groups"),
        ("fprop", ((1, 4, 2, 2), _W), {}, "at most 2"),
        ("dgrad", (_Y, _W), {"out_dims": [1, 4, 6, 6]}, r"\[1, 4, 4, 4\]"),
        ("wgrad", (_X, (1, 4, 6, 6)), {"out_dims": [4, 4, 2, 2]}, r"\[1, 4, 7, 7\]"),
    ],
)
def test_what_does_not_fit_is_said_in_words(method, shapes, attributes, words):
    graph = jc.graph(lambda g, a, b: getattr(g, f"conv_{method}")(a, b, **attributes))
    with pytest.raises(jc.GraphError, match=words):
        graph(*(jnp.ones(shape) for shape in shapes))


def test_dimensions_of_one_element_tell_no_order():
    """Of (16, 3, 3, 2, 1) both orders are one memory, which cuDNN reads in its own alone."""
    x, loss = (jax.ShapeDtypeStruct(s, "float16") for s in ((3, 3, 6, 3, 3), (3, 16, 6, 2, 3)))

    def shown(*strides):
        def graph(g, x, loss):
            out = g.conv_wgrad(
                x, loss, pre_padding=[0] * 3, post_padding=[2, 0, 0], out_dims=[16, 3, 3, 2, 1]
            )
            return out.set_stride(list(strides)) if strides else out

        spec = jc.graph(graph).trace(x, loss)[1].spec
        (out,) = spec.output_tensors
        return layout(spec).views[out.name], layout(spec).orders[out.name]

    assert shown(18, 1, 6, 3, 1) == shown()
    assert shown(18, 6, 2, 1, 1) != shown()


@pytest.mark.parametrize(("channels", "convolutions"), [(4, 1), (200, 2), (1200, 4)])
def test_products_of_integers_are_summed_exactly(channels, convolutions):
    """In float32 by one, two and four convolutions: XLA has none of integers on a GPU."""
    random = np.random.default_rng(channels)
    image = random.integers(-128, 128, (2, channels, 3, 5)).astype(np.int8)
    weight = random.integers(-128, 128, (2, channels, 3, 3)).astype(np.int8)
    image[0], weight[0] = -128, -128  # the largest sums
    got = jc.graph(lambda g, x, w: g.conv_fprop(x, w))(image, weight)
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.int64), (3, 3), (2, 3))
    want = np.einsum("ncyxrs,kcrs->nkyx", windows, weight.astype(np.int64))
    np.testing.assert_array_equal(np.asarray(got, np.int64), want)
    text = jax.jit(jc.graph(lambda g, x, w: g.conv_fprop(x, w))).lower(image, weight).as_text()
    made = [line for line in text.splitlines() if "stablehlo.convolution(" in line]
    assert len(made) == convolutions
    assert all("xf32>" in line for line in made)


@pytest.mark.parametrize(
    ("image", "weight", "strides", "padding", "cut"),
    [
        ((2, 35, 41, 3), (8, 8, 3, 16), (8, 8), "VALID", True),  # some pixels are left over
        ((2, 12, 16, 6), (2, 4, 6, 16), (2, 4), "SAME", True),
        ((2, 32, 32, 3), (8, 8, 3, 16), (4, 4), "VALID", False),  # they overlap
        ((2, 33, 33, 3), (8, 8, 3, 16), (8, 8), "SAME", False),  # padding
        ((2, 16, 16, 4), (8, 8, 2, 8), (8, 8), "VALID", False),  # groups
    ],
    ids=["left over", "rectangles", "overlap", "padding", "groups"],
)
def test_results_and_gradients_of_patches(image, weight, strides, padding, cut):
    x, w = drawn(*image), drawn(*weight)
    numbers, groups = ("NHWC", "HWIO", "NHWC"), image[3] // weight[2]
    how = {"padding": padding, "dimension_numbers": numbers}

    def ours(x, w):
        return jc.ops.conv(x, w, strides=strides, groups=groups, **how)

    (spec,) = graphs_of(ours, x, w)
    assert (set(spec.tensor(dict(spec.calls[0].inputs)["weight"]).shape[2:]) == {1}) == cut
    want = lax.conv_general_dilated(x, w, strides, feature_group_count=groups, **how)
    np.testing.assert_allclose(ours(x, w), want, rtol=1e-3, atol=1e-3)
    check_grads(ours, (x, w), 1, ["rev"], atol=1e-2, rtol=1e-2, eps=1.0)  # it is linear in each
