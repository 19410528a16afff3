"""Every transformation of JAX applied to a graph and to the same function in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear, plain_linear
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import primitives

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

        return lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))[1]

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


def scanned(f):
    def loss(*args):
        step = lambda carry, x: (carry + total(f)(x, *args[1:]), None)  # noqa: E731
        return lax.scan(step, 0.0, jnp.stack([args[0], -args[0]]))[0]

    return loss


def jvp_of(apply):
    """Along half the operands."""
    return lambda f: lambda *a: jax.jvp(apply(f), a, half(a))


def gradient_of(apply):
    """Of all floats that a function gives, by all operands."""
    return lambda f: jax.grad(total(apply(f)), (0, 1, 2))


def through_fori(f):
    return lambda *args: lax.fori_loop(0, 3, lambda i, value: value + total(f)(*args) * i, 0.0)


def through_switch(f):
    branches = [lambda *a: f(*half(a)), f, lambda *a: f(*half(half(a)))]
    return lambda *args: lax.switch(jnp.int32(jnp.sum(args[2] > -1e6) > 0), branches, *args)


def through_custom_vjp(f):
    """Somebody's own gradient, twice the right one, around us."""
    wrapped = jax.custom_vjp(f)
    twice = lambda cotangents: jax.tree.map(lambda t: 2 * t, cotangents)  # noqa: E731
    wrapped.defvjp(lambda *a: jax.vjp(f, *a), lambda pullback, t: pullback(twice(t)))
    return wrapped


def through_custom_jvp(f):
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def _(primals, tangents):
        out, along = jax.jvp(f, primals, tangents)
        return out, jax.tree.map(lambda t: 2 * t, along)

    return wrapped


def through_custom_vmap(f):
    wrapped = jax.custom_batching.custom_vmap(f)

    @wrapped.def_vmap
    def _(size, mapped, *args):
        axes = [0 if m else None for m in mapped]
        out = jax.vmap(f, in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return wrapped


def by_one_result(f):
    """The other results have no cotangents."""
    return lambda *args: jax.tree.leaves(f(*args))[0]


def with_frozen_weights(f):
    """The second operand gets zeros."""
    return lambda x, w, b: f(x, lax.stop_gradient(w), b)


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
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(total(f), (0, 1, 2)),
    "jit_grad": lambda f: jax.jit(jax.grad(total(f), (0, 1, 2))),
    "value_and_grad": lambda f: jax.value_and_grad(total(f), 1),
    "jvp": jvp_of(lambda f: f),
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
    "grad_of_one_result": gradient_of(by_one_result),
    "jvp_of_one_result": jvp_of(by_one_result),
    "grad_of_frozen": gradient_of(with_frozen_weights),
    "jacfwd_jacrev": lambda f: jax.jacfwd(jax.jacrev(total(f), 2), 2),
    "jacrev_jacfwd": lambda f: jax.jacrev(jax.jacfwd(total(f), 2), 2),
    "hessian_vector": lambda f: lambda *a: jax.jvp(jax.grad(total(f), (0, 1, 2)), half(a), a)[1],
    "third_order": third_order,
    "vmap_hessian_vector": lambda f: vmapped(0, None, None)(
        lambda *a: jax.jvp(jax.grad(total(f), 1), half(half(a)), a)[1]
    ),
    "scan": through_scan,
    "jvp_scan": jvp_of(through_scan),
    "grad_scan": lambda f: jax.grad(scanned(f), (0, 1, 2)),
    "vmap_grad_scan": lambda f: vmapped(None, 0, None)(jax.grad(scanned(f), (0, 1, 2))),
    "remat_scan": lambda f: jax.grad(scanned(jax.checkpoint(f)), (0, 1, 2)),
    "while": through_while,
    "jvp_while": jvp_of(through_while),
    "vmap_while": lambda f: vmapped(0, None, None)(through_while(f)),
    "fori": through_fori,
    "jvp_fori": jvp_of(through_fori),
    "grad_fori": gradient_of(through_fori),
    "cond": through_cond,
    "jvp_cond": jvp_of(through_cond),
    "grad_cond": gradient_of(through_cond),
    "vmap_cond": lambda f: vmapped(0, None, None)(through_cond(f)),
    "switch": through_switch,
    "grad_switch": gradient_of(through_switch),
    "grad_custom_vjp": gradient_of(through_custom_vjp),
    "vmap_grad_custom_vjp": lambda f: vmapped(0, None, 0)(gradient_of(through_custom_vjp)(f)),
    "grad_custom_jvp": gradient_of(through_custom_jvp),
    "jvp_custom_jvp": jvp_of(through_custom_jvp),
    "custom_vmap": lambda f: vmapped(None, 0, None)(through_custom_vmap(f)),
    "linearize": through_linearize,
    "map": lambda f: lambda *a: lax.map(lambda x: f(x, *a[1:]), jnp.stack([a[0]] * 2)),
    "map_in_batches": lambda f: (
        lambda *a: lax.map(lambda x: f(x, *a[1:]), jnp.stack([a[0]] * 5), batch_size=2)
    ),
    "grad_map": gradient_of(
        lambda f: lambda *a: lax.map(lambda x: f(x, *a[1:]), jnp.stack([a[0]] * 2))
    ),
}


