"""Engines of cuDNN that were found to compute wrongly are not chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import conv, spec_of
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn._core.planning import choice


def two_results(g, x, w):
    y = conv(g, x, w)
    return y, g.relu(y)


def wide_dgrad(g, dy, w):
    return g.conv_dgrad(dy, w, padding=[1, 1], out_dims=[2, 64, 8, 8]).set_data_type("float32")


def uneven_wgrad(after):
    def wgrad(g, x, dy):
        return g.conv_wgrad(x, dy, pre_padding=[0], post_padding=[after], out_dims=[64, 64, 3])

    return wgrad


def narrow_wgrad(g, x, dy):
    return g.conv_wgrad(x, dy, padding=[0], out_dims=[4, 4, 3])


def uneven_dgrad(g, dy, w):
    return g.conv_dgrad(dy, w, pre_padding=[0], post_padding=[1], out_dims=[2, 64, 9])


LINES = [((2, 64, 9), "float32"), ((2, 64, 8), "float32")]
IMAGES = [((2, 64, 8, 8), "bfloat16"), ((64, 64, 3, 3), "bfloat16")]
WIDE = [(shape, "float32") for shape, _ in IMAGES]
INT8 = [((2, 16, 8, 8), "int8"), ((16, 16, 3, 3), "int8")]
MATRICES = [((1, 64, 64), "float32")] * 2


def attend(g, q, k, v, bias=None):
    return g.sdpa(q, k, v, bias=bias)[0]


def one_query(heads, of_keys, dtype, *bias):
    keys = (2, of_keys, 64, 64)
    return [(shape, dtype) for shape in ((2, heads, 1, 64), keys, keys, *bias)]


WRONG = [  # found by random graphs on an H200: function, operands, engines of 0 to 80
    (conv, INT8, dict.fromkeys((0, 28), "conv_fprop.0")),
    (conv, IMAGES, {}),
    (two_results, IMAGES, dict.fromkeys(range(81), "conv_fprop.0")),
    (wide_dgrad, IMAGES, {8: "conv_dgrad.0"}),
    (uneven_dgrad, [LINES[1], ((64, 64, 3), "float32")], {50: "conv_dgrad.0"}),
    (uneven_wgrad(1), LINES, dict.fromkeys((1, 18, 20), "conv_wgrad.0")),
    (uneven_wgrad(0), [LINES[0], ((2, 64, 7), "float32")], {}),
    (narrow_wgrad, [((8, 4, 32), "float16"), ((8, 4, 30), "float16")], {2: "conv_wgrad.0"}),
    (lambda g, x, w: g.add(g.relu(x), conv(g, x, w)), WIDE, {8: "conv_fprop.0"}),
    (lambda g, x, w: g.relu(g.add(x, conv(g, x, w))), WIDE, {}),
    (lambda g, a, b: g.relu(g.matmul(a, b), negative_slope=0.1), MATRICES, {0: "relu.0"}),
    (lambda g, a, b: g.relu(g.matmul(a, b)), MATRICES, {}),
    (lambda g, a, b: g.matmul(a, b).set_data_type("float16"), MATRICES, {0: "matmul.0"}),
    (attend, one_query(4, 2, "bfloat16", (2, 1, 1, 64)), dict.fromkeys((1, 2), "sdpa.0")),
    (attend, one_query(4, 4, "bfloat16"), {}),
]


@pytest.mark.parametrize("row", range(len(WRONG)))
def test_engines_found_wrong_are_known(row):
    function, avals, engines = WRONG[row]
    spec = spec_of(function, *avals)
    found = {engine: choice.wrongly_computed(spec, engine, {}) for engine in range(81)}
    assert {engine: name for engine, name in found.items() if name} == engines


@pytest.mark.deviceless
@pytest.mark.usefixtures("by_cudnn")
def test_engines_known_to_be_wrong_are_not_chosen():
    wrongly = "computes conv_fprop.0 wrongly"
    images = [jax.ShapeDtypeStruct(*aval) for aval in INT8]
    with jc.target("H200"):
        plan = jc.plan(jc.graph(conv), *images)
        assert {row.engine for row in plan.candidates if row.reason == wrongly} == {0, 28}
        assert plan.pinned["engine"] not in (0, 28)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad", "wgrad, add", "wgrad, add, 4"])
def test_engines_that_are_left_read_uneven_padding(kind, rank, dtype):
    kind, *added = kind.split(", ")
    n = 4 if "4" in added else 64
    image, result = [2, n, 9, 11][: 2 + rank], [2, n, 8, 10][: 2 + rank]
    weight = [n, n, 3, 3][: 2 + rank]
    given, out = {
        "fprop": ([image, weight], {}),
        "dgrad": ([result, weight], {"out_dims": image}),
        "wgrad": ([image, result], {"out_dims": weight}),
    }[kind]
    padding = {"pre_padding": [0, 1][:rank], "post_padding": [1, 0][:rank]}

    @jc.graph
    def convolution(g, a, b, *terms):
        y = getattr(g, f"conv_{kind}")(a, b, **padding, **out)
        return g.add(y, *terms) if terms else y

    terms = [weight] if added else []
    check_engines(convolution, [(shape, dtype) for shape in (*given, *terms)])


@pytest.mark.gpu
@pytest.mark.usefixtures("by_cudnn")
@pytest.mark.parametrize("bias", [(), ((2, 1, 1, 64),), ((2, 4, 1, 64),)], ids=len)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("of_keys", [4, 2])
def test_engines_that_are_left_compute_one_query(of_keys, dtype, bias):
    check_engines(jc.graph(attend), one_query(4, of_keys, dtype, *bias))


def check_engines(function, avals):
    """Each engine that is left gives the oracle's result; there may be none."""
    random = np.random.default_rng(0)
    operands = [jnp.asarray(random.standard_normal(shape), dtype) for shape, dtype in avals]
    try:
        plan = jc.plan(function, *operands)
    except jc.UnsupportedGraphError as error:
        assert "wrongly" in str(error)  # noqa: PT017
        return
    (want,) = oracle.evaluate(plan.spec, operands)
    errors = {}
    for row in plan.candidates:
        if row.engine in errors or row.reason:
            continue
        try:
            chosen = plan.select(row)
        except jc.UnsupportedGraphError:  # it does not compile
            continue
        errors[row.engine] = relative_error(chosen.execute(*operands), want)
    print(errors)
    assert errors, "no engine has run"
    assert max(errors.values()) < 6e-3, errors  # bfloat16's rounding, or TF32's
