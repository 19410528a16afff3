"""The graphs that a gradient's program holds: how many, of which nodes, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import linear
from jax import lax
from transformations import graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn._core import primitive

SHAPES = _IMAGE, _WEIGHT, _ = (2, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1)


@jc.graph
def block(g, x, w, b):
    return g.gelu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b))


def drawn(dtype="bfloat16"):
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw(shape), dtype) for shape in SHAPES]


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args))).astype(
        jnp.float32
    )


def value_and_gradients(function, *args, by=(0, 1, 2)):
    """The graphs of a training step: forward and backward."""
    return graphs_of(jax.value_and_grad(total(function), by), *args)


def roles(specs):
    return [spec.origin.role for spec in specs]


def test_each_way_holds_as_few_graphs_as_it_can():
    args = drawn()
    assert roles(value_and_gradients(jax.jit(block), *args)) == ["forward", "backward"]
    again = value_and_gradients(jax.checkpoint(block), *args)
    assert roles(again) == ["forward", "forward", "backward"]
    assert methods(again[1]) == ["conv_fprop", "bias", "identity"]
    layer = lambda *a: jnp.cos(block(*map(jnp.tanh, a)))  # noqa: E731
    saved = jax.checkpoint(layer, policy=jc.save_cudnn)  # which computes all else again
    step = jax.value_and_grad(total(saved), (0, 1, 2))
    names = primitives(jax.make_jaxpr(step)(*args))
    assert (names.count("cudnn"), names.count("tanh")) == (2, 6)


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
    unused = lambda *a: jax.grad(total(block), (0, 1, 2))(*a)[0]  # noqa: E731
    for program in (jax.grad(total(block)), unused):
        nodes = [m for s in lowered(program, *drawn()) for m in methods(s)]
        assert not {"conv_wgrad", "reduction"} & {*nodes}
        assert nodes.count("conv_dgrad") == nodes.count("conv_fprop") == 1


def test_unused_results_are_removed_before_lowering():
    x, w, b = jnp.ones((2, 3, 4)), jnp.ones((1, 4, 5)), jnp.ones((1, 1, 5))
    (spec,) = lowered(lambda *a: linear(*a)["hidden"], x, w, b)
    assert methods(spec) == ["matmul", "mul", "add"]
    two = jc.graph(lambda g, x, y: (g.exp(x), g.sin(y)))
    specs = lowered(lambda *a: jax.jvp(two, a, a)[1][0], x, x + 1)
    assert [methods(spec) for spec in specs] == [["exp"], ["mul"]]
    pair = jc.graph(lambda g, x: (g.exp(x), g.sin(x)))
    (spec,) = lowered(lambda x: lax.scan(lambda h, _: pair(h), x, None, length=2)[0], x)
    assert methods(spec) == ["exp"]


def test_pointwise_values_are_computed_again_from_what_is_kept_in_the_operands_dtype():
    """scale's derivative needs the convolution, and gelu's the sum behind it: one is enough."""
    function = jc.graph(
        lambda g, x, w, s: g.gelu(g.scale(g.conv_fprop(x, w, padding=[1, 1]), s) + 1.0)
    )
    for dtype in ("bfloat16", "float32"):
        forward, backward = value_and_gradients(function, *drawn(dtype))
        (name,) = forward.origin.residuals
        assert forward.tensor(name).dtype == dtype
        assert methods(backward)[: methods(backward).index("gelu_backward")] == ["scale", "add"]


def test_the_narrowest_place_is_cut():
    """Of large values made of a small one, the small one is kept, though it is needed nowhere."""

    @jc.graph
    def function(g, x, w, y):
        row = g.reduction(g.conv_fprop(x, w), mode="MAX", out_dims=[1, 4, 1, 1])
        return g.mul(g.exp(g.mul(row, y)), y)

    args = [jnp.ones(shape) for shape in (_IMAGE, (4, 4, 1, 1), (8, 4, 6, 6))]
    forward, backward = value_and_gradients(function, *args, by=2)
    (name,) = forward.origin.residuals
    assert forward.tensor(name).shape == (1, 4, 1, 1)
    assert "exp" in methods(backward)


def test_what_jumps_is_kept_and_not_computed_again():
    """Of a residual that is rounded, a comparison could come out otherwise than in the forward."""

    def chosen(g, x, w, y):
        product = g.conv_fprop(x, w, padding=[1, 1])
        return g.binary_select(product, y, g.cmp_gt(product, 0.5))

    def steps(g, x, w, y):
        return g.mul(g.floor(g.conv_fprop(x, w, padding=[1, 1]) * 2.0), y)

    args = [jnp.ones(shape, jnp.bfloat16) for shape in (_IMAGE, _WEIGHT, _IMAGE)]
    for function, kept, dtype in ((chosen, "cmp_gt", "bool"), (steps, "floor", "bfloat16")):
        forward, backward = value_and_gradients(jc.graph(function), *args)
        (name,) = forward.origin.residuals
        assert (name.split(".")[0], forward.tensor(name).dtype) == (kept, dtype)
        assert kept not in methods(backward)


def test_products_and_what_lies_between_them_are_not_computed_again():
    """No plan holds two products: what one reads of another is written anyway."""
    two = jc.graph(lambda g, a, b, c: g.mul(g.matmul(a, b), g.matmul(a, c)))
    chain = jc.graph(lambda g, a, b, c: g.matmul(g.gelu(g.matmul(a, b)), c))
    a, b = jnp.ones((2, 5, 4)), jnp.ones((2, 4, 4))
    for graph, gradients in ((two, 2), (chain, 3)):
        forward, backward = value_and_gradients(graph, a, b, b, by=(1, 2))
        assert len(forward.origin.residuals) == 2
        assert methods(backward).count("matmul") == gradients
        assert "gelu" not in methods(backward)