@each_function
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_matches_plain_jnp(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    apply = TRANSFORMS[transform]
    assert_same(apply(graph)(*args), apply(plain)(*args))


@each_function
@pytest.mark.parametrize("transform", ["jit", "grad", "jvp", "vmap_0", "hessian", "scan"])
def test_disable_jit_gives_the_same(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args, apply = operands(function, key), TRANSFORMS[transform]
    with jax.disable_jit():
        got = apply(graph)(*args)
    assert_same(got, apply(plain)(*args))


@each_function
def test_eval_shape_and_make_jaxpr_know_the_outputs(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    shapes = jax.eval_shape(graph, *args)
    assert shapes == jax.eval_shape(plain, *args)
    avals = jax.make_jaxpr(graph)(*args).out_avals
    assert [a.shape for a in avals] == [s.shape for s in jax.tree.leaves(shapes)]
    assert not any(a.weak_type for a in avals)


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


@pytest.mark.skipif(len(jax.devices("cpu")) < 2, reason="needs 2 (host) devices")
@pytest.mark.parametrize("function", ["conv", "linear"])
@pytest.mark.parametrize("transform", ["jit", "grad", "jvp", "vmap_grad", "remat"])
def test_inside_shard_map(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args, apply = operands(function, key), TRANSFORMS[transform]
    got = apply(over_devices(graph))(*args)
    assert_same(jax.device_get(got), jax.device_get(apply(over_rows(plain))(*args)))


# -- layers, and training steps ------------------------------------------------------------------


def layers(f):
    """A stack of equal layers, by scan over their weights."""

    def run(x, weights, biases):
        step = lambda h, layer: (f(h, *layer), None)  # noqa: E731
        return lax.scan(step, x, (weights, biases))[0]

    return run


@jc.graph
def residual_block(g, x, w, b):
    return g.relu(g.add(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b), x))


def plain_residual_block(x, w, b):
    return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2) + b + x)


LAYERS = {
    "grad": lambda f: jax.grad(total(layers(f)), (0, 1, 2)),
    "remat": lambda f: jax.grad(total(layers(jax.checkpoint(f))), (0, 1, 2)),
    "jvp": lambda f: lambda *a: jax.jvp(layers(f), a, half(a)),
    "hessian_vector": lambda f: lambda *a: jax.jvp(jax.grad(total(layers(f)), 1), a, half(a))[1],
    "per_example": lambda f: (
        lambda x, w, b: jax.vmap(
            lambda image: jax.grad(total(layers(f)), (1, 2))(image[None], w, b)
        )(x)
    ),
}


@pytest.mark.parametrize("transform", LAYERS)
def test_scan_over_layers_with_stacked_weights(transform, key):
    kx, kw, kb = jax.random.split(key, 3)
    args = (
        jax.random.normal(kx, (2, 4, 5, 5)),
        jax.random.normal(kw, (3, 4, 4, 3, 3)) / 6,
        jax.random.normal(kb, (3, 1, 4, 1, 1)),
    )
    apply = LAYERS[transform]
    assert_same(apply(residual_block)(*args), apply(plain_residual_block)(*args))
    assert "while" not in primitives(jax.make_jaxpr(apply(residual_block))(*args))


def test_training_step_consumes_its_donated_weights(key):
    x, w, b = operands("conv", key)

    def step(f):
        def update(w, b):
            slopes = jax.grad(lambda w, b: total(f)(x, w, b), (0, 1))(w, b)
            return w - 0.1 * slopes[0], b - 0.1 * slopes[1]

        return update

    want = step(plain_conv)(w, b)
    donated = jnp.array(w), jnp.array(b)
    assert_same(jax.jit(step(conv), donate_argnums=(0, 1))(*donated), want)
    assert all(array.is_deleted() for array in donated)


# -- operands that do not move, and odd ones -------------------------------------------------------


@jc.graph
def quantized(g, x, w, scale):
    """int8 weights, dequantized in the graph."""
    return g.matmul(x, g.mul(w, scale).set_data_type("float32"))


def plain_quantized(x, w, scale):
    return x @ (w.astype(jnp.float32) * scale)


def quantized_operands():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((2, 3, 4)), jnp.float32)
    w = jnp.asarray(random.integers(-9, 9, (1, 4, 5)), jnp.int8)
    return x, w, jnp.float32(0.25)


