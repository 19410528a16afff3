"""What only a GPU can show: capture, threads, memory, exits, refusals. Everything real."""

import concurrent.futures
import ctypes
import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap

import chain
import jax
import jax.export
import numpy as np
import oracle
import pytest
from cases import conv_bias_relu, matmul_bias_gelu

import jax_cudnn as jc
from jax_cudnn._core import ffi
from jax_cudnn._core.planning.deviceless import profiles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("by_cudnn")]

COUNTERS = "handles_created plans_finalized plans_alive packs_built packs_alive".split()
COUNTERS += ["call_sites_alive"]


def counters():
    values = (ctypes.c_int64 * 9)()  # and times
    ffi.library().JaxCudnnCounts(values, 0)
    return dict(zip(COUNTERS, values, strict=False))


def run_script(text, *under, flags="", timeout=300, last=(), **variables):
    """A fresh process that runs a script, with the modules of the tests; the environment's XLA
    flags are replaced. What it printed is there where it took too long, too."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    own = {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    command = [*under, sys.executable, "-c", textwrap.dedent(text), *last]
    with subprocess.Popen(
        command,
        env={**os.environ, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool's child, too
            out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


FIRST_EXECUTION_IS_CAPTURED = """
    import chain, jax, jax_cudnn, numpy as np
    operands = chain.operands()
    with jax_cudnn.implementation("cudnn"):
        got = np.asarray(jax.jit(chain.ours)(*operands), np.float32)    # executed once, captured
        again = np.asarray(jax.jit(chain.ours)(*operands), np.float32)  # replayed
    want = np.asarray(jax.jit(chain.xla)(*operands), np.float32)
    assert (got == again).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 0.2, error      # 200 layers of bfloat16 roundings
"""


def test_a_chain_is_captured_in_a_fresh_process(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_graph_min_graph_size=1"
    done = run_script(FIRST_EXECUTION_IS_CAPTURED, flags=flags)
    assert done.returncode == 0, done.stderr[-2000:]
    dumps = sorted(tmp_path.glob("*jit_ours.thunk_sequence_after_thunk_passes.txt"))
    lines = dumps[0].read_text().splitlines()
    outside = [line for line in lines if line.strip() and not line.startswith(" ")]
    assert ["kCommandBuffer" in line for line in outside] == [True], "one command buffer, alone"
    inside = [line for line in lines if re.match(r"\s+\d+: kCustomCall", line)]
    assert len(inside) == chain.LENGTH


def test_call_sites_share_one_plan_and_it_goes_with_them(key):
    x, w, b = conv_bias_relu.operands(key)

    def twice(x, w, b):
        return conv_bias_relu.function(conv_bias_relu.function(x, w, b), w, b)

    jax.clear_caches()
    before = counters()
    functions = [jax.jit(twice), jax.jit(lambda *a: twice(*a) + 1)]
    for function in functions:
        jax.block_until_ready(function(x, w, b))
    during = counters()
    assert during["call_sites_alive"] - before["call_sites_alive"] == 4
    assert during["plans_alive"] - before["plans_alive"] == 1
    del functions, function
    jax.clear_caches()
    assert counters()["plans_alive"] == before["plans_alive"]


EXIT_WITH_PENDING_WORK = """
    import jax, jax_cudnn
    from cases import conv_bias_relu
    block = conv_bias_relu.function.with_options(implementation="cudnn")
    x, w, b = conv_bias_relu.operands(jax.random.key(0))
    devices = jax.local_devices()
    mesh = jax.make_mesh((len(devices),), ("n",), axis_types=(jax.sharding.AxisType.Auto,))
    def layers(x, w, b):
        for _ in range(200):
            x = block(x, w, b)
        jax.debug.callback(lambda: print("called back"))
        return x
    split, whole = jax.P("n"), jax.P()
    step = jax.jit(jax.shard_map(layers, mesh=mesh, in_specs=(split, whole, whole),
                                 out_specs=split, check_vma=False))
    jax.block_until_ready(step(x, w, b))
    for _ in range(20):
        x = step(x, w, b)      # XLA's own threads are busy when the interpreter ends
    print("exiting")
