"""Nodes of normalizations in graphs: values, derivatives, vmap, memory, plans.

The functions of jax_cudnn.ops are in test_norms.py and test_batch_norm.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from transformations import graphs_of, methods, primitives, relative_error, shapes_of

import jax_cudnn as jc
from jax_cudnn._core.graph import layout
from jax_cudnn._core.graph.wire import wire
from jax_cudnn._core.planning import losses

S = jax.ShapeDtypeStruct


def drawn(shapes, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape) + 0.5, dtype) for shape in shapes]


def spec_of(function, *shapes, dtype="bfloat16"):
    return jc.graph(function).trace(*(S(shape, dtype) for shape in shapes))[1].spec


# -- values ----------------------------------------------------------------------------------------

ROWS = {
    "a matrix": ((6, 10), (1, 10)),
    "rank 1": ((10,), (10,)),
    "rank 3": ((2, 3, 10), (1, 1, 10)),
    "rank 5": ((2, 1, 3, 2, 5), (1, 1, 1, 1, 5)),
    "two last": ((4, 3, 5), (1, 3, 5)),
    "the first": ((6, 4), (6, 1)),
    "first and last": ((3, 4, 5), (3, 1, 5)),
    "one row": ((1, 7), (1, 7)),
    "one element": ((4, 1), (1, 1)),
}
EXAMPLES = {
    "rank 3": ((3, 4, 6), (3, 1, 6)),
    "two last": ((2, 3, 4, 5), (2, 1, 4, 5)),
    "a row each": ((3, 6), (3, 6)),
    "one example": ((1, 4, 6), (1, 1, 6)),
}
CHANNELS = {
    "images": ((2, 3, 4, 5), (1, 3, 1, 1)),
    "signals": ((2, 3, 7), (1, 3, 1)),
    "volumes": ((2, 3, 2, 3, 4), (1, 3, 1, 1, 1)),
    "one image": ((1, 8, 2, 2), (1, 8, 1, 1)),
}
SHAPES = {
    **dict.fromkeys(("rmsnorm", "layernorm"), ROWS),
    "adalayernorm": EXAMPLES,
    **dict.fromkeys(("instancenorm", "batchnorm"), CHANNELS),
}
KINDS = tuple(SHAPES)
each_kind = pytest.mark.parametrize("kind", KINDS)
SIZES = [(kind, name) for kind, table in SHAPES.items() for name in table]
OPTIONAL_BIAS = ("rmsnorm", "adalayernorm")


def forward(kind, bias=True, phase="TRAINING"):
    """Graph function of x, scale and bias (and, of batchnorm, running statistics)."""
    if kind == "batchnorm":
        return lambda g, x, scale, bias, mean, var: [
            *g.batchnorm(x, scale, bias, mean, var, 1e-3, 0.2)
        ]

    def function(g, x, scale, *given):
        given = {"bias": given[0]} if given else {}
        made = getattr(g, kind)(x, scale, **given, epsilon=1e-3, norm_forward_phase=phase)
        return [made] if phase == "INFERENCE" else [*made]

    return function


def shapes_for(kind, name, bias=True):
    x, scale = SHAPES[kind][name]
    return [x, scale, *([scale] if bias else []), *([scale] * 2 if kind == "batchnorm" else [])]


def backward(kind):
    """Graph function of the cotangent, x, scale and the statistics."""

    def function(g, grad, x, scale, *statistics):
        names = ("inv_variance",) if kind == "rmsnorm" else ("mean", "inv_variance")
        given = dict(zip(names, statistics, strict=True))
        more = {"has_dbias": True} if kind == "rmsnorm" else {}
        return [*getattr(g, f"{kind}_backward")(grad, x, scale, **given, **more)]

    return function


def reduced(kind, x, scale):
    """The normalized dimensions."""
    if kind in ("instancenorm", "batchnorm"):
        return (*((0,) if kind == "batchnorm" else ()), *range(2, len(x)))
    return tuple(i for i in range(kind == "adalayernorm", len(x)) if scale[i] != 1)


def plain(kind, epsilon=1e-3):
    """y and the statistics in jnp, in the precision of the operands."""

    def function(x, scale, bias=0.0, *_):
        axes = reduced(kind, x.shape, scale.shape)
        mean = jnp.mean(x, axes, keepdims=True)
        from_mean = x if kind == "rmsnorm" else x - mean
        inv = (jnp.mean(from_mean**2, axes, keepdims=True) + epsilon) ** -0.5
        return [from_mean * inv * scale + bias, *([] if kind == "rmsnorm" else [mean]), inv]

    return function


IN_FLOAT16 = [(kind, next(iter(table)), "float16") for kind, table in SHAPES.items()]


@pytest.mark.parametrize(
    ("kind", "name", "dtype"), [*((*s, "float32") for s in SIZES), *IN_FLOAT16]
)
def test_forward_and_backward_are_those_of_float64(kind, name, dtype):
    """In training and inference; the backward on the forward's statistics."""
    operands = drawn(shapes_for(kind, name), dtype)
    if kind == "batchnorm":
        operands[3:] = [abs(x.astype(jnp.float32)) + 0.5 for x in operands[3:]]
    function = jc.graph(forward(kind))
    outputs = jax.jit(function)(*operands)
    oracle.check_outputs(function.trace(*operands)[1].spec, operands, outputs, on_gpu=False)
    assert [str(v.dtype) for v in outputs] == [dtype, *["float32"] * (len(outputs) - 1)]
    if kind != "batchnorm":
        inference = jc.graph(forward(kind, phase="INFERENCE"))
        np.testing.assert_array_equal(jax.jit(inference)(*operands)[0], outputs[0])
    (grad,) = drawn([operands[0].shape], dtype, seed=1)
    statistics = outputs[1 : 2 if kind == "rmsnorm" else 3]
    of_forward = [grad, *operands[:2], *statistics]
    gradients = jc.graph(backward(kind))
    outputs = jax.jit(gradients)(*of_forward)
    spec = gradients.trace(*of_forward)[1].spec
    if np.prod([operands[0].shape[i] for i in reduced(kind, *SHAPES[kind][name])]) > 1:
        oracle.check_outputs(spec, of_forward, outputs, on_gpu=False)
    else:
        np.testing.assert_allclose(outputs[0], np.zeros_like(outputs[0]), atol=1e-3)
    assert [v.dtype for v in outputs[1:]] == [operands[1].dtype] * 2


