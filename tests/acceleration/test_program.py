"""A function with its regions replaced is the user's own: results, types, names, effects."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_cudnn.acceleration import api
from jax_cudnn.acceleration.api import KINDS, search

SHAPE = (2, 8, 2, 4)


def arrays(*shapes, dtype="float32", seed=0):
    noise = np.random.default_rng(seed)
    return [jnp.asarray(noise.normal(size=shape), dtype) for shape in shapes]


def attend(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def replaced(fn, kinds=KINDS):
    """The function with all regions replaced, whatever a GPU would choose."""

    def run(*args):
        leaves, tree = jax.tree.flatten(args)
        flat = lambda *leaves: fn(*jax.tree.unflatten(tree, leaves))  # noqa: E731
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        program, _ = search(closed, kinds)
        for inner in program.programs:
            inner.regions = inner.found
        return jax.tree.unflatten(jax.tree.structure(shape), program.run(*closed.consts, *leaves))

    return run


def kinds_in(fn, *args):
    program, _ = search(jax.make_jaxpr(fn)(*args), KINDS)
    return [region.kind for inner in program.programs for region in inner.found]


def check(fn, *args, kinds=("attention",), grad=True):
    assert kinds_in(fn, *args) == [*kinds]
    fast = replaced(fn)
    for run in (lambda f: f(*args), lambda f: jax.jit(f)(*args)):
        want, got = run(fn), run(fast)
        assert jax.tree.structure(want) == jax.tree.structure(got)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    if grad:
        total = lambda f: lambda *x: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(*x)))  # noqa: E731
        places = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
        want = jax.jit(jax.grad(total(fn), places))(*args)
        got = jax.jit(jax.grad(total(fast), places))(*args)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_under_and_around_every_transformation():
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)
    check(attend, q, k, v)
    check(jax.jit(attend), q, k, v)
    check(jax.checkpoint(attend), q, k, v)
    check(lambda q, k, v: jax.lax.scan(lambda c, _: (attend(c, k, v), c), q, None, 3), q, k, v)
    check(
        lambda q, k, v: jax.lax.cond(q[0, 0, 0, 0] > 0, attend, lambda *x: x[0], q, k, v), q, k, v
    )
    looped = lambda q, k, v: jax.lax.fori_loop(0, 2, lambda i, c: attend(c, k, v), q)  # noqa: E731
    check(looped, q, k, v)
    whiled = lambda q, k, v: jax.lax.while_loop(  # noqa: E731
        lambda c: c[0] < 2, lambda c: (c[0] + 1, attend(c[1], k, v)), (0, q)
    )
    check(whiled, q, k, v, grad=False)
    check(jax.vmap(attend), *(jnp.stack([x, x + 1]) for x in (q, k, v)))
    fast = replaced(attend)
    batched = jax.vmap(fast, (0, None, None))(jnp.stack([q, 2 * q]), k, v)
    np.testing.assert_allclose(batched[1], attend(2 * q, k, v), atol=1e-5)
    tangents = jax.jvp(fast, (q, k, v), (q, k, v))[1]
    np.testing.assert_allclose(tangents, jax.jvp(attend, (q, k, v), (q, k, v))[1], atol=1e-4)


def test_on_devices_of_a_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)

    def body(q, k, v):
        return jax.lax.psum(attend(q, k, v), "x")

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    check(mapped, q, k, v)
    whole = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    check(whole, q, k, v)


def test_functions_with_derivatives_of_their_own():
    @jax.custom_jvp
    def guided(x):
        return jnp.maximum(x, 0.0)

    guided.defjvp(lambda primals, tangents: (guided(*primals), 3 * tangents[0]))

    @jax.custom_vjp
    def kept(q, k, v):
        return attend(q, k, v)

    kept.defvjp(lambda *x: (attend(*x), x), lambda x, g: tuple(2 * y for y in x))
    x, w, b = arrays((4, 8), (8, 16), (16,))
    check(lambda x, w, b: jax.nn.relu(x @ w + b), x, w, b, kinds=["product"])
    for own in (guided, lambda y: guided(jax.nn.relu(y))):
        program, _ = search(jax.make_jaxpr(lambda x, w, b, f=own: f(x @ w + b))(x, w, b), KINDS)
        assert "custom" in {e.name.partition("_")[0] for e in program.equations}
    check(lambda x, w, b: guided(x @ w + b), x, w, b, kinds=["product"])
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)
    check(kept, q, k, v, kinds=[])


def test_the_derivative_at_a_kink_is_the_users():
    w, b = jnp.ones((2, 2)), jnp.zeros(2)
    slope = lambda f: jax.grad(lambda x: replaced(f)(x, w, b).sum())(jnp.zeros((1, 2)))  # noqa: E731
    half = lambda x, w, b: jnp.maximum(x @ w + b, 0.0)  # noqa: E731
    assert np.all(slope(half) == 1.0)  # 0.5 each
    assert np.all(slope(lambda x, w, b: jax.nn.relu(x @ w + b)) == 0.0)


def test_effects_names_donation_and_types_stay(capfd):
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)

    def noisy(q, k, v):
        with jax.named_scope("mine"):
            out = attend(q, k, v)
        jax.debug.print("sum {x}", x=out.sum())
        return {"out": out, "weak": jnp.where(q.sum() > 0, 1.0, 2.0), "count": jnp.int32(3)}

    fast = replaced(noisy)
    jax.block_until_ready(jax.jit(fast)(q, k, v))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum") == 1
    check(noisy, q, k, v, grad=False)
    text = jax.jit(fast).trace(q, k, v).lower().as_text(debug_info=True)
    assert "mine" in text
    assert "attend" in text  # the user's line

    donating = jax.jit(attend, donate_argnums=0)
    inner = jax.make_jaxpr(replaced(lambda q, k, v: donating(q * 1, k, v)))(q, k, v)
    (call,) = [e for e in inner.eqns if "donated_invars" in e.params]
    assert call.params["donated_invars"] == (True, False, False)


def test_what_is_read_elsewhere_is_neither_removed_nor_computed_twice():
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)

    def with_weights(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", p, v), p

    check(with_weights, q, k, v, kinds=[])
    program, missed = search(jax.make_jaxpr(with_weights)(q, k, v), KINDS)
    assert not program.found
    assert "jax.grad(jc.accelerate(loss))" in missed[0][1]
    inside = lambda q, k, v: jax.grad(lambda q: attend(q, k, v).sum())(q)  # noqa: E731
    check(inside, q, k, v, kinds=[], grad=False)


def test_a_mask_that_only_a_region_needed_goes_and_one_that_others_need_stays():
    q, k, v = arrays(SHAPE, SHAPE, SHAPE)
    names = lambda f: str(jax.make_jaxpr(replaced(f))(q, k, v))  # noqa: E731
    assert "iota" not in names(attend)

    def shows_mask(q, k, v):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + jnp.where(mask, 0.0, -1e9)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v), mask

    assert "iota" in names(shows_mask)
    check(shows_mask, q, k, v, grad=False)


def test_policies_take_a_graph_for_the_product_in_it():
    x, w, b = arrays((4, 8), (8, 16), (16,))
    layer = lambda x, w, b: jnp.sin(jax.nn.relu(x @ w + b))  # noqa: E731
    saved = {}
    for name, policy in {"dots": jax.checkpoint_policies.dots_saveable, "none": None}.items():
        fast = replaced(jax.checkpoint(layer, policy=policy))
        text = str(jax.make_jaxpr(jax.grad(lambda *a, f=fast: f(*a).sum()))(x, w, b))
        saved[name] = text.count(" = conv_general") + text.count("cudnn[")
    assert saved["dots"] < saved["none"]


STEPS = (
    *("unary", "binary", "dot", "row", "scale", "cast", "where", "softmax", "bias"),
    *("layer", "layer", "head", "head"),
)


SCALES = [(1, 1, 1), (0.125, 1, 1), (1, 0.5, 1), (0.25, 1, 0.5)]


def _random_program(seed):
    """A random function of four arrays, from operations that regions are made of."""
    noise = np.random.default_rng(seed)
    pick = lambda options: options[noise.integers(len(options))]  # noqa: E731
    steps = []
    for _ in range(noise.integers(4, 16)):
        kind = pick(
            [
                "unary",
                "binary",
                "dot",
                "row",
                "scale",
                "cast",
                "where",
                "softmax",
                "bias",
                "layer",
                "head",
            ]
        )
        steps.append((kind, int(noise.integers(1 << 30))))

    def run(a, b, c, n):
        values = [a, b, c]
        for kind, draw in steps:
            x, y = values[draw % len(values)], values[(draw // 7) % len(values)]
            if kind == "unary":
                f = [jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.exp, jax.nn.silu, jnp.negative]
                new = f[draw % len(f)](jnp.clip(x, -3, 3))
            elif kind == "binary":
                f = [jnp.add, jnp.subtract, jnp.multiply, jnp.maximum]
                new = f[draw % len(f)](x, y)
            elif kind == "dot":
                new = jnp.einsum(["ij,kj->ik", "ij,jk->ik", "ji,jk->ki"][draw % 3], x, y) / 4
            elif kind == "row":
                mean = x.mean(draw % 2, keepdims=True)
                new = (x - mean) * jax.lax.rsqrt(jnp.var(x, draw % 2, keepdims=True) + 1e-3)
            elif kind == "scale":
                new = x * [0.5, 2.0, -1.0][draw % 3]
            elif kind == "cast":
                new = x.astype("bfloat16").astype("float32")
            elif kind == "where":
                rows, columns = jnp.arange(8)[:, None], jnp.arange(8)[None]
                seen = [rows >= columns, columns < n, rows - columns < 3][draw % 3]
                new = jnp.where(seen, x, 0.0)
            elif kind == "layer":
                f = [jax.nn.relu, jax.nn.gelu, jnp.tanh, jax.nn.silu, lambda z: z, jax.nn.relu6]
                z = x @ y / 4 * [1.0, 0.5][draw % 2] + values[draw % 3][0]
                new = f[draw % len(f)](z + y if draw % 3 else z)
            elif kind == "head":
                q, k, v = x, y, values[(draw // 3) % len(values)]
                if draw % 3:
                    q, k = jnp.clip(q, -2, 2), jnp.clip(k, -2, 2)
                q, k, v = (s * z for s, z in zip(SCALES[(draw // 17) % 4], (q, k, v), strict=True))
                z = jnp.einsum("ij,kj->ik", q, k)
                z = [z, 0.5 * z, 4 * jnp.tanh(z / 4), z + c][draw % 4]
                rows, columns = jnp.arange(8)[:, None], jnp.arange(8)[None]
                seen = [
                    True,
                    rows >= columns,
                    columns < n,
                    (columns <= rows) & (rows < columns + 3),
                ]
                z = jnp.where(seen[(draw // 5) % 4], z, [-1e30, -jnp.inf][draw % 2])
                e = jnp.exp(z - z.max(-1, keepdims=True))
                new = [
                    jax.nn.softmax(z) @ v,
                    e @ v / e.sum(-1, keepdims=True),
                    (e / e.sum(-1, keepdims=True)) @ v,
                    jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True)) @ v,
                ][(draw // 11) % 4]
            elif kind == "softmax":
                new = jax.nn.softmax(jnp.clip(x, -5, 5), -1) @ y
            else:
                new = x + y[0] if draw % 2 else x * y[0] + y[1]
            large = kind in ("binary", "dot", "layer", "head") and draw % 4
            values.append(jnp.clip(new, -1e3, 1e3) if large else new)
        return values[-1], values[-2], values[len(values) // 2]

    return run


PROGRAMS = int(os.environ.get("JAX_CUDNN_PROGRAMS", "60"))


@pytest.mark.parametrize("first", range(0, PROGRAMS, 15))
def test_random_programs_keep_their_results(first):
    found = 0
    for seed in range(first, first + 15):
        fn = _random_program(seed)
        args = (*arrays((8, 8), (8, 8), (8, 8), seed=seed), jnp.int32(5))
        want, got = jax.jit(fn)(*args), jax.jit(replaced(fn))(*args)
        for a, b in zip(want, got, strict=True):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type), seed
            atol = 2e-2 * (1 + float(jnp.abs(a).max()))
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=atol, err_msg=f"{seed}")
        found += len(kinds_in(fn, *args))
    assert found


def test_a_function_without_regions_runs_as_it_was():
    fast = api.accelerate(lambda x: jnp.sin(x) + 1)
    assert str(jax.make_jaxpr(fast)(1.0)) == str(jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0))
