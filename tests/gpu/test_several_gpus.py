"""On several GPUs: a model's step is that of one GPU, and one process plans for a job.

Values and gradients of each operation are in ``tests/core/sharding/test_values.py``, which uses the
GPUs where there are several.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import two_processes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

COUNT = len(jax.devices()) if jax.default_backend() == "gpu" else 0
WORKER = Path(__file__).with_name("several_gpus_worker.py")
LAYOUTS = {  # the mesh, and whether parameters are sharded over the data
    "data parallel": ({"data": COUNT}, False),
    "FSDP": ({"data": COUNT}, True),
    "tensor parallel": ({"model": COUNT}, False),
    "data x model": ({"data": COUNT // 2, "model": 2}, False),
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(COUNT < 2, reason="needs several GPUs"),
]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_a_transformer(layout, types):
    from benchmarks.sharded import OURS, transformer

    model, (sizes, over_data) = transformer(), LAYOUTS[layout]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(types,) * len(sizes))
    keys = iter(jax.random.split(jax.random.key(0), 64))
    params = jax.tree.map(
        lambda x: 0.05 * jax.random.normal(next(keys), x.shape, x.dtype), model.params
    )
    tokens = jax.random.randint(next(keys), (8, 257), 0, 512)

    def spec(path, x):
        own = P(*(axis if axis in sizes else None for axis in model.spec(path)))
        return P("data") if over_data else own

    def step(params, tokens):
        def loss(params):
            if over_data and jax.typeof(params["norm"]).sharding.spec != P(None):
                params = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params)
            return model.losses[OURS](params, (), tokens, None)[0]

        return jax.value_and_grad(loss)(params)

    want = jax.jit(step)(params, tokens)
    specs = jax.tree.map_with_path(spec, params)
    put = lambda x, own: jax.device_put(x, NamedSharding(mesh, own))  # noqa: E731
    given = jax.tree.map(put, params, specs), put(tokens, P("data" if "data" in sizes else None))
    with jax.set_mesh(mesh):
        got = jax.jit(step)(*given)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        np.testing.assert_allclose(x, y, 0.02, 0.02 * np.abs(y).max())


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")])
def test_dropout_is_that_of_one_gpu(spec):
    import jax_cudnn as jc

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
    got = run(jax.device_put(q, NamedSharding(mesh, spec)), jax.random.key(7))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (x, y)), 0.02, 0.02)


def test_one_process_plans_for_two_and_a_second_job_plans_nothing(tmp_path):
    def job():
        return two_processes(
            WORKER,
            timeout=240,
            XDG_CACHE_HOME=[tmp_path] * 2,
            JAX_COMPILATION_CACHE_DIR=[tmp_path / "programs"] * 2,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=[0] * 2,
            XLA_PYTHON_CLIENT_PREALLOCATE=["false"] * 2,
        )

    first, second = job(), job()
    for zero, one in (first, second):
        assert zero["plans"] == one["plans"]
        assert len(zero["plans"]) > 0
        assert max(zero["error"], one["error"]) < 0.02
        assert one["built"] == 0
    assert first[0]["built"] > 0 == second[0]["built"]
    assert (second[0]["hits"], second[0]["misses"]) == (1, 0)  # JAX's other processes have no cache
    assert first[0]["plans"] == second[0]["plans"]


def test_the_error_where_a_process_died():
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "29517", str(rank), "die"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    _, errors = ranks[0].communicate(timeout=180)
    ranks[1].kill()
    assert ranks[0].returncode != 0
    assert re.search("task.*1|heartbeat|JobError", errors)
