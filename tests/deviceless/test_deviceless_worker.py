"""Planning without a GPU: profiles, the worker subprocess, and how it dies."""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jax_cudnn._core import errors
from jax_cudnn.deviceless import Profile, call, client, environment, profiles

# The worker imports this file under this name; it gets our sys.path.
HERE = "test_deviceless_worker"
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("cudnn") is None:
    _missing = "nvidia-cudnn-frontend is not installed"
elif not environment.null_driver().is_file():
    _missing = f"the null driver is not built: {environment.null_driver()}"
else:
    _missing = ""


def deviceless(test):
    return pytest.mark.deviceless(pytest.mark.skipif(bool(_missing), reason=_missing)(test))


# ---- these run in the worker ----------------------------------------------------------------
def plan_conv_bias_relu(profile: Profile) -> tuple[str, int, int]:
    import cudnn

    bf16, f32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=bf16,
        intermediate_data_type=f32,
        compute_data_type=f32,
        device_property=cudnn.create_device_properties(profile.properties_json),
        sm_version=profile.sm_version,
    )
    n, c, h, w, k = 8, 64, 56, 56, 32
    x = graph.tensor(name="x", dim=[n, c, h, w], stride=[h * w * c, 1, w * c, c])
    f = graph.tensor(name="f", dim=[k, c, 3, 3], stride=[9 * c, 1, 3 * c, c])
    b = graph.tensor(name="b", dim=[1, k, 1, 1], stride=[k, 1, k, k])
    y = graph.conv_fprop(x, f, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    graph.relu(graph.bias(y, b)).set_output(True)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph.get_plan_name_at_index(0), graph.get_workspace_size(), len(graph.serialize())


def plan_layernorm(profile: Profile) -> tuple[int, int]:
    """How many candidates there are, and how many of them can be built."""
    import cudnn

    bf16, f32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=bf16,
        intermediate_data_type=f32,
        compute_data_type=f32,
        device_property=cudnn.create_device_properties(profile.properties_json),
        sm_version=profile.sm_version,
    )
    m, n = 8192, 4096
    x = graph.tensor(name="x", dim=[m, n, 1, 1], stride=[n, 1, 1, 1])
    scale = graph.tensor(name="scale", dim=[1, n, 1, 1], stride=[n, 1, 1, 1])
    bias = graph.tensor(name="bias", dim=[1, n, 1, 1], stride=[n, 1, 1, 1])
    epsilon = graph.tensor(
        name="e", dim=[1] * 4, stride=[1] * 4, is_pass_by_value=True, data_type=f32
    )
    phase = cudnn.norm_forward_phase.TRAINING
    y, mean, inv = graph.layernorm(
        name="ln", norm_forward_phase=phase, input=x, scale=scale, bias=bias, epsilon=epsilon
    )
    y.set_output(True)
    mean.set_output(True).set_data_type(f32)
    inv.set_output(True).set_data_type(f32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    built = 0
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
            built += 1
        except Exception as error:
            print(f"plan {index}: {error}")
    return graph.get_execution_plan_count(), built


def worker_facts() -> dict:
    driver = ctypes.CDLL("libcuda.so.1")  # whatever has this name here
    return {
        "pid": os.getpid(),
        "cuInit": driver.cuInit(0),
        "main": sys.modules["__main__"].__file__,
        "platforms": os.environ["JAX_PLATFORMS"],
        "path": [p for p in sys.path if p],
    }


def crash(number: int) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), number)
    time.sleep(60)


def leave(code: int) -> None:
    os._exit(code)


def noise(size: int) -> str:
    print("x" * size, flush=True)
    os.write(1, b"y" * size)
    os.write(2, b"z" * size)
    ctypes.CDLL(None).puts(b"from C")
    return "clean"


def fail(kind: str):
    if kind == "value":
        raise ValueError("from the worker", 3)
    if kind == "ours":
        error = errors.UnsupportedGraphError("no engine", expected="e", got="g", fix="f")
        error.reasons = {"eng3": "wrong dtype"}
        raise error
    if kind == "exit":
        sys.exit(3)
    if kind == "result":
        return lambda: None

    class Local(Exception):
        pass

    raise Local("does not pickle")


def echo(value, delay: float = 0.0):
    time.sleep(delay)
    return value


def meet(number: int) -> int:
    """Waits for the same call with the other number (0 and 1) in another worker."""
    folder = Path(tempfile.gettempdir()) / f"meet-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    (folder / str(number)).touch()
    deadline = time.monotonic() + 30
    while not (folder / str(1 - number)).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody came")
        time.sleep(0.01)
    return os.getpid()


