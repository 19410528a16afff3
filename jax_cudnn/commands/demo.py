"""``python -m jax_cudnn demo``: fit a small classifier of digits, run it fused, and time it."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._core.context import target
from .._core.errors import LibraryError
from .._core.graph.trace import graph
from .._core.package import install
from .._core.plans.plans import plan
from .bench import OURS, Progress
from .facts import cuda_plugins
from .timing import compare

_CHANNELS = 32
_SECONDS, _STEPS = 3.0, 300


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    about = "rain a small classifier on real data and run it fused"
    parser = commands.add_parser("demo", help=f"t{about}", description=f"T{about}.")
    parser.set_defaults(run=run)


@graph
def conv_bias_relu(g, image, weight, bias):
    return g.relu(g.bias(g.conv_fprop(image, weight, padding=[1, 1]), bias))


@graph
def matmul_bias(g, x, weight, bias):
    return g.bias(g.matmul(x, weight), bias)


def classify(parameters: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Logits (N, 10) of images (N, 1, 8, 8): two graphs, each of them one cuDNN plan on a GPU."""
    x = conv_bias_relu(images, parameters["conv"], parameters["conv_bias"])
    x = matmul_bias(x.reshape(1, len(x), -1), parameters["dense"], parameters["dense_bias"])
    return x[0]


def classify_plainly(parameters: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """The same in plain JAX."""
    x = jax.lax.conv(images, parameters["conv"], (1, 1), "SAME")
    x = jax.nn.relu(x + parameters["conv_bias"])
    return x.reshape(len(x), -1) @ parameters["dense"][0] + parameters["dense_bias"][0]


def run(options: argparse.Namespace) -> int:
    """Fits, classifies, compares and times; says what ran where, and what to do next."""
    train, (images, labels) = _digits()
    where = jax.devices()[0]
    print(f"device          {where.device_kind} ({where.platform}), jax {jax.__version__}")

    started = time.perf_counter()
    parameters, steps = _fit(*train)
    print(f"fitted          {steps} steps in {time.perf_counter() - started:.1f} s")

    compiled = jax.jit(classify).lower(parameters, images).compile()
    on_gpu = 'custom_call_target="jax_cudnn"' in (compiled.as_text() or "")
    logits = compiled(parameters, images)
    plain = jax.jit(classify_plainly)(parameters, images)
    accuracy = float(jnp.mean(logits.argmax(-1) == labels))
    same = float(jnp.mean(logits.argmax(-1) == plain.argmax(-1)))
    difference = float(jnp.linalg.norm(logits - plain) / jnp.linalg.norm(plain))
    print(f"classified      {len(labels)} digits, {'on cuDNN' if on_gpu else 'on the reference'}")
    print(f"accuracy        {accuracy:.1%}")
    print(f"plain JAX       {same:.1%} equal classes, relative difference {difference:.1e}")
    _print_plans(parameters, images, on_gpu)
    if on_gpu:
        print("speed           ms per call, median:")
        for name, times in _times(parameters, images):
            print(f"  {name}\n{chart(times)}")
    print(f"next            {_advice(on_gpu)}")
    return 0


def _digits() -> Any:
    """scikit-learn's digits, (N, 1, 8, 8) in [0, 1] with labels; 1,400 to fit, 397 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LibraryError(
            "the demo reads its data from scikit-learn, which cannot be imported",
            got=str(error),
            fix=install("demo"),
        ) from error
    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = jnp.asarray(data.images[order, None] / 16, jnp.float32)
    labels = jnp.asarray(data.target[order])
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def _fit(images: jax.Array, labels: jax.Array) -> tuple[dict[str, jax.Array], int]:
    """Gradient descent with momentum, for a few seconds."""
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
    with Progress() as progress:
        progress("fitting: compiling a step")
        while steps < _STEPS and time.perf_counter() - started < _SECONDS:
            at = steps * batch % len(images)
            chunk = slice(at, at + batch)
            parameters, momentum = step(parameters, momentum, images[chunk], labels[chunk])
            jax.block_until_ready(parameters)
            steps += 1
            progress(f"fitting: step {steps} of at most {_STEPS}")
    return parameters, steps


def _print_plans(parameters: dict[str, jax.Array], images: jax.Array, on_gpu: bool) -> None:
    """Prints the plans that ran, or those that an H200 would run."""
    hidden = jax.ShapeDtypeStruct((1, len(images), parameters["dense"].shape[1]), jnp.float32)
    calls = {
        conv_bias_relu: (images, parameters["conv"], parameters["conv_bias"]),
        matmul_bias: (hidden, parameters["dense"], parameters["dense_bias"]),
    }
    print("cuDNN plans     " + ("as run:" if on_gpu else "for an H200, built without a GPU:"))
    try:
        with target(None if on_gpu else "H200"):
            plans = {f.name: plan(f, *operands) for f, operands in calls.items()}
    except LibraryError as error:
        print(f"  not built: {error}")
        return
    for name, built in plans.items():
        text = f"{built.engine}, workspace {built.workspace_bytes} bytes"
        print(f"  {name:<15} {text}, first of {built.candidate_count} candidates")


def _times(parameters: Any, images: jax.Array) -> Iterator[tuple[str, dict[str, float]]]:
    """The demo's model and causal attention: ms per call of ours and of plain JAX."""
    many = jnp.tile(images, (20, 1, 1, 1))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2048, 16, 64), jnp.bfloat16)
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    ours = functools.partial(ops.dot_product_attention, is_causal=True)
    for name, functions, operands in (
        (f"{len(many)} digits", (classify, classify_plainly), (parameters, many)),
        ("causal attention, bfloat16[4,2048,16,64]", (ours, plain), (q, k, v)),
    ):
        named: dict[str, Any] = dict(zip((OURS, "plain JAX"), functions, strict=True))
        found = compare(named, *operands, tolerance=0.05, seconds=1.0)
        yield name, {way: 1e3 * found.median(way) for way in found.seconds}


def chart(times: Mapping[str, float]) -> str:
    """A bar of text for each time."""
    bar = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    longest = max(times.values(), default=1.0)
    return "\n".join(
        f"    {name:<10} {ms:8.3f}  {bar * max(1, round(40 * ms / longest))}"
        for name, ms in times.items()
    )


def _advice(on_gpu: bool) -> str:
    """What to do next."""
    text = 'accelerate your own model: "Quickstart" in README.md'
    if not on_gpu and cuda_plugins() and "JAX_PLATFORMS" not in os.environ:
        text += "; without a GPU, set JAX_PLATFORMS=cpu, or JAX prints an error at each start"
    return text
