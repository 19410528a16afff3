"""What XLA runs of a graph on a GPU is what a user of JAX would have written; no GPU is needed."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import all_cases
from transformations import SMALL, is_float, spec_and_operands

import jax_cudnn as jc
from jax_cudnn._core.graph.xla_form import NARROW, evaluate
from jax_cudnn._core.primitive import bind

deviceless = [
    pytest.mark.deviceless,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for CUDA is not installed",
    ),
]
F32, BF16, FP8 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
TRITON = {"xla_gpu_enable_triton_gemm": True}


def aval(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


# -- no more kernels and memory than plain JAX -----------------------------------------------------


def batched(function):
    """A graph of matrices, rows and images with a batch of one."""
    made = jc.graph(function)

    def run(*arrays):
        given = (x.reshape((1,) * (3 - x.ndim) + x.shape) for x in arrays)
        return jax.tree.map(lambda y: y[0], made(*given))

    return run


def of_images(function):
    """A graph of NHWC images, a weight (K, *window, C) and vectors."""
    made = jc.graph(function)

    def run(*arrays):
        given = (x[:, None, None] if x.ndim == 1 else jnp.moveaxis(x, -1, -3) for x in arrays)
        return jnp.moveaxis(made(*(x.reshape((1,) * (4 - x.ndim) + x.shape) for x in given)), 1, -1)

    return run


def conv(x, w):
    dims = ("NHWC", "OHWI", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2, dimension_numbers=dims)


def folded(x, w, s, b, *residual):
    w = (w.astype(F32) * s[:, None, None, None].astype(F32)).astype(w.dtype)
    return jax.nn.relu(sum(residual, conv(x, w) + b.astype(w.dtype)))


def conv_epilogue(g, x, w, s, b, *residual):
    y = g.bias(g.mul(g.conv_fprop(x, w, padding=[1, 1]), s), b)
    for r in residual:
        y = g.add(y, r)
    return g.relu(y).set_data_type(BF16)


def dgrad(g, dy, w):
    return g.conv_dgrad(loss=dy, filter=w, padding=[1, 1])


def plain_dgrad(dy, w):
    return jax.linear_transpose(lambda x: conv(x, w), jax.ShapeDtypeStruct(IMAGE.shape, BF16))(dy)[
        0
    ]


def softmax(g, x):
    rows = [*x.shape[:-1], 1]
    each = g.exp(g.sub(x, g.reduction(x, mode="MAX", out_dims=rows)))
    return g.div(each, g.reduction(each, mode="ADD", out_dims=rows)).set_data_type(BF16)


def int8_weights(g, x, w):
    return g.matmul(x, g.identity(w).set_data_type(BF16))


def rows(x, w):
    """``x @ w.T`` of float8."""
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=BF16)


def float8(x, w):
    product = jc.graph(
        lambda g, x, w: g.matmul(x, w.set_stride([2**21, 1, 1024])).set_data_type(BF16)
    )
    return product(x[None], w.T[None])[0]


def moments(x, axes):
    mean = jnp.mean(x, axes, keepdims=True)
    return mean, jnp.maximum(jnp.mean(x * x, axes, keepdims=True) - mean * mean, 0)


def normalized(x, s, b, axes=1, kept=False):
    wide = x.astype(F32)
    mean, var = (
        moments(wide, axes)
        if kept
        else (wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True))
    )
    inv = jax.lax.rsqrt(var + 1e-5)
    y = ((wide - mean) * inv * s + b).astype(x.dtype)
    return (y, mean, inv) if kept else y


def decoded(q, k, v):
    b, s, n, h = q.shape
    q = q.reshape(b, s, k.shape[2], -1, h)
    scores = jnp.einsum("bsngh,btnh->bngst", q, k, preferred_element_type=F32) * h**-0.5
    y = jnp.einsum("bngst,btnh->bsngh", jax.nn.softmax(scores).astype(v.dtype), v)
    return y.reshape(b, s, n, h)


IMAGE, WEIGHT, VECTOR = aval(32, 28, 28, 64), aval(64, 3, 3, 64), aval(64)
X, W, B, Y = aval(4096, 1024), aval(1024, 2048), aval(2048), aval(4096, 2048)
SCALE = aval(1024, dtype=F32)

PATTERNS = {
    "int8 weights, few rows": (
        batched(int8_weights),
        lambda x, w: x @ w.astype(BF16),
        (aval(64, 1024), aval(1024, 2048, dtype=jnp.int8)),
    ),
    "softmax of reductions": (jc.graph(softmax), jax.nn.softmax, (X,)),
    "largest magnitude": (
        jc.graph(lambda g, x: g.reduction(x, mode="AMAX")),
        lambda x: jnp.max(jnp.abs(x), keepdims=True).astype(F32),
        (X,),
    ),
    "conv, scale, bias, relu": (of_images(conv_epilogue), folded, (IMAGE, WEIGHT, VECTOR, VECTOR)),
    "conv, scale, bias, residual, relu": (
        of_images(conv_epilogue),
        folded,
        (IMAGE, WEIGHT, aval(64, dtype=F32), aval(64, dtype=F32), IMAGE),
    ),
    "conv, batch norm, relu": (
        of_images(
            lambda g, x, w, *stats: g.relu(
                g.batchnorm_inference(g.conv_fprop(x, w, padding=[1, 1]), *stats)
            )
        ),
        lambda x, w, m, v, s, b: folded(x, w, v * s, b - m * v * s),
        (IMAGE, WEIGHT, *[aval(64, dtype=F32)] * 4),
    ),
    "dgrad": (of_images(dgrad), plain_dgrad, (IMAGE, WEIGHT)),
    "bias, relu": (
        batched(lambda g, x, w, b: g.relu(g.bias(g.matmul(x, w), b))),
        lambda x, w, b: jax.nn.relu(x @ w + b),
        (X, W, B),
    ),
    "bias, gelu": (
        batched(lambda g, x, w, b: g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        (X, W, B),
    ),
    "scalar, bias, residual": (
        batched(lambda g, x, w, b, r: g.add(g.bias(g.mul(g.matmul(x, w), 0.3), b), r)),
        lambda x, w, b, r: x @ w * 0.3 + b + r,
        (X, W, B, Y),
    ),
    "float8 product": (float8, rows, (aval(4096, 1024, dtype=FP8), aval(2048, 1024, dtype=FP8))),
    "layer norm": (jc.ops.layer_norm, normalized, (X, SCALE, SCALE)),
    "layer norm, statistics": (
        functools.partial(jc.ops.layer_norm, return_statistics=True),
        functools.partial(normalized, kept=True),
        (X, SCALE, SCALE),
    ),
    "instance norm": (
        jc.ops.instance_norm,
        lambda x, s, b: normalized(x, s, b, (1, 2), True)[0],
        (IMAGE, aval(64, dtype=F32), aval(64, dtype=F32)),
    ),
    "decoding, grouped heads": (
        jc.ops.dot_product_attention,
        decoded,
        (aval(4, 1, 32, 128), *[aval(4, 2048, 8, 128)] * 2),
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=deviceless) for name in PATTERNS])
def test_xla_gets_no_more_kernels_and_memory_than_from_plain_jax(name):
    from absent_gpus import compiled, operations

    ours, plain, avals = PATTERNS[name]
    with jc.implementation("xla"):
        found = compiled(ours, *avals, **TRITON)
    best = compiled(plain, *avals, **TRITON)
    assert len(operations(found)) <= len(operations(best)), (operations(found), operations(best))
    for tests in (" compare(", " is-finite(", " reduce-precision("):  # of each element
        assert found.as_text().count(tests) <= best.as_text().count(tests)
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (found, best)]
    assert sizes[0] <= 1.01 * sizes[1] + 4096


# -- accuracy, against float64 ---------------------------------------------------------------------


def run(graph, *arrays, read=()):
    """The form's results, and the graph."""
    spec = graph.trace(*arrays)[1].spec
    return jax.jit(functools.partial(evaluate, spec, products=NARROW, read=read))(*arrays), spec


