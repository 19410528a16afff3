"""Loops, branches, custom rules, meshes and odd operands: what the table does not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear, plain_linear
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc


@jc.graph
def conv(g, x, w, b):
    return g.swish(g.bias(g.conv_fprop(x, w, padding=[1, 1], stride=[2, 1]), b))


def plain_conv(x, w, b):
    return jax.nn.silu(lax.conv_general_dilated(x, w, (2, 1), [(1, 1), (1, 1)]) + b)


FUNCTIONS = {
    "conv": (conv, plain_conv, ((2, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1))),
    "linear": (linear, plain_linear, ((2, 3, 4), (1, 4, 4), (1, 1, 4))),
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

        return lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))[1]

    return run


def jvp_of(apply):
    """Along half the operands."""
    return lambda f: lambda *a: jax.jvp(apply(f), a, half(a))


def gradient_of(apply):
    """Of all floats that a function gives, by all operands."""
    return lambda f: jax.grad(total(apply(f)), (0, 1, 2))


def through_switch(f):
    branches = [lambda *a: f(*half(a)), f, lambda *a: f(*half(half(a)))]
    return lambda *args: lax.switch(jnp.int32(jnp.sum(args[2] > -1e6) > 0), branches, *args)


def through_custom_vjp(f):
    """Somebody's own gradient, twice the right one, around us."""
    wrapped = jax.custom_vjp(f)
    twice = lambda cotangents: jax.tree.map(lambda t: 2 * t, cotangents)  # noqa: E731
    wrapped.defvjp(lambda *a: jax.vjp(f, *a), lambda pullback, t: pullback(twice(t)))
    return wrapped


def by_one_result(f):
    """The other results have no cotangents."""
    return lambda *args: jax.tree.leaves(f(*args))[0]


def over_devices(f):
    """Each device has its rows; shard_map adds up the gradients of what they share."""

    def run(*args):
        mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=True
        )
        return mapped(jnp.concatenate([args[0]] * 2), *args[1:])

    return run


def over_rows(f):
    """The same without devices."""
    return lambda *args: jax.tree.map(lambda y: jnp.concatenate([y] * 2), f(*args))


def third_order(f):
    """At small operands: where gelu is nearly linear, float32 has nothing of its third derivative
    but differences of what is almost equal."""

    def gradient(*args):
        return jax.grad(total(f), (0, 1, 2))(*args)

    def curvature(*args):
        return jax.jvp(gradient, args, half(args))[1]

    return lambda *args: jax.jvp(curvature, half(half(args)), args)


TRANSFORMS = {
    "grad": gradient_of(lambda f: f),
    "jvp": jvp_of(lambda f: f),
    "vmap_grad": lambda f: vmapped(0, None, 1)(jax.grad(total(f), (0, 1, 2))),
    "grad_of_one_result": gradient_of(by_one_result),
    "third_order": third_order,
    "vmap_grad_scan": lambda f: vmapped(None, 0, None)(gradient_of(through_scan)(f)),
    "jvp_while": jvp_of(through_while),
    "vmap_while": lambda f: vmapped(0, None, None)(through_while(f)),
    "grad_switch": gradient_of(through_switch),
    "vmap_grad_custom_vjp": lambda f: vmapped(0, None, 0)(gradient_of(through_custom_vjp)(f)),
    "grad_map_in_batches": gradient_of(
        lambda f: lambda *a: lax.map(lambda x: f(x, *a[1:]), jnp.stack([a[0]] * 5), batch_size=2)
    ),
}