@pytest.mark.parametrize("kind", OPTIONAL_BIAS)
def test_without_a_bias(kind):
    operands = drawn(shapes_for(kind, "rank 3", bias=False))
    function = jc.graph(forward(kind))
    outputs = function(*operands)
    oracle.check_outputs(function.trace(*operands)[1].spec, operands, outputs, on_gpu=False)


@each_kind
def test_the_backward_node_is_the_gradient(kind):
    """Of the forward's y by input, scale and bias."""
    name = next(iter(SHAPES[kind]))
    operands = drawn(shapes_for(kind, name))
    operands[3:] = [abs(x) for x in operands[3:]]
    function = jc.graph(forward(kind))
    outputs, pull = jax.vjp(function, *operands)
    (grad,) = drawn([operands[0].shape], seed=1)
    zeros = [jnp.zeros_like(v) for v in outputs[1:]]
    statistics = outputs[1 : 2 if kind == "rmsnorm" else 3]
    node = jc.graph(backward(kind))(grad, *operands[:2], *statistics)
    want = jax.vjp(lambda *o: plain(kind)(*o)[0], *operands[:3])[1](grad)
    for a, b, c in zip(pull([grad, *zeros])[:3], node, want, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(b, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "batchnorm"])
def test_derivatives_in_inference_are_those_in_training(kind):
    operands = drawn(shapes_for(kind, next(iter(SHAPES[kind]))))
    (tangent,) = drawn([operands[0].shape], seed=1)

    def both(phase):
        y = lambda *o: jc.graph(forward(kind, phase=phase))(*o)[0]  # noqa: E731
        along = jax.jvp(lambda x: y(x, *operands[1:]), operands[:1], [tangent])[1]
        return along, *jax.vjp(y, *operands)[1](tangent)

    for a, b in zip(both("INFERENCE"), both("TRAINING"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_phase_may_be_cudnns_own():
    class Member:
        name = "INFERENCE"

    layernorm = lambda g, x, s: g.layernorm(x, s, s, 1e-5, norm_forward_phase=Member)  # noqa: E731
    assert spec_of(layernorm, (4, 8), (1, 8)).calls[0].node.norm_forward_phase == "INFERENCE"


# -- batch norm's running statistics ---------------------------------------------------------------


def images(dtype="float32", seed=0):
    x, scale, bias, mean, var = drawn(shapes_for("batchnorm", "images"), dtype, seed)
    return [x * 3 + 2, scale, bias, mean, abs(var)]


def test_running_statistics_move_to_the_unbiased_variance():
    x, scale, bias, mean, var = images()
    _, _, _, new_mean, new_var = jc.graph(forward("batchnorm"))(x, scale, bias, mean, var)
    of_batch = np.var(np.asarray(x, np.float64), (0, 2, 3), ddof=1, keepdims=True)
    np.testing.assert_allclose(new_var, 0.8 * var + 0.2 * of_batch, rtol=1e-5)
    of_batch = np.mean(np.asarray(x, np.float64), (0, 2, 3), keepdims=True)
    np.testing.assert_allclose(new_mean, 0.8 * mean + 0.2 * of_batch, rtol=1e-5)


def test_gradients_through_running_statistics():
    """Of all results, by all operands."""
    operands = images()

    def want(x, scale, bias, mean, var):
        y, of_batch, inv = plain("batchnorm")(x, scale, bias)
        unbiased = jnp.var(x, (0, 2, 3), keepdims=True, ddof=1)
        moved = mean + 0.2 * (of_batch - mean), var + 0.2 * (unbiased - var)
        return [y, of_batch, inv, *moved]

    got = jc.graph(forward("batchnorm"))
    cotangents = drawn([v.shape for v in jax.eval_shape(want, *operands)], seed=3)
    for f in (jax.vjp, lambda f, *o: (None, lambda c: jax.jvp(f, o, o)[1])):
        for a, b in zip(f(got, *operands)[1](cotangents), f(want, *operands)[1](cotangents),
                        strict=True):  # fmt: skip
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_flax_has_the_same_batch_norm():
    """Its running variance is the biased one."""
    x, scale, bias, mean, var = images()
    module = nnx.BatchNorm(3, momentum=0.8, epsilon=1e-3, use_fast_variance=False, rngs=nnx.Rngs(0))
    module.scale, module.bias = (nnx.Param(p.ravel()) for p in (scale, bias))
    module.mean, module.var = (nnx.BatchStat(p.ravel()) for p in (mean, var))
    want = module(jnp.moveaxis(x, 1, -1), use_running_average=False)
    y, _, _, new_mean, new_var = jc.graph(forward("batchnorm"))(x, scale, bias, mean, var)
    np.testing.assert_allclose(jnp.moveaxis(y, 1, -1), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new_mean.ravel(), module.mean[...], rtol=1e-5)
    n = x.size // 3
    biased = 0.8 * var + (new_var - 0.8 * var) * (n - 1) / n
    np.testing.assert_allclose(biased.ravel(), module.var[...], rtol=1e-5)
    want = module(jnp.moveaxis(x, 1, -1), use_running_average=True)
    inference = jc.graph(lambda g, *o: g.batchnorm_inference(*o))
    inv = (module.var[...].reshape(var.shape) + 1e-3) ** -0.5
    y = inference(x, module.mean[...].reshape(mean.shape), inv, scale, bias)
    np.testing.assert_allclose(jnp.moveaxis(y, 1, -1), want, rtol=1e-5, atol=1e-5)


def test_inference_and_its_gradient():
    x, scale, bias, mean, var = images()
    inference = jc.graph(lambda g, *o: g.batchnorm_inference(*o))
    want = lambda x, m, i, s, b: (x - m) * i * s + b  # noqa: E731
    operands = [x, mean, var + 0.5, scale, bias]
    got, pull = jax.vjp(inference, *operands)
    value, plain_pull = jax.vjp(want, *operands)
    np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
    for a, b in zip(pull(jnp.cos(x)), plain_pull(jnp.cos(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("port", ["epsilon", "momentum"])
def test_numbers_may_be_arrays(port):
    """With gradients by them."""
    operands, number = images(), jnp.float32(0.3)
    values = {"epsilon": 1e-3, "momentum": 0.2}

    @jc.graph
    def with_array(g, n, x, scale, bias, mean, var):
        return [*g.batchnorm(x, scale, bias, mean, var, **{**values, port: n})]

    def total(f):
        return lambda n: sum(jnp.sum(jnp.sin(v)) for v in f(n))

    def want(n):
        given = {**values, port: n}
        x, scale, bias, mean, var = operands
        y, of_batch, inv = plain("batchnorm", given["epsilon"])(x, scale, bias)
        unbiased = jnp.var(x, (0, 2, 3), keepdims=True, ddof=1)
        m = given["momentum"]
        return [y, of_batch, inv, mean + m * (of_batch - mean), var + m * (unbiased - var)]

    got = jax.value_and_grad(total(lambda n: with_array(n, *operands)))(number)
    np.testing.assert_allclose(got, jax.value_and_grad(total(want))(number), rtol=2e-4)


# -- vmap ------------------------------------------------------------------------------------------

# kind, which operands are mapped (x, scale, all) -> method and shape of x in the batched graph
FOLDED = {
    ("rmsnorm", "first"): ("rmsnorm", (18, 10)),
    ("layernorm", "first"): ("layernorm", (18, 10)),
    ("layernorm", "second"): ("adalayernorm", (3, 6, 10)),
    ("layernorm", "all"): ("adalayernorm", (3, 6, 10)),
    ("adalayernorm", "all"): ("adalayernorm", (9, 4, 6)),
    ("instancenorm", "first"): ("instancenorm", (6, 3, 4, 5)),
    ("instancenorm", "all"): ("instancenorm", (2, 9, 4, 5)),
    ("batchnorm", "first"): ("batchnorm", (2, 9, 4, 5)),
    ("batchnorm", "all"): ("batchnorm", (2, 9, 4, 5)),
}
FOLDED_BACK = {
    "layernorm": ("adalayernorm_backward", (3, 6, 10)),
    "adalayernorm": ("adalayernorm_backward", (9, 4, 6)),
    "instancenorm": ("instancenorm_backward", (2, 9, 4, 5)),
    "batchnorm": ("batchnorm_backward", (2, 9, 4, 5)),
}


def mapped(function, shapes, which):
    """The function under vmap, and its operands: ``which`` are mapped."""
    moving = {"first": {0}, "second": {1}, "all": {*range(len(shapes))}}[which]
    axes = tuple(0 if i in moving else None for i in range(len(shapes)))
    operands = [
        abs(x) for x in drawn([(3, *s) if i in moving else s for i, s in enumerate(shapes)])
    ]
    return jax.vmap(function, in_axes=axes), operands, axes


def assert_each_is_right(function, batched, operands, axes):
    """A batch is one element after the other; without any loop."""
    assert not {"scan", "while"} & {*primitives(jax.make_jaxpr(batched)(*operands))}
    got = jax.tree.leaves(jax.jit(batched)(*operands))
    single = jax.jit(function)
    for i in range(3):
        one = [x if a is None else x[i] for x, a in zip(operands, axes, strict=True)]
        for a, b in zip(got, jax.tree.leaves(single(*one)), strict=True):
            assert relative_error(a[i], b) < 1e-5


@pytest.mark.parametrize(("kind", "which"), FOLDED)
def test_forwards_take_a_dimension_in(kind, which):
    function = jc.graph(forward(kind))
    batched, operands, axes = mapped(function, shapes_for(kind, next(iter(SHAPES[kind]))), which)
    (spec,) = graphs_of(batched, *operands)
    method, shape = FOLDED[kind, which]
    assert methods(spec).count(method) == 1
    assert shapes_of(spec, method)["input"] == shape
    assert_each_is_right(function, batched, operands, axes)


@pytest.mark.parametrize("which", ["first", "second", "all"])
@each_kind
def test_backwards_take_a_dimension_in(kind, which):
    """Where only the cotangent is mapped, or only x, too: sums are of each by itself."""
    x, scale = next(iter(SHAPES[kind].values()))
    axes = reduced(kind, x, scale)
    one = tuple(1 if i in axes else n for i, n in enumerate(x))
    shapes = [x, x, scale, *[one] * (1 if kind == "rmsnorm" else 2)]
    function = jc.graph(backward(kind))
    batched, operands, axes = mapped(function, shapes, which)
    (spec,) = graphs_of(batched, *operands)
    if kind == "rmsnorm":  # sums for each, of what cuDNN's DX leaves out
        assert methods(spec).count("rmsnorm_backward") == 1
        assert "reduction" in methods(spec)
    else:
        method, shape = FOLDED_BACK[kind]
        assert methods(spec) == [method]
        assert shapes_of(spec, method)["input"] == shape
    assert_each_is_right(function, batched, operands, axes)


@each_kind
def test_two_vmaps(kind):
    """The inner one over all operands, the outer one over the last, too."""
    function = jc.graph(forward(kind))
    shapes = shapes_for(kind, next(iter(SHAPES[kind])))
    inner, operands, _ = mapped(function, shapes, "all")
    outer = jax.vmap(inner, in_axes=(*[None] * (len(shapes) - 1), 0))
    last = operands[-1]
    stacked = [*operands[:-1], jnp.stack([last, last + 1])]
    assert not {"scan", "while"} & {*primitives(jax.make_jaxpr(outer)(*stacked))}
    got = jax.jit(outer)(*stacked)
    for i in range(2):
        want = jax.jit(inner)(*operands[:-1], last + i)
        for a, b in zip(got, want, strict=True):
            assert relative_error(a[i], b) < 1e-5


@each_kind
def test_an_epsilon_for_each(kind):
    """Nothing folds: XLA computes it, still without a loop."""

    @jc.graph
    def function(g, epsilon, x, scale, *others):
        if kind == "batchnorm":
            return [*g.batchnorm(x, scale, *others, epsilon, 0.2)]
        return [*getattr(g, kind)(x, scale, bias=others[0], epsilon=epsilon)]

    operands = [abs(x) for x in drawn(shapes_for(kind, next(iter(SHAPES[kind]))))]
    epsilons = jnp.float32([1e-3, 0.1, 2.0])
    for axes in ((0, *(None,) * len(operands)), (0,) * (1 + len(operands)), (None, 0, 0)):
        axes = (*axes, *(None,) * (1 + len(operands) - len(axes)))
        given = [
            x if a is None else jnp.stack([x, x + 1, x * 2])
            for x, a in zip(operands, axes[1:], strict=True)
        ]
        given = [epsilons if axes[0] == 0 else epsilons[0], *given]
        assert_each_is_right(function, jax.vmap(function, in_axes=axes), given, axes)


# -- how cuDNN sees them ---------------------------------------------------------------------------


MERGED = {
    # kind, x, scale -> the dimensions behind each of cuDNN's
    ("layernorm", (6, 10), (1, 10)): ((0,), (1,)),
    ("layernorm", (2, 3, 4, 10), (1, 1, 1, 10)): ((0, 1, 2), (3,)),
    ("layernorm", (2, 3, 4, 10), (1, 1, 4, 10)): ((0, 1), (2, 3)),
    ("layernorm", (1, 3, 4, 10), (1, 3, 4, 10)): ((0,), (1, 2, 3)),
    ("layernorm", (3, 4, 10), (3, 4, 10)): ((), (0, 1, 2)),
    ("layernorm", (10,), (10,)): ((), (0,)),
    ("layernorm", (1, 10), (1, 10)): ((0,), (1,)),
    ("layernorm", (1, 1, 10), (1, 1, 10)): ((0, 1), (2,)),
    ("layernorm", (4, 1, 10), (1, 1, 10)): ((0, 1), (2,)),
    ("layernorm", (1, 4, 1, 10), (1, 1, 1, 10)): ((0, 1, 2), (3,)),
    ("layernorm", (4, 8, 1, 10), (1, 8, 1, 10)): ((0,), (1, 2, 3)),
    ("layernorm", (4, 8, 10, 1), (1, 1, 10, 1)): ((0, 1), (2, 3)),
    ("rmsnorm", (2, 1, 3, 1, 4, 10), (1, 1, 1, 1, 1, 10)): ((0, 1, 2, 3, 4), (5,)),
    ("adalayernorm", (3, 4, 10), (3, 1, 10)): ((0,), (1,), (2,)),
    ("adalayernorm", (3, 2, 4, 10), (3, 1, 1, 10)): ((0,), (1, 2), (3,)),
    ("adalayernorm", (3, 2, 4, 10), (3, 1, 4, 10)): ((0,), (1,), (2, 3)),
    # Only their meaning tells these apart: the scale has all that x has.
    ("adalayernorm", (3, 1, 10), (3, 1, 10)): ((0,), (1,), (2,)),
    ("adalayernorm", (1, 4, 10), (1, 1, 10)): ((0,), (1,), (2,)),
    ("adalayernorm", (1, 1, 10), (1, 1, 10)): ((0,), (1,), (2,)),
    ("adalayernorm", (3, 10), (3, 10)): ((0,), (1,)),
}


@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
@pytest.mark.parametrize(("kind", "x", "scale"), MERGED)
def test_dimensions_that_no_tensor_tells_apart_are_one(kind, x, scale, phase):
    """The same with statistics and without."""
    spec = wire(spec_of(forward(kind, phase=phase), x, scale, scale))
    groups = layout.merged(spec)
    assert groups == MERGED[kind, x, scale]
    for tensor in (t for t in spec.tensors if t.value is None):
        dims, strides = layout.view(spec, tensor)
        assert dims == tuple(int(np.prod([tensor.shape[i] for i in g])) for g in groups)
        assert strides[-1] == 1 or dims[-1] == 1


def test_a_residual_does_not_part_what_is_one():
    spec = spec_of(
        lambda g, x, s, r: g.add(g.layernorm(x, s, s, 1e-5)[0], r), (2, 3, 8), (1, 1, 8), (2, 3, 8)
    )
    assert layout.merged(spec) == ((0, 1), (2,))
    spec = spec_of(
        lambda g, x, s, r: g.add(g.layernorm(x, s, s, 1e-5)[0], r), (2, 3, 8), (1, 1, 8), (2, 1, 8)
    )
    assert layout.merged(spec) == ((0,), (1,), (2,)), "this one is broadcast along one of them"


def test_stated_orders():
    """All of one order are merged in that; else there is no matrix to be seen."""

    def transposed(both):
        def function(g, x, s):
            x.set_stride([1, 4])
            y, *_ = g.layernorm(x, s, s, 1e-5)
            return y.set_stride([1, 4]) if both else y

        return spec_of(function, (4, 8), (8, 1)[::-1] if not both else (4, 1))

    assert layout.merged(transposed(both=False)) is None
    # Normalized is the dimension that is last in memory: the first.
    assert layout.merged(transposed(both=True)) == ((1,), (0,))
    spec = transposed(both=True)
    assert layout.view(spec, spec.tensor("x")) == ((8, 4), [4, 1])


# -- errors ----------------------------------------------------------------------------------------

WRONG = {
    "scale": (
        lambda g, x, s, v, w: g.layernorm(x, w, w, 1e-5),
        ["'scale' does not fit", "expected: a scale of shape [1, 1, 8]", "[1, 1, 5]", "jc.ops"],
    ),
    "bias": (
        lambda g, x, s: g.layernorm(x, s, x, 1e-5),
        ["'bias' has the wrong shape", "[1, 1, 8]", "[4, 6, 8]"],
    ),
    "rank": (lambda g, x, s, v: g.layernorm(x, v, v, 1e-5), ["'scale' does not fit"]),
    "channels": (
        lambda g, x, s: g.instancenorm(x, s, s, 1e-5),
        ["'scale' does not fit", "[1, 6, 1]", "[1, 1, 8]"],
    ),
    "example": (
        lambda g, x, s: g.adalayernorm(x, s, epsilon=1e-5),
        ["'scale' does not fit", "[4, 1, 8]", "[1, 1, 8]"],
    ),
    "phase": (
        lambda g, x, s: g.rmsnorm(x, s, epsilon=1e-5, norm_forward_phase="TEST"),
        ["norm_forward_phase", "'TRAINING' or 'INFERENCE'", "'TEST'"],
    ),
    "statistics": (
        lambda g, x, s: g.layernorm_backward(x, x, s, s, s),
        ["'mean' has the wrong shape", "[4, 6, 1]", "[1, 1, 8]"],
    ),
    "gradient": (
        lambda g, x, s: g.rmsnorm_backward(s, x, s, x, has_dbias=False),
        ["'grad' and 'input' disagree", "(1, 1, 8)", "[4, 6, 8]"],
    ),
    "inference": (
        lambda g, x, s: g.batchnorm_inference(x, s, s, s, s),
        ["'mean' has the wrong shape", "[1, 6, 1]"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    function, parts = WRONG[what]
    shapes = ((4, 6, 8), (1, 1, 8), (8,), (1, 1, 5))
    count = function.__code__.co_argcount - 1
    with pytest.raises(jc.GraphError) as caught:
        spec_of(function, *shapes[:count])
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_integers_are_not_normalized():
    with pytest.raises(jc.GraphTypeError, match="rmsnorm does not take int8") as caught:
        spec_of(lambda g, x: g.rmsnorm(x, x, epsilon=1e-5), (4, 8), dtype="int8")
    assert "input.astype(jnp." in str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

BIG = {
    "rmsnorm": ((64, 256), (1, 256)),
    "layernorm": ((64, 256), (1, 256)),
    "adalayernorm": ((4, 16, 256), (4, 1, 256)),
    "instancenorm": ((4, 64, 8, 8), (1, 64, 1, 1)),
    "batchnorm": ((4, 64, 8, 8), (1, 64, 1, 1)),
}


def avals(kind, dtype="bfloat16", extra=0):
    """Of x (and further arrays of its shape), scale and bias, and running statistics."""
    x, scale = BIG[kind]
    of_channels = kind in ("instancenorm", "batchnorm")
    one = S(scale, "float32" if of_channels else dtype)
    return [*[S(x, dtype)] * (1 + extra), *[one] * (4 if kind == "batchnorm" else 2)]


def planned(function, *operands, implementation="cudnn"):
    with jc.target("H200"):
        return jc.plan(jc.graph(function).with_options(implementation=implementation), *operands)


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["adalayernorm", "batchnorm"])  # the others are in test_norms.py
def test_forward_and_backward_nodes_are_planned(kind):
    assert len(planned(forward(kind), *avals(kind)).execution_plans) == 1
    x, scale = BIG[kind]
    one = tuple(1 if i in reduced(kind, x, scale) else n for i, n in enumerate(x))
    statistics = [S(one, "float32")] * (1 if kind == "rmsnorm" else 2)
    operands = [avals(kind)[0], *avals(kind)[:2], *statistics]
    assert len(planned(backward(kind), *operands).execution_plans) == 1


# What is done to y or x; r is an array of its shape.
EPILOGUES = {
    "relu": lambda g, y, r: g.relu(y),
    "swish": lambda g, y, r: g.swish(y),
    "add": lambda g, y, r: g.add(y, r),
    "mul": lambda g, y, r: g.mul(y, r),
    "add, relu": lambda g, y, r: g.relu(g.add(y, r)),
    "mul, gelu": lambda g, y, r: g.gelu(g.mul(y, r)),
}
PROLOGUES = {
    "x + residual": lambda g, x, r: g.add(x, r),
    "x * gate": lambda g, x, r: g.mul(x, r),
    "relu in front": lambda g, x, r: g.relu(x),
}
_ROWS = ("rmsnorm", "layernorm", "adalayernorm")
# Epilogues and prologues that cuDNN takes into the plan of the node, by what H200 plans say.
TAKEN = {
    **{(kind, what): True for kind in _ROWS for what in (*EPILOGUES, *PROLOGUES)},
    **{("batchnorm", what): what in ("relu", "swish", "add, relu") for what in EPILOGUES},
    **{("instancenorm", what): what in ("relu", "add, relu")
       for what in EPILOGUES if what != "swish"},  # which newer versions take
    **{(kind, "1 + scale"): kind != "adalayernorm" for kind in _ROWS},
}  # fmt: skip


def around(kind, what, phase="TRAINING"):
    """Graph function of x, r, scale, bias, ...: the node with something behind or in front."""
    phase = "TRAINING" if kind == "batchnorm" else phase
    node = forward(kind, phase=phase)

    def function(g, x, r, scale, *others):
        dtype = x.dtype
        if what == "1 + scale":
            y, *statistics = node(g, x, g.add(scale, 1.0), *others)
        elif what in PROLOGUES:
            y, *statistics = node(g, PROLOGUES[what](g, x, r), scale, *others)
        else:
            y, *statistics = node(g, x, scale, *others)
            y = EPILOGUES[what](g, y, r)
        return [y.set_data_type(dtype), *statistics]

    return function


# All of one kind of rows and one of channels, and where the others differ.
ASKED = [k for k in TAKEN if k[0] not in ("layernorm", "adalayernorm") or k[1] == "add"]


@pytest.mark.deviceless
@pytest.mark.parametrize(("kind", "what"), ASKED)
def test_neighbours_are_in_the_plan(kind, what):
    """Or refused in words; by default what cuDNN refuses is cut off, and the node still its."""
    operands = avals(kind, extra=1)
    function = around(kind, what)
    if TAKEN[kind, what]:
        assert len(planned(function, *operands).execution_plans) == 1
    else:
        with pytest.raises(jc.UnsupportedGraphError) as caught:
            planned(function, *operands)
        assert caught.value.reasons


@pytest.mark.deviceless
def test_a_sum_in_front_that_is_a_result_is_cut_off():
    """cuDNN writes no operand that it computes for itself: XLA adds, and cuDNN normalizes."""

    def function(g, x, r, scale, bias):
        total = g.add(x, r).set_data_type(x.dtype)
        return [total, *forward("rmsnorm")(g, total, scale, bias)]

    with pytest.raises(jc.UnsupportedGraphError, match="computes an operand of rmsnorm"):
        planned(function, *avals("rmsnorm", extra=1))


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_gradient_behind_is_cut_off(kind, caplog):
    """Of float32 it ends the process that plans, which on a GPU is the user's."""

    def function(g, x, y, scale, bias):
        return g.swish_backward(y, forward(kind)(g, x, scale, bias)[0])

    row = S((1, 4096), "float32")
    operands = [*[S((64, 4096), "float32")] * 2, row, row]
    plan = planned(function, *operands, implementation="split")
    assert [segment.plan is None for segment in plan.segments] == [False, True]
    assert "planner fails on swish_backward.0" in str(plan.explain())
    assert "died" not in caplog.text


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "batchnorm"])
def test_a_result_in_float8_has_a_gradient(kind, dtype):
    """That of one that is cast behind; no node takes gradients in float8."""
    size, of = ((4, 8, 6, 6), (1, 8, 1, 1)) if kind == "batchnorm" else ((8, 32), (1, 32))
    x = jax.random.normal(jax.random.key(0), size)
    others = [jnp.ones(of)] * (4 if kind == "batchnorm" else 2)
    weights = jnp.round(3 * jnp.cos(jnp.arange(x.size, dtype="float32"))).reshape(size)

    def gradient(last):
        function = jc.graph(lambda g, *x: last(forward(kind)(g, *x)[0]))
        loss = lambda x: (function(x, *others).astype(dtype).astype("float32") * weights).sum()  # noqa: E731
        return jax.grad(loss)(x)

    got = gradient(lambda y: y.set_data_type(dtype))
    np.testing.assert_allclose(got, gradient(lambda y: y), atol=1e-4)
    assert jnp.abs(got).max() > 0.1


def refused_text(function, *operands):
    with pytest.raises(jc.UnsupportedGraphError) as caught:
        planned(function, *operands)
    plan = planned(function, *operands, implementation="split")
    assert {segment.engine for segment in plan.segments} == {"XLA"}
    return str(caught.value), " ".join(str(plan.explain()).split())


b = "bfloat16"
REFUSED = {
    "not the last in memory": (
        forward("layernorm"),
        [S((64, 32), b), S((64, 1), b), S((64, 1), b)],
        "the normalized dimensions [0] are not the last in memory",
    ),
    "orders": (
        lambda g, x, s: g.layernorm(x.set_stride([1, 8, 64]), s, s, 1e-5)[0],
        [S((8, 8, 64), b), S((1, 1, 64), b)],
        "in memory",
    ),
    "odd channels": (
        forward("batchnorm"),
        [S((4, 12, 8, 8), b), *[S((1, 12, 1, 1), "float32")] * 4],
        "12 channels, which is no multiple of 8",
    ),
    "an array": (
        lambda g, x, s, e: g.rmsnorm(x, s, epsilon=e)[0],
        [S((64, 64), b), S((1, 64), b), S((), "float32")],
        "epsilon is computed on the device",
    ),
    "a momentum": (
        lambda g, x, s, v, m: [*g.batchnorm(x, s, s, v, v, 1e-5, m)],
        [S((4, 16, 8, 8), b), *[S((1, 16, 1, 1), "float32")] * 2, S((), "float32")],
        "momentum is computed on the device",
    ),
    "one element": (
        forward("rmsnorm"),
        [S((64, 1), b), S((1, 1), b), S((1, 1), b)],
        "it goes over one element",
    ),
    "one pixel": (
        forward("instancenorm"),
        [S((4, 16, 1, 1), b), *[S((1, 16, 1, 1), "float32")] * 2],
        "it goes over one element",
    ),
    "inference": (
        lambda g, x, s: g.batchnorm_inference(x, s, s, s, s),
        [S((4, 16, 8, 8), b), S((1, 16, 1, 1), "float32")],
        "no engine for it",
    ),
}


@pytest.mark.deviceless
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cudnn_is_not_asked_for(what, monkeypatch):
    monkeypatch.setattr(losses, "table", dict)  # which may name another reason
    function, operands, reason = REFUSED[what]
    for text in refused_text(function, *operands):
        assert reason in " ".join(text.split()), text


# -- on the GPU ------------------------------------------------------------------------------------


def on_gpu(function, operands):
    """Its outputs in one plan, checked against float64: their errors."""
    graph = jc.graph(function).with_options(implementation="cudnn")
    outputs = jax.jit(graph)(*operands)
    trace = graph.trace(*operands)[1]
    read = [operands[i] for i in trace.operands]
    return oracle.check_outputs(trace.spec, read, outputs, on_gpu=True)


def is_planned(kind, name):
    """Whether cuDNN has engines for one of SHAPES: see what it is not asked for, above."""
    x, scale = SHAPES[kind][name]
    axes = reduced(kind, x, scale)
    if kind in ("instancenorm", "batchnorm"):
        return kind == "instancenorm" or x[1] % 8 == 0
    # It takes no examples of a row each.
    return axes == (*range(len(x))[-len(axes) :],) and name != "a row each" if axes else False


def given(kind, dtype, extra=0):
    random = np.random.default_rng(0)
    drawn = [
        jnp.asarray(random.standard_normal(a.shape) + 0.5, a.dtype)
        for a in avals(kind, dtype, extra)
    ]
    if kind == "batchnorm":
        drawn[-1] = abs(drawn[-1])
    return drawn


each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
each_phase = pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])


@pytest.mark.gpu
@each_dtype
@each_phase
@pytest.mark.parametrize(
    ("kind", "what"), [k for k, taken in TAKEN.items() if taken], ids=", ".join
)
def test_neighbours_in_the_plan_are_computed_rightly(kind, what, phase, dtype):
    print(on_gpu(around(kind, what, phase), given(kind, dtype, extra=1)))


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize(("kind", "name"), [s for s in SIZES if is_planned(*s)])
def test_each_shape_on_the_gpu(kind, name, dtype):
    """Small ones, which take engines other than those of the large."""
    operands = drawn(shapes_for(kind, name), dtype)
    operands[3:] = [abs(x.astype(jnp.float32)) for x in operands[3:]]
    for phase in ("TRAINING", "INFERENCE")[: 1 if kind == "batchnorm" else 2]:
        print(phase, on_gpu(forward(kind, phase=phase), operands))


@pytest.mark.gpu
@each_dtype
@each_kind
def test_backwards_on_the_gpu(kind, dtype):
    grad, x, scale, *_ = given(kind, dtype, extra=1)
    if kind == "instancenorm":
        grad, x = grad[:1], x[:1]
    statistics = plain(kind)(x.astype(jnp.float32), scale.astype(jnp.float32))[1:]
    print(on_gpu(backward(kind), [grad, x, scale, *statistics]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["layernorm", "instancenorm", "batchnorm"])
def test_large_means_on_the_gpu(kind):
    """A variance from squares and the square of the mean would have no right digit here."""
    x, *others = given(kind, "float32")
    graph = jc.graph(forward(kind)).with_options(implementation="cudnn")
    for mean in (1e3, 1e4):
        moved = x + mean
        got = jax.jit(graph)(moved, *others)
        wide = np.asarray(moved, np.float64)
        axes = reduced(kind, x.shape, others[0].shape)
        inv = (wide.var(axes, keepdims=True) + 1e-3) ** -0.5
        np.testing.assert_allclose(got[2], inv, rtol=1e-4, err_msg=f"mean {mean}")
        xhat = (wide - wide.mean(axes, keepdims=True)) * inv
        want = xhat * np.asarray(others[0], np.float64) + np.asarray(others[1], np.float64)
        np.testing.assert_allclose(got[0], want, rtol=1e-3, atol=mean * 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["first", "all"])
@each_kind
def test_batches_on_the_gpu(kind, which):
    """What vmap makes of a node is what it means, one after the other."""
    function = jc.graph(forward(kind))
    batched, operands, axes = mapped(function, shapes_for(kind, next(iter(SHAPES[kind]))), which)
    got = jax.jit(batched)(*operands)
    for i in range(3):
        one = [x if a is None else x[i] for x, a in zip(operands, axes, strict=True)]
        spec = function.trace(*one)[1].spec
        outputs = [v[i] for v in got]
        oracle.check_outputs(spec, one, outputs, on_gpu=True)


def test_a_gradient_reads_the_statistics_of_its_forward():
    """In a graph with neighbours: one forward, one backward."""
    function = jc.graph(around("layernorm", "relu"))
    total = lambda *o: jnp.sum(function(*o)[0].astype(jnp.float32))  # noqa: E731
    first, second = graphs_of(jax.grad(total, (0, 2, 3)), *avals("layernorm", extra=1))
    assert methods(first)[0] == "layernorm"
    assert methods(second)[-1] == "layernorm_backward"
    assert sum(m.startswith("layernorm") for m in methods(second)) == 1


@pytest.mark.deviceless
def test_adalayernorm_without_a_bias_is_not_asked_for():
    """nvidia-cudnn-frontend 1.28 reads a null pointer there, which would end the process."""
    norm = jc.graph(lambda g, x, s: g.adalayernorm(x, s, epsilon=1e-5)[0])
    x, s = jax.ShapeDtypeStruct((2, 24, 96), "float32"), jax.ShapeDtypeStruct((2, 1, 96), "float32")
    with jc.target("H200"):
        with pytest.raises(jc.UnsupportedGraphError, match="give one of zeros"):
            jc.plan(norm.with_options(implementation="cudnn"), x, s)
        assert "no bias" in str(jc.plan(norm, x, s).explain())
        (plan,) = jc.plans(
            jc.ops.ada_layer_norm, x, jax.ShapeDtypeStruct((2, 96), "float32")
        ).values()
        assert len(plan.execution_plans) == 1
