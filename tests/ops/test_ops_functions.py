"""jax_cudnn.ops in lax's and jnp's conventions: the same results, and clear errors."""

import re
import warnings

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from transformations import graphs_of, methods

import jax_cudnn as jc

SIZES = {"N": 2, "C": 8, "H": 9, "W": 10, "D": 5}


def arrays(key, *shapes, dtype=jnp.float32):
    """Normal numbers, drawn by NumPy: jax.random compiles a program for each shape."""
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def same(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    helpers.same(got, want, 3e-4)


def operands(key, numbers, groups, features=12):
    image, weight, _ = numbers or ("NCHW", "OIHW", "NCHW")
    sizes = {"O": features, "I": SIZES["C"] // groups, "H": 3, "W": 2}
    return arrays(key, [SIZES[a] for a in image], [sizes[a] for a in weight])


@pytest.mark.parametrize(
    ("numbers", "padding", "strides", "dilation", "groups"),
    [
        (("NHWC", "HWIO", "NHWC"), "SAME_LOWER", (2, 2), (1, 1), 8),
        (("NHWC", "OHWI", "NCHW"), [(1, 2), (0, 1)], (1, 2), (1, 1), 4),
        (("HWNC", "OIHW", "CHWN"), "VALID", (2, 1), (1, 2), 1),
    ],
)
def test_conv_is_laxs_with_an_epilogue(numbers, padding, strides, dilation, groups, key):
    x, w = operands(key, numbers, groups, 16)
    arguments = (strides, padding, None, dilation, numbers, groups)
    plain = lax.conv_general_dilated(x, w, *arguments)
    same(jc.ops.conv_general_dilated(x, w, *arguments), plain)
    how = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    how["dimension_numbers"] = numbers
    scale, bias, residual = arrays(key, (16,), (16,), plain.shape)
    along = [16 if letter == "C" else 1 for letter in numbers[2]]
    terms = {"scale": scale, "bias": bias, "residual": residual, "activation": jax.nn.relu}
    want = jax.nn.relu(plain * scale.reshape(along) + bias.reshape(along) + residual)
    same(jc.ops.conv(x, w, **terms, **how), want)


def test_conv_of_an_image_without_a_batch_dimension(key):
    """As Equinox has it, under vmap too, which moves the batch to where the numbers say."""
    how = {"dimension_numbers": ("HWNC", "OHWI", "CHWN"), "activation": "tanh"}
    x, w = operands(key, how["dimension_numbers"], 1)
    whole = jc.ops.conv(x, w, **how)
    each = jax.vmap(lambda x, residual: jc.ops.conv(x, w, residual=residual, **how), (2, 3), 3)
    same(each(x, jnp.zeros_like(whole)), whole)
    with pytest.raises(jc.GraphError, match="residual does not fit"):
        jc.ops.conv(x[:, :, 0], w, residual=whole, **how)


def test_conv_warns_where_groups_follow_from_shapes_alone(key):
    x, w = operands(key, None, 4)
    with pytest.warns(UserWarning, match="Pass groups=4") as caught:
        inferred = jc.ops.conv(x, w)
    norm = None, None, jnp.zeros(12), jnp.ones(12)
    with pytest.warns(UserWarning, match="Pass groups=4") as also:
        normed = jc.ops.conv_batch_norm(x, w, *norm, training=False)[0]
    with pytest.warns(UserWarning, match="from 8 image channels and weights for 2") as mapped:
        jax.vmap(lambda x: jc.ops.conv(x, w))(x)
    assert [w.filename for w in (*caught, *also, *mapped)] == [__file__] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(inferred, jc.ops.conv(x, w, groups=4))
        plain = jc.ops.conv_batch_norm(x, w, *norm, groups=4, training=False)[0]
        same(normed, plain)
        jc.ops.conv(*operands(key, None, 1))
        jc.graph(lambda g, x, w: g.conv_fprop(x, w))(x, w)


def test_precision_and_preferred_type_reach_the_graph(key):
    x, w = operands(key, None, 1)
    (spec,) = graphs_of(lambda x, w: jc.ops.conv(x, w, precision="highest"), x, w)
    assert spec.options.precision == "highest"
    x, w = (a.astype(jnp.bfloat16) for a in (x, w))
    assert jc.ops.conv(x, w, preferred_element_type=jnp.float32).dtype == jnp.float32


def test_integer_and_float8_products_have_the_accumulators_dtype(key):
    x, w = (jnp.full(s, 100, "int8") for s in ((1, 4, 5, 5), (4, 4, 3, 3)))
    want = lax.conv_general_dilated(x.astype("int32"), w.astype("int32"), (1, 1), "SAME")
    same(jc.ops.conv(x, w), want)
    same(jc.ops.conv(x, w, scale=0.01), want.astype("float32") * 0.01)  # computes in float32
    a, b = (m.astype("float8_e4m3fn") for m in arrays(key, (8, 16), (16, 8)))
    same(jc.ops.matmul(a, b), a.astype("float32") @ b.astype("float32"))


@pytest.mark.parametrize(("strides", "method"), [(1, "conv_fprop"), (2, "conv_dgrad")])
def test_conv_transpose_fuses_its_epilogue_where_cudnn_does(strides, method, key):
    x, w = arrays(key, (2, 8, 8, 32), (3, 3, 32, 32))
    how = {"strides": strides, "bias": jnp.ones(32), "activation": "gelu"}
    (spec,) = graphs_of(lambda x, w: jc.ops.conv_transpose(x, w, **how), x, w)
    assert methods(spec)[0] == method
    assert ("gelu_approx_tanh" in methods(spec)) == (strides == 1)


XLAS = {
    "batch groups": (((1, 1), "SAME"), {"batch_group_count": 2}),
    "strides and image dilation": (((2, 1), [(0, 0), (0, 0)], (2, 1)), {}),
    "negative padding": (((1, 1), [(-1, 0), (0, 0)]), {}),
}


@pytest.mark.parametrize("words", XLAS)
def test_what_cudnn_has_no_operation_for_is_laxs_and_said(words, key, caplog):
    arguments, named = XLAS[words]
    x, w = arrays(key, (4, 8, 5, 6), (12, 8 // named.get("batch_group_count", 1), 3, 2))
    if named:
        x = x.reshape(8, 4, 5, 6)
    caplog.set_level("DEBUG", "jax_cudnn")
    ours = jc.ops.conv_general_dilated
    same(ours(x, w, *arguments, **named), lax.conv_general_dilated(x, w, *arguments, **named))
    assert words in caplog.text
    assert not graphs_of(lambda x, w: ours(x, w, *arguments, **named), x, w)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w: jc.ops.conv(x, w, groups=3), "weights do not fit"),
        (lambda x, w: jc.ops.conv(x, w, bias=jnp.ones(5)), "bias does not fit"),
        (lambda x, w: jc.ops.conv(x, w, activation=jax.nn.selu), "gelu_exact[^$]*apply another"),
        (lambda x, w: jc.ops.conv(x, w, activation="GELU"), "did you mean 'gelu'"),
        (lambda x, w: jc.graph(lambda g, x: g.ReLU(x))(x), "did you mean 'g.relu'"),
        (lambda x, w: jc.ops.conv(x, w.astype(jnp.int8)), "no product of these dtypes"),
        (lambda x, w: jc.ops.matmul(x, w[..., :2]), "do not fit"),
        (lambda x, w: jc.ops.matmul(w[0, 0], w[0, 1]), "transpose_a=True they agree"),
        (lambda x, w: jc.ops.matmul(x, None), r"b is not an array[^$]*got: None"),
        (lambda x, w: jc.ops.matmul(x, 2**80), "b is not an array"),
        (
            lambda x, w: jc.ops.conv(x, w, preferred_element_type="f32"),
            "preferred_element_type: [^$]*did you mean 'float32'",
        ),
        (
            lambda x, w: jc.ops.matmul(x, x, transpose_b=True, preferred_element_type="float64"),
            "float64 needs jax_enable_x64[^$]*jax.config.update",
        ),
        (lambda x, w: jc.ops.conv(x, w, groups="2"), "groups is not valid[^$]*groups='2'"),
        (lambda x, w: jc.ops.conv(x, w, groups=-1), "groups is not valid"),
        (lambda x, w: jc.ops.conv(x, w, groups=2.0), r"groups is not valid[^$]*groups=2\.0"),
        (lambda x, w: jc.ops.conv(x[0], w[:, :3]), "C = 8 from dimension 0 of the image"),
        (lambda x, w: jc.ops.conv_transpose(x, w), r"for 3 \(their dimension 2\)\n[^$]*NHWC\"\)$"),
        (lambda x, w: jc.ops.dot_general([x, [1]], w, ()), "lhs is not an array"),
        (lambda x, w: jc.ops.conv(x, w, padding="vaild"), "did you mean 'VALID'"),
        (lambda x, w: jc.ops.conv(x, w, strides=1.5), "strides=1.5"),
        (lambda x, w: jc.ops.conv(x, w, implementation="CuDN"), "did you mean 'cudnn'"),
    ],
)
def test_wrong_argument_is_said_in_words(call, words, key):
    with pytest.raises(jc.JaxCudnnError, match=words):
        call(*operands(key, None, 1))


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
def test_arrays_are_read_where_they_lie(key):
    def block(x, first, second, bias):
        how = {"bias": bias, "activation": "relu", "dimension_numbers": ("NHWC", "OHWI", "NHWC")}
        return jc.ops.conv(jc.ops.conv(x, first, **how), second, residual=x, **how)

    def rows(a, b):
        return jc.ops.dot_general(a, b, (((0,), (1,)), ((), ())))

    images = (8, 28, 28, 64), (64, 3, 3, 64), (64, 3, 3, 64), (64,)
    for function, shapes, plans in ((block, images, 2), (rows, ((256, 128), (512, 256)), 1)):
        text = jax.jit(function).lower(*arrays(key, *shapes, dtype="bfloat16")).compile().as_text()
        entry = text[text.index("\nENTRY ") :]
        assert entry.count('custom_call_target="jax_cudnn"') == plans
        assert not re.findall(r" (copy|transpose|fusion)\(", entry)
