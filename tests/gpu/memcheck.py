"""One call of each kind, tiny, for compute-sanitizer: operands from NumPy, so that few kernels are
not ours, and each array is an allocation, so that the tool sees where it ends."""

import dataclasses
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from cases import all_cases

import jax_cudnn as jc
from jax_cudnn._core import ffi

ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
FIRST = ("conv_bias_relu", "matmul_bias_gelu")
OTHERS = (
    "conv_wgrad_0_bfloat16",
    "rmsnorm_0_bfloat16",
    "layernorm_backward_0_bfloat16",
    "batchnorm_0_bfloat16",
    "add_gelu",
    "mul_sum_over_channels",
    "sdpa_backward_0_bfloat16",  # scalars and parts of the workspace
    "qkv",  # views
    "packed, bias",
    "pages, decode",
    "dropout and all",  # tables
    "softcap, lengths",
    "fp8",
    "fills",
    "a CUDA graph",
)
CASES = {case.name: case for case in all_cases()}


def called(name):
    """A function and the avals of its operands."""
    if name in CASES:
        return CASES[name].function, CASES[name].avals
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests / "ops" / "attention"), str(tests / "core" / "planning")]
    if name == "fills":
        return filled(*called("conv_bias_relu"))
    if name == "a CUDA graph":
        from test_plans_on_the_gpu import test_a_cuda_graph_is_populated_replayed_and_updated

        return test_a_cuda_graph_is_populated_replayed_and_updated, ()
    from attention_table import TABLE, gradients

    function, avals, count = TABLE[name]
    return jax.jit(gradients(function, range(count))), avals


def filled(function, avals):
    """With two fills at the end of the workspace, which no plan that we know has."""
    (plan,) = jc.plan(function, *avals).execution_plans
    end = -(-plan.workspace_bytes // 4) * 4
    fills = ((end, 4, 16, 7), (end, 1, 64, 0))
    plan = dataclasses.replace(plan, workspace_bytes=end + 64, fills=fills)
    spec = function.trace(*avals)[1].spec
    return jax.jit(lambda *x: ffi.call(plan, spec, "fills", *x)), avals


def run(names, seconds=60):
    """Runs them; the process ends where one takes longer."""
    random = np.random.default_rng(0)
    for name in names:
        print(f"{name}: ", end="", flush=True)
        signal.alarm(seconds)  # ends the process, in C++ code, too
        start = time.perf_counter()
        function, avals = called(name)
        operands = [random.standard_normal(x.shape, "float32").astype(x.dtype) for x in avals]
        with jc.implementation("cudnn"):
            jax.block_until_ready(function(*operands))
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
    print("ran all")
