"""A process of test_several_gpus.py, with one GPU: ``python several_gpus_worker.py PORT RANK``
prints JSON; with ``die``, process 1 ends when both have compiled, and the other waits for it."""

import collections
import hashlib
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core.planning import planner

PLAN = re.compile(r'custom_call_target="jax_cudnn".*?backend_config=(.*)')


def loss(params, x):
    scale, w, v = params
    y = jc.ops.matmul(jc.ops.rms_norm(x, scale), w, activation="gelu")
    q = y.reshape(*x.shape[:2], 4, 64)
    y = jc.ops.dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)
    return jnp.mean((jc.ops.matmul(y, v, residual=x).astype("float32") - 1) ** 2)


def main(port, rank, *mode):
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=2,
        process_id=rank,
        local_device_ids=[rank],
        heartbeat_timeout_seconds=20,
    )
    seen, built, build = collections.Counter(), [], planner._build
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))

    def counted(*args, **options):
        built.append(args)
        return build(*args, **options)

    planner._build = counted
    random = np.random.default_rng(0)
    *params, x = (
        (random.standard_normal(shape) / 16).astype(jnp.bfloat16)
        for shape in ((256,), (256, 256), (256, 256), (8, 128, 256))
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = (NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    place = lambda x, own: jax.make_array_from_callback(x.shape, own, x.__getitem__)  # noqa: E731
    given = [place(p, whole) for p in params], place(x, split)
    step = jax.value_and_grad(loss)
    lowered = jax.jit(step, out_shardings=whole).lower(*given)
    seen.clear()
    compiled = lowered.compile()
    found = {"hits": seen["cache_hits"], "misses": seen["cache_misses"], "built": len(built)}
    if mode and rank == 1:
        os._exit(3)
    made = jax.block_until_ready(compiled(*given))
    found["plans"] = sorted(
        hashlib.sha256(text.encode()).hexdigest() for text in PLAN.findall(compiled.as_text())
    )
    with jax.default_device(jax.local_devices()[0]):
        want = jax.jit(step)(params, x)
    pairs = zip(*map(jax.tree.leaves, (made, want)), strict=True)
    errors = []
    for a, b in pairs:
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        errors.append(float(np.abs(a - b).max() / np.abs(b).max()))
    found["error"] = max(errors)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