def test_gradients_beside_integer_operands():
    args = quantized_operands()
    for by in (0, 2, (0, 2)):
        assert_same(
            jax.grad(total(quantized), by)(*args), jax.grad(total(plain_quantized), by)(*args)
        )
    along = jnp.ones_like(args[0]), np.zeros(args[1].shape, jax.dtypes.float0), jnp.float32(2)
    assert_same(jax.jvp(quantized, args, along), jax.jvp(plain_quantized, args, along))


def test_gradients_by_integers_are_an_error_or_float0():
    args = quantized_operands()
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(total(quantized), 1)(*args)
    by_x, by_w = jax.grad(total(quantized), (0, 1), allow_int=True)(*args)
    assert_same(by_x, jax.grad(total(plain_quantized))(*args))
    assert (by_w.dtype, by_w.shape) == (jax.dtypes.float0, args[1].shape)


def test_results_of_integers_have_no_gradient():
    """Nothing moves behind a comparison; what is chosen by it does."""
    chosen = jc.graph(lambda g, x, y: (g.cmp_gt(x, y), g.binary_select(x, y, g.cmp_gt(x, y))))
    x, y = jnp.array([[1.0, -2.0]]), jnp.array([[0.5, 3.0]])
    slopes = jax.grad(lambda x, y: chosen(x, y)[1].sum(), (0, 1))(x, y)
    assert_same(slopes, (jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])))
    (mask, _), (still, along) = jax.jvp(chosen, (x, y), (x, y))
    assert (still.dtype, still.shape) == (jax.dtypes.float0, mask.shape)
    assert_same(along, jnp.array([[1.0, 3.0]]))


def test_weakly_typed_numbers_have_gradients():
    scaled = jc.graph(lambda g, x, s: g.mul(x, s))
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    slope = jax.grad(lambda s: scaled(x, s).astype(jnp.float32).sum())(2.0)
    assert (slope.shape, slope.dtype, float(slope)) == ((), jnp.float32, 15.0)
    out, along = jax.jvp(lambda s: scaled(x, s), (2.0,), (1.0,))
    assert out.dtype == along.dtype == (x * 2.0).dtype == jnp.bfloat16
    np.testing.assert_array_equal(along, x)
    got = jax.vmap(lambda s: scaled(x, s))(jnp.arange(3.0))
    np.testing.assert_array_equal(got, x.astype(jnp.float32) * jnp.arange(3.0)[:, None, None])


@pytest.mark.parametrize("shape", [(0, 4, 6, 6), (2, 0, 6, 6)], ids=["no image", "no channel"])
@pytest.mark.parametrize(
    "transform", ["grad", "jvp", "vmap_all", "vmap_grad", "grad_vmap", "remat"]
)
def test_arrays_without_elements(shape, transform, key):
    @jc.graph
    def scaled(g, x, s, y):
        return {"y": g.relu(x * s) + y, "sums": g.reduction(x, mode="ADD", out_dims=[1, 1, 6, 6])}

    def plain(x, s, y):
        return {"y": jax.nn.relu(x * s) + y, "sums": x.sum((0, 1), keepdims=True)}

    args = [jnp.ones(shape), jnp.full((1, 1, 1, 6), 0.5), jnp.ones((1, 1, 1, 1))]
    apply = TRANSFORMS[transform]
    assert_same(apply(scaled)(*args), apply(plain)(*args))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap_all", "vmap_grad", "grad_vmap"])