@each_function
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_jnp(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    apply = TRANSFORMS[transform]
    assert_same(jax.jit(apply(graph))(*args), jax.jit(apply(plain))(*args))


@each_function
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap_grad"])
def test_inside_shard_map(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args, apply = operands(function, key), TRANSFORMS[transform]
    got = jax.jit(apply(over_devices(graph)))(*args)
    assert_same(jax.device_get(got), jax.device_get(jax.jit(apply(over_rows(plain)))(*args)))


@each_function
def test_shapes_and_types_are_known_without_values(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    for name in ("grad", "jvp", "vmap_grad"):
        of = TRANSFORMS[name]
        assert jax.eval_shape(of(graph), *args) == jax.eval_shape(of(plain), *args)
    assert not any(a.weak_type for a in jax.make_jaxpr(graph)(*args).out_avals)


@each_function
def test_disable_jit_export_and_donation_change_nothing(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args, of = operands(function, key), TRANSFORMS["vmap_grad"]
    want = of(plain)(*args)
    with jax.disable_jit():
        assert_same(of(graph)(*args), want)
    exported = jax.export.export(jax.jit(of(graph)), platforms=["cpu"])(*args)
    assert_same(exported.call(*args), want)
    called = jax.export.export(jax.jit(graph), platforms=["cpu"])(*args).call
    assert_same(jax.grad(total(called))(*args), jax.grad(total(plain))(*args))
    step = lambda x, w, b: w - 0.1 * jax.grad(total(graph), 1)(x, w, b)  # noqa: E731
    want, donated = step(*args), jnp.array(args[1])
    assert_same(jax.jit(step, donate_argnums=1)(args[0], donated, args[2]), want)
    assert donated.is_deleted()


# -- operands that do not move, and odd ones -------------------------------------------------------


def test_gradients_beside_operands_and_results_of_integers():
    quantized = jc.graph(lambda g, x, w, s: g.matmul(x, g.mul(w, s).set_data_type("float32")))
    plain = lambda x, w, s: x @ (w.astype(jnp.float32) * s)  # noqa: E731
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((2, 3, 4)), jnp.float32)
    args = x, jnp.asarray(random.integers(-9, 9, (1, 4, 5)), jnp.int8), jnp.float32(0.25)
    for by in (0, 2, (0, 2)):
        assert_same(jax.grad(total(quantized), by)(*args), jax.grad(total(plain), by)(*args))
    along = jnp.ones_like(x), np.zeros(args[1].shape, jax.dtypes.float0), jnp.float32(2)
    assert_same(jax.jvp(quantized, args, along), jax.jvp(plain, args, along))
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(total(quantized), 1)(*args)
    by_w = jax.grad(total(quantized), 1, allow_int=True)(*args)
    assert (by_w.dtype, by_w.shape) == (jax.dtypes.float0, args[1].shape)

    chosen = jc.graph(lambda g, x, y: (g.cmp_gt(x, y), g.binary_select(x, y, g.cmp_gt(x, y))))
    x, y = jnp.array([[1.0, -2.0]]), jnp.array([[0.5, 3.0]])
    slopes = jax.grad(lambda x, y: chosen(x, y)[1].sum(), (0, 1))(x, y)
    assert_same(slopes, (jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])))
    (mask, _), (still, along) = jax.jvp(chosen, (x, y), (x, y))
    assert (still.dtype, still.shape) == (jax.dtypes.float0, mask.shape)
    assert_same(along, jnp.array([[1.0, 3.0]]))


@pytest.mark.parametrize("transform", ["grad", "vmap_all", "vmap_grad"])
def test_arrays_without_elements(transform, key):
    @jc.graph
    def scaled(g, x, s, y):
        return {"y": g.relu(x * s) + y, "sums": g.reduction(x, mode="ADD", out_dims=[1, 1, 6, 6])}

    def plain(x, s, y):
        return {"y": jax.nn.relu(x * s) + y, "sums": x.sum((0, 1), keepdims=True)}

    of = {**TRANSFORMS, "vmap_all": vmapped(0, 0, 0)}[transform]
    for shape in ((0, 4, 6, 6), (2, 0, 6, 6)):
        args = [jnp.ones(shape), jnp.full((1, 1, 1, 6), 0.5), jnp.ones((1, 1, 1, 1))]
        assert_same(jax.jit(of(scaled))(*args), jax.jit(of(plain))(*args))
    rows = [jnp.ones((0, 3, 4)), jnp.ones((1, 4, 4)), jnp.ones((1, 1, 4))]
    assert_same(jax.jit(of(linear))(*rows), jax.jit(of(plain_linear))(*rows))
    images = [jnp.ones((0, 4, 6, 6)), *operands("conv", key)[1:]]
    assert_same(jax.jit(of(conv))(*images), jax.jit(of(plain_conv))(*images))


def test_linear_transpose_of_linear_graphs():
    pair = jc.graph(lambda g, a, b: (g.reduction(a, mode="ADD"), g.sub(a, b)))
    plain_pair = lambda a, b: (a.sum(keepdims=True), a - b)  # noqa: E731
    cotangents = jnp.full((1, 1), 3.0), jnp.ones((2, 3))
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    got = jax.linear_transpose(lambda a, b: pair(a, b), shape, shape)(cotangents)
    assert_same(got, jax.linear_transpose(plain_pair, shape, shape)(cotangents))
