"""Every transformation of JAX applied to a graph and to the same function in plain jnp."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, linear, plain_linear
from jax import lax

import jax_cudnn as jc


@jc.graph
def conv(g, x, w, b):
    return g.swish(g.bias(g.conv_fprop(x, w, padding=[1, 1], stride=[2, 1]), b))


def plain_conv(x, w, b):
    return jax.nn.silu(lax.conv_general_dilated(x, w, (2, 1), [(1, 1), (1, 1)]) + b)


@jc.graph
def normed(g, x, y, z):
    return g.reduction(g.relu(x * y) + z, mode="ADD", out_dims=[1, 3, 1])


def plain_normed(x, y, z):
    return (jax.nn.relu(x * y) + z).sum((0, 2), keepdims=True)


FUNCTIONS = {
    "conv": (conv, plain_conv, ((2, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1))),
    "linear": (linear, plain_linear, ((2, 3, 4), (1, 4, 4), (1, 1, 4))),
    "reduction": (normed, plain_normed, ((2, 3, 4), (2, 3, 4), (1, 1, 4))),
}
each_function = pytest.mark.parametrize("function", FUNCTIONS)


def operands(function, key):
    shapes = FUNCTIONS[function][2]
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]


def total(f):
    """A scalar that weighs every output element differently."""

    def scalar(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(y * jnp.sin(jnp.arange(y.size) + 1.0).reshape(y.shape)) for y in leaves)

    return scalar


def half(args):
    return tuple(0.5 * arg for arg in args)


def vmapped(*axes):
    def apply(f):
        def run(*args):
            stacked = [
                arg if axis is None else jnp.stack([arg, -arg, 2 * arg], axis)
                for arg, axis in zip(args, axes, strict=True)
            ]
            return jax.vmap(f, in_axes=axes)(*stacked)

        return run

    return apply


def through_scan(f):
    def run(*args):
        step = lambda total_, x: (total_ + total(f)(x, *args[1:]), total_)  # noqa: E731
        return lax.scan(step, 0.0, jnp.stack([args[0], -args[0]]))

    return run


def through_while(f):
    def run(*args):
        def body(state):
            i, value = state
            return i + 1, value + total(f)(*args) * i

        return lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))

    return run


def through_cond(f):
    return lambda *args: lax.cond(
        jnp.sum(args[0]) > 1e6, lambda a: f(*half(a)), lambda a: f(*a), args
    )


def through_linearize(f):
    def run(*args):
        out, tangents_of = jax.linearize(f, *args)
        return out, tangents_of(*half(args))

    return run


def gradient_of_scan(f):
    def loss(*args):
        step = lambda carry, x: (carry + total(f)(x, *args[1:]), None)  # noqa: E731
        return lax.scan(step, 0.0, jnp.stack([args[0], -args[0]]))[0]

    return jax.grad(loss, (0, 1, 2))


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(total(f), (0, 1, 2)),
    "jit_grad": lambda f: jax.jit(jax.grad(total(f), (0, 1, 2))),
    "value_and_grad": lambda f: jax.value_and_grad(total(f), 1),
    "jvp": lambda f: lambda *a: jax.jvp(f, a, half(a)),
    "jvp_of_one_operand": lambda f: (
        lambda *a: jax.jvp(lambda w: f(a[0], w, a[2]), a[1:2], half(a[1:2]))
    ),
    "vjp": lambda f: lambda *a: jax.vjp(f, *a)[1](f(*half(a))),
    "jacfwd": lambda f: jax.jacfwd(f, 2),
    "jacrev": lambda f: jax.jacrev(f, 2),
    "hessian": lambda f: jax.hessian(total(f), 2),
    "grad_of_grad_norm": lambda f: jax.grad(lambda *a: jnp.vdot(*[jax.grad(total(f))(*a)] * 2), 1),
    "vmap_0": vmapped(0, None, None),
    "vmap_1": vmapped(None, 0, None),
    "vmap_2": vmapped(None, None, 0),
    "vmap_axes": vmapped(1, -1, 2),
    "vmap_all": vmapped(0, 0, 0),
    "vmap_vmap": lambda f: vmapped(0, None, 0)(vmapped(None, 1, None)(f)),
    "vmap_grad": lambda f: vmapped(0, None, 1)(jax.grad(total(f), (0, 1, 2))),
    "grad_vmap": lambda f: jax.grad(total(vmapped(0, 1, None)(f)), (0, 1, 2)),
    "remat": lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1, 2)),
    "scan": through_scan,
    "grad_scan": gradient_of_scan,
    "while": through_while,
    "cond": through_cond,
    "linearize": through_linearize,
    "map": lambda f: lambda *a: lax.map(lambda x: f(x, *a[1:]), jnp.stack([a[0]] * 2)),
}


@each_function
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_matches_plain_jnp(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    apply = TRANSFORMS[transform]
    assert_same(apply(graph)(*args), apply(plain)(*args))


@each_function
def test_disable_jit_gives_the_same(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    with jax.disable_jit():
        got = jax.jit(graph)(*args)
    assert_same(got, plain(*args))


@each_function
def test_eval_shape_and_make_jaxpr_know_the_outputs(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    shapes = jax.eval_shape(graph, *args)
    assert shapes == jax.eval_shape(plain, *args)
    avals = jax.make_jaxpr(graph)(*args).out_avals
    assert [a.shape for a in avals] == [s.shape for s in jax.tree.leaves(shapes)]
    assert not any(a.weak_type for a in avals)


@each_function
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_is_one_cudnn_equation(function, wrap, key):
    graph = FUNCTIONS[function][0]
    jaxpr = jax.make_jaxpr(wrap(graph))(*operands(function, key))
    assert primitives(jaxpr.jaxpr) == ["cudnn"]


@each_function
def test_gradient_keeps_the_forward_as_one_cudnn_equation(function, key):
    graph = FUNCTIONS[function][0]
    jaxpr = jax.make_jaxpr(jax.grad(total(graph)))(*operands(function, key))
    assert primitives(jaxpr.jaxpr).count("cudnn") == 1


def primitives(jaxpr):
    """Names of all primitives, those of inner jits in place of the jit."""
    found = []
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr")
        found += primitives(inner.jaxpr) if inner is not None else [eqn.primitive.name]
    return found


def test_dead_outputs_do_not_change_the_live_one(key):
    args = operands("linear", key)
    got = jax.jit(lambda *a: linear(*a)["y"])(*args)
    assert_same(got, plain_linear(*args)["y"])


def test_donated_operand_is_consumed_and_the_result_right(key):
    x, _, b = operands("linear", key)
    square = jnp.eye(4)[None]
    want = plain_linear(x, square, b)["y"]
    donated = jnp.array(x)
    got = jax.jit(lambda *a: linear(*a)["y"], donate_argnums=0)(donated, square, b)
    assert_same(got, want)
    assert donated.is_deleted()