"""


@pytest.mark.parametrize("flags", ["", "--xla_gpu_enable_command_buffer="])
def test_pending_work_of_xlas_threads_ends_at_exit(flags):
    done = run_script(EXIT_WITH_PENDING_WORK, flags=flags)
    assert "exiting" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]


def test_eight_threads_run_one_executable(key):
    operands = conv_bias_relu.operands(key)
    compiled = jax.jit(conv_bias_relu.function).lower(*operands).compile()
    want = np.asarray(compiled(*operands))

    def work(_):
        results = [compiled(*operands) for _ in range(200)]
        return all((np.asarray(result) == want).all() for result in results[::20])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert counters()["handles_created"] <= 16


def test_memory_is_stable_over_100_executables(key):
    operands = matmul_bias_gelu.operands(key)
    device = jax.devices()[0]

    def cycle(number):
        function = jax.jit(lambda *a: matmul_bias_gelu.function(*a) + number)
        jax.block_until_ready(function(*operands))
        del function
        jax.clear_caches()
        return device.memory_stats()["bytes_in_use"]

    for number in range(10):
        before = cycle(number)
    counted = counters()
    for number in range(100):
        assert cycle(number) == before
    after = counters()
    for name in ("plans_alive", "packs_alive", "call_sites_alive", "handles_created"):
        assert after[name] == counted[name], name
    assert after["plans_finalized"] - counted["plans_finalized"] == 100, "each cycle made its plan"


EXIT_WITH_A_RUNNING_THREAD = """
    import atexit, sys, threading, jax
    import jax_cudnn
    import chain
    from cases import conv_bias_relu
    if sys.argv[1] == "captured":
        operands, function = chain.operands(), jax.jit(chain.ours)
    else:
        operands = conv_bias_relu.operands(jax.random.key(0))
        function = jax.jit(conv_bias_relu.function.with_options(implementation="cudnn"))
    jax.block_until_ready(function(*operands))
    stop = threading.Event()
    def work():
        while not stop.is_set():
            jax.block_until_ready(function(*operands))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    def join():        # as a data loader or a logger does: must still be able to
        stop.set()
        thread.join()
        print("joined")
    atexit.register(join)
    print("exiting")
"""


@pytest.mark.parametrize("kind", ["captured", "single"])
def test_exits_with_live_functions_and_a_thread_that_an_exit_handler_ends(kind):
    flags = "--xla_gpu_graph_min_graph_size=1"
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        run = lambda _: run_script(EXIT_WITH_A_RUNNING_THREAD, flags=flags, last=(kind,))  # noqa: E731
        for done in pool.map(run, range(5)):
            said = (done.stdout.split(), done.returncode)
            assert said == (["exiting", "joined"], 0), done.stderr[-2000:]


def planned(case, operands):
    (plan,) = jc.plan(case.function, *operands).execution_plans
    return plan


def run_plan(plan, case, operands):
    _, trace = case.function.trace(*operands)
    call = jax.jit(lambda *a: ffi.call(plan, trace.spec, case.name, *a))
    return jax.block_until_ready(call(*operands))


@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA H200 NVL"])
def test_a_plan_built_without_a_gpu_runs_on_that_model_alone(model, key):
    operands = conv_bias_relu.operands(key)
    h200 = profiles.get("H200")
    text = h200.properties_json.replace("NVIDIA H200", model)
    target = dataclasses.replace(h200, name="absent", properties_json=text)
    _, trace = conv_bias_relu.function.trace(*operands)
    run = lambda: jax.block_until_ready(jax.jit(conv_bias_relu.function)(*operands))  # noqa: E731
    with jc.target(target):
        if jax.devices()[0].device_kind == model:
            oracle.check_outputs(trace.spec, operands, [run()], on_gpu=True)
        else:
            with pytest.raises(Exception, match=f"(?s)built for {model},.*conv_bias_relu"):
                run()


def doubled(plan):
    return tuple((uid, kind, value, 2 * size) for uid, kind, value, size in plan.bindings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: {"cudnn_version": 91300}, "has loaded cuDNN"),
        (lambda plan: {"text": '{"cudnnVersion": 1}'}, "finalize a plan"),
        (lambda plan: {"bindings": doubled(plan)}, "bytes, its plan was built for"),
    ],
    ids=["another cuDNN", "no plan at all", "operands of other sizes"],
)
def test_what_does_not_fit_is_refused_before_anything_runs(key, change, words):
    operands = conv_bias_relu.operands(key)
    plan = planned(conv_bias_relu, operands)
    with pytest.raises(Exception, match=words):
        run_plan(dataclasses.replace(plan, **change(plan)), conv_bias_relu, operands)