def drawn(key, *shape, dtype=BF16, scale=1.0):
    return (jax.random.normal(key, shape) * scale).astype(dtype)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("residual", [False, True])
def test_an_epilogue_costs_a_few_roundings_instead_of_one(key, dtype, residual):
    x, r = drawn(key, 2, 64, 9, 9, dtype=dtype), drawn(key, 2, 32, 7, 7, dtype=dtype)
    w = drawn(key, 32, 64, 3, 3, dtype=dtype, scale=24**-1)
    s, b = (1 + 0.3 * drawn(key, 1, 32, 1, 1, dtype=F32) for _ in range(2))

    @jc.graph
    def epilogue(g, x, w, s, b, *residual):
        y = g.bias(g.mul(g.conv_fprop(x, w), g.mul(s, 1.5)), b)
        for r in residual:
            y = g.add(y, r)
        return g.swish(y).set_data_type(dtype)

    given = (x, w, s, b, *((r,) * residual))
    (got,), spec = run(epilogue, *given)
    (exact,), (once,) = (f(spec, given) for f in (oracle.evaluate, oracle.rounded))
    # Of the weight, the convolution, the bias, each sum and the result: the root of six.
    assert oracle.distance(got, exact) <= 2.5 * oracle.distance(once, exact)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_scale_goes_into_the_weight(dims):
    epilogue = jc.graph(lambda g, x, w, s: g.mul(g.conv_fprop(x, w), s).set_data_type(BF16))
    sides = ((2, 64), 9), ((32, 64), 3), ((1, 32), 1)
    avals = [aval(*lead, *(side,) * dims) for lead, side in sides]
    spec = epilogue.trace(*avals)[1].spec
    text = jax.jit(functools.partial(evaluate, spec, products=NARROW)).lower(*avals).as_text()
    assert f"tensor<2x32{'x7' * dims}xbf16>" in text
    assert re.search(f"multiply.*tensor<32x64{'x3' * dims}x", text)
    assert not re.search(f"multiply.*tensor<2x32{'x7' * dims}x", text)