def test_products_of_no_rows(transform, key):
    args = [jnp.ones((0, 3, 4)), jnp.ones((1, 4, 4)), jnp.ones((1, 1, 4))]
    apply = TRANSFORMS[transform]
    assert_same(apply(linear)(*args), apply(plain_linear)(*args))
    images = [jnp.ones((0, 4, 6, 6)), *operands("conv", key)[1:]]
    assert_same(apply(conv)(*images), apply(plain_conv)(*images))


# -- linear functions, exported ones, and what looks for errors ------------------------------------


def test_linear_transpose_of_linear_graphs(key):
    x, w, _ = operands("conv", key)
    convolved = jc.graph(lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]) * 0.5 - x)
    plain = lambda x: lax.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2) * 0.5 - x  # noqa: E731
    y = plain(x)
    got = jax.linear_transpose(lambda x: convolved(x, w), x)(y)
    assert_same(got, jax.linear_transpose(plain, x)(y))
    pair = jc.graph(lambda g, a, b: (g.reduction(a, mode="ADD"), g.sub(a, b)))
    plain_pair = lambda a, b: (a.sum(keepdims=True), a - b)  # noqa: E731
    cotangents = jnp.full((1, 1), 3.0), jnp.ones((2, 3))
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    got = jax.linear_transpose(lambda a, b: pair(a, b), shape, shape)(cotangents)
    assert_same(got, jax.linear_transpose(plain_pair, shape, shape)(cotangents))


@each_function
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap_grad"])
def test_derivatives_are_exported(function, transform, key):
    graph, plain, _ = FUNCTIONS[function]
    args, apply = operands(function, key), TRANSFORMS[transform]
    exported = jax.export.export(jax.jit(apply(graph)), platforms=["cpu"])(*args)
    assert_same(exported.call(*args), apply(plain)(*args))


def test_exported_functions_are_differentiated(key):
    args = operands("linear", key)
    exported = jax.export.export(jax.jit(linear), platforms=["cpu"])(*args)
    gradient = jax.grad(total(exported.call), (0, 1, 2))
    assert_same(gradient(*args), jax.grad(total(plain_linear), (0, 1, 2))(*args))


@each_function
def test_eval_shape_of_derivatives(function, key):
    graph, plain, _ = FUNCTIONS[function]
    args = operands(function, key)
    for name in ("grad", "jvp", "vmap_grad", "hessian"):
        apply = TRANSFORMS[name]
        assert jax.eval_shape(apply(graph), *args) == jax.eval_shape(apply(plain), *args)


def test_debug_nans_finds_what_our_operation_made():
    logarithm = jc.graph(lambda g, x: g.log(x))
    x = jnp.array([[1.0, -1.0]])
    with jax.debug_nans(True):
        assert float(logarithm(jnp.abs(x)).sum()) == 0.0
        for function in (logarithm, jax.jit(logarithm)):
            with pytest.raises(FloatingPointError, match="invalid value"):
                jax.block_until_ready(function(x))
        root = jc.graph(lambda g, x: g.sqrt(x))
        jax.block_until_ready(jax.grad(lambda x: root(x).sum())(jnp.ones((1, 2))))
        with pytest.raises(FloatingPointError, match="invalid value"):
            jax.block_until_ready(jax.grad(lambda x: root(x).sum())(-jnp.ones((1, 2))))


def test_checks_of_checkify_stand_beside_our_graphs(key):
    """Its own checks of values cannot look into a graph; the user's checks around it work."""
    args = operands("linear", key)

    def checked(x, w, b):
        checkify.check(jnp.all(x < 1e6), "x is too large")
        y = linear(x, w, b)["y"]
        checkify.check(jnp.all(jnp.isfinite(y)), "y is not finite")
        return y

    run = jax.jit(checkify.checkify(checked))
    error, y = run(*args)
    error.throw()
    assert_same(y, plain_linear(*args)["y"])
    with pytest.raises(checkify.JaxRuntimeError, match="x is too large"):
        run(args[0] + 1e7, *args[1:])[0].throw()
    with pytest.raises(checkify.JaxRuntimeError, match="y is not finite"):
        run(args[0], args[1] * jnp.inf, args[2])[0].throw()
    gradient = checkify.checkify(jax.grad(lambda *a: checked(*a).sum()))
    error, slope = jax.jit(gradient)(*args)
    error.throw()
    assert_same(slope, jax.grad(lambda *a: plain_linear(*a)["y"].sum())(*args))