# ---- profiles -------------------------------------------------------------------------------
def test_h200_profile():
    h200 = profiles.get("H200")
    assert (h200.name, h200.sm_version, h200.device_name) == ("H200", 90, "NVIDIA H200")
    assert profiles.get("h200") is h200
    assert profiles.get("NVIDIA H200") is h200
    assert hash(h200) == hash(Profile(*[getattr(h200, f) for f in h200.__dataclass_fields__]))
    properties = json.loads(h200.properties_json)
    assert properties["multiProcessorCount"] == 132
    assert properties["memoryBusWidth"] == 6144
    assert "H200" in profiles.names()


PUBLIC = {
    "A100": (80, 108, 166912, "NVIDIA A100-SXM4-80GB"),
    "H100": (90, 132, 232448, "NVIDIA H100 80GB HBM3"),
    "B200": (100, 148, 232448, "NVIDIA B200"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_profiles_from_public_specifications_say_so(name):
    profile = profiles.get(name)
    properties = json.loads(profile.properties_json)
    assert PUBLIC[name] == (
        profile.sm_version,
        properties["multiProcessorCount"],
        properties["maxSharedMemoryPerBlockOptin"],
        profile.device_name,
    )
    assert not profile.measured
    assert profiles.get(profile.device_name) is profile
    content = json.loads((profiles._FOLDER / f"{name.lower()}.json").read_text())
    assert "from public specifications, not read on a device" in content["source"]["note"]
    # Every figure has a source, and every profile the fields of the one that was read.
    sourced = ", ".join(key for key in content["source"] if key != "note").split(", ")
    described = {*properties} - {"deviceVer"}  # the compute capability itself
    assert sorted(sourced) == sorted(described)
    assert {*properties} == {*json.loads(profiles.get("H200").properties_json)}
    assert profile.sm_version == int(content["compute_capability"].replace(".", "")[:3])


def test_h200_is_the_measured_one_and_the_oldest_architecture_comes_first():
    assert [p.name for p in profiles.shipped() if p.measured] == ["H200"]
    assert [p.name for p in profiles.shipped()] == ["A100", "H100", "H200", "B200"]


def test_unknown_profile_lists_the_known():
    with pytest.raises(errors.TargetError, match="H200") as caught:
        profiles.get("H2000")
    assert "from_json" in str(caught.value)


def test_profile_of_ones_own(tmp_path):
    own = {"deviceName": "NVIDIA X", "deviceVer": 1030, "multiProcessorCount": 7}
    from_text = Profile.from_json(json.dumps(own))
    assert (from_text.name, from_text.sm_version) == ("NVIDIA X", 103)
    assert json.loads(from_text.properties_json)["smCountOrigin"] == 0
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"name": "X", "properties": own}))
    assert Profile.from_json(path).name == "X" == Profile.from_json(str(path)).name
    assert Profile.from_json(path).properties_json == from_text.properties_json


@pytest.mark.parametrize("bad", ["nowhere.json", "{", '{"deviceName": "x"}', '{"properties": 3}'])
def test_bad_profile(bad):
    with pytest.raises(errors.TargetError, match="from_json"):
        Profile.from_json(bad)


# ---- what is missing is said in words ---------------------------------------------------------
def test_embedded_python(monkeypatch):
    for executable in ("", "/opt/blender/blender"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(errors.LibraryError, match="interpreter"):
            environment.python()


def test_missing_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.LibraryError, match="Linux"):
        environment.check()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(environment, "null_driver", lambda: tmp_path / "none.so")
    with pytest.raises(errors.LibraryError, match="null driver"):
        environment.check()
    monkeypatch.setattr(environment, "null_driver", lambda: Path(__file__))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.LibraryError, match=r"jax-cudnn\[cuda12\]"):
        environment.check()


def test_import_is_cheap():
    code = """
        import sys, types
        sys.modules["jax_cudnn"] = package = types.ModuleType("jax_cudnn")  # not its __init__
        package.__path__ = [sys.argv[1]]
        import jax_cudnn.deviceless.client
        assert not {"jax", "numpy", "cudnn", "multiprocessing"} & set(sys.modules)
    """
    run_script(code, str(Path(client.__file__).parents[1]))


# ---- the worker -------------------------------------------------------------------------------
@deviceless
def test_plans_a_convolution():
    name, workspace, size = call(f"{HERE}:plan_conv_bias_relu", profiles.get("H200"))
    assert name.startswith("eng")
    assert workspace >= 0
    assert size > 1000


@deviceless
def test_every_layernorm_candidate_can_be_built():
    # They could not when the null driver said that there is a device.
    candidates, built = call(f"{HERE}:plan_layernorm", profiles.get("H200"))
    assert candidates == built > 0


@deviceless
def test_worker_is_another_process_without_a_gpu():
    facts = call(f"{HERE}:worker_facts")
    assert facts["pid"] != os.getpid()
    assert facts["cuInit"] == 100  # CUDA_ERROR_NO_DEVICE
    assert facts["main"].endswith("worker.py")
    assert facts["platforms"] == "cpu"
    assert call(f"{HERE}:worker_facts")["pid"] == facts["pid"]  # kept alive


