"""The graphs that a gradient's program holds: how many, of which nodes, and what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear
from jax import lax
from transformations import graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn._core import primitive

_IMAGE, _WEIGHT, _CHANNELS = (2, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1)
_BIASED = (_IMAGE, _WEIGHT, _CHANNELS)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


# Function of g, shapes of its operands, and what made the residuals.
GRAPHS = {
    "conv, scale": (lambda g, x, w, s: g.scale(conv(g, x, w), s), _BIASED, ["conv_fprop"]),
    "conv, bias, relu": (lambda g, x, w, b: g.relu(g.bias(conv(g, x, w), b)), _BIASED, []),
    "conv, bias, gelu": (
        lambda g, x, w, b: g.gelu_approx_tanh(g.bias(conv(g, x, w), b)),
        _BIASED,
        ["bias"],
    ),
    "conv, scale, bias, gelu": (
        lambda g, x, w, s, b: g.gelu(g.bias(g.scale(conv(g, x, w), s), b)),
        (*_BIASED, _CHANNELS),
        ["conv_fprop"],
    ),
}
each_graph = pytest.mark.parametrize("what", GRAPHS)


def case(what, dtype="bfloat16"):
    function, shapes, *_ = GRAPHS[what]
    random = np.random.default_rng(0)
    return jc.graph(function), [
        jnp.asarray(random.standard_normal(shape), jnp.dtype(dtype)) for shape in shapes
    ]


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args))).astype(
        jnp.float32
    )


def value_and_gradients(what, wrap=lambda f: f, dtype="bfloat16", by=None):
    """The two graphs of a training step: forward and backward."""
    function, args = case(what, dtype)
    by = tuple(range(len(args))) if by is None else by
    return graphs_of(jax.value_and_grad(total(wrap(function)), by), *args)


def roles(specs):
    return [spec.origin.role for spec in specs]


# -- how many equations --------------------------------------------------------------------------


@each_graph
def test_each_way_holds_as_few_graphs_as_it_can(what):
    function, args = case(what)
    assert primitives(jax.make_jaxpr(jax.jit(function))(*args)) == ["cudnn"]
    assert roles(graphs_of(lambda *a: jax.jvp(function, a, a), *args)) == ["forward", "tangent"]
    assert roles(value_and_gradients(what, jax.jit)) == ["forward", "backward"]
    again = roles(value_and_gradients(what, jax.checkpoint))
    assert again == ["forward", "forward", "backward"]
    keep = functools.partial(jax.checkpoint, policy=jc.save_cudnn)
    assert roles(value_and_gradients(what, keep)) == ["forward", "backward"]


def test_save_cudnn_computes_all_else_again():
    function, args = case("conv, bias, gelu", "float32")

    def block(*args):
        return jnp.cos(function(*(jnp.tanh(a) for a in args)))

    plain = jax.value_and_grad(lambda *a: block(*a).sum(), (0, 1, 2))
    for count, remat in ((2, {"policy": jc.save_cudnn}), (3, {})):
        loss = lambda *a, how=remat: jax.checkpoint(block, **how)(*a).sum()  # noqa: E731
        f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        names = primitives(jax.make_jaxpr(f)(*args))
        assert (names.count("cudnn"), names.count("tanh")) == (count, 6)
        assert_same(f(*args), plain(*args))


# -- what is not needed --------------------------------------------------------------------------


def lowered(function, *args):
    """The graphs that lowering gets."""
    found = []

    def evaluate(spec, *operands, **options):
        found.append(spec)
        return real(spec, *operands, **options)

    real = primitive.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "evaluate", evaluate)
        jax.jit(function).lower(*args)
    return found


def test_frozen_weights_have_no_weight_gradient():
    function, args = case("conv, bias, relu")
    frozen = lambda x, w, b: function(x, lax.stop_gradient(w), b)  # noqa: E731
    unused = lambda *a: jax.grad(total(function), (0, 1, 2))(*a)[0]  # noqa: E731
    for program in (jax.grad(total(function)), jax.grad(total(frozen)), unused):
        nodes = [m for s in lowered(program, *args) for m in methods(s)]
        assert not {"conv_wgrad", "reduction"} & {*nodes}
        assert nodes.count("conv_dgrad") == nodes.count("conv_fprop") == 1


def test_unused_results_are_removed_before_lowering():
    x, w, b = jnp.ones((2, 3, 4)), jnp.ones((1, 4, 5)), jnp.ones((1, 1, 5))
    (spec,) = lowered(lambda *a: linear(*a)["hidden"], x, w, b)
    assert methods(spec) == ["matmul", "mul", "add"]
    two = jc.graph(lambda g, x, y: (g.exp(x), g.sin(y)))
    (spec,) = lowered(lambda x, y: two(x, y)[1], x, x + 1)
    assert (methods(spec), len(spec.inputs)) == (["sin"], 1)
    specs = lowered(lambda *a: jax.jvp(two, a, a)[1][0], x, x + 1)
    assert [methods(spec) for spec in specs] == [["exp"], ["mul"]]
    pair = jc.graph(lambda g, x: (g.exp(x), g.sin(x)))
    (spec,) = lowered(lambda x: lax.scan(lambda h, _: pair(h), x, None, length=2)[0], x)
    assert methods(spec) == ["exp"]


# -- what is kept --------------------------------------------------------------------------------


def residuals(what, dtype="bfloat16", by=None):
    """Of the forward: the node that made each, and the dtype in which it is kept."""
    forward, _ = value_and_gradients(what, dtype=dtype, by=by)
    makers = {name: call for call in forward.calls for _, name in call.outputs}
    found = []
    for name in forward.origin.residuals:
        call = makers[name]
        if call.node.method == "identity":  # a cast
            call = makers[call.inputs[0][1]]
        found.append((call.node.method, forward.tensor(name).dtype))
    return found


@each_graph
def test_only_what_the_backward_needs_is_kept_in_the_operands_dtype(what):
    for dtype in ("bfloat16", "float32"):
        assert residuals(what, dtype) == [(method, dtype) for method in GRAPHS[what][2]]


def test_pointwise_values_are_computed_again_from_what_is_kept():
    """scale's derivative needs the convolution, and gelu's the sum behind it: one is enough."""
    _, backward = value_and_gradients("conv, scale, bias, gelu")
    again = methods(backward)[: methods(backward).index("gelu_backward")]
    assert again == ["scale", "bias"]
    assert residuals("conv, scale", by=(0, 1)) == []  # of a frozen scale
    _, again, _ = value_and_gradients("conv, bias, gelu", jax.checkpoint)
    assert methods(again) == ["conv_fprop", "bias", "identity"]


def test_the_narrowest_place_is_cut():
    """Of large values made of a small one, the small one is kept, though it is needed nowhere."""

    @jc.graph
    def function(g, x, w, y):
        row = g.reduction(g.conv_fprop(x, w), mode="MAX", out_dims=[1, 4, 1, 1])
        return g.mul(g.exp(g.mul(row, y)), y)

    args = [jnp.ones(shape) for shape in (_IMAGE, (4, 4, 1, 1), (8, 4, 6, 6))]
    forward, backward = graphs_of(jax.value_and_grad(total(function), 2), *args)
    (name,) = forward.origin.residuals
    assert forward.tensor(name).shape == (1, 4, 1, 1)
    assert "exp" in methods(backward)


def test_what_jumps_is_kept_and_not_computed_again():
    """Of a residual that is rounded, a comparison could come out otherwise than in the forward."""

    def chosen(g, x, w, y):
        product = conv(g, x, w)
        return g.binary_select(product, y, g.cmp_gt(product, 0.5))

    def steps(g, x, w, y):
        return g.mul(g.floor(conv(g, x, w) * 2.0), y)

    args = [jnp.ones(shape, jnp.bfloat16) for shape in (_IMAGE, _WEIGHT, _IMAGE)]
    for function, kept, dtype in ((chosen, "cmp_gt", "bool"), (steps, "floor", "bfloat16")):
        step = jax.value_and_grad(total(jc.graph(function)), (0, 1, 2))
        forward, backward = graphs_of(step, *args)
        (name,) = forward.origin.residuals
        assert (name.split(".")[0], forward.tensor(name).dtype) == (kept, dtype)
        assert kept not in methods(backward)


def test_products_and_what_lies_between_them_are_not_computed_again():
    """No plan holds two products: what one reads of another is written anyway."""
    two = jc.graph(lambda g, a, b, c: g.mul(g.matmul(a, b), g.matmul(a, c)))
    chain = jc.graph(lambda g, a, b, c: g.matmul(g.gelu(g.matmul(a, b)), c))
    a, b = jnp.ones((2, 5, 4)), jnp.ones((2, 4, 4))
    for graph, gradients in ((two, 2), (chain, 3)):
        forward, backward = graphs_of(jax.value_and_grad(total(graph), (1, 2)), a, b, b)
        assert len(forward.origin.residuals) == 2
        assert methods(backward).count("matmul") == gradients
        assert "gelu" not in methods(backward)
