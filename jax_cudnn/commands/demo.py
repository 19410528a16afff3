"""``python -m jax_cudnn demo``: a small classifier of handwritten digits, fitted and run fused."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.context import target
from .._core.cuda import device_nodes
from .._core.errors import LibraryError
from .._core.graph.trace import graph
from .._core.package import install
from .._core.planning.support import plan

_CHANNELS = 32
_SECONDS = 5.0


@graph
def conv_bias_relu(g, image, weight, bias):
    return g.relu(g.bias(g.conv_fprop(image, weight, padding=[1, 1]), bias))


@graph
def matmul_bias(g, x, weight, bias):
    return g.bias(g.matmul(x, weight), bias)


def classify(parameters: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Logits (N, 10) of images (N, 1, 8, 8): two graphs, each one cuDNN plan on a GPU."""
    x = conv_bias_relu(images, parameters["conv"], parameters["conv_bias"])
    x = matmul_bias(x.reshape(1, len(x), -1), parameters["dense"], parameters["dense_bias"])
    return x[0]


def classify_plainly(parameters: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """The same in plain JAX."""
    x = jax.lax.conv(images, parameters["conv"], (1, 1), "SAME")
    x = jax.nn.relu(x + parameters["conv_bias"])
    return x.reshape(len(x), -1) @ parameters["dense"][0] + parameters["dense_bias"][0]


def demo() -> None:
    """Fits, classifies, compares, and says what ran where."""
    if not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        # Without a GPU the CUDA plugin only prints its failure to find one.
        jax.config.update("jax_platforms", "cpu")
    train, test = _digits()
    where = jax.devices()[0]
    print(f"device          {where.device_kind} ({where.platform}), jax {jax.__version__}")

    started = time.perf_counter()
    parameters, steps = _fit(*train)
    print(f"fitted          {steps} steps in {time.perf_counter() - started:.1f} s")

    images, labels = test
    logits = jax.jit(classify)(parameters, images)
    plain = jax.jit(classify_plainly)(parameters, images)
    accuracy = float(jnp.mean(logits.argmax(-1) == labels))
    same = float(jnp.mean(logits.argmax(-1) == plain.argmax(-1)))
    difference = float(jnp.linalg.norm(logits - plain) / jnp.linalg.norm(plain))
    on_gpu = _on_cuda(classify, parameters, images)
    print(
        f"classified      {len(labels)} digits, " + ("on cuDNN" if on_gpu else "on the reference")
    )
    print(f"accuracy        {accuracy:.1%}")
    print(f"plain JAX       {same:.1%} equal classes, relative difference {difference:.1e}")
    _print_plans(parameters, images, on_gpu)


def _digits() -> Any:
    """scikit-learn's digits, (N, 1, 8, 8) in [0, 1] with labels; 1,400 to fit, 397 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LibraryError(
            "the demo needs scikit-learn for its data",
            got=str(error),
            fix=install("demo"),
        ) from error
    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = jnp.asarray(data.images[order, None] / 16, jnp.float32)
    labels = jnp.asarray(data.target[order])
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def _fit(images: jax.Array, labels: jax.Array) -> tuple[dict[str, jax.Array], int]:
    """Gradient descent with momentum through the graphs, for a few seconds."""
    keys = jax.random.split(jax.random.key(0), 2)
    features = _CHANNELS * images.shape[2] * images.shape[3]
    parameters = {
        "conv": jax.random.normal(keys[0], (_CHANNELS, 1, 3, 3)) / 3,
        "conv_bias": jnp.zeros((1, _CHANNELS, 1, 1)),
        "dense": jax.random.normal(keys[1], (1, features, 10)) / features**0.5,
        "dense_bias": jnp.zeros((1, 1, 10)),
    }

    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(classify(parameters, images))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit
    def step(parameters: Any, momentum: Any, images: jax.Array, labels: jax.Array) -> Any:
        gradient = jax.grad(loss)(parameters, images, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - 0.05 * m, parameters, momentum), momentum

    momentum = jax.tree.map(jnp.zeros_like, parameters)
    batch, steps, started = 200, 0, time.perf_counter()
    while steps < 300 and time.perf_counter() - started < _SECONDS:
        at = steps * batch % len(images)
        chunk = slice(at, at + batch)
        parameters, momentum = step(parameters, momentum, images[chunk], labels[chunk])
        jax.block_until_ready(parameters)
        steps += 1
    return parameters, steps


def _on_cuda(function: Any, *arguments: Any) -> bool:
    """Whether the compiled function really holds our custom calls."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    return 'custom_call_target="jax_cudnn"' in (program or "")


def _print_plans(parameters: dict[str, jax.Array], images: jax.Array, on_gpu: bool) -> None:
    """The plans that ran, or those an H200 would run."""
    hidden = jax.ShapeDtypeStruct((1, len(images), parameters["dense"].shape[1]), jnp.float32)
    calls = {
        conv_bias_relu: (images, parameters["conv"], parameters["conv_bias"]),
        matmul_bias: (hidden, parameters["dense"], parameters["dense_bias"]),
    }
    print("cuDNN plans     " + ("as run:" if on_gpu else "for an H200, built here without a GPU:"))
    try:
        with target(None if on_gpu else "H200"):
            plans = {
                function.name: plan(function, *operands) for function, operands in calls.items()
            }
    except LibraryError as error:
        print(f"  not built: {error}")
        return
    for name, built in plans.items():
        print(f"  {name:<15} {built.engine}, workspace {built.workspace_bytes} bytes", end=", ")
        print(f"first of {built.candidate_count} candidates")