@deviceless
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_crash(name):
    with pytest.raises(errors.PlanningWorkerError) as caught:
        call(f"{HERE}:crash", getattr(signal, name))
    text = str(caught.value)
    assert name in text
    assert f"{HERE}:crash" in text
    assert "last words" in text
    assert "next call" in text
    assert call(f"{HERE}:echo", 1) == 1


@deviceless
def test_exit_code_and_death_while_idle():
    with pytest.raises(errors.PlanningWorkerError, match="exit code 7"):
        call(f"{HERE}:leave", 7)
    pid = call("os:getpid")
    os.kill(pid, signal.SIGKILL)
    client._seats[0].worker.process.wait(10)
    assert call("os:getpid") != pid


@deviceless
def test_timeout():
    call(f"{HERE}:echo", 1)
    with pytest.raises(errors.PlanningWorkerError, match=r"0\.5 s"):
        call(f"{HERE}:echo", 1, 60.0, timeout=0.5)
    assert call(f"{HERE}:echo", 2) == 2


@deviceless
def test_prints_do_not_corrupt_and_do_not_block(capfd):
    for _ in range(2):
        assert call(f"{HERE}:noise", 1 << 18) == "clean"
    assert capfd.readouterr() == ("", "")


@deviceless
def test_large_arguments_and_results():
    value = os.urandom(1 << 22)
    assert call(f"{HERE}:echo", value) == value


@deviceless
def test_errors_keep_their_type():
    pid = call("os:getpid")
    with pytest.raises(ValueError, match="from the worker") as value:
        call(f"{HERE}:fail", "value")
    assert value.value.args == ("from the worker", 3)
    assert "in fail" in value.value.__notes__[0]
    with pytest.raises(errors.UnsupportedGraphError) as ours:
        call(f"{HERE}:fail", "ours")
    assert ours.value.reasons == {"eng3": "wrong dtype"}
    assert ours.value.fix == "f"
    with pytest.raises(RuntimeError, match=r"does not pickle"):
        call(f"{HERE}:fail", "local")
    with pytest.raises(SystemExit):
        call(f"{HERE}:fail", "exit")
    with pytest.raises(Exception, match=r"(?i)pickle|local object"):
        call(f"{HERE}:fail", "result")
    with pytest.raises(Exception, match=r"(?i)pickle|local object"):
        call(f"{HERE}:echo", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        call("no_such_module:f")
    with pytest.raises(AttributeError):
        call("os:no_such_function")
    with pytest.raises(ValueError, match=r"package\.module:function"):
        call("os.getpid")
    assert call("os:getpid") == pid  # none of this cost the worker


@deviceless
def test_threads_get_their_own_answers():
    results: dict[int, list] = {}

    def work(start: int) -> None:
        results[start] = [call(f"{HERE}:echo", start + i, 0.005) for i in range(20)]

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1000 * i: list(range(1000 * i, 1000 * i + 20)) for i in range(3)}


@deviceless
def test_workers_run_at_the_same_time_and_end_with_the_block():
    first = call("os:getpid")
    with client.workers(2):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            # Each waits for the other: one worker alone would answer the second too late.
            pids = list(pool.map(lambda i: call(f"{HERE}:meet", i), range(2)))
        assert first in pids
        assert len({*pids}) == 2
    wait_until_gone(next(pid for pid in pids if pid != call("os:getpid")))
    assert call("os:getpid") in pids
    assert len(client._seats) == len(client._free) == 1


@deviceless
def test_interrupt_does_not_leave_an_answer_behind(monkeypatch):
    call(f"{HERE}:echo", 1)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call(f"{HERE}:echo", "late", 1.0)
    assert call(f"{HERE}:echo", "new") == "new"


@deviceless
def test_fork():
    code = """
        import os, sys
        from jax_cudnn.deviceless import call
        first = call("os:getpid")
        pid = os.fork()
        if pid == 0:
            other = call("os:getpid")
            os._exit(0 if other != first else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert call("os:getpid") == first
        print("forked")
    """
    assert "forked" in run_script(code)


@deviceless
def test_worker_ends_when_its_client_exits_or_is_killed():
    code = """
        import sys, time
        from jax_cudnn.deviceless import call
        if __name__ != "__main__":
            print("main was imported again")
        print(call("os:getpid"), flush=True)
        if sys.argv[1] == "busy":
            call("time:sleep", 600)
        time.sleep({"exit": 0}.get(sys.argv[1], 600))
    """
    for how in ("exit", "idle", "busy"):
        client_process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), how],
            stdout=subprocess.PIPE,
            env=script_environment(),
            text=True,
        )
        pid = int(client_process.stdout.readline())
        if how != "exit":
            time.sleep(0.3)
            client_process.kill()
        client_process.communicate()
        wait_until_gone(pid)


# ---- helpers ----------------------------------------------------------------------------------
def script_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def run_script(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until_gone(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")
