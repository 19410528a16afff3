"""A process of test_job.py whose program JAX may have in its cache: ``python cached_worker.py PORT
RANK`` prints JSON. It plans for an H200 that is absent, as on a GPU: while XLA partitions. The
program that it compiles and runs is the reference's, for CPUs."""

import collections
import functools
import json
import logging
import sys

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn._core import auto, compat, context, partition, primitive


def planned(ctx, *operands, spec, name):
    auto.plan_graph(spec, context.site((), name), name, jax.devices())
    run = functools.partial(primitive.run_reference, spec=spec, name=name)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def lowered(ctx, *operands, lower=partition.lower, **params):
    auto.attend(compat.lowering_devices(ctx), lambda: jc.target("H200"))
    return lower(ctx, *operands, **params)


def main(port, rank):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    mlir.register_lowering(primitive.cudnn_local_p, planned, platform="cpu")
    partition.lower = lowered
    seen, told = collections.Counter(), []
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
    logging.Handler.emit = lambda self, record: told.append(record.getMessage())
    logger = logging.getLogger("jax_cudnn")
    logger.addHandler(logging.Handler())
    logger.setLevel(logging.DEBUG)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = np.ones((64, 128), np.float16)
    x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("data")), x.__getitem__)

    @jax.jit
    def step(x):
        y = jc.ops.matmul(x, x[:1], transpose_b=True, activation="relu")
        return y.astype("float32").sum() + jc.ops.rms_norm(x).astype("float32").sum()

    with jc.target("H200"):
        value = float(step(x))
    built = sum("planned in" in text for text in told)
    print(json.dumps({"value": value, "hits": seen["cache_hits"], "built": built}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
