"""Planning without a GPU: profiles, the worker subprocess, and how it dies."""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import python

from jax_cudnn._core import errors
from jax_cudnn._core.planning.deviceless import (
    Profile,
    call,
    client,
    profiles,
)

# The worker imports this file under this name; it gets our sys.path.
HERE = "test_deviceless_worker"
if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

deviceless = pytest.mark.deviceless


def worker_facts() -> tuple:
    driver = ctypes.CDLL("libcuda.so.1")  # whatever has this name here
    main = Path(sys.modules["__main__"].__file__).name
    return os.getpid(), driver.cuInit(0), main, os.environ["JAX_PLATFORMS"]


def crash(number: int) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), number)
    time.sleep(60)


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

    class Local(Exception):
        pass

    raise Local("does not pickle")


def echo(value, delay: float = 0.0):
    time.sleep(delay)
    return value


def begin(pipe: str) -> None:
    Path(pipe).write_text("begun")
    time.sleep(600)


def test_profiles_say_whether_they_are_from_public_specifications():
    assert [(p.name, p.sm_version, p.measured) for p in profiles.shipped()] == [
        ("A100", 80, False),
        ("H100", 90, False),
        ("H200", 90, True),
        ("B200", 100, False),
    ]
    names = {*json.loads(profiles.get("H200").properties_json)}
    for profile in profiles.shipped():
        assert {*json.loads(profile.properties_json)} == names
        assert profiles.get(profile.device_name) is profiles.get(profile.name.lower()) is profile


def test_profile_of_ones_own(tmp_path):
    own = {"deviceName": "NVIDIA X", "deviceVer": 1030, "multiProcessorCount": 7}
    from_text = Profile.from_json(json.dumps(own))
    assert (from_text.name, from_text.sm_version) == ("NVIDIA X", 103)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"name": "X", "properties": own}))
    assert Profile.from_json(path) == dataclasses.replace(from_text, name="X")
    with pytest.raises(errors.TargetError, match="H200"):
        profiles.get("H2000")
    for bad in ("nowhere.json", "{", '{"deviceName": "x"}'):
        with pytest.raises(errors.TargetError, match="from_json"):
            Profile.from_json(bad)


def test_missing_parts(monkeypatch, tmp_path):
    for module, name, value, words in (
        (sys, "executable", "/opt/blender/blender", "interpreter"),
        (client, "null_driver", lambda: tmp_path / "none.so", "null driver"),
        (importlib.util, "find_spec", lambda name: None, r"jax-cudnn\[cuda12\]"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(client, "null_driver", lambda: Path(__file__))
            patch.setattr(module, name, value)
            with pytest.raises(errors.LibraryError, match=words):
                client.check() if name != "executable" else client.python()


@deviceless
def test_worker_is_another_process_without_a_gpu():
    pid, *facts = call(f"{HERE}:worker_facts")
    assert facts == [100, "worker.py", "cpu"]  # CUDA_ERROR_NO_DEVICE, or some plans cannot be built
    assert pid == call("os:getpid") != os.getpid()  # kept alive


@deviceless
def test_a_worker_that_ends_is_told_and_another_takes_its_place():
    for name in ("SIGSEGV", "SIGKILL"):
        with pytest.raises(errors.PlanningWorkerError, match=name) as caught:
            call(f"{HERE}:crash", getattr(signal, name))
        text = str(caught.value)
        assert all(word in text for word in (f"{HERE}:crash", "last words", "next call"))
        assert call(f"{HERE}:echo", 1) == 1
    pid = call("os:getpid")
    os.kill(pid, signal.SIGKILL)  # while it is idle
    client._idle[0].process.wait(10)
    assert call("os:getpid") != pid
    with pytest.raises(errors.PlanningWorkerError, match=r"0\.5 s"):
        call(f"{HERE}:echo", 1, 60.0, timeout=0.5)
    assert call(f"{HERE}:echo", 2) == 2


@deviceless
def test_errors_keep_their_type_and_prints_do_not_corrupt_and_do_not_block(capfd):
    for _ in range(2):
        assert call(f"{HERE}:noise", 1 << 18) == "clean"
    assert capfd.readouterr() == ("", "")
    pid = call("os:getpid")
    with pytest.raises(ValueError, match="from the worker") as value:
        call(f"{HERE}:fail", "value")
    assert value.value.args == ("from the worker", 3)
    assert "in fail" in value.value.__notes__[0]
    with pytest.raises(errors.UnsupportedGraphError) as ours:
        call(f"{HERE}:fail", "ours")
    assert ours.value.reasons == {"eng3": "wrong dtype"}
    assert ours.value.fix == "f"
    for kind, function, *arguments, words in (
        (RuntimeError, f"{HERE}:fail", "local", "does not pickle"),
        (ModuleNotFoundError, "no_such_module:f", "no_such"),
    ):
        with pytest.raises(kind, match=words):
            call(function, *arguments)
    assert call("os:getpid") == pid  # none of this cost the worker


@deviceless
def test_threads_get_their_own_answers_of_several_workers():
    first = call("os:getpid")
    with client.workers(2):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            found = pool.map(lambda i: call(f"{HERE}:echo", i, 0.002 * (i % 3)), range(60))
        assert [*found] == [*range(60)]
        pids = [worker.process.pid for worker in client._idle]
        assert first in pids
    assert len({*pids}) == 2
    wait_until_gone(next(pid for pid in pids if pid != call("os:getpid")))


@deviceless
def test_interrupt_does_not_leave_an_answer_behind():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    call(f"{HERE}:echo", 1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call(f"{HERE}:echo", "late", 60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert call(f"{HERE}:echo", "new") == "new"


@pytest.mark.long
@deviceless
def test_fork():
    python("""
        import os
        from jax_cudnn._core.planning.deviceless import call
        first = call("os:getpid")
        pid = os.fork()
        if pid == 0:
            other = call("os:getpid")
            os._exit(0 if other != first else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert call("os:getpid") == first
    """)


@pytest.mark.long
@deviceless
@pytest.mark.parametrize("busy", [False, True])
def test_worker_ends_when_its_client_exits_or_is_killed(tmp_path, busy):
    code = """if True:
        import sys
        from jax_cudnn._core.planning.deviceless import call
        if __name__ != "__main__":
            print("main was imported again")
        print(call("os:getpid"), flush=True)
        if sys.argv[2:]:
            call(sys.argv[1], *sys.argv[2:])
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", code, f"{HERE}:begin", *[str(pipe)] * busy]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    pid = int(process.stdout.readline())
    if busy:
        assert pipe.read_text() == "begun"
        process.kill()
    process.communicate()
    wait_until_gone(pid)


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