def test_a_product_stays_wide_where_its_error_would_grow(key):
    x, w = drawn(key, 1, 64, 64), drawn(key, 1, 64, 64, scale=0.5)
    for graph in (
        jc.graph(lambda g, x, w: g.exp(g.matmul(x, w)).set_data_type(BF16)),
        jc.graph(lambda g, x, w: g.reduction(g.matmul(x, w), mode="ADD", out_dims=[1, 64, 1])),
        jc.graph(lambda g, x, w: g.matmul(x, w).set_data_type(F32)),
    ):
        (got,), spec = run(graph, x, w)
        (limit,) = oracle.tolerance(spec, (x, w), on_gpu=False)
        assert oracle.distance(got, oracle.evaluate(spec, (x, w))[0]) <= limit


@pytest.mark.parametrize("between", ["bias", "transpose", "exp"])
def test_a_product_is_written_in_16_bits_before_what_keeps_its_error(between):
    @jc.graph
    def product(g, x, w):
        y = g.matmul(x, w)
        between_them = {
            "bias": lambda: g.bias(y, 2.0),
            "transpose": lambda: g.transpose(y, [0, 2, 1]),
            "exp": lambda: g.exp(y),
        }
        return between_them[between]().set_data_type(BF16)

    spec = product.trace(aval(1, 32, 64), aval(1, 64, 16))[1].spec
    form = functools.partial(evaluate, spec, products=NARROW)
    (dot,) = re.findall(
        "dot_general.*-> tensor<.*x(.*)>",
        jax.jit(form).lower(*[aval(*t.shape) for t in spec.input_tensors]).as_text(),
    )
    assert dot == ("f32" if between == "exp" else "bf16")


