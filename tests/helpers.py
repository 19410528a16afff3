"""What several test files use."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn as jc


def python(code, *options, **environment):
    """Runs a script in a process of its own, on the CPU; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@jc.graph
def product(g, a, b):
    return g.matmul(a, b)


@jc.graph
def relu(g, x):
    return g.relu(x)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


def spec_of(function, *avals):
    """The graph of a function, for arrays or for pairs of a shape and a dtype."""
    avals = [jax.ShapeDtypeStruct(*x) if isinstance(x, tuple) else x for x in avals]
    return jc.graph(function).trace(*avals)[1].spec


def lowered(function, *avals):
    """The text of a function's program for an H200."""
    with jc.target("H200"):
        traced = jax.jit(lambda *x: function(*x)).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@jc.graph
def linear(g, x, w, b):
    h = g.matmul(x, w) * 0.5 + b
    return {"hidden": h, "y": g.gelu_approx_tanh(h)}


def plain_linear(x, w, b):
    h = (x @ w) * 0.5 + b
    return {"hidden": h, "y": jax.nn.gelu(h, approximate=True)}


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    same(got, want, 2e-4)


def same(got, want, tolerance=1e-5):
    """Compares arrays of any dtypes, or trees of them."""
    for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in pair)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def placed(x, sharding):
    """An array on devices of any processes; all of them have its value."""
    return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)


def whole(x, like):
    """An array in float64: of copies of an element on several devices the one that is farthest from
    ``like``, and of what other processes hold, which they see, that of ``like``."""
    assert x.shape == like.shape
    like = np.asarray(like, np.float64)
    made = like.copy()
    for shard in x.addressable_shards:
        own, at = np.asarray(shard.data, np.float64), shard.index
        made[at] = np.where(_off(own, like[at]) > _off(made[at], like[at]), own, made[at])
    return made


def _off(x, y):
    """By how much arrays differ; infinitely where one is NaN or infinite and the other is not."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(x - y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(same, 0, np.where(np.isnan(difference), np.inf, difference))


def share(x):
    """The part of an array that this process has, and so of the square of its error's norm."""
    own = {str(shard.index): shard.data.size for shard in x.addressable_shards}
    return sum(own.values()) / max(1, x.size)


def two_processes(worker, *options, timeout, mode=(), **environments):
    """What the two processes of a job print: ``python worker PORT RANK``, JSON on its last line;
    with a ``mode``, a further argument that makes them fail, their exit codes and errors.

    ``environments`` are variables with a value for each.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, *options, str(worker), str(port), str(rank), *mode],
            env={**os.environ, **{name: str(v[rank]) for name, v in environments.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        finished = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if mode:
        return [(p.returncode, errors) for p, (_, errors) in zip(processes, finished, strict=True)]
    for process, (_, errors) in zip(processes, finished, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in finished]


def outcome(f, operands, cotangents):
    """Results, and gradients by all operands; in one program."""

    @jax.jit
    def run(operands, cotangents):
        results, pull = jax.vjp(f, *operands)
        return results, pull(cotangents)

    return run(operands, cotangents)


def exactly(f, operands, cotangents):
    """The same in float64, on the CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu), jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64)), [operands, cotangents]
        )
        return jax.tree.map(np.asarray, outcome(f, *wide))


def normal(key, *shapes, dtype="float32"):
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def cotangents_of(results, seed=1):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(r.shape), r.dtype) for r in results]


def has_cudnn(version):
    """Whether a cuDNN of this version or a later one is installed."""
    from jax_cudnn._core.planning import frontend

    try:
        return frontend.load().backend_version() >= version
    except (ImportError, RuntimeError, jc.JaxCudnnError):
        return False
