"""Patterns of graphs, and the table of those at which cuDNN loses."""

import jax
import pytest
from cases import node_cases
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.planning import losses

ROW, IMAGE = (1, 16, 32), (2, 16, 9, 9)


def traced(function, *avals, **options):
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
    return jc.graph(function, **options).trace(*structs)[1].spec


# -- patterns --------------------------------------------------------------------------------------


def conv(image, weight, **attributes):
    return traced(
        lambda g, x, w: g.conv_fprop(x, w, **attributes), (image, "bfloat16"), (weight, "bfloat16")
    )


def dgrad(loss, weight, dims, dtype="bfloat16", **attributes):
    return traced(
        lambda g, dy, w: g.conv_dgrad(dy, w, out_dims=dims, **attributes),
        (loss, dtype),
        (weight, dtype),
    )


def wgrad(image, loss, dims):
    return traced(
        lambda g, x, dy: g.conv_wgrad(x, dy, out_dims=dims), (image, "float16"), (loss, "float16")
    )


def matmul(dtype, of=None, function=lambda g, x, w: g.matmul(x, w)):
    return traced(function, (ROW, dtype), ((1, 32, 8), of or dtype))


def total(shape, out, dtype="bfloat16"):
    return traced(lambda g, x: g.reduction(x, mode="ADD", out_dims=out), (shape, dtype))


def of_int8(g, x, w):
    return g.matmul(x, g.identity(w).set_data_type("bfloat16"))


def quick(g, x, w):
    return g.matmul(x, w, compute_data_type="fast_float_for_fp8").set_data_type("bfloat16")


def surrounded(g, x, w):
    x = g.relu(x).set_data_type("bfloat16")
    return g.relu(g.matmul(x, w))


def with_a_term(shape, after=lambda g, y, term: y + term):
    return traced(
        lambda g, x, w, term: after(g, g.matmul(x, w), term),
        *((each, "bfloat16") for each in (ROW, (1, 32, 8), shape)),
    )


def scaled_by_products(g, x, w):
    return g.mul(g.matmul(x, w), g.mul(2.0, g.reduction(w, mode="ADD")))


def of_rows(length, **phase):
    return traced(
        lambda g, x, s, b: g.layernorm(x, s, b, 1e-5, **phase),
        *(((rows, length), "bfloat16") for rows in (8, 1, 1)),
    )


def of_channels(function=lambda g, y, r: y):
    def normalized(g, x, r, *parameters):
        return function(g, g.batchnorm(x, *parameters, 1e-5, 0.1)[0], r)

    each = [((1, 16, 1, 1), "float32")] * 4
    return traced(normalized, (IMAGE, "bfloat16"), (IMAGE, "bfloat16"), *each)


