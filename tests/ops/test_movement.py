"""Nodes that move elements: values, words, and where their parts lie in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph import layout

KEY = jax.random.key(3)
X = jax.random.normal(KEY, (4, 6, 8))


@pytest.mark.parametrize(
    ("move", "want"),
    [
        (lambda g, x: g.reshape(x, out_dims=[8, 24]), lambda x: x.reshape(8, 24)),
        (lambda g, x: g.reshape(x).set_dim([4, 2, 3, 8]), lambda x: x.reshape(4, 2, 3, 8)),
        (lambda g, x: g.transpose(x, [2, 0, 1]), lambda x: x.transpose(2, 0, 1)),
        (
            lambda g, x: g.slice(x, [slice(1, 3), slice(None, -1, 2), slice(-20, 90, 3)]),
            lambda x: x[1:3, :-1:2, ::3],
        ),
        (lambda g, x: g.concatenate([x, x, x], axis=1), lambda x: np.concatenate([x] * 3, 1)),
        (
            lambda g, x: g.concatenate(
                [g.slice(x, [slice(2)] * 3), g.slice(x, [slice(2)] * 3)], -1
            ),
            lambda x: np.concatenate([x[:2, :2, :2]] * 2, -1),
        ),
    ],
)
def test_elements_are_moved_and_nothing_else(move, want):
    """Bit for bit, in every dtype."""
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
        x = (X * 9).astype(dtype)
        got = jax.jit(jc.graph(move))(x)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.ascontiguousarray(want(np.asarray(x))).view(np.uint8)
        )


WRONG = [
    (lambda g, x: g.reshape(x, out_dims=[5, 5]), "25 elements"),
    (lambda g, x: g.reshape(x, reshape_mode="COPY"), "VIEW_ONLY"),
    (lambda g, x: g.transpose(x, [0, 1, 1]), "each of 0 to 2 once"),
    (lambda g, x: g.slice(x, [slice(2)]), "3 slices"),
    (lambda g, x: g.slice(x, [slice(None, None, -1)] * 3), "steps of at least 1"),
    (lambda g, x: g.slice(x, [1, 2, 3]), "Python slices"),
    (lambda g, x: g.slice(x, [slice(0.5)] * 3), "of integers"),
    (lambda g, x: g.concatenate([x, x], axis=3), "-3 to 2"),
    (lambda g, x: g.concatenate([x, g.slice(x, [slice(2)] * 3)], 0), "one shape but"),
    (lambda g, x: g.concatenate([x, x], 0, in_place_index=2), "0 to 1"),
    (lambda g, x: g.concatenate([x, x], "channels"), "integers"),
    (lambda g, x: g.concatenate(x, 0), "list"),
]


@pytest.mark.parametrize(("move", "words"), WRONG)
def test_what_does_not_fit_is_said_in_words(move, words):
    with pytest.raises(jc.JaxCudnnError, match=words):
        jc.graph(move)(X)


# -- a slice is a part of its operand's memory -----------------------------------------------------


def _view_of_part(shape, slices, method="matmul", order=None):
    """Dims and strides of the slice of an operand, and those of the operand."""

    @jc.graph
    def graph(g, x, w):
        if order is not None:
            x = x.set_stride(order)
        part = g.slice(x, slices)
        return g.matmul(part, w) if method == "matmul" else g.conv_fprop(part, w)

    out = np.empty(shape)[tuple(slices)].shape
    weight = (1, out[2], 8) if method == "matmul" else (8, out[1], *(1,) * (len(shape) - 2))
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (shape, weight)]
    spec = graph.trace(*avals)[1].spec
    return layout.view(spec, spec.tensor("slice.0::OUT_0")), layout.view(spec, spec.tensor("x"))


@pytest.mark.parametrize(
    ("shape", "slices", "method", "order"),
    [
        ((2, 16, 24), [slice(None), slice(3, 9), slice(8, 24)], "matmul", None),
        ((2, 16, 24), [slice(1, 2), slice(0, 16, 3), slice(0, 24, 2)], "matmul", None),
        ((2, 16, 24), [slice(None), slice(3, 9), slice(8, 24)], "matmul", [384, 1, 16]),
        ((2, 16, 9, 7), [slice(None), slice(8, 16), slice(1, 9, 2), slice(2, 7)], "conv", None),
        ((2, 16, 9), [slice(None), slice(8, 16), slice(1, 9, 2)], "conv", None),
    ],
)
def test_a_slice_has_the_strides_of_its_operand(shape, slices, method, order):
    (dims, strides), (whole, steps) = _view_of_part(shape, slices, method, order)
    memory = np.arange(np.prod(whole))
    operand = np.lib.stride_tricks.as_strided(memory, whole, [8 * s for s in steps])
    view = [*slices[:2], *(slice(None),) * (len(whole) - len(shape)), *slices[2:]]
    want = operand[tuple(view)]
    assert dims == want.shape
    assert [8 * s for s in strides] == list(want.strides)


@pytest.mark.deviceless
def test_a_slice_of_an_operand_is_planned_into_a_matmul():
    """By cuDNN 9.22 and newer; it reads the whole operand, at an offset."""
    import cudnn

    @jc.graph(implementation="cudnn")
    def sliced(g, x, w):
        return g.relu(g.matmul(g.slice(x, [slice(None), slice(None), slice(64, 128)]), w))

    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 64, 128), (1, 64, 32))]
    with jc.target("H200"):
        if cudnn.backend_version() >= 92200:
            (plan,) = jc.plan(sliced, *avals).execution_plans
            assert [row[1:] for row in plan.bindings[:2]] == [(0, 0, 16384), (0, 1, 4096)]
        else:
            with pytest.raises(jc.UnsupportedGraphError, match=r"9\.22"):
                jc.plan(sliced, *avals)


@pytest.mark.gpu
def test_a_slice_into_a_matmul_on_the_gpu():
    import cudnn

    if cudnn.backend_version() < 92200:
        pytest.skip("cuDNN before 9.22 has no slices")
    x, w = (jax.random.normal(KEY, s).astype("bfloat16") for s in ((1, 64, 128), (1, 48, 32)))
    part = jc.graph(
        lambda g, x, w: g.matmul(g.slice(x, [slice(None), slice(8, 40), slice(64, 112)]), w),
        implementation="cudnn",
    )
    want = x[:, 8:40, 64:112].astype("float32") @ w.astype("float32")
    np.testing.assert_allclose(
        np.asarray(jax.jit(part)(x, w), np.float32), want, rtol=2e-2, atol=0.1
    )


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("move", "words"),
    [
        (lambda g, x, w: g.slice(g.matmul(x, w), [slice(2)] * 3), "no operand of the graph"),
        (lambda g, x, w: g.slice(x, [slice(2)] * 3), "needs a copy"),
        (
            lambda g, x, w: g.matmul(g.slice(x, [slice(None)] * 3).set_stride([2048, 1, 64]), w),
            "needs a copy",
        ),
        (lambda g, x, w: g.transpose(x, [0, 2, 1]), "XLA runs it in the same program"),
    ],
)
def test_what_is_not_planned_is_refused_in_words(move, words):
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 64, 32), (1, 32, 32))]
    with jc.target("H200"), pytest.raises(jc.UnsupportedGraphError) as caught:
        jc.plan(jc.graph(move, implementation="cudnn"), *avals)
    assert words in str(caught.value)


# -- reshape, transpose and concatenate are XLA's, in the same program -----------------------------

XLAS = {
    "transposed into a matmul": (
        lambda g, x, w: g.matmul(g.transpose(x, [0, 2, 1]), w),
        lambda x, w: x.mT @ w,
        1,
        "stablehlo.transpose",
    ),
    "two matmuls, concatenated": (
        lambda g, x, w: g.concatenate([g.matmul(x, w), g.relu(g.matmul(x, w))], 1),
        lambda x, w: jnp.concatenate([x @ w, jax.nn.relu(x @ w)], 1),
        2,
        "stablehlo.concatenate",
    ),
    "a result that leaves and goes on": (
        lambda g, x, w: (lambda y: (y, g.matmul(g.transpose(y, [0, 2, 1]), y)))(g.matmul(x, w)),
        lambda x, w: (x @ w, (x @ w).mT @ (x @ w)),
        2,
        "stablehlo.transpose",
    ),
}


@pytest.mark.deviceless
@pytest.mark.parametrize("what", XLAS)
def test_what_xla_moves_lies_in_the_same_program(what):
    """Each part between the cuts is a plan of its own."""
    move, plain, plans, operation = XLAS[what]
    graph = jc.graph(move)
    x, w = (jax.random.normal(KEY, s) for s in ((1, 32, 32), (1, 32, 32)))
    for got, want in zip(*(jax.tree.leaves(f(x, w)) for f in (graph, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    avals = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)] * 2
    with jc.target("H200"):
        lowered = jax.jit(graph).trace(*avals).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("stablehlo.custom_call @jax_cudnn") == plans
    assert operation in text
