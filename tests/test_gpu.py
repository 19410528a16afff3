"""What only a GPU can show: capture, threads, memory, exits, refusals. Everything real."""

import ctypes
import dataclasses
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import chain as host
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import case, conv_bias_relu, matmul_bias_gelu

import jax_cudnn as jc
from jax_cudnn._core import ffi
from jax_cudnn._core.planning import planner
from jax_cudnn.deviceless import profiles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("by_cudnn")]

COUNTERS = (
    "handles_created",
    "plans_finalized",
    "plans_alive",
    "packs_built",
    "packs_alive",
    "call_sites_alive",
)


def counters():
    values = (ctypes.c_int64 * len(COUNTERS))()
    ffi.library().JaxCudnnCounters(values)
    return dict(zip(COUNTERS, values, strict=True))


def run_script(text, *arguments, flags="", timeout=300):
    """A fresh process that runs a script; the environment's XLA flags are replaced."""
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.run(
        [*arguments, sys.executable, "-c", textwrap.dedent(text)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# -- command buffers -----------------------------------------------------------------------------

FIRST_EXECUTION_IS_CAPTURED = """
    import jax, numpy as np
    import chain as host
    operands = host.operands()
    got = np.asarray(jax.jit(host.ours)(*operands), np.float32)        # executed once, captured
    again = np.asarray(jax.jit(host.ours)(*operands), np.float32)      # replayed
    want = np.asarray(jax.jit(host.xla)(*operands), np.float32)
    assert np.isfinite(got).all() and np.abs(want).max() > 0
    assert (got == again).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print("relative difference to XLA's own chain", error)
    assert error < 0.2, error      # 200 layers of bfloat16 roundings
"""


def test_a_chain_is_captured_in_a_fresh_process(tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_graph_min_graph_size=1"
    done = run_script(FIRST_EXECUTION_IS_CAPTURED, flags=flags)
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    (dump,) = tmp_path.glob("*jit_ours.thunk_sequence_after_thunk_passes.txt")
    lines = dump.read_text().splitlines()
    print("ours", *lines[:4], sep="\n")
    for own in tmp_path.glob("*jit_xla.thunk_sequence*.txt"):
        print(own.name, *own.read_text().splitlines()[:4], sep="\n")
    outside = [line for line in lines if line.strip() and not line.startswith(" ")]
    assert ["kCommandBuffer" in line for line in outside] == [True], "one command buffer, alone"
    inside = [line for line in lines if re.match(r"\s+\d+: kCustomCall", line)]
    assert len(inside) == host.LENGTH


def test_transposes_around_a_chain_of_nhwc_arrays_cost_nothing():
    compiled = jax.jit(host.ours).lower(*host.operands()).compile().as_text()
    kinds = re.findall(r"= [^=]*?\b(copy|transpose|copy-start|fusion|custom-call)\(", compiled)
    assert kinds.count("custom-call") == host.LENGTH
    assert set(kinds) == {"custom-call"}


# -- sharing, threads, memory --------------------------------------------------------------------


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


def test_each_gpu_gets_a_plan_of_its_own(key, no_plans):
    devices = jax.local_devices()
    if len(devices) < 2:
        pytest.skip("there is one GPU only")

    @case(((4, 24, 9, 9), "bfloat16"), ((16, 24, 3, 3), "bfloat16"))  # nobody else's plan
    def conv_relu(g, x, w):
        return g.relu(g.conv_fprop(x, w))

    operands = conv_relu.operands(key)
    _, trace = conv_relu.function.trace(*operands)
    function = jax.jit(conv_relu.function)
    before = counters()
    for device in devices:
        result = function(*jax.device_put(operands, device))
        assert result.devices() == {device}
        oracle.check_outputs(trace.spec, operands, [result], on_gpu=True)
    assert counters()["plans_alive"] - before["plans_alive"] == len(devices)
    assert len(planner._plans) == 1, "equal GPUs share one plan text"

    mesh = jax.make_mesh((len(devices),), ("n",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.P("n"), jax.P()
    mapped = jax.jit(
        jax.shard_map(conv_relu.function, mesh=mesh, in_specs=(split, whole), out_specs=split)
    )
    oracle.check_outputs(trace.spec, operands, [mapped(*operands)], on_gpu=True)


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
    done = run_script(EXIT_WITH_PENDING_WORK, flags=flags, timeout=120)
    print(done.stdout[-300:], done.stderr[-2000:])
    assert "exiting" in done.stdout
    assert done.returncode == 0


def test_eight_threads_run_one_executable(key):
    operands = conv_bias_relu.operands(key)
    compiled = jax.jit(conv_bias_relu.function).lower(*operands).compile()
    want = np.asarray(compiled(*operands))
    wrong, failures = [], []

    def work():
        try:
            for i in range(1000):
                result = compiled(*operands)
                if i % 100 == 99:
                    wrong.append(not (np.asarray(result) == want).all())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(wrong) == 80
    assert not any(wrong)
    assert counters()["handles_created"] <= 16
    print(counters())


def test_memory_is_stable_over_200_executables(key):
    operands = matmul_bias_gelu.operands(key)
    device = jax.devices()[0]

    def cycle(number):
        function = jax.jit(lambda *a: matmul_bias_gelu.function(*a) + number)
        jax.block_until_ready(function(*operands))
        del function
        jax.clear_caches()
        return device.memory_stats()["bytes_in_use"], resident_bytes()

    for number in range(20):
        device_before, resident_before = cycle(number)
    before = counters()
    for number in range(200):
        device_after, resident_after = cycle(number)
    after = counters()
    grown = (resident_after - resident_before) / 2**20
    print(f"resident memory grew by {grown:.1f} MiB over 200 cycles")
    assert device_after == device_before
    for name in ("plans_alive", "packs_alive", "call_sites_alive", "handles_created"):
        assert after[name] == before[name], name
    assert after["plans_finalized"] - before["plans_finalized"] == 200, "each cycle made its plan"
    assert grown < 100, "XLA's own programs leave about 0.2 MiB each"


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


EXIT_WITH_A_RUNNING_THREAD = """
    import atexit, sys, threading, jax
    stop = threading.Event()
    import jax_cudnn
    import chain as host
    from cases import conv_bias_relu
    if sys.argv[1] == "captured":
        operands, function = host.operands(), jax.jit(host.ours)
    else:
        operands = conv_bias_relu.operands(jax.random.key(0))
        function = jax.jit(conv_bias_relu.function.with_options(implementation="cudnn"))
    jax.block_until_ready(function(*operands))
    started = threading.Event()
    def work(stop=threading.Event()):
        while not stop.is_set():
            jax.block_until_ready(function(*operands))
            started.set()
    threading.Thread(target=work, daemon=True).start()
    started.wait()
    ending = threading.Thread(target=work, args=(stop,), daemon=True)
    ending.start()
    def join():        # as a data loader or a logger does: must still be able to
        stop.set()
        ending.join()
        print("joined")
    atexit.register(join)
    print("exiting")
"""


@pytest.mark.parametrize("kind", ["captured", "single"])
def test_ten_exits_with_live_functions_and_a_running_thread(kind):
    codes = []
    flags = "--xla_gpu_graph_min_graph_size=1"
    for _ in range(2):  # five at a time
        running = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(EXIT_WITH_A_RUNNING_THREAD), kind],
                env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(5)
        ]
        for process in running:
            out, err = process.communicate(timeout=120)
            assert out.split() == ["exiting", "joined"], err[-2000:]
            codes.append(process.returncode)
            if process.returncode:
                print(err[-2000:])
    assert codes == [0] * 10


def test_compute_sanitizer_finds_nothing():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    script = """
        import jax
        from cases import conv_bias_relu, matmul_scale_bias_relu
        for case in (conv_bias_relu, matmul_scale_bias_relu):
            operands = case.operands(jax.random.key(0))
            function = case.function.with_options(implementation="cudnn")
            jax.block_until_ready(jax.jit(function)(*operands))
        print("ran")
    """
    # API errors are how cuda-python asks the driver which functions it has; not memory errors.
    options = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
    done = run_script(script, tool, *options, timeout=500)
    print(done.stdout[:4000], done.stdout[-500:], done.stderr[-1500:])
    assert "ran" in done.stdout
    assert done.returncode == 0
    assert "ERROR SUMMARY: 0 errors" in done.stdout


# -- transformations -----------------------------------------------------------------------------


def loss(*operands):
    return jnp.sum(conv_bias_relu.function(*operands).astype(jnp.float32) ** 2)


def through_scan(x, w, b):
    return jax.lax.scan(lambda c, _: (conv_bias_relu.function(c, w, b), None), x, None, length=3)[0]


TRANSFORMS = {
    "grad": jax.grad(loss, (0, 1, 2)),
    "value_and_grad": jax.value_and_grad(loss, 1),
    "jvp": lambda *a: jax.jvp(conv_bias_relu.function, a, a),
    "vmap": lambda x, w, b: jax.vmap(conv_bias_relu.function, (0, None, None))(x[:, None], w, b),
    "vmap of grad": lambda x, w, b: jax.vmap(jax.grad(loss, 2), (0, None, None))(x[:, None], w, b),
    "scan": through_scan,
    "remat": jax.grad(jax.checkpoint(loss), 1),
    "cond": lambda x, w, b: jax.lax.cond(x[0, 0, 0, 0] < 9, conv_bias_relu.function,
                                         lambda x, w, b: x, x, w, b),
    "inside a jitted function": lambda *a: jax.jit(conv_bias_relu.function)(*a) * 2,
}  # fmt: skip


@pytest.mark.parametrize("what", TRANSFORMS)
def test_transform_agrees_with_the_cpu(what, key):
    operands = conv_bias_relu.operands(key)
    got = jax.jit(TRANSFORMS[what])(*operands)
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        want = jax.jit(TRANSFORMS[what])(*jax.device_put(operands, cpu))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.distance(g, w) < 1e-2, "bfloat16 operands and cotangents"


def test_an_exported_program_runs(key):
    operands = conv_bias_relu.operands(key)
    _, trace = conv_bias_relu.function.trace(*operands)
    checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    exported = jax.export.export(jax.jit(conv_bias_relu.function), disabled_checks=checks)(
        *operands
    )
    oracle.check_outputs(trace.spec, operands, [exported.call(*operands)], on_gpu=True)


@pytest.mark.parametrize("method", ["relu", "gelu_approx_tanh", "sigmoid", "swish", "add"])
def test_nan_is_what_the_reference_says(method):
    x = jnp.array([[jnp.nan, 1.0, -1.0, jnp.inf, -jnp.inf, 0.0, 2.0, -2.0]], jnp.float32)
    function = jc.graph(lambda g, x: getattr(g, method)(*[x] * (2 if method == "add" else 1)))
    got = jax.jit(function)(x)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = jax.jit(function)(np.asarray(x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_empty_arrays_run():
    assert jax.jit(jc.graph(lambda g, x: g.relu(x)))(jnp.ones((2, 0, 4))).shape == (2, 0, 4)


def test_float32_products_at_highest_precision_are_refused_in_words(key):
    x = jax.random.normal(key, (1, 64, 64))
    product = jc.graph(lambda g, x: g.matmul(x, x))
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(jc.UnsupportedGraphError, match="TF32"),
    ):
        jax.jit(product)(x)


# -- plans from elsewhere ------------------------------------------------------------------------


def planned(case, operands):
    (plan,) = jc.plan(case.function, *operands).execution_plans
    return plan


def run_plan(plan, case, operands):
    _, trace = case.function.trace(*operands)
    call = jax.jit(lambda *a: ffi.call(plan, trace.spec, case.name, *a))
    return jax.block_until_ready(call(*operands))


def test_a_plan_built_without_a_gpu_runs_on_one(key):
    operands = conv_bias_relu.operands(key)
    _, trace = conv_bias_relu.function.trace(*operands)
    with jc.target("H200"):
        (got,) = jax.tree.leaves(jax.jit(conv_bias_relu.function)(*operands))
    oracle.check_outputs(trace.spec, operands, [got], on_gpu=True)


def test_a_plan_for_another_gpu_is_refused_in_words(key):
    h200 = profiles.get("H200")
    text = h200.properties_json.replace("NVIDIA H200", "NVIDIA H200 NVL")
    other = dataclasses.replace(h200, name="other", properties_json=text)
    with jc.target(other), pytest.raises(Exception, match="built for NVIDIA H200 NVL") as raised:
        jax.block_until_ready(jax.jit(conv_bias_relu.function)(*conv_bias_relu.operands(key)))
    for word in ("conv_bias_relu", "this device is NVIDIA H200", "ower the function again"):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cudnn_version": 91300}, ("cuDNN 9.13.0", "has loaded cuDNN", "libcudnn")),
        ({"text": '{"cudnnVersion": 1}'}, ("finalize a plan", "lower the function again")),
    ],
    ids=["another cuDNN", "no plan at all"],
)
def test_a_foreign_plan_is_refused_before_anything_runs(key, change, words):
    operands = conv_bias_relu.operands(key)
    plan = planned(conv_bias_relu, operands)
    with pytest.raises(Exception, match="conv_bias_relu") as raised:
        run_plan(dataclasses.replace(plan, **change), conv_bias_relu, operands)
    print(raised.value)
    assert all(word in str(raised.value) for word in words)


def test_operand_sizes_are_checked_before_anything_runs(key):
    operands = conv_bias_relu.operands(key)
    plan = planned(conv_bias_relu, operands)
    rows = [(uid, kind, value, size * 2) for uid, kind, value, size in plan.bindings]
    with pytest.raises(Exception, match="bytes, its plan was built for"):
        run_plan(dataclasses.replace(plan, bindings=tuple(rows)), conv_bias_relu, operands)


def test_plan_text_names_the_model_and_not_the_card(key, no_plans):
    operands = conv_bias_relu.operands(key)
    first = planned(conv_bias_relu, operands)
    planner.clear()
    second = planned(conv_bias_relu, operands)
    assert first is not second
    assert first.text == second.text
    for field in ("pciDeviceId", "cudaDeviceId", "totalGlobalMem"):
        assert f'"{field}":0' in first.text
    assert first.device_name == jax.devices()[0].device_kind


def test_workspace_is_filled_before_a_run(key):
    """Fills are rare in cuDNN's plans, so the memsets are shown on rows of our own."""
    operands = conv_bias_relu.operands(key)
    plan = planned(conv_bias_relu, operands)
    _, trace = conv_bias_relu.function.trace(*operands)
    size, at = 1024, -(-plan.workspace_bytes // 256) * 256
    filled = dataclasses.replace(
        plan,
        workspace_bytes=at + size,
        fills=((at, 1, 100, 7), (at + 100, 4, 2, 0x3F800000), (at + 108, 1, 1, 255)),
    )

    @jax.jit
    def call(*operands):
        results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in trace.spec.output_tensors]
        workspace = jax.ShapeDtypeStruct((filled.workspace_bytes,), jnp.uint8)
        channels_last = (0, 2, 3, 1)
        return jax.ffi.ffi_call(
            ffi.TARGET,
            [*results, workspace],
            input_layouts=[channels_last] * 3,
            output_layouts=[channels_last, (0,)],
        )(*operands, **filled.attributes("fills"))

    _, workspace = call(*operands)
    got = np.asarray(workspace)[at:]
    assert (got[:100] == 7).all()
    assert got[100:108].view(np.float32).tolist() == [1.0, 1.0]
    assert got[108] == 255


def test_another_cudnn_on_the_library_path_changes_nothing():
    found = [p for p in map(Path, SYSTEM_FOLDERS) if (p / "libcudnn.so.9").exists()]
    if not found:
        pytest.skip("there is no second cuDNN on this machine")
    script = f"""
        import os
        os.environ["LD_LIBRARY_PATH"] = {str(found[0])!r}   # read by cuDNN's frontend
        import jax, jax_cudnn as jc
        from jax_cudnn._core import ffi
        from jax_cudnn._core.planning import frontend
        from cases import conv_bias_relu
        operands = conv_bias_relu.operands(jax.random.key(0))
        function = conv_bias_relu.function.with_options(implementation="cudnn")
        jax.block_until_ready(jax.jit(function)(*operands))
        print(frontend.loaded_paths(), ffi.library().JaxCudnnLoadedPath())
        assert frontend.load().backend_version() == ffi.library().JaxCudnnLoadedVersion()
    """
    done = run_script(script)
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0


SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
