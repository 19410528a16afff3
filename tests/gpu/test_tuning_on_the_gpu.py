"""The measured choice with real plans: what is taken is right, remembered, and the same later."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn as jc
from jax_cudnn._core import auto, settings, tuning

pytestmark = pytest.mark.gpu

PROGRAM = """
import hashlib, json, sys, jax, jax.numpy as jnp, jax_cudnn as jc
from jax_cudnn._core import tuning
jc.configure(plan_cache=sys.argv[1], tuning="fast")
x, w = jnp.ones((4, 64, 56, 56), "bfloat16"), jnp.ones((64, 64, 3, 3), "bfloat16")
block = lambda x, w: jc.ops.conv(x, w, padding=1, activation="relu")
text = jax.jit(block).lower(x, w).as_text()
plan, = jc.plans(block, x, w).values()
digest = hashlib.sha256(text.encode()).hexdigest()
print(json.dumps([digest, tuning._spent.graphs, len(plan.measured)]))
"""


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_given", {"plan_cache": tmp_path, "tuning": "fast"})
    monkeypatch.setattr(tuning, "_AVERAGE", 100.0)
    auto.clear()
    yield
    auto.clear()


def normal(*shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


CASES = {
    "norm": (lambda x, s: jc.ops.rms_norm(x, s), [(4096, 1024), (1024,)]),
    "product": (lambda x, w: jc.ops.matmul(x, w, activation="gelu"), [(2048, 512), (512, 1024)]),
    "attention": (
        lambda q, k, v: jc.ops.dot_product_attention(q, k, v, is_causal=True),
        [(2, 512, 4, 64)] * 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ways_are_measured_and_the_fastest_is_right(tuned, name):
    function, shapes = CASES[name]
    given = [normal(*shape) for shape in shapes]
    (plan,) = jc.plans(function, *given).values()
    seconds = [m.seconds for m in plan.measured if m.seconds is not None]
    assert len(seconds) >= 2
    (taken,) = [m.seconds for m in plan.measured if m.taken]
    assert taken <= min(seconds) / tuning._GAIN
    got = jax.jit(function)(*given)
    with jc.implementation("xla"):
        want = jax.jit(function)(*given)
    np.testing.assert_allclose(
        *(np.asarray(x, "float32") for x in (got, want)), atol=0.1, rtol=0.05
    )


def test_a_second_process_measures_nothing_and_lowers_the_same_program(tmp_path):
    def process():
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    (text, measured, ways), (again, nothing, same) = process(), process()
    assert (text, ways) == (again, same)
    assert (measured, nothing) == (1, 0)


def test_a_step_is_tuned_and_its_arguments_stay(tuned, capsys):
    @functools.partial(jax.jit, donate_argnums=(0, 2))
    def step(x, w, scale):
        h = jc.ops.matmul(x, w, activation="gelu")
        return x + scale * jc.ops.rms_norm(h, jnp.ones(512, x.dtype))

    x, w = normal(512, 512), normal(512, 512)
    want = step(x.copy(), w, 2.0)
    found = jc.tune(step, x, w, 2.0, minutes=1)
    assert found.tried
    assert found.before > 0
    assert not x.is_deleted()
    got = step(x, w, 2.0)
    assert x.is_deleted()  # donated: what ran before were copies
    np.testing.assert_allclose(
        *(np.asarray(y, "float32") for y in (got, want)), atol=0.1, rtol=0.05
    )
    assert "step: " in capsys.readouterr().out
