"""On several GPUs: steps are those of one GPU, and one process plans for a job.

Values and gradients of each operation are in ``tests/core/sharding/test_values.py``, which uses the
GPUs where there are several.
"""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import placed, share, two_processes, whole
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from several_gpus_worker import PLAN

import jax_cudnn as jc
from jax_cudnn._core.planning import planner

COUNT = len(jax.devices()) if jax.default_backend() == "gpu" else 0
WORKER = Path(__file__).with_name("several_gpus_worker.py")
CELLS = []
if COUNT > 1:
    from benchmarks.collectives import ONE_LINE, OURS, program
    from benchmarks.sharded import MESHES, models

    MODELS = models()
    known = Path(__file__).parents[2] / "benchmarks" / "results" / "collectives_h200.json"
    CELLS = [
        (*cell.split(", "), column)
        for cell, columns in json.loads(known.read_text())["collectives"].items()
        for column in (OURS, ONE_LINE)
        if "refused" not in columns[column]  # by jnp on explicit axes: it wants an out_sharding
        if cell.partition(",")[0] not in ("ResNet", "batch_norm") or "shard_map" not in cell
    ]  # inside of shard_map statistics are those of a shard
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(COUNT < 2, reason="needs several GPUs"),
]


@pytest.mark.parametrize(("name", "over", "way", "column"), CELLS)
def test_a_step_is_that_of_one_gpu(name, over, way, column):
    """The loss and all gradients of functions, layers and of what is in ``jc.accelerate``."""
    model = MODELS[name]
    sizes = dict.fromkeys(MESHES[over], COUNT)
    sizes = {"data": COUNT // 2, "model": 2} if len(sizes) == 2 else sizes
    keys = iter(jax.random.split(jax.random.key(0), 256))

    def drawn(x):
        if x.dtype == "int32":
            # With 16 words, rows of an embedding's gradient would have thousands of summands.
            return jax.random.randint(next(keys), x.shape, 0, 512 if x.ndim == 2 else 16)
        return (x.ndim < 2) + 0.05 * jax.random.normal(next(keys), x.shape, x.dtype)

    def moved(x):
        """By a step of bfloat16, up or down."""
        if x.dtype == "int32":
            return x
        return x * (1 + jax.random.rademacher(next(keys), x.shape, x.dtype) * 2**-7)

    given = jax.tree.map(drawn, (model.params, model.state, model.data))
    nearby = jax.tree.map(moved, given)

    def run(shape, how, *each):
        devices = jax.devices() if math.prod(shape.values()) > 1 else jax.local_devices()[:1]
        step, shardings, context = program(
            model, column, over, how, shape, devices, lambda p, g: g.astype(p.dtype)
        )
        with context:
            for x in each:
                unplaced = how == "in_shardings" and jax.process_count() == 1
                yield step(*(x if unplaced else jax.tree.map(placed, x, shardings)))

    want, other = run(dict.fromkeys(sizes, 1), "automatic", given, nearby)
    (got,) = run(sizes, way, given)
    for parts in zip(want, other, got, strict=True):  # the loss, the gradients, the state
        leaves = [jax.tree_util.tree_leaves_with_path(part) for part in parts]
        floor = 1e-3 * max((np.abs(np.float64(y)).max() for _, y in leaves[0]), default=0)
        for (path, y), (_, z), (_, x) in zip(*leaves, strict=True):
            y, z = (np.asarray(v, np.float64) for v in (y, z))
            x, part = whole(x, y), share(x)
            size, off, noise = map(np.linalg.norm, (y, x - y, z - y))
            most = min(0.03 * size + floor * y.size**0.5, 0.02 * size + 2 * noise)
            assert off <= most * part**0.5, jax.tree_util.keystr(path)


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")])
def test_dropout_is_that_of_one_gpu(spec):
    mesh = jax.make_mesh((COUNT,), ("data",), axis_types=(AxisType.Auto,))
    q = jax.random.normal(jax.random.key(0), (8, 256, 8, 64), jnp.bfloat16)

    @jax.jit
    def run(q, key):
        attend = lambda q: jc.ops.dot_product_attention(  # noqa: E731
            q, q, q, dropout_rate=0.5, dropout_rng=key
        )
        out, pull = jax.vjp(attend, q)
        return out, *pull(jnp.sin(q))

    want = run(q, jax.random.key(7))
    got = run(placed(q, NamedSharding(mesh, spec)), jax.random.key(7))
    for x, y in zip(got, want, strict=True):
        y = np.asarray(y, np.float64)
        np.testing.assert_allclose(whole(x, y), y, 0.02, 0.02)


def test_one_process_plans_for_two_and_later_jobs_plan_nothing(tmp_path):
    """Plans are in one folder, and JAX's programs in one; for the third job in an empty one."""

    def job(programs):
        return two_processes(
            WORKER,
            timeout=240,
            XDG_CACHE_HOME=[tmp_path] * 2,
            JAX_COMPILATION_CACHE_DIR=[tmp_path / programs] * 2,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=[0] * 2,
            XLA_PYTHON_CLIENT_PREALLOCATE=["false"] * 2,
        )

    first, *others = map(job, ("a", "a", "b"))
    for zero, one in (first, *others):
        assert zero["plans"] == one["plans"] == first[0]["plans"] != []
        assert max(zero["error"], one["error"]) < 0.02
        assert one["built"] == 0
    assert first[0]["built"] > 0 == sum(zero["built"] for zero, _ in others)
    hits = [(zero["hits"], zero["misses"]) for zero, _ in others]  # JAX writes those of process 0
    assert hits == [(1, 0), (0, 1)]


def test_the_error_where_a_process_died():
    (code, errors), _ = two_processes(
        WORKER, timeout=180, mode=["die"], XLA_PYTHON_CLIENT_PREALLOCATE=["false"] * 2
    )
    assert code != 0
    assert re.search(r"another task died(?s:.*)stopped sending heartbeats\):\s*1\b", errors)


def test_equal_gpus_share_one_plan(monkeypatch, by_cudnn):
    built, build = [], planner._build
    monkeypatch.setattr(planner, "_build", lambda *a, **b: built.append(a) or build(*a, **b))
    x = jax.random.normal(jax.random.key(0), (136, 72), jnp.bfloat16)
    run = jax.jit(lambda x: jc.ops.matmul(x, x, transpose_b=True, activation="gelu"))
    placed = [jax.device_put(x, device) for device in jax.devices()[:2]]
    one, other = ({*PLAN.findall(run.lower(x).compile().as_text())} for x in placed)
    assert one == other
    assert len(one) == len(built) == 1
    np.testing.assert_array_equal(*map(run, placed))
