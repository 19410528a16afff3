"""compute-sanitizer over one call of each kind: `pytest -m "gpu or long" -k compute_sanitizer`.

Plans and programs are made before, without the tool. Operands are from NumPy, so that few kernels
are not ours, and each array is an allocation, so that the tool sees where it ends.
"""

import dataclasses
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import all_cases
from test_gpu import run_script

import jax_cudnn as jc
from jax_cudnn._core import ffi

# API errors are how cuda-python asks the driver which functions it has; not memory errors.
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
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
    """With two fills before cuDNN's workspace, which no plan that we know has."""
    (plan,) = jc.plan(function, *avals).execution_plans
    start, space = plan.plan_workspace_offset, plan.workspace_bytes
    more = {"plan_workspace_offset": start + 64, "workspace_bytes": space + 64}
    fills = ((start, 4, 16, 7), (start, 1, 64, 0))
    plan = dataclasses.replace(plan, fills=fills, **more)
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


APART, CAPTURED = "--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        pytest.param(FIRST, APART, marks=pytest.mark.gpu),
        pytest.param(OTHERS, APART, marks=pytest.mark.long),
        pytest.param(FIRST, CAPTURED, marks=pytest.mark.long),
    ],
    ids=["two", "others", "captured"],
)
def test_compute_sanitizer_finds_nothing(names, flags, tmp_path):
    tool = shutil.which("compute-sanitizer")
    if tool is None or jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and compute-sanitizer")
    text = f"import test_memory; test_memory.run({names!r})"
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    flags = f"--xla_gpu_autotune_level=0 {flags}"
    for under in ((), (tool, *OPTIONS)):
        done = run_script(text, *under, flags=flags, timeout=540, **variables)
        shown = f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
        assert "ran all" in done.stdout, shown
        assert done.returncode == 0, shown
    assert "ERROR SUMMARY: 0 errors" in done.stdout, shown