PATTERNS = {
    "layernorm": lambda: of_rows(4096),
    "layernorm inference of long rows": lambda: of_rows(4097, norm_forward_phase="INFERENCE"),
    "layernorm of short rows": lambda: of_rows(256),
    "layernorm ": lambda: of_rows(257),
    "batchnorm": of_channels,
    "batchnorm + epilogue": lambda: of_channels(lambda g, y, r: g.relu(y)),
    "batchnorm + residual epilogue": lambda: of_channels(lambda g, y, r: g.relu(y + r)),
    "conv_fprop + epilogue": lambda: traced(
        lambda g, x, w, r: g.conv_fprop(x, w) + r,
        *((shape, "bfloat16") for shape in (IMAGE, (16, 16, 1, 1), IMAGE)),
    ),
    "conv_fprop": lambda: conv(IMAGE, (8, 16, 3, 3), stride=[2, 2]),
    "conv_fprop depthwise": lambda: conv(IMAGE, (16, 1, 3, 3)),
    "conv_fprop depthwise ": lambda: conv(IMAGE, (32, 1, 3, 3)),  # with a multiplier of two
    "conv_fprop grouped": lambda: conv(IMAGE, (8, 4, 3, 3)),
    "conv_fprop few channels": lambda: conv((2, 3, 9, 9), (8, 3, 3, 3)),
    "conv_fprop few channels ": lambda: conv((2, 1, 9, 9), (8, 1, 3, 3)),
    "conv_fprop few features": lambda: conv(IMAGE, (7, 16, 3, 3)),
    "conv_fprop 3-D dilated": lambda: conv((2, 16, 9, 9, 9), (8, 16, 3, 3, 3), dilation=[1, 2, 1]),
    "conv_dgrad 1-D": lambda: dgrad((2, 16, 7), (16, 8, 3), [2, 8, 9]),
    "conv_dgrad depthwise": lambda: dgrad((2, 16, 7, 7), (16, 1, 3, 3), [2, 16, 9, 9]),
    "conv_dgrad depthwise strided": lambda: dgrad(
        (2, 16, 4, 4), (16, 1, 3, 3), [2, 16, 9, 9], stride=[2, 2]
    ),
    "conv_dgrad float32": lambda: dgrad((2, 16, 7, 7), (16, 8, 3, 3), None, "float32"),
    "conv_wgrad depthwise": lambda: wgrad(IMAGE, (2, 16, 7, 7), [16, 1, 3, 3]),
    "conv_wgrad": lambda: wgrad(IMAGE, (2, 16, 7, 7), None),
    "matmul": lambda: matmul("float16"),
    "matmul float32": lambda: matmul("float32"),
    "matmul float8": lambda: matmul("float8_e4m3fn", "float8_e5m2"),
    "matmul float8 in fast_float_for_fp8": lambda: matmul("float8_e4m3fn", function=quick),
    "matmul int8": lambda: matmul("int8"),
    "prologue of int8 + matmul": lambda: matmul("bfloat16", "int8", of_int8),
    "prologue + matmul + epilogue": lambda: matmul("bfloat16", function=surrounded),
    "matmul + reduction of everything + epilogue": lambda: matmul(
        "bfloat16", function=scaled_by_products
    ),
    "matmul + bias": lambda: with_a_term((1, 1, 8)),
    "matmul + bias ": lambda: with_a_term((1, 1, 8), lambda g, y, b: g.bias(y, b)),
    "matmul + epilogue": lambda: with_a_term((1, 16, 8)),  # a residual
    "matmul + epilogue ": lambda: with_a_term((1, 16, 1)),  # of rows
    "matmul + epilogue  ": lambda: with_a_term((1, 1, 8), lambda g, y, b: g.relu(y + b)),
    "matmul + epilogue   ": lambda: with_a_term((1, 1, 8), lambda g, y, b: y * b),
    "conv_fprop + epilogue ": lambda: traced(
        lambda g, x, w, b: g.conv_fprop(x, w) + b,
        *((shape, "bfloat16") for shape in (IMAGE, (16, 16, 1, 1), (1, 16, 1, 1))),
    ),
    "reduction of rows": lambda: total((4, 8), [4, 1], "float32"),
    "reduction of rows ": lambda: total((4, 8, 3, 3), [4, 1, 3, 3]),  # channels lie last
    "reduction of columns": lambda: total((4, 8), [1, 8]),
    "reduction of columns ": lambda: total((4, 8, 3, 3), [1, 8, 1, 1]),
    "reduction of some dimensions": lambda: total((4, 8, 3, 3), [4, 8, 1, 1]),
    "reduction of everything": lambda: total((4, 8, 1), [1, 1, 1]),
    "reduction of columns int8": lambda: total((4, 8), [1, 8], "int8"),
    "pointwise": lambda: traced(lambda g, x: g.relu(x * 2.0), (ROW, "float32")),
    "pointwise bool": lambda: traced(
        lambda g, x, m: g.binary_select(x, 0.0, m), (ROW, "bfloat16"), (ROW, "bool")
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_graph_is_filed_under_what_it_is_at_heart(name):
    assert losses.pattern(PATTERNS[name]()) == name.strip()


def test_names_of_tensors_and_sizes_do_not_matter():
    small = traced(lambda g, a, b: g.matmul(a, b), (ROW, "float16"), ((1, 32, 8), "float16"))
    large = traced(lambda g, x, y: g.matmul(x, y), ((1, 99, 7), "float16"), ((1, 7, 5), "float16"))
    assert losses.pattern(small) == losses.pattern(large)


def test_a_product_of_several_results_has_no_bias():
    """Attention with its Stats is no product of matrices."""

    def attended(g, q, k, v, b):
        out, stats = g.sdpa(q, k, v, generate_stats=True)
        return out + b, stats

    heads = ((1, 2, 16, 32), "bfloat16")
    found = losses.pattern(traced(attended, heads, heads, heads, ((1, 1, 1, 32), "bfloat16")))
    assert "bias" not in found
    assert found.endswith("epilogue")


LAYERS = {
    "Linear": lambda rngs: (jnn.Linear(8, 16, dtype="bfloat16", rngs=rngs), (32, 8)),
    "LinearGeneral": lambda rngs: (
        jnn.LinearGeneral(8, (2, 8), dtype="bfloat16", rngs=rngs),
        (32, 8),
    ),
    "Einsum": lambda rngs: (
        jnn.Einsum("td,dhk->thk", (8, 2, 4), (2, 4), dtype="bfloat16", rngs=rngs),
        (32, 8),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_flax_are_filed_under_the_bias_that_they_add(name):
    layer, shape = LAYERS[name](nnx.Rngs(0))
    traced = jax.make_jaxpr(layer)(jax.ShapeDtypeStruct(shape, "bfloat16"))
    (spec,) = (e.params["spec"] for e in traced.eqns if "spec" in e.params)
    assert losses.pattern(spec) == "matmul + bias"


@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_every_node_has_a_pattern_and_only_pointwise_ones_share_it(method):
    cases = [case for case in node_cases() if case.name.startswith(f"{method}_")]
    found = {losses.pattern(c.function.trace(*c.avals)[1].spec).split()[0] for c in cases}
    own = REGISTRY[method].pattern is not REGISTRY["relu"].pattern
    if not own or REGISTRY[method].moves:
        assert "pointwise" in found
    else:
        assert method in found


def test_what_is_read_decides_whether_a_normalization_is_inference():
    row = ((8, 2048), "bfloat16")
    few = traced(lambda g, x, s: g.rmsnorm(x, s, epsilon=1e-5)[0], row, ((1, 2048), "bfloat16"))
    both = traced(lambda g, x, s: g.rmsnorm(x, s, epsilon=1e-5), row, ((1, 2048), "bfloat16"))
    assert [losses.pattern(spec) for spec in (few, both)] == ["rmsnorm inference", "rmsnorm"]


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch):
    """A table of one architecture with two losses."""
    patterns = {
        "conv_dgrad depthwise": {"a/7x7/dgrad": 0.4, "b/3x3/dgrad": 0.625},
        "pointwise": {"c": 0.9, "d": 0.91},
    }
    part = {"device": "NVIDIA X", "date": "2026-01-02", "cudnn": "9.99.0", "jax": "0.0"}
    monkeypatch.setattr(losses, "table", lambda: {"91": {**part, "patterns": patterns}})


def test_a_loss_says_by_how_much_and_where_it_was_measured(table):
    found = losses.loss(PATTERNS["conv_dgrad depthwise"](), 91)
    assert found == losses.Loss(
        "conv_dgrad depthwise",
        0.625,
        "NVIDIA X",
        "2026-01-02",
        "9.99.0",
        ("a/7x7/dgrad", "b/3x3/dgrad"),
    )
    for words in ("'conv_dgrad depthwise'", "62%", "2 cases", "NVIDIA X", "9.99.0", "2026-01-02"):
        assert words in str(found)


def test_what_is_not_listed_is_no_loss(table):
    assert losses.loss(PATTERNS["conv_dgrad depthwise strided"](), 91) is None
    assert losses.loss(PATTERNS["matmul"](), 91) is None


def test_an_architecture_that_nobody_measured_has_no_losses(table):
    assert losses.loss(PATTERNS["conv_dgrad depthwise"](), 90) is None
    assert losses.loss(PATTERNS["conv_dgrad depthwise"](), 9) is None


def test_who_names_an_engine_gets_it(table):
    def relu(g, x):
        return g.relu(x)

    assert losses.loss(traced(relu, (ROW, "float32")), 91) is not None
    assert losses.loss(traced(relu, (ROW, "float32"), engine=1), 91) is None


def test_determinism_is_not_left_to_xla(table):
    def relu(g, x):
        return g.relu(x)

    def dgrad(g, dy, w):
        return g.conv_dgrad(dy, w, out_dims=[2, 16, 9, 9])

    avals = ((2, 16, 7, 7), "bfloat16"), ((16, 1, 3, 3), "bfloat16")
    assert losses.loss(traced(dgrad, *avals), 91) is not None
    assert losses.loss(traced(dgrad, *avals, deterministic=True), 91) is None
    assert losses.loss(traced(relu, (ROW, "float32"), deterministic=True), 91) is not None