def test_results_and_what_is_read_elsewhere_are_rounded_as_the_graph_says(key):
    x = jax.random.normal(key, (1, 256))

    @jc.graph
    def inside(g, x):
        y = g.mul(x, 1.0).set_data_type("bfloat16")
        return y, g.sub(x, y).set_data_type("float32")

    (y, rest), spec = run(inside, x)
    np.testing.assert_array_equal(rest, x - y.astype(F32))
    in_float8 = jc.graph(lambda g, x: g.sub(x, g.mul(x, 1.0).set_data_type(FP8)).set_data_type(F32))
    (rest,), float8 = run(in_float8, x)
    np.testing.assert_array_equal(rest, x - x.astype(FP8).astype(F32))
    # By an operation that XLA does not leave out, and only there.
    for graph, read, kept in ((spec, spec.outputs, True), (spec, (), False), (float8, (), True)):
        form = functools.partial(evaluate, graph, products=NARROW, read=read)
        assert ("reduce_precision" in jax.jit(form).lower(x).as_text()) == kept


def test_one_pass_loses_no_more_than_the_square_of_the_mean_in_deviations(key):
    """And elements of float32 keep two passes: they can have a mean of many more deviations."""
    scale, bias = jnp.ones((1, 512)), jnp.zeros((1, 512))
    norm = jc.graph(lambda g, x, s, b: g.layernorm(x, s, b, 1e-12))
    for mean in (0.0, 4.0, 32.0):
        for dtype, passes in ((BF16, 1), (F32, 2)):
            x = (mean + jax.random.normal(key, (64, 512))).astype(dtype)
            (_, _, inv), _ = run(norm, x, scale, bias)
            want = 1 / np.std(np.asarray(x, np.float64), axis=1, keepdims=True)
            limit = 2**-24 * (8 if passes == 2 else 8 * (1 + mean**2))
            assert np.max(np.abs(inv / want - 1)) <= limit, (mean, dtype)


def test_maxima_have_no_rule_for_nan(key):
    x = jax.random.normal(key, (8, 16)).at[3, 5].set(jnp.nan)
    largest = jc.graph(lambda g, x: g.reduction(x, mode="MAX", out_dims=[8, 1]))
    got = np.asarray(run(largest, x)[0][0])[:, 0]
    assert np.isnan(got[3])
    np.testing.assert_array_equal(np.delete(got, 3), np.delete(np.max(x, 1), 3))
    assert np.isfinite(largest(x)).all()  # on a CPU, as with cuDNN


def test_gelu_keeps_the_digits_of_small_results():
    x = np.linspace(-5, 0, 101, dtype=np.float32)
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x.astype(np.float64) ** 3)
    got = jc.graph(lambda g, x: g.gelu_approx_tanh(x))(x)
    np.testing.assert_allclose(got, x / (1 + np.exp(-2 * u)), rtol=1e-5)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_a_graph_and_its_gradient_have_a_form(case):
    """Whatever a mesh, a refusal or a measurement leaves to XLA."""
    spec, operands = spec_and_operands(case, SMALL)
    floats = [i for i, x in enumerate(operands) if is_float(x)]

    def gradients(*moving):
        given = {**dict(enumerate(operands)), **dict(zip(floats, moving, strict=True))}
        results, pull = jax.vjp(lambda *x: bind(spec, case.name, *x), *given.values())
        return pull(results)

    try:
        program = jax.make_jaxpr(gradients)(*(operands[i] for i in floats))
    except (jc.GraphError, jc.GraphTypeError):  # it has no derivative
        program = jax.make_jaxpr(lambda *x: bind(spec, case.name, *x))(*operands)
    graphs = [e.params["spec"] for e in program.eqns if e.primitive.name == "cudnn"]
    assert graphs
    for graph in graphs:
        form = functools.partial(evaluate, graph, products=NARROW)
        made = jax.eval_shape(form, *(aval(*t.shape, dtype=t.dtype) for t in graph.input_tensors))
        assert [(x.shape, str(x.dtype)) for x in made] == [
            (t.shape, t.dtype) for t in graph.output_tensors
        ]
