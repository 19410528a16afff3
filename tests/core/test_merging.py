"""Products keep their dimensions apart; cuDNN gets those of three dimensions, with equal values."""

import jax
import jax.numpy as jnp
import pytest
from transformations import graphs

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.merging import is_split
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.planning.split import part


def matmul(**terms):
    return lambda x, w, b, *r: jc.ops.matmul(
        x, w, bias=b, residual=r[0] if r else None, activation="relu", **terms
    )


def dot_general(*numbers):
    return lambda x, w: jc.ops.dot_general(x, w, numbers)


PRODUCTS = {
    "rows": (matmul(), (4, 3, 5), (5, 8), (8,), (4, 3, 8)),
    "more rows": (matmul(), (2, 4, 3, 5), (1, 5, 8), (8,)),
    "batched": (matmul(), (2, 4, 3, 5), (2, 4, 5, 8), (8,), (2, 4, 3, 8)),
    "batch of one": (matmul(), (3, 5), (2, 4, 5, 8), (8,)),
    "batch of some": (matmul(), (2, 1, 3, 5), (2, 4, 5, 8), (8,)),
    "turned": (matmul(transpose_a=True, transpose_b=True), (4, 5, 3), (8, 5), (8,)),
    "heads": (dot_general(((2, 3), (0, 1)), ((), ())), (4, 3, 2, 5), (2, 5, 8)),
    "last batch": (dot_general(((1,), (1,)), ((2,), (2,))), (8, 6, 4), (7, 6, 4)),
    "columns": (dot_general(((0,), (0,)), ((), ())), (6, 8, 4), (6, 3, 2)),
}


def transformed(f, *xs):
    """A product's gradients and batches, with operands."""

    def step(*ys):
        return jax.grad(lambda *zs: jnp.sum(jnp.sin(f(*zs))), (*range(len(ys)),))(*ys)

    yield f, xs
    yield step, xs
    for axes in ((0,) * len(xs), (0, *[None] * (len(xs) - 1)), (None, 0, *[None] * (len(xs) - 2))):
        ys = [
            x if axis is None else jnp.stack([x, x + 1, -x])
            for x, axis in zip(xs, axes, strict=True)
        ]
        yield jax.vmap(f, axes), ys
        yield jax.vmap(step, axes), ys


def pieces(spec):
    """A graph with one product, or each product of it."""
    products = [i for i, call in enumerate(spec.calls) if is_split(call.node)]
    return [spec] if len(products) == 1 else [part(spec, [i]) for i in products]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_merged_product_is_the_same(name, key):
    f, *shapes = PRODUCTS[name]
    keys = jax.random.split(key, len(shapes))
    xs = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    found = [spec for g, ys in transformed(f, *xs) for spec in graphs(jax.make_jaxpr(g)(*ys))]
    found = [piece for spec in found for piece in pieces(spec)]
    assert len(found) >= 12
    for spec in found:
        edge = boundary(spec)
        assert {len(t.shape) for t in edge.planned.tensors} == {3}
        given = [
            jax.random.normal(jax.random.fold_in(key, i), t.shape) > 0
            if t.dtype == "bool"
            else jax.random.normal(jax.random.fold_in(key, i), t.shape)
            for i, t in enumerate(spec.input_tensors)
        ]
        got = edge.received(evaluate(edge.planned, *edge.sent(given)))
        for x, y in zip(got, evaluate(spec, *given), strict=True):
            assert x.shape == y.shape
            assert jnp.allclose(x, y, atol=1e-4), str(spec)
