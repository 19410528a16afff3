"""Graphs run on the CPU with only JAX and NumPy: without cuDNN, its frontend and Flax."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc

for module in ("cudnn", "flax", "nvidia"):
    assert importlib.util.find_spec(module) is None, f"{module} is installed"
assert "site-packages" in jc.__file__, jc.__file__


@jc.graph
def matmul_relu(g, x, y):
    return g.relu(g.matmul(x, y))


x, y = jax.random.normal(jax.random.key(0), (2, 1, 8, 8))
got = jax.jit(matmul_relu)(x, y)
np.testing.assert_allclose(got, jnp.maximum(x @ y, 0), rtol=1e-5, atol=1e-5)
print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {jc.__file__}: a graph runs")
