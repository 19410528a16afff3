"""Matrices with any number of batch dimensions: numbers, derivatives, vmap, and what cuDNN sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph import layout
from jax_cudnn._core.graph.wire import wire

KEY = jax.random.key(0)


@jc.graph
def product(g, a, b):
    return g.matmul(a, b)


@jc.graph
def fused(g, a, b, bias, residual):
    return g.relu(g.add(g.add(g.matmul(a, b), bias), residual))


def arrays(*shapes, dtype="float32"):
    keys = jax.random.split(KEY, len(shapes))
    return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


SHAPES = {
    "no batch": ((8, 6), (6, 16)),
    "two batch dimensions": ((2, 3, 8, 6), (2, 3, 6, 16)),
    "in part": ((2, 3, 8, 6), (2, 1, 6, 16)),
    "both in part": ((2, 1, 8, 6), (1, 3, 6, 16)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_products_derivatives_and_batches_are_those_of_jnp(case):
    a, b = arrays(*SHAPES[case])
    stack, both = jnp.stack([a, 2 * a, -a]), jnp.stack([b, b + 1, 3 * b])

    def run(f):
        grads = jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))(a, b)
        batches = (((0, None), (stack, b)), ((None, 0), (a, both)), ((0, 0), (stack, both)))
        return f(a, b), grads, [jax.vmap(f, axes)(*operands) for axes, operands in batches]

    got, want = (jax.tree.leaves(jax.jit(run, static_argnums=0)(f)) for f in (product, jnp.matmul))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def spec_of(function, *avals):
    return wire(function.trace(*avals)[1].spec.for_planning())


def test_cudnn_sees_one_batch_dimension():
    """A broadcast in part is XLA's, in front of the plan."""
    spec = spec_of(fused, *arrays((2, 3, 8, 6), (2, 3, 6, 16), (1, 1, 1, 16), (2, 3, 8, 16)))
    seen = {t.name: layout.view(spec, t) for t in spec.tensors}
    dims = [seen[name][0] for name in ("a", "b", "bias", "residual")]
    assert dims == [(6, 8, 6), (6, 6, 16), (1, 1, 16), (6, 8, 16)]
    assert seen["a"][1] == [48, 6, 1]
    spec = spec_of(product, *arrays((2, 3, 8, 6), (2, 1, 6, 16)))
    assert spec.tensor("b").shape == (2, 3, 6, 16)
    assert spec_of(product, *arrays((2, 3, 8, 6), (1, 1, 6, 16))).tensor("b").shape[:2] == (1, 1)


@pytest.mark.parametrize(
    ("strides", "dims"),
    [
        ([48, 16, 96, 1], ((6, 6, 16), [16, 96, 1])),  # the batch between rows and columns
        ([96, 192, 16, 1], None),  # the second batch dimension in front of the first
    ],
)
def test_stated_strides_are_shown_where_the_batch_is_one_in_memory(strides, dims):
    strided = jc.graph(lambda g, a, b: g.matmul(a, b.set_stride(strides)))
    spec = spec_of(strided, *arrays((2, 3, 8, 6), (2, 3, 6, 16)))
    assert layout.as_matrices(spec, spec.tensor("b")) == dims


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["no batch", "both in part"])
def test_products_with_epilogues_on_the_gpu(case):
    a, b = arrays(*SHAPES[case], dtype="bfloat16")
    a, b = jnp.tile(a, (8, 8)), jnp.tile(b, (8, 8))
    shape = (*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    bias, residual = arrays((1,) * (len(shape) - 1) + shape[-1:], shape, dtype="bfloat16")
    strict = fused.with_options(implementation="cudnn")
    got = jax.jit(strict)(a, b, bias, residual).astype(jnp.float32)
    a, b, bias, residual = (np.asarray(x, np.float64) for x in (a, b, bias, residual))
    want = np.maximum(a @ b + bias + residual, 0)
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-2 * np.abs(want).max())
