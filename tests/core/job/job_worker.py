"""One of the two processes of test_job.py: ``python job_worker.py PORT RANK`` prints JSON."""

import hashlib
import importlib.util
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_cudnn as jc
from jax_cudnn._core import job
from jax_cudnn._core.planning import planner

CALL = "custom_call @jax_cudnn("
COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")


@jc.graph
def linear(g, x, w, b):
    return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))


def outcome(work):
    """The class and summary of what work raises, else its result."""
    try:
        return work()
    except jc.JaxCudnnError as error:
        return [type(error).__name__, error.summary if error.got is None else str(error)]


def hashed(text):
    return hashlib.sha256(text.encode()).hexdigest()


def agree(devices, rank):
    """The agreement through JAX's own store."""
    among = job.participants(devices)
    given = {"name": "linear", "identity": lambda: "versions", "timeout": 60}
    large, fails = (job.Question(key, among, **given) for key in ("large", "failure"))

    def refuse():
        raise jc.UnsupportedGraphError("linear: no engine")

    noise = np.random.default_rng(0).bytes(1_000_000).hex()
    made = job.agreed(large, lambda: {"by": rank, "noise": noise})
    failure = outcome(lambda: job.agreed(fails, refuse))
    return {"agreed": [made["by"], made["noise"] == noise], "failure": failure}


def fail(spec, site):
    raise jc.PlanningWorkerError("the planning worker died")


def compile_programs(devices, rank):
    """Programs with a runtime-compiled plan, whose bytes differ from build to build."""
    mesh = jax.make_mesh((8,), ("rows",), devices=devices)

    def lower(rows):
        split, whole = PartitionSpec("rows"), PartitionSpec()
        sharded = jax.shard_map(linear, mesh=mesh, in_specs=(split, whole, whole), out_specs=split)
        shapes = [((8, rows, 128), split), ((1, 128, 256), whole), ((1, 1, 256), whole)]
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in shapes
        ]
        with jc.target("H200"):
            lowered = jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

    together, build = lower(64), planner._build
    found = {"together": hashed(together), "calls": together.count(CALL)}
    planner._build = fail  # of the lowest process, which plans
    failed = lower(160)
    planner._build = build
    later = lower(160)
    found["failed"] = [hashed(failed), failed.count(CALL), hashed(later), later.count(CALL)]
    if rank == 1:
        jc.configure(job_timeout=0.5)
        found["another program"] = outcome(lambda: lower(96))
    job.participants = lambda devices: []
    found["alone"] = hashed(lower(128))
    return found


def loss(parameters, x):
    scale, w, v = parameters
    heads = jc.ops.matmul(jc.ops.rms_norm(x, scale), w, activation="gelu").reshape(8, 4, 2, 8)
    attended = jc.ops.dot_product_attention(heads, heads, heads, is_causal=True)
    y = jc.ops.matmul(attended.reshape(8, 4, 16), v, residual=x)
    return jnp.mean((y - 1) ** 2)


def step(parameters, x):
    value, gradients = jax.value_and_grad(loss)(parameters, x)
    return value, [p - 0.1 * g for p, g in zip(parameters, gradients, strict=True)]


def train(devices):
    """The collectives of a step whose examples all devices share, and its largest error."""
    random = np.random.default_rng(0)
    *parameters, x = (
        random.standard_normal(shape, np.float32) / 4
        for shape in ((16,), (16, 16), (16, 16), (8, 4, 16))
    )
    with jax.default_device(jax.local_devices()[0]):
        want = jax.jit(step)(parameters, x)
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    given = jax.device_put(parameters, whole), jax.device_put(x, split)
    made = jax.jit(step, out_shardings=whole).lower(*given).compile()
    pairs = zip(*map(jax.tree.leaves, (made(*given), want)), strict=True)
    errors = [float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs]
    return [sorted({*COLLECTIVE.findall(made.as_text())}), max(errors)]


def main(port, rank):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    devices = jax.devices()
    found = {
        "processes": sorted(device.process_index for device in devices),
        "leader": job.participants(devices)[0],
        **agree(devices, rank),
        "trained": train(devices),
    }
    if importlib.util.find_spec("cudnn"):
        found["programs"] = compile_programs(devices, rank)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()  # waits for the other process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
