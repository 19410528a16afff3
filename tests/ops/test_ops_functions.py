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
        (("NCHW", "OIHW", "NCHW"), "VALID", (2, 1), (1, 2), 2),
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


@pytest.mark.parametrize("letters", ["H", "DHW"])
def test_convolutions_of_one_to_three_dimensions(letters, key):
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    x, w = arrays(key, [SIZES[a] for a in numbers[0]], [*(3 for _ in letters), 8, 4])
    want = lax.conv_general_dilated(x, w, [2] * len(letters), "SAME", dimension_numbers=numbers)
    same(jc.ops.conv(x, w, strides=2, dimension_numbers=numbers), want)
    want = lax.conv_transpose(x, w, [2] * len(letters), "SAME", dimension_numbers=numbers)
    same(jc.ops.conv_transpose(x, w, strides=2, dimension_numbers=numbers), want)


@pytest.mark.parametrize("numbers", [None, ("HWNC", "OHWI", "CHWN")])
def test_conv_of_an_image_without_a_batch_dimension(numbers, key):
    """As Equinox has it, with every transformation."""
    x, w = operands(key, numbers, 1)
    axes = (0, 0) if numbers is None else (2, 3)
    image, how = jnp.take(x, 0, axes[0]), {"dimension_numbers": numbers, "activation": "tanh"}

    def of(x, w, residual):
        return jc.ops.conv(x, w, residual=residual, **how)

    wide = jc.ops.conv(jnp.expand_dims(image, axes[0]), w, **how)
    (residual,) = arrays(key, jnp.squeeze(wide, axes[1]).shape)
    want = jnp.squeeze(of(jnp.expand_dims(image, axes[0]), w, jnp.expand_dims(residual, axes[1])))
    same(of(image, w, residual), want)
    stacked = jax.vmap(of, (axes[0], None, None), axes[1])(x, w, residual)
    same(jnp.take(stacked, 0, axes[1]), want)
    got = jax.grad(lambda x: of(x, w, residual).sum())(image)
    wide = jax.grad(lambda x: jax.vmap(of, (0, None, None))(x, w, residual).sum())(image[None])
    same(got, wide[0])
    with pytest.raises(jc.GraphError, match="residual does not fit"):
        of(image, w, residual[None])


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


@pytest.mark.parametrize(
    ("strides", "dilation", "window", "padding", "transpose"),
    [
        ((2, 2), (1, 1), (4, 3), "VALID", False),
        ((3, 1), (2, 1), (3, 3), "SAME", True),
        ((3, 2), (1, 1), (1, 1), "VALID", True),
        ((2, 3), (1, 2), (2, 2), "SAME", False),
    ],
)
def test_conv_transpose_is_laxs(strides, dilation, window, padding, transpose, key):
    x, w = arrays(key, (2, 5, 6, 8), (*window, *((12, 8) if transpose else (8, 12))))
    how = {"padding": padding, "transpose_kernel": transpose}
    want = lax.conv_transpose(x, w, strides, rhs_dilation=dilation, **how)
    how |= {"strides": strides, "dilation": dilation, "bias": 1.0, "activation": "relu"}
    same(jc.ops.conv_transpose(x, w, **how), jax.nn.relu(want + 1))


@pytest.mark.parametrize(("strides", "method"), [(1, "conv_fprop"), (2, "conv_dgrad")])
def test_conv_transpose_fuses_its_epilogue_where_cudnn_does(strides, method, key):
    x, w = arrays(key, (2, 8, 8, 32), (3, 3, 32, 32))
    how = {"strides": strides, "bias": jnp.ones(32), "activation": "gelu"}
    (spec,) = graphs_of(lambda x, w: jc.ops.conv_transpose(x, w, **how), x, w)
    assert methods(spec)[0] == method
    assert ("gelu_approx_tanh" in methods(spec)) == (strides == 1)


@pytest.mark.parametrize(("groups", "padding"), [(1, [(1, 1), (1, 0)]), (4, [(5, 1), (0, 2)])])
def test_image_dilation_is_laxs(groups, padding, key):
    x, w = arrays(key, (2, 8, 5, 6), (12, 8 // groups, 3, 2))
    arguments = ((1, 1), padding, (2, 3), (1, 2), None, groups)
    same(jc.ops.conv_general_dilated(x, w, *arguments), lax.conv_general_dilated(x, w, *arguments))


SHAPES = [((4, 5), (5, 6)), ((2, 1, 4, 5), (1, 3, 5, 6)), ((5,), (5, 6)), ((5,), (3, 5, 6))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_matmul_is_jnps_on_any_rank(left, right, key):
    a, b = arrays(key, left, right)
    want = jnp.matmul(a, b)
    same(jc.ops.matmul(a, b), want)
    if a.ndim > 1 and b.ndim > 1:
        turned = jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)
        same(jc.ops.matmul(*turned, transpose_a=True, transpose_b=True), want)
        same(jc.ops.matmul(a, turned[1], transpose_b=True), want)
        bias, residual = arrays(key, want.shape[-1:], want.shape)
        got = jc.ops.matmul(a, b, scale=2.0, bias=bias, residual=residual, activation="gelu")
        same(got, jax.nn.gelu(want * 2 + bias + residual))


DIMENSIONS = [
    ((2, 3, 4, 5), (4, 5, 6), (((2, 3), (0, 1)), ((), ()))),
    ((2, 3, 4, 5), (2, 7, 4, 5), (((3,), (3,)), ((0, 2), (0, 2)))),
    ((4, 5, 3), (3, 5, 6), (((1,), (1,)), ((2,), (0,)))),
    ((4, 5, 3), (5, 4, 2), (((1, 0), (0, 1)), ((), ()))),
    ((4,), (6,), (((), ()), ((), ()))),
]


@pytest.mark.parametrize(("left", "right", "numbers"), DIMENSIONS)
def test_dot_general_is_laxs(left, right, numbers, key):
    a, b = arrays(key, left, right)
    same(jc.ops.dot_general(a, b, numbers), lax.dot_general(a, b, numbers))


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
        (lambda x, w: jc.ops.conv(x, w, groups="2"), "groups is not valid[^$]*groups='2'"),
        (lambda x, w: jc.ops.conv(x, w, groups=-1), "groups is not valid"),
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
