"""How often lowering a graph goes from one file of the package to another: what follows from the
graph alone is asked of it once."""

import contextlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn as jc
from jax_cudnn._core.planning import losses, planner
from jax_cudnn._core.planning.execution_plan import ExecutionPlan

PACKAGE = str(Path(jc.__file__).parent)
TABLE = losses.table


@jc.graph
def layer(g, x, w, b):
    return g.relu(g.add(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), b))


@contextlib.contextmanager
def crossings():
    """The list of files into which calls and returns go from another one. Comprehensions are no
    calls: Python 3.12 has no frames for them."""
    entered = []

    def see(frame, event, _):
        file = frame.f_code.co_filename
        if frame.f_code.co_name.startswith("<"):
            return
        if event in ("call", "return") and file.startswith(PACKAGE) and entered[-1:] != [file]:
            entered.append(file)

    sys.setprofile(see)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def gradient(x, w, b):
    return jax.grad(lambda *x: layer(*x).astype("float32").sum(), (0, 1, 2))(x, w, b)


def convolution(channels, size=16):
    return (8, channels, size, size), (32, channels, 3, 3), (1, 32, 1, 1)


def larger(channels):
    """Of other graphs than the convolution's test knows already."""
    return convolution(channels, 32)


def attention(q, k, v, mask):
    return jc.ops.dot_product_attention(q, k, v, mask=mask > 0)


def heads(size):
    return (2, 64, 4, size), (2, 64, 2, size), (2, 64, 2, size), (2, 1, 64, 64)


def counted(function, shapes):
    """The crossings while the graph is traced, and while it is lowered."""
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    jax.clear_caches()
    with jc.target("H200"):
        with crossings() as traced:
            program = jax.jit(function).trace(*avals)
        with crossings() as lowered:
            program.lower(lowering_platforms=("cuda",))
    return len(traced), len(lowered)


@pytest.mark.parametrize(
    ("function", "shapes", "most"),
    [
        (layer, convolution, (120, 160, 75)),
        (gradient, larger, (870, 190, 230)),
        (attention, heads, (145, 255, 105)),
    ],
    ids=["convolution", "its gradient", "masked attention"],
)
def test_lowering_crosses_files_seldom(
    function, shapes, most, made_up_plans, tmp_path, monkeypatch
):
    """The worker is none of it. What a process computes once for all graphs is known before."""

    def build(spec, site):
        return ExecutionPlan(
            "{}", "eng0", 91900, site.device_name, 256, 0, ((1, 0, 0, 0),), (), b"", 1
        )

    monkeypatch.setattr(planner, "_build", build)
    monkeypatch.setattr(losses, "table", TABLE)
    jc.configure(plan_cache=tmp_path)
    counted(function, shapes(64))
    new, known = (counted(function, shapes(128)) for _ in range(2))
    assert counted(function, shapes(96)) == new
    assert [*map(int.__lt__, (*new, sum(known)), most)] == [True] * 3, (new, known)
