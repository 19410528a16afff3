"""Plans on the GPU: candidates that run, plans from bytes, in place, CUDA graphs."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import conv_bias_relu
from helpers import product, relu

import jax_cudnn as jc
from jax_cudnn._core import cuda_graphs
from jax_cudnn._core.cuda import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("by_cudnn")]


@jc.graph
def dense(g, a, b, c):
    return g.gelu_approx_tanh(g.bias(g.matmul(a, b), c))


def arrays(*shapes, dtype="bfloat16", seed=0):
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(s, np.float32), dtype) for s in shapes]


def dense_arrays(seed=0):
    a, b, c = arrays((1, 256, 128), (1, 128, 256), (1, 1, 256), seed=seed)
    return a, b / 8, c


def wanted(function, *operands):
    """In float64."""
    _, trace = function.trace(*operands)
    (want,) = oracle.evaluate(trace.spec, [operands[i] for i in trace.operands])
    return want


def test_a_plan_executes_as_its_function_does(key):
    operands = conv_bias_relu.operands(key)
    plan = jc.plan(conv_bias_relu.function, *operands)
    want = np.asarray(jax.jit(conv_bias_relu.function)(*operands))
    for device in (None, jax.devices()[0]):
        got = plan.execute(*operands, device=device)
        assert got.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(np.asarray(got), want)
    for same in (plan, jc.Plan.deserialize(plan.serialize())):
        of_numpy = same.execute(*map(np.asarray, operands))
        np.testing.assert_array_equal(np.asarray(of_numpy), want)


def test_in_place_a_result_has_the_operands_memory():
    plan = jc.plan(relu, jax.ShapeDtypeStruct((256, 512), "bfloat16"))
    (given,) = arrays((256, 512))
    want = np.maximum(np.asarray(given), 0)
    x = jax.device_put(np.asarray(given), jax.devices()[0])
    before = x.unsafe_buffer_pointer()
    y = plan.execute(x, in_place={0: 0})
    assert y.unsafe_buffer_pointer() == before
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), want)
    kept = jax.device_put(np.asarray(given), jax.devices()[0])
    assert plan.execute(kept).unsafe_buffer_pointer() != kept.unsafe_buffer_pointer()
    assert not kept.is_deleted()


def test_autotune_takes_one_of_the_candidates_that_were_timed():
    operands = arrays((1, 1024, 2048), (1, 2048, 1024))
    plan = jc.plan(product, *operands)
    timed = plan.time_candidates(*operands, limit=4)
    measured = [row for row in timed if row.seconds is not None]
    assert 1 < len(measured) <= 4
    assert all(row.supported and row.seconds > 0 for row in measured)
    best = plan.autotune(*operands, limit=4)
    assert best.engine in {row.name for row in measured}


class Driver:
    """The CUDA driver's graphs by ctypes."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name}: {status}"


@contextlib.contextmanager
def graph_and_stream():
    """The driver, an empty CUDA graph and a stream, with the first GPU's context."""
    device = CudaDevice(jax.devices()[0].local_hardware_id)
    driver, graph, stream = Driver(), ctypes.c_void_p(), ctypes.c_void_p()
    with device.current():
        driver("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        driver("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        yield driver, graph, stream
        driver("cuStreamDestroy_v2", stream)
        driver("cuGraphDestroy", graph)


def results_and_workspace(plan):
    """Memory of its own for results, which nothing in Python has read."""
    gpu = jax.devices()[0]
    (tensor,) = plan.spec.output_tensors
    made = np.zeros(tensor.shape, jnp.dtype(tensor.dtype))
    results = [jax.device_put(made, gpu) for _ in range(2)]
    workspace = jax.device_put(np.zeros(max(1, plan.workspace_bytes), np.uint8), gpu)
    return jax.block_until_ready((*results, workspace))


def test_a_cuda_graph_is_populated_replayed_and_updated():
    able = dense.with_options(select_behavior_notes=cuda_graphs.NOTE)
    first, second = (jax.block_until_ready(dense_arrays(seed)) for seed in (1, 2))
    plan = jc.plan(able, *first)
    of_first, of_second, workspace = results_and_workspace(plan)
    with graph_and_stream() as (driver, graph, stream):
        executable = ctypes.c_void_p()

        def launch():
            driver("cuGraphLaunch", executable, stream)
            driver("cuStreamSynchronize", stream)

        plan.populate_cuda_graph(graph.value, first, [of_first], workspace)
        driver(
            "cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
        )
        launch()
        launch()
        plan.update_cuda_graph(graph.value, second, [of_second], workspace)
        outcome = (ctypes.c_void_p * 4)()  # CUgraphExecUpdateResultInfo, with room
        driver("cuGraphExecUpdate_v2", executable, graph, outcome)
        launch()
        driver("cuGraphExecDestroy", executable)
    for operands, result in ((first, of_first), (second, of_second)):
        np.testing.assert_array_equal(np.asarray(result), np.asarray(plan.execute(*operands)))
        assert oracle.distance(result, wanted(dense, *operands)) < 1e-2
