"""What XLA's compiler for an H200 makes of the benchmarks' models of Flax; nothing needs one."""

import collections
import importlib.util

import jax
import pytest
from flax import nnx

import jax_cudnn.flax as jnn
from benchmarks.flax import cases
from benchmarks.flax.cases import step
from benchmarks.flax.tables import OURS, PLAIN

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="XLA's compiler for CUDA is not installed",
    ),
]
if importlib.util.find_spec("cudnn"):
    from absent_gpus import compiled, operations

CUDNN, CUBLAS = "jax_cudnn", "__cublas$lt$matmul"


def training(case, side):
    """The case's step on states, and the shapes of its arguments."""

    def made():
        model = case.make(PLAIN)
        if side == OURS:
            model, _ = jnn.accelerate(model)
        return nnx.split((model, nnx.Optimizer(model, case.optimizer, wrt=nnx.Param)))

    graphdef, state = nnx.split(nnx.eval_shape(lambda: nnx.merge(*made())))

    def run(state, *batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = step(model, optimizer, *batch)
        return nnx.state((model, optimizer)), loss

    return run, (state, *jax.eval_shape(case.batch, jax.random.key(0)))


@pytest.mark.long
@pytest.mark.parametrize("case", cases.cases(tiny=True), ids=lambda case: case.name)
def test_a_step_of_training_has_fewer_kernels_and_no_convolution_of_xlas(case):
    ours, plain = (
        collections.Counter(operations(compiled(run, *avals)))
        for run, avals in (training(case, side) for side in (OURS, PLAIN))
    )
    print(ours, plain, sep="\n")
    assert ours[CUDNN] > 0 == plain[CUDNN]
    assert not [name for name in ours if name.startswith("__cudnn$")]
    assert ours.total() < plain.total()
